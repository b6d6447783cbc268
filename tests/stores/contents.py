"""All that a store holds, as plain values: names, attributes, versions, uploads, keys, and hashes of contents."""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec
from blake3 import blake3

from lakefs.client.blocking.lake import Lake
from lakefs.client.facade import driver_of
from lakefs.get.objects import open_object
from lakefs.names import Name
from lakefs.steps.steps import send
from lakefs.wire import messages as m

M = TypeVar("M", bound=m.Message)
_OBJECT: Final = 2
_KEYS: Final = (b"a", b"b" * 64, b"removed")
"""Keys that are looked up in every space."""
SHORT_LIVED: Final = "short-lived"
"""A space whose values expire some day; it is not described."""


def contents_of(lake: Lake) -> dict[str, Any]:
    """Return everything in the store, as JSON has it (bytes in base64)."""
    found = {
        "buckets": {bucket.name: _bucket(lake, bucket) for bucket in lake.buckets()},
        "spaces": [
            _space(lake, space) for space in _ask(lake, m.SpaceList(), m.Spaces).spaces if space.name != SHORT_LIVED
        ],
        "access_keys": [lake.find_access_key(key.access_key) for key in lake.access_keys()],
    }
    described: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(_plain(found)))
    return described


def _plain(value: object) -> object:
    """Return messages as maps, so that a field appended by a later release changes none of the older ones."""
    if isinstance(value, msgspec.Struct):
        return {field: _plain(getattr(value, field)) for field in value.__struct_fields__}
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


def _ask(lake: Lake, request: m.Request, answer: type[M]) -> M:
    message = driver_of(lake).run(send(request)).message
    assert isinstance(message, answer), message
    return message


def _bucket(lake: Lake, bucket: m.BucketStat) -> dict[str, Any]:
    names = [entry.key for entry in lake.ls(f"{bucket.name}/", folders=True)]
    versions = _ask(lake, m.ListVersions(bucket.name), m.ListedVersions)
    assert not versions.next_after, "one page holds all"
    uploads = list(lake.uploads(f"{bucket.name}/"))
    return {
        "settings": bucket,
        "names": {key: _described(lake, Name(bucket.name, key), "") for key in names},
        "versions": [
            (entry, _described(lake, Name(bucket.name, entry.key), entry.version)) for entry in versions.entries
        ],
        "uploads": [(upload, _parts(lake, bucket.name, upload)) for upload in uploads],
    }


def _space(lake: Lake, space: m.SpaceStat) -> dict[str, Any]:
    matched = _ask(lake, m.KeyedMatch(space.number, list(_KEYS)), m.KeyedMatched)
    digests = [blake3(lake.chunks.get(chunk)).hexdigest() for chunk in matched.chunks]
    return {"space": space, "counts": matched.counts, "lengths": matched.lengths, "blake3": digests}


def _described(lake: Lake, name: Name, version: str) -> dict[str, Any]:
    asked = m.StatNames([(name.bucket, name.key)], versions=[version] if version else [])
    stat = _ask(lake, asked, m.NameResults).results[0].stat
    assert stat is not None, name
    found: dict[str, Any] = {"stat": stat}
    if stat.kind == _OBJECT and not stat.is_marker:
        driver = driver_of(lake)
        opened = driver.run(open_object(driver.steps.access(None), name, version=version))
        found["blake3"] = blake3(driver.run(driver.steps.read(opened, 0, stat.size_bytes))).hexdigest()
        driver.run(driver.steps.close(opened))
    if stat.upload:
        found["parts"] = _ask(lake, m.UploadedParts(stat.upload), m.ObjectParts)
    return found


def _parts(lake: Lake, bucket: str, upload: m.UploadEntry) -> list[m.PartStat]:
    return _ask(lake, m.UploadParts(bucket, upload.key, upload.upload, layouts=True), m.Parts).parts

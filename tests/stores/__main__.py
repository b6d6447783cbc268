"""`python -m tests.stores VERSION`: write the store of a format version, and a list of what it holds, beside it.

Run this once for each format version, and for each feature that the format gets, with the release that has it.  What is
committed is never written again, because the tests are about stores that past releases have written.  VERSION names the
files: `v1` for format version 1, `v1keyed` for the same with keyed blobs.

Two archives: `VERSION-stopped` after a clean stop, with a checkpoint; `VERSION-killed` as a process that was killed
leaves it, with the same contents.
"""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from engine.process.embedded import open_lake
from lakefs.client.blocking.lake import Lake
from lakefs.client.facade import driver_of
from lakefs.limits import CHUNK_BYTES, GRANULE_BYTES, KEYED_TTL_S_MAX, MIB
from lakefs.steps.steps import send
from lakefs.wire import messages as m
from tests.stores.contents import SHORT_LIVED, contents_of

FOLDER = Path(__file__).parent
_TIME_NS = 1_700_000_000_123_456_789
_KEPT_FOLDERS = ("folder/", "empty/")


def content(label: str, length: int) -> bytes:
    """Return bytes that a label stands for: no two pages alike, and small when compressed."""
    pages = (f"{label} {number:08d}\n".encode() * 100 for number in range(length // 900 + 1))
    return b"".join(pages)[:length]


def safetensors(tensors: dict[str, int]) -> bytes:
    """Return a safetensors file of tensors of so many bytes."""
    rows: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, length in tensors.items():
        rows[name] = {"dtype": "U8", "shape": [length], "data_offsets": [at, at + length]}
        at += length
    header = json.dumps(rows).encode()
    bodies = b"".join(content(name, length) for name, length in tensors.items())
    return len(header).to_bytes(8, "little") + header + bodies


def fill(lake: Lake) -> None:
    """Store one of each kind of thing that this release can hold, and traces of what it holds no longer."""
    _objects(lake)
    _folders_and_links(lake)
    _versions(lake)
    _uploads(lake)
    _keyed(lake)
    lake.create_access_key()
    lake.create_access_key(buckets=["plain", "versioned"], read_only=True)
    revoked = lake.create_access_key()
    lake.remove_access_key(revoked.access_key)
    lake.set_bucket("plain", anonymous_read=True)


def _objects(lake: Lake) -> None:
    lake.create_bucket("empty-bucket")
    lake.create_bucket("plain")
    lake.put("plain/empty", b"")
    lake.put("plain/packed", content("packed", 5000))
    lake.put("plain/last packed", content("last packed", GRANULE_BYTES - 1))
    lake.put("plain/granule", content("granule", GRANULE_BYTES))
    lake.put("plain/granules", content("granules", 3 * GRANULE_BYTES + 17))
    lake.put("plain/chunk", content("chunk", CHUNK_BYTES))
    lake.put("plain/with a manifest", content("manifest", 2 * CHUNK_BYTES + 4711))
    lake.put("plain/same again", content("chunk", CHUNK_BYTES))
    lake.put("plain/model.safetensors", safetensors({"big": 2 * MIB, "a": 100, "b": 70_000, "next": MIB}))
    lake.put("plain/" + "long" * 200, b"a name that is split")
    lake.put("plain/a//odd/../key/", b"a key that no path can say")
    lake.put("plain/é €", b"not ASCII")
    lake.put("plain/overwritten", content("before", 100_000))
    lake.put("plain/overwritten", content("after", 90_000))
    lake.put("plain/removed", content("removed", 200_000))
    lake.remove("plain/removed")
    attributes = m.ObjectAttributes(
        mode=0o600,
        uid=1000,
        gid=1001,
        mtime_ns=_TIME_NS,
        content_type="text/plain",
        user_metadata={"colour": "blue"},
        headers={"cache-control": "no-cache"},
        checksums={"crc32c": b"\x01\x02\x03\x04"},
        xattrs={"user.note": b"\x00binary\xff"},
        atime_ns=_TIME_NS + 5,
        tags={"team": "storage", "empty": ""},
    )
    body = content("attributes", 1000)
    change = m.NameChange("plain", "with attributes", b"", attributes)
    driver_of(lake).run(send(m.PutObjects([len(body)], [change]), [body]))


def _folders_and_links(lake: Lake) -> None:
    for folder in _KEPT_FOLDERS:
        lake.make_folder(f"plain/{folder}")
    lake.put("plain/folder/below/deep", content("deep", 300))
    lake.put("plain/moved/one", content("moved", 70_000))
    lake.move("plain/moved/", "plain/folder/moved here/")
    lake.copy("plain/granules", "plain/folder/copied")
    change = m.SetAttributes("plain", "folder/", mode=0o750, mtime_ns=_TIME_NS, xattrs={"user.kind": b"folder"})
    driver = driver_of(lake)
    driver.run(send(change))
    plain = m.ObjectAttributes(mode=0o777, mtime_ns=_TIME_NS)
    driver.run(send(m.MakeSymlink("plain", "folder/link", b"../packed", plain)))


def _versions(lake: Lake) -> None:
    lake.create_bucket("versioned")
    lake.put("versioned/before any", b"null, from before")
    lake.set_bucket("versioned", versioning="enabled")
    lake.put("versioned/before any", b"the first with an id")
    for number in range(3):
        lake.put("versioned/many", content(f"version {number}", 30_000 * (number + 1)))
    lake.put("versioned/deleted", content("deleted", 80_000))
    lake.remove("versioned/deleted")
    lake.put("versioned/" + "v" * 600, b"one")
    lake.put("versioned/" + "v" * 600, b"two")
    lake.create_bucket("suspended")
    lake.set_bucket("suspended", versioning="enabled")
    lake.put("suspended/key", b"with an id")
    lake.set_bucket("suspended", versioning="suspended")
    lake.put("suspended/key", b"null")


def _uploads(lake: Lake) -> None:
    attributes = m.ObjectAttributes(content_type="application/octet-stream", user_metadata={"made": "in parts"})
    upload = lake.create_upload("plain/in parts", attributes)
    sizes = (5 * MIB, 5 * MIB, 1000)
    parts = [lake.put_part(upload, number, content(f"part {number}", size)) for number, size in enumerate(sizes, 1)]
    lake.complete_upload(upload, [(part.number, part.etag) for part in parts])
    unfinished = lake.create_upload("plain/unfinished", attributes, details={"storage-class": "STANDARD"})
    lake.put_part(unfinished, 7, content("unfinished", 100_000))
    aborted = lake.create_upload("plain/aborted", attributes)
    lake.put_part(aborted, 1, content("aborted", 1000))
    lake.abort_upload(aborted)


def _keyed(lake: Lake) -> None:
    driver = driver_of(lake)

    def ask(request: m.Request, *body: bytes) -> m.Message:
        return driver.run(send(request, list(body))).message

    def opened(name: str, **settings: int) -> int:
        stat = ask(m.SpaceOpen(name, settings.get("quota_bytes"), settings.get("ttl_s")))
        assert isinstance(stat, m.SpaceStat), stat
        return stat.number

    plain = opened("llama/tp2", quota_bytes=64 * MIB)
    values = [content("one", 100), content("two", GRANULE_BYTES), content("two", 5), content("three", 2 * MIB)]
    request = m.KeyedPut(plain, [b"a", b"b" * 64, b"removed"], [1, 2, 1], [len(part) for part in values], [0, 7, 9])
    ask(request, *values)
    ask(m.KeyedRemove(plain, [b"removed"]))
    ask(m.KeyedPut(opened(SHORT_LIVED, ttl_s=KEYED_TTL_S_MAX), [b"x"], [1], [3]), b"abc")
    ask(m.KeyedPut(opened("gone"), [b"y"], [1], [3]), b"def")
    ask(m.SpaceRemove("gone"))


def pack(store: Path, archive: Path) -> None:
    """Pack the files of a store into an archive; holes are zeros in it, which take next to no room."""
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for path in sorted(store.rglob("*")):
            if path.name != "reserve":
                packed.add(path, str(path.relative_to(store)), recursive=False)


def main() -> int:
    """Make the store, describe it, and pack it as it is while open and when stopped."""
    [version] = sys.argv[1:]
    with TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        with open_lake(store) as lake:
            fill(lake)
            found = contents_of(lake)
            pack(store, FOLDER / f"{version}-killed.tar.xz")
        pack(store, FOLDER / f"{version}-stopped.tar.xz")
    (FOLDER / f"{version}.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

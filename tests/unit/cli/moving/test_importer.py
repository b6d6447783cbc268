"""Imports from a store that is played: ETags, times, answers that break off, and versions."""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, strategies as st

from cli.moving import importer
from cli.moving.etags import BrokenOff, CheckedBody, kept_etag
from cli.moving.importer import BY_SIZE, Callbacks, Importer, ImportOptions, mtime_of
from cli.moving.s3_source import Fetched, Found, S3Source
from engine.process.embedded import open_lake
from lakefs.client.blocking.lake import Lake
from lakefs.client.facade import driver_of
from lakefs.errors import EngineUnreachable, InvalidName, SourceChanged
from lakefs.names import Name
from lakefs.steps.steps import Steps
from lakefs.sync.filters import Rules
from lakefs.sync.report import Done, SyncOutcome

MIB = 1 << 20
STORED_NS = 1_500_000_000_123_000_000


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def etag_of_parts(content: bytes, part_bytes: int) -> str:
    parts = [content[start : start + part_bytes] for start in range(0, len(content), part_bytes)]
    joined = b"".join(hashlib.md5(part).digest() for part in parts)
    return f"{md5(joined)}-{len(parts)}"


@dataclass
class Played:
    """An object of the played store.  `sent`: the bytes that answers have, one after the other; then the content."""

    content: bytes
    etag: str = ""
    part_bytes: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    sent: list[bytes] = field(default_factory=list)

    def found(self, key: str) -> Found:
        return Found(key, len(self.content), self.etag or md5(self.content), STORED_NS)


class Store:
    """A store with `pages`, `fetched`, `tags` and `part_bytes` of `S3Source`."""

    def __init__(self, objects: dict[str, Played]) -> None:
        self.objects = objects
        self.fetches: list[str] = []
        self.versions: list[list[Found]] = []

    def pages(self, prefix: str) -> Iterator[list[Found]]:
        for key in sorted(self.objects):
            if key.startswith(prefix):
                yield [self.objects[key].found(key)]

    def keys_with_versions(self, prefix: str) -> Iterator[list[Found]]:
        yield from self.versions

    @contextmanager
    def fetched(self, found: Found) -> Iterator[Fetched]:
        self.fetches.append(found.key)
        played = self.objects[found.version or found.key]
        sent = played.sent.pop(0) if played.sent else played.content
        yield Fetched(played.fields, played.headers, io.BytesIO(sent))

    def tags(self, found: Found) -> dict[str, str]:
        return self.objects[found.key].tags

    def part_bytes(self, found: Found, count: int) -> int | None:
        return self.objects[found.key].part_bytes


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    folder = tmp_path_factory.mktemp("lake") / "store"
    folder.mkdir()
    with open_lake(folder) as opened:
        yield opened


def imported(
    lake: Lake, store: Store, target: str, *, prefix: str = "", versions: bool = False, dry_run: bool = False
) -> dict[str, list[SyncOutcome]]:
    """Import all; return the outcomes of each name, and check what is unchanged against the totals."""
    bucket, _, key = target.partition("/")
    if not lake.exists(f"{bucket}/") and not (dry_run and versions):
        lake.create_bucket(bucket)
    outcomes: dict[str, list[SyncOutcome]] = {}
    callbacks = Callbacks(
        lambda outcome: outcomes.setdefault(outcome.path, []).append(outcome),
        lambda names, size: None,
        lambda: None,
        lambda count: None,
    )
    options = ImportOptions(Rules(), dry_run=dry_run)
    source = cast("S3Source", store)
    one = Importer(source, prefix, Name(bucket, key), [driver_of(lake)], options, callbacks)
    if versions:
        one.run_versions(2)
    else:
        one.run(2)
    return outcomes


def test_an_object_arrives_with_all_that_it_has_and_only_once(lake: Lake) -> None:
    big = bytes(range(256)) * (9 << 12)
    store = Store(
        {
            "p/a": Played(
                b"1",
                fields={
                    "ContentType": "text/x",
                    "Metadata": {"mtime": "1354040105.123456789", "k": "v"},
                    "TagCount": 1,
                },
                headers={"cache-control": "no-store", "server": "x"},
                tags={"t": "1"},
            ),
            "p/big": Played(big, etag_of_parts(big, 5 * MIB), 5 * MIB),
            "p/zero": Played(b""),
            "p//odd/../key": Played(b"2"),
            "other": Played(b"3"),
        }
    )
    assert list(imported(lake, store, "all/k/", prefix="p/", dry_run=True)) == ["/odd/../key", "a", "big", "zero"]
    assert list(lake.ls("all/")) == []
    outcomes = imported(lake, store, "all/k/", prefix="p/")
    assert {(each.done, each.reason) for (each,) in outcomes.values()} == {(Done.COPIED, "")}
    a, large = lake.stat("all/k/a"), lake.stat("all/k/big")
    assert (a.content_type, a.user_metadata["k"], a.headers, a.tags) == (
        "text/x",
        "v",
        {"Cache-Control": "no-store"},
        {"t": "1"},
    )
    assert (a.mtime_ns, large.mtime_ns) == (1_354_040_105_123_456_789, STORED_NS)
    assert (large.etag, lake.get("all/k/big")) == (store.objects["p/big"].etag, big)
    assert [entry.key for entry in lake.ls("all/")] == ["k//odd/../key", "k/a", "k/big", "k/zero"]
    store.fetches.clear()
    store.objects["p/a"] = Played(b"new")
    imported(lake, store, "all/k/", prefix="p/")
    assert store.fetches == ["p/a"], "what is there with its ETag is not fetched again"
    assert lake.get("all/k/a") == b"new"


def test_bytes_without_their_etag_are_not_stored(lake: Lake) -> None:
    big = b"x" * (5 * MIB)
    store = Store(
        {
            "a": Played(b"1", md5(b"2")),
            "big": Played(big, md5(b"else")),
            "parts": Played(big, etag_of_parts(big + b"!", 4 * MIB), 4 * MIB),
            "short": Played(b"123", sent=[b"12"] * 5),
        }
    )
    outcomes = imported(lake, store, "wrong/")
    assert {path: each.done for path, (each,) in outcomes.items()} == dict.fromkeys(store.objects, Done.FAILED)
    assert list(lake.ls("wrong/")) == []


def test_an_etag_that_says_nothing_leaves_the_size_and_is_reported(lake: Lake) -> None:
    store = Store(
        {
            "kms": Played(b"1", md5(b"2"), fields={"ServerSideEncryption": "aws:kms"}),
            "customer": Played(b"1", md5(b"2"), fields={"SSECustomerAlgorithm": "AES256"}),
            "parts": Played(b"12", etag_of_parts(b"12", 1)),
            "odd": Played(b"1", "no-etag"),
        }
    )
    outcomes = imported(lake, store, "bysize/")
    assert {(each.done, each.reason) for (each,) in outcomes.values()} == {(Done.COPIED, BY_SIZE)}
    assert imported(lake, store, "bysize/") == {}


def test_an_answer_that_breaks_off_is_asked_for_again(lake: Lake) -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise ConnectionResetError

    store = Store({"a": Played(b"1"), "never": Played(b"2")})
    fetched = store.fetched

    @contextmanager
    def breaking(found: Found) -> Iterator[Fetched]:
        with fetched(found) as one:
            is_broken = found.key == "never" or store.fetches.count("a") == 1
            yield Fetched(one.fields, one.headers, Broken()) if is_broken else one

    store.fetched = breaking  # type: ignore[method-assign]
    outcomes = imported(lake, store, "broken/")
    assert {path: each.done for path, (each,) in outcomes.items()} == {"a": Done.COPIED, "never": Done.FAILED}
    assert "broke off" in outcomes["never"][0].reason


def test_a_store_that_is_gone_ends_the_import(lake: Lake) -> None:
    store = Store({f"{number:03}": Played(b"1") for number in range(50)})

    def gone(found: Found) -> AbstractContextManager[Fetched]:
        store.fetches.append(found.key)
        raise EngineUnreachable("nothing answers")

    store.fetched = gone  # type: ignore[method-assign,assignment]
    with pytest.raises(EngineUnreachable):
        imported(lake, store, "gone/")
    assert len(store.fetches) < 50


def test_what_ends_an_import_ends_the_objects_under_way(lake: Lake) -> None:
    is_reading, may_go_on = threading.Event(), threading.Event()

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            is_reading.set()
            may_go_on.wait(10)
            return super().read(1 << 20)

    store = Store({"a": Played(b"x" * (30 * MIB)), "b": Played(b"1")})
    fetched = store.fetched
    failure = EngineUnreachable("nothing answers")

    @contextmanager
    def slow_or_gone(found: Found) -> Iterator[Fetched]:
        with fetched(found) as one:
            if found.key == "b":
                is_reading.wait(10)
                threading.Timer(0.2, may_go_on.set).start()
                raise failure
            yield Fetched(one.fields, one.headers, Slow(one.body.read()))

    store.fetched = slow_or_gone  # type: ignore[method-assign]
    with pytest.raises(EngineUnreachable):
        imported(lake, store, "ended/")
    assert list(lake.ls("ended/")) == []


def test_versions_come_in_their_order_and_an_import_goes_on(lake: Lake) -> None:
    store = Store({"v1": Played(b"1"), "v2": Played(b"22"), "v3": Played(b"333")})
    marker = Found("k", 0, "", STORED_NS, "m", is_marker=True)
    versions = [
        Found("k", 1, md5(b"1"), STORED_NS, "v1"),
        marker,
        Found("k", 2, md5(b"22"), STORED_NS + 1, "v2"),
        Found("k", 3, md5(b"333"), STORED_NS + 2, "v3"),
    ]
    lake.create_bucket("versions")
    lake.set_bucket("versions", versioning="enabled")
    store.versions = [versions[:3]]
    assert [each.done for each in imported(lake, store, "versions/", versions=True)["k"]] == [Done.COPIED] * 3
    assert lake.get("versions/k") == b"22"
    store.versions = [versions]
    assert len(imported(lake, store, "versions/", versions=True)["k"]) == 1, "only what is missing"
    assert (lake.get("versions/k"), lake.stat("versions/k").mtime_ns) == (b"333", STORED_NS + 2)
    store.versions = [versions[1:]]
    (outcome,) = imported(lake, store, "versions/", versions=True)["k"]
    assert (outcome.done, "not the source's" in outcome.reason) == (Done.FAILED, True)


def test_a_key_that_is_refused_does_not_end_an_import_of_versions(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store({"v1": Played(b"1")})
    store.versions = [
        [Found("refused", 0, "", STORED_NS, "m", is_marker=True)],
        [Found("k", 1, md5(b"1"), STORED_NS, "v1")],
    ]
    dry = imported(lake, store, "refusing/", versions=True, dry_run=True)
    assert [outcomes[0].done for outcomes in dry.values()] == [Done.COPIED] * 2, "the bucket would be made"
    removed = importer._removed

    def refused(name: Name) -> Steps[None]:
        if name.key == "refused":
            raise InvalidName("no such key")
        return removed(name)

    monkeypatch.setattr(importer, "_removed", refused)
    found = imported(lake, store, "refusing/", versions=True)
    assert {path: outcomes[0].done for path, outcomes in found.items()} == {"refused": Done.FAILED, "k": Done.COPIED}
    assert lake.get("refusing/k") == b"1"


@given(st.binary(max_size=40), st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_a_body_is_checked_however_it_is_read(content: bytes, part_bytes: int, lengths: list[int]) -> None:
    etags = [(md5(content), max(1, len(content))), ("anything", None)]
    if content:
        etags.append((etag_of_parts(content, part_bytes), part_bytes))
    for etag, parts in etags:
        body = CheckedBody(io.BytesIO(content), Found("k", len(content), etag, 0), parts)
        pieces = [body.read(length) for length in lengths]
        assert b"".join([*pieces, body.read()]) == content
        if parts is None:
            continue
        wrong = CheckedBody(io.BytesIO(content), Found("k", len(content), "0" + etag[1:], 0), parts)
        if etag[0] != "0":
            with pytest.raises(SourceChanged):
                wrong.read()


def test_a_body_that_ends_early_is_no_object() -> None:
    with pytest.raises(SourceChanged, match="listed with 3"):
        CheckedBody(io.BytesIO(b"12"), Found("k", 3, md5(b"123"), 0), 3).read()
    assert issubclass(BrokenOff, Exception)


def test_times_are_read_as_rclone_writes_them() -> None:
    assert mtime_of("1354040105.123456789") == 1_354_040_105_123_456_789
    assert mtime_of("1354040105.5") == 1_354_040_105_500_000_000
    assert mtime_of("1354040105") == 1_354_040_105_000_000_000
    assert mtime_of("-1.25") == -1_250_000_000
    for text in ("", "now", "1e9", "12345678901234", "1."):
        assert mtime_of(text) == 0


def test_only_etags_of_known_forms_are_kept() -> None:
    assert kept_etag("0" * 32) == (1, bytes(16))
    assert kept_etag("0" * 32 + "-12") == (2, b"0" * 32 + b"-12")
    assert kept_etag("0" * 32 + "-0") == kept_etag("xyz") == (0, b"")


def test_the_path_of_a_missing_library_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    from cli.moving.s3_source import open_source
    from lakefs.errors import InvalidArgument

    load = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "boto3":
            raise ImportError
        return load(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidArgument, match="needs boto3"):
        open_source("b", endpoint_url=None, region=None, profile=None, anonymous=False, jobs=1)

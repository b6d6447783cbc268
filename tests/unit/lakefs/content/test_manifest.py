"""Manifests: one encoding for one layout, frozen bytes, and every other encoding is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings, strategies as st

from lakefs.content import manifest as manifest_module
from lakefs.content.manifest import (
    MANIFEST_BYTES_MAX,
    MANIFEST_ENTRY,
    MANIFEST_HEADER,
    CutKind,
    Entry,
    Manifest,
    ManifestBuilder,
    ManifestTree,
    build,
    check_child,
    check_top,
    chunk_count,
    derived_etag,
    encode,
    parse,
)
from lakefs.errors import InvalidArgument
from lakefs.ids import (
    EMPTY_BLOB,
    BlobId,
    ChunkId,
    ChunkKind,
    blob_of,
    chunk_of,
    data_chunk_id,
    kind_of,
    manifest_chunk_id,
)
from lakefs.limits import BLOB_BYTES_MAX, CHUNK_BYTES, MANIFEST_FANOUT

A = data_chunk_id(b"a")
B = data_chunk_id(b"b")
SMALL_FANOUT = 3

Chunks = list[tuple[ChunkId, int]]


@contextmanager
def small_fanout() -> Iterator[None]:
    """Make trees of many levels from few chunks."""
    with patch.object(manifest_module, "MANIFEST_FANOUT", SMALL_FANOUT):
        yield


chunk_lists = st.lists(
    st.tuples(st.integers(0, 5).map(lambda number: data_chunk_id(bytes([number]))), st.integers(1, CHUNK_BYTES)),
    max_size=3 * SMALL_FANOUT**3,
)
cut_kinds = st.sampled_from(CutKind)


def tree_by_grouping(cut_kind: CutKind, chunks: Chunks) -> tuple[BlobId, set[ChunkId]]:
    """Return blob and manifests of the canonical tree, the plain way: group whole levels until one entry is left."""
    entries = [Entry(*chunk) for chunk in chunks]
    manifests: set[ChunkId] = set()
    level = 0
    while len(entries) > 1:
        groups = [tuple(entries[at : at + SMALL_FANOUT]) for at in range(0, len(entries), SMALL_FANOUT)]
        entries = []
        for group in groups:
            size_bytes = sum(entry.size_bytes for entry in group)
            chunk = manifest_chunk_id(encode(Manifest(cut_kind, level, size_bytes, group)))
            manifests.add(chunk)
            entries.append(Entry(chunk, size_bytes))
        level += 1
    return (blob_of(entries[0].chunk) if entries else EMPTY_BLOB), manifests


def chunks_below(chunk: ChunkId, size_bytes: int, payloads: dict[ChunkId, bytes]) -> Chunks:
    """Return the layout as a reader walks it, with each manifest checked against its parent."""
    if kind_of(chunk) is ChunkKind.DATA:
        return [(chunk, size_bytes)]
    parent = parse(payloads[chunk])
    found: Chunks = []
    for entry in parent.entries:
        if parent.level:
            check_child(entry, parent, parse(payloads[entry.chunk]))
        found += chunks_below(entry.chunk, entry.size_bytes, payloads)
    return found


def right_side(tree: ManifestTree) -> list[Manifest]:
    """Return the top manifest and the last children below it."""
    payloads = dict(tree.manifests)
    spine = [parse(payloads[chunk_of(tree.blob)])]
    while spine[-1].level:
        spine.append(parse(payloads[spine[-1].entries[-1].chunk]))
    return spine


def header(**changes: object) -> bytes:
    """Return a header of a sound manifest of two entries, with some fields changed."""
    fields: dict[str, object] = {
        "magic": b"LMAN",
        "version": 1,
        "hash_kind": 1,
        "cut_kind": 1,
        "level": 0,
        "size_bytes": 3,
        "entry_count": 2,
        "reserved": bytes(12),
    }
    return MANIFEST_HEADER.pack(*(fields | changes).values())


def rows(*sizes: int) -> bytes:
    """Return entries of these lengths."""
    return b"".join(MANIFEST_ENTRY.pack(A[1:], size) for size in sizes)


# --- frozen bytes ------------------------------------------------------------------------------------

SMALL_PAYLOAD = bytes.fromhex(
    "4c4d414e01010100"  # LMAN, version 1, BLAKE3, fixed cuts, level 0
    "0500400000000000"  # 4 MiB + 5 bytes
    "02000000000000000000000000000000"  # two entries, reserved
    "17762fddd969a453925d65717ac3eea21320b66b54342fde15128d6caf21215f0000400000000000"
    "10e5cf3d3c8a4f9f3468c8cc58eea84892a22fdadbc1acb22410190044c1d5530500000000000000"
)
SMALL_BLOB = "0229d7bb87248db3828368fb6b9b279ef026e7e1c9dadbf6ae98cedf6ab56685c6"


def test_a_small_manifest_has_the_bytes_and_the_id_it_always_had() -> None:
    tree = build(CutKind.FIXED, [(A, CHUNK_BYTES), (B, 5)])
    assert tree.manifests == [(chunk_of(tree.blob), SMALL_PAYLOAD)]
    assert tree.blob.hex() == SMALL_BLOB
    assert (tree.size_bytes, tree.chunk_count) == (CHUNK_BYTES + 5, 2)
    assert derived_etag(tree.blob, tree.chunk_count) == "29d7bb87248db3828368fb6b9b279ef0-2"


def test_a_small_manifest_is_parsed_from_any_buffer() -> None:
    expected = Manifest(CutKind.FIXED, 0, CHUNK_BYTES + 5, (Entry(A, CHUNK_BYTES), Entry(B, 5)))
    padded = memoryview(b"?" + SMALL_PAYLOAD + b"?")
    for payload in (SMALL_PAYLOAD, bytearray(SMALL_PAYLOAD), padded[1:-1]):
        assert parse(payload) == expected
        assert all(type(entry.chunk) is bytes for entry in parse(payload).entries)


def test_one_chunk_past_the_fanout_adds_a_level_with_the_bytes_it_always_had() -> None:
    tree = build(CutKind.SAFETENSORS, [(A, 1)] * (MANIFEST_FANOUT + 1))
    assert tree.blob.hex() == "02e1d7d985c5688466e492628c10c14d5e259b6b1ea2c7f7b6d43fa38521a8b3cd"
    first, last, top = tree.manifests
    assert top[0] == chunk_of(tree.blob)
    assert top[1].hex() == (
        "4c4d414e01010201" + "0120000000000000" + "02000000000000000000000000000000"
        "c6933758251c78fff68fd5ecc04ae8bb6c977c055038d21c759fd10b59d84b6b" + "0020000000000000"
        "9a67c65e691d529bdeb4ba8509d91e1584be5a99f86162ede9b81f6377535b80" + "0100000000000000"
    )
    assert len(first[1]) == MANIFEST_BYTES_MAX
    assert len(last[1]) == MANIFEST_HEADER.size + MANIFEST_ENTRY.size
    assert chunks_below(chunk_of(tree.blob), tree.size_bytes, dict(tree.manifests)) == [(A, 1)] * 8193


def test_a_full_manifest_is_the_top_when_nothing_follows() -> None:
    builder = ManifestBuilder(CutKind.FIXED)
    full = [made for _ in range(MANIFEST_FANOUT) for made in builder.add(A, 1)]
    tree = builder.finish()
    assert [tree.blob] == [blob_of(chunk) for chunk, _ in full]
    assert tree.manifests == [], "what add returned is not returned again"
    assert parse(full[0][1]).level == 0


# --- building ----------------------------------------------------------------------------------------


def test_no_bytes_are_the_empty_blob() -> None:
    assert build(CutKind.FIXED, []) == ManifestTree(EMPTY_BLOB, 0, [], 0)


@pytest.mark.parametrize("cut_kind", CutKind)
def test_a_lone_chunk_is_its_own_blob_however_it_was_cut(cut_kind: CutKind) -> None:
    assert build(cut_kind, [(A, 1)]) == ManifestTree(blob_of(A), 1, [], 1)


def test_other_cuts_of_the_same_bytes_are_another_blob() -> None:
    chunks = [(A, 1), (B, 1)]
    assert len({build(cut_kind, chunks).blob for cut_kind in CutKind}) == len(CutKind)


@given(cut_kinds, chunk_lists)
def test_the_tree_is_the_one_that_grouping_level_by_level_gives(cut_kind: CutKind, chunks: Chunks) -> None:
    with small_fanout():
        tree = build(cut_kind, chunks)
        blob, manifests = tree_by_grouping(cut_kind, chunks)
    assert tree.blob == blob
    assert {chunk for chunk, _ in tree.manifests} == manifests


@given(cut_kinds, chunk_lists)
def test_chunk_by_chunk_and_at_once_give_the_same_tree(cut_kind: CutKind, chunks: Chunks) -> None:
    with small_fanout():
        at_once = build(cut_kind, chunks)
        builder = ManifestBuilder(cut_kind)
        early = [made for chunk in chunks for made in builder.add(*chunk)]
        tree = builder.finish()
    assert replace(tree, manifests=early + tree.manifests) == at_once
    depth = 1 + max((payload[MANIFEST_HEADER.offset_of("level")] for _, payload in at_once.manifests), default=0)
    assert len(tree.manifests) <= depth, "finish has at most one manifest of each level left to make"


@given(cut_kinds, chunk_lists.filter(lambda chunks: len(chunks) > 1))
def test_a_reader_finds_the_chunks_that_were_listed(cut_kind: CutKind, chunks: Chunks) -> None:
    with small_fanout():
        tree = build(cut_kind, chunks)
        top = parse(tree.manifests[-1][1])
        found = chunks_below(chunk_of(tree.blob), tree.size_bytes, dict(tree.manifests))
        counted = chunk_count(*right_side(tree))
    assert found == chunks
    assert chunk_of(tree.blob) == tree.manifests[-1][0], "the top comes last"
    assert top.size_bytes == tree.size_bytes == sum(size for _, size in chunks)
    assert counted == tree.chunk_count == len(chunks)
    check_top(top)


@given(cut_kinds, chunk_lists.filter(bool))
def test_children_come_before_their_parents(cut_kind: CutKind, chunks: Chunks) -> None:
    stored = {chunk for chunk, _ in chunks}
    with small_fanout():
        for chunk, payload in build(cut_kind, chunks).manifests:
            assert manifest_chunk_id(payload) == chunk
            assert {entry.chunk for entry in parse(payload).entries} <= stored
            stored.add(chunk)


@pytest.mark.parametrize(
    ("chunk", "size_bytes"),
    [(A, 0), (A, -1), (A, CHUNK_BYTES + 1), (manifest_chunk_id(b"a"), 1), (chunk_of(EMPTY_BLOB), 0)],
)
def test_what_is_no_data_chunk_of_1_byte_to_4_mib_is_not_listed(chunk: ChunkId, size_bytes: int) -> None:
    builder = ManifestBuilder(CutKind.FIXED)
    with pytest.raises(InvalidArgument, match="data chunks of 1 to"):
        builder.add(chunk, size_bytes)
    assert builder.finish().blob == EMPTY_BLOB, "nothing was appended"


def test_content_past_the_largest_blob_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "BLOB_BYTES_MAX", 10)
    builder = ManifestBuilder(CutKind.FIXED)
    builder.add(A, 6)
    with pytest.raises(InvalidArgument, match="longer than 10 bytes"):
        builder.add(B, 5)
    builder.add(B, 4)
    assert builder.finish().size_bytes == 10


# --- parsing -----------------------------------------------------------------------------------------


@given(cut_kinds, chunk_lists.filter(lambda chunks: len(chunks) > 1))
def test_what_was_encoded_is_parsed_and_encoded_again_alike(cut_kind: CutKind, chunks: Chunks) -> None:
    with small_fanout():
        for _, payload in build(cut_kind, chunks).manifests:
            assert encode(parse(payload)) == payload


@given(st.binary(max_size=200) | st.binary(max_size=168).map(lambda tail: b"LMAN\x01\x01\x01\x00" + tail))
def test_other_bytes_are_refused_as_an_invalid_argument(payload: bytes) -> None:
    with pytest.raises(InvalidArgument):
        parse(payload)


@settings(max_examples=300)
@given(st.integers(0, len(SMALL_PAYLOAD) - 1), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_is_another_manifest_and_never_the_same(at: int, change: int) -> None:
    mutated = bytearray(SMALL_PAYLOAD)
    mutated[at] ^= change
    try:
        parsed = parse(mutated)
    except InvalidArgument:
        return
    assert encode(parsed) == mutated
    assert parsed != parse(SMALL_PAYLOAD)


@pytest.mark.parametrize("nbytes", range(len(SMALL_PAYLOAD)))
def test_a_cut_off_manifest_is_refused(nbytes: int) -> None:
    with pytest.raises(InvalidArgument):
        parse(SMALL_PAYLOAD[:nbytes])


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"", "0 bytes are not"),
        (header(entry_count=0, size_bytes=0), "32 bytes are not"),
        (header() + rows(1, 2) + b"\0", "113 bytes are not"),
        (header(entry_count=MANIFEST_FANOUT + 1) + rows(*[1] * (MANIFEST_FANOUT + 1)), "are not a header and 1 to"),
        (header(magic=b"LMAM") + rows(1, 2), "begins with"),
        (header(version=2) + rows(1, 2), "version 2"),
        (header(version=0) + rows(1, 2), "version 0"),
        (header(hash_kind=2) + rows(1, 2), "hash kind 2"),
        (header(cut_kind=0) + rows(1, 2), "cut kind 0"),
        (header(cut_kind=4) + rows(1, 2), "cut kind 4"),
        (header(level=5) + rows(1, 2), "level 5 is above"),
        (header(level=255) + rows(1, 2), "level 255 is above"),
        (header(reserved=bytes(11) + b"\1") + rows(1, 2), "reserved"),
        (header(entry_count=1) + rows(1, 2), "says 1 entries"),
        (header(entry_count=0) + rows(1, 2), "says 0 entries"),
        (header(entry_count=2**32 - 1) + rows(1, 2), "says 4294967295 entries"),
        (header(size_bytes=4) + rows(1, 2), "says 4 bytes"),
        (header(size_bytes=3) + rows(0, 3), "too short"),
        (header(size_bytes=3) + rows(3, 0), "too short"),
        (header(size_bytes=CHUNK_BYTES + 2) + rows(1, CHUNK_BYTES + 1), "too long for level 0"),
        (header(size_bytes=1) + rows(2**64 - 1, 2), "too long for level 0"),
        (header(level=1, size_bytes=8192) + rows(8191, 1), "too short for level 1"),
        (header(level=1, size_bytes=8193) + rows(8193, 0), "too short for level 1"),
        (header(level=1, size_bytes=2**35 + 2) + rows(2**35 + 1, 1), "too long for level 1"),
        (header(level=4, size_bytes=2**62 + 1) + rows(2**62, 1), "more than a blob may have"),
        (header(level=4, size_bytes=2**64 - 1) + rows(2**64 - 2, 1), "more than a blob may have"),
        (header(level=4, size_bytes=0) + rows(2**63, 2**63), "it says 0 bytes"),
    ],
)
def test_a_hostile_manifest_is_refused_with_the_reason(payload: bytes, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        parse(payload)


@pytest.mark.parametrize(
    "payload",
    [
        header() + rows(1, 2),
        header(entry_count=1) + rows(3),
        header(size_bytes=2 * CHUNK_BYTES) + rows(CHUNK_BYTES, CHUNK_BYTES),
        header(level=1, size_bytes=8193) + rows(8192, 1),
        header(level=1, size_bytes=2**35 + 1) + rows(2**35, 1),
        header(level=4, size_bytes=BLOB_BYTES_MAX) + rows(BLOB_BYTES_MAX - 1, 1),
    ],
)
def test_a_manifest_at_its_bounds_is_accepted(payload: bytes) -> None:
    assert encode(parse(payload)) == payload


def test_entries_above_level_0_are_manifests() -> None:
    assert {kind_of(entry.chunk) for entry in parse(header() + rows(1, 2)).entries} == {ChunkKind.DATA}
    upper = parse(header(level=1, size_bytes=8193) + rows(8192, 1))
    assert {kind_of(entry.chunk) for entry in upper.entries} == {ChunkKind.MANIFEST}


# --- where a manifest may stand ----------------------------------------------------------------------


def test_a_top_manifest_of_one_entry_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least two"):
        check_top(parse(header(entry_count=1) + rows(3)))


@pytest.mark.parametrize(
    ("child", "why"),
    [
        (Manifest(CutKind.FIXED, 0, 2, (Entry(A, 1), Entry(B, 1))), "has 2 entries and is not the last"),
        (Manifest(CutKind.FIXED, 0, 4, (Entry(A, 1),) * 4), "it has 4"),
        (Manifest(CutKind.PARTS, 0, 3, (Entry(A, 1),) * 3), "cut kind PARTS stands below FIXED"),
        (Manifest(CutKind.FIXED, 1, 3, (Entry(A, 1),) * 3), "level 1 stands below level 1"),
    ],
)
def test_a_child_that_is_not_what_its_parent_says_is_refused(child: Manifest, why: str) -> None:
    size_bytes = child.size_bytes if "last" in why else 3
    entry = Entry(manifest_chunk_id(b"child"), size_bytes)
    parent = Manifest(CutKind.FIXED, 1, size_bytes + 1, (entry, Entry(manifest_chunk_id(b"last"), 1)))
    with small_fanout(), pytest.raises(InvalidArgument, match=why) as refusal:
        check_child(entry, parent, child)
    assert refusal.value.subject == f"m:{entry.chunk[1:].hex()}"


def test_a_short_last_child_is_accepted_unless_the_same_stands_before_it_too() -> None:
    child = Manifest(CutKind.FIXED, 0, 2, (Entry(A, 1), Entry(B, 1)))
    entry = Entry(manifest_chunk_id(encode(child)), 2)
    full = Entry(manifest_chunk_id(b"full"), 3)
    with small_fanout():
        check_child(entry, Manifest(CutKind.FIXED, 1, 5, (full, entry)), child)
        with pytest.raises(InvalidArgument, match="not the last"):
            check_child(entry, Manifest(CutKind.FIXED, 1, 4, (entry, entry)), child)


# --- ETag --------------------------------------------------------------------------------------------


def test_the_empty_blob_has_the_etag_that_s3_gives_an_empty_object() -> None:
    assert derived_etag(EMPTY_BLOB, 0) == "d41d8cd98f00b204e9800998ecf8427e"


def test_a_lone_chunk_has_a_derived_etag_of_one_part() -> None:
    assert derived_etag(blob_of(A), 1) == "17762fddd969a453925d65717ac3eea2-1"

"""Ids: each follows from the bytes that it names, and no bytes of a user can have a manifest's id."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lakefs.content.manifest import CutKind, build
from lakefs.ids import (
    EMPTY_BLOB,
    ID_BYTES,
    ChunkId,
    ChunkKind,
    blob_of,
    chunk_id_of,
    chunk_of,
    data_chunk_id,
    id_text,
    is_well_formed,
    kind_of,
    manifest_chunk_id,
    new_id16,
)


def test_a_data_chunk_is_named_by_its_kind_and_plain_blake3() -> None:
    # BLAKE3 of no bytes is the first published test vector.
    assert EMPTY_BLOB.hex() == "01af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert data_chunk_id(b"a").hex() == "0117762fddd969a453925d65717ac3eea21320b66b54342fde15128d6caf21215f"


def test_a_manifest_chunk_is_named_in_a_context_of_its_own() -> None:
    # Frozen: a change of context or mode would rename every stored manifest.
    assert manifest_chunk_id(b"a").hex() == "020f601ea955837e1439c7ff57a71ee1f9a094446701e301995f1406d5208122de"


@given(st.binary(max_size=300))
def test_the_same_bytes_as_data_and_as_manifest_differ_in_kind_and_digest(payload: bytes) -> None:
    as_data, as_manifest = data_chunk_id(payload), manifest_chunk_id(payload)
    assert kind_of(as_data) is ChunkKind.DATA
    assert kind_of(as_manifest) is ChunkKind.MANIFEST
    assert as_data[1:] != as_manifest[1:]


def test_an_uploaded_copy_of_a_manifest_does_not_have_the_manifests_name() -> None:
    tree = build(CutKind.FIXED, [(data_chunk_id(b"a"), 1), (data_chunk_id(b"b"), 1)])
    (top, payload) = tree.manifests[-1]
    uploaded = build(CutKind.FIXED, [(data_chunk_id(payload), len(payload))])
    assert uploaded.blob != tree.blob == blob_of(top)
    assert uploaded.blob[1:] != tree.blob[1:], "not even with the kind byte forged"


@pytest.mark.parametrize("kind", list(ChunkKind))
def test_an_id_made_by_kind_is_the_one_made_directly(kind: ChunkKind) -> None:
    direct = {ChunkKind.DATA: data_chunk_id, ChunkKind.MANIFEST: manifest_chunk_id}[kind]
    assert chunk_id_of(kind, memoryview(b"payload")) == direct(bytearray(b"payload"))


def test_a_blob_and_its_chunk_name_each_other() -> None:
    chunk = data_chunk_id(b"x")
    assert chunk_of(blob_of(chunk)) == chunk


@pytest.mark.parametrize(
    ("identifier", "well_formed"),
    [
        (bytes(ID_BYTES), False),
        (b"\x01" + bytes(32), True),
        (b"\x02" + bytes(32), True),
        (b"\x03" + bytes(32), False),
        (b"\x01" + bytes(31), False),
        (b"\x01" + bytes(33), False),
        (b"", False),
    ],
)
def test_only_33_bytes_of_a_known_kind_are_well_formed(identifier: bytes, well_formed: bool) -> None:
    assert is_well_formed(identifier) is well_formed


def test_an_unknown_kind_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="3"):
        kind_of(ChunkId(b"\x03" + bytes(32)))


def test_ids_read_as_kind_and_hex() -> None:
    assert id_text(b"\x01" + bytes(32)) == "c:" + "00" * 32
    assert id_text(b"\x02" + bytes(32)) == "m:" + "00" * 32
    assert id_text(bytes(range(16))) == bytes(range(16)).hex()


def test_random_ids_have_16_bytes_and_do_not_repeat() -> None:
    drawn = {new_id16() for _ in range(100)}
    assert len(drawn) == 100
    assert {len(each) for each in drawn} == {16}

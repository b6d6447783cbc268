"""The index: what is written is read back with checks, and damage is found before it is believed."""

from __future__ import annotations

import errno
import struct
from pathlib import Path

import lmdb
import pytest

from engine.format.layouts import Mutation, Op, Table, seal_value
from engine.tables import lmdb_index as index_module
from engine.tables.index_check import Verification, probe
from engine.tables.index_folder import remove_index, replace_index
from engine.tables.lmdb_index import Index
from engine.tables.overlay import Layer
from lakefs.errors import DiskFailed, IndexDamaged, StoreFull
from lakefs.ids import Sequence

RECORDS = {b"key-%03d" % n: b"value %d" % n for n in range(200)}


def layer_of(*mutations: Mutation, sequence: int = 1) -> Layer:
    layer = Layer()
    layer.publish(Sequence(sequence), mutations)
    return layer


def filled(path: Path) -> Index:
    index = Index(path)
    index.apply(layer_of(*[(Op.INSERT, Table.NAMES, key, value) for key, value in RECORDS.items()]), Sequence(1))
    index.refresh()
    return index


def verify(index: Index, step: int = 64) -> int:
    snapshot = index.snapshot()
    try:
        verification = Verification(snapshot)
        while verification.step(step):
            pass
    finally:
        snapshot.close()
    return verification.record_count


def flip_value(path: Path, value: bytes) -> None:
    """Flip one bit of a record's value in LMDB's file."""
    file = path / "data.mdb"
    content = bytearray(file.read_bytes())
    places = [at for at in range(len(content)) if content.startswith(value, at)]
    assert places
    for at in places:  # old versions of the page too
        content[at + 2] ^= 1
    file.write_bytes(content)


def test_records_are_read_back_by_key_and_in_order(tmp_path: Path) -> None:
    index = filled(tmp_path / "index")
    assert index.applied == 1
    assert index.get(Table.NAMES, b"key-007") == b"value 7"
    assert index.get(Table.NAMES, b"key-7") is None
    assert index.get(Table.NODES, b"key-007") is None
    assert list(index.scan(Table.NAMES, b"\0", b"\xff")) == sorted(RECORDS.items())
    assert [key for key, _ in index.scan(Table.NAMES, b"key-010", b"key-013")] == [b"key-010", b"key-011", b"key-012"]
    assert list(index.scan(Table.CHUNKS, b"\0", b"\xff")) == []
    assert verify(index) == len(RECORDS)
    index.close()


def test_the_reader_stays_at_its_instant_until_it_is_refreshed(tmp_path: Path) -> None:
    index = filled(tmp_path / "index")
    index.apply(layer_of((Op.DELETE, Table.NAMES, b"key-007", b"")), Sequence(2))
    assert (index.applied, index.get(Table.NAMES, b"key-007")) == (1, b"value 7")
    index.refresh()
    assert (index.applied, index.get(Table.NAMES, b"key-007")) == (2, None)
    index.close()


def test_an_index_keeps_its_records_and_refuses_other_folders_modes(tmp_path: Path) -> None:
    filled(tmp_path / "index").close()
    index = Index(tmp_path / "index")
    assert probe(index) == 1
    assert list(index.scan(Table.NAMES, b"\0", b"\xff")) == sorted(RECORDS.items())
    assert (tmp_path / "index").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "index" / "data.mdb").stat().st_mode & 0o777 == 0o600
    index.close()


def test_a_flipped_bit_in_a_value_is_found_by_get_scan_walk_and_dump(tmp_path: Path) -> None:
    filled(tmp_path / "index").close()
    flip_value(tmp_path / "index", b"value 77")
    index = Index(tmp_path / "index")
    assert index.get(Table.NAMES, b"key-076") == b"value 76"
    with pytest.raises(IndexDamaged, match="names"):
        index.get(Table.NAMES, b"key-077")
    with pytest.raises(IndexDamaged):
        list(index.scan(Table.NAMES, b"key-070", b"key-080"))
    with pytest.raises(IndexDamaged):
        verify(index)
    snapshot = index.snapshot()
    with pytest.raises(IndexDamaged):
        list(snapshot.records(Table.NAMES))
    snapshot.close()
    index.close()


def test_a_flipped_bit_in_a_key_of_a_branch_page_never_shows_records_of_another_range(tmp_path: Path) -> None:
    filled(tmp_path / "index").close()
    content = (tmp_path / "index" / "data.mdb").read_bytes()
    keys = sorted(RECORDS)
    flips = refused = 0
    for at in page_keys(content):
        for bit in range(8):
            (tmp_path / "index" / "data.mdb").write_bytes(
                content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
            )
            flips += 1
            index = Index(tmp_path / "index")
            for position in range(0, len(keys) - 10, 10):
                start, end = keys[position], keys[position + 10]
                try:
                    found = [key for key, _ in index.scan(Table.NAMES, start, end)]
                except IndexDamaged:
                    refused += 1
                else:
                    assert found == keys[position : position + 10]
            index.close()
    assert flips > 50
    assert refused > 0


@pytest.mark.parametrize("pages", [1, 2], ids=["branch", "leaf"])
def test_a_flipped_bit_in_a_key_never_makes_a_name_look_absent(tmp_path: Path, pages: int) -> None:
    filled(tmp_path / "index").close()
    content = (tmp_path / "index" / "data.mdb").read_bytes()
    found = refused = 0
    for at in page_keys(content, pages)[:: 1 if pages == 1 else 41]:
        (tmp_path / "index" / "data.mdb").write_bytes(
            content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]
        )
        try:
            index = Index(tmp_path / "index")
        except IndexDamaged:  # the key was a table's
            refused += 1
            continue
        for key, value in RECORDS.items():
            try:
                assert index.get(Table.NAMES, key) == value
                found += 1
            except IndexDamaged:
                refused += 1
        index.close()
    assert found > refused > 0


def test_what_is_absent_is_told_at_both_ends_and_in_between(tmp_path: Path) -> None:
    index = filled(tmp_path / "index")
    assert index.get(Table.NODES, b"key") is None
    for key in (b"key", b"key-0000", b"key-1995", b"key-999", b"zebra"):
        assert index.get(Table.NAMES, key) is None
        assert list(index.scan(Table.NAMES, key, key + b"\0")) == []
    index.close()


def page_keys(content: bytes, kind: int = 1) -> list[int]:
    """Return the offsets of key bytes in LMDB's branch pages, or in its leaves (`kind` 2)."""
    places: list[int] = []
    for page in range(0, len(content), 4096):
        flags, lower = struct.unpack_from("<HH", content, page + 10)
        if flags == kind:
            for node in struct.unpack_from(f"<{(lower - 16) // 2}H", content, page + 16):
                (key_bytes,) = struct.unpack_from("<H", content, page + node + 6)
                places += range(page + node + 8, page + node + 8 + key_bytes)
    return places


def test_a_record_that_vanished_or_came_back_is_found_by_the_sums(tmp_path: Path) -> None:
    for number, spoil in enumerate(("lost", "returned", "old")):
        path = tmp_path / f"index{number}"
        filled(path).close()
        env = lmdb.open(str(path), map_size=1 << 30, max_dbs=20)
        with env.begin(write=True) as txn:
            names = env.open_db(b"names", txn=txn)
            match spoil:
                case "lost":
                    txn.delete(b"key-003", db=names)
                case "returned":
                    txn.put(b"removed", seal_value(Table.NAMES, b"removed", b"v"), db=names)
                case "old":
                    txn.put(b"key-003", seal_value(Table.NAMES, b"key-003", b"older"), db=names)
        env.close()
        index = Index(path)
        with pytest.raises(IndexDamaged, match="were written"):
            verify(index)
        index.close()


def test_a_value_under_another_key_or_in_another_table_does_not_pass(tmp_path: Path) -> None:
    filled(tmp_path / "index").close()
    env = lmdb.open(str(tmp_path / "index"), map_size=1 << 30, max_dbs=20)
    with env.begin(write=True) as txn:
        sealed = seal_value(Table.NAMES, b"key-003", b"value 3")
        txn.put(b"key-004", sealed, db=env.open_db(b"names", txn=txn))
        txn.put(b"key-003", sealed, db=env.open_db(b"nodes", txn=txn))
    env.close()
    index = Index(tmp_path / "index")
    for table, key in ((Table.NAMES, b"key-004"), (Table.NODES, b"key-003")):
        with pytest.raises(IndexDamaged):
            index.get(table, key)
    index.close()


def test_verification_goes_on_beside_a_writer(tmp_path: Path) -> None:
    index = filled(tmp_path / "index")
    snapshot = index.snapshot()
    verification = Verification(snapshot)
    assert verification.step(50)
    index.apply(layer_of((Op.DELETE, Table.NAMES, b"key-150", b"")), Sequence(2))
    index.refresh()
    while verification.step(50):
        pass
    snapshot.close()
    assert verification.record_count == len(RECORDS)
    assert verify(index) == len(RECORDS) - 1
    index.close()


@pytest.mark.parametrize("step", [1, 2, 199, 200, 201])
def test_verification_in_steps_of_any_size_sees_every_record_once(tmp_path: Path, step: int) -> None:
    index = filled(tmp_path / "index")
    assert verify(index, step) == len(RECORDS)
    index.close()


def test_a_truncated_file_is_refused_before_it_is_touched(tmp_path: Path) -> None:
    filled(tmp_path / "index").close()
    file = tmp_path / "index" / "data.mdb"
    file.write_bytes(file.read_bytes()[: 3 * 4096])
    with pytest.raises(IndexDamaged, match="bytes of"):
        Index(tmp_path / "index")


def test_a_file_that_is_no_environment_is_damage(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "data.mdb").write_bytes(b"x" * 65536)
    with pytest.raises(IndexDamaged):
        Index(tmp_path / "index")


def test_a_new_index_does_not_pretend_to_be_complete(tmp_path: Path) -> None:
    index = Index(tmp_path / "index")
    with pytest.raises(IndexDamaged, match="complete"):
        _ = index.applied
    index.close()


def test_damage_that_lmdb_meets_in_the_sums_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Damaged:
        def get(self, *_: object) -> bytes:
            raise lmdb.CorruptedError("mdb_get", -30796)

    index = filled(tmp_path / "index")
    snapshot = index.snapshot()
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "_txn", Damaged())
        with pytest.raises(IndexDamaged, match="cannot read the index"):
            snapshot.stats(Table.NAMES)
    snapshot.close()
    index.close()


def test_a_full_map_changes_nothing_and_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "LMDB_MAP_BYTES", 256 << 10)
    index = filled(tmp_path / "index")
    large = layer_of(*[(Op.INSERT, Table.NODES, b"%d" % n, bytes(3000)) for n in range(200)], sequence=2)
    with pytest.raises(StoreFull):
        index.apply(large, Sequence(2))
    index.refresh()
    assert index.applied == 1
    assert index.get(Table.NODES, b"1") is None
    index.apply(layer_of((Op.DELETE, Table.NAMES, b"key-001", b""), sequence=3), Sequence(3))
    index.refresh()
    assert index.applied == 3
    assert verify(index) == len(RECORDS) - 1
    index.close()


def test_records_out_of_order_are_not_loaded(tmp_path: Path) -> None:
    index = Index(tmp_path / "index")
    index.load(Table.NAMES, [(b"b", b"1"), (b"c", b"2")])
    with pytest.raises(IndexDamaged):
        index.load(Table.NAMES, [(b"a", b"3")])
    index.apply(Layer(), Sequence(9))
    index.refresh()
    assert verify(index) == 2
    index.close()


def test_a_compacted_copy_takes_the_place_of_a_file_of_free_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_COMPACT_BYTES_MIN", 0)
    index = filled(tmp_path / "index")
    index.apply(
        layer_of(*[(Op.INSERT, Table.NODES, b"%d" % n, bytes(3000)) for n in range(500)], sequence=2), Sequence(2)
    )
    assert not index.is_mostly_free()
    index.apply(layer_of(*[(Op.DELETE, Table.NODES, b"%d" % n, b"") for n in range(500)], sequence=3), Sequence(3))
    assert index.is_mostly_free()
    before = index.file_bytes()
    index.copy_to(tmp_path / "index.new")
    index.close()
    remove_index(replace_index(tmp_path / "index.new", tmp_path / "index"))
    index = Index(tmp_path / "index")
    assert index.file_bytes() < before // 2
    assert index.applied == 3
    assert verify(index) == len(RECORDS)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    index.close()


def test_a_folder_that_cannot_be_moved_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(DiskFailed, match="cannot move"):
        replace_index(tmp_path / "missing", tmp_path / "index")


@pytest.mark.parametrize(
    ("free_bytes", "expected"), [(4096, StoreFull), (1 << 30, DiskFailed)], ids=["full disk", "broken disk"]
)
def test_a_write_that_was_cut_short_is_a_full_disk_when_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, expected: type[Exception]
) -> None:
    index = filled(tmp_path / "index")

    def cut_short(*_: object) -> None:
        raise lmdb.Error("mdb_txn_commit: Input/output error", errno.EIO)

    with monkeypatch.context() as patched:
        patched.setattr(index_module, "_free_bytes", lambda _: free_bytes)
        patched.setattr(Index, "_apply_table", cut_short)
        with pytest.raises(expected):
            index.apply(layer_of((Op.INSERT, Table.NAMES, b"new", b"value"), sequence=2), Sequence(2))
    index.apply(layer_of((Op.INSERT, Table.NAMES, b"new", b"value"), sequence=2), Sequence(2))
    index.refresh()
    assert index.get(Table.NAMES, b"new") == b"value"
    index.close()


@pytest.mark.parametrize("is_walked", [True, False])
def test_many_keys_are_looked_up_at_once_and_what_is_found_is_checked(tmp_path: Path, is_walked: bool) -> None:
    index = filled(tmp_path / "index")
    index.is_walked = is_walked
    keys = [b"key-100", b"missing", b"key-001", b"a", b"z", b"key-1000"]
    assert index.present(Table.NAMES, keys) == {b"key-100", b"key-001"}
    assert index.present(Table.NODES, keys) == set()
    index.close()
    flip_value(tmp_path / "index", b"value 100")
    index = Index(tmp_path / "index")
    index.is_walked = is_walked
    assert index.present(Table.NAMES, [b"key-001", b"key-050"]) == {b"key-001", b"key-050"}
    with pytest.raises(IndexDamaged):
        index.present(Table.NAMES, keys)
    index.close()


def test_an_absent_key_beside_damage_is_not_believed_until_the_index_was_walked(tmp_path: Path) -> None:
    filled(tmp_path / "index").close()
    flip_value(tmp_path / "index", b"value 100")
    index = Index(tmp_path / "index")
    with pytest.raises(IndexDamaged):
        index.present(Table.NAMES, [b"key-1000"])
    index.is_walked = True
    assert index.present(Table.NAMES, [b"key-1000"]) == set()
    index.close()

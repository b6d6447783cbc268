"""Overlay and index together are one sorted map: compared with a model under random operations."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from engine.format.columns import singly
from engine.format.layouts import COUNTER_RECORD, Op, Table
from engine.tables.index_check import Verification
from engine.tables.lmdb_index import Index
from engine.tables.merged_tables import Tables, TableTransaction, TableView
from engine.tables.overlay import Layer, Overlay
from lakefs.errors import IndexDamaged
from lakefs.ids import Sequence

KEYS = st.binary(min_size=1, max_size=2)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("change"), KEYS, st.one_of(st.none(), st.binary(max_size=12))),
        st.tuples(st.sampled_from(["freeze", "apply", "drop", "raise"]), KEYS, st.none()),
        st.tuples(st.just("scan"), KEYS, KEYS),
        st.tuples(st.just("insert many"), KEYS, st.binary(max_size=24)),
    ),
    max_size=60,
)
TABLE = Table.NAMES
LAST = b"\xff" * 8


MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # syncs are free there


@pytest.fixture(name="folder")
def temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as path:
        yield Path(path)


def new_tables(folder: Path) -> Tables:
    index = Index(folder / "index")
    index.apply(Layer(), Sequence(0))
    index.refresh()
    return Tables(index, Overlay())


class Model:
    """Tables driven step by step beside a dictionary."""

    def __init__(self, folder: Path) -> None:
        self.tables = new_tables(folder)
        self.entries: dict[bytes, bytes] = {}
        self.sequences: dict[bytes, int] = {}
        self.sequence = 0
        self.is_applied = False

    def change(self, key: bytes, value: bytes | None) -> None:
        self.sequence += 1
        with TableTransaction(self.tables) as txn:
            there = txn.get(TABLE, key) is not None
            assert there == (key in self.entries)
            if value is None and there:
                txn.delete(TABLE, key)
                del self.entries[key]
            elif value is not None:
                (txn.put if there else txn.insert)(TABLE, key, value)
                self.entries[key] = value
            assert txn.get(TABLE, key) == self.entries.get(key)
            assert list(txn.scan(TABLE, b"\0", LAST)) == sorted(self.entries.items())
        if txn.mutations:
            self.tables.overlay.current.publish(Sequence(self.sequence), txn.mutations)
            self.sequences[key] = self.sequence

    def insert_many(self, key: bytes, others: bytes) -> None:
        """Remove one key, and insert those of the others that are absent then, all in one transaction."""
        self.sequence += 1
        keys = list(dict.fromkeys([key, *(others[at : at + 2] for at in range(0, len(others), 2))]))
        with TableTransaction(self.tables) as txn:
            if key in self.entries:
                txn.delete(TABLE, key)
                del self.entries[key]
            present = self.present_in(txn, keys)
            absent = [each for each in keys if each not in present]
            values = [b"%d/" % self.sequence + each for each in absent]
            txn.insert_many(TABLE, absent, values)
            self.entries.update(zip(absent, values, strict=True))
            assert self.present_in(txn, keys) == set(keys)
            assert list(txn.scan(TABLE, b"\0", LAST)) == sorted(self.entries.items())
        counted = singly(txn.mutations)
        assert txn.record_count == len(list(counted))
        self.tables.overlay.current.publish(Sequence(self.sequence), txn.mutations)
        self.sequences.update(dict.fromkeys(keys, self.sequence))

    def present_in(self, view: TableView, keys: list[bytes]) -> set[bytes]:
        present = view.present(TABLE, keys)
        with TableView(self.tables) as singles, TableView(self.tables) as at_once:
            there = {key for key in keys if singles.get(TABLE, key) is not None}
            assert at_once.present(TABLE, keys) == there
            assert at_once.sequence == singles.sequence
        assert present == {key for key in keys if key in self.entries}
        return present

    def freeze(self) -> None:
        if self.tables.overlay.applying is None:
            self.tables.overlay.freeze()

    def apply(self) -> None:
        layer = self.tables.overlay.applying
        if layer is not None and not self.is_applied:
            self.tables.index.apply(layer, layer.last_sequence)
            self.is_applied = True

    def drop(self) -> None:
        if self.is_applied:
            self.tables.drop_applied()
            self.is_applied = False

    def scan(self, start: bytes, end: bytes) -> None:
        with TableView(self.tables) as view:
            found = list(view.scan(TABLE, start, end))
        assert found == [(key, self.entries[key]) for key in sorted(self.entries) if start <= key < end]

    def check(self) -> None:
        self.scan(b"\0", LAST)
        with TableView(self.tables) as view:
            for key in self.sequences:
                assert view.get(TABLE, key) == self.entries.get(key)
        self.freeze()
        self.apply()
        self.drop()
        self.freeze()
        self.apply()
        self.drop()
        self.scan(b"\0", LAST)
        snapshot = self.tables.index.snapshot()
        verification = Verification(snapshot)
        while verification.step(7):
            pass
        snapshot.close()
        assert verification.record_count == len(self.entries)


@settings(max_examples=150)
@given(STEPS)
def test_overlay_and_index_scan_and_get_as_one_sorted_map(steps: list[tuple[str, bytes, bytes | None]]) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as path:
        model = Model(Path(path))
        for step, key, value in steps:
            match step:
                case "change":
                    model.change(key, value)
                case "insert many":
                    assert value is not None
                    model.insert_many(key, value)
                case "freeze":
                    model.freeze()
                case "apply":
                    model.apply()
                case "drop":
                    model.drop()
                case "scan":
                    assert value is not None
                    model.scan(key, value)
        model.check()
        model.tables.index.close()


def test_many_new_keys_at_once_are_sorted_in() -> None:
    layer = Layer()
    numbers = [(7919 * n) % 1000 for n in range(1000)]
    for n in numbers[:500]:
        layer.publish(Sequence(1), [(Op.INSERT, TABLE, b"%04d" % n, b"")])
    assert list(layer.keys_between(TABLE, b"0100", b"0200")) == sorted(
        b"%04d" % n for n in numbers[:500] if 100 <= n < 200
    )
    for n in numbers[500:]:
        layer.publish(Sequence(1), [(Op.INSERT, TABLE, b"%04d" % n, b"")])
    assert list(layer.keys_between(TABLE, b"0", b"9999")) == [b"%04d" % n for n in range(1000)]
    assert layer.entry_count == 1000


def test_a_view_says_on_which_group_it_depends(folder: Path) -> None:
    tables = new_tables(folder)
    publish = tables.overlay.current.publish
    publish(Sequence(1), [(Op.INSERT, TABLE, b"a", b"1")])
    publish(Sequence(2), [(Op.INSERT, TABLE, b"b", b"2")])
    publish(Sequence(3), [(Op.DELETE, TABLE, b"c", b"")])
    with TableView(tables) as view:
        assert view.get(TABLE, b"a") == b"1"
        assert view.sequence == 1
        assert view.get(TABLE, b"zzz") is None
        assert view.sequence == 1
        assert view.get(TABLE, b"c") is None
        assert view.sequence == 3  # an absence depends on the removal
    with TableView(tables) as view:
        assert [key for key, _ in view.scan(TABLE, b"a", b"c")] == [b"a", b"b"]
        assert view.sequence == 2
        list(view.scan(TABLE, b"c", b"d"))
        assert view.sequence == 3


def test_a_scan_left_open_ends_with_its_view(folder: Path) -> None:
    tables = new_tables(folder)
    tables.overlay.current.publish(Sequence(1), [(Op.INSERT, TABLE, b"%d" % n, b"") for n in range(9)])
    with TableView(tables) as view:
        scan = view.scan(TABLE, b"\0", LAST)
        assert next(scan) == (b"0", b"")
    assert list(scan) == []
    tables.overlay.freeze()
    tables.index.apply(tables.overlay.applying or Layer(), Sequence(1))
    tables.drop_applied()


def test_a_view_held_while_the_index_moves_on_is_a_bug_that_is_noticed(folder: Path) -> None:
    tables = new_tables(folder)
    tables.overlay.freeze()
    with TableView(tables), pytest.raises(AssertionError, match="held across an await"):
        tables.drop_applied()


def test_an_entry_that_was_made_and_removed_within_a_layer_never_reaches_the_index(folder: Path) -> None:
    tables = new_tables(folder)
    publish = tables.overlay.current.publish
    publish(Sequence(1), [(Op.INSERT, TABLE, b"k", b"1")])
    publish(Sequence(2), [(Op.PUT, TABLE, b"k", b"2"), (Op.DELETE, TABLE, b"k", b"")])
    tables.index.apply(tables.overlay.freeze(), Sequence(2))
    tables.drop_applied()
    snapshot = tables.index.snapshot()
    assert snapshot.stats(TABLE) == (0, 0)
    assert snapshot.applied == 2
    snapshot.close()


def test_a_false_insert_does_not_spoil_the_sums(folder: Path) -> None:
    tables = new_tables(folder)
    for sequence, value in ((1, b"old"), (2, b"new")):
        tables.overlay.current.publish(Sequence(sequence), [(Op.INSERT, TABLE, b"k", value)])
        tables.index.apply(tables.overlay.freeze(), Sequence(sequence))
        tables.drop_applied()
    with TableView(tables) as view:
        assert view.get(TABLE, b"k") == b"new"
    snapshot = tables.index.snapshot()
    verification = Verification(snapshot)
    while verification.step(10):
        pass
    snapshot.close()


def test_numbers_go_on_at_the_stored_mark_and_are_never_handed_out_twice(folder: Path) -> None:
    tables = new_tables(folder)
    taken: set[int] = set()
    sequence = 0
    for _ in range(3):
        for _ in range(3):
            with TableTransaction(tables) as txn:
                fresh = {txn.new_node_id() for _ in range(3000)}
            assert not fresh & taken
            taken |= fresh
            if txn.mutations:
                sequence += 1
                tables.overlay.current.publish(Sequence(sequence), txn.mutations)
                txn.settle_counters(Sequence(sequence))
        tables = Tables(tables.index, tables.overlay)
    assert min(taken) == 2
    assert max(taken) < 2 + 27_000 + 3 * 4096


def test_numbers_of_a_decision_that_failed_are_skipped_and_their_mark_is_not_moved(folder: Path) -> None:
    tables = new_tables(folder)
    with pytest.raises(ValueError), TableTransaction(tables) as txn:
        assert txn.new_birth() == 1
        raise ValueError
    with TableTransaction(tables) as txn:
        assert txn.new_birth() == 2
        assert txn.new_birth() == 3
    assert txn.mutations == [(Op.PUT, Table.COUNTERS, b"birth", COUNTER_RECORD.pack(2 + 4096))]


def test_numbers_taken_many_at_once_are_those_taken_one_by_one(folder: Path) -> None:
    def marks(takes: list[int], *, at_once: bool) -> list[tuple[int, int]]:
        tables, seen = new_tables(folder / str(at_once)), []
        for count in takes:
            with TableTransaction(tables) as txn:
                first = txn.new_births(count) if at_once else min([txn.new_birth() for _ in range(count)])
                if count % 5:  # every fifth decision fails
                    txn.settle_counters(Sequence(1))
            seen += [(first, tables.counters.birth.mark), (tables.counters.birth.next, len(txn.mutations))]
        tables.index.close()
        return seen

    for at_once in (True, False):
        (folder / str(at_once)).mkdir()
    takes = [1, 4000, 95, 1, 4096, 5, 4095, 3, 4096, 20, 1]
    assert marks(takes, at_once=True) == marks(takes, at_once=False)


def test_a_number_depends_on_the_group_of_its_mark(folder: Path) -> None:
    tables = new_tables(folder)
    with TableTransaction(tables) as txn:
        txn.new_segment_id()
    tables.overlay.current.publish(Sequence(5), txn.mutations)
    txn.settle_counters(Sequence(5))
    with TableTransaction(tables) as later:
        later.new_segment_id()
    assert not later.mutations
    assert later.sequence == 5


def test_a_counter_of_the_wrong_length_is_damage(folder: Path) -> None:
    tables = new_tables(folder)
    tables.overlay.current.publish(Sequence(1), [(Op.PUT, Table.COUNTERS, b"node", b"abc")])
    with pytest.raises(IndexDamaged, match="node"):
        Tables(tables.index, tables.overlay)

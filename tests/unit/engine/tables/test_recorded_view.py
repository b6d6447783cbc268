"""Views that note what they read: the records that an answer rests on, or that it has no stamps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from engine.format.layouts import Op, Table
from engine.tables.lmdb_index import Index
from engine.tables.merged_tables import Tables
from engine.tables.overlay import Layer, Overlay
from engine.tables.recorded_view import STAMPED, Record, RecordedView
from lakefs.ids import Sequence


def _packed(records: list[Record]) -> bytes:
    return b" ".join(b"%d:%b" % (int(table), key) for table, key in records)


@pytest.fixture
def view(tmp_path: Path) -> Iterator[RecordedView]:
    index = Index(tmp_path / "index")
    with closing(index):
        index.apply(Layer(), Sequence(0))
        index.refresh()
        tables = Tables(index, Overlay())
        mutations = [(Op.INSERT, table, b"there", b"value") for table in Table if table is not Table.COUNTERS]
        tables.overlay.current.publish(Sequence(1), mutations)
        with RecordedView(tables, _packed) as opened:
            yield opened


def test_records_of_names_are_noted_whether_they_exist_or_not(view: RecordedView) -> None:
    for table in STAMPED:
        assert view.get(table, b"there") == b"value"
        assert view.get(table, b"missing") is None
    assert view.take_stamps() == _packed([(table, key) for table in STAMPED for key in (b"there", b"missing")])


def test_each_set_has_what_was_read_since_the_last(view: RecordedView) -> None:
    view.get(Table.NAMES, b"a")
    assert view.take_stamps() == b"4:a"
    view.get(Table.NODES, b"b")
    assert view.take_stamps() == b"3:b"
    assert view.take_stamps() == b""


def test_a_chunk_s_record_is_not_noted(view: RecordedView) -> None:
    view.get(Table.NAMES, b"a")
    assert view.get(Table.CHUNKS, b"there") == b"value"
    assert view.take_stamps() == b"4:a"


@pytest.mark.parametrize("table", [table for table in Table if table not in STAMPED and table is not Table.CHUNKS])
def test_a_record_of_another_table_leaves_its_answer_without_stamps(view: RecordedView, table: Table) -> None:
    view.get(Table.NAMES, b"a")
    view.get(table, b"missing")
    assert view.take_stamps() == b""
    view.get(Table.NAMES, b"a")
    assert view.take_stamps() == b"4:a"


def test_a_scan_leaves_its_answer_without_stamps(view: RecordedView) -> None:
    view.get(Table.NAMES, b"a")
    assert list(view.scan(Table.NAMES, b"a", b"z")) == [(b"there", b"value")]
    assert view.take_stamps() == b""


def test_it_is_durable_where_what_it_read_is(view: RecordedView) -> None:
    assert view.sequence == 0
    view.get(Table.NAMES, b"there")
    assert view.sequence == 1

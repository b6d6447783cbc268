"""The probe of an index that is opened: one whose records do not fit, or that cannot be read, stays closed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from engine.format.layouts import Op, Table, seal_value
from engine.metadata import recovery
from engine.tables.index_check import probe
from engine.tables.lmdb_index import Index, database_of
from lakefs.errors import DiskFailed, IndexDamaged
from lakefs.ids import Sequence
from tests.sim.world.disk import SimDisk
from tests.unit.engine.tables.test_index import layer_of
from tests.unit.support.metadata_rig import contents, opened, put, run

COUNTERS = [(Op.INSERT, Table.COUNTERS, key, bytes(8)) for key in (b"birth", b"node", b"segment")]
NAMES = [(Op.INSERT, Table.NAMES, b"key-%d" % number, b"value") for number in range(9)]
Change = Callable[[Any, dict[Table, Any]], object]
CHANGES: dict[str, Change] = {
    "a table that looks empty": lambda txn, tables: txn.drop(tables[Table.NAMES], delete=False),
    "a table with records that none were written to": lambda txn, tables: txn.put(
        b"key", seal_value(Table.NODES, b"key", b"value"), db=tables[Table.NODES]
    ),
    "another table's records": lambda txn, tables: txn.put(
        b"a", seal_value(Table.NODES, b"a", b"value"), db=tables[Table.NAMES]
    ),
    "a counter that is not there": lambda txn, tables: txn.delete(b"node", db=tables[Table.COUNTERS]),
    "an old counter": lambda txn, tables: txn.put(
        b"node", seal_value(Table.COUNTERS, b"node", b"\1" * 8), db=tables[Table.COUNTERS]
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_index_that_leads_elsewhere_is_not_opened(tmp_path: Path, change: Change) -> None:
    index = Index(tmp_path / "index")
    index.apply(layer_of(*COUNTERS, *NAMES), Sequence(1))
    index.refresh()
    assert probe(index) == 1
    index.close()
    with lmdb.open(str(tmp_path / "index"), max_dbs=len(Table) + 1) as env:
        tables = {table: env.open_db(database_of(table).encode()) for table in Table}
        with env.begin(write=True) as txn:
            change(txn, tables)
    index = Index(tmp_path / "index")
    with pytest.raises(IndexDamaged):
        probe(index)
    index.close()


def test_an_index_that_cannot_be_read_now_is_left_closed_and_opens_when_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Index) -> int:
        raise DiskFailed("cannot read the index: Input/output error", subject="index")

    async def scenario() -> None:
        disk = SimDisk(1)
        async with opened(disk) as metadata:
            await put(metadata, (Table.NAMES, b"a", b"1"))
            before = contents(metadata)
        with monkeypatch.context() as patched:
            patched.setattr(recovery, "probe", refuse)
            with pytest.raises(DiskFailed, match="Input/output error") as failed:
                async with opened(disk):
                    pass
        async with opened(disk) as metadata:  # fails if the index is still open: LMDB opens it only once
            assert contents(metadata) == before
        assert failed.value.subject == "index"  # used down here, so that the error keeps its frames alive until now

    run(scenario)

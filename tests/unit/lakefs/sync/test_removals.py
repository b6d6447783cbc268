"""Removals: noted in a file once they are many, and done only to what is still as it was compared."""

from __future__ import annotations

from pathlib import Path

from engine.process.embedded import open_lake
from lakefs.client.facade import driver_of
from lakefs.names import Name
from lakefs.sync import removals
from lakefs.sync.entries import Entry
from lakefs.sync.removals import LakeRemover, Noted, Removals
from lakefs.sync.report import Done, SyncObserver, SyncOutcome


def test_an_object_that_was_written_since_it_was_compared_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    outcomes: list[SyncOutcome] = []
    with open_lake(tmp_path / "store") as lake:
        lake.put("bucket/k/x", b"1", create_bucket=True)
        lake.put("bucket/k/y", b"1")
        lake.put("bucket/k/z", b"1")
        noted = [_noted(path, lake.stat(f"bucket/k/{path}").node) for path in ("x", "y")]
        # A mount that writes into a file binds other content to the node that is there.
        there = lake.stat("bucket/k/z")
        noted.append(_noted("z", there.node, blob=bytes(reversed(there.blob))))
        lake.put("bucket/k/x", b"somebody wrote this")
        driver = driver_of(lake)
        remover = LakeRemover(Name("bucket", "k/"), SyncObserver(outcomes.append))
        driver.run(remover.remove([*noted, _noted("missing", 77)]))
        assert [entry.key for entry in lake.ls("bucket/")] == ["k/x", "k/z"]
    ends = {outcome.path: outcome.done for outcome in outcomes}
    assert ends == {"x": Done.SKIPPED, "y": Done.REMOVED, "z": Done.SKIPPED, "missing": Done.SKIPPED}


def test_many_removals_are_kept_in_a_file() -> None:
    found = Removals()
    entries = [
        Entry(f"odd \n {number:06} \u00fc", number, number + 1, node=number + 2, blob=bytes([number % 256]))
        for number in range(2500)
    ]
    for entry in [*entries, Entry("folder/")]:
        found.add(entry)
    batches = list(found.batches())
    found.close()
    assert [len(batch) for batch in batches] == [removals.BATCH, removals.BATCH, 500]
    assert [each for batch in batches for each in batch] == [
        Noted(entry.path, entry.node, entry.size_bytes, entry.mtime_ns, entry.blob.hex()) for entry in entries
    ]
    assert (found.count, found.folders) == (2500, ["folder/"])


def _noted(path: str, node: int, *, blob: bytes = b"") -> Noted:
    return Noted(path, node, 1, 1, blob.hex())

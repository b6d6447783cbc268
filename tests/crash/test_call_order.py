"""The order in which an engine's system calls reach the kernel: which sync comes before what, of folders too.

A kill leaves the page cache as it was, so no number of kills shows a sync that is missing; the trace of the calls does.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lakefs.client.connect import connect
from tests.crash.call_trace import Order, read_calls, read_ended, traced
from tests.crash.planted_lake import BUGS
from tests.crash.small_engine import PLANTED_LAKE, SMALL_LAKE, SmallEngine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed"),
    pytest.mark.thorough,
]


class TracedEngine(SmallEngine):
    """An engine under strace."""

    def __init__(self, folder: Path, bug: str = "") -> None:
        self.trace = folder / "trace"
        self.bug = bug
        super().__init__(folder / "new", "--native", "127.0.0.1:0", "--scrub-interval", "0")

    def try_start(self, failpoint: str = "") -> bool:
        """Start it with its bug, under strace."""
        self.program = [*PLANTED_LAKE, self.bug] if self.bug else SMALL_LAKE
        self.wrapped = lambda command: traced(command, self.trace)
        return super().try_start(failpoint)

    def order(self) -> Order:
        """Stop the engine; return what it did."""
        assert self.process is not None
        assert self.stop() == 0
        return Order(read_calls(read_ended(self.trace, self.process.pid)), self.data)


def use(engine: TracedEngine, *, much: bool) -> None:
    """Do one thing at a time with one client: puts of all sizes, overwrites, deletes, gc; new files of every kind."""
    chance = random.Random(5)
    with connect(engine.server) as client:
        for number in range(14 if much else 3):
            client.put(f"bkt/large{number % 8}", chance.randbytes(3_000_000), create_bucket=True)
        for number in range(300 if much else 20):
            client.put(f"bkt/small{number % 50}", chance.randbytes(5_000))
        for number in range(3):
            client.remove(f"bkt/large{number}")
        client.gc()


def test_nothing_is_answered_renamed_or_referred_to_before_it_is_durable() -> None:
    with TemporaryDirectory(prefix="lake-") as folder:
        engine = TracedEngine(Path(folder))
        use(engine, much=True)
        order = engine.order()
        assert order.complaints() == []
        assert order.checked > 1000
        made = "".join(order.made())
        for kind in (".large", ".small", ".journal", ".checkpoint", "superblock"):
            assert made.count(kind) > 1, f"{made.count(kind)} files {kind} are too few to show anything"
        assert made.count("native.token") > 0


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        ("no-folder-sync", "segments is not synced before payload"),
        ("no-folder-sync", "journal is not synced behind the rename"),
        ("no-folder-sync", "native.token"),
        ("no-token-sync", "native.token"),
        ("no-data-sync", "is renamed before it is synced"),
        ("no-data-sync", "before the journal's group"),
        ("no-journal-sync", "an answer leaves before"),
    ],
)
def test_a_sync_that_is_left_out_is_missed(bug: str, said: str) -> None:
    assert bug in BUGS
    with TemporaryDirectory(prefix="lake-") as folder:
        engine = TracedEngine(Path(folder), bug)
        use(engine, much=False)
        found = engine.order().complaints()
        assert any(said in complaint for complaint in found), found

"""Checks left out on purpose, to see that the campaign notices: wrong answers, or flips of live bytes not reported.

`python -m tests.flips.planted` prints how many flips each took; the flips are made where the check matters.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

from crc32c import crc32c

from engine.format.layouts import Table
from engine.metadata.metadata_store import Metadata
from tests.flips.campaign import Samples, choose, samples_made, try_flips
from tests.sim.__main__ import say

BATCH: Final = 5


@dataclass(frozen=True)
class Bug:
    """A check that is left out, where bits are flipped to see it, and the flips within which it must be noticed."""

    what: str
    place: str
    plant: Callable[[], AbstractContextManager[Any]]
    flips: int


class _Agreeable(int):
    """A checksum that is never found to differ."""

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def _agreeable(*given: Any) -> int:
    return _Agreeable(crc32c(*given))


@contextmanager
def _chunks_believed() -> Iterator[None]:
    with ExitStack() as patches:
        for module in ("stored_check", "reader"):
            patches.enter_context(mock.patch(f"engine.segments.{module}.check_payload", return_value=True))
        yield


@contextmanager
def _records_believed() -> Iterator[None]:
    def believed(table: Table, key: bytes, sealed: bytes) -> bytes:
        return sealed[:-4]

    with (
        mock.patch("engine.tables.lmdb_index.open_value", believed),
        mock.patch("engine.tables.index_check.open_value", believed),
    ):
        yield


def _keys_believed() -> AbstractContextManager[Any]:
    return mock.patch("engine.tables.lmdb_index.IndexSnapshot.sealed", return_value=mock.ANY)


def _absence_believed() -> AbstractContextManager[Any]:
    return mock.patch("engine.tables.lmdb_index._show_absent")


def _journal_believed() -> AbstractContextManager[Any]:
    return mock.patch("engine.journal.reader.crc32c", _agreeable)


def _superblock_believed() -> AbstractContextManager[Any]:
    return mock.patch("engine.superblock.superblock.crc32c", _agreeable)


def _journal_passed_over() -> AbstractContextManager[Any]:
    async def passed_over(self: Metadata) -> int:
        return 0

    return mock.patch.object(Metadata, "verify_journal", passed_over)


BUGS: Final = (
    Bug("the checksum of a chunk is not compared", "payload", _chunks_believed, 10),
    Bug("the checksum of a record of the index is not compared", "index, keys", _records_believed, 20),
    Bug("records of the index are not looked up by their keys", "index, keys of branch", _keys_believed, 30),
    Bug("what a look-up does not find is not there", "index, keys of branch", _absence_believed, 10),
    Bug("the checksums of the journal are not compared", "journal", _journal_believed, 20),
    Bug("the checksum of the superblock is not compared", "superblock", _superblock_believed, 10),
    Bug("fsck passes over journal and checkpoint", "checkpoint", _journal_passed_over, 10),
)


def flips_to_notice(bug: Bug, samples: Samples, folder: Path, seed: int = 1) -> tuple[int, str]:
    """Return the number of the flip that made the bug show, and how; 0 when none of `bug.flips` did."""
    chosen = [choose(samples, random.Random(f"{seed}/{number}"), bug.place) for number in range(bug.flips)]
    with bug.plant():
        for begin in range(0, len(chosen), BATCH):
            outcomes = try_flips(samples, chosen[begin : begin + BATCH], folder)
            for number, outcome in enumerate(outcomes, begin + 1):
                if outcome.failed:
                    return number, outcome.failed
    return 0, "not noticed"


def main() -> None:
    """Plant each in turn."""
    with samples_made() as (samples, folder):
        for bug in BUGS:
            number, how = flips_to_notice(bug, samples, folder)
            say(f"{bug.what}: flip {number} of {bug.flips} in {bug.place!r}: {how[:150]}")


if __name__ == "__main__":
    main()

"""`lake` with small files and one bug: `python -m tests.crash.planted_lake BUG serve ...`.

For the tests that show that a check can fail.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lakefs.ids import Sequence
from tests.crash import small_lake


def _no_folder_sync() -> None:
    from engine.disk import LocalDisk

    LocalDisk.sync_folder = _does_nothing  # type: ignore[method-assign]


def _no_token_sync() -> None:
    """The folder's, behind the token's rename."""
    from engine import process
    from engine.disk import LocalDisk
    from engine.native_token import native_token
    from lakefs.ports import Disk

    class Forgetful(LocalDisk):
        sync_folder = _does_nothing

    def forgetful(disk: Disk) -> str:
        return native_token(Forgetful(Path(disk.local_path(""))))

    monkey = "native_token"  # the name that `run_engine` looks up
    setattr(process, monkey, forgetful)


def _no_data_sync() -> None:
    from engine.disk import LocalFile

    LocalFile.sync_data = _does_nothing  # type: ignore[method-assign]


def _no_journal_sync() -> None:
    """Only the groups'; a new journal file is synced."""
    from engine.journal import Journal

    append = Journal._append

    def unsynced(journal: Journal, sequence: Sequence, parts: list[bytes]) -> None:
        file = journal._file
        journal._file = None if file is None else _Unsynced(file)
        append(journal, sequence, parts)
        if isinstance(journal._file, _Unsynced):
            journal._file = journal._file.file

    Journal._append = unsynced  # type: ignore[method-assign,assignment]


def _answer_before_the_journal() -> None:
    from engine.commit import Committer

    async def at_once(committer: Committer, sequence: int) -> None:
        committer._hurry.set()

    Committer.wait_durable = at_once  # type: ignore[method-assign,assignment]


class _Unsynced:
    """A file whose syncs do nothing."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def sync_data(self) -> None:
        """Says that it did."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def _does_nothing(*_: object, **__: object) -> None:
    return None


BUGS: Final[dict[str, Callable[[], None]]] = {
    "no-folder-sync": _no_folder_sync,
    "no-token-sync": _no_token_sync,
    "no-data-sync": _no_data_sync,
    "no-journal-sync": _no_journal_sync,
    "answer-first": _answer_before_the_journal,
}


if __name__ == "__main__":
    small_lake.make_small()
    BUGS[sys.argv.pop(1)]()
    small_lake.be_lake()

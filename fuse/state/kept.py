"""Kept answers: what the engine has said of names, and when it may be acted on again.

A mount knows entries, absences, whole listings and attributes because the engine has told it of them.  Others change
names too, so:

- What is known is acted on (an open, a change of names) while its stamps stand, which needs no request, or after the
  engine has said it again within the same operation: over TCP, or where there are no stamps.
- Each change carries what it was decided upon: the node of the folder, and the node that it replaces, or that there was
  none.  The engine refuses what has changed since, and the mount looks again.
- Look-ups and attributes that the kernel asks for may be as old as those in its own caches.  No change rests on them.

A folder's names are known whole as of its change time (`Inode.names_ns`): each change of a name moves that time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from fuse.state.inodes import Inode
from lakefs.errors import LakeError
from lakefs.wire.messages import FolderChange, ObjectStat

ABSENCES_MAX: Final = 4096
"""Most names kept as absent, about 300 bytes each: those that a program looks up before it makes them."""


class Kept(NamedTuple):
    """The stamps of an answer, and the connection (epoch) that it was read on."""

    stamps: bytes
    epoch: int


class Answer(NamedTuple):
    """The engine's answer about a name; `kept` is None if it has to be asked for each time."""

    found: ObjectStat | LakeError
    kept: Kept | None = None


class Changed(NamedTuple):
    """The engine's answer to a change that it has made."""

    stat: ObjectStat | None
    """The record of the name; None if the answer was lost, and the change was found to be made."""
    changed_ns: int
    folder: FolderChange | None = None
    from_folder: FolderChange | None = None
    stamps: bytes = b""
    epoch: int = 0

    @property
    def made(self) -> ObjectStat:
        """The record of a name that was made or found to be made."""
        assert self.stat is not None, "what makes a name has its record"
        return self.stat


class Absences:
    """Names that the engine said are absent, each with the stamps of that answer; the oldest are forgotten."""

    def __init__(self, stands: Callable[[Kept | None], bool]) -> None:
        self._stands = stands
        self._kept: OrderedDict[tuple[int, str], list[Kept]] = OrderedDict()

    def note(self, folder: Inode, name: str, answers: list[Answer]) -> None:
        """Keep what the engine answered: no record of any form of the name."""
        kept = [answer.kept for answer in answers if answer.kept is not None]
        if len(kept) < len(answers):
            return
        self._kept[folder.number, name] = kept
        while len(self._kept) > ABSENCES_MAX:
            self._kept.popitem(last=False)

    def stand(self, folder: Inode, name: str) -> bool:
        """Return True if the name is still absent, at a folder that is still there."""
        kept = self._kept.get((folder.number, name))
        if kept is None:
            return False
        if all(map(self._stands, kept)):
            return True
        del self._kept[folder.number, name]
        return False


def note_change(folder: Inode, change: FolderChange | None, epoch: int) -> None:
    """Note what a change by this mount did to a folder: its names stay known whole if nobody else changed one."""
    was_whole = bool(folder.names_ns)
    folder.doubt_names()
    folder.kept = None
    if change is None or (folder.parent is not None and change.node != folder.node):
        return
    if was_whole and change.before_ns == folder.stored_ns:
        folder.names_ns = change.after_ns
    if change.before_ns == folder.stored_ns and change.stamps:
        folder.kept = Kept(change.stamps, epoch)
    folder.stored_ns = change.after_ns

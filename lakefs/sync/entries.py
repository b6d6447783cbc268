"""Entries of a side, two sides paired name by name, and the decision what a pair needs.  Pure: no I/O.

Rules kept here:
- Both sides list their entries in the order of their paths, of which a folder's ends in `/` and stands before what is
  in it.  Code points have the order of UTF-8's bytes, so it is also that of a lake's listings.
- A name that exists at the source and cannot be taken over (`refusal`) is never missing there: what the target has
  under it, or in a folder of that name, stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from lakefs.names import FOLDER_MODE
from lakefs.wire.messages import ListEntry

MTIME_TOLERANCE_NS: Final = 1
"""A file of the time 0 is stored with that of 1 ns, because 0 would mean now."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One name of a side: a file or an object, or a folder (its path ends in `/`)."""

    path: str
    size_bytes: int = 0
    mtime_ns: int = 0
    mode: int = 0o644
    blob: bytes = b""
    """Id of the content; b"" of a local file."""
    node: int = 0
    refusal: str = ""
    """The reason why the other side cannot have it; "": it can."""
    is_whole: bool = True
    """False for a folder that could not be read, or a file whose attributes could not."""
    is_bare: bool = False
    """True for a folder that has to be made by itself: it holds nothing."""
    listed: ListEntry | None = None
    """The entry of a lake's listing that this is."""

    @property
    def is_folder(self) -> bool:
        """True for a folder."""
        return self.path.endswith("/")

    @property
    def is_shadow(self) -> bool:
        """True for a folder that cannot be taken over, and of which nothing is lost: what is in it is another entry."""
        return bool(self.refusal) and self.is_folder and not self.is_bare and not self.size_bytes


@dataclass(frozen=True, slots=True)
class Pair:
    """The entries of one path; None where a side has none.

    `is_kept`: the target's entry stays, because the source has something of that path or below it.
    """

    source: Entry | None
    target: Entry | None
    is_kept: bool = False

    @property
    def path(self) -> str:
        """The path."""
        entry = self.source or self.target
        assert entry is not None
        return entry.path


class Pairing:
    """Pairs up two sides whose listings arrive in pages."""

    def __init__(self) -> None:
        self._sides: tuple[deque[Entry], deque[Entry]] = (deque(), deque())
        self._have_ended = [False, False]
        self._refused_folder = "\0"

    @property
    def wants(self) -> int | None:
        """The side whose next page is needed before there are more pairs: 0 the source, 1 the target; None at the
        end."""
        for side in (0, 1):
            if not self._sides[side] and not self._have_ended[side]:
                return side
        return None

    def add(self, side: int, page: Sequence[Entry] | None) -> None:
        """Take a page of a side; None is its end."""
        if page is None:
            self._have_ended[side] = True
        else:
            self._sides[side].extend(page)

    def pairs(self) -> Iterator[Pair]:
        """Yield the pairs that are known so far."""
        sources, targets = self._sides
        while self.wants is None and (sources or targets):
            source = sources[0] if sources else None
            target = targets[0] if targets else None
            if target is None or (source is not None and source.path <= target.path):
                both = target is not None and source is not None and source.path == target.path
                yield Pair(sources.popleft(), targets.popleft() if both else None)
                assert source is not None
                if source.refusal and source.is_folder and not source.path.startswith(self._refused_folder):
                    self._refused_folder = source.path
            else:
                is_kept = target.path.startswith(self._refused_folder) or (
                    target.is_folder and source is not None and source.path.startswith(target.path)
                )
                yield Pair(None, targets.popleft(), is_kept)


class Need(StrEnum):
    """The change that a pair needs at the target."""

    NOTHING = "nothing"
    COPY = "copy"
    COMPARE = "compare"
    """Compare the contents, and copy if they differ."""
    FOLDER = "folder"
    """Make the folder, or give it the source's mode."""
    REMOVE = "remove"
    REFUSE = "refuse"
    NEWER = "newer"
    """Nothing: the target's is newer, and is to be left then."""


@dataclass(frozen=True)
class Comparison:
    """The way in which files are compared.

    `contents`: by size and content, instead of size and time.  `update`: leave files that are newer at the target.
    `modes`: files and folders of other permission bits differ too.  `makes_folders`: each folder that the target lacks
    is made, not only those that are empty.
    """

    contents: bool = False
    update: bool = False
    modes: bool = True
    makes_folders: bool = False


def needed(pair: Pair, comparison: Comparison) -> tuple[Need, str]:
    """Return the change that a pair needs, and the reason for it, as people read it."""
    source, target = pair.source, pair.target
    if target is not None and target.refusal:
        # What is no file of the other side is none of its names: it is left, or gives way to a file of that name.
        if source is None:
            return Need.NOTHING, ""
        target = None
    if source is None:
        return (Need.NOTHING, "") if pair.is_kept else (Need.REMOVE, "not at the source")
    if source.refusal:
        return (Need.NOTHING, "") if source.is_shadow else (Need.REFUSE, source.refusal)
    if source.is_folder:
        return _needed_by_folder(source, target, comparison)
    if target is None:
        return Need.COPY, "new"
    need, reason = _compared(source, target, comparison)
    if need is not Need.NOTHING and comparison.update and target.mtime_ns > source.mtime_ns:
        return Need.NEWER, "newer at the target"
    return need, reason


def _needed_by_folder(source: Entry, target: Entry | None, comparison: Comparison) -> tuple[Need, str]:
    if source.size_bytes and (target is None or target.blob != source.blob):
        return Need.REFUSE, "a folder's own key that has content"
    mode = FOLDER_MODE if target is None else target.mode
    if target is None and (source.is_bare or comparison.makes_folders):
        return Need.FOLDER, "new"
    differs = comparison.modes and (source.mode ^ mode) & 0o777
    return (Need.FOLDER, "mode differs") if differs else (Need.NOTHING, "")


def _compared(source: Entry, target: Entry, comparison: Comparison) -> tuple[Need, str]:
    if source.size_bytes != target.size_bytes:
        return Need.COPY, "size differs"
    if comparison.contents:
        return (Need.NOTHING, "") if source.blob and source.blob == target.blob else (Need.COMPARE, "content differs")
    if abs(source.mtime_ns - target.mtime_ns) > MTIME_TOLERANCE_NS:
        return Need.COPY, "time differs"
    if comparison.modes and (source.mode ^ target.mode) & 0o777:
        return Need.COPY, "mode differs"
    return Need.NOTHING, ""

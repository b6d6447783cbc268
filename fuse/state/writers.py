"""Handles that may change one open file, and which of them have changed it since its last commit.

    opened     a handle may change the file: the program that opens it is noted
    changed    bytes were written, or cut, through it, or it made the file
    mapped     bytes came from a mapping; the kernel does not say of which handle
    committed  the store has all of it

Rules kept here:
- A flush or release concerns what was changed through its own handle; one that reads and writes may have a mapping, so
  it also concerns what mappings wrote.
- A flush leaves the commit to a later one while the program that opened the handle still has a descriptor of it:
  others are to see no half of what it, or a child of it, is writing.
- The program's other handles of the same file are no such descriptors: as many of those as it has are subtracted.
- A failure that no caller was given is kept for the next open of the name (`Failures`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from fuse.state.openers import OpenedFile, Program, descriptor_count, program_of
from lakefs.errors import LakeError
from lakefs.ports import Offload

FAILURES_MAX: Final = 1024
"""Most names whose failure is kept; the oldest are forgotten."""


@dataclass(slots=True)
class _Writer:
    flags: int
    program: Program | None

    @property
    def access(self) -> int:
        return self.flags & os.O_ACCMODE


class Writers:
    """The handles of one file that may change it."""

    def __init__(self) -> None:
        self._all: dict[int, _Writer] = {}
        self._changed: set[int] = set()
        self._is_mapped = False
        self.is_reported = True
        """False while something was changed, and no caller has had the error that it cannot be stored."""

    def opened(self, handle: int, flags: int, thread: int) -> None:
        """Add a handle that a thread opens."""
        self._all[handle] = _Writer(flags, program_of(thread))

    def closed(self, handle: int) -> None:
        """Remove a handle, if it is one of these."""
        self._all.pop(handle, None)
        self._changed.discard(handle)

    def changed(self, handle: int, *, is_mapped: bool | None = False) -> None:
        """Note a change through a handle; `is_mapped`: by a mapping instead, of whichever handle; None: maybe."""
        if not is_mapped:
            self._changed.add(handle)
        if is_mapped is None:
            is_mapped = any(writer.access == os.O_RDWR for writer in self._all.values())
        self._is_mapped = self._is_mapped or is_mapped
        self.is_reported = False

    def committed(self) -> None:
        """Note that the store has all changes."""
        self._changed.clear()
        self._is_mapped = False
        self.is_reported = True

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Note that the caller of this block is given its error."""
        try:
            yield
        except LakeError:
            self.is_reported = True
            raise

    @property
    def is_changed(self) -> bool:
        """True if a handle has changed what is not committed."""
        return bool(self._changed) or self._is_mapped

    def may_be_mapped(self, handle: int) -> bool:
        """Return True if a mapping that writes may be of this handle."""
        writer = self._all.get(handle)
        return writer is not None and writer.access == os.O_RDWR

    def has_changed(self, handle: int) -> bool:
        """Return True if the handle, or maybe a mapping of it, has changed what is not committed."""
        return handle in self._changed or (self._is_mapped and self.may_be_mapped(handle))

    async def is_kept_open(self, handle: int, numbers: frozenset[int], device: str, offload: Offload) -> bool:
        """Return True if the program that opened a handle still has a descriptor of it."""
        writer = self._all.get(handle)
        if writer is None or writer.program is None:
            return False
        found = await descriptor_count(writer.program, OpenedFile(numbers, writer.access, device), offload)
        return found > sum(1 for other in self._all.values() if other is not writer and _are_alike(other, writer))


def _are_alike(one: _Writer, other: _Writer) -> bool:
    """Return True if descriptors of both handles look the same to the program that opened both."""
    assert other.program is not None
    return one.access == other.access and one.program is not None and one.program.process == other.program.process


class Failures:
    """Names whose last commit failed without a caller to tell it to, and the errors."""

    def __init__(self) -> None:
        self._errors: dict[str, LakeError] = {}

    def __bool__(self) -> bool:
        """Return True if there is any."""
        return bool(self._errors)

    def note(self, name: str, error: LakeError) -> None:
        """Keep an error for the next open of the name."""
        self._errors.pop(name, None)
        self._errors[name] = error
        if len(self._errors) > FAILURES_MAX:
            del self._errors[next(iter(self._errors))]

    def forget(self, name: str) -> None:
        """Forget the error: the name was stored after all."""
        self._errors.pop(name, None)

    def raise_once(self, name: str) -> None:
        """Raise the error of a name, and forget it."""
        error = self._errors.pop(name, None)
        if error is not None:
            raise error

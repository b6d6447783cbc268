"""The contents of a simulated disk: files, changes not yet synced, and what a power loss leaves of them.

A file has two contents: what readers see, and what is on the medium.  Changes apply to the first at once and to the
second at a sync.  Of every change since the last sync a power loss leaves all, nothing or any sectors, independently of
the changes before and after it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

SECTOR: Final = 512
PAGE: Final = 4096


class Content:
    """Bytes of a file.  Only the front up to the last written byte is stored; the rest reads as zero."""

    def __init__(self) -> None:
        self.size = 0
        self._stored = bytearray()
        self._pages = bytearray()  # one byte for each page that takes room

    def copy(self) -> Content:
        """Return an independent twin."""
        twin = Content()
        twin.size = self.size
        twin._stored = bytearray(self._stored)
        twin._pages = bytearray(self._pages)
        return twin

    @property
    def allocated_bytes(self) -> int:
        """Room taken, in whole pages."""
        return self._pages.count(1) * PAGE

    def lacking_bytes(self, offset: int, length: int) -> int:
        """Return the room that a write there would newly take."""
        first, end = offset // PAGE, -(-(offset + length) // PAGE)
        return (end - first - self._pages.count(1, first, end)) * PAGE

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes from `offset`, short at the end."""
        length = max(0, min(length, self.size - offset))
        return bytes(self._stored[offset : offset + length]).ljust(length, b"\0")

    def write(self, offset: int, payload: bytes) -> None:
        """Replace bytes, growing the content."""
        if not payload:
            return
        end = offset + len(payload)
        if len(self._stored) < offset:
            self._stored.extend(bytes(offset - len(self._stored)))
        self._stored[offset:end] = payload
        self.size = max(self.size, end)
        self.allocate(offset, len(payload))

    def allocate(self, offset: int, length: int) -> None:
        """Take room, growing the content."""
        first, end = offset // PAGE, -(-(offset + length) // PAGE)
        if len(self._pages) < end:
            self._pages.extend(bytes(end - len(self._pages)))
        self._pages[first:end] = b"\1" * (end - first)
        self.size = max(self.size, offset + length)

    def punch(self, offset: int, length: int) -> None:
        """Zero bytes and free the whole pages among them; the size stays."""
        end = min(offset + length, len(self._stored))
        if end > offset:
            self._stored[offset:end] = bytes(end - offset)
        first, last = -(-offset // PAGE), min((offset + length) // PAGE, len(self._pages))
        if last > first:
            self._pages[first:last] = bytes(last - first)

    def truncate(self, size: int) -> None:
        """Set the size."""
        del self._stored[size:]
        del self._pages[-(-size // PAGE) :]
        self.size = size

    def written_offset(self, rng: random.Random) -> int:
        """Return any offset that was written, or 0."""
        return rng.randrange(max(1, min(self.size, len(self._stored))))

    def flip_bit(self, offset: int, bit: int) -> None:
        """Flip one bit."""
        assert offset < self.size
        self.write(offset, bytes([self.read(offset, 1)[0] ^ (1 << bit)]))


class Change(Protocol):
    """Something done to a file's content."""

    def apply(self, content: Content) -> None:
        """Do it."""
        ...

    def remains(self, rng: random.Random) -> Sequence[Change]:
        """Return what a power loss leaves of the change, when it was not synced."""
        ...


@dataclass(frozen=True)
class Write:
    """Bytes written."""

    offset: int
    payload: bytes

    def apply(self, content: Content) -> None:
        content.write(self.offset, self.payload)

    def remains(self, rng: random.Random) -> Sequence[Change]:
        choice = rng.randrange(8)
        if choice < 2:
            return [self]
        if choice == 2:
            return []
        if choice == 3:  # the length is on the medium, the bytes are not
            return [Grow(self.offset + len(self.payload))]
        return self._torn(rng, SECTOR if choice < 7 else PAGE)

    def _torn(self, rng: random.Random, unit: int) -> list[Change]:
        end = self.offset + len(self.payload)
        edges = [self.offset, *range((self.offset // unit + 1) * unit, end, unit), end]
        kept = rng.getrandbits(len(edges) - 1)
        pieces: list[Change] = []
        for index in range(len(edges) - 1):
            if kept >> index & 1:
                start, stop = edges[index] - self.offset, edges[index + 1] - self.offset
                pieces.append(Write(edges[index], self.payload[start:stop]))
        if rng.randrange(2):
            pieces.append(Grow(end))
        return pieces


@dataclass(frozen=True)
class _AllOrNothing:
    """A change of metadata: a power loss leaves it whole or not at all."""

    def remains(self, rng: random.Random) -> Sequence[Change]:
        return [self] if rng.randrange(2) else []

    def apply(self, content: Content) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Grow(_AllOrNothing):
    """The size is at least this."""

    size: int

    def apply(self, content: Content) -> None:
        content.size = max(content.size, self.size)


@dataclass(frozen=True)
class Allocate(_AllOrNothing):
    """Room taken ahead."""

    offset: int
    length: int

    def apply(self, content: Content) -> None:
        content.allocate(self.offset, self.length)


@dataclass(frozen=True)
class Truncate(_AllOrNothing):
    """The size is set."""

    size: int

    def apply(self, content: Content) -> None:
        content.truncate(self.size)


@dataclass(frozen=True)
class Punch:
    """Pages freed."""

    offset: int
    length: int

    def apply(self, content: Content) -> None:
        content.punch(self.offset, self.length)

    def remains(self, rng: random.Random) -> Sequence[Change]:
        choice = rng.randrange(3)
        if choice == 0:
            return []
        if choice == 1:
            return [self]
        middle = self.offset + self.length // 2 // PAGE * PAGE
        return [Punch(self.offset, middle - self.offset)]


class Inode:
    """A file, apart from its names."""

    def __init__(self, number: int, *, folder: bool = False) -> None:
        self.number = number
        self.folder = folder
        self.open_count = 0
        self.seen = Content()
        self._durable = Content()
        self._pending: list[Change] = []
        self._doomed: list[Change] = []

    def change(self, change: Change) -> None:
        """Apply a change for readers; the medium has it after the next sync."""
        change.apply(self.seen)
        self._pending.append(change)

    def sync(self) -> None:
        """Put all changes on the medium, except those that a failed sync gave up."""
        for change in self._pending:
            change.apply(self._durable)
        self._pending.clear()

    def sync_failed(self) -> None:
        """Note a failed sync: the kernel gave the changes up.  Readers see them, a later sync does not write them."""
        self._doomed += self._pending
        self._pending.clear()

    def power_loss(self, rng: random.Random, met: Counter[str]) -> None:
        """Keep only the medium's content, with the changes that got there by themselves.  `met` counts those."""
        is_later_kept = is_lost = False
        for change in [*self._doomed, *self._pending]:
            left = change.remains(rng)
            for rest in left:
                rest.apply(self._durable)
            whole = len(left) == 1 and left[0] is change
            met["kept" if whole else "torn" if left else "lost"] += isinstance(change, Write)
            is_later_kept |= is_lost and bool(left)
            is_lost |= not whole
        met["reordered"] += is_later_kept
        self._doomed.clear()
        self._pending.clear()
        self.open_count = 0
        self.seen = self._durable.copy()

    def process_lost(self) -> None:
        """Note that the process died and the machine did not: what was written stays written."""
        self.open_count = 0

    def flip_bit(self, offset: int, bit: int) -> None:
        """Flip one bit on the medium, which readers see."""
        self.seen.flip_bit(offset, bit)
        if offset < self._durable.size:
            self._durable.flip_bit(offset, bit)


class Names:
    """The tree of names: what is seen, what is durable, and the changes between.

    A change maps every path it touches to its new inode, or to None; a rename touches two, as one change.
    """

    def __init__(self) -> None:
        self.seen: dict[str, Inode] = {}
        self._durable: dict[str, Inode] = {}
        self._pending: list[dict[str, Inode | None]] = []

    def change(self, change: dict[str, Inode | None]) -> None:
        """Apply a change for everybody; it is durable after `sync`."""
        _apply(self.seen, change)
        self._pending.append(change)

    def sync(self, folder: str) -> None:
        """Make changes of the folder's names durable, with those that they rest on."""
        needed: set[str] = set()
        kept: list[dict[str, Inode | None]] = []
        durable: list[dict[str, Inode | None]] = []
        for change in reversed(self._pending):
            if needed.intersection(change) or any(folder_of(path) == folder for path in change):
                needed.update(change)
                durable.append(change)
            else:
                kept.append(change)
        for change in reversed(durable):
            _apply(self._durable, change)
        self._pending = kept[::-1]

    def power_loss(self, rng: random.Random, met: Counter[str]) -> None:
        """Lose any change since its folder's sync; one that rests on a lost one is lost too."""
        lost: set[str] = set()
        for change in self._pending:
            if lost.intersection(change) or rng.randrange(2):
                lost.update(change)
            else:
                _apply(self._durable, change)
        met["names lost"] += len(lost)
        self._pending.clear()
        for path in sorted(self._durable):
            folder = folder_of(path)
            if folder and folder not in self._durable:
                del self._durable[path]
        self.seen = dict(self._durable)

    def inodes(self) -> list[Inode]:
        """Return all inodes that have or may get back a name, in the order of their numbers."""
        found = {inode.number: inode for inode in [*self.seen.values(), *self._durable.values()]}
        for change in self._pending:
            found.update({inode.number: inode for inode in change.values() if inode is not None})
        return [found[number] for number in sorted(found)]


def folder_of(path: str) -> str:
    """Return the folder part of a path; "" is the root."""
    return path.rpartition("/")[0]


def _apply(names: dict[str, Inode], change: dict[str, Inode | None]) -> None:
    for path, inode in change.items():
        if inode is None:
            names.pop(path, None)
        else:
            names[path] = inode

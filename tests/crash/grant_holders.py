"""Readers that keep what they were given, as long as they like: descriptors of segments, places in them, a mapping.

A descriptor cannot be taken back.  So whatever the engine does behind a holder's back (free, compact, remove, write new
content), the place that a chunk was granted at must show, page by page, that chunk's bytes or zeros, for ever, and
nobody else's bytes.  A process that copies from a mapping may be stopped within a page that is freed at that time: the
rest of that page is zeros.  What a holder reads through the checks of `lakefs.grants.grant_reads` is the chunk's
content, or an error that can be tried again.  What it has a lease on is readable.

A holder has a child, forked with the descriptors, that looks at the same places after every round, and once more when
the holder has closed its connection.
"""

from __future__ import annotations

import io
import mmap
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.client.facade import driver_of
from lakefs.content.verify import Check
from lakefs.errors import BucketNotFound, KeyNotFound, OperationalError, StaleGrant
from lakefs.get.fetch import locate
from lakefs.get.objects import open_object
from lakefs.get.opened import Piece
from lakefs.grants.grant_reads import fetch_into, fetch_range
from lakefs.ids import SegmentId
from lakefs.limits import PAGE_BYTES, SMALL_PAYLOAD_BYTES
from lakefs.names import parse_object_name
from lakefs.wire.messages import Grant
from tests.crash.fire_contents import BUCKET, content_of_name

HELD_MAX: Final = 60
LEASED_MAX: Final = 20
NEW_EACH_ROUND: Final = 5
ATTEMPTS: Final = 20


@dataclass(frozen=True)
class HeldPlace:
    """A place that was granted, a descriptor and a mapping of its segment, and what lay there."""

    name: str
    piece: Piece
    grant: Grant
    descriptor: int
    mapping: mmap.mmap
    content: bytes

    def look(self) -> bool:
        """Return whether something was freed there; raise AssertionError when the place shows somebody else's bytes."""
        begin, end = self.grant.offset, self.grant.offset + self.piece.length
        through_file = os.pread(self.descriptor, self.piece.length, begin)
        freed = self._is_freed(through_file, "through its descriptor", _is_kept_or_freed)
        if end <= len(self.mapping):
            mapped = self.mapping[begin:end]
            freed = self._is_freed(mapped, "through a mapping", _is_kept_or_freed_meanwhile) or freed
        return freed

    def _is_freed(self, found: bytes, how: str, is_right: Callable[[bytes, bytes], bool]) -> bool:
        if found == self.content:
            return False
        for start, stop in _pages(self.grant.offset, len(found)):
            assert is_right(found[start:stop], self.content[start:stop]), (
                f"{self.name}: {how} segment {self.grant.segment:x} shows bytes of somebody else at "
                f"{self.grant.offset + start}, where chunk {self.piece.chunk.hex()} was granted"
            )
        return True


def _is_kept_or_freed(page: bytes, own: bytes) -> bool:
    return page == own or not any(page)


def _is_kept_or_freed_meanwhile(page: bytes, own: bytes) -> bool:
    """Accept zeros within a page too: SIGSTOP in the midst of a copy of 1.5 MB tore one page in four of five stops."""
    return _is_kept_or_freed(page, own) or all(byte in (0, kept) for byte, kept in zip(page, own, strict=True))


def _pages(offset: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a place that lie in one page each, as offsets in the place."""
    start = 0
    while start < length:
        stop = min(length, start + PAGE_BYTES - (offset + start) % PAGE_BYTES)
        yield start, stop
        start = stop


@dataclass
class Child:
    """A process forked with the places of the holder; it looks at them at each byte on `bell`."""

    pid: int
    bell: int

    def look(self) -> None:
        """Make it look."""
        os.write(self.bell, b".")

    def end(self) -> None:
        """Make it look a last time; it must have seen nobody else's bytes."""
        os.close(self.bell)
        _, status = os.waitpid(self.pid, 0)
        assert status == 0, "a forked child saw bytes of somebody else through a descriptor that it inherited"


def forked(places: list[HeldPlace]) -> Child:
    """Fork; the child has all descriptors and mappings of its parent."""
    heard, bell = os.pipe()
    pid = os.fork()
    if pid:
        os.close(heard)
        return Child(pid, bell)
    os.close(bell)
    code = 1
    try:
        while os.read(heard, 4096):
            for place in places:
                place.look()
        for place in places:
            place.look()
        code = 0
    finally:
        os._exit(code)


@dataclass
class Holder:
    """One client that holds."""

    lake: Lake
    chance: random.Random
    places: list[HeldPlace] = field(default_factory=list)
    leased: list[tuple[str, io.BufferedReader]] = field(default_factory=list)
    freed: set[int] = field(default_factory=set)
    figures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("looks", "stale", "good", "retried"), 0))

    def round(self) -> None:
        """Take some more places, give some back, look at all."""
        self._take()
        for place in self.places:
            self.figures["looks"] += 1
            if place.look():
                self.freed.add(id(place))
            self._read_checked(place)
        for name, reader in self.leased:
            self._read_leased(name, reader)

    def _take(self) -> None:
        names = [f"{BUCKET}/{entry.key}" for entry in self.lake.ls(f"{BUCKET}/")]
        for name in self.chance.sample(names, min(NEW_EACH_ROUND, len(names))):
            try:
                self.places += self._granted(name)
                if self.chance.random() < 0.5 and len(content_of_name(name)) >= SMALL_PAYLOAD_BYTES:
                    self.leased.append((name, self.lake.open(name)))
            except (KeyNotFound, BucketNotFound):
                continue  # removed by another client
            except OperationalError:
                self.figures["retried"] += 1
        del self.places[HELD_MAX // 2 : -HELD_MAX // 2]  # the first ones stay to the end
        while len(self.leased) > LEASED_MAX:
            _, reader = self.leased.pop(self.chance.randrange(LEASED_MAX))
            reader.close()

    def _granted(self, name: str) -> list[HeldPlace]:
        """Return the places of an object's chunks, without a lease."""
        lake, access = self.lake, driver_of(self.lake).steps.access(None)
        driver = driver_of(lake)
        opened = driver.run(open_object(access, parse_object_name(name), lease=False, inline_bytes=0))
        pieces = self.chance.sample(opened.pieces, min(3, len(opened.pieces)))
        driver.run(locate(access, opened, [piece.chunk for piece in pieces]))
        content = content_of_name(name)
        places: list[HeldPlace] = []
        for piece in pieces:
            grant = opened.grants[piece.chunk]
            with access.descriptors.use(SegmentId(grant.segment)) as lent:
                descriptor = os.dup(lent)
            mapping = mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
            own = content[piece.offset : piece.offset + piece.length]
            places.append(HeldPlace(name, piece, grant, descriptor, mapping, own))
        return places

    def _read_checked(self, place: HeldPlace) -> None:
        """Check that bytes which pass a check are the content."""
        access, length = driver_of(self.lake).steps.access(None), place.piece.length
        target = memoryview(bytearray(length))
        check = self.chance.choice((Check.BLAKE3, Check.CRC32C))
        begin = self.chance.randrange(length)
        try:
            fetch_into(access.descriptors, place.piece.chunk, place.grant, target, check)
            part = fetch_range(access.descriptors, place.piece.chunk, place.grant, begin, length - begin)
        except StaleGrant:
            self.figures["stale"] += 1
            return
        assert target == place.content, f"{place.name}: bytes that are not its own passed {check}"
        assert part == place.content[begin:], f"{place.name}: a range that is not its own passed the check"
        self.figures["good"] += 1

    def _read_leased(self, name: str, reader: io.BufferedReader) -> None:
        """Check that a leased object is readable, even when its name is gone."""
        content = content_of_name(name)
        begin = self.chance.randrange(len(content))
        for _ in range(ATTEMPTS):
            try:
                reader.seek(begin)
                found = reader.read(100_000)
            except OperationalError:
                self.figures["retried"] += 1
                continue
            assert found == content[begin : begin + 100_000], f"{name}: a leased object changed"
            return
        raise AssertionError(f"{name}: a leased object cannot be read")


def hold(server: str, seed: str, ended: int) -> dict[str, int]:
    """Hold places until all others have closed `ended` (a pipe); return figures."""
    child: Child | None = None
    with connect(server) as lake:
        holder = Holder(lake, random.Random(f"holder {seed}"))
        while not _is_closed(ended):
            holder.round()
            if child is None and len(holder.places) >= HELD_MAX // 2:
                child = forked(holder.places[: HELD_MAX // 2])
            elif child is not None:
                child.look()
    if child is not None:
        child.end()
    for place in holder.places:
        place.look()
    return holder.figures | {"freed under holders": len(holder.freed), "children": int(child is not None)}


def _is_closed(pipe: int) -> bool:
    """Return whether the other end of a pipe that nobody writes to was closed."""
    try:
        return os.read(pipe, 1) == b""
    except BlockingIOError:
        return False

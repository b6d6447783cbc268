"""Both ends of a link over a fabric, for tests of the RDMA port and of what uses it."""

from __future__ import annotations

import mmap
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import pytest

from lakefs.transport.fabric import Completion, Fabric, Link, Piece, Region, Remote

PAGE: Final = 4096
BOTH: Final = Remote.READ | Remote.WRITE
WAIT_S: Final = 60.0
MARK: Final = 0xA5
"""Memory that nothing may write is filled with it."""


class Rig(Protocol):
    """Opens fabrics that reach each other."""

    def open(self) -> Fabric:
        """Open one more fabric."""
        ...


class Side:
    """A fabric with a link, and memory that it registers."""

    def __init__(self, fabric: Fabric, peer_may: Remote = BOTH) -> None:
        self.fabric = fabric
        self.link = fabric.open_link(peer_may)

    def memory(self, content: bytes, remote: Remote) -> tuple[mmap.mmap, Region]:
        """Return memory of that content, and its region."""
        memory = mmap.mmap(-1, -(-len(content) // PAGE) * PAGE)
        memory[: len(content)] = content
        return memory, self.fabric.register(memoryview(memory)[: len(content)], remote)


@dataclass
class Pair:
    """Two sides, joined."""

    near: Side
    far: Side


def joined(near: Side, far: Side) -> Pair:
    """Join two sides' links."""
    near.link.connect(far.link.end)
    far.link.connect(near.link.end)
    return Pair(near, far)


def new_pair(rig: Rig, peer_may: Remote = BOTH) -> Pair:
    """Open two fabrics, and join a link of each."""
    return joined(Side(rig.open(), peer_may), Side(rig.open(), peer_may))


@pytest.fixture
def pair(rig: Rig) -> Pair:
    return new_pair(rig)


def poster(link: Link, *, is_write: bool) -> Callable[[int, Region, int, int, int, int], None]:
    """Return a call that posts one READ or WRITE: ticket, region, offset, remote address, remote key, length."""

    def post(ticket: int, region: Region, offset: int, address: int, key: int, length: int) -> None:
        link.post(ticket, [Piece(region, offset, address, key, length, is_write)])

    return post


def completions(link: Link, count: int) -> list[Completion]:
    """Poll until so many have come."""
    found: list[Completion] = []
    until = time.monotonic() + WAIT_S
    while len(found) < count:
        assert time.monotonic() < until, f"{len(found)} of {count} completions came: {found}"
        found += link.poll()
        time.sleep(0)
    assert len(found) == count
    return found


def failures(link: Link, count: int) -> list[str]:
    """Poll until so many have come, and return their failures."""
    return [completion.failure for completion in completions(link, count)]


def random_bytes(seed: int, count: int) -> bytes:
    return random.Random(seed).randbytes(count)


def silent(rig: Rig) -> tuple[Side, Side]:
    """Return a side whose peer is gone, and that peer: what the first posts stays in flight for a while."""
    near, far = Side(rig.open()), Side(rig.open())
    joined(near, far)
    far.link.close()
    return near, far


def has_only(memory: mmap.mmap, *known: int) -> bool:
    """Return True if the memory has no other bytes than these."""
    return not memory[:].translate(None, bytes(known))


@contextmanager
def untouched(memory: mmap.mmap) -> Iterator[None]:
    """Check that the memory is what it was."""
    before = memory[:]
    yield
    assert memory[:] == before

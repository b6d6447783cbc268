"""Spaces of clients of both kinds, asked alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

from lakefs.client.blocking.lake import Lake
from lakefs.client.blocking.spaces import Space
from lakefs.client.connect import connect
from lakefs.client.facade import driver_of
from lakefs.content.verify import Check
from lakefs.get.keyed import Matched, find_values, get_values_into, match_of
from lakefs.get.pools import Pool
from lakefs.put.keyed import KeyedResult
from tests.known.clients import Portal

KINDS: Final = ("blocking", "trio")


class Reader(Protocol):
    """The methods that may answer without a request."""

    number: int

    def match(self, keys: Sequence[bytes]) -> Matched: ...
    def load(
        self, keys: Sequence[bytes], pool: Pool, offsets: Sequence[int], rooms: Sequence[int] = ()
    ) -> list[int]: ...
    def get_many_into(self, keys: Sequence[bytes], buffers: Sequence[bytearray]) -> list[int]: ...
    def put_many(self, keys: Sequence[bytes], values: Sequence[bytes]) -> KeyedResult: ...


class SpaceInPortal:
    """A space of a trio client in a thread of its own."""

    def __init__(self, portal: Portal, name: str) -> None:
        self._portal = portal
        self._space = portal._run(lambda lake: lake.space(name))
        self.number: int = self._space.number

    def match(self, keys: Sequence[bytes]) -> Matched:
        return self._portal._run(lambda _: self._space.match(keys))  # type: ignore[no-any-return]

    def load(self, keys: Sequence[bytes], pool: Pool, offsets: Sequence[int], rooms: Sequence[int] = ()) -> list[int]:
        return self._portal._run(lambda _: self._space.load(keys, pool, offsets, rooms))  # type: ignore[no-any-return]

    def get_many_into(self, keys: Sequence[bytes], buffers: Sequence[bytearray]) -> list[int]:
        return self._portal._run(lambda _: self._space.get_many_into(keys, buffers))  # type: ignore[no-any-return]

    def put_many(self, keys: Sequence[bytes], values: Sequence[bytes]) -> KeyedResult:
        return self._portal._run(lambda _: self._space.put_many(keys, values))  # type: ignore[no-any-return]


class AskingSpace:
    """A space that is asked for everything."""

    def __init__(self, lake: Lake, number: int) -> None:
        self._driver = driver_of(lake)
        self.number = number

    def match(self, keys: Sequence[bytes]) -> Matched:
        values = self._driver.run(find_values(self.number, keys))
        return match_of([bool(pieces) for pieces in values])

    def get_many_into(self, keys: Sequence[bytes], buffers: Sequence[bytearray]) -> list[int]:
        targets = [memoryview(buffer) for buffer in buffers]
        return self._driver.run(get_values_into(self._driver.steps.access(None), self.number, keys, targets))


@contextmanager
def space_of(kind: str, address: str, name: str, *, check: Check = Check.CRC32C) -> Iterator[Reader]:
    """Context manager: the space of a new client of that kind."""
    if kind == "trio":
        portal = Portal(address, check)
        try:
            yield SpaceInPortal(portal, name)
        finally:
            portal.close()
    else:
        with connect(address, check=check) as lake:
            yield lake.space(name)


def contents(space: Reader | AskingSpace, keys: Sequence[bytes], room: int) -> list[bytes]:
    """Read values into memory of that length each; return them, empty for a miss."""
    buffers = [bytearray(room) for _ in keys]
    lengths = space.get_many_into(keys, buffers)
    return [bytes(buffer[:length]) for buffer, length in zip(buffers, lengths, strict=True)]


def loaded(space: Reader, keys: Sequence[bytes], room: int) -> list[bytes]:
    """Load values into a pool of its own; return them, empty for a miss."""
    pool = Pool(size_bytes=room * len(keys))
    try:
        offsets = [room * at for at in range(len(keys))]
        lengths = space.load(keys, pool, offsets)
        return [bytes(pool.buffer[begin : begin + size]) for begin, size in zip(offsets, lengths, strict=True)]
    finally:
        pool.close()


def index_of(space: Any) -> Any:
    """Return what a client knows of the keyed index."""
    return space._index if isinstance(space, Space) else space._space._index

"""A space of a real engine in the hands of a user: the blocking and the trio client, over a Unix socket and TCP."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import trio
from trio.lowlevel import TrioToken, current_trio_token

from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.client.connect_trio import connect_trio
from lakefs.client.trio.lake import TrioLake
from lakefs.get.keyed import Matched
from lakefs.get.pools import Pool
from lakefs.limits import MIB
from lakefs.put.keyed import KeyedResult
from tests.e2e.served import WAIT_S, Served

T = TypeVar("T")
_POOL_BYTES: Final = 16 * MIB
HANDS: Final = ("blocking unix", "trio unix", "blocking tcp", "trio tcp")


class Hand(Protocol):
    """The operations on a space that the tests use.  They block."""

    def match(self, keys: Sequence[bytes]) -> Matched: ...
    def put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> KeyedResult: ...
    def get(self, keys: Sequence[bytes], room: int) -> list[bytes]: ...
    def load(self, keys: Sequence[bytes], room: int, offsets: Sequence[int] = ()) -> list[bytes]: ...
    def remove(self, keys: Sequence[bytes]) -> list[bool]: ...


@dataclass
class BlockingHand:
    """A hand on the blocking client."""

    lake: Lake
    pool: Pool
    name: str
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        self.space = self.lake.space(self.name, **self.settings)

    def match(self, keys: Sequence[bytes]) -> Matched:
        return self.space.match(keys)

    def put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> KeyedResult:
        return self.space.put_many(keys, values)

    def get(self, keys: Sequence[bytes], room: int) -> list[bytes]:
        buffers = [bytearray(room) for _ in keys]
        return _cut(buffers, self.space.get_many_into(keys, buffers))

    def load(self, keys: Sequence[bytes], room: int, offsets: Sequence[int] = ()) -> list[bytes]:
        places = offsets or [room * index for index in range(len(keys))]
        return _cut([self.pool.buffer[place:] for place in places], self.space.load(keys, self.pool, places))

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        return self.space.remove(keys)


class TrioHand:
    """A hand on the trio client, which runs in a thread."""

    def __init__(self, lake: TrioLake, pool: Pool, token: TrioToken, name: str, settings: dict[str, Any]) -> None:
        self._pool = pool
        self._token = token
        self.space = self._run(lambda: lake.space(name, **settings))

    def _run(self, call: Callable[[], Awaitable[T]]) -> T:
        async def run() -> T:
            return await call()

        return trio.from_thread.run(run, trio_token=self._token)

    def match(self, keys: Sequence[bytes]) -> Matched:
        return self._run(lambda: self.space.match(keys))

    def put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> KeyedResult:
        return self._run(lambda: self.space.put_many(keys, values))

    def get(self, keys: Sequence[bytes], room: int) -> list[bytes]:
        buffers = [bytearray(room) for _ in keys]
        return _cut(buffers, self._run(lambda: self.space.get_many_into(keys, buffers)))

    def load(self, keys: Sequence[bytes], room: int, offsets: Sequence[int] = ()) -> list[bytes]:
        places = offsets or [room * index for index in range(len(keys))]

        lengths = self._run(lambda: self.space.load(keys, self._pool, places))
        return _cut([self._pool.buffer[place:] for place in places], lengths)

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        return self._run(lambda: self.space.remove(keys))


def _cut(memories: Sequence[Any], lengths: Sequence[int]) -> list[bytes]:
    return [bytes(memory[:length]) for memory, length in zip(memories, lengths, strict=True)]


@contextmanager
def hand_on(served: Served, kind: str, name: str, **settings: Any) -> Iterator[Hand]:
    """Open a space by a client of that kind.  The engine listens on TCP too."""
    driver, _, way = kind.partition(" ")
    (tcp,) = [line.split()[1] for line in served.printed if "tcp://" in line]
    address, token = (served.server, "") if way == "unix" else (tcp, served.token())
    if driver == "blocking":
        with connect(address, token=token) as lake, lake.pool(size_bytes=_POOL_BYTES) as pool:
            yield BlockingHand(lake, pool, name, settings)
        return
    made: list[tuple[TrioLake, Pool, TrioToken, trio.Event]] = []
    is_made = threading.Event()

    async def main() -> None:
        async with connect_trio(address, token=token) as trio_lake, trio_lake.pool(size_bytes=_POOL_BYTES) as pool:
            end = trio.Event()
            made.append((trio_lake, pool, current_trio_token(), end))
            is_made.set()
            await end.wait()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    assert is_made.wait(WAIT_S)
    trio_lake, lent, loop, end = made[0]
    try:
        yield TrioHand(trio_lake, lent, loop, name, settings)
    finally:
        loop.run_sync_soon(end.set)
        thread.join(WAIT_S)

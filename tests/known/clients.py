"""Clients of both kinds, asked alike, and what they answer in a form that can be compared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import trio

from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.client.connect_trio import connect_trio
from lakefs.client.facade import driver_of
from lakefs.client.trio.lake import TrioLake
from lakefs.content.verify import Check
from lakefs.errors import LakeError
from lakefs.known.counts import KnownCounts
from lakefs.wire import messages as m
from lakefs.wire.messages import ObjectStat


class Reader(Protocol):
    """The methods that may answer from memory, as of the blocking client."""

    def get(self, name: str) -> bytes: ...
    def get_many(self, names: Sequence[str]) -> list[bytes]: ...
    def get_into(self, name: str, buffer: bytearray) -> int: ...
    def get_many_into(self, names: Sequence[str], buffers: Sequence[bytearray]) -> list[int]: ...
    def stat(self, name: str) -> ObjectStat: ...
    def exists(self, name: str) -> bool: ...
    def open(self, name: str) -> Any: ...
    @property
    def known(self) -> KnownCounts: ...


class Portal:
    """A trio lake in a loop of its own thread, called from outside of it."""

    def __init__(self, address: str, check: Check, *, repeats: bool = True) -> None:
        self._ready: Final = threading.Event()
        self._end = trio.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main, address, check, repeats))
        self._thread.start()
        self._ready.wait()

    async def _main(self, address: str, check: Check, repeats: bool) -> None:
        self._token = trio.lowlevel.current_trio_token()
        try:
            async with connect_trio(address, check=check, repeats=repeats) as self._lake:
                self._ready.set()
                await self._end.wait()
        finally:
            self._ready.set()

    def close(self) -> None:
        trio.from_thread.run_sync(self._end.set, trio_token=self._token)
        self._thread.join()

    def _run(self, call: Callable[[TrioLake], Any]) -> Any:
        async def run() -> Any:
            return await call(self._lake)

        return trio.from_thread.run(run, trio_token=self._token)

    @property
    def known(self) -> KnownCounts:
        return self._lake.known

    def get(self, name: str) -> bytes:
        return self._run(lambda lake: lake.get(name))  # type: ignore[no-any-return]

    def get_many(self, names: Sequence[str]) -> list[bytes]:
        return self._run(lambda lake: lake.get_many(names))  # type: ignore[no-any-return]

    def get_into(self, name: str, buffer: bytearray) -> int:
        return self._run(lambda lake: lake.get_into(name, buffer))  # type: ignore[no-any-return]

    def get_many_into(self, names: Sequence[str], buffers: Sequence[bytearray]) -> list[int]:
        return self._run(lambda lake: lake.get_many_into(names, buffers))  # type: ignore[no-any-return]

    def stat(self, name: str) -> ObjectStat:
        return self._run(lambda lake: lake.stat(name))  # type: ignore[no-any-return]

    def exists(self, name: str) -> bool:
        return self._run(lambda lake: lake.exists(name))  # type: ignore[no-any-return]

    def open(self, name: str) -> OpenedInPortal:
        return OpenedInPortal(self, self._run(lambda lake: lake.open(name)))


class OpenedInPortal:
    """An opened object of a `Portal`, with the methods of a file."""

    def __init__(self, portal: Portal, opened: Any) -> None:
        self._portal, self._opened = portal, opened

    def __enter__(self) -> OpenedInPortal:
        return self

    def __exit__(self, *_: object) -> None:
        self._portal._run(lambda _: self._opened.aclose())

    @property
    def raw(self) -> Any:
        return self._opened

    def read(self) -> bytes:
        return self._portal._run(lambda _: self._opened.read())  # type: ignore[no-any-return]


KINDS: Final = ("blocking", "trio")


@contextmanager
def reader(kind: str, address: str, *, check: Check = Check.BLAKE3, repeats: bool = True) -> Iterator[Reader]:
    """Context manager: a client of that kind."""
    client: Any
    if kind == "trio":
        client = Portal(address, check, repeats=repeats)
    else:
        client = connect(address, check=check, repeats=repeats)
    try:
        yield client
    finally:
        client.close()


def outcome(call: Callable[[], Any]) -> object:
    """Return the value of a call, or its error as text."""
    try:
        return call()
    except LakeError as error:
        return f"{type(error).__name__}: {error.message}"


def read_whole(client: Reader, name: str) -> tuple[ObjectStat, bytes]:
    """Open an object; return its stat and its content."""
    with client.open(name) as opened:
        stat: ObjectStat = opened.raw.stat
        return stat, opened.read()


def into(client: Reader, name: str, room: int) -> tuple[int, bytes]:
    """Read an object into memory of that length; return the count of bytes, and the memory."""
    buffer = bytearray(room)
    return client.get_into(name, buffer), bytes(buffer)


def many_into(client: Reader, names: Sequence[str], room: int) -> tuple[list[int], list[bytes]]:
    """Read objects, each into memory of that length."""
    buffers = [bytearray(room) for _ in names]
    return client.get_many_into(names, buffers), [bytes(buffer) for buffer in buffers]


def everything(client: Reader, names: Sequence[str], room: int) -> list[object]:
    """Ask for each name in every way; return the outcomes in order."""
    found: list[object] = []
    for name in names:
        found += [
            outcome(lambda name=name: client.get(name)),  # type: ignore[misc]
            outcome(lambda name=name: client.stat(name)),  # type: ignore[misc]
            outcome(lambda name=name: client.exists(name)),  # type: ignore[misc]
            outcome(lambda name=name: read_whole(client, name)),  # type: ignore[misc]
            outcome(lambda name=name: into(client, name, room)),  # type: ignore[misc]
        ]
    found.append(outcome(lambda: client.get_many(names)))
    present = [name for name in names if outcome(lambda name=name: client.get(name)).__class__ is bytes]  # type: ignore[misc]
    found.append(outcome(lambda: client.get_many(present)))
    found.append(outcome(lambda: many_into(client, present, room)))
    return found


def learned(client: Reader, *names: str) -> None:
    """Read names until the client answers them by itself."""
    for name in names:
        for _ in range(20):
            before = client.known.answered
            client.get(name)
            if client.known.answered > before:
                break
        else:
            raise AssertionError(f"{name} is never answered from memory")


def requests(lake: Lake) -> list[m.Request]:
    """Note the requests that a client sends from now on."""
    sent: list[m.Request] = []
    blocking = driver_of(lake)._engine
    start = blocking.start

    def noting(request: m.Request, *args: Any, **options: Any) -> object:
        sent.append(request)
        return start(request, *args, **options)

    blocking.start = noting  # type: ignore[method-assign]
    return sent

"""Names that lead, and heads that repeat their stamps, in this process and on a clock that jumps.

A head can be stopped, as by SIGSTOP: what it asked and what it was answered stays where it is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

import trio

from engine.head.head_stamps import HeadStamps
from engine.head.names_link import NamesConnection, NamesLink
from engine.lake.embedded_names import embedded_names
from engine.metadata.group_log import ClosedGroup, PayloadBatch
from engine.process.embedded import EmbeddedEngine
from engine.requests.bind import BindGate
from engine.requests.table import NamesService
from engine.store.keyed_store import KeyedStore
from lakefs.ids import EMPTY_BLOB
from lakefs.stamps.stamps import STAMP
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from tests.names_rig import names_store
from tests.store_rig import ask, good, run

BOOTED_NS: Final = 10**12
"""Age of the head's machine when a test begins."""
A: Final = ("bkt", "a")


def boottime_ns() -> int:
    """Return the time of the heads' machines."""
    return BOOTED_NS + int(trio.current_time() * 1e9)


class Paused:
    """A client of names whose head may be stopped; `asked` has the requests that it has sent."""

    def __init__(self, client: EmbeddedEngine) -> None:
        self.client = client
        self.running = trio.Event()
        self.running.set()
        self.asked: list[m.Request] = []

    async def call(self, request: m.Request, *arguments: Any, **named: Any) -> Reply:
        await self.running.wait()
        self.asked.append(request)
        reply = await self.client.call(request, *arguments, **named)
        await self.running.wait()
        return reply


class Head:
    """A head: its stamps, its own connection, and that of one client."""

    def __init__(self, service: NamesService, nursery: trio.Nursery) -> None:
        self._service = service
        self.stamps = HeadStamps(boottime_ns)
        self.lost = trio.Event()
        self.own: Paused | None = None
        self.link = NamesLink(nursery, self.connect, lambda: None)
        self.link.learn = self.stamps.learn
        self._kept: list[bytes] = []

    def connect(self) -> AbstractAsyncContextManager[NamesConnection]:
        return embedded_names(self._service, self.lost.wait)()

    @asynccontextmanager
    async def own_connection(self) -> AsyncIterator[NamesConnection]:
        async with self.connect() as connection:
            assert isinstance(connection.client, EmbeddedEngine)
            self.own = Paused(connection.client)
            yield connection._replace(client=self.own)  # type: ignore[arg-type]

    def stop(self) -> None:
        assert self.own is not None
        self.own.running = trio.Event()

    def go_on(self) -> None:
        assert self.own is not None
        self.own.running.set()

    def lose(self) -> None:
        """Lose all connections to the names."""
        self.lost.set()
        self.lost = trio.Event()

    async def stat(self, *names: tuple[str, str], durable: bool = True) -> list[bytes]:
        """Return the stamps of an answer for the client."""
        request = m.StatNames(list(names) or [A], stamps=await self.stamps.join(self.link), durable=durable)
        answer = await self.link.ask(request, m.NameResults)
        return [result.stamps for result in answer.results]

    def repeats(self, stamps: bytes) -> bool:
        """Return True if a client of this head would repeat an answer now."""
        return bool(stamps) and self.has_right() and self.equal(stamps)

    def has_right(self) -> bool:
        return self.right_end_s() > trio.current_time()

    def right_end_s(self) -> float:
        return (self.stamps._stamps.right_end_ns - BOOTED_NS) / 1e9

    def equal(self, stamps: bytes) -> bool:
        slots = dict(STAMP.iter_unpack(stamps))
        return self.stamps._stamps.read(list(slots)) == list(slots.values())


class Names:
    """Names that lead, with heads and a client of another machine."""

    def __init__(self, store: KeyedStore, nursery: trio.Nursery) -> None:
        self.store = store
        assert store.metadata.turns is not None
        self.turns = store.metadata.turns
        self.service = NamesService(store, gate=BindGate())
        self.client = EmbeddedEngine(self.service, descriptors=False)
        self.heads: list[Head] = []
        self._nursery = nursery

    async def begin(self, heads: int) -> None:
        for _ in range(heads):
            head = Head(self.service, self._nursery)
            self.heads.append(head)
            self._nursery.start_soon(head.stamps.run, head.own_connection)
        await self.until(lambda: all(head.has_right() for head in self.heads))

    async def until(self, happens: Any) -> None:
        with trio.fail_after(100):
            while not happens():  # noqa: ASYNC110 - as users see it
                await trio.sleep(0.01)

    async def change(self, key: str = "a", *, durable: bool = True) -> float:
        """Bind a name anew; returns how long that took."""
        before = trio.current_time()
        changes = [m.NameChange("bkt", key, EMPTY_BLOB, m.ObjectAttributes(), create_bucket=True)]
        request = m.BindBlobs(m.Answered(0, 0), changes, [0], [1], durable)
        good(await ask(self.client, request, m.NameResults))
        return trio.current_time() - before

    async def look(self, *, durable: bool = True) -> float:
        """Read the name; returns how long that took."""
        before = trio.current_time()
        await ask(self.client, m.StatNames([A], durable=durable), m.NameResults)
        return trio.current_time() - before

    async def end(self) -> None:
        for head in self.heads:
            if head.own is not None:
                head.own.running.set()
            await head.link.aclose()
        self._nursery.cancel_scope.cancel()
        for head in self.heads:
            head.stamps.close()
        with trio.CancelScope(shield=True):
            await self.client.aclose()


@asynccontextmanager
async def names_with(store: KeyedStore, heads: int = 1) -> AsyncIterator[Names]:
    """Serve names to so many heads, all of which have a right."""
    async with trio.open_nursery() as nursery:
        names = Names(store, nursery)
        await names.begin(heads)
        await names.change()
        yield names
        await names.end()


Scene = Callable[[Names], Awaitable[None]]


def scene(body: Scene, heads: int = 1) -> None:
    async def main() -> None:
        with trio.fail_after(1000):
            async with names_store() as store, names_with(store, heads) as names:
                await body(names)

    run(main)


class HeldLog:
    """The log of a store, which holds what is appended back until it is let go."""

    def __init__(self, store: KeyedStore) -> None:
        self._committer = store.metadata._committer
        self._log = self._committer.log
        self.may_append = trio.Event()
        self._committer.log = self

    @property
    def kept(self) -> Any:
        return self._log.kept

    async def append(self, group: ClosedGroup | None, payload: PayloadBatch | None) -> None:
        await self.may_append.wait()
        await self._log.append(group, payload)

    async def wait_kept(self, sequence: Any) -> None:
        await self._log.wait_kept(sequence)

"""A TCP proxy of the tests' own in front of a server: loses answers, holds requests back, cuts connections."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import trio

_BROKEN = trio.BrokenResourceError, trio.ClosedResourceError


class CuttingProxy:
    """The proxy.  Made by `cutting_proxy`."""

    def __init__(self, host: str, port: int) -> None:
        self.url = ""
        self.is_away = False
        """True: new connections are cut at once."""
        self.loses_answers = False
        """True: bytes from the server are dropped."""
        self.keeps_requests = False
        """True: bytes to the server are kept, for `deliver`."""
        self.kept: list[tuple[trio.SocketStream, bytes]] = []
        self._target = host, port
        self._streams: set[trio.SocketStream] = set()

    async def cut(self) -> None:
        """End all connections to clients; those to the server that have kept requests stay."""
        for stream in list(self._streams):
            await trio.aclose_forcefully(stream)

    async def deliver(self) -> None:
        """Let the kept requests arrive, though their clients have gone."""
        for server, request in self.kept:
            await server.send_all(request)

    async def serve(self, client: trio.SocketStream) -> None:
        """Carry one connection."""
        if self.is_away:
            await trio.aclose_forcefully(client)
            return
        self._streams.add(client)
        server = await trio.open_tcp_stream(*self._target)
        async with server, trio.open_nursery() as nursery:
            nursery.start_soon(self._carry_answers, server, client)
            with suppress(*_BROKEN):
                await self._carry_requests(client, server)
            self._streams.discard(client)
            if any(kept is server for kept, _ in self.kept):
                await trio.sleep_forever()
            nursery.cancel_scope.cancel()

    async def _carry_requests(self, client: trio.SocketStream, server: trio.SocketStream) -> None:
        async for received in client:
            if self.keeps_requests:
                self.kept.append((server, bytes(received)))
            else:
                await server.send_all(received)

    async def _carry_answers(self, server: trio.SocketStream, client: trio.SocketStream) -> None:
        async for received in server:
            if not self.loses_answers:
                with suppress(*_BROKEN):
                    await client.send_all(received)
        await trio.aclose_forcefully(client)


@asynccontextmanager
async def cutting_proxy(url: str) -> AsyncIterator[CuttingProxy]:
    """Run a proxy to the server at `http://HOST:PORT`."""
    host, port = url.removeprefix("http://").split(":")
    proxy = CuttingProxy(host, int(port))
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, proxy.serve, 0, host="127.0.0.1"))
        proxy.url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        yield proxy
        nursery.cancel_scope.cancel()

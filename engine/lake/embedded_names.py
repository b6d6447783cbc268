"""Connections of a head to names in its own process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from engine.head.names_link import ConnectNames, NamesConnection
from engine.process.embedded import EmbeddedEngine
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineService
from lakefs.wire.frames import PROTOCOL_VERSION


def embedded_names(
    service: EngineService, wait_ended: Callable[[], Awaitable[None]] = trio.sleep_forever
) -> ConnectNames:
    """Return what connects clients of a head to a service in this process, which ends when `wait_ended` returns."""

    @asynccontextmanager
    async def connect() -> AsyncIterator[NamesConnection]:
        client = EmbeddedEngine(service, descriptors=False)
        try:
            hello = (await client.call(m.Hello(PROTOCOL_VERSION, "head"))).message
            assert isinstance(hello, m.HelloReply), hello
            yield NamesConnection(client, hello, wait_ended)
        finally:
            with trio.CancelScope(shield=True):
                await client.aclose()

    return connect

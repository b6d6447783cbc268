"""Connected streams for tests of a network."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio
import trio.testing

from gateway.http.tls import TlsStream
from lakefs.ports import Network, Stream

Kind = tuple[Callable[[], Network], str]
Pair = Callable[[Stream, Stream], Awaitable[None]]


def with_pair(kind: Kind, body: Pair) -> None:
    """Run `body(client, server)` on a connected pair."""

    async def main() -> None:
        make, address = kind
        network = make()
        listener = await network.listen(address)
        client = await network.connect(listener.address)
        server = await listener.accept()
        try:
            async with trio.open_nursery() as nursery:
                for stream in (client, server):
                    if isinstance(stream, TlsStream):  # both have to speak before either can
                        nursery.start_soon(stream.shake_hands)
            await body(client, server)
        finally:
            await client.aclose()
            await server.aclose()
            await listener.aclose()

    trio.run(main)


async def receive_exactly(stream: Stream, count: int) -> bytes:
    memory = memoryview(bytearray(count))
    left = memory
    while left:
        received = await stream.receive_into(left)
        assert received, "the stream ended early"
        left = left[received:]
    return bytes(memory)

"""Reports from the processes of a gateway to their leader: one line of JSON a second, over a pair of sockets.

Rules kept here:
- A member whose leader is gone stops: nothing else would restart it, or stop it.
- A leader takes a line of at most REPORT_BYTES_MAX; it stops listening to a member that sends more, or no JSON.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final

import msgspec
import trio

from gateway.s3.telemetry.traffic import Connections, Snapshot

REPORT_EVERY_S: Final = 1.0
REPORT_BYTES_MAX: Final = 256 << 10
"""Some 600 figures take 10 KiB at most."""


class Report(msgspec.Struct, frozen=True):
    """The state of one process, and its traffic."""

    not_ready: str | None
    counts: Snapshot
    connections: Connections


_DECODER: Final = msgspec.json.Decoder(Report)


async def send_reports(descriptor: int, report: Callable[[], Report], leader_gone: trio.Event) -> None:
    """Send reports until the leader is gone, then set `leader_gone`."""
    with socket.socket(fileno=descriptor) as raw:
        raw.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(raw.dup()))
    try:
        async with stream:
            while True:
                await stream.send_all(msgspec.json.encode(report()) + b"\n")
                with trio.move_on_after(REPORT_EVERY_S):
                    if not await stream.receive_some(1):
                        break
    except trio.BrokenResourceError:
        pass  # the leader is gone
    leader_gone.set()


async def receive_reports(stream: trio.abc.ReceiveStream, heard: Callable[[Report], None]) -> None:
    """Pass each report to `heard`, until the member has ended or sends anything else."""
    received = bytearray()
    try:
        async for piece in stream:
            received += piece
            *lines, rest = received.split(b"\n")
            for line in lines:
                heard(_DECODER.decode(line))
            received = rest
            if len(received) > REPORT_BYTES_MAX:
                return
    except (trio.BrokenResourceError, msgspec.DecodeError):
        return

"""Puts over RDMA: slots of the client's memory are READ into registered buffers, and copied to the payloads' memory.

The payload is hashed and written from that memory, which no client reaches: what a client writes to its slot during the
READ changes only what is stored for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.chunks.payload import Payload
from engine.fabric.bounce_memory import add_piece
from engine.fabric.engine_fabric import ServedLink
from lakefs.errors import InvalidArgument
from lakefs.limits import BOUNCE_BYTES
from lakefs.ports import Offload
from lakefs.transport.fabric import Piece
from lakefs.wire.fabric_messages import FabricMemory


def check_slots(memory: FabricMemory, offsets: Sequence[int], lengths: Sequence[int]) -> None:
    """Raise InvalidArgument unless each slot lies in the client's memory."""
    for offset, length in zip(offsets, lengths, strict=True):
        if not 0 <= offset <= offset + length <= memory.size_bytes:
            raise InvalidArgument(f"{offset}+{length} is outside a memory of {memory.size_bytes} bytes")


async def read_slots(
    link: ServedLink, memory: FabricMemory, offsets: Sequence[int], payloads: Sequence[Payload], offload: Offload
) -> None:
    """Fill payloads from the slots, which were checked.  SessionLost when the queue pair is lost."""
    for batch in _batches(offsets, payloads):
        async with link.bounce() as bounce:
            pieces: list[Piece] = []
            for payload, offset, place in batch:
                if payload.length:
                    address = memory.address + offset
                    add_piece(pieces, Piece(bounce.region, place, address, memory.key, payload.length))
            await link.move(pieces)
            await offload.run(_copy, bounce.mapping, batch)


_Placed = tuple[Payload, int, int]
"""A payload, its slot's offset in the client's memory, and its place in the buffer."""


def _batches(offsets: Sequence[int], payloads: Sequence[Payload]) -> Iterator[list[_Placed]]:
    """Lay payloads out one behind the other, as many as fit into a buffer."""
    batch: list[_Placed] = []
    end = 0
    for payload, offset in zip(payloads, offsets, strict=True):
        if end + payload.length > BOUNCE_BYTES:
            yield batch
            batch, end = [], 0
        batch.append((payload, offset, end))
        end += payload.length
    if batch:
        yield batch


def _copy(buffer: memoryview, batch: Sequence[_Placed]) -> None:
    for payload, _, place in batch:
        target = payload.small if payload.area is None else payload.area
        assert target is not None, "a payload has memory"
        target[: payload.length] = buffer[place : place + payload.length]

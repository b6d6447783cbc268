"""Puts from shared memory as steps: the engine copies slots of lent memory; no payload passes the socket.

Where memory cannot be lent (over TCP, to an engine that has no more room for lendings, or does not support them) the
bytes are sent instead.

Rules kept here:
- A memory is lent when it is first used, and again over a new connection: the engine answers SessionLost to a number
  that it does not know, and has then done nothing.
- A request names slots of one memory, at most 16 MiB.
- After a put has ended, in whatever way, what is written to its slots is bound to no name or key.  If it was cancelled,
  their lending is ended.  If its connection was lost, that was shut down first, and the engine binds what it copied
  only while the connection is open (docs/protocol.md).
"""

from __future__ import annotations

from collections.abc import Callable

from lakefs.content.chunking import CutPlan, iter_extents
from lakefs.errors import EngineBusy, LakeError, PermissionDenied, SessionLost, UnsupportedVersion
from lakefs.limits import STORE_REQUEST_CHUNKS, STORE_WINDOW
from lakefs.put.shared_memory import LentMemories, SharedMemory, Slot
from lakefs.put.upload import ATTEMPTS, Transfer, Upload, note_stored, store_manifests
from lakefs.steps.steps import Pipeline, Send, Steps, Tell, send
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import LendMemory, MemoryLent, Request, ReturnMemory, StoreSlots


def lend(transfer: Transfer, memory: SharedMemory) -> Steps[int | None]:
    """Return the engine's number for the memory, lending it if it is not lent; None if it cannot be lent."""
    lent = transfer.lent
    if lent is None or not transfer.offers.lent_memory:
        return None
    known = lent.get(memory)
    if known is not None:
        return known
    request = LendMemory(memory.size_bytes, writable=True)
    try:
        reply = yield from send(request, descriptors=[memory.descriptor])
    except (PermissionDenied, UnsupportedVersion, EngineBusy):
        return None
    assert isinstance(reply.message, MemoryLent)
    known = lent.get(memory)
    if known is not None:  # another operation was faster
        yield Tell(ReturnMemory(reply.message.memory))
        return known
    lent[memory] = reply.message.memory
    return reply.message.memory


def send_slots(transfer: Transfer, memory: SharedMemory, request_for: Callable[[int], Request]) -> Steps[Reply | None]:
    """Send a request that names the memory by its number; None if it cannot be lent.  For requests of no session."""
    for attempt in range(ATTEMPTS):
        number = yield from lend(transfer, memory)
        if number is None:
            return None
        try:
            return (yield from send(request_for(number)))
        except SessionLost:
            forget_number(transfer.lent, memory, number)
            if attempt == ATTEMPTS - 1:
                raise
        except LakeError:
            raise
        except BaseException:
            yield from take_back(transfer, memory)
            raise
    raise AssertionError("unreachable")


def forget_number(lent: LentMemories | None, memory: SharedMemory, number: int) -> None:
    """Note that the memory is no longer lent under that number: its connection has ended."""
    assert lent is not None, "a memory with a number was lent"
    if lent.get(memory) == number:
        del lent[memory]


def take_back(transfer: Transfer, memory: SharedMemory) -> Steps[None]:
    """End the lending after a put was cancelled: else slots filled anew could be stored under the old names."""
    if transfer.lent is not None:
        try:
            yield from return_memory(transfer.lent, memory)
        except LakeError:
            return  # it ends with its connection


def store_by_slots(upload: Upload, slot: Slot, number: int, plan: CutPlan) -> Steps[None]:
    """Store the bytes of a slot of lent memory as an upload's chunks.  SessionLost: begin the put again."""
    pipeline = Pipeline(STORE_WINDOW)
    try:
        extents = list(iter_extents(plan.lengths()))
        for first in range(0, len(extents), STORE_REQUEST_CHUNKS):
            batch = extents[first : first + STORE_REQUEST_CHUNKS]
            offsets = [slot.offset + offset for offset, _ in batch]
            lengths = [length for _, length in batch]
            request = StoreSlots(upload.session, number, offsets, lengths)
            yield from pipeline.submit(Send(request), note_stored(upload, lengths))
            yield from store_manifests(upload, pipeline)
        yield from pipeline.drain()
    except SessionLost:
        forget_number(upload.transfer.lent, slot.memory, number)
        raise


def return_memory(lent: LentMemories, memory: SharedMemory) -> Steps[None]:
    """End the lending of a memory, if it is lent.  On return the engine no longer touches it."""
    number = lent.pop(memory, None)
    if number is not None:
        yield from send(ReturnMemory(number))

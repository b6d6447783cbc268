"""Pools that the engine writes to: lent by their descriptor on one machine, registered for RDMA over a network.

Rules kept here:
- A pool is lent when it is first used, and again when the engine no longer knows its number.  It is registered once.
- After a load has failed or was cancelled, nothing more is written to the pool: the lending is ended, or the
  registration, which ends the engine's WRITEs with it.  So it is when a load fails for another reason while its
  connection is lost: the engine may still serve that connection's requests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from lakefs.errors import (
    EngineBusy,
    EngineUnreachable,
    FabricFailed,
    LakeError,
    PermissionDenied,
    SessionLost,
    UnsupportedVersion,
)
from lakefs.get.opened import Access
from lakefs.get.pools import Pool
from lakefs.steps.steps import Steps, Tell, send, work
from lakefs.wire.fabric_messages import FabricMemory
from lakefs.wire.messages import LendMemory, MemoryLent, ReturnMemory

if TYPE_CHECKING:
    from lakefs.fabric.client_fabric import ClientFabric, ClientLink
    from lakefs.transport.fabric import Region

ATTEMPTS: Final = 3
"""Times that a load is begun: over RDMA, over another queue pair, and streamed."""


class LentPool(NamedTuple):
    """The name of a pool in requests: the number of its lending, or as memory for RDMA (then the number is 0).

    `link`, `region`: the queue pair and the registration for RDMA.
    """

    number: int
    fabric: FabricMemory | None = None
    link: ClientLink | None = None
    region: Region | None = None


def into_lent_pool(
    access: Access,
    pool: Pool,
    slots: Sequence[tuple[int, int]],
    load: Callable[[LentPool], Steps[list[int]]],
    stream: Callable[[], Steps[list[int]]],
) -> Steps[list[int]]:
    """Lend the pool and return what `load` returns for it; if it cannot be lent, what `stream` returns.

    `slots`: (offset, room) of all that the load may write to.

    `load` is run again when its connection was lost, unless no engine came in time; with any other error of the lake
    it has nothing in flight.
    """
    for attempt in range(ATTEMPTS):
        lent = yield from lend_pool(access, pool)
        if lent is None:
            return (yield from stream())
        try:
            return (yield from load(lent))
        except SessionLost as error:
            # The engine may still serve the lost connection's requests.
            yield from take_back_pool(access, pool, lent, slots, failure=error)
            if attempt == ATTEMPTS - 1:
                raise
        except LakeError as error:
            if _is_left_behind(access, lent):
                yield from take_back_pool(access, pool, lent, slots, failure=error)
            elif isinstance(error, EngineUnreachable) and lent.link is None:
                pool.leave_behind(slots)  # the requests before may have been given up with their connection
            raise  # else nothing is in flight
        except BaseException:
            yield from take_back_pool(access, pool, lent, slots)
            raise
    raise AssertionError("the last attempt has returned or raised")


def _is_left_behind(access: Access, lent: LentPool) -> bool:
    """Return True if the engine may still WRITE to the pool for requests of a connection that was lost."""
    return lent.link is not None and access.fabric is not None and not access.fabric.is_held(lent.link)


def take_back_pool(
    access: Access, pool: Pool, lent: LentPool, slots: Sequence[tuple[int, int]], *, failure: LakeError | None = None
) -> Steps[None]:
    """End the lending after a load was cancelled, or failed: else requests in flight could write to the next load's
    slots.  An engine that cannot be asked, and may go on, keeps the pages of the slots, and the pool has others.

    `failure`: its connection was lost; EngineUnreachable when no engine came in time, so that nobody waits again.
    """
    if lent.link is not None:
        pool.unregister(lent.region)
        assert access.fabric is not None, "it has registered the pool"
        access.fabric.retire(lent.link, failure)
        return
    pool.forget(lent.number)
    try:
        yield from send(ReturnMemory(lent.number))
    except EngineUnreachable:
        if failure is None or failure.goes_on:
            pool.leave_behind(slots)
        if failure is not None:
            raise
    except LakeError:
        return  # it ends with its connection


def return_pool(pool: Pool) -> Steps[None]:
    """End the lending; does nothing if the pool is not lent, or belongs to another process.

    On return the engine no longer touches the memory.
    """
    number, pool.number = pool.number, None
    if number is not None and pool.is_own:
        yield from send(ReturnMemory(number))


def lend_pool(access: Access, pool: Pool) -> Steps[LentPool | None]:
    """Return how requests name the pool, lending it if it is not lent; None if it cannot be lent."""
    if pool.number is not None:
        return LentPool(pool.number)
    if pool.is_refused:
        return None
    if not access.offers.lent_memory:
        return (yield from _registered(access, pool))
    try:
        reply = yield from send(LendMemory(pool.size_bytes, True), descriptors=[pool.descriptor])
    except EngineBusy:
        return None
    except (PermissionDenied, UnsupportedVersion):
        pool.is_refused = True
        return None
    assert isinstance(reply.message, MemoryLent)
    if not pool.note_lent(reply.message.memory):  # another operation was faster
        yield Tell(ReturnMemory(reply.message.memory))
    return _lent(pool)


def _lent(pool: Pool) -> LentPool | None:
    return None if pool.number is None else LentPool(pool.number)


def _registered(access: Access, pool: Pool) -> Steps[LentPool | None]:
    """Register the pool for the engine's WRITEs, if there is a queue pair; None: stream."""
    fabric = access.fabric
    link = None if fabric is None else (yield from fabric.connected())
    if fabric is None or link is None:
        return None
    if pool.region is None:
        try:
            yield from work(_register, fabric, pool, _address(pool.buffer))
        except FabricFailed as error:
            pool.is_refused = True
            fabric.note_refusal(error)
            return None
    return _reached(pool, link)


def _register(fabric: ClientFabric, pool: Pool, address: int) -> None:
    """Register the pool, once.  Blocks.  FabricFailed.  A cancelled load leaves the registration to the pool."""
    region = fabric.register_writable(address, pool.size_bytes)
    if not pool.note_registered(region):  # another operation was faster, or the pool was closed
        region.close()


def _reached(pool: Pool, link: ClientLink) -> LentPool | None:
    region = pool.region
    if region is None:
        return None
    return LentPool(0, FabricMemory(region.remote_key, region.address, pool.size_bytes), link, region)


def _address(memory: memoryview) -> int:
    """Return the address of writable memory, which the caller keeps."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))

"""A process of a lake with etcd is known by a key on a lease, and the members of its machine take shards by that lease.

    key        present/ID, a `HeadRecord`: status lists the heads; one that ends, or is cut off, disappears by itself
    deadline   half of the lease behind the sending of its last renewal, on CLOCK_BOOTTIME: members look at it in memory
               that they share with this process (`SharedDeadline`)

Rules kept here:
- Members take shards, offers and marks up to the deadline; reads and keys of spaces go on behind it, as content is
  named by its hash.  So a member that is cut off, and whose places others get, counts for no answer: the other half of
  the lease is left for what was under way.
- A member does not depend on this process for its own safety: when it is stopped or dies, the deadline passes.
- At the end of the block members take nothing before the lease is revoked.
- Without an etcd there is no lease, and members take shards always.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from typing import Final

import structlog
import trio

from engine.coordinator.coordinator import Coordinator, Put
from engine.coordinator.held_lease import HeldLease, hold_lease
from engine.coordinator.records import HeadRecord, encode, present_key
from engine.host.clock import BoottimeClock
from engine.host.shared_deadline import SharedDeadline
from engine.host.tasks import plain_errors
from engine.lake.member_processes import MemberPlan
from engine.lake.plan import LakePlan
from lakefs.errors import LakeError
from lakefs.ids import new_id16
from lakefs.ports import Clock

PRESENT_LEASE_S: Final = 30
"""Members outlive 15 s without etcd: elections there take 1 to 3 s.  A head that died is listed for that long."""
_LOOK_S: Final = 1.0
_AGAIN_S: Final = 1.0
_log: Final = structlog.get_logger(__name__)


def with_deadline(plan: LakePlan, stack: AsyncExitStack) -> tuple[LakePlan, SharedDeadline]:
    """Return the plan whose members look at a deadline, and that deadline, which ends with the stack."""
    deadline = stack.enter_context(closing(SharedDeadline()))
    inherited = deadline.descriptor

    def with_it(member: MemberPlan) -> MemberPlan:
        *command, parent = member.command  # behind that word the number of the socket to the parent is appended
        command += ["--deadline", str(inherited), parent]
        return replace(member, command=command, descriptors=(*member.descriptors, inherited))

    return replace(plan, members=[with_it(member) for member in plan.members]), deadline


def head_record(plan: LakePlan, clock: Clock, *, has_members: bool) -> HeadRecord:
    """Return the record of this process."""
    machine = plan.machine.machine
    return HeadRecord(machine, socket.gethostname(), os.getpid(), clock.wall_ns(), has_members)


@asynccontextmanager
async def present(
    coordinator: Coordinator, record: HeadRecord, deadline: SharedDeadline | None = None, clock: Clock | None = None
) -> AsyncIterator[None]:
    """Be known during the block; nothing is waited for at its beginning.  `deadline`: that of members here."""
    with plain_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_keep, coordinator, record, deadline, clock or BoottimeClock())
            yield
            nursery.cancel_scope.cancel()


async def _keep(coordinator: Coordinator, record: HeadRecord, deadline: SharedDeadline | None, clock: Clock) -> None:
    put = present_key(new_id16()), encode(record)
    while True:
        try:
            async with hold_lease(coordinator, clock, PRESENT_LEASE_S) as lease:
                await coordinator.transact([], [Put(*put, lease.id)])
                await _follow(lease, deadline, clock)
        except LakeError as error:
            _log.warning("this machine has no lease at the lake's coordinator", reason=error.message)
        await trio.sleep(_AGAIN_S)


async def _follow(lease: HeldLease, deadline: SharedDeadline | None, clock: Clock) -> None:
    """Move the deadline with the lease, until that has ended."""
    try:
        while not lease.ended.is_set():
            if deadline is not None:
                deadline.set(clock.monotonic() + lease.left_s() - PRESENT_LEASE_S / 2)
            with trio.move_on_after(_LOOK_S):
                await lease.ended.wait()
    finally:
        if deadline is not None:
            deadline.end()

"""Connections to whichever replica of the names leads (`engine.coordinator.names_leader`).

Rules kept here:
- A client waits at most NAMES_CONNECT_S for a leader that answers; one that does not yet is tried again until then.
- A connect is given up when another replica leads: a machine that is cut off refuses no connection.
- A connection ends when another replica leads, or none does: another leader is a restarted engine to every client.
- On the leader's machine its Unix socket is used, if it has one.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Final

import trio

from engine.coordinator.names_leader import Leader, NamesLeader
from engine.coordinator.records import LeaderRecord
from engine.head.names_link import ConnectNames, NamesConnection, names_at
from engine.host.tasks import cancel_after, plain_errors
from lakefs.errors import EngineUnreachable
from lakefs.limits import AWAY_PAUSE_S_MIN, NAMES_CONNECT_S, NAMES_SILENCE_S
from lakefs.ports import Network

_UNIX: Final = "unix:"

ConnectTo = Callable[[LeaderRecord], ConnectNames]
"""Returns what connects to a leader."""


def leader_at(
    machine: str, *, token: str = "", network: Network | None = None, silence_s: float = NAMES_SILENCE_S
) -> ConnectTo:
    """Return what connects to a leader at its addresses, from a machine (`names_at`).

    EngineUnreachable for one that no other machine can reach.
    """

    def connect_to(record: LeaderRecord) -> ConnectNames:
        return names_at(address_of(record, machine), token=token, network=network, silence_s=silence_s)

    return connect_to


def address_of(record: LeaderRecord, machine: str) -> str:
    """Return the address of a leader for a process on a machine.  EngineUnreachable if there is none."""
    is_here = record.machine == machine
    usable = [address for address in record.addresses if is_here or not address.startswith(_UNIX)]
    if not usable:
        raise EngineUnreachable("the names listen for no other machine")
    return min(usable, key=lambda address: not address.startswith(_UNIX))


def names_led_by(leader: NamesLeader, connect_to: ConnectTo, failure: Callable[[], str] = str) -> ConnectNames:
    """Return what connects to the names that lead; see the head of the module.

    `failure` returns the reason for which the coordinator cannot be asked, empty if it can: refusals say it, too.
    """

    @asynccontextmanager
    async def connect() -> AsyncIterator[NamesConnection]:
        with trio.CancelScope(deadline=trio.current_time() + NAMES_CONNECT_S) as connecting, plain_errors():
            async with AsyncExitStack() as stack:
                try:
                    found, connection = await _connected(stack, leader, connect_to, connecting)
                except EngineUnreachable as error:
                    raise _refusal(error.message, failure()) from error
                connecting.deadline = math.inf
                yield connection._replace(wait_ended=partial(_wait_ended, leader, found, connection))
        if connecting.cancelled_caught:
            raise _refusal("no replica of the names leads", failure())

    return connect


def _refusal(message: str, failure: str) -> EngineUnreachable:
    return EngineUnreachable(f"{message}; and who leads is not known: {failure}" if failure else message)


async def _connected(
    stack: AsyncExitStack, leader: NamesLeader, connect_to: ConnectTo, connecting: trio.CancelScope
) -> tuple[Leader, NamesConnection]:
    """Return the leader and a connection to it, which ends with the stack.  EngineUnreachable within the deadline."""
    while True:
        found = await leader.wait()
        try:
            return found, await stack.enter_async_context(_while_it_leads(leader, found, connect_to(found.record)))
        except EngineUnreachable:
            if trio.current_time() + AWAY_PAUSE_S_MIN >= connecting.deadline:
                raise
        await trio.sleep(AWAY_PAUSE_S_MIN)


@asynccontextmanager
async def _while_it_leads(leader: NamesLeader, found: Leader, connect: ConnectNames) -> AsyncIterator[NamesConnection]:
    """Connect to a leader.  EngineUnreachable, also when it is deposed before there is a connection."""
    with trio.CancelScope() as connecting, plain_errors():
        async with trio.open_nursery() as nursery:
            looking = trio.CancelScope()

            async def look() -> None:
                with looking:
                    await leader.wait_deposed(found)
                    connecting.cancel()

            nursery.start_soon(look)
            async with connect() as connection:
                looking.cancel()
                yield connection
    if connecting.cancelled_caught:
        raise EngineUnreachable("the replica of the names that led does not lead any more")


async def _wait_ended(leader: NamesLeader, found: Leader, connection: NamesConnection) -> None:
    """Wait until a connection is lost, or its replica does not lead any more."""
    async with trio.open_nursery() as nursery:
        for wait in (connection.wait_ended, partial(leader.wait_deposed, found)):
            nursery.start_soon(cancel_after, wait, nursery.cancel_scope)

"""Leases of values at a head: each of them stands for a lease that the head took at a value's home.

Names keep leases of objects, homes those of values, so CloseLeases is divided.  Numbers of leases of values have
KEYED_LEASE, which no number of the names' has.

Rules kept here:
- A lease at a home ends with the client's lease, or its connection; or with the head's connection to that home, and
  then the client's lease keeps nothing.
- What a client never receives is ended at the home, and what it closes is closed, also when the request is cancelled.
- Leases of a client, of a user and of all are bounded as an engine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import trio

from engine.head.head_clients import HeadClient, HomeLease
from engine.host.tasks import run_all
from engine.members.ports import Members
from engine.requests.handlers import handles
from engine.sessions.references import Client, References
from lakefs.errors import LakeError, RequestTooLarge
from lakefs.ids import BlobId, MemberId
from lakefs.limits import LEASES_PER_CONNECTION_MAX, MEMBER_ANSWER_S, NAMES_SILENCE_S
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply

KEYED_LEASE: Final = 1 << 62
"""Added to the numbers of leases of values; a number of the names' is far below it."""


class HeadPins:
    """Leases of values, and the handler of CloseLeases."""

    def __init__(self, references: References, members: Members) -> None:
        self._references = references
        self._members = members

    def take(self, client: HeadClient, home: MemberId, chunks: Sequence[bytes], leases: Sequence[int]) -> list[int]:
        """Note leases that a home gave for chunks; returns the client's numbers.  EngineBusy: none is noted."""
        taken: list[int] = []
        try:
            for chunk in chunks:
                taken.append(self._references.lease(client, BlobId(chunk)))  # noqa: PERF401 - those before an error too
        except LakeError:
            self._references.end_leases(client, taken)
            raise
        client.values.update(zip(taken, (HomeLease(home, lease) for lease in leases), strict=True))
        return [number + KEYED_LEASE for number in taken]

    def forget(self, client: HeadClient, numbers: Iterable[int]) -> list[HomeLease]:
        """End leases of the client, and return those at homes that are to be ended."""
        own = [number - KEYED_LEASE for number in numbers]
        found = [client.values.pop(number) for number in own if number in client.values]
        self._references.end_leases(client, own)
        return found

    async def end(self, leases: Iterable[HomeLease]) -> None:
        """End leases at homes.  Those of a home that does not answer end with the connection to it."""
        by_home: dict[MemberId, list[int]] = {}
        for home, lease in leases:
            by_home.setdefault(home, []).append(lease)

        async def end_at(home: MemberId) -> None:
            try:
                (await self._members.call(home, m.CloseLeases(by_home[home]))).body.release()
            except LakeError:
                return

        with trio.CancelScope(shield=True), trio.move_on_after(MEMBER_ANSWER_S):
            await run_all(end_at, list(by_home))

    @handles(m.CloseLeases)
    async def close_leases(self, client: HeadClient, request: m.CloseLeases) -> Reply:
        if len(request.leases) > LEASES_PER_CONNECTION_MAX:
            raise RequestTooLarge(f"{len(request.leases)} leases; a connection has {LEASES_PER_CONNECTION_MAX}")
        of_names = [lease for lease in request.leases if lease < KEYED_LEASE]
        of_values = [lease for lease in request.leases if lease >= KEYED_LEASE]
        await self.end(self.forget(client, of_values))
        if of_names or not of_values:
            with trio.CancelScope(shield=True), trio.move_on_after(NAMES_SILENCE_S):
                await client.names.ask(m.CloseLeases(of_names), m.Done)
        return Reply(m.Done())

    async def disconnected(self, client: Client) -> None:
        """End the leases of a connection that ends."""
        assert isinstance(client, HeadClient)
        await self.end(self.forget(client, [number + KEYED_LEASE for number in client.values]))

"""Runs a request's look or decision on one view or transaction, then waits until the state it saw is durable."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from engine.metadata.metadata_store import Metadata
from engine.namespace.tree import ChangedBy
from engine.sessions.references import Client
from engine.tables.views import Transaction, View
from lakefs.errors import UserError

T = TypeVar("T")


class Decisions:
    """Looks and decisions on one store's metadata.  A look's refusal waits for durability too."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    async def look(self, look: Callable[[View], T], durable: bool = True) -> T:
        """Return what `look` finds on a view of now: once that state is durable, or at once without `durable`."""
        refusal: UserError | None = None
        with self._metadata.view() as view:
            try:
                found = look(view)
            except UserError as error:
                refusal = error
            sequence = view.sequence
        if durable:
            await self._metadata.wait_durable(sequence)
        if refusal is not None:
            raise refusal
        return found

    async def change(
        self, client: Client, decide: Callable[[Transaction], T], durable: bool = True, *, grows: bool = True
    ) -> T:
        """Run `decide` for a client; durable on return, or with `durable` false visible.

        `grows` false: the change adds nothing that stays, and is accepted even when the disk is full.
        """

        def decide_for_client(txn: Transaction) -> T:
            txn.note(ChangedBy(client))
            return decide(txn)

        result, sequence = await self._metadata.commit(decide_for_client, durable=durable, grows=grows)
        if durable:
            await self._metadata.wait_durable(sequence)
        return result

"""How a request looks or decides: on one view or transaction, and the wait until what it rests on is durable."""

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
    """Looks and decisions on one store's metadata; refusals wait as answers do."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    async def look(self, look: Callable[[View], T], durable: bool = True) -> T:
        """What `look` finds on a view of this instant; without `durable` as soon as it is found."""
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
        """What `decide` decides for a client; durable on return, or with `durable` false visible.

        `grows` false: it adds nothing that stays, and is done also when the disk has no room for more.
        """

        def decide_for_client(txn: Transaction) -> T:
            txn.note(ChangedBy(client))
            return decide(txn)

        result, sequence = await self._metadata.commit(decide_for_client, durable=durable, grows=grows)
        if durable:
            await self._metadata.wait_durable(sequence)
        return result

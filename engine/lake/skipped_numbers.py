"""Numbers that are skipped when names begin again from a replica: lost groups may have used them."""

from __future__ import annotations

from typing import Final

from engine.metadata.metadata_store import Metadata
from engine.tables.views import Transaction

NUMBERS_SKIPPED: Final = 1 << 20
"""Names that a lake makes within the seconds that are lost: some ten thousand each."""


async def skip_numbers(metadata: Metadata) -> None:
    """Let numbers of nodes and births go on above those that lost groups may have used; durable on return."""

    def decide(txn: Transaction) -> None:
        txn.new_node_ids(NUMBERS_SKIPPED)
        txn.new_births(NUMBERS_SKIPPED)

    _, sequence = await metadata.commit(decide)
    await metadata.wait_durable(sequence)

"""The gc generation that the names of a lake have joined: which answers of members names are bound on.

A head binds content that members have answered as stored, in the gc generation of its session.  In the cycle of
generation g members may free what was answered below g - 1, unless the walk through the names finds it.  So names join
g before the walk begins, and from then on bind nothing on answers below g - 1.

Rules kept here:
- The check is made in the step in which content is bound, on the value that the step of joining has left: what was
  bound before that step is met by a walk that begins behind it.
- A generation is joined durably before the walk begins: names that start again refuse the same answers.
- It never goes back.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.format.generation import JOINED_KEY, pack_joined, unpack_joined
from engine.format.layouts import Table
from engine.metadata.metadata_store import Metadata
from engine.tables.views import Transaction
from lakefs.errors import SessionLost
from lakefs.ids import GcGeneration


def ignore(_: GcGeneration) -> None:
    """Do nothing: nobody but the module's own check wants to know."""


class JoinedGeneration:
    """The joined generation of one store of names.  Used on the loop."""

    def __init__(self, metadata: Metadata, on_join: Callable[[GcGeneration], None] = ignore) -> None:
        """`on_join` is called with the recorded generation now, and in the step of each that is joined."""
        self._metadata = metadata
        self._on_join = on_join
        with metadata.view() as view:
            value = view.get(Table.COUNTERS, JOINED_KEY)
        self._number = GcGeneration(0 if value is None else unpack_joined(value))
        on_join(self._number)

    @property
    def number(self) -> GcGeneration:
        """The joined generation; 0 before the first cycle."""
        return self._number

    def check_generation(self, generation: int) -> None:
        """Raise SessionLost for answers of a generation on which nothing is bound any more.

        Called by the decision that binds: content that was answered as stored in that generation, or in later ones.
        """
        if generation < self._number - 1:
            raise SessionLost(
                f"the chunks were answered as stored in gc generation {generation}, and names have joined "
                f"{self._number}; offer the chunks again"
            )

    async def join(self, generation: GcGeneration) -> None:
        """Join a generation; durable on return.  StoreReadOnly, StoreFull: it may have been joined all the same."""

        def decide(txn: Transaction) -> None:
            txn.get(Table.COUNTERS, JOINED_KEY)  # the answer waits for the present record
            if generation > self._number:
                txn.put(Table.COUNTERS, JOINED_KEY, pack_joined(generation))
                self._number = generation
                self._on_join(generation)

        _, sequence = await self._metadata.commit(decide)
        await self._metadata.wait_durable(sequence)

"""The gc generation that the names of a lake have joined: which answers of members names are bound on.

A head binds content that members have answered as stored, in the gc generation of its session.  In the cycle of
generation g members may free what was answered below g - 1, unless the walk through the names finds it.  So names join
g before the walk begins, and from then on bind nothing on answers below g - 1.

Rules kept here:
- `BindGate` refuses: it is looked at in the step in which content is bound, and learns of a generation in the step that
  records it.  What was bound before that step is met by a walk that begins behind it.
- A generation is joined durably before the walk begins: names that start again refuse the same answers.
- It never goes back.
"""

from __future__ import annotations

from engine.format.generation import JOINED_KEY, pack_joined, unpack_joined
from engine.format.layouts import Table
from engine.metadata.metadata_store import Metadata
from engine.requests.bind import BindGate
from engine.tables.views import Transaction
from lakefs.ids import GcGeneration


class JoinedGeneration:
    """The joined generation of one store of names.  Used on the loop."""

    def __init__(self, metadata: Metadata, gate: BindGate) -> None:
        """`gate` joins the recorded generation now, and each later one in the step that records it."""
        self._metadata = metadata
        self._gate = gate
        with metadata.view() as view:
            value = view.get(Table.COUNTERS, JOINED_KEY)
        gate.join(GcGeneration(0 if value is None else unpack_joined(value)))

    @property
    def number(self) -> GcGeneration:
        """The joined generation; 0 before the first cycle."""
        return self._gate.joined_generation

    async def join(self, generation: GcGeneration) -> None:
        """Join a generation; durable on return.  StoreReadOnly, StoreFull: it may have been joined all the same."""

        def decide(txn: Transaction) -> None:
            txn.get(Table.COUNTERS, JOINED_KEY)  # the answer waits for the present record
            if generation > self.number:
                txn.put(Table.COUNTERS, JOINED_KEY, pack_joined(generation))
                self._gate.join(generation)

        _, sequence = await self._metadata.commit(decide)
        await self._metadata.wait_durable(sequence)

"""The gc generation that the names of a lake have joined: which answers of members names are bound on.

A head binds content that members have answered as stored, in the gc generation of its session.  In the cycle of
generation g members may free what was answered below g - 1, unless the walk through the names finds it.  So names join
g before the walk begins, and from then on bind nothing on answers below g - 1.

A ring epoch is retired when no member needs its table any more; names refuse answers under it by then.

Rules kept here:
- `BindGate` refuses: it is looked at in the step in which content is bound, and learns of a generation in the step that
  records it.  What was bound before that step is met by a walk that begins behind it.
- A generation is joined durably before the walk begins: names that start again refuse the same answers.  So it is with
  epochs where others than their leader retire them (`engine.lake_gc.names_port`).
- Neither goes back.
"""

from __future__ import annotations

from engine.format.generation import JOINED_KEY, JoinedRecord, pack_joined, unpack_joined
from engine.format.layouts import Table
from engine.metadata.metadata_store import Metadata
from engine.requests.bind import BindGate
from engine.tables.views import Transaction
from lakefs.ids import GcGeneration, RingEpoch


class JoinedGeneration:
    """The joined generation of one store of names.  Used on the loop."""

    def __init__(self, metadata: Metadata, gate: BindGate) -> None:
        """`gate` takes what is recorded now, and all that is recorded later in the step that does so."""
        self._metadata = metadata
        self._gate = gate
        with metadata.view() as view:
            value = view.get(Table.COUNTERS, JOINED_KEY)
        found = JoinedRecord() if value is None else unpack_joined(value)
        gate.join(GcGeneration(found.generation))
        gate.retire_below(RingEpoch(found.oldest_epoch))

    @property
    def number(self) -> GcGeneration:
        """The joined generation; 0 before the first cycle."""
        return self._gate.joined_generation

    async def join(self, generation: GcGeneration) -> None:
        """Join a generation; durable on return.  StoreReadOnly, StoreFull: it may have been joined all the same."""
        await self._record(generation, RingEpoch(0))

    async def refuse_below(self, epoch: RingEpoch) -> None:
        """Refuse answers under ring epochs before this one; durable on return.  Errors as those of `join`."""
        await self._record(GcGeneration(0), epoch)

    async def _record(self, generation: GcGeneration, epoch: RingEpoch) -> None:
        """Record what is higher than in the record.  It may be less than the gate has, which the record is not for."""

        def decide(txn: Transaction) -> None:
            value = txn.get(Table.COUNTERS, JOINED_KEY)  # the answer waits for the present record
            known = JoinedRecord() if value is None else unpack_joined(value)
            wanted = max(known.generation, generation), max(known.oldest_epoch, epoch)
            if wanted != (known.generation, known.oldest_epoch):
                txn.put(Table.COUNTERS, JOINED_KEY, pack_joined(*wanted))
                self._gate.join(generation)
                self._gate.retire_below(epoch)

        _, sequence = await self._metadata.commit(decide)
        await self._metadata.wait_durable(sequence)

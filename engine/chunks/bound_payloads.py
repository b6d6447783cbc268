"""Stores payloads and binds names or keys to them, in one journal group, without a session.

Rules kept here:
- A payload that is in the store already is not written.  If gc frees its chunk before the decision, it is written
  after all.
- Every chunk of the payloads has a record when `bind` runs, in its transaction, and gc keeps it from then on: a cycle
  that is marking marks it in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from engine.chunks.chunk_store import Chunks, find_chunk, first_of_each
from engine.chunks.ingest import Choose
from engine.chunks.payload import Hashed, Payload, Written
from engine.metadata.metadata_store import Metadata
from engine.sessions.references import References
from engine.tables.views import Transaction
from lakefs.ids import EMPTY_CHUNK, ChunkId

T = TypeVar("T")


class _Vanished(Exception):
    """A chunk that was present was removed before commit; the transaction is dropped and the payload stored."""


class BoundPayloads:
    """Stores payloads with what is bound to them."""

    def __init__(self, metadata: Metadata, chunks: Chunks, references: References) -> None:
        self._metadata = metadata
        self._chunks = chunks
        self._references = references

    async def store(
        self,
        payloads: Sequence[Payload],
        bind: Callable[[Transaction, Sequence[Hashed]], T],
        *,
        durable: bool = True,
        bound: Callable[[T, Sequence[bool]], T] = lambda result, fresh: result,
    ) -> T:
        """Store payloads and run `bind` with their ids, in order, in the transaction that records their chunks.

        `bound` gets its result, and for each payload if it is new in the store, in the same step, after the change;
        returns what that returns.  Durable on return, with `durable` false visible.  `bind` may run more than once; its
        last run counts.  StoreFull, StoreReadOnly, DiskFailed, and the errors of `bind` and of fills: nothing is
        recorded then, nor when cancelled before the decision.
        """
        absent_at = self._metadata.next_birth  # what is written is looked up from now on
        hashed, written = await self._chunks.ingest.take_in(payloads, self._choose_absent())
        wanted = {item.chunk: item for item in hashed if item.chunk != EMPTY_CHUNK}

        def decide(txn: Transaction) -> T:
            self._chunks.record_in(txn, written, absent_at)
            found = () if len(written) == len(wanted) else wanted.keys() - {item.hashed.chunk for item in written}
            for chunk in found:
                record = find_chunk(txn, chunk)
                if record is None:
                    raise _Vanished
                self._references.keep(record.birth)
            return bind(txn, hashed)

        try:
            while True:
                try:
                    result, sequence = await self._metadata.commit(decide, durable=durable, grows=True)
                    break
                except _Vanished:
                    missing = self._not_present(list(wanted.values()), written)
                    written += await self._chunks.ingest.write(missing)
            fresh = first_of_each(hashed, {item.hashed.chunk for item in written})
            result = bound(result, fresh)  # no checkpoint since the decision
            if durable:
                await self._metadata.wait_durable(sequence)
        finally:
            self._chunks.ingest.settle(written)
        return result

    def _choose_absent(self) -> Choose:
        """Return a filter that picks, from chunks as they are hashed, those not in the store, each once."""
        chosen: set[ChunkId] = {EMPTY_CHUNK}

        def choose(items: Sequence[Hashed]) -> list[Hashed]:
            absent: list[Hashed] = []
            with self._metadata.view() as view:
                for item in self._chunks.absent(view, items):
                    if item.chunk not in chosen:
                        chosen.add(item.chunk)
                        absent.append(item)
            return absent

        return choose

    def _not_present(self, items: list[Hashed], written: list[Written]) -> list[Hashed]:
        """Return items that are neither recorded nor written by this request."""
        done = {item.hashed.chunk for item in written}
        with self._metadata.view() as view:
            return [item for item in self._chunks.absent(view, items) if item.chunk not in done]

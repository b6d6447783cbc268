"""KeyedPut and KeyedCommit: values stored under keys, from slots of lent memory, a body, or a session's chunks.

Rules kept here:
- A present key is answered before a byte of its value is copied from lent memory.
- Keys and chunks join one journal group; every chunk that a value refers to has a record in that transaction, or is
  held by the session.
- What was copied from slots is bound to keys only while their client is connected: afterwards the slots are its own.
- A slot that cannot be read fails its key and no other.  What stands for its bytes meanwhile are zeros of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import trio

from engine.chunks.bound_payloads import BoundPayloads
from engine.chunks.chunk_store import find_chunk
from engine.chunks.payload import Fill, Hashed, Payload, ReceivedBody, check_lengths
from engine.format.checksums import vector_of
from engine.format.keyed import KeyedValue
from engine.memory.lent_memory import LentMemory, read_into
from engine.namespace.tree import ChangedBy
from engine.requests.answers import Decisions
from engine.requests.handlers import handles
from engine.requests.home_epoch import check_home
from engine.requests.keyed_batch import KeyedBatch, batch_of_put, parts_in_body, receive_parts
from engine.sessions.references import Client
from engine.store.store import Store
from engine.tables.views import Transaction
from lakefs.errors import ChunkNotFound, InvalidArgument, OperationalError, SessionLost, SourceChanged
from lakefs.host.buffers import PooledPayload
from lakefs.ids import ChunkId, ChunkKind, SessionId, id_text, is_well_formed, kind_of
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply


class KeyedPuts:
    """Handlers of the requests that store values under keys."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keyed = store.keyed
        self._decisions = Decisions(store.metadata)
        self._bound = BoundPayloads(store.metadata, store.chunks, store.references)

    async def receive(self, request: m.KeyedPut, body_bytes: int, _: PooledPayload | None) -> ReceivedBody:
        """Allocate memory for the parts of a request that brings them in its body."""
        return await receive_parts(self._store.payload_memory, request, body_bytes)

    # --- from slots, or a body -----------------------------------------------------------------------

    @handles(m.KeyedPut)
    async def keyed_put(self, client: Client, request: m.KeyedPut, body: Body) -> Reply:
        check_home(self._store, request.epoch)
        batch = batch_of_put(request)
        if request.offsets:
            with self._store.lent.using(client, request.memory) as memory:
                await self._put_slots(client, batch, request.offsets, memory)
        else:
            await self._put_body(client, batch, parts_in_body(request, body))
        self._keyed.note_used(batch.number, batch.keys)
        return batch.reply(self._keyed)

    async def _put_body(self, client: Client, batch: KeyedBatch, payloads: Sequence[Payload]) -> None:
        await self._look(batch)
        if not batch.wanted:
            return
        with self._keyed.admitted(batch.number, await self._room_for(batch)) as decided:
            wanted = [part for index in batch.wanted for part in batch.parts(index)]
            await self._store_parts(client, batch, wanted, [payloads[part] for part in wanted], set(), decided)

    async def _put_slots(self, client: Client, batch: KeyedBatch, offsets: Sequence[int], memory: LentMemory) -> None:
        for index in batch.wanted:
            if not all(memory.has_range(offsets[part], max(0, batch.lengths[part])) for part in batch.parts(index)):
                size = memory.size_bytes
                batch.fail(index, InvalidArgument(f"a slot lies outside a lent memory of {size} bytes"))
        batch.drop_settled()
        await self._look(batch)
        if not batch.wanted:
            return  # all are present, or fail by themselves: nothing is copied, and no room is needed
        check_lengths([length for index in batch.wanted for length in batch.lengths_of(index)])  # before it takes room
        with self._keyed.admitted(batch.number, await self._room_for(batch)) as decided:
            wanted = [part for index in batch.wanted for part in batch.parts(index)]
            lengths = [batch.lengths[part] for part in wanted]
            spoiled: set[int] = set()
            taken = await self._store.payload_memory.take([ChunkKind.DATA] * len(wanted), lengths)
            try:
                for part, payload in zip(wanted, taken.payloads, strict=True):
                    payload.fill = _filler(memory, offsets[part], part, spoiled)
                await self._store_parts(client, batch, wanted, taken.payloads, spoiled, decided, of_slots=True)
            finally:
                taken.release()

    async def _look(self, batch: KeyedBatch) -> None:
        """Settle the keys that fail by themselves, and those that are present, in steps."""
        begin: int | None = 0
        while begin is not None:
            begin = await self._decisions.look(partial(batch.look, self._keyed, begin))
            if begin is not None:
                await trio.lowlevel.checkpoint()

    async def _room_for(self, batch: KeyedBatch) -> int:
        """Wait until the batch's space has room, a moment at most; returns the charge of the keys that find room.

        The others fail.
        """
        charges = [batch.charge_of(index) for index in batch.wanted]
        space = await self._keyed.room_for(batch.number, sum(charges), max(charges, default=0))
        return batch.admit(self._keyed, space)

    async def _store_parts(
        self,
        client: Client,
        batch: KeyedBatch,
        wanted: Sequence[int],
        payloads: Sequence[Payload],
        spoiled: set[int],
        decided: Callable[[], None],
        *,
        of_slots: bool = False,
    ) -> None:
        """Store the parts of the wanted keys, and settle those keys; parts in `spoiled` by then were not read."""
        if not wanted:
            return
        chunks: list[ChunkId | None] = [None] * len(batch.lengths)

        def bind(txn: Transaction, hashed: Sequence[Hashed]) -> dict[int, KeyedValue]:
            if of_slots:
                client.check_its_memory()
            txn.note(ChangedBy(client))
            for part, item in zip(wanted, hashed, strict=True):
                chunks[part] = None if part in spoiled else item.chunk
            return batch.bind(txn, self._keyed, chunks, decided)

        try:
            found = await self._bound.store(payloads, bind)
        except OperationalError as error:
            for index in batch.wanted:
                batch.fail(index, error)
            return
        batch.settle(self._keyed, chunks, found)
        for index in batch.wanted:
            if not spoiled.isdisjoint(batch.parts(index)):
                batch.fail(index, SourceChanged("the lent memory was shrunk while it was read; put the value again"))

    # --- from a session ------------------------------------------------------------------------------

    @handles(m.KeyedCommit)
    async def keyed_commit(self, client: Client, request: m.KeyedCommit) -> Reply:
        check_home(self._store, request.epoch)
        session = self._store.references.join_session(client, SessionId(request.session))
        batch = KeyedBatch(request, len(request.chunks))
        chunks: list[ChunkId | None] = [None] * len(request.chunks)
        for index in batch.wanted:
            for part in batch.parts(index):
                name = request.chunks[part]
                if not is_well_formed(name) or kind_of(ChunkId(name)) is not ChunkKind.DATA:
                    batch.fail(index, InvalidArgument("a part is a chunk of data; its id has 33 bytes"))
                    break
                held = self._store.chunks.hold(session, ChunkId(name))
                if held is None:
                    batch.fail(index, _not_stored(ChunkId(name)))
                    break
                chunks[part], batch.lengths[part] = ChunkId(name), held[0].logical_bytes
        batch.drop_settled()
        await self._look(batch)

        with self._keyed.admitted(batch.number, await self._room_for(batch)) as decided:

            def bind(txn: Transaction) -> dict[int, KeyedValue]:
                if not self._store.references.is_open(session):
                    raise SessionLost("the put session ended before its commit; store the chunks again")
                self._keep(batch, chunks, txn)
                return batch.bind(txn, self._keyed, chunks, decided)

            found = await self._decisions.change(client, bind)
        batch.settle(self._keyed, chunks, found)
        for index in batch.wanted:
            if lost := [part for part in batch.parts(index) if chunks[part] is None]:
                batch.fail(index, _not_stored(ChunkId(request.chunks[lost[0]])))
        if request.end_session and not any(outcome == m.KEYED_FAILED for outcome in batch.outcomes):
            self._store.references.end_session(session.identifier)
        self._keyed.note_used(batch.number, batch.keys)
        return batch.reply(self._keyed)

    def _keep(self, batch: KeyedBatch, chunks: list[ChunkId | None], txn: Transaction) -> None:
        """Keep the chunks of the wanted keys from gc, in the step that refers to them; those that are gone become None.

        The session holds what it held when the request came.  A chunk that was found damaged since, and stored anew by
        somebody else, has a birth that the session does not hold.
        """
        for index in batch.wanted:
            for part in batch.parts(index):
                chunk = chunks[part]
                record = None if chunk is None else find_chunk(txn, chunk)
                if record is None:
                    chunks[part] = None
                else:
                    self._store.references.keep(record.birth)


def _not_stored(chunk: ChunkId) -> ChunkNotFound:
    text = id_text(chunk)
    return ChunkNotFound(f"chunk {text} is not in the store; store it again", subject=text)


def _filler(memory: LentMemory, offset: int, part: int, spoiled: set[int]) -> Fill:
    """Return a call that fills memory of the engine from a slot; it blocks.  A slot that is gone spoils its part."""

    def fill(target: memoryview, begin: int) -> bytes:
        try:
            return read_into(memory, offset + begin, target)
        except SourceChanged:
            spoiled.add(part)
            target[:] = bytes(len(target))  # nothing of another request may stand there
            return vector_of(target)

    return fill

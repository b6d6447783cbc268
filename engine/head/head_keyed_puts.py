"""KeyedPut at a head: values are stored whole at the homes of their keys, all homes at once.

    body       to each home one KeyedPut with its values
    slots      which keys have a value is asked first; the others are copied here, then put as from a body

Rules kept here:
- Each key has an outcome of its own.  That of a key whose home is away is a failure, ClusterDegraded: nothing is stored
  elsewhere.  If the home was lost while it stored the value, the value may be stored.
- A home that has a newer table refuses: its values go to their homes by that table, unseen by the client.
- What was copied from slots is put only if its client was connected after the copy: afterwards the slots are its own.
- Memory for copies is taken as for any put.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from engine.chunks.hashing import bytes_of
from engine.chunks.payload import Payload, PayloadMemory, ReceivedBody, check_lengths
from engine.head.head_clients import HeadClient
from engine.head.head_keyed import Found, KeyMatches, not_changed
from engine.head.key_homes import GIVE_ATTEMPTS, KeyHomes, members_change
from engine.host.tasks import run_all
from engine.keyed.values import key_problem, value_problem
from engine.memory.lent_memory import LentMemory, read_into
from engine.requests.handlers import handles
from engine.requests.keyed_batch import KeyedBatch, batch_of_put, parts_in_body, receive_parts
from engine.sessions.lendings import Lendings
from lakefs.errors import InvalidArgument, OperationalError, SourceChanged, StaleEpoch
from lakefs.host.buffers import PooledPayload
from lakefs.ids import Buffer, ChunkKind, MemberId, RingEpoch
from lakefs.ports import Offload
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply


class HeadKeyedPuts:
    """Handler of KeyedPut."""

    def __init__(
        self, homes: KeyHomes, matches: KeyMatches, lent: Lendings, memory: PayloadMemory, offload: Offload
    ) -> None:
        self._homes = homes
        self._matches = matches
        self._lent = lent
        self._memory = memory
        self._offload = offload

    async def receive(self, request: m.KeyedPut, body_bytes: int, _: PooledPayload | None) -> ReceivedBody:
        """Allocate memory for the parts of a request that brings them in its body."""
        return await receive_parts(self._memory, request, body_bytes)

    @handles(m.KeyedPut)
    async def keyed_put(self, client: HeadClient, request: m.KeyedPut, body: Body) -> Reply:
        batch = batch_of_put(request)
        await self._homes.check(client, request.space)
        fail_bad_keys(batch)
        fail_bad_values(batch)
        if request.offsets:
            with self._lent.using(client, request.memory) as memory:
                await self._put_slots(client, batch, request.offsets, memory)
        else:
            await self._put(client, batch, [bytes_of(payload) for payload in parts_in_body(request, body)])
        return batch.reply()

    async def _put_slots(
        self, client: HeadClient, batch: KeyedBatch, offsets: Sequence[int], memory: LentMemory
    ) -> None:
        for index in batch.wanted:
            if not all(memory.has_range(offsets[part], max(0, batch.lengths[part])) for part in batch.parts(index)):
                size = memory.size_bytes
                batch.fail(index, InvalidArgument(f"a slot lies outside a lent memory of {size} bytes"))
        batch.drop_settled()
        await settle_present(client, batch, self._matches)
        if not batch.wanted:
            return
        wanted = [part for index in batch.wanted for part in batch.parts(index)]
        lengths = [batch.lengths[part] for part in wanted]
        check_lengths(lengths)
        taken = await self._memory.take([ChunkKind.DATA] * len(wanted), lengths)
        try:
            copies = zip(wanted, taken.payloads, strict=True)
            spoiled = await self._offload.run(
                _copy_all, memory, [(part, offsets[part], payload) for part, payload in copies]
            )
            client.check_its_memory()
            for index in batch.wanted:
                if not spoiled.isdisjoint(batch.parts(index)):
                    lost = SourceChanged("the lent memory was shrunk while it was read; put the value again")
                    batch.fail(index, lost)
            batch.drop_settled()
            parts: list[Buffer] = [b""] * len(batch.lengths)
            for part, payload in zip(wanted, taken.payloads, strict=True):
                parts[part] = bytes_of(payload)
            await self._put(client, batch, parts)
        finally:
            taken.release()

    async def _put(self, client: HeadClient, batch: KeyedBatch, parts: Sequence[Buffer]) -> None:
        """Put the wanted values at their homes, and settle their keys."""
        for epoch, by_home in rounds(self._homes, batch):
            put_at = partial(self._put_at, client, batch, parts, epoch, by_home)
            await run_all(put_at, list(by_home))

    async def _put_at(
        self,
        client: HeadClient,
        batch: KeyedBatch,
        parts: Sequence[Buffer],
        epoch: RingEpoch,
        by_home: Mapping[MemberId, list[int]],
        home: MemberId,
    ) -> None:
        """Put values at their home; their keys are left without an outcome if that is another one now."""
        indexes = by_home[home]
        own = [part for index in indexes for part in batch.parts(index)]
        request = m.KeyedPut(
            batch.number,
            [batch.keys[index] for index in indexes],
            [len(batch.parts(index)) for index in indexes],
            [batch.lengths[part] for part in own],
            [batch.depths[index] for index in indexes],
            resize=batch.resize,
            epoch=epoch,
        )
        try:
            reply = await self._homes.ask(client, home, request, [parts[part] for part in own if len(parts[part])])
        except StaleEpoch:
            return
        except OperationalError as error:
            fail_all(batch, indexes, error)
        else:
            note_outcomes(batch, indexes, reply)


def _copy_all(memory: LentMemory, slots: Sequence[tuple[int, int, Payload]]) -> set[int]:
    """Copy slots; blocks.  Returns the parts whose slot cannot be read."""
    spoiled: set[int] = set()
    for part, offset, payload in slots:
        try:
            read_into(memory, offset, bytes_of(payload))
        except SourceChanged:
            spoiled.add(part)
    return spoiled


# --- outcomes ------------------------------------------------------------------------------------------


async def settle_present(client: HeadClient, batch: KeyedBatch, matches: KeyMatches) -> None:
    """Settle the wanted keys that have a value which stays."""
    found = Found()
    await matches.match(client, batch.number, batch.keys, batch.wanted, found)
    for index, value in found.values.items():
        if not batch.resize or sum(value.lengths) == batch.size_of(index):
            batch.note(index, m.KEYED_PRESENT, None)
    batch.drop_settled()


def rounds(homes: KeyHomes, batch: KeyedBatch) -> Iterator[tuple[RingEpoch, dict[MemberId, list[int]]]]:
    """Yield the ring epoch and the wanted keys of each home, again while some are left without an outcome.

    Those have another home, by a newer table.  They fail when tables change all the time.
    """
    for _ in range(GIVE_ATTEMPTS):
        if not batch.wanted:
            return
        yield homes.epoch, homes.by_home(batch.number, batch.keys, batch.wanted)
        batch.drop_settled()
    fail_all(batch, batch.wanted, members_change())
    batch.drop_settled()


def fail_bad_keys(batch: KeyedBatch) -> None:
    """Fail the keys that no value has: they have no home either."""
    for index in batch.wanted:
        problem = key_problem(batch.keys[index])
        if problem is not None:
            batch.fail(index, problem)
    batch.drop_settled()


def fail_bad_values(batch: KeyedBatch) -> None:
    """Fail the keys of values that no space takes."""
    for index in batch.wanted:
        problem = value_problem(batch.lengths_of(index), batch.depths[index], quota_bytes=0)
        if problem is not None:
            batch.fail(index, problem)
    batch.drop_settled()


def fail_all(batch: KeyedBatch, indexes: Sequence[int], error: OperationalError) -> None:
    """Fail keys whose home cannot store their values now."""
    for index in indexes:
        batch.fail(index, not_changed(error))


def note_outcomes(batch: KeyedBatch, indexes: Sequence[int], reply: Reply) -> None:
    """Note a home's answer about the keys of these indexes."""
    reply.body.release()
    answer = reply.message
    assert isinstance(answer, m.KeyedOutcomes), "the answer of a home"
    for place, (index, outcome) in enumerate(zip(indexes, answer.outcomes, strict=True)):
        batch.note(index, outcome, answer.failures[place] if answer.failures else None)

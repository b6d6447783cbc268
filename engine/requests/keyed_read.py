"""KeyedRead: values of a member's keys, found and read at once, for the head of a lake that loads them."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, takewhile

from engine.requests.answers import Decisions
from engine.requests.handlers import handles
from engine.requests.keyed_batch import check_keys
from engine.requests.keyed_load import WantedValues
from engine.requests.read_chunks import ChunkReads
from engine.requests.shards import member_of
from engine.sessions.references import Client
from engine.store.store import Store
from lakefs.limits import BODY_BYTES_MAX
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


class KeyedReads:
    """Handler of KeyedRead."""

    def __init__(self, store: Store, reads: ChunkReads) -> None:
        self._store = store
        self._keyed = store.keyed
        self._reads = reads
        self._decisions = Decisions(store.metadata)

    @handles(m.KeyedRead)
    async def keyed_read(self, client: Client, request: m.KeyedRead) -> Reply:
        member_of(self._store)
        check_keys(request.keys)
        wanted = WantedValues(m.KeyedLoad(0, request.space, request.keys, [0] * len(request.keys)))
        await self._decisions.look(partial(wanted.find, self._keyed))
        room = min(request.bytes_max, BODY_BYTES_MAX)
        count = sum(1 for _ in takewhile(lambda total: total <= room, accumulate(wanted.lengths)))
        zeros = [0] * count
        reply = await self._reads.read_chunks(client, m.ReadChunks(list(wanted.chunks[:count]), zeros, zeros))
        assert isinstance(reply.message, m.ReadChunksReply), "the answer to ReadChunks"
        found = [key for key, parts in zip(request.keys, wanted.counts, strict=True) if parts]
        self._keyed.counts.loaded += len(found)
        self._keyed.counts.loaded_bytes += reply.body.nbytes
        self._keyed.note_used(request.space, found)
        if self._store.keyed_index is not None:
            self._store.keyed_index.correct(request.space, wanted.answers())
        failures = {index: failure for index, failure in wanted.failures.items() if index not in wanted.absent}
        answer = m.KeyedFound(wanted.counts, list(wanted.chunks), wanted.lengths, reply.message.pieces)
        if failures:
            answer.failures.extend(failures.get(index) for index in range(len(request.keys)))
        return Reply(answer, reply.body)

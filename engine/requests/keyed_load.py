"""KeyedLoad: values of many keys, loaded into memory that the client has lent; their parts are loaded as by LoadSlots.

A key has one result: all its parts are in its slot, or it has a failure, the first of its parts' failures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from msgspec.structs import replace

from engine.format.keyed import KeyedValue
from engine.keyed.keyed_blobs import KeyedBlobs
from engine.keyed.spaces import find_space
from engine.keyed.values import key_problem
from engine.requests.answers import Decisions, failure_of
from engine.requests.handlers import handles
from engine.requests.keyed_batch import check_keys
from engine.requests.load_ranges import Loads
from engine.sessions.references import Client
from engine.store.store import Store
from engine.tables.views import View
from lakefs.errors import InvalidArgument, KeyNotFound, LakeError, RequestTooLarge
from lakefs.ids import ChunkId
from lakefs.limits import BATCH_MAX
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


class WantedValues:
    """The parts to load for one request, flat, and the failures of keys so far."""

    def __init__(self, request: m.KeyedLoad) -> None:
        self._request = request
        self.counts = [0] * len(request.keys)
        self.chunks: list[ChunkId] = []
        self.lengths: list[int] = []
        self.offsets: list[int] = []
        self.failures: dict[int, m.Failure] = {}
        self.absent: set[int] = set()
        """Indexes of keys without a value."""
        self.is_full = False
        """No more parts are taken, and no more records are read."""

    def find(self, keyed: KeyedBlobs, view: View) -> None:
        """Add each key's value, as `view` has it.  SpaceNotFound."""
        space, values = self._request.space, keyed.values()
        find_space(view, space)
        for index, key in enumerate(self._request.keys):
            known = not self.is_full and key_problem(key) is None
            self.add(index, values.find(view, space, key) if known else None)

    def add(self, index: int, value: KeyedValue | None) -> None:
        """Add the parts of a key's value, or its failure."""
        problem = self._problem(index, value)
        if problem is not None or value is None:
            self.failures[index] = failure_of(problem or KeyNotFound("the key has no value"))
            if problem is None:
                self.absent.add(index)
            return
        offset = self._request.offsets[index]
        for chunk, length in zip(value.chunks, value.lengths, strict=True):
            self.chunks.append(chunk)
            self.lengths.append(length)
            self.offsets.append(offset)
            offset += length
        self.counts[index] = len(value.chunks)

    def _problem(self, index: int, value: KeyedValue | None) -> LakeError | None:
        rooms = self._request.lengths
        if problem := key_problem(self._request.keys[index]):
            return problem
        if value is not None and rooms and value.size_bytes > rooms[index]:
            return InvalidArgument(f"the value has {value.size_bytes} bytes, its slot {rooms[index]}")
        if value is not None and len(self.chunks) + len(value.chunks) > BATCH_MAX:
            self.is_full = True
        if self.is_full:
            return RequestTooLarge(f"the values of the keys before it have {len(self.chunks)} parts; load fewer keys")
        return None

    def answers(self) -> Iterator[tuple[bytes, Sequence[ChunkId]]]:
        """Iterate over the keys that were looked up, each with the chunks of its value."""
        at = 0
        for index, count in enumerate(self.counts):
            if count or index in self.absent:
                yield self._request.keys[index], self.chunks[at : at + count]
            at += count

    def reply(self, loaded: m.SlotsLoaded) -> m.KeyedLoaded:
        """Return the answer: parts of the keys that were loaded whole, and the failures of the others."""
        done = m.KeyedLoaded([0] * len(self.counts), [], [], [])
        begin = 0
        for index, count in enumerate(self.counts):
            end = begin + count
            failure = next(filter(None, loaded.failures[begin:end]), None)
            if failure is not None:
                self.failures[index] = failure
            elif count:
                done.counts[index] = count
                done.chunks.extend(self.chunks[begin:end])
                done.lengths.extend(self.lengths[begin:end])
                done.crcs.extend(loaded.crcs[begin:end])
            begin = end
        if self.failures:
            done.failures.extend(self.failures.get(index) for index in range(len(self.counts)))
        return done


class KeyedLoads:
    """Handler of KeyedLoad."""

    def __init__(self, store: Store, loads: Loads) -> None:
        self._store = store
        self._keyed = store.keyed
        self._loads = loads
        self._decisions = Decisions(store.metadata)

    @handles(m.KeyedLoad)
    async def keyed_load(self, client: Client, request: m.KeyedLoad) -> Reply:
        check_keys(request.keys)
        check_lists(len(request.keys), request.offsets, request.lengths)
        wanted = WantedValues(request)
        await self._decisions.look(partial(wanted.find, self._keyed))
        slots = m.LoadSlots(request.memory, list(wanted.chunks), wanted.offsets, wanted.lengths)
        slots = replace(slots, checksums=request.checksums, fabric=request.fabric)
        answer = wanted.reply(await self._loads.load(client, slots, wanted.chunks))
        self._keyed.counts.loaded += sum(count > 0 for count in answer.counts)
        self._keyed.counts.loaded_bytes += sum(answer.lengths)
        if self._store.keyed_index is not None:
            self._store.keyed_index.correct(request.space, wanted.answers())
        loaded = (key for key, count in zip(request.keys, answer.counts, strict=True) if count)
        self._keyed.note_used(request.space, loaded)
        return Reply(answer)


def check_lists(key_count: int, offsets: Sequence[int], lengths: Sequence[int]) -> None:
    """Raise InvalidArgument unless the lists of a KeyedLoad fit each other."""
    if len(offsets) != key_count or len(lengths) not in (0, key_count):
        raise InvalidArgument("keys and offsets go together, and lengths with them when there are any")

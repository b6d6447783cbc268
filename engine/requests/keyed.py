"""Requests about spaces of keyed blobs, and those that find and remove values; `keyed_put` and `keyed_load` have the
others.

Each key is answered by itself.  An answer leaves when the state that it rests on is durable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Final

import msgspec

from engine.keyed.spaces import (
    Usage,
    check_name,
    check_space,
    find_space,
    list_spaces,
    open_space,
    opened_space,
    remove_space,
)
from engine.keyed.values import key_problem, remove_value
from engine.requests.answers import Decisions, failure_of
from engine.requests.handlers import handles
from engine.requests.home_epoch import check_home
from engine.requests.keyed_batch import KEYED_PARTS_PER_STEP, check_keys
from engine.requests.keyed_presence import KeyedPresence
from engine.requests.local_clients import require_local
from engine.sessions.references import Client
from engine.store.keyed_store import KeyedStore
from engine.store.store import Store
from engine.tables.views import Transaction, View
from lakefs.errors import RequestTooLarge, UnsupportedVersion
from lakefs.ids import BlobId, ChunkId
from lakefs.limits import KEYED_PARTS_ANSWERED_MAX
from lakefs.shared_index.table_format import entries_max
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply

_LISTS_MAX: Final = 4
"""Times that spaces are listed for an answer with a version: where values are put all the time, no list has one."""


class SpaceRequests:
    """Handlers of the requests about spaces."""

    def __init__(self, store: KeyedStore) -> None:
        self._store = store
        self._keyed = store.keyed
        self._decisions = Decisions(store.metadata)

    @handles(m.SpaceOpen)
    async def space_open(self, client: Client, request: m.SpaceOpen) -> Reply:
        check_space(request)
        opened = await self._decisions.look(lambda view: opened_space(view, request))
        if opened is not None:  # also when the disk is full
            return Reply(opened)
        if not request.create:
            return Reply(await self._open(client, request))
        async with self._store.features.using_spaces() as is_first:
            self._keyed.used.set()
            stat = await self._open(client, request)
        return Reply(msgspec.structs.replace(stat, is_first=is_first))

    async def _open(self, client: Client, request: m.SpaceOpen) -> m.SpaceStat:
        now_ns, first = self._store.clock.wall_ns(), self._store.features.next_space
        return await self._decisions.change(client, lambda txn: open_space(txn, request, now_ns, first))

    @handles(m.SpaceList)
    async def space_list(self) -> Reply:
        metadata, spaces = self._store.metadata, list[m.SpaceStat]()
        for _ in range(_LISTS_MAX):
            with metadata.view() as view:
                spaces, sequence, version = list_spaces(view), view.sequence, metadata.durable_sequence
            if sequence <= version:  # so all that is listed, and no later change is in that group
                return Reply(m.Spaces(spaces, version))
            await metadata.wait_durable(sequence)
        return Reply(m.Spaces(spaces))

    @handles(m.SpaceRemove)
    async def space_remove(self, client: Client, request: m.SpaceRemove) -> Reply:
        name = check_name(request.name)
        await self._decisions.change(client, lambda txn: remove_space(txn, name), grows=False)
        return Reply(m.Done())


class KeyedRequests:
    """Handlers of the requests that find and remove values, and of the one for the keyed index."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keyed = store.keyed
        self._decisions = Decisions(store.metadata)
        self._presence = KeyedPresence(store, self._decisions)

    @handles(m.OpenKeyedIndex)
    async def open_keyed_index(self, client: Client) -> Reply:
        require_local(client, "the keyed index is shared on the Unix socket only; use KeyedMatch instead")
        index = self._store.keyed_index
        if index is None:
            raise UnsupportedVersion("this engine shares no keyed index; use KeyedMatch instead")
        index.counts.lent += 1
        return Reply(m.KeyedIndexOpened(entries_max(index.table.capacity)), descriptors=[index.backing.descriptor])

    @handles(m.KeyedMatch)
    async def keyed_match(self, client: Client, request: m.KeyedMatch) -> Reply:
        check_keys(request.keys)
        if request.presence:
            return Reply(await self._presence.answer(request, corrects=client.trusted))  # others have no index
        matched = m.KeyedMatched([0] * len(request.keys), [], [])
        failures: dict[int, m.Failure] = {}

        def look(view: View) -> None:
            find_space(view, request.space)
            values, is_full = self._keyed.values(), False
            for index, key in enumerate(request.keys):
                problem = key_problem(key)
                found = None if problem or is_full else values.find(view, request.space, key)
                if found is not None and len(matched.chunks) + len(found.chunks) > KEYED_PARTS_ANSWERED_MAX:
                    found, is_full = None, True
                if is_full and problem is None:  # no more records are read
                    problem = RequestTooLarge(f"the answer has {KEYED_PARTS_ANSWERED_MAX} parts; ask for fewer keys")
                if problem is not None:
                    failures[index] = failure_of(problem)
                if found is not None:
                    matched.counts[index] = len(found.chunks)
                    matched.chunks.extend(found.chunks)
                    matched.lengths.extend(found.lengths)
            if request.lease:
                self._lease(client, matched)

        try:
            await self._decisions.look(look)
        except BaseException:
            self._store.references.end_leases(client, matched.leases)  # the client never receives them
            raise
        found = sum(count > 0 for count in matched.counts)
        self._keyed.counts.matched += found
        self._keyed.counts.missed += len(request.keys) - found
        self._keyed.note_used(
            request.space, (key for key, count in zip(request.keys, matched.counts, strict=True) if count)
        )
        if self._store.keyed_index is not None and client.trusted:  # others have no index
            self._store.keyed_index.correct(request.space, _answers(request.keys, matched, failures))
        if failures:
            matched.failures.extend(failures.get(index) for index in range(len(request.keys)))
        return Reply(matched)

    def _lease(self, client: Client, matched: m.KeyedMatched) -> None:
        """Take a lease for each part, in the step in which it was found.  EngineBusy."""
        for chunk in matched.chunks:
            matched.leases.append(self._store.references.lease(client, BlobId(chunk)))

    @handles(m.KeyedRemove)
    async def keyed_remove(self, client: Client, request: m.KeyedRemove) -> Reply:
        check_home(self._store, request.epoch)
        check_keys(request.keys)
        outcomes = await self._decisions.change(client, partial(self._remove, request, 0), grows=False)
        while len(outcomes) < len(request.keys):
            remove = partial(self._remove, request, len(outcomes))
            outcomes += await self._decisions.change(client, remove, grows=False)
        self._keyed.counts.removed += outcomes.count(m.KEYED_REMOVED)
        problems = [key_problem(key) for key in request.keys]
        failures = [None if problem is None else failure_of(problem) for problem in problems] if any(problems) else []
        return Reply(m.KeyedOutcomes(outcomes, failures))

    def _remove(self, request: m.KeyedRemove, begin: int, txn: Transaction) -> list[int]:
        """Remove the values of the keys from `begin` on, as many as one step may; returns their outcomes."""
        space, values = find_space(txn, request.space), self._keyed.values()
        usage = Usage(txn, request.space, space)
        outcomes: list[int] = []
        parts = 0
        for key in islice(request.keys, begin, None):
            if parts >= KEYED_PARTS_PER_STEP:
                break
            if key_problem(key) is not None:
                outcomes.append(m.KEYED_FAILED)
                continue
            value = remove_value(txn, usage, request.space, key)
            parts += 0 if value is None else len(value.chunks)
            is_found = value is not None and not values.is_absent(value)
            outcomes.append(m.KEYED_REMOVED if is_found else m.KEYED_ABSENT)
        usage.save()
        return outcomes


def _answers(
    keys: Sequence[bytes], matched: m.KeyedMatched, failures: Collection[int]
) -> Iterator[tuple[bytes, Sequence[ChunkId]]]:
    """Iterate over the keys that were answered, each with the chunks of its value."""
    at = 0
    for index, (key, count) in enumerate(zip(keys, matched.counts, strict=True)):
        if index not in failures:
            yield key, [ChunkId(chunk) for chunk in matched.chunks[at : at + count]]
        at += count

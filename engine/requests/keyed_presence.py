"""Which keys have a value, and no more: looked up in the keyed index, natively, before the tables.

Rules kept here:
- The index answers as it answers clients that read it (`lakefs.shared_index.keyed_index`): what it says is durable.  It
  is not asked in a space of which values expire, nor while a chunk is known to be damaged.
- Keys of which it knows nothing are looked up in the tables, and their entries set right.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from engine.keyed.spaces import find_space
from engine.requests.answers import Decisions
from engine.requests.keyed_batch import divided, failures_of
from engine.store.keyed_store import KeyedStore
from engine.tables.views import View
from lakefs.errors import InvalidArgument
from lakefs.ids import ChunkId
from lakefs.wire import messages as m


class KeyedPresence:
    """Answers requests of KeyedMatch for presence."""

    def __init__(self, store: KeyedStore, decisions: Decisions) -> None:
        self._store = store
        self._keyed = store.keyed
        self._decisions = decisions

    async def answer(self, request: m.KeyedMatch, *, corrects: bool) -> m.KeyedMatched:
        """Return which keys have a value.  SpaceNotFound, InvalidArgument; a bad key fails by itself.

        `corrects`: set entries of the index right.
        """
        check_presence(request)
        problems, good = divided(request.keys)
        keys = [request.keys[index] for index in good]
        sizes = [request.sizes[index] for index in good] if request.sizes else []
        present = await self._present(request.space, keys, sizes, corrects=corrects)
        counts = [0] * len(request.keys)
        for index, flag in zip(good, present, strict=True):
            counts[index] = int(flag)
        found = list(compress(keys, present))
        self._keyed.counts.matched += len(found)
        self._keyed.counts.missed += len(counts) - len(found)
        self._keyed.note_used(request.space, found)
        return m.KeyedMatched(counts, [], [], failures=failures_of(problems, len(counts)))

    async def _present(self, space: int, keys: list[bytes], sizes: Sequence[int], *, corrects: bool) -> list[bool]:
        known = self._known(space, keys, sizes)
        asked = [at for at, flag in enumerate(known) if flag is None]
        parts: dict[int, Sequence[ChunkId]] = {}

        def look(view: View) -> None:
            find_space(view, space)
            values = self._keyed.values()
            for at in asked:
                value = values.find(view, space, keys[at])
                known[at] = value is not None and (not sizes or sizes[at] in (0, sum(value.lengths)))
                parts[at] = () if value is None else value.chunks

        if asked or not keys:
            await self._decisions.look(look)
        if corrects and asked and self._store.keyed_index is not None:
            self._store.keyed_index.correct(space, ((keys[at], chunks) for at, chunks in parts.items()))
        return [flag is True for flag in known]

    def _known(self, space: int, keys: list[bytes], sizes: Sequence[int]) -> list[bool | None]:
        index = self._store.keyed_index
        if index is None or self._keyed.has_damage:
            return [None] * len(keys)
        return index.match(space, keys, sizes)


def check_presence(request: m.KeyedMatch) -> None:
    """Raise InvalidArgument for a request for presence whose parts do not go together."""
    if request.lease:
        raise InvalidArgument("a request for presence names no chunks, so it takes no leases")
    if len(request.sizes) not in (0, len(request.keys)):
        raise InvalidArgument(f"{len(request.keys)} keys and {len(request.sizes)} sizes do not go together")

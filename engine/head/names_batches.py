"""Batches of names in several shards: divided, asked at once, and put together (`engine.head.names_routes`).

    divide    by the shards of the buckets
    ask       each shard for its part, all at once
    settle    results for buckets that a shard does not have are asked for again, where the coordinator says

Rules kept here:
- An item that a shard has decided is not asked for again.
- The refusal of a whole part is the failure of each of its items; if all items were refused so, it is raised.
- Leases of a request that is given up between the answers of two shards are ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, Protocol

from engine.coordinator.names_shards import NamesShards
from engine.format.group_parts import FIRST_SHARD
from engine.head import names_routes as routes
from engine.head.names_link import end_leases
from engine.host.tasks import run_all
from lakefs.errors import BucketElsewhere, EngineBusy, LakeError
from lakefs.ids import NamesShard
from lakefs.names import shown
from lakefs.wire import messages as m
from lakefs.wire.given_leases import opened_leases

ROUTES_MAX: Final = 6
"""Times that a bucket is looked for which moves between shards: each time it was removed and made anew."""
Parts = dict[NamesShard, list[int]]
"""Indexes of the items of a batch by the shard that is asked for them."""


class Shards(Protocol):
    """The names shards, as one client of a head asks them (`engine.head.client_names.ClientNames`)."""

    @property
    def shards(self) -> NamesShards:
        """The shards and their buckets, as far as they are known."""
        ...

    async def read(self, bucket: str) -> NamesShard | None:
        """Return the shard that has a bucket now; None: none has it.  Errors of the coordinator."""
        ...

    async def ask_part(self, shard: NamesShard, request: routes.Batch) -> m.Message:
        """Ask a shard for names.  Errors are those of the request, and EngineUnreachable."""
        ...

    async def call(self, request: m.Request) -> m.Message:
        """Return the answer to any request."""
        ...


class BatchOfShards:
    """A batch that is divided among shards."""

    def __init__(self, names: Shards, request: routes.Batch, wanted: Sequence[routes.Wanted]) -> None:
        self._names = names
        self._request = request
        self._wanted = wanted
        self._results: list[routes.Result | None] = [None] * len(wanted)
        self._missing: set[str] = set()
        """Buckets that no shard had when the coordinator was asked."""
        self._refused: dict[int, LakeError] = {}
        """The errors of items whose whole part was refused."""
        self._outcomes: dict[NamesShard, Sequence[routes.Result] | LakeError] = {}
        """The results of each shard that was asked last, or its refusal."""

    async def ask(self, indexes: Iterable[int]) -> m.Message:
        """Ask for these items, again for those whose buckets were elsewhere; return the answer with all results.

        If all items were refused, one of those errors is raised.
        """
        waiting = list(indexes)
        try:
            for _ in range(ROUTES_MAX):
                parts = await self._divide(waiting)
                self._outcomes = {}
                await run_all(partial(self._ask_part, parts), list(parts))
                asked = self._outcomes
                waiting = [index for shard in parts for index in await self.settle(shard, parts[shard], asked[shard])]
                if not waiting:
                    break
        except BaseException:
            await self._end_leases()
            raise
        self._refused.update((index, moved_again(self._wanted[index].bucket)) for index in waiting)
        if len(self._refused) == len(self._wanted):
            raise next(iter(self._refused.values()))
        for index, error in self._refused.items():
            self._results[index] = routes.failed_result(self._request, error)
        return routes.answer_of(self._request, [result for result in self._results if result is not None])

    async def _divide(self, indexes: Iterable[int]) -> Parts:
        places: dict[routes.Wanted, NamesShard | LakeError] = {}
        parts: Parts = {}
        for index in indexes:
            wanted = self._wanted[index]
            place = places.get(wanted)
            if place is None:
                place = places[wanted] = await self._try_place(wanted)
            if isinstance(place, LakeError):
                self._refused[index] = place
            else:
                parts.setdefault(place, []).append(index)
        return parts

    async def _try_place(self, wanted: routes.Wanted) -> NamesShard | LakeError:
        """Return the shard to ask about a bucket, or the error of the coordinator."""
        try:
            return await self._place(wanted)
        except LakeError as error:
            return error

    async def _place(self, wanted: routes.Wanted) -> NamesShard:
        shards = self._names.shards
        if shards.count == 1:
            return FIRST_SHARD
        shard = shards.known(wanted.bucket)
        if shard is None and wanted.bucket not in self._missing:
            shard = await self._names.read(wanted.bucket)
        if shard is not None:
            return shard
        self._missing.add(wanted.bucket)
        return shards.emptiest() if wanted.makes else FIRST_SHARD

    async def _ask_part(self, parts: Parts, shard: NamesShard) -> None:
        part = routes.part_of(self._request, parts[shard])
        try:
            self._outcomes[shard] = routes.results_of(shard, await self._names.ask_part(shard, part))
        except LakeError as error:
            self._outcomes[shard] = error

    async def settle(
        self, shard: NamesShard, indexes: Sequence[int], outcome: Sequence[routes.Result] | LakeError
    ) -> list[int]:
        """Take a shard's results, or its refusal, of some items; return those that are to be asked for elsewhere."""
        if isinstance(outcome, BucketElsewhere):
            return list(indexes) if await self._has_read(outcome.subject, indexes) else []
        if isinstance(outcome, LakeError):
            self._refused.update(dict.fromkeys(indexes, outcome))
            return []
        for index, result in zip(indexes, outcome, strict=True):
            self._results[index] = result
        missing: dict[str, list[int]] = {}
        for at in routes.without_bucket(outcome):
            self._results[indexes[at]] = routes.not_to_repeat(outcome[at])
            missing.setdefault(self._wanted[indexes[at]].bucket, []).append(indexes[at])
        again = []
        for bucket in missing.keys() - self._missing:
            if await self._has_read(bucket, missing[bucket]):
                found = self._names.shards.known(bucket)
                again += missing[bucket] if found not in (None, shard) else []
        return again

    async def _end_leases(self) -> None:
        """End the leases of some parts when the client never receives them, as the request is cancelled."""
        answered = [outcome for outcome in self._outcomes.values() if not isinstance(outcome, LakeError)]
        results = [result for some in (self._results, *answered) for result in some]
        leases = set(opened_leases(result for result in results if isinstance(result, m.OpenResult)))
        if leases:
            await end_leases(self._names.call, leases)

    async def _has_read(self, bucket: str, indexes: Iterable[int]) -> bool:
        """Read the shard of a bucket; if the coordinator cannot be asked, that is the error of these items."""
        try:
            await self._names.read(bucket)
        except LakeError as error:
            self._refused.update(dict.fromkeys(indexes, error))
            return False
        return True


def moved_again(bucket: str) -> EngineBusy:
    """Return the error for a bucket that was elsewhere each time that it was looked for."""
    return EngineBusy(
        f"bucket {shown(bucket)} was removed and made in other parts of the lake's names again and again; try again",
        subject=bucket,
    )

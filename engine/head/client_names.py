"""A client of a head at the names of its lake, in one shard or several: each is asked over a link of its own.

    place     --  the shard of a bucket, as it is known, else as the coordinator has it
    ask       --  that shard; it has no such bucket, or another one has it
    read      --  the bucket's record; asked again where that says, unless nothing has changed

Rules kept here:
- What is known of buckets may be out of date.  A shard that has a bucket is right; "there is no such bucket" is only
  said if the coordinator says, later than the shard, that no other one has it.  So there was a moment without it.
- A new bucket is made in the shard with the fewest; one that a move or copy makes, in the shard of the source.
- In a batch the error of one shard is that of its names; it is raised if all names have failed by such errors.
- A client that loses one of its links is ended, as with its only one.  A link that could not be made is made anew.
- Without shards to choose from, nothing is read and nothing is divided.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import msgspec

from engine.coordinator.names_shards import NamesShards
from engine.format.group_parts import FIRST_SHARD
from engine.head import names_routes as routes
from engine.head.names_link import NamesConnection, NamesLink
from engine.host.tasks import run_all
from lakefs.errors import AcrossShards, BucketElsewhere, BucketNotFound, EngineBusy, EngineUnreachable, LakeError
from lakefs.ids import NamesShard
from lakefs.names import is_bucket_name, shown
from lakefs.wire import messages as m

M = TypeVar("M", bound=m.Message)
T = TypeVar("T")
_HAVE_STAMPS: Final = m.OpenObjects, m.StatNames
_ROUTES_MAX: Final = 6
"""Times that a bucket is looked for which moves between shards: each time it was removed and made anew."""
Parts = dict[NamesShard, list[int]]
"""Indexes of the items of a batch by the shard that is asked for them."""


class AskedNames(Protocol):
    """The names, as one client of a head asks them: one `NamesLink`, or `ClientNames`."""

    async def connection(self) -> NamesConnection:
        """Return the connection to the first shard.  EngineUnreachable."""
        ...

    async def call(self, request: m.Request) -> m.Message:
        """Return the answer to a request.  Errors are those of the request, and EngineUnreachable."""
        ...

    async def ask(self, request: m.Request, answer: type[M]) -> M:
        """Like `call`, for an answer of that type."""
        ...

    async def aclose(self) -> None:
        """End what the names keep for the client."""
        ...


class ClientNames:
    """Implements `AskedNames` over the links of one client."""

    def __init__(
        self,
        first: NamesLink,
        link_to: Callable[[NamesShard], NamesLink],
        shards: NamesShards,
        join: Callable[[NamesLink], Awaitable[bool]],
    ) -> None:
        """`first`: the link to the first shard; `link_to` returns one to another.

        `join` returns True if answers on a link have stamps now; errors of its connection.
        """
        self.shards: Final = shards
        self._first = first
        self._link_to = link_to
        self._join = join
        self._links = {FIRST_SHARD: first}
        self._has_left = False

    async def connection(self) -> NamesConnection:
        """See `AskedNames`."""
        return await self._first.connection()

    async def call(self, request: m.Request) -> m.Message:
        """See `AskedNames`.  AcrossShards: the buckets of a Rename or Copy are in two shards; nothing was done."""
        ask = _WAYS.get(type(request))
        return await (self._first.call(request) if ask is None else ask(self, request))

    async def ask(self, request: m.Request, answer: type[M]) -> M:
        """See `AskedNames`."""
        message = await self.call(request)
        assert isinstance(message, answer), f"{type(request).__name__} is answered by {answer.__name__}"
        return message

    async def aclose(self) -> None:
        """See `AskedNames`."""
        self._has_left = True
        await run_all(lambda link: link.aclose(), list(self._links.values()))

    def link(self, shard: NamesShard) -> NamesLink:
        """Return the link to a shard; its connection is made when it is first asked.  EngineUnreachable."""
        link = self._links.get(shard)
        if link is None or (link.was_never_made and shard != FIRST_SHARD):
            if self._has_left:
                raise EngineUnreachable("the client has left")
            link = self._links[shard] = self._link_to(shard)
        return link

    # --- places ------------------------------------------------------------------------------------

    async def place(self, bucket: str, *, makes: bool = False) -> NamesShard:
        """Return the shard to ask about a bucket.  Errors of the coordinator."""
        if self.shards.count == 1:
            return FIRST_SHARD
        shard = self.shards.known(bucket)
        if shard is None:
            shard = await self.read(bucket)
        if shard is None:
            shard = self.shards.emptiest() if makes else FIRST_SHARD
        return shard

    async def read(self, bucket: str) -> NamesShard | None:
        """Return the shard that has a bucket now; None: none has it.  Errors of the coordinator."""
        return await self.shards.read(bucket) if is_bucket_name(bucket) else None

    async def _place_after(self, error: LakeError, asked: NamesShard, bucket: str) -> NamesShard:
        """Return the shard to ask after BucketNotFound or BucketElsewhere; raises that if no other may have the bucket.

        Errors of the coordinator.
        """
        found = await self.read(bucket)
        if isinstance(error, BucketElsewhere):
            return self.shards.emptiest() if found is None else found  # None: it was removed since
        if found is None or found == asked:
            raise error
        return found

    # --- one bucket, two buckets -------------------------------------------------------------------

    async def _ask_one(self, request: m.Request) -> m.Message:
        if self.shards.count == 1:
            try:
                return await self._first.call(request)
            except (BucketNotFound, BucketElsewhere) as error:  # another shard may be there, not yet known here
                bucket, _ = routes.wanted_by(request)
                shard = await self._place_after(error, FIRST_SHARD, bucket)
        else:
            bucket, makes = routes.wanted_by(request)
            shard = await self.place(bucket, makes=makes)
        return await self.ask_where(bucket, shard, lambda link: link.call(request))

    async def ask_where(self, bucket: str, shard: NamesShard, ask: Callable[[NamesLink], Awaitable[T]]) -> T:
        """Ask a shard about a bucket, and another one if that has it.  Errors of `ask`, and of the coordinator."""
        for _ in range(_ROUTES_MAX):
            try:
                return await ask(self.link(shard))
            except (BucketNotFound, BucketElsewhere) as error:
                shard = await self._place_after(error, shard, bucket)
        raise _moved_again(bucket)

    async def _ask_both(self, request: routes.TwoBuckets) -> m.Message:
        for _ in range(_ROUTES_MAX):
            shard = await self._place_of_both(request)
            try:
                return await self.link(shard).call(request)
            except (BucketNotFound, BucketElsewhere) as error:
                await self._place_after(error, shard, error.subject)
        raise _moved_again(request.to_bucket)

    async def _place_of_both(self, request: routes.TwoBuckets) -> NamesShard:
        """Return the shard that has both buckets, or the only one that there is.  AcrossShards."""
        source, target = await self.place(request.bucket), await self._place_of_target(request)
        if target is not None and source != target and isinstance(request, m.Rename):
            # What is known may be out of date, and a refusal is final.
            found, target = await self.read(request.bucket), await self.read(request.to_bucket)
            if found is None:
                return FIRST_SHARD  # where it is missing, too
            source = found
        if target is None or source == target:
            return source
        raise AcrossShards(
            f"buckets {shown(request.bucket)} and {shown(request.to_bucket)} are in different parts of the lake's "
            f"names (names shards {source} and {target}), and nothing is moved between them; copy it, then remove it",
            subject=request.bucket,
        )

    async def _place_of_target(self, request: routes.TwoBuckets) -> NamesShard | None:
        """Return the shard of the second bucket; None: it has none yet, or there is only one."""
        if self.shards.count == 1:
            return None
        known = self.shards.known(request.to_bucket)
        return await self.read(request.to_bucket) if known is None else known

    # --- batches -----------------------------------------------------------------------------------

    async def _ask_batch(self, request: routes.Batch) -> m.Message:
        if self.shards.count == 1:
            try:
                answer = await self.ask_part(self._first, request)
            except BucketElsewhere as error:  # another shard is there, not yet known here
                await self.read(error.subject)
            else:
                return answer if routes.has_succeeded(answer) else await self._looked_elsewhere(request, answer)
        wanted = routes.wanted_by_batch(request)
        if not wanted:
            return await self._first.call(request)
        return await _BatchOfShards(self, request, wanted).ask(range(len(wanted)))

    async def ask_part(self, link: NamesLink, request: routes.Batch) -> m.Message:
        """Ask a shard for names of a batch; the answer has stamps if they are asked for, and it has any now."""
        if isinstance(request, _HAVE_STAMPS) and request.stamps and not await self._join(link):
            request = msgspec.structs.replace(request, stamps=False)
        return await link.call(request)

    async def _looked_elsewhere(self, request: routes.Batch, answer: m.Message) -> m.Message:
        """Return the only shard's answer, with results of other shards for buckets that it does not have."""
        results = routes.results_of(FIRST_SHARD, answer)
        if not routes.without_bucket(results):
            return answer
        batch = _BatchOfShards(self, request, routes.wanted_by_batch(request))
        return await batch.ask(await batch.settle(FIRST_SHARD, range(len(results)), results))

    # --- all shards --------------------------------------------------------------------------------

    async def _list_buckets(self, request: m.BucketList) -> m.Message:
        if request.name:
            shard = await self.place(request.name)
            return await self.ask_where(request.name, shard, lambda link: link.call(request))
        if await self.shards.read_count() == 1:
            return await self._first.call(request)
        answers = await self.ask_all(request, m.Buckets, await self.shards.with_buckets())
        return routes.merged_buckets(answers.values())

    async def _sync(self, request: m.Sync) -> m.Message:
        await self.ask_all(request, m.Done, self._linked())
        return m.Done()

    async def _accepted(self, request: m.AcceptedAnswers) -> m.Message:
        """Return answers that all shards accept which have refused some, as this client has a link to each of those."""
        answers = await self.ask_all(request, m.AnswersAccepted, self._linked())
        return routes.highest(answers.values())

    async def _close_leases(self, request: m.CloseLeases) -> m.Message:
        by_shard = routes.leases_by_shard(request.leases)

        async def close(shard: NamesShard) -> None:
            await self._links[shard].call(m.CloseLeases(by_shard.get(shard, [])))

        await run_all(close, [shard for shard in self._linked() if shard in by_shard] or [FIRST_SHARD])
        return m.Done()

    async def _uploaded_parts(self, request: m.UploadedParts) -> m.Message:
        """Ask each shard, until one knows parts of the upload."""
        answer = await self._first.ask(request, m.ObjectParts)
        for shard in map(NamesShard, range(1, self.shards.count)):
            if answer.part_count:
                break
            answer = await self.link(shard).ask(request, m.ObjectParts)
        return answer

    def _linked(self) -> list[NamesShard]:
        """Return the shards to which the client has a link."""
        return [shard for shard, link in self._links.items() if shard == FIRST_SHARD or not link.was_never_made]

    async def ask_all(self, request: m.Request, answer: type[M], shards: Iterable[NamesShard]) -> dict[NamesShard, M]:
        """Ask several shards at once; their errors are those of the request."""
        found: dict[NamesShard, M] = {}

        async def ask(shard: NamesShard) -> None:
            found[shard] = await self.link(shard).ask(request, answer)

        await run_all(ask, list(shards))
        return found


class _BatchOfShards:
    """A batch that is divided among shards."""

    def __init__(self, names: ClientNames, request: routes.Batch, wanted: Sequence[routes.Wanted]) -> None:
        self._names = names
        self._request = request
        self._wanted = wanted
        self._results: list[routes.Result | None] = [None] * len(wanted)
        self._missing: set[str] = set()
        """Buckets that no shard had when the coordinator was asked."""
        self._refused: dict[int, LakeError] = {}
        """The errors of items whose whole part was refused."""

    async def ask(self, indexes: Iterable[int]) -> m.Message:
        """Ask for these items, again for those whose buckets were elsewhere; return the answer with all results.

        If all items were refused, one of those errors is raised.
        """
        waiting = list(indexes)
        for _ in range(_ROUTES_MAX):
            parts = await self._divide(waiting)
            outcomes: dict[NamesShard, Sequence[routes.Result] | LakeError] = {}
            await run_all(partial(self._ask_part, parts, outcomes), list(parts))
            waiting = [index for shard in parts for index in await self.settle(shard, parts[shard], outcomes[shard])]
            if not waiting:
                break
        self._refused.update((index, _moved_again(self._wanted[index].bucket)) for index in waiting)
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

    async def _ask_part(
        self, parts: Parts, outcomes: dict[NamesShard, Sequence[routes.Result] | LakeError], shard: NamesShard
    ) -> None:
        part = routes.part_of(self._request, parts[shard])
        try:
            answer = await self._names.ask_part(self._names.link(shard), part)
            outcomes[shard] = routes.results_of(shard, answer)
        except LakeError as error:
            outcomes[shard] = error

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

    async def _has_read(self, bucket: str, indexes: Iterable[int]) -> bool:
        """Read the shard of a bucket; if the coordinator cannot be asked, that is the error of these items."""
        try:
            await self._names.read(bucket)
        except LakeError as error:
            self._refused.update(dict.fromkeys(indexes, error))
            return False
        return True


def _moved_again(bucket: str) -> EngineBusy:
    return EngineBusy(
        f"bucket {shown(bucket)} was removed and made in other parts of the lake's names again and again; try again",
        subject=bucket,
    )


_WAYS: Final[dict[type[m.Request], Callable[[ClientNames, Any], Awaitable[m.Message]]]] = {
    **dict.fromkeys(routes.BUCKET_OF, ClientNames._ask_one),
    **dict.fromkeys((m.Rename, m.Copy), ClientNames._ask_both),
    **dict.fromkeys(routes.BATCHES, ClientNames._ask_batch),
    m.BucketList: ClientNames._list_buckets,
    m.Sync: ClientNames._sync,
    m.AcceptedAnswers: ClientNames._accepted,
    m.CloseLeases: ClientNames._close_leases,
    m.UploadedParts: ClientNames._uploaded_parts,
}
"""Requests that the first shard does not answer alone."""

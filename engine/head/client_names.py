"""A client of a head at the names of its lake, in one shard or several: each is asked over a link of its own.

    place     --  the shard of a bucket, as it is known, else as the coordinator has it
    ask       --  that shard; it has no such bucket, or another one has it
    read      --  the bucket's record; asked again where that says, unless nothing has changed

Rules kept here:
- What is known of buckets may be out of date.  A shard that has a bucket is right; "there is no such bucket" is only
  said if the coordinator says, later than the shard, that no other one has it.  So there was a moment without it.
- A new bucket is made in the shard with the fewest; one that a move or copy makes, in the shard of the source.
- In a batch the error of one shard is that of its names; it is raised if all names have failed by such errors.
- A client that loses one of its links is ended, as with its only one.  A link that could not be made is tried again.
- The run of the names that a client is greeted with is that of all shards: it is the same only if none of them has
  been started again, so no shard has lost what was visible.  One that does not answer then may have been.
- Without shards to choose from, nothing is read and nothing is divided.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final, Protocol, TypeVar

import msgspec
import trio

from engine.coordinator.names_shards import NamesShards
from engine.format.group_parts import FIRST_SHARD
from engine.head import names_routes as routes
from engine.head.names_batches import ROUTES_MAX, BatchOfShards, moved_again
from engine.head.names_link import NamesConnection, NamesLink
from engine.host.tasks import run_all
from lakefs.errors import AcrossShards, BucketElsewhere, BucketNotFound, EngineUnreachable, LakeError
from lakefs.ids import NamesShard, new_id16
from lakefs.names import is_bucket_name, shown
from lakefs.wire import messages as m

M = TypeVar("M", bound=m.Message)
T = TypeVar("T")
_HAVE_STAMPS: Final = m.OpenObjects, m.StatNames
_GREETING_S: Final = 1.0
"""Time that shards have to answer when a client is greeted: shorter than its patience (HELLO_TIMEOUT_S)."""


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
        self._shards = shards
        self._first = first
        self._link_to = link_to
        self._join = join
        self._links = {FIRST_SHARD: first}
        self._has_left = False

    @property
    def shards(self) -> NamesShards:
        """The shards as this process knows them."""
        return self._shards

    async def connection(self) -> NamesConnection:
        """See `AskedNames`."""
        return await self._first.connection()

    async def greeting(self, known: m.HelloReply | None) -> m.HelloReply:
        """Return the greeting of the first shard with the run of all; `known`: what it has said to another client.

        EngineUnreachable if the first one cannot be reached, and `known` is None.
        """
        count = self.shards.count
        if count == 1:
            return (await self.connection()).hello
        found: dict[NamesShard, m.HelloReply] = {}

        async def ask(shard: NamesShard) -> None:
            with suppress(EngineUnreachable):
                found[shard] = (await self.link(shard).connection()).hello

        with trio.move_on_after(_GREETING_S):
            await run_all(ask, list(map(NamesShard, range(count))))
        said = found.get(FIRST_SHARD, known)
        if said is None:
            said = (await self.connection()).hello
        runs = [found[shard].boot_id if shard in found else new_id16() for shard in map(NamesShard, range(count))]
        return msgspec.structs.replace(said, boot_id=blake2b(b"".join(runs), digest_size=16).digest())

    async def call(self, request: m.Request) -> m.Message:
        """See `AskedNames`.  AcrossShards: the buckets of a Rename or Copy are in two shards; nothing was done."""
        ask = WAYS.get(type(request))
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
        if link is None:
            if self._has_left:
                raise EngineUnreachable("the client has left")
            link = self._links[shard] = self._link_to(shard)
        return link

    # --- places ------------------------------------------------------------------------------------

    async def place(self, bucket: str, *, makes: bool = False) -> NamesShard:
        """Return the shard to ask about a bucket.  Errors of the coordinator."""
        if self._shards.count == 1:
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
        if self._shards.count == 1:
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
        for _ in range(ROUTES_MAX):
            try:
                return await ask(self.link(shard))
            except (BucketNotFound, BucketElsewhere) as error:
                shard = await self._place_after(error, shard, bucket)
        raise moved_again(bucket)

    async def _ask_both(self, request: routes.TwoBuckets) -> m.Message:
        for _ in range(ROUTES_MAX):
            shard = await self._place_of_both(request)
            try:
                return await self.link(shard).call(request)
            except (BucketNotFound, BucketElsewhere) as error:
                await self._place_after(error, shard, error.subject)
        raise moved_again(request.to_bucket)

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
            f"names (names shards {source} and {target}), and nothing is moved between them; "
            "copy it, then remove it: lake cp, lake rm",
            subject=request.bucket,
        )

    async def _place_of_target(self, request: routes.TwoBuckets) -> NamesShard | None:
        """Return the shard of the second bucket; None: it has none yet, or there is only one."""
        if self._shards.count == 1:
            return None
        known = self.shards.known(request.to_bucket)
        return await self.read(request.to_bucket) if known is None else known

    # --- batches -----------------------------------------------------------------------------------

    async def _ask_batch(self, request: routes.Batch) -> m.Message:
        shard = FIRST_SHARD if self._shards.count == 1 else self._shard_of_all(request)
        if shard is not None:
            try:
                answer = await self.ask_part(shard, request)
            except BucketElsewhere as error:  # nothing was done
                await self.read(error.subject)
            else:
                if shard == FIRST_SHARD and routes.has_succeeded(answer):
                    return answer
                return await self._looked_elsewhere(request, shard, routes.results_of(shard, answer))
        wanted = routes.wanted_by_batch(request)
        if not wanted:
            return await self._first.call(request)
        return await BatchOfShards(self, request, wanted).ask(range(len(wanted)))

    def _shard_of_all(self, request: routes.Batch) -> NamesShard | None:
        """Return the only shard that is known to have buckets of a batch; None if there are others, or unknown ones."""
        shards = {self._shards.known(bucket) for bucket in routes.buckets_of(request)}
        return shards.pop() if len(shards) == 1 else None

    async def _looked_elsewhere(
        self, request: routes.Batch, shard: NamesShard, results: Sequence[routes.Result]
    ) -> m.Message:
        """Return the answer of a shard, with results of other shards for buckets that it does not have."""
        if not routes.without_bucket(results):
            return routes.answer_of(request, results)
        batch = BatchOfShards(self, request, routes.wanted_by_batch(request))
        return await batch.ask(await batch.settle(shard, range(len(results)), results))

    async def ask_part(self, shard: NamesShard, request: routes.Batch) -> m.Message:
        """Ask a shard for names of a batch; the answer has stamps if they are asked for, and it has any now."""
        link = self.link(shard)
        if isinstance(request, _HAVE_STAMPS) and request.stamps and not await self._join(link):
            request = msgspec.structs.replace(request, stamps=False)
        return await link.call(request)

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
        """Ask each shard, until one knows parts of the upload; one that is away is the error if no other does."""
        answer: m.ObjectParts | None = None
        failure: LakeError | None = None
        for shard in map(NamesShard, range(self.shards.count)):
            try:
                answer = await self.link(shard).ask(request, m.ObjectParts)
            except EngineUnreachable as error:
                failure = error
                continue
            if answer.part_count:
                return answer
        if failure is not None:
            raise failure
        assert answer is not None, "there is a shard"
        return answer

    def _linked(self) -> list[NamesShard]:
        """Return the shards that may keep something for the client; the first one if there are none."""
        return [shard for shard, link in self._links.items() if link.has_begun] or [FIRST_SHARD]

    async def ask_all(self, request: m.Request, answer: type[M], shards: Iterable[NamesShard]) -> dict[NamesShard, M]:
        """Ask several shards at once; their errors are those of the request."""
        found: dict[NamesShard, M] = {}

        async def ask(shard: NamesShard) -> None:
            found[shard] = await self.link(shard).ask(request, answer)

        await run_all(ask, list(shards))
        return found


WAYS: Final[dict[type[m.Request], Callable[[ClientNames, Any], Awaitable[m.Message]]]] = {
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

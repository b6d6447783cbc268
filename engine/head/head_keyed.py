"""Requests that find and remove values at a head: each key is asked for at its home, all homes at once.

Rules kept here:
- One request to each home; the answer is put together in the order of the request's keys, so the longest prefix that is
  present means the same as at one engine.
- A home that is away, or cannot answer now, is a miss of its keys.  A removal is not: its keys fail (ClusterDegraded),
  since the values are there again when the home is.
- Where chunks of values were found is noted for those who read them (`engine.head.keyed_chunks`).
- An answer that has no room for a key's parts has none for those of later keys, as at one engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import trio

from engine.format.keyed import KeyedValue
from engine.head.head_chunks import KnownLengths
from engine.head.head_clients import HeadClient, HomeLease
from engine.head.head_pins import HeadPins
from engine.head.home_reads import HomeReads, Sent, sent_parts
from engine.head.key_homes import GIVE_ATTEMPTS, KeyHomes, members_change
from engine.head.keyed_chunks import KeyedPlaces
from engine.host.tasks import run_all
from engine.keyed.values import key_problem
from engine.requests.answers import failure_of
from engine.requests.handlers import handles
from engine.requests.keyed_batch import check_keys, divided, failures_of
from engine.requests.keyed_presence import check_presence
from lakefs.errors import ClusterDegraded, EngineBusy, OperationalError, RequestTooLarge, StaleEpoch, StoreFull
from lakefs.ids import ChunkId, MemberId, RingEpoch
from lakefs.limits import KEYED_PARTS_ANSWERED_MAX, MEMBER_ANSWER_S
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply


@dataclass
class Value:
    """A value that was found, and the leases of its parts at its home."""

    home: MemberId
    chunks: Sequence[bytes]
    lengths: Sequence[int]
    leases: Sequence[int] = ()

    def as_record(self) -> KeyedValue:
        """Return the value as its home has it, but for its times and its depth."""
        return KeyedValue(0, 0, 0, tuple(map(ChunkId, self.chunks)), tuple(self.lengths))


@dataclass
class Found:
    """The answers of homes: values and failures, by the index of their key."""

    values: dict[int, Value] = field(default_factory=dict)
    failures: dict[int, m.Failure] = field(default_factory=dict)

    def note(self, home: MemberId, indexes: Sequence[int], matched: m.KeyedMatched) -> None:
        """Note a home's answer about the keys of these indexes."""
        begin = 0
        for place, (index, count) in enumerate(zip(indexes, matched.counts, strict=True)):
            end = begin + count
            failure = matched.failures[place] if matched.failures else None
            if failure is not None:
                self.failures[index] = failure
            elif count:
                leases = matched.leases[begin:end]
                self.values[index] = Value(home, matched.chunks[begin:end], matched.lengths[begin:end], leases)
            begin = end

    def leases(self) -> list[HomeLease]:
        """Return all leases at homes."""
        return [HomeLease(value.home, lease) for value in self.values.values() for lease in value.leases]


class KeyMatches:
    """Finds values at their homes."""

    def __init__(self, homes: KeyHomes, places: KeyedPlaces, lengths: KnownLengths, reads: HomeReads) -> None:
        self._homes = homes
        self._places = places
        self._lengths = lengths
        self._reads = reads

    async def match(
        self, client: HeadClient, space: int, keys: Sequence[bytes], indexes: Sequence[int], found: Found
    ) -> None:
        """Find the values of the keys of these indexes; a key whose home is away has none.  SpaceNotFound."""
        await self._homes.check(client, space)
        await self._match(client, space, keys, indexes, found, lease=False)

    async def match_leased(
        self, client: HeadClient, space: int, keys: Sequence[bytes], indexes: Sequence[int], found: Found
    ) -> None:
        """Like `match`, and take leases at the homes; when this raises, `found` has those to be ended.  EngineBusy."""
        await self._homes.check(client, space)
        with trio.CancelScope(shield=True):  # an answer that has leases is not lost
            await self._match(client, space, keys, indexes, found, lease=True)
        await trio.lowlevel.checkpoint_if_cancelled()

    async def _match(
        self,
        client: HeadClient,
        space: int,
        keys: Sequence[bytes],
        indexes: Sequence[int],
        found: Found,
        *,
        lease: bool,
    ) -> None:
        by_home = self._homes.by_home(space, keys, indexes)

        async def match_at(home: MemberId) -> None:
            request = m.KeyedMatch(space, [keys[index] for index in by_home[home]], lease)
            with trio.move_on_after(MEMBER_ANSWER_S if lease else math.inf):
                try:
                    reply = await self._homes.ask(client, home, request)
                except OperationalError as error:
                    if lease and isinstance(error, EngineBusy):
                        raise
                    return
                reply.body.release()
                assert isinstance(reply.message, m.KeyedMatched), "the answer to KeyedMatch"
                self._note(found, home, by_home[home], reply.message)

        await run_all(match_at, list(by_home))

    async def present(self, client: HeadClient, request: m.KeyedMatch, indexes: Sequence[int]) -> list[int]:
        """Return a count for each key of a request for presence, 1 if it has a value; asked are those of `indexes`."""
        await self._homes.check(client, request.space)
        by_home = self._homes.by_home(request.space, request.keys, indexes)
        counts = [0] * len(request.keys)

        async def ask_at(home: MemberId) -> None:
            mine = by_home[home]
            sizes = [request.sizes[index] for index in mine] if request.sizes else []
            asked = m.KeyedMatch(request.space, [request.keys[index] for index in mine], presence=True, sizes=sizes)
            try:
                reply = await self._homes.ask(client, home, asked)
            except OperationalError:
                return
            reply.body.release()
            assert isinstance(reply.message, m.KeyedMatched), "the answer to KeyedMatch"
            for index, flag in zip(mine, reply.message.present(sizes), strict=True):
                counts[index] = int(flag)

        await run_all(ask_at, list(by_home))
        return counts

    async def read(
        self,
        client: HeadClient,
        space: int,
        keys: Sequence[bytes],
        indexes: Sequence[int],
        found: Found,
        bytes_max: int,
        releases: ExitStack,
    ) -> dict[ChunkId, Sent]:
        """Like `match`, and read the first parts of each home's values; returns those that were sent, not checked yet.

        All together have at most BODY_BYTES_MAX bytes, and those of a home at most `bytes_max`.  They are the caller's
        until `releases` is closed.
        """
        await self._homes.check(client, space)
        by_home = self._homes.by_home(space, keys, indexes)
        parts: dict[ChunkId, Sent] = {}
        wanted = {home: [keys[index] for index in mine] for home, mine in by_home.items()}
        for home, reply in (await self._reads.read(client, space, wanted, bytes_max, releases)).items():
            message = reply.message
            assert isinstance(message, m.KeyedFound), "the answer to KeyedRead"
            matched = m.KeyedMatched(message.counts, message.chunks, message.lengths, failures=message.failures)
            self._note(found, home, by_home[home], matched)
            parts.update(sent_parts(message, reply.body, self._reads.memory))
        return parts

    def _note(self, found: Found, home: MemberId, indexes: Sequence[int], matched: m.KeyedMatched) -> None:
        self._places.note(home, matched.chunks, matched.lengths)
        self._lengths.note(zip(map(ChunkId, matched.chunks), matched.lengths, strict=True))
        found.note(home, indexes, matched)


class HeadKeyed:
    """Handlers of KeyedMatch and KeyedRemove."""

    def __init__(self, homes: KeyHomes, matches: KeyMatches, pins: HeadPins) -> None:
        self._homes = homes
        self._matches = matches
        self._pins = pins

    @handles(m.KeyedMatch)
    async def keyed_match(self, client: HeadClient, request: m.KeyedMatch) -> Reply:
        check_keys(request.keys)
        problems, good = divided(request.keys)
        if request.presence:
            check_presence(request)
            counts = await self._matches.present(client, request, good)
            return Reply(m.KeyedMatched(counts, [], [], failures=failures_of(problems, len(counts))))
        found = Found(failures={index: failure_of(problem) for index, problem in problems.items()})
        if not request.lease:
            await self._matches.match(client, request.space, request.keys, good, found)
            return Reply(matched(request.keys, found)[0])
        answer, leases, unused = m.KeyedMatched([], [], []), list[int](), list[HomeLease]()
        try:
            await self._matches.match_leased(client, request.space, request.keys, good, found)
            answer, used = matched(request.keys, found)
            for index in used:
                value = found.values[index]
                leases += self._pins.take(client, value.home, value.chunks, value.leases)
                del found.values[index]
            unused = found.leases()
        except BaseException:
            unused = [*found.leases(), *self._pins.forget(client, leases)]
            raise
        finally:
            if unused:
                await self._pins.end(unused)
        answer.leases.extend(leases)
        return Reply(answer)

    @handles(m.KeyedRemove)
    async def keyed_remove(self, client: HeadClient, request: m.KeyedRemove) -> Reply:
        check_keys(request.keys)
        problems, good = divided(request.keys)
        await self._homes.check(client, request.space)
        outcomes = [m.KEYED_FAILED] * len(request.keys)
        failures = {index: failure_of(problem) for index, problem in problems.items()}
        left = good

        async def remove_at(epoch: RingEpoch, by_home: Mapping[MemberId, list[int]], home: MemberId) -> None:
            indexes = by_home[home]
            try:
                asked = m.KeyedRemove(request.space, [request.keys[index] for index in indexes], epoch)
                reply = await self._homes.ask(client, home, asked)
            except StaleEpoch:  # their home is another one now
                left.extend(indexes)
                return
            except OperationalError as error:
                failures.update(dict.fromkeys(indexes, failure_of(not_changed(error))))
                return
            reply.body.release()
            assert isinstance(reply.message, m.KeyedOutcomes), "the answer to KeyedRemove"
            for index, outcome in zip(indexes, reply.message.outcomes, strict=True):
                outcomes[index] = outcome

        for _ in range(GIVE_ATTEMPTS):
            epoch, by_home, left = self._homes.epoch, self._homes.by_home(request.space, request.keys, left), []
            await run_all(partial(remove_at, epoch, by_home), list(by_home))
        failures.update(dict.fromkeys(left, failure_of(members_change())))
        return Reply(
            m.KeyedOutcomes(outcomes, [failures.get(index) for index in range(len(outcomes))] if failures else [])
        )


def matched(
    keys: Sequence[bytes], found: Found, parts_max: int = KEYED_PARTS_ANSWERED_MAX
) -> tuple[m.KeyedMatched, list[int]]:
    """Return the answer about all keys, without leases, and the indexes of the values that are in it.

    From the first value on that does not fit, no key has one.
    """
    answer, used, is_full = m.KeyedMatched([0] * len(keys), [], []), list[int](), False
    failures = dict(found.failures)
    for index, key in enumerate(keys):
        if key_problem(key) is not None:
            continue
        value = found.values.get(index)
        is_full = is_full or index in failures  # its home has said so of its own answer
        is_full = is_full or (value is not None and len(answer.chunks) + len(value.chunks) > parts_max)
        if is_full:
            failures[index] = failure_of(RequestTooLarge(f"the answer has {parts_max} parts; ask for fewer keys"))
        elif value is not None:
            used.append(index)
            answer.counts[index] = len(value.chunks)
            answer.chunks.extend(value.chunks)
            answer.lengths.extend(value.lengths)
    if failures:
        answer.failures.extend(failures.get(index) for index in range(len(keys)))
    return answer, used


def not_changed(error: OperationalError) -> OperationalError:
    """Return the failure of a key whose home cannot change it now."""
    if isinstance(error, EngineBusy | StoreFull):
        return error
    return ClusterDegraded(f"the member that keeps this key cannot be used: {error.message}", subject=error.subject)

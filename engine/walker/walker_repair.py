"""Makes stripes whole: moves shards home, decodes missing ones, replaces those that lie, drops copies elsewhere.

A batch of stripes, of any partitions of a walk, goes through rounds.  In each, every stripe takes its next step
(`engine.walker.walker_stripe`); shards that one member is asked for, or given, are one request, and what is read is
decoded in one call of a thread.

Rules kept here:
- What is stored was proven: it was decoded and the chunk has its hash, or it is a copy of what another member has,
  with that member's checksums.
- The generation of what is stored is read from the coordinator behind the lists in which it was missing, and behind the
  drop of what it replaces.  So no answer to a writer that counted that shard was of a later one.
- A copy elsewhere is dropped only when its home has said, asked in that generation, that its own is durable; and it is
  kept if it was touched later: then home is asked anew, in a newer generation (rule 4 of gc by generations).
- A damaged copy elsewhere is dropped in the same way, but only when no shard of its chunk is missing: until then its
  disk may give it back, and it may be the last one.  Nobody's answer rests on it: damaged, it is offered as absent, and
  an answer from before is of no later generation than the one in which home is asked.
- A shard at home is dropped only if the chunk's hash proved it wrong, by shards that stay, with the right one in hand.
- Cancelled anywhere, nothing is lost: each request is whole or not at all, and leaves what a later walk can see.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, TypeVar

from engine.host.tasks import run_all
from engine.stripes.decode import Read, Solved, solve
from engine.walker.walker_calls import NewShard, ReadShard, ShardCalls
from engine.walker.walker_compare import Copy, Damaged
from engine.walker.walker_report import Left
from engine.walker.walker_stripe import Check, Finished, Move, Stripe, next_step
from lakefs.cluster.erasure import ErasureCode
from lakefs.errors import AlreadyExists, LakeError, StoreFull
from lakefs.ids import GcGeneration, MemberId
from lakefs.ports import Offload
from lakefs.wire.shard_messages import GENERATION_MAX

DROP_ATTEMPTS: Final = 3
"""Times that home is asked anew for a copy that was touched meanwhile."""

_MAY_DROP: Final = (None, Left.FULL, Left.REFUSED, Left.TOO_FEW)
"""A stripe left for other reasons is not understood: nothing of it is dropped."""

T = TypeVar("T")
Step = tuple[Stripe, Move | Check]
Stored = tuple[Stripe, NewShard]
Stray = Copy | Damaged


class Repair:
    """Works on stripes of one walk, in batches that fit in memory."""

    def __init__(
        self, calls: ShardCalls, code: ErasureCode, offload: Offload, generation: Callable[[], Awaitable[GcGeneration]]
    ) -> None:
        self._calls = calls
        self._code = code
        self._offload = offload
        self._generation = generation

    async def work(self, batch: Sequence[Stripe]) -> list[tuple[Stripe, Left | None]]:
        """Make stripes whole; return each with the reason why it is not, None if it is.  StaleEpoch."""
        ended: list[tuple[Stripe, Left | None]] = []
        waiting = list(batch)
        while waiting:
            steps: list[Step] = []
            for stripe in waiting:
                stripe.rounds += 1
                step = next_step(stripe, self._code)
                if isinstance(step, Finished):
                    ended.append((stripe, step.left))
                else:
                    steps.append((stripe, step))
            try:
                failed = await self._round(steps)
            finally:
                self._calls.release()
            ended += failed
            gone = {id(stripe) for stripe, _ in failed}
            waiting = [stripe for stripe, _ in steps if id(stripe) not in gone]
        known = [stripe for stripe, left in ended if left in _MAY_DROP and not stripe.must_check]
        kept = await self._drop_strays(known, Stripe.strays)
        whole = [stripe for stripe, left in ended if left is None and not stripe.must_check]
        kept |= await self._drop_strays(whole, self._worthless)
        kept |= {id(stripe): Left.NO_CHUNK for stripe in whole if self._is_no_chunks(stripe)}
        return [(stripe, left or kept.get(id(stripe))) for stripe, left in ended]

    # --- one round -----------------------------------------------------------------------------------

    async def _round(self, steps: Sequence[Step]) -> list[tuple[Stripe, Left | None]]:
        """Take one step on each stripe; return those that cannot be made whole."""
        if not steps:
            return []
        read = await self._read([(stripe, copy) for stripe, step in steps for copy in step.reads])
        stores: list[Stored] = []
        lies: list[tuple[Stripe, Copy]] = []
        failed: list[tuple[Stripe, Left | None]] = []
        checks: list[_Check] = []
        for stripe, step in steps:
            got = [(copy, found) for copy in step.reads if (found := read.get((id(stripe), copy))) is not None]
            if isinstance(step, Move):
                stores += [
                    (stripe, NewShard(stripe.chunk, copy.shard, copy.chunk_bytes, *found)) for copy, found in got
                ]
            elif len(got) == len(step.reads):
                checks.append(_check_of(stripe, got))
        for check, solved in zip(checks, await self._solve(checks), strict=True):
            stripe = check.stripe
            if solved is not None:
                lies += self._note_lies(stripe, [check.copies[index] for index in solved.wrong])
                stores += self._solved(stripe, solved)
            elif stripe.read_all:
                failed.append((stripe, Left.DAMAGED if stripe.place.is_all_known else Left.AWAY))
            else:
                stripe.must_check = stripe.read_all = True
        await self._drop_lies(lies)
        generation = await self._generation()
        await self._store(stores, generation, {id(stripe) for stripe, step in steps if isinstance(step, Move)})
        return failed

    async def _read(self, wanted: Sequence[tuple[Stripe, Copy]]) -> dict[tuple[int, Copy], ReadShard]:
        """Read copies; those that cannot be read are forgotten, those of members that fail stay as they are."""
        read: dict[tuple[int, Copy], ReadShard] = {}

        async def from_member(item: tuple[MemberId, list[tuple[Stripe, Copy]]]) -> None:
            member, copies = item
            found = await self._calls.read(member, [(stripe.chunk, copy) for stripe, copy in copies])
            for (stripe, copy), one in zip(copies, found or [], strict=found is not None):
                if isinstance(one, LakeError):
                    stripe.spoil(copy.member, copy.shard)
                else:
                    stripe.report.bytes_read += len(one.payload)
                    read[id(stripe), copy] = one

        await run_all(from_member, _by(wanted, lambda item: item[1].member))
        return read

    async def _solve(self, checks: Sequence[_Check]) -> list[Solved | None]:
        """Return each chunk that was read, with the shards that its homes lack; None if these do not make it."""
        return await self._offload.run(_solve_all, self._code, checks) if checks else []

    def _solved(self, stripe: Stripe, solved: Solved) -> list[Stored]:
        """Note that a chunk was found; return the shards that its homes lack."""
        stripe.report.checked += 1
        stripe.length = solved.length
        stripe.must_check = stripe.read_all = False
        lacking = [n for n in self._code.shards(solved.length) if stripe.lacks(n)]
        length = solved.length
        return [(stripe, NewShard(stripe.chunk, n, length, solved.shard(n), solved.crcs(n))) for n in lacking]

    def _note_lies(self, stripe: Stripe, wrong: Sequence[Copy]) -> list[tuple[Stripe, Copy]]:
        """Take wrong shards off the list; return those at their homes, which give way to right ones."""
        at_home = [copy for copy in wrong if stripe.place.homes[copy.shard] == copy.member]
        for copy in at_home:
            stripe.forget(copy.member, copy.shard)
        return [(stripe, copy) for copy in at_home]

    async def _drop_lies(self, lies: Sequence[tuple[Stripe, Copy]]) -> None:
        """Drop shards at home that are proven wrong.  What takes their places is touched in the newest generation."""

        async def at_member(item: tuple[MemberId, list[tuple[Stripe, Copy]]]) -> None:
            member, wrong = item
            names = [(stripe.chunk, copy.shard) for stripe, copy in wrong]
            kept = await self._calls.drop(member, GENERATION_MAX, names)
            for (stripe, copy), touched in zip(wrong, kept or [], strict=kept is not None):
                if touched:
                    stripe.blocked[copy.shard] = Left.STRAY_KEPT
                else:
                    stripe.report.replaced += 1

        await run_all(at_member, _by(lies, lambda item: item[1].member))

    async def _store(self, stores: Sequence[Stored], generation: GcGeneration, moved: set[int]) -> None:
        """Store shards at their homes; note what is there now."""

        async def at_member(item: tuple[MemberId, list[Stored]]) -> None:
            member, shards = item
            results = await self._calls.store(member, generation, [shard for _, shard in shards])
            for (stripe, new), error in zip(shards, results, strict=True):
                if error is None:
                    stripe.report.bytes_written += len(new.payload)
                    stripe.stored(new.shard, len(new.payload), new.chunk_bytes)
                    if id(stripe) in moved:
                        stripe.report.moved += 1
                    else:
                        stripe.report.rebuilt += 1
                elif isinstance(error, AlreadyExists):
                    stripe.copies.append(Copy(member, new.shard, len(new.payload), new.chunk_bytes, None))
                    stripe.must_check = stripe.read_all = True
                elif member in stripe.place.answered:
                    stripe.blocked[new.shard] = Left.FULL if isinstance(error, StoreFull) else Left.REFUSED

        usable = [item for item in stores if item[1].shard not in item[0].blocked]
        await run_all(at_member, _by(usable, lambda item: item[0].place.homes[item[1].shard]))

    # --- copies elsewhere ----------------------------------------------------------------------------

    async def _drop_strays(
        self, stripes: Sequence[Stripe], strays_of: Callable[[Stripe], Sequence[Stray]]
    ) -> dict[int, Left]:
        """Drop copies elsewhere whose homes have one; return the stripes of which some were kept."""
        kept: dict[int, Left] = {}
        for _ in range(DROP_ATTEMPTS):
            strays = [(stripe, copy) for stripe in stripes for copy in strays_of(stripe)]
            strays = [item for item in strays if self._may_drop(*item)]
            if not strays:
                return {}
            generation = await self._generation()
            there = await self._offered(strays, generation)
            await self._drop([item for item in strays if (id(item[0]), item[1].shard) in there], generation)
            kept = {id(stripe): Left.STRAY_KEPT for stripe, copy in strays if copy in strays_of(stripe)}
        return kept

    def _may_drop(self, stripe: Stripe, copy: Stray) -> bool:
        answered = stripe.place.answered
        home = stripe.place.homes[copy.shard]
        return copy.member in answered and home in answered and stripe.at_home(copy.shard) is not None

    def _worthless(self, stripe: Stripe) -> list[Damaged]:
        """Return the damaged copies elsewhere of a whole stripe, if it is known to be whole at all its homes."""
        if not stripe.place.is_all_known:
            return []
        return [one for one in stripe.damaged_strays() if one.shard < len(stripe.place.homes)]

    def _is_no_chunks(self, stripe: Stripe) -> bool:
        """Return True if a damaged shard elsewhere is none of the shards of its whole chunk."""
        numbers = {copy.shard for copy in stripe.copies}
        is_known = stripe.place.is_all_known
        return is_known and any(one.shard not in numbers for one in stripe.damaged_strays())

    async def _offered(self, strays: Sequence[tuple[Stripe, Stray]], generation: GcGeneration) -> set[tuple[int, int]]:
        """Touch the homes' own copies; return which are there."""
        there: set[tuple[int, int]] = set()

        async def at_home(item: tuple[MemberId, list[tuple[Stripe, Stray]]]) -> None:
            member, copies = item
            lengths = await self._calls.offer(member, generation, [(s.chunk, copy.shard) for s, copy in copies])
            for (stripe, copy), length in zip(copies, lengths or [], strict=lengths is not None):
                if length:
                    there.add((id(stripe), copy.shard))

        await run_all(at_home, _by(strays, lambda item: item[0].place.homes[item[1].shard]))
        return there

    async def _drop(self, strays: Sequence[tuple[Stripe, Stray]], generation: GcGeneration) -> None:
        async def at_member(item: tuple[MemberId, list[tuple[Stripe, Stray]]]) -> None:
            member, copies = item
            kept = await self._calls.drop(member, generation, [(s.chunk, copy.shard) for s, copy in copies])
            for (stripe, copy), touched in zip(copies, kept or [], strict=kept is not None):
                if not touched:
                    stripe.forget(copy.member, copy.shard)
                    stripe.report.dropped += 1

        await run_all(at_member, _by(strays, lambda item: item[1].member))


class _Check(NamedTuple):
    """A stripe that is read: the copies that were, their bytes, and the numbers of shards that its homes lack."""

    stripe: Stripe
    copies: Sequence[Copy]
    read: Sequence[Read]
    lacking: Sequence[int]


def _check_of(stripe: Stripe, got: Sequence[tuple[Copy, ReadShard]]) -> _Check:
    read = [Read(copy.shard, copy.chunk_bytes, found.payload) for copy, found in got]
    lacking = [number for number in range(len(stripe.place.homes)) if stripe.lacks(number)]
    return _Check(stripe, [copy for copy, _ in got], read, lacking)


def _solve_all(code: ErasureCode, checks: Sequence[_Check]) -> list[Solved | None]:
    """Solve chunks, and make their lacking shards with their checksums; blocks."""
    return [_solve_and_make(code, check) for check in checks]


def _solve_and_make(code: ErasureCode, check: _Check) -> Solved | None:
    solved = solve(code, check.stripe.chunk, check.read)
    if solved is not None:
        wrong = [check.read[index].number for index in solved.wrong]
        for number in code.shards(solved.length):
            if number in check.lacking or number in wrong:
                solved.crcs(number)
    return solved


def _by(items: Sequence[T], key: Callable[[T], MemberId]) -> list[tuple[MemberId, list[T]]]:
    """Return the items of each member, members in order."""
    groups: defaultdict[MemberId, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return sorted(groups.items(), key=lambda group: group[0])

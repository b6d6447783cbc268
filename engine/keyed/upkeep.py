"""Upkeep of keyed blobs: removes values that have expired, values of removed spaces, and values over quotas.

Rules kept here:
- A decision removes at most a batch, and looks at everything again; usage changes with it.
- A space over EVICT_ABOVE of its quota loses values down to EVICT_TO.  A hand goes round the keys, past NEIGHBOURS
  values for each that is evicted: the best of those that it saw and that were not used since.  Best is one that has
  expired, else the one least used lately, else the deepest, so leaves go before roots.  Keys are hashes: those that the
  hand passes are a sample, and each is looked at in turn.
- Eviction comes first, and what takes long gives way to it: a put that waits for room does not wait for the removal of
  a space with a million values.
- Within a round each decision goes on behind the last: what was removed lies in the overlay until it is applied, and a
  walk from the beginning would pass all of that again.
- Spaces over their quotas take turns, EVICT_TURNS each in a round, those first in which a put waits, which is woken
  after each; and what has expired goes between rounds.  So spaces that have millions of values too many hold up no
  put to another one, and no expiry.
- Rounds are begun at once when a put waits for room, else every ROUND_S: nothing outlives its time by more than
  twice that, unless the disk takes no writes, or very many are over at once.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Final

import structlog
import trio

from engine.format.keyed import (
    EXPIRIES_BEGIN,
    KEYED_HEAD,
    SpaceRecord,
    expiries_until,
    space_and_key,
    space_key,
    unpack_expiry_key,
    unpack_space,
    value_key,
    values_range,
)
from engine.format.layouts import Table
from engine.keyed.candidates import Candidate, Candidates
from engine.keyed.keyed_blobs import EVICT_TO, KeyedBlobs
from engine.keyed.spaces import Usage, charge_of_value, iter_spaces
from engine.keyed.values import remove_value
from engine.metadata.metadata_store import Metadata
from engine.metadata.pacing import Pacing
from engine.tables.views import Transaction, View
from lakefs.errors import LakeError
from lakefs.ports import Clock

REMOVALS_MAX: Final = 256
"""Most values removed by one decision."""
ROUND_S: Final = 5.0
"""Time between rounds: a value is removed within twice this time after it has expired."""
NEIGHBOURS: Final = 16
"""Values that the hand passes for one that is evicted."""
CANDIDATE_SPACES_MAX: Final = 16
EVICT_BATCH: Final = 8
"""Values evicted by one decision: 128 are looked at, about a millisecond in all."""
EVICT_TURNS: Final = 32
"""Decisions of one round that evict from one space: 256 values."""
_ROUND_GAP_S: Final = 0.01
"""Least time between two rounds, so that puts that wait in vain do not keep the loop busy."""
_log: Final = structlog.get_logger(__name__)


class KeyedUpkeep:
    """Runs rounds of upkeep, one at a time."""

    def __init__(
        self,
        metadata: Metadata,
        keyed: KeyedBlobs,
        clock: Clock,
        *,
        without_spaces: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
        batch: int = REMOVALS_MAX,
    ) -> None:
        """`without_spaces` runs in each round that finds no space."""
        self._without_spaces = without_spaces
        self._metadata = metadata
        self._keyed = keyed
        self._clock = clock
        self._batch = batch
        self._hands: dict[int, bytes] = {}
        """The last value looked at, by number of the space: a key of the table."""
        self._candidates: OrderedDict[int, Candidates] = OrderedDict()
        """Values that the hand saw, by number of the space; of those spaces that lost values last."""

    async def run(self) -> None:
        """Run rounds for ever, from the first space on.  A round that fails is logged, and the next tries again."""
        await self._keyed.used.wait()
        while True:
            self._keyed.round_wanted = trio.Event()
            try:
                await self.round()
            except LakeError as error:
                _log.warning("keyed_upkeep_failed", reason=error.message)
            finally:
                self._keyed.wake_puts()
            await trio.sleep(_ROUND_GAP_S)
            with trio.move_on_after(ROUND_S):
                await self._keyed.round_wanted.wait()

    async def round(self) -> None:
        """Remove what is over now: expired values, values of removed spaces, values over quotas.  Not yet durable."""
        with self._metadata.view() as view:
            spaces = list(iter_spaces(view))
        self._keyed.note_entries(sum(space.entries for _, space in spaces))
        numbers = {number for number, space in spaces if not space.removed}
        self._hands = {number: hand for number, hand in self._hands.items() if number in numbers}
        for number in self._candidates.keys() - numbers:
            del self._candidates[number]
        await self._evict_in_turn(
            [number for number, space in spaces if not space.removed and self._keyed.excess(number, space)]
        )
        if not spaces:
            await self._without_spaces()
        await self._repeat(partial(self._expire, _Walk(EXPIRIES_BEGIN)), gives_way=True)
        for number, space in spaces:
            if space.removed:
                walk = _Walk(values_range(number)[0])
                await self._repeat(partial(self._purge, number, walk), gives_way=True)

    async def _evict_in_turn(self, numbers: Sequence[int]) -> None:
        """Evict from these spaces, and from those in which puts wait during the round, which come first.

        What is left of a long eviction is for the next round, which begins at once.
        """
        pacing, turns = Pacing(self._metadata), Counter[int]()
        queue = dict.fromkeys(numbers)
        while True:
            waited_for = [number for number in self._keyed.waited_for() if turns[number] < EVICT_TURNS]
            number = min([*waited_for, *islice(queue, 0 if waited_for else 1)], key=turns.__getitem__, default=None)
            if number is None:
                return
            queue.pop(number, None)
            if turns[number] == EVICT_TURNS:
                self._keyed.round_wanted.set()
                continue
            turns[number] += 1
            more, _ = await self._metadata.commit(partial(self._evict, number), durable=False)
            if more:
                queue[number] = None
            if waited_for:
                self._keyed.wake_puts()
            await pacing.rest()

    async def _repeat(self, remove: Callable[[Transaction], bool], *, gives_way: bool = False) -> None:
        """Run a decision until it returns False, with rests in between.

        `gives_way`: run it once only when a put waits for room; the next round, which begins at once, goes on.
        """
        pacing, more = Pacing(self._metadata), True
        while more:
            more, _ = await self._metadata.commit(remove, durable=False)
            await pacing.rest()
            more = more and not (gives_way and self._keyed.round_wanted.is_set())

    def _expire(self, walk: _Walk, txn: Transaction) -> bool:
        """Remove a batch of values whose time is over."""
        _, end = expiries_until(self._clock.wall_ns())
        over = walk.next_of(txn, end, self._batch)
        usages = _Usages(txn)
        for place, _ in over:
            expires_ns, number, key = unpack_expiry_key(place)
            usage, record = usages.of(number), txn.get(Table.KEYED, value_key(number, key))
            if usage is not None and record is not None and KEYED_HEAD.unpack_from(record)[-1] == expires_ns:
                remove_value(txn, usage, number, key)
            else:  # of no value: one that stays is not touched
                txn.delete(Table.KEYED, place)
        usages.save()
        self._keyed.counts.expired += len(over)
        return len(over) == self._batch

    def _purge(self, number: int, walk: _Walk, txn: Transaction) -> bool:
        """Remove a batch of the values of a removed space, and its record with the last."""
        page = walk.next_of(txn, values_range(number)[1], self._batch)
        usages = _Usages(txn)
        usage = usages.of(number)
        if usage is None:
            return False
        for place, _ in page:
            remove_value(txn, usage, number, space_and_key(place)[1])
        self._keyed.counts.purged += len(page)
        if len(page) < self._batch:  # whatever its usage says
            txn.delete(Table.KEYED, space_key(number))
            return False
        usages.save()
        return True

    def _evict(self, number: int, txn: Transaction) -> bool:
        """Evict a batch of values of a space; returns True if it should lose more."""
        usages = _Usages(txn)
        usage, space = usages.of(number), usages.space(number)
        excess = 0 if space is None or space.removed else self._keyed.excess(number, space, above=EVICT_TO)
        evicted = evicted_bytes = charged = 0
        most = min(EVICT_BATCH, self._batch)
        if excess:
            self._look(txn, number, NEIGHBOURS * most)
        while usage is not None and evicted < most and charged < excess:
            victim = self._victim(txn, number)
            value = None if victim is None else remove_value(txn, usage, number, space_and_key(victim)[1])
            if value is None:
                break
            evicted += 1
            evicted_bytes += value.size_bytes
            charged += charge_of_value(value)
        usages.save()
        if evicted and space is not None:
            self._keyed.note_evicted(number, space.quota_bytes, evicted, evicted_bytes, charged)
        return bool(evicted) and charged < excess

    def _victim(self, view: View, number: int) -> bytes | None:
        """Return the best value to evict that is known, as its key in the table; None if the space has no value."""
        candidates = self._candidates_of(number)
        for _ in range(2):
            while (found := candidates.pop()) is not None:
                is_same = self._keyed.uses(found.place) <= found.uses
                if is_same and view.get(Table.KEYED, found.place) is not None:
                    return found.place
            self._look(view, number, NEIGHBOURS)  # all were removed, or used since
        return None

    def _look(self, view: View, number: int, count: int) -> None:
        """Make candidates of the next values behind the hand."""
        now_ns = self._clock.wall_ns()
        candidates = self._candidates_of(number)
        for place, record in islice(self._from_hand(view, number), count):
            _, _, depth, _, _, expires_ns = KEYED_HEAD.unpack_from(record)
            candidates.add(Candidate(not 0 < expires_ns <= now_ns, self._keyed.uses(place), -depth, place))
            self._hands[number] = place
        candidates.trim()

    def _candidates_of(self, number: int) -> Candidates:
        """Return a space's candidates, as they count by now; those of a space not used lately are forgotten."""
        found = self._candidates.setdefault(number, Candidates())
        self._candidates.move_to_end(number)
        if len(self._candidates) > CANDIDATE_SPACES_MAX:
            self._candidates.popitem(last=False)
        found.age(self._keyed.halvings)
        return found

    def _from_hand(self, view: View, number: int) -> Iterator[tuple[bytes, bytes]]:
        """Iterate once over the values of a space, from behind the hand round to it."""
        start, end = values_range(number)
        hand = self._hands.get(number, start) + b"\0"
        return chain(view.scan(Table.KEYED, hand, end), view.scan(Table.KEYED, start, hand))


class _Walk:
    """A walk of one round over keys of the table, in order, from decision to decision."""

    def __init__(self, begin: bytes) -> None:
        self._begin = begin

    def next_of(self, view: View, end: bytes, count: int) -> list[tuple[bytes, bytes]]:
        """Return the next entries before `end`, at most so many."""
        found = list(islice(view.scan(Table.KEYED, self._begin, max(end, self._begin)), count))
        if found:
            self._begin = found[-1][0] + b"\0"
        return found


class _Usages:
    """The usages of the spaces that one transaction changes."""

    def __init__(self, txn: Transaction) -> None:
        self._txn = txn
        self._usages: dict[int, Usage] = {}

    def space(self, number: int) -> SpaceRecord | None:
        """Return a space's record, removed or not; None if it has none."""
        value = self._txn.get(Table.KEYED, space_key(number))
        return None if value is None else unpack_space(value)

    def of(self, number: int) -> Usage | None:
        """Return a space's usage, None if it has no record."""
        if number not in self._usages:
            space = self.space(number)
            if space is None:
                return None
            self._usages[number] = Usage(self._txn, number, space)
        return self._usages[number]

    def save(self) -> None:
        """Record the usages."""
        for usage in self._usages.values():
            usage.save()

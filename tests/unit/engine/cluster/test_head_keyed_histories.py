"""Random histories of keys at two heads: a hit is exactly the last value that was answered as stored, or a miss."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from lakefs.cluster.placing import next_table
from lakefs.errors import SpaceNotFound
from lakefs.ids import MemberId
from lakefs.wire import messages as m
from tests.store_rig import ask
from tests.unit.engine.cluster.keyed_rig import KeyedHead, KeyedLake, in_keyed_lake
from tests.unit.engine.cluster.stripe_rig import Fault

KEYS = [b"%d" % number for number in range(12)]
STEPS = 100


@dataclass
class Model:
    """The values that each key of a space may have now; None: absent."""

    values: dict[bytes, set[bytes | None]] = field(default_factory=lambda: {key: {None} for key in KEYS})
    hits: int = 0
    misses: int = 0

    def put(self, key: bytes, value: bytes, outcome: int, *, maybe: bool) -> None:
        """Note a put.  `maybe`: a failure may have stored the value."""
        if outcome == m.KEYED_STORED:
            self.values[key] = {value}
        elif outcome == m.KEYED_PRESENT:
            self.values[key].discard(None)
            assert self.values[key], "a key that never had a value is present"
        elif maybe:
            self.values[key].add(value)

    def removed(self, key: bytes, outcome: int) -> None:
        if outcome in (m.KEYED_REMOVED, m.KEYED_ABSENT):
            self.values[key] = {None}

    def found(self, key: bytes, value: bytes | None, *, is_up: bool) -> None:
        """Check a value that was read; a miss is right while the key's home is not reached."""
        if value is None:
            self.misses += 1
            assert not is_up or None in self.values[key], f"{key!r} was stored, and nothing has removed it"
            return
        self.hits += 1
        assert value in self.values[key], f"{key!r} has {value!r}, and may have {self.values[key]}"
        self.values[key] = {value}


class History:
    """One history."""

    def __init__(self, lake: KeyedLake, seed: int) -> None:
        self.lake = lake
        self.random = random.Random(seed)
        self.model = Model()
        self.space = 0
        self.members = list(lake.table.members)

    async def run(self) -> None:
        self.space = await self.lake.heads[0].open()
        for step in range(STEPS):
            head = self.random.choice(self.lake.heads)
            await self.random.choice([self.put, self.put, self.read, self.read, self.remove, self.fail, self.again])(
                head, step
            )
        for head in self.lake.heads:
            head.members.faults.clear()
            await self.read(head, STEPS)

    def is_up(self, head: KeyedHead, key: bytes) -> bool:
        return head.members.faults.get(self.lake.home(self.space, key), Fault.NONE) in (Fault.NONE, Fault.ANSWER_LOST)

    async def put(self, head: KeyedHead, step: int) -> None:
        keys = self.random.sample(KEYS, self.random.randint(1, 5))
        values = {key: b"%d %d " % (step, place) * self.random.choice([1, 7000]) for place, key in enumerate(keys)}
        resize = self.random.random() < 0.3
        answer = await head.put(self.space, values, resize=resize)
        for (key, value), outcome in zip(values.items(), answer.outcomes, strict=True):
            home = self.lake.home(self.space, key)
            maybe = head.members.faults.get(home) is Fault.ANSWER_LOST
            if maybe and outcome == m.KEYED_FAILED and not resize:
                maybe = None in self.model.values[key]
            self.model.put(key, value, outcome, maybe=maybe)
            assert outcome != m.KEYED_FAILED or maybe or not self.is_up(head, key) or home in head.members.faults

    async def read(self, head: KeyedHead, step: int) -> None:
        keys = self.random.sample(KEYS, len(KEYS))
        present = await head.match(self.space, keys)
        for key, flag in zip(keys, present, strict=True):
            value = await head.get(self.space, key)
            assert flag == (value is not None)
            self.model.found(key, value, is_up=self.is_up(head, key))

    async def remove(self, head: KeyedHead, step: int) -> None:
        keys = self.random.sample(KEYS, 2)
        answer = await head.remove(self.space, *keys)
        for key, outcome in zip(keys, answer.outcomes, strict=True):
            self.model.removed(key, outcome)

    async def fail(self, head: KeyedHead, step: int) -> None:
        """Let a member fail for a head, or answer again."""
        home: MemberId = self.random.choice(list(head.members.clients))
        if head.members.faults.pop(home, None) is None:
            head.lose(home, fault=self.random.choice([Fault.AWAY, Fault.LOST, Fault.ANSWER_LOST]))

    async def again(self, head: KeyedHead, step: int) -> None:
        """Remove the space, and open another one of that name; both heads use that."""
        if self.random.random() < 0.7:
            return
        await ask(head.client, m.SpaceRemove("space"), m.Done)
        before, self.space = self.space, await head.open()
        assert before != self.space
        self.model.values = Model().values
        with pytest.raises(SpaceNotFound):
            await head.match(before, KEYS)


@pytest.mark.parametrize("seed", range(6))
def test_a_hit_is_the_last_value_that_was_stored(seed: int) -> None:
    async def body(lake: KeyedLake) -> None:
        history = History(lake, seed)
        await history.run()
        assert min(history.model.hits, history.model.misses) > 30, "both happen"

    in_keyed_lake(body)


class MovingHistory(History):
    """A history in which members leave the table and come back: a hit is a value that was once stored."""

    async def fail(self, head: KeyedHead, step: int) -> None:
        is_whole = len(self.lake.table.members) == len(self.members)
        members = self.random.sample(self.members, 2) if is_whole else self.members
        await self.lake.set_table(next_table(self.lake.table, members, accept_loss=True))


class EverStored(Model):
    """All values that a key ever had."""

    def put(self, key: bytes, value: bytes, outcome: int, *, maybe: bool) -> None:
        assert outcome in (m.KEYED_STORED, m.KEYED_PRESENT)
        if outcome == m.KEYED_STORED:
            self.values[key].add(value)

    def removed(self, key: bytes, outcome: int) -> None:
        assert outcome in (m.KEYED_REMOVED, m.KEYED_ABSENT)

    def found(self, key: bytes, value: bytes | None, *, is_up: bool) -> None:
        self.hits += value is not None
        assert value in self.values[key]


@pytest.mark.parametrize("seed", range(3))
def test_a_hit_is_a_value_that_was_stored_while_homes_change(seed: int) -> None:
    async def body(lake: KeyedLake) -> None:
        history = MovingHistory(lake, seed)
        history.model = EverStored()
        await history.run()
        assert history.model.hits > 30

    in_keyed_lake(body)

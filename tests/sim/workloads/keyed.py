"""A customer of keyed blobs beside the workloads of a simulated lake, through all lives of a seed.

It alone uses its space, so it knows of each key what it may have: one value or none after an answer; a few after a
request that failed, was cancelled, or was never answered.  Such a key rests until the next life, because that request
may yet be decided.  What was answered survives every crash, unless the disk lies.

Errors are judged as those of workloads are (`Weather`); no request of a customer is a user's mistake.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from lakefs.client.trio.spaces import TrioSpace
from lakefs.errors import BugError, LakeError, UserError
from lakefs.put.keyed import Outcome
from tests.sim.judges.history import SimFailure
from tests.sim.workloads.workloads import Connect, Weather
from tests.sim.world.sim_time import pause

KEYED_EVERY: Final = 10
"""One of so many seeds has a customer."""
SPACE: Final = "customer"
_KEYS: Final = 10
_SIZES: Final = (1, 900, 60_000, 65_536, 90_000)
_ROOM: Final = max(_SIZES)


class KeyedCustomer:
    """The customer of one seed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._count = 0
        self._may_be: dict[bytes, set[bytes]] = {}
        """Values that a key may have; b"" stands for none."""
        self._ever: dict[bytes, set[bytes]] = {}
        """Values that were put to a key, and none."""
        self._resting: set[bytes] = set()

    async def live(self, connect: Connect, weather: Weather, count: int, slowest_s: float) -> None:
        """Compare all keys with what is known, then do that many operations."""
        self._weather = weather
        self._slowest_s = slowest_s
        self._resting.clear()
        if weather.damaged:  # what was answered may be lost from now on, but no other bytes are right
            self._may_be = {key: set(values) for key, values in self._ever.items()}
        plan: list[Callable[[], Awaitable[None]]] = [self._look_at_all]
        kinds = (self._put, self._put, self._put, self._get, self._get, self._match, self._remove)
        plan += self._rng.choices(kinds, k=count)
        while plan:
            some, plan = plan[:8], plan[8:]
            try:
                async with connect() as lake:
                    self._space: TrioSpace = await lake.space(SPACE)
                    for kind in some:
                        await self._do(kind)
            except LakeError as error:
                self._judge(error, "connect", storing=True)

    async def _do(self, kind: Callable[[], Awaitable[None]]) -> None:
        is_short = kind != self._look_at_all and self._rng.random() < 0.1
        with trio.move_on_after(self._rng.uniform(0.0, 3 * self._slowest_s) if is_short else math.inf):
            try:
                await kind()
                self._weather.met[f"keyed{kind.__name__}"] += 1
            except LakeError as error:
                self._judge(error, kind.__name__, storing=kind == self._put)
        await pause(self._rng.uniform(0.0, self._slowest_s))

    def _judge(self, error: LakeError, what: str, *, storing: bool) -> None:
        is_ours = isinstance(error, (BugError, UserError)) and not self._weather.disk.is_dead
        if is_ours or not self._weather.excuses(error, storing=storing):
            raise SimFailure(f"keyed{what}: {error!r}") from error

    def _expect(self, good: bool, what: str) -> None:
        if not good:
            raise SimFailure(f"keyed customer: {what}")

    def _keys(self, most: int) -> list[bytes]:
        """Return a few keys of those that do not rest."""
        drawn = {b"key %d" % self._rng.randrange(_KEYS) for _ in range(self._rng.randint(1, most))}
        return sorted(drawn - self._resting)

    def _value(self, key: bytes) -> bytes:
        self._count += 1
        text = b"everybody's " if self._rng.random() < 0.3 else b"%d of %s " % (self._count, key)
        return (text * (_ROOM // len(text) + 1))[: self._rng.choice(_SIZES)]

    def _known(self, key: bytes) -> set[bytes]:
        return self._may_be.get(key, {b""})

    # --- operations ----------------------------------------------------------------------------------

    async def _put(self) -> None:
        wanted = {key: self._value(key) for key in self._keys(3)}
        before = {key: self._known(key) for key in wanted}
        for key, value in wanted.items():
            self._ever.setdefault(key, {b""}).add(value)
            self._may_be[key] = before[key] | {value} if b"" in before[key] else before[key]
        self._resting |= wanted.keys()  # until the answer
        result = await self._space.put_many(list(wanted), list(wanted.values()))
        for place, (key, outcome) in enumerate(zip(wanted, result.outcomes, strict=True)):
            if outcome is Outcome.FAILED:
                self._judge(result.failures[place], "put", storing=True)
                continue
            self._resting.discard(key)
            if outcome is Outcome.STORED:
                self._expect(b"" in before[key] or self._weather.damaged, f"{key!r} was put, and had a value")
                self._may_be[key] = {wanted[key]}
            else:
                self._expect(before[key] != {b""}, f"{key!r} had no value: {outcome}")
                self._may_be[key] = before[key] - {b""}

    async def _get(self) -> None:
        await self._compare(self._keys(4))

    async def _look_at_all(self) -> None:
        await self._compare(sorted(self._may_be))

    async def _compare(self, keys: list[bytes]) -> None:
        buffers = [bytearray(_ROOM) for _ in keys]
        lengths = await self._space.get_many_into(keys, buffers)
        for key, buffer, length in zip(keys, buffers, lengths, strict=True):
            found, known = bytes(buffer[:length]), self._known(key)
            if not found and (self._weather.damaged or self._weather.disk_failing):
                continue  # it cannot be read, or not now: a miss
            self._expect(found in known, f"{key!r} has {found[:40]!r}, none of {[value[:40] for value in known]}")
            if key not in self._resting:
                self._may_be[key] = {found}

    async def _match(self) -> None:
        keys = self._keys(4)
        for key, present in zip(keys, (await self._space.match(keys)).present, strict=True):
            known = self._known(key)
            if self._weather.damaged and not present:
                continue
            self._expect(known != {b""} if present else b"" in known, f"{key!r} is present: {present}")
            self._may_be[key] = known - {b""} if present else {b""}

    async def _remove(self) -> None:
        keys = self._keys(2)
        before = {key: self._known(key) for key in keys}
        for key in keys:
            self._may_be[key] = before[key] | {b""}
        self._resting |= set(keys)
        for key, was_there in zip(keys, await self._space.remove(keys), strict=True):
            self._resting.discard(key)
            good = before[key] != {b""} if was_there else b"" in before[key]
            self._expect(good or self._weather.damaged, f"{key!r} was removed: {was_there}")
            self._may_be[key] = {b""}

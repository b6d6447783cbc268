"""A customer of keyed blobs of a simulated lake, with a space of its own that is removed and made anew now and then.

A value lies once, at its key's home.  So a key is a miss while its home is away, or when another member has become its
home, and an earlier value may be found again when that changes back.  But:

- a hit is a value that was put to that key of that space;
- while the table stays, an answered removal stays, whoever crashes, unless a disk lied and forgot it;
- while the table stays and no member was hurt, an answered put stays.

A request that fails leaves its keys in doubt until the table changes, or for `RESTS_S`.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import trio

from lakefs.client.trio.lake import TrioLake
from lakefs.client.trio.spaces import TrioSpace
from lakefs.errors import BugError, InvalidArgument, LakeError, SpaceNotFound
from lakefs.put.keyed import Outcome
from tests.sim.cluster.health import Health
from tests.sim.cluster.places import HeadPlace, Names
from tests.sim.cluster.promises import RESTS_S
from tests.sim.judges.history import SimFailure
from tests.sim.world.offload import SimOffload

KEYS = 8
SPACE = "space"
SIZES = (1, 900, 60_000, 70_000)
_ROOM = max(SIZES)


@dataclass
class KeyedValue:
    """The knowledge about a key, in the table of an epoch."""

    ever: set[bytes] = field(default_factory=set)
    """Values that were put since the space was made."""
    may_be: set[bytes] = field(default_factory=lambda: {b""})
    """Values that it may have while the table of `epoch` stays; b"": none."""
    epoch: int = 0
    is_certain: bool = False
    """No member was hurt since the last answer."""
    rests_until: float = 0.0


class KeyedCustomer:
    """The customer of one history."""

    def __init__(self, rng: random.Random, names: Names, health: Health, log: Callable[[str], None]) -> None:
        self.operations = 0
        self._rng = rng
        self._names = names
        self._health = health
        self._log = log
        self._keys: dict[bytes, KeyedValue] = {}
        self._forgotten = 0
        self.hits = 0

    async def work(self, heads: Sequence[HeadPlace], count: int) -> None:
        """Do that many operations."""
        kinds = (self._put, self._put, self._put, self._get, self._get, self._get, self._remove, self._remove_space)
        weights = (4, 4, 4, 4, 4, 4, 4, 1)
        while count > 0:
            some = min(count, self._rng.randint(1, 8))
            count -= some
            try:
                async with self._rng.choice(heads).connect() as client:
                    self._lake = TrioLake(client, SimOffload(self._rng, slowest_s=0.0), network=True)
                    for _ in range(some):
                        await self._do(self._rng.choices(kinds, weights)[0])
            except LakeError as error:
                self._log(f"keyed: {error!r}")
                if isinstance(error, (BugError, InvalidArgument)):
                    raise SimFailure(f"keyed: {error!r}") from error
            await trio.sleep(self._rng.choice((0.1, 1.0, 3.0)))

    async def _do(self, kind: Callable[[TrioSpace], Awaitable[None]]) -> None:
        with trio.fail_after(300):
            space = await self._lake.space(SPACE, quota="512M")
            self._look_at_table()
            await kind(space)
        self.operations += 1
        await trio.sleep(self._rng.choice((0.0, 0.1, 2.0)))

    def _look_at_table(self) -> None:
        """Forget what is bound to a table that is not the newest, or to members that were hurt, or have forgotten."""
        has_forgotten = self._forgotten != self._health.forgotten
        self._forgotten = self._health.forgotten
        for key in self._keys.values():
            if key.epoch != self._names.epoch or has_forgotten:
                key.epoch, key.may_be, key.is_certain = self._names.epoch, key.ever | {b""}, False
            if self._health.was_hurt or self._health.elsewhere:
                key.is_certain = False

    def _some(self) -> list[bytes]:
        """Return a few keys that do not rest."""
        keys = sorted({b"key %d" % self._rng.randrange(KEYS) for _ in range(self._rng.randint(1, 3))})
        for key in keys:
            self._keys.setdefault(key, KeyedValue(epoch=self._names.epoch))
        return [key for key in keys if trio.current_time() >= self._keys[key].rests_until]

    # --- operations ----------------------------------------------------------------------------------

    async def _put(self, space: TrioSpace) -> None:
        wanted = {key: self._rng.randbytes(self._rng.choice(SIZES)) for key in self._some()}
        epoch = self._names.epoch
        for key, value in wanted.items():
            known = self._keys[key]
            known.ever.add(value)
            known.may_be.add(value)
            known.rests_until = trio.current_time() + RESTS_S
        result = await space.put_many(list(wanted), list(wanted.values()))
        for key, outcome in zip(wanted, result.outcomes, strict=True):
            known = self._keys[key]
            if outcome is Outcome.FAILED:
                known.rests_until = trio.current_time() + RESTS_S
                continue
            known.rests_until = 0.0
            if epoch == self._names.epoch == known.epoch:
                present = known.may_be - {b"", wanted[key]}
                known.may_be = {wanted[key]} if outcome is Outcome.STORED else present or {wanted[key]}
                known.is_certain = not self._health.was_hurt and not self._health.elsewhere

    async def _get(self, space: TrioSpace) -> None:
        keys = self._some()
        buffers = [bytearray(_ROOM) for _ in keys]
        epoch = self._names.epoch
        lengths = await space.get_many_into(keys, buffers)
        self._look_at_table()
        for key, buffer, length in zip(keys, buffers, lengths, strict=True):
            known, found = self._keys[key], bytes(buffer[:length])
            self.hits += bool(found)
            if found and found not in known.ever:
                raise SimFailure(f"{key!r} has {found[:20]!r}, which was never put to it")
            if epoch != self._names.epoch:
                continue
            if found and found not in known.may_be:
                raise SimFailure(f"{key!r} has {found[:20]!r}, which was removed, or never its value here")
            if not found and known.is_certain and b"" not in known.may_be:
                raise SimFailure(f"{key!r} has nothing, though nothing has happened since it was put")

    async def _remove(self, space: TrioSpace) -> None:
        keys, epoch = self._some(), self._names.epoch
        for key in keys:
            self._keys[key].may_be.add(b"")
            self._keys[key].rests_until = trio.current_time() + RESTS_S
        try:
            await space.remove(keys)
        except LakeError:
            for key in keys:
                self._keys[key].rests_until = trio.current_time() + RESTS_S
            raise
        for key in keys:
            known = self._keys[key]
            known.rests_until = 0.0
            if epoch == self._names.epoch == known.epoch:
                known.may_be = {b""}

    async def _remove_space(self, space: TrioSpace) -> None:
        """Remove the space; the next operation makes it anew, empty."""
        self._log("keyed: the space is removed")
        try:
            await self._lake.remove_space(SPACE)
        except SpaceNotFound:
            await trio.lowlevel.checkpoint()
        except LakeError:
            self._keys = {
                key: KeyedValue(set(known.ever), known.ever | {b""}, known.epoch, False, known.rests_until)
                for key, known in self._keys.items()
            }
            raise
        self._keys.clear()

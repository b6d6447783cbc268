"""Customers whose buckets come and go, in a simulated lake with several names shards.

A bucket that was removed may be made anew in another shard.  Whatever heads know of that, each bucket is a register
(it is there, or not), and so is the one name in it; both are judged at the end (`tests.sim.judges.registers`).
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from lakefs.client.trio.lake import TrioLake
from lakefs.errors import AlreadyExists, BucketNotEmpty, BucketNotFound, BugError, KeyNotFound, LakeError, UserError
from lakefs.wire import messages as m
from tests.linear import NOTHING, PRESENT, Found, Nothing, Value
from tests.sim.cluster.clients import SimClient
from tests.sim.cluster.customers import BOUND_S
from tests.sim.cluster.places import HeadPlace
from tests.sim.cluster.promises import Promises
from tests.sim.judges.history import SimFailure
from tests.sim.judges.registers import Registers
from tests.sim.world.offload import SimOffload
from tests.store_rig import ask, change, good

BUCKETS: Final = "come0", "come1", "come2"
NAME: Final = "name"
_SIZE: Final = 900
Outcome = tuple[Found, Value | Nothing]
"""The value that an operation found in a register, and the one that it wrote."""
_UNTOUCHED: Final[Outcome] = NOTHING, NOTHING
_MISSING: Final[Outcome] = None, NOTHING
_THERE: Final[Outcome] = PRESENT, NOTHING


class BucketRegisters:
    """The buckets of one world and their names, as registers."""

    def __init__(self) -> None:
        self.registers: Final = Registers()
        self._payloads: dict[int, bytes] = {}
        self._numbers: dict[bytes, int] = {}
        self._made = 0

    def new_value(self) -> int:
        """Return a value that no register had."""
        self._made += 1
        return self._made

    def new_payload(self, rng: random.Random) -> tuple[int, bytes]:
        """Return a value of a name, and the content that stands for it."""
        value, payload = self.new_value(), rng.randbytes(_SIZE)
        self._payloads[value], self._numbers[payload] = payload, value
        return value, payload

    def value_of(self, payload: bytes) -> int:
        """Return the value that a content stands for."""
        if payload not in self._numbers:
            raise SimFailure(f"a content that nobody put: {payload[:20]!r}")
        return self._numbers[payload]

    async def end(self, head: HeadPlace, promises: Promises, rng: random.Random, log: Callable[[str], None]) -> None:
        """Read what a quiet lake has, for the last checks, and judge all; SimFailure."""
        customer = BucketCustomer("reader", rng, self, log)
        for bucket in BUCKETS:
            found: Value = await customer.read_last(head, bucket)
            if found is not None:
                assert isinstance(found, int)
                promises.key(f"{bucket}/{NAME}").has((self._payloads[found],))
        self.registers.check()


class BucketCustomer:
    """One client of one head at a time."""

    def __init__(self, name: str, rng: random.Random, registers: BucketRegisters, log: Callable[[str], None]) -> None:
        self.name = name
        self.operations = 0
        self._rng = rng
        self._all = registers
        self._log = log
        self._kinds: Sequence[tuple[int, Callable[[SimClient, str], Awaitable[None]]]] = (
            (4, self.create),
            (4, self.remove),
            (2, self._list),
            (2, self.look),
            (2, self._put),
            (2, self._put_making),
            (4, self._get),
            (3, self._delete),
        )

    async def work(self, heads: Sequence[HeadPlace], count: int) -> None:
        """Do that many operations."""
        kinds, weights = [kind for _, kind in self._kinds], [weight for weight, _ in self._kinds]
        while count > 0:
            some = min(count, self._rng.randint(1, 8))
            count -= some
            try:
                async with self._rng.choice(heads).connect() as client:
                    await client.call(m.Hello(1, self.name))
                    for _ in range(some):
                        with trio.move_on_after(BOUND_S) as bound:
                            await self._rng.choices(kinds, weights)[0](client, self._rng.choice(BUCKETS))
                        if bound.cancelled_caught:
                            raise SimFailure(f"{self.name}: an operation has not ended in {BOUND_S:g} s")
                        self.operations += 1
                        await trio.sleep(self._rng.choice((0.0, 0.0, 0.3, 2.0)))
            except LakeError as error:
                self._check(error)
            await trio.sleep(self._rng.choice((0.1, 1.0)))

    async def read_last(self, head: HeadPlace, bucket: str) -> Value:
        """Return the value that a bucket's name has in a quiet lake."""
        async with head.connect() as client:
            await client.call(m.Hello(1, self.name))
            await self.look(client, bucket)
            await self._get(client, bucket)
        last = self._all.registers.operations[f"{bucket}/{NAME}"][-1]
        if last.who != f"{self.name} get":
            raise SimFailure(f"bucket {bucket} cannot be read from a quiet lake")
        assert last.found is None or isinstance(last.found, int)
        return last.found

    # --- operations --------------------------------------------------------------------------------------

    async def create(self, client: SimClient, bucket: str) -> None:
        """Make a bucket."""
        made = self._all.new_value()

        async def call() -> tuple[Outcome, Outcome]:
            try:
                await ask(client, m.BucketCreate(bucket), m.Buckets)
            except AlreadyExists:
                return _THERE, _UNTOUCHED
            return (None, made), _MISSING

        await self._do("create", bucket, call, lost=((None, made), _UNTOUCHED))

    async def remove(self, client: SimClient, bucket: str) -> None:
        """Remove a bucket."""

        async def call() -> tuple[Outcome, Outcome]:
            try:
                await ask(client, m.BucketRemove(bucket), m.Done)
            except BucketNotFound:
                return _MISSING, _MISSING
            except BucketNotEmpty:
                return _THERE, (PRESENT, NOTHING)
            return (PRESENT, None), _MISSING

        await self._do("remove", bucket, call, lost=((PRESENT, None), _UNTOUCHED))

    async def _list(self, client: SimClient, bucket: str) -> None:
        begun = self._all.registers.begin()
        try:
            found = await ask(client, m.BucketList(), m.Buckets)
        except LakeError as error:
            self._check(error)
            return
        names = [stat.name for stat in found.buckets]
        if names != sorted(set(names)):
            raise SimFailure(f"{self.name}: buckets are listed as {names}")
        for each in BUCKETS:
            self._all.registers.done(each, begun, PRESENT if each in names else None, who=f"{self.name} list")

    async def look(self, client: SimClient, bucket: str) -> None:
        """Look if a bucket exists."""

        async def call() -> tuple[Outcome, Outcome]:
            try:
                await ask(client, m.BucketList(bucket), m.Buckets)
            except BucketNotFound:
                return _MISSING, _MISSING
            return _THERE, _UNTOUCHED

        await self._do("look", bucket, call)

    async def _put(self, client: SimClient, bucket: str) -> None:
        await self._put_name(client, bucket, makes=False)

    async def _put_making(self, client: SimClient, bucket: str) -> None:
        await self._put_name(client, bucket, makes=True)

    async def _put_name(self, client: SimClient, bucket: str, *, makes: bool) -> None:
        value, payload = self._all.new_payload(self._rng)
        there: Outcome = (NOTHING, self._all.new_value()) if makes else _THERE
        request = m.PutObjects([len(payload)], [change(NAME, bucket=bucket, create_bucket=makes)])

        async def call() -> tuple[Outcome, Outcome]:
            try:
                good(await ask(client, request, m.NameResults, payload))
            except BucketNotFound:
                if makes:
                    raise
                return _MISSING, _MISSING
            return there, (NOTHING, value)

        await self._do("put", bucket, call, lost=(there if makes else _UNTOUCHED, (NOTHING, value)))

    async def _get(self, client: SimClient, bucket: str) -> None:
        lake = TrioLake(client, SimOffload(random.Random(self._rng.getrandbits(32)), slowest_s=0.0), network=True)

        async def call() -> tuple[Outcome, Outcome]:
            try:
                found = bytes(await lake.get(f"{bucket}/{NAME}"))
            except BucketNotFound:
                return _MISSING, _MISSING
            except KeyNotFound:
                return _THERE, _MISSING
            return _THERE, (self._all.value_of(found), NOTHING)

        await self._do("get", bucket, call)

    async def _delete(self, client: SimClient, bucket: str) -> None:
        async def call() -> tuple[Outcome, Outcome]:
            (result,) = (await ask(client, m.DeleteNames([(bucket, NAME)]), m.NameResults)).results
            if result.failure is not None:
                error = result.failure.as_error()
                if not isinstance(error, BucketNotFound):
                    raise error
                return _MISSING, _MISSING
            return (_THERE, (PRESENT, None)) if result.stat is not None else (_UNTOUCHED, _MISSING)

        await self._do("delete", bucket, call, lost=(_UNTOUCHED, (NOTHING, None)))

    async def _do(
        self,
        what: str,
        bucket: str,
        call: Callable[[], Awaitable[tuple[Outcome, Outcome]]],
        lost: tuple[Outcome, Outcome] = (_UNTOUCHED, _UNTOUCHED),
    ) -> None:
        """Do an operation and note what it says of the bucket and its name; `lost`: what it may do, if it fails."""
        registers, who = self._all.registers, f"{self.name} {what}"
        begun = registers.begin()
        try:
            outcomes = await call()
        except LakeError as error:
            for key, (found, writes) in zip((bucket, f"{bucket}/{NAME}"), lost, strict=True):
                if writes is not NOTHING:
                    registers.lost(key, begun, found, writes=writes, who=who)
            self._log(f"{who} {bucket}: {error!r}")
            self._check(error)
            return
        self._log(f"{who} {bucket}: {outcomes}")
        for key, (found, writes) in zip((bucket, f"{bucket}/{NAME}"), outcomes, strict=True):
            if found is not NOTHING or writes is not NOTHING:
                registers.done(key, begun, found, writes=writes, who=who)

    def _check(self, error: LakeError) -> None:
        """Raise SimFailure unless an error may be."""
        if isinstance(error, BugError | UserError):
            raise SimFailure(f"{self.name}: {error!r}") from error

"""The operator and the weather of a simulated lake: what happens to its members, names, heads and ways."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import trio

from engine.coordinator.lake_state import LakeState
from engine.coordinator.records import MemberState
from engine.format.layouts import Table, unpack_chunk_record
from engine.format.shards import is_whole
from engine.segments.files import segment_path
from lakefs.errors import DiskFailed, LakeError
from lakefs.ids import MemberId
from lakefs.wire import messages as m
from tests.sim.cluster.devices import Device
from tests.sim.cluster.health import Health
from tests.sim.cluster.liars import Lie
from tests.sim.cluster.network import Way
from tests.sim.cluster.places import MEMBER_BYTES, HeadPlace, MemberPlace, NamesPlace, Place, Surroundings
from tests.sim.judges.history import SimFailure

Event = Callable[[], Awaitable[None]]
EVENT_S = 400.0
"""Every event has ended by then: what was stopped or broken works again."""


class Faults:
    """Events that are drawn one after the other; what begins also ends."""

    def __init__(
        self,
        world: Surroundings,
        rng: random.Random,
        members: list[MemberPlace],
        names: NamesPlace,
        heads: Sequence[HeadPlace],
        health: Health,
        *,
        is_rough: bool,
    ) -> None:
        """`is_rough`: more members than m may be hurt at once, which only ends answers, not content."""
        self.met: Counter[str] = Counter()
        self.lost_ids: set[MemberId] = set()
        """Members whose devices are lost for ever, and that the lake still has."""
        self._world = world
        self._rng = rng
        self._members = members
        self._names = names
        self._heads = heads
        self._health = health
        self._is_rough = is_rough
        self._nursery: trio.Nursery | None = None

    async def run(self, count: int) -> None:
        """Let that many events happen, and wait until each has ended."""
        kinds: list[tuple[int, Event]] = [
            (6, self.crash_member),
            (6, self.cut_off),
            (4, self.trouble_way),
            (3, self.slow_member),
            (3, self.fill_member),
            (3, self.lose_device),
            (3, self.crash_names),
            (2, self.trouble_names),
            (2, self.kill_head),
            (3, self.collect),
            (2, self.drain),
            (2, self.add_member),
            (2, self.check),
            (3, self.lie),
            (3, self.rot),
            (2, self.fail_disk),
            (4, self.break_names_device),
        ]
        weights = [weight for weight, _ in kinds]
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._look_if_healed)
            async with trio.open_nursery() as events:
                for _ in range(count):
                    await trio.sleep(self._rng.choice((0.2, 2.0, 6.0, 15.0)))
                    kind = self._rng.choices([kind for _, kind in kinds], weights)[0]
                    events.start_soon(self._bounded, kind)
            self._nursery.cancel_scope.cancel()

    async def _bounded(self, kind: Event) -> None:
        """Run an event, which has to end."""
        with trio.move_on_after(EVENT_S) as bound:
            await kind()
        if bound.cancelled_caught:
            raise SimFailure(f"{kind.__name__} has not ended in {EVENT_S:g} s")

    def _log(self, text: str) -> None:
        self._world.log(text)

    async def _look_if_healed(self) -> None:
        """Note when the lake says that it is healed."""
        while True:
            await trio.sleep(2.0)
            upkeep = self._names.upkeep
            if upkeep is None or self._health.hurt or self.lost_ids or not self._health.was_hurt:
                continue
            if await is_healed(self._names, self._members):
                self._log("the lake is healed")
                self.met["healed"] += 1
                self._health.healed()

    # --- members -------------------------------------------------------------------------------------

    def _victim(self) -> MemberPlace | None:
        """Return a member that may be hurt now."""
        members = [place for place in self._members if self._is_rough or self._health.may_hurt(place.name)]
        members = [place for place in members if place.id is not None and place.is_wanted]
        return self._rng.choice(members) if members else None

    async def crash_member(self) -> None:
        """Let a member crash, or its host lose power; it comes back."""
        place = self._victim()
        if place is None:
            return
        power, at_operation = self._rng.random() < 0.6, self._rng.choice((0, 0, 1, 5, 20, 60))
        lives = place.lives
        self._health.begin(place.name)
        self._log(f"{place.name} crashes: {'power' if power else 'process'}, at operation {at_operation}")
        self.met["crashes"] += 1
        is_kept_away = self._rng.random() < 0.5
        place.is_wanted = not is_kept_away
        place.crash(power=power, at_operation=at_operation)
        await trio.sleep(self._rng.choice((1.0, 10.0, 25.0, 40.0)))
        place.is_wanted = True
        if place.lives == lives:
            place.crash(power=power)
        await until(lambda: place.is_up and place.lives > lives)
        self._health.end(place.name)

    async def cut_off(self) -> None:
        """Cut a member off from some of the others: one way, both ways, silently or not."""
        place = self._victim()
        if place is None:
            return
        others = [self._names.host, *(head.host for head in self._heads)]
        others = self._rng.sample(others, self._rng.randint(1, len(others)))
        way, is_one_way = self._rng.choice((Way.SILENT, Way.SILENT, Way.CUT, Way.LATE)), self._rng.random() < 0.4
        self._health.begin(place.name)
        self.met[f"cut off: {way.name}"] += 1
        self._log(f"{place.name} is cut off from {others}: {way.name}{' one way' if is_one_way else ''}")
        pairs = [pair for other in others for pair in ((other, place.host), (place.host, other))]
        if is_one_way:
            pairs = pairs[self._rng.randint(0, 1) :: 2]
        await self._with_ways(pairs, way, self._rng.choice((2.0, 8.0, 25.0, 40.0)))
        self._health.end(place.name)

    async def _with_ways(self, pairs: Sequence[tuple[str, str]], way: Way, seconds: float) -> None:
        for pair in pairs:
            self._world.network.set_way(*pair, way)
        await trio.sleep(seconds)
        for pair in pairs:
            self._world.network.set_way(*pair, Way.GOOD)
        await trio.sleep(6.0)  # links that are away are tried again

    async def slow_member(self) -> None:
        """Let a member's threads be slow, from its next life on, or its disk fill up."""
        place = self._victim()
        if place is None:
            return
        self._health.begin(place.name)
        self.met["slow"] += 1
        self._log(f"{place.name} is slow")
        place.slowest_s = self._rng.choice((0.3, 2.0))
        await self._restart(place)
        await trio.sleep(self._rng.choice((10.0, 30.0)))
        place.slowest_s = 0.001
        await self._restart(place)
        self._health.end(place.name)

    async def _restart(self, place: Place) -> None:
        """Stop a place's process cleanly, and let the next one start."""
        lives = place.lives
        if place.process is not None:
            place.process.stop()
        await until(lambda: place.is_up and place.lives > lives)

    async def fill_member(self) -> None:
        """Let others take all room of a member's disk."""
        place = self._victim()
        if place is None or place.disk.is_dead:
            return
        self._health.begin(place.name)
        self.met["full"] += 1
        self._log(f"{place.name} is full")
        disk = place.disk
        disk.capacity_bytes = max(0, MEMBER_BYTES - disk.free_bytes())
        await trio.sleep(self._rng.choice((5.0, 25.0)))
        place.disk.capacity_bytes = disk.capacity_bytes = MEMBER_BYTES
        await trio.sleep(6.0)
        self._health.end(place.name)

    async def lose_device(self) -> None:
        """Lose a member's device for ever; an empty one comes back as a new member."""
        place = self._victim()
        if place is None or not self._health.may_lose(place.name) or self._health.hurt.get(place.name):
            return
        await self._lose(place)

    async def _lose(self, place: MemberPlace) -> None:
        assert place.id is not None
        lost = place.id
        self._health.begin(place.name)
        self._health.lost.add(place.name)
        self.lost_ids.add(lost)
        self.met["lost"] += 1
        self._log(f"{place.name} loses its device")
        lives = place.lives
        place.is_wanted = False
        place.lose()
        await trio.sleep(self._rng.choice((0.5, 15.0, 40.0)))
        place.is_wanted = True
        await until(lambda: place.is_up and place.lives > lives and place.id is not None)
        await self.remove_lost(lost)
        self._health.end(place.name)

    async def remove_lost(self, lost: MemberId) -> None:
        """Tell the lake that a member is lost for ever, until it has heard it."""
        await self.tell(m.ChangeMember(lost, m.MEMBER_REMOVE, accept_loss=True), "remove the lost member")
        self.lost_ids.discard(lost)

    async def tell(self, request: m.Request, what: str) -> None:
        """Send a request of the operator to the lake until it is answered."""
        while True:
            try:
                head = self._rng.choice(self._heads)
                async with head.connect() as client:
                    await client.call(m.Hello(1, "operator"))
                    (await client.call(request)).body.release()
                    self._log(f"operator: {what}: done")
                    return
            except LakeError as error:
                self._log(f"operator: {what}: {error!r}")
            await trio.sleep(5.0)

    async def lie(self) -> None:
        """Let a member lie to heads."""
        place = self._victim()
        if place is None:
            return
        self._health.begin(place.name)
        place.lies = self._rng.choice((Lie.BYTES, Lie.LENGTH))
        self.met[f"lies: {place.lies.name}"] += 1
        self._log(f"{place.name} lies: {place.lies.name}")
        await trio.sleep(self._rng.choice((5.0, 25.0)))
        place.lies = Lie.NONE
        self._log(f"{place.name} lies no more")
        self._health.end(place.name)

    async def rot(self) -> None:
        """Flip bits of shards on a member's medium, and have the lake checked."""
        place = self._victim()
        if place is None or place.store is None or place.disk.is_dead:
            return
        places = self._shard_places(place)
        if not places or not self._health.may_lose(place.name):
            return
        self._health.begin(place.name)
        self._health.lost.add(place.name)
        self.met["rot"] += 1
        self._log(f"bits flip on {place.name}")
        for path, offset in self._rng.sample(places, min(len(places), 3)):
            place.disk.flip_bit(path, offset, self._rng.randrange(8))
        await trio.sleep(self._rng.choice((1.0, 10.0)))
        await self.tell(m.RunFsck(True), "check every shard")
        self._health.end(place.name)

    def _shard_places(self, place: MemberPlace) -> list[tuple[str, int]]:
        """Return where the first byte of each shard is on a member's medium."""
        store = place.store
        assert store is not None
        kinds = store.segments.register.kinds
        with store.metadata.view() as view:
            records = [
                unpack_chunk_record(value) for key, value in view.scan(Table.CHUNKS, b"", b"\xff") if not is_whole(key)
            ]
        return [(segment_path(found.segment, kinds[found.segment]), found.offset) for found in records]

    async def fail_disk(self) -> None:
        """Let one operation of a member's disk fail; the member is started again."""
        place = self._victim()
        if place is None or place.disk.is_dead:
            return
        self._health.begin(place.name)
        operation = self._rng.choice(("sync_data", "pwrite", "pread_into"))
        self.met[f"disk failed: {operation}"] += 1
        self._log(f"{operation} of {place.name} fails")
        error = DiskFailed(f"planted failure of {operation}")
        place.disk.fail_next(
            operation, error, path=self._rng.choice(("segments/", "journal/")), skip=self._rng.randint(0, 3)
        )
        await trio.sleep(self._rng.choice((3.0, 15.0)))
        place.disk.forget_failures()
        await self._restart(place)
        self._health.end(place.name)

    # --- names, heads, ways --------------------------------------------------------------------------

    async def crash_names(self) -> None:
        """Let the names crash, or their host lose power."""
        names, lives = self._names, self._names.lives
        power, at_operation = self._rng.random() < 0.6, self._rng.choice((0, 1, 5, 30))
        self._health.begin_elsewhere()
        self.met["names crashed"] += 1
        self._log(f"names crash: {'power' if power else 'process'}, at operation {at_operation}")
        names.crash(power=power, at_operation=at_operation)
        await trio.sleep(self._rng.choice((1.0, 10.0)))
        if names.lives == lives:
            names.crash(power=power)
        await until(lambda: names.is_up and names.lives > lives)
        self._health.end_elsewhere()

    async def break_names_device(self) -> None:
        """Let one of the names' devices break: for ever, so that an empty one takes its place, or for a while."""
        names = self._names
        if names.is_breaking or len(names.good_copies()) < len(names.disks) or len(names.disks) < 2:
            return
        names.is_breaking = True
        name = self._rng.choice(sorted(names.disks))
        disk = names.disks[name]
        assert isinstance(disk, Device)
        self.met["names' device broken"] += 1
        self._log(f"the names' device {name} breaks")
        disk.is_broken = True
        await trio.sleep(self._rng.choice((0.1, 5.0, 20.0)))
        if self._rng.random() < 0.5:
            self._log(f"an empty device takes the place of the names' device {name}")
            names.disks[name] = names.new_disk()
        else:
            self._log(f"the names' device {name} works again")
            now = names.disks[name]
            assert isinstance(now, Device)
            now.is_broken = False
        await until(lambda: len(names.good_copies()) == len(names.disks))
        names.is_breaking = False

    async def trouble_names(self) -> None:
        """Let the way between names and a head be bad."""
        head = self._rng.choice(self._heads)
        way = self._rng.choice((Way.SILENT, Way.CUT, Way.LATE))
        self._health.begin_elsewhere()
        self.met["names cut off"] += 1
        self._log(f"{head.name} and names: {way.name}")
        pairs = [(head.host, self._names.host), (self._names.host, head.host)]
        if self._rng.random() < 0.4:
            pairs = pairs[self._rng.randint(0, 1) :][:1]
        await self._with_ways(pairs, way, self._rng.choice((2.0, 8.0, 30.0)))
        self._health.end_elsewhere()

    async def trouble_way(self) -> None:
        """Let the way between one head and one member be bad."""
        place = self._victim()
        if place is None:
            return
        head = self._rng.choice(self._heads)
        way = self._rng.choice((Way.SILENT, Way.CUT, Way.LATE))
        self._health.begin(place.name)
        self.met[f"way: {way.name}"] += 1
        self._log(f"{head.name} and {place.name}: {way.name}")
        pairs = [(head.host, place.host), (place.host, head.host)]
        if self._rng.random() < 0.4:
            pairs = pairs[self._rng.randint(0, 1) :][:1]
        await self._with_ways(pairs, way, self._rng.choice((2.0, 8.0, 25.0, 40.0)))
        self._health.end(place.name)

    async def kill_head(self) -> None:
        """Kill a head."""
        head = self._rng.choice(self._heads)
        lives = head.lives
        self._health.begin_elsewhere()
        self.met["head killed"] += 1
        self._log(f"{head.name} is killed")
        head.kill()
        await until(lambda: head.is_up and head.lives > lives)
        self._health.end_elsewhere()

    # --- the operator --------------------------------------------------------------------------------

    async def collect(self) -> None:
        """Collect garbage now."""
        self.met["gc asked for"] += 1
        await self.ask_once(m.RunGc(), "gc")

    async def check(self) -> None:
        """Check the whole lake beside everything else."""
        self.met["fsck asked for"] += 1
        await self.ask_once(m.RunFsck(self._rng.random() < 0.3), "fsck")

    async def ask_once(self, request: m.Request, what: str) -> None:
        """Ask the lake for something once, whatever becomes of it."""
        try:
            async with self._rng.choice(self._heads).connect() as client:
                await client.call(m.Hello(1, "operator"))
                (await client.call(request)).body.release()
                self._log(f"operator: {what}: done")
        except LakeError as error:
            self._log(f"operator: {what}: {error!r}")

    async def drain(self) -> None:
        """Drain a member, or make one that is drained a new one."""
        place = self._victim()
        if place is None or place.id is None or len(self._members) < self._world.protection.members_min + 2:
            return
        member = place.id
        self.met["drain"] += 1
        await self.ask_once(m.ChangeMember(member, m.MEMBER_DRAIN), f"drain {place.name}")

    async def add_member(self) -> None:
        """Add a member on a new host."""
        if len(self._members) >= self._world.protection.width + 3:
            return
        place = MemberPlace(self._world, len(self._members))
        self._members.append(place)
        self.met["added"] += 1
        self._log(f"{place.name} is added")
        assert self._nursery is not None
        self.keep(place)

    keep: Callable[[Place], None] = staticmethod(lambda place: None)
    """Keeps a new place."""


async def is_healed(names: NamesPlace, members: Sequence[MemberPlace]) -> bool:
    """Return True if the lake says that every stripe is whole, and its table has all members that there are."""
    upkeep = names.upkeep
    if upkeep is None or not names.is_up:
        return False
    state = LakeState(upkeep._coordinator)
    try:
        if await state.dirty() or not upkeep.walks.is_healed:
            return False
        records = {record.member: record.state for record in await state.members()}
    except LakeError:
        return False
    tables = upkeep._members.tables
    placed = {member.id for member in tables[0].members}
    wanted = {member for member, found in records.items() if found is not MemberState.REMOVED}
    present = {place.id for place in members if place.is_up}
    return len(tables) == 1 and wanted == placed and present <= wanted and wanted <= present


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    while not condition():  # noqa: ASYNC110 - on a clock that jumps
        await trio.sleep(0.1)

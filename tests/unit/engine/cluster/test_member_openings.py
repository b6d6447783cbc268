"""A member whose device was put back from an earlier time is found out, and healed, though nobody saw it away."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from engine.coordinator.records import OpeningRecord
from engine.walker import member_openings, walker_pass
from engine.walker.member_openings import is_older
from engine.walker.membership import Membership
from lakefs.cluster import placing, table_format
from lakefs.ids import MemberId
from lakefs.wire import messages as m
from tests.sim.world.disk import SimDisk
from tests.unit.engine.cluster.test_walker_pass import Running, running
from tests.unit.engine.cluster.walker_rig import BITS, SIZES, member_id

OLD = member_id(2)


@pytest.fixture(autouse=True)
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables have four rows."""
    for module in (placing, table_format, walker_pass):
        monkeypatch.setattr(module, "PARTITION_BITS", BITS)


def walked(scenario: Callable[[Running], Awaitable[None]]) -> None:
    """Run a scenario on a lake that was walked, and looked at."""

    async def main(one: Running) -> None:
        await one.made.write(*SIZES)
        await one.turn()
        assert one.walks.is_healed
        await scenario(one)

    running(main)


async def copy_of(one: Running, member: MemberId) -> SimDisk:
    """Return a copy of a member's device, taken while it is stopped; it has started again."""
    await one.made.stop(member)
    taken = one.made.disks[member].image()
    await one.made.start(member)
    return taken


async def whole_lake_restarts(one: Running, **disks: SimDisk) -> Running:
    """Stop all members, put devices in place, start all; return the process that walks from then on."""
    made = one.made
    members = sorted(made.clients)
    for member in members:
        await made.stop(member)
    for number, disk in disks.items():
        made.disks[member_id(int(number.removeprefix("member")))] = disk
    for member in members:
        await made.start(member)
    again = Running(made, b"process 1")
    await again.walks.resume()
    again.membership.begin()
    return again


async def is_old(one: Running) -> set[MemberId]:
    return {member for member, found in (await one.made.state.openings()).items() if found.is_old}


def test_a_device_that_was_put_back_while_the_lake_was_down_is_healed() -> None:
    async def scenario(one: Running) -> None:
        earlier = await copy_of(one, OLD)
        await one.made.write(*SIZES)
        await one.turn()
        again = await whole_lake_restarts(one, member2=earlier)
        assert again.walks.is_healed, "nobody has looked yet"
        await again.membership.look()
        assert len(await again.made.state.dirty()) == 1 << BITS
        assert await is_old(again) == {OLD}
        await again.turn()
        await again.turn()
        await again.made.check()
        assert await is_old(again) == set()
        assert again.walks.is_healed

    walked(scenario)


def test_the_record_follows_what_a_member_stores_and_an_idle_lake_records_nothing() -> None:
    async def scenario(one: Running) -> None:
        made = one.made
        await one.membership.look()
        before = await made.state.openings()
        await made.write(*SIZES)
        await one.membership.look()
        assert (await made.state.openings())[OLD].durable > before[OLD].durable
        revision = made.coordinator.revision
        await one.membership.look()
        assert made.coordinator.revision == revision

    walked(scenario)


def test_members_that_restart_are_not_taken_for_old_ones() -> None:
    async def scenario(one: Running) -> None:
        made = one.made
        for payloads in (SIZES, ()):  # also when nothing is stored, and nobody looks in between
            for member in (OLD, OLD, member_id(4)):
                await made.stop(member)
                await made.start(member)
                await made.write(*payloads)
            await one.membership.look()
            assert await is_old(one) == set()
            assert await made.state.dirty() == []
        again = await whole_lake_restarts(one)
        await again.membership.look()
        assert await is_old(again) == set()

    walked(scenario)


def test_a_process_that_ends_before_the_opening_is_recorded_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(one: Running) -> None:
        earlier = await copy_of(one, OLD)
        await one.made.write(*SIZES)
        await one.turn()
        again = await whole_lake_restarts(one, member2=earlier)
        with monkeypatch.context() as cut:
            cut.setattr(again.made.state, "record_openings", _ended)
            with pytest.raises(_EndedError):
                await again.membership.look()
        assert await is_old(again) == set()
        next_one = Membership(again.made, again.made.state, again.walker, again.clock)
        await next_one.look()
        assert await is_old(again) == {OLD}
        assert len(await again.made.state.dirty()) == 1 << BITS

    walked(scenario)


class _EndedError(Exception):
    """The process ends here."""


async def _ended(*_: object) -> None:
    raise _EndedError


def test_a_member_of_a_release_that_says_no_opening_is_left_alone() -> None:
    async def scenario(one: Running) -> None:
        openings = member_openings.MemberOpenings(one.made, one.made.state)
        before = await one.made.state.openings()
        await openings.look({OLD: m.EpochKnown(1, b"")})
        assert await one.made.state.openings() == before

    walked(scenario)


def test_every_partition_is_noted_and_places_of_the_member_come_first() -> None:
    async def scenario(one: Running) -> None:
        openings = member_openings.MemberOpenings(one.made, one.made.state)
        await openings.look({OLD: m.EpochKnown(1, b"", b"a", 0, 9)})
        await openings.look({OLD: m.EpochKnown(1, b"", b"c", 5, 6)})
        notes = {note.partition: note.is_moving for note in await one.made.state.dirty()}
        places = member_openings.partitions_with(one.made.tables, OLD)
        assert 0 < len(places) < 1 << BITS == len(notes)
        assert {partition for partition, is_moving in notes.items() if not is_moving} == places
        await openings.look({OLD: m.EpochKnown(1, b"", b"d", 6, 7)})
        assert await is_old(one) == {OLD}, "it was not compared yet"
        assert (await one.made.state.openings())[OLD].opening == b"d", "a new opening is recorded at once"

    running(scenario, count=12)


@pytest.mark.parametrize(
    ("opening", "recovered", "older"), [(b"b", 6, True), (b"b", 7, False), (b"b", 9, False), (b"a", 0, False)]
)
def test_an_opening_is_older_if_it_recovered_less(opening: bytes, recovered: int, older: bool) -> None:
    said = m.EpochKnown(1, b"", opening, recovered, 9)
    assert is_older(said, OpeningRecord(b"a", 7)) is older

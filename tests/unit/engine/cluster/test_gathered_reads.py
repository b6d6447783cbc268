"""Short reads of many readers go to a member as one request; each fault leads a reader to other shards."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from engine.members.ports import Got, Wanted
from engine.stripes.gathered_reads import HELD_S
from lakefs.ids import data_chunk_id
from lakefs.limits import HEDGE_S_MAX, MEMBER_ANSWER_S
from tests.unit.engine.cluster.stripe_rig import Fault, Rig, id_of, in_lake, payload_of

SHORT = [payload_of(4096, seed) for seed in range(60)]


async def read_all(rig: Rig, payloads: list[bytes]) -> list[bytes | None]:
    """Read chunks, each by a reader of its own, all at once; None for one that is not read."""
    found: list[bytes | None] = [None] * len(payloads)

    async def read(index: int) -> None:
        [got] = await rig.stripes.read([Wanted(data_chunk_id(payloads[index]), 4096)])
        found[index] = bytes(got.payload) if isinstance(got, Got) else None

    async with trio.open_nursery() as nursery:
        for index in range(len(payloads)):
            nursery.start_soon(read, index)
    return found


def test_readers_that_come_together_are_one_request_to_each_member() -> None:
    async def body(rig: Rig) -> None:
        await rig.store(*SHORT)
        rig.members.asked.clear()
        assert await read_all(rig, SHORT) == SHORT
        assert sum(len(chunks) for _, chunks in rig.members.asked) == len(SHORT)
        members = {member for member, _ in rig.members.asked}
        assert len(rig.members.asked) <= len(members) + 1, "the first reader did not know of the others"

    in_lake(body)


def test_a_reader_that_is_alone_is_not_held_back() -> None:
    async def body(rig: Rig) -> None:
        await rig.store(SHORT[0])
        began = trio.current_time()
        assert await read_all(rig, SHORT[:1]) == SHORT[:1]
        assert trio.current_time() - began < HELD_S

    in_lake(body)


@pytest.mark.parametrize(
    "fault", [Fault.AWAY, Fault.LOST, Fault.SILENT, Fault.LATE, Fault.LYING, Fault.SHORT, Fault.MISSTATING]
)
def test_a_fault_of_one_member_harms_no_reader_of_its_request(fault: Fault) -> None:
    async def body(rig: Rig) -> None:
        await rig.store(*SHORT)
        rig.lose(2, fault=fault)
        assert await read_all(rig, SHORT) == SHORT
        rig.heal()
        assert await read_all(rig, SHORT) == SHORT

    in_lake(body)


def test_a_shard_that_a_member_lacks_is_not_taken_from_its_neighbour_in_the_answer() -> None:
    async def body(rig: Rig) -> None:
        at_home = [payload for payload in SHORT if rig.home(payload, 0) == 2]
        assert len(at_home) > 2
        await rig.store(*at_home)
        missing = payload_of(4096, 1000)
        seed = 1000
        while rig.home(missing, 0) != 2:
            seed += 1
            missing = payload_of(4096, seed)
        rig.members.asked.clear()
        found = await read_all(rig, [missing, *at_home])
        assert found == [None, *at_home]
        asked = [chunk for _, chunks in rig.members.asked for chunk in chunks]
        assert [asked.count(data_chunk_id(payload)) for payload in at_home] == [1] * len(at_home), "none was wrong"

    in_lake(body)


def test_a_reader_that_is_cancelled_while_it_holds_asks_of_others_sends_them() -> None:
    async def body(rig: Rig) -> None:
        first, holding, other = SHORT[:3]
        await rig.store(first, holding, other)
        rig.members.pauses_s = [0.1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all, rig, [first])
            await trio.testing.wait_all_tasks_blocked()
            began = trio.current_time()
            with trio.CancelScope() as scope:
                nursery.start_soon(_cancel, scope)
                nursery.start_soon(_read_within, rig, other, began + HELD_S)
                await rig.stripes.read([Wanted(data_chunk_id(holding), 4096)])
            assert scope.cancelled_caught

    async def _cancel(scope: trio.CancelScope) -> None:
        scope.cancel()

    async def _read_within(rig: Rig, payload: bytes, until: float) -> None:
        assert await read_all(rig, [payload]) == [payload]
        assert trio.current_time() <= until, "it was sent when the reader that held it ended"

    in_lake(body)


def test_a_request_that_nobody_waits_for_makes_place_for_the_next() -> None:
    async def body(rig: Rig) -> None:
        at_home = [payload for payload in SHORT if rig.home(payload, 0) == 2]
        await rig.store(*at_home)
        rig.lose(2, fault=Fault.SCRIBBLING)
        with trio.move_on_after(0.001):
            await read_all(rig, at_home[:1])
        rig.heal()
        began = trio.current_time()
        assert await read_all(rig, at_home) == at_home
        assert trio.current_time() - began < HELD_S + 0.001

    in_lake(body)


def test_a_member_that_never_answers_is_lost_when_the_time_for_an_answer_is_over() -> None:
    async def body(rig: Rig) -> None:
        await rig.store(SHORT[0])
        home = rig.home(SHORT[0], 0)
        rig.lose(*range(6), fault=Fault.SCRIBBLING)
        began = trio.current_time()
        assert await read_all(rig, SHORT[:1]) == [None]
        assert trio.current_time() - began < 3 * MEMBER_ANSWER_S
        assert rig.members.faults[id_of(home)] is Fault.AWAY

    in_lake(body)


def test_an_ask_is_not_late_because_the_request_before_it_is() -> None:
    async def body(rig: Rig) -> None:
        at_home = [payload for payload in SHORT if rig.home(payload, 0) == 2]
        await rig.store(*at_home)
        rig.members.pauses_s = [0.6 * HEDGE_S_MAX, 0, 0]
        rig.members.asked.clear()
        assert await read_all(rig, at_home) == at_home
        (_, late), *_ = rig.members.asked
        elsewhere = [chunks for member, chunks in rig.members.asked if member != id_of(2)]
        assert elsewhere == [late], "only the reader of a late answer asks others"

    in_lake(body)

"""Stripes while members are away, silent, late, full or lying: right bytes or a clear error, and writes go on."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from itertools import combinations
from typing import Any

import pytest
import trio

from engine.members.ports import MEMBER_RETURN_S, Wanted
from lakefs.errors import ChunkDamaged, ChunkNotFound, ClusterDegraded, LakeError, StoreFull
from lakefs.ids import data_chunk_id
from lakefs.limits import KIB, MIB
from lakefs.wire import messages as m
from tests.shards import Shard, store_request
from tests.store_rig import ask
from tests.unit.engine.cluster.stripe_rig import GENERATION, Fault, Rig, bytes_of, id_of, in_lake, payload_of

SHORT, LONG, ODD = payload_of(4 * KIB, 1), payload_of(MIB, 2), payload_of(700_001, 3)
GRANULE = payload_of(64 * KIB, 4)
ALL = (SHORT, GRANULE, LONG, ODD)
EVERY_LOSS = [*combinations(range(6), 1), *combinations(range(6), 2)]
assert len(EVERY_LOSS) == 21


@pytest.mark.parametrize("fault", [Fault.AWAY, Fault.LOST])
def test_all_21_losses_of_one_or_two_of_six_are_read_right(fault: Fault) -> None:
    async def body(rig: Rig) -> None:
        await rig.store(*ALL)
        for lost in EVERY_LOSS:
            rig.heal()
            rig.lose(*lost, fault=fault)
            for payload in ALL:
                await rig.reads_back(payload)

    in_lake(body)


def test_ranges_are_decoded_alone_once_the_chunk_is_known() -> None:
    async def body(rig: Rig) -> None:
        await rig.store(LONG)
        chunk = data_chunk_id(LONG)
        rig.lose(rig.home(LONG, 1))
        rig.forget()
        assert await rig.read(chunk, MIB, 300_000, 10) == LONG[300_000:300_010]
        before = rig.members.calls["ReadChunks"]
        assert await rig.read(chunk, MIB, 300_000, 10) == LONG[300_000:300_010]
        assert rig.members.calls["ReadChunks"] - before == 4, "the same granule of four other shards"
        [got] = await rig.stripes.read([Wanted(chunk, MIB, 250_000, 100_000)])
        assert not isinstance(got, LakeError)
        assert bytes_of(got, 250_000, 100_000) == LONG[250_000:350_000]

    in_lake(body)


def test_three_of_six_lost_is_said_and_nothing_is_made_up() -> None:
    async def body(rig: Rig) -> None:
        await rig.store(LONG)
        rig.lose(0, 1, 2)
        for known in (MIB, 0):
            with pytest.raises(ClusterDegraded, match=id_of(1).hex()[:12]):
                await rig.read(data_chunk_id(LONG), known)
        with pytest.raises(ClusterDegraded, match=r"members .* away"):
            await rig.read(data_chunk_id(payload_of(5, 99)), 0)
        rig.heal()
        await rig.reads_back(LONG)

    in_lake(body)


@pytest.mark.parametrize("fault", [Fault.AWAY, Fault.LOST])
def test_a_write_that_needs_a_member_which_went_away_just_now_waits_for_its_return(fault: Fault) -> None:
    async def body(rig: Rig) -> None:
        rig.lose(1, fault=fault)
        rig.members.returning[id_of(1)] = 3.0
        assert await rig.store(LONG, SHORT, ODD) == [True] * 3
        assert trio.current_time() == pytest.approx(3.0)
        assert await rig.present([data_chunk_id(payload) for payload in (LONG, SHORT, ODD)]) == [True] * 3
        assert not await rig.dirty(), "each shard is at its home"

    async def six(rig: Rig) -> None:
        rig.lose(1, fault=fault)
        rig.members.returning[id_of(1)] = 3.0
        await rig.store(LONG, SHORT, ODD)
        assert trio.current_time() == 0, "where others take the shards nobody is waited for"

    in_lake(body, "2+1", 3)
    in_lake(six)


def test_a_write_that_waits_is_refused_when_nobody_returns_or_those_who_do_fail_again() -> None:
    async def alone(rig: Rig) -> None:
        rig.lose(1)
        with pytest.raises(ClusterDegraded, match=r"member .* away"):
            await rig.store(LONG)
        assert trio.current_time() == 0, "it went away long ago"

    async def flaps(rig: Rig) -> None:
        rig.lose(1, fault=Fault.LOST)

        async def back_for_a_moment(_: object) -> bool:
            await trio.sleep(2.0)
            return True

        rig.members.wait_return = back_for_a_moment  # type: ignore[method-assign,assignment]
        with pytest.raises(ClusterDegraded):
            await rig.store(LONG)
        assert trio.current_time() == pytest.approx(MEMBER_RETURN_S, abs=2.0), "it is given up"

    in_lake(alone, "2+1", 3)
    in_lake(flaps, "2+1", 3)


def test_an_answer_counts_only_while_its_member_has_not_gone_away() -> None:
    """While a write waits for one member, another that had stored its shard goes away too."""

    async def going(rig: Rig) -> None:
        rig.lose(1)
        rig.members.returning[id_of(1)] = 3.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refused, rig)
            await trio.sleep(1.0)
            rig.lose(2)
        assert trio.current_time() == 3.0, "the second one is not waited for: it does not return"

    async def refused(rig: Rig) -> None:
        with pytest.raises(ClusterDegraded, match=id_of(2).hex()[:12]):
            await rig.store(LONG, SHORT)

    async def returning(rig: Rig) -> None:
        rig.lose(1)
        rig.members.returning = {id_of(1): 3.0, id_of(2): 4.0}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.store, LONG, SHORT)
            await trio.sleep(1.0)
            rig.lose(2)
        assert trio.current_time() == 7.0
        assert await rig.present([data_chunk_id(LONG), data_chunk_id(SHORT)]) == [True, True]

    in_lake(going, "2+1", 3)
    in_lake(returning, "2+1", 3)


@pytest.mark.parametrize("offered", [False, True])
def test_a_member_that_goes_away_before_the_note_is_made_is_not_counted(offered: bool) -> None:
    async def body(rig: Rig) -> None:
        noting = rig.state.note_dirty
        rig.lose(0)
        chunk = data_chunk_id(LONG)
        if offered:
            await rig.store(LONG)
        held = sorted({number for numbers in (await rig.shards(LONG)).values() for number in numbers}) or [1, 2]
        going = held[:1]

        async def note(*arguments: Any, **options: Any) -> None:
            await noting(*arguments, **options)
            rig.lose(*going)
            going.clear()

        rig.state.note_dirty = note  # type: ignore[method-assign]
        if offered:
            assert await rig.present([chunk]) == [False], "it is stored anew: that does no harm"
            return
        assert await rig.store(LONG) == [True]
        assert await rig.present([chunk]) == [True], "what the one had was stored elsewhere before the answer"

    in_lake(body)


def test_two_of_six_gone_and_writes_go_on() -> None:
    async def body(rig: Rig) -> None:
        for lost in [(0, 1), (2, 5)]:
            rig.heal()
            rig.lose(*lost)
            payload = payload_of(MIB, 100 + lost[0])
            assert await rig.store(payload) == [True]
            held = Counter(number for numbers in (await rig.shards(payload)).values() for number in numbers)
            assert sorted(held.values()) == [1, 1, 2, 2]
            assert not set(lost) & held.keys()
            assert rig.table.partition_of(data_chunk_id(payload)) in await rig.dirty()
            assert await rig.present([data_chunk_id(payload)]) == [True]
            rig.heal()
            for more in EVERY_LOSS:
                if len(more) == 1:
                    rig.lose(*more)
                    await rig.reads_back(payload)
                    rig.heal()
            for back in lost:
                rig.lose(*lost)
                rig.members.faults.pop(id_of(back))
                await rig.reads_back(payload)

    in_lake(body)


@pytest.mark.parametrize("length", [200_000, 300_000, MIB - 1, MIB])
def test_a_range_at_the_end_of_a_chunk_is_decoded(length: int) -> None:
    payload = payload_of(length, length)

    async def body(rig: Rig) -> None:
        await rig.store(payload)  # its checksums are known from here on
        last = rig.code.data_shards(length) - 1
        rig.lose(rig.home(payload, last))
        for size in (1, 1000, length - last * rig.code.shard_bytes(length)):
            assert await rig.read(data_chunk_id(payload), length, length - size, size) == payload[-size:]

    in_lake(body)


def test_substitutes_take_the_shards_of_members_that_are_away() -> None:
    async def body(rig: Rig) -> None:
        homes = {rig.home(LONG, shard) for shard in range(6)}
        lost = rig.home(LONG, 2)
        rig.lose(lost)
        await rig.store(LONG)
        (holder,) = (await rig.shards(LONG))[2]
        assert holder not in homes
        assert await rig.dirty() == {rig.table.partition_of(data_chunk_id(LONG))}
        rig.lose(rig.home(LONG, 0), rig.home(LONG, 1))
        await rig.reads_back(LONG)

    in_lake(body, count=8)


def test_a_second_shard_goes_where_no_machine_gets_too_many() -> None:
    async def body(rig: Rig) -> None:
        rig.lose(0)
        for seed in range(5):
            payload = payload_of(250_000, seed)
            await rig.store(payload)
            machines = Counter(number % 3 for numbers in (await rig.shards(payload)).values() for number in numbers)
            assert set(machines.values()) == {2}, "no machine has more than m"

    in_lake(body, machines=3)


@pytest.mark.parametrize(("protection", "count"), [("1+1", 2), ("2+1", 3), ("4+2", 3)])
def test_the_smallest_lakes_are_read_only_with_one_gone(protection: str, count: int) -> None:
    async def body(rig: Rig) -> None:
        await rig.store(LONG, SHORT)
        for lost in range(count):
            rig.heal()
            rig.lose(lost)
            await rig.reads_back(LONG)
            await rig.reads_back(SHORT)
            with pytest.raises(ClusterDegraded, match=f"member {id_of(lost).hex()[:12]} is away"):
                await rig.store(payload_of(MIB, 50 + lost))
        assert await rig.dirty() == set()

    in_lake(body, protection, count)


def test_three_members_at_4_and_2_hold_two_shards_each() -> None:
    async def body(rig: Rig) -> None:
        await rig.store(LONG)
        held = Counter(number for numbers in (await rig.shards(LONG)).values() for number in numbers)
        assert sorted(held.values()) == [2, 2, 2]
        rig.lose(1)
        payload = payload_of(4 * KIB, 9)
        assert await rig.store(payload) == [True], "two copies are left when one more goes"
        await rig.reads_back(payload)

    in_lake(body, count=3)


def test_the_note_that_a_partition_is_dirty_precedes_the_answer() -> None:
    async def body(rig: Rig) -> None:
        rig.lose(rig.home(LONG, 0))
        rig.coordinator.closed = True
        with pytest.raises(LakeError, match="coordinator"):
            await rig.store(LONG)
        rig.coordinator.closed = False
        await rig.store(LONG)
        rig.coordinator.closed = True
        with pytest.raises(LakeError, match="coordinator"):
            await rig.stripes.offer(GENERATION, [data_chunk_id(LONG)])

    in_lake(body)


def test_a_lost_answer_is_repeated_harmlessly() -> None:
    async def body(rig: Rig) -> None:
        rig.lose(3, fault=Fault.ANSWER_LOST)
        assert await rig.store(LONG, SHORT) == [True, True]
        rig.heal()
        assert await rig.store(LONG, SHORT) == [False, False]
        await rig.reads_back(LONG)

    in_lake(body)


def test_full_members_take_no_shards_and_too_many_of_them_are_said() -> None:
    async def body(rig: Rig) -> None:
        rig.lose(0, 1, fault=Fault.FULL)
        await rig.store(LONG)
        assert not {0, 1} & {number for numbers in (await rig.shards(LONG)).values() for number in numbers}
        await rig.reads_back(LONG)
        rig.lose(0, 1, 2, 3, fault=Fault.FULL)
        with pytest.raises(StoreFull, match="full"):
            await rig.store(payload_of(MIB, 60))
        rig.lose(2, 3, 4, 5)
        with pytest.raises(ClusterDegraded, match=r"away, and members .* full"):
            await rig.store(payload_of(MIB, 61))

    in_lake(body)


def test_a_silent_member_holds_up_a_write_once_and_a_read_for_a_moment() -> None:
    async def body(rig: Rig) -> None:
        await rig.store(LONG)
        silent = rig.home(LONG, 0)
        rig.lose(silent, fault=Fault.SILENT)
        began = trio.current_time()
        assert await rig.read(data_chunk_id(LONG), MIB) == LONG
        assert trio.current_time() - began < 1
        began = trio.current_time()
        await rig.store(payload_of(MIB, 70))
        assert trio.current_time() - began < 11
        began = trio.current_time()
        await rig.store(payload_of(MIB, 71))
        assert trio.current_time() == began

    in_lake(body)


def test_a_late_answer_is_not_waited_for_and_harms_no_bytes() -> None:
    async def body(rig: Rig) -> None:
        await rig.store(*ALL)
        for late in [(0,), (1, 4), (0, 1, 2)]:
            rig.heal()
            rig.lose(*late, fault=Fault.LATE)
            for payload in ALL:
                began = trio.current_time()
                assert await rig.read(data_chunk_id(payload), len(payload)) == payload
                if len(late) < 3:
                    assert trio.current_time() - began < 1

    in_lake(body)


def test_an_answer_that_comes_after_the_read_writes_to_memory_that_nobody_uses() -> None:
    async def body(rig: Rig) -> None:
        await rig.store(*ALL)
        for payload in ALL:
            rig.heal()
            rig.lose(rig.home(payload, 0), fault=Fault.SCRIBBLING)
            [got] = await rig.stripes.read([Wanted(data_chunk_id(payload), len(payload))])
            assert not isinstance(got, LakeError)
            assert rig.members.abandoned
            for memory in rig.members.abandoned:
                memory[:] = bytes(len(memory))
            assert got.payload == payload

    in_lake(body)


@pytest.mark.parametrize("fault", [Fault.LYING, Fault.SHORT])
def test_bytes_of_lying_members_are_never_returned(fault: Fault) -> None:
    async def body(rig: Rig) -> None:
        await rig.store(*ALL)
        for liars in EVERY_LOSS:
            rig.heal()
            rig.lose(*liars, fault=fault)
            for payload in ALL:
                assert await rig.read(data_chunk_id(payload), len(payload)) == payload
                assert await rig.read(data_chunk_id(payload), len(payload), 1000, 50) == payload[1000:1050]
        rig.lose(0, 1, 2, fault=fault)
        for payload in ALL:
            rig.forget()
            with suppress(ChunkDamaged, ClusterDegraded):
                assert await rig.read(data_chunk_id(payload), len(payload)) == payload

    in_lake(body)


def test_a_home_with_other_bytes_of_a_shard_is_passed_over() -> None:
    async def body(rig: Rig) -> None:
        chunk = data_chunk_id(LONG)
        home = rig.members.clients[rig.table.homes(chunk)[1]]
        wrong = Shard(chunk, 1, payload_of(256 * KIB, 80))
        await ask(home, store_request([wrong], epoch=1), m.ShardsStored, wrong.payload)
        assert await rig.store(SHORT, LONG) == [True, True]
        assert rig.table.partition_of(chunk) in await rig.dirty()
        await rig.reads_back(LONG)
        for number in (0, 2, 3):
            shard = Shard(data_chunk_id(payload_of(MIB, 85)), number, payload_of(256 * KIB, 80 + number))
            home = rig.members.clients[rig.table.homes(shard.chunk)[number]]
            await ask(home, store_request([shard], epoch=1), m.ShardsStored, shard.payload)
        with pytest.raises(ChunkDamaged, match="3 of its shards"):
            await rig.store(payload_of(MIB, 85))

    in_lake(body)


def test_a_lost_last_shard_hides_no_length() -> None:
    async def body(rig: Rig) -> None:
        payloads = [
            payload_of(65_537, 90),
            payload_of(200_000, 91),
            payload_of(100_000, 92) + bytes(30_000),
            payload_of(4 * MIB, 93),
            payload_of(4 * MIB - 5000, 94) + bytes(999),
        ]
        await rig.store(*payloads)
        for payload in payloads:
            rig.heal()
            stripe = -(-len(payload) // (-(-len(payload) // (4 * 65536)) * 65536))
            rig.lose(rig.home(payload, stripe - 1))
            rig.forget()
            chunk = data_chunk_id(payload)
            assert await rig.read(chunk, 0, 65_530) == payload[65_530:]
            await rig.reads_back(payload)
            assert await rig.present([chunk]) == [False]

    in_lake(body)


def test_a_chunk_that_lacks_a_shard_is_absent_and_whole_again_when_stored_anew() -> None:
    async def body(rig: Rig) -> None:
        await rig.store(*ALL)
        rig.lose(rig.home(LONG, 5))
        assert await rig.present([data_chunk_id(LONG)]) == [False]
        await rig.store(LONG)
        assert await rig.present([data_chunk_id(LONG)]) == [True]
        with pytest.raises(ChunkNotFound):
            await rig.read(data_chunk_id(payload_of(10, 98)), 0)

    in_lake(body)

"""Keyed indexes of members that a head hands out: of the ring that it uses, and of processes that live."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import trio

from engine.head.local_keys import KEYS_RETRY_S, LocalKeys
from lakefs.cluster.placing import next_table
from lakefs.cluster.table import Table
from lakefs.ids import MemberId
from lakefs.shared_index.homes_format import SEGMENT_BITS
from lakefs.wire import messages as m
from tests.unit.engine.cluster.local_keys_rig import FLEET, SEGMENTS, Lake, in_lake, segments_open


def later(made: Lake) -> list[Table]:
    """Return the tables after the second member has lost most of its room, and so of its keys."""
    last = made.processes.tables[0]
    return [next_table(last, [replace(each, room_bytes=1) if each is FLEET[1] else each for each in FLEET]), last]


def test_indexes_of_this_machine_are_handed_out_and_no_member_of_another_is_asked(tmp_path: Path) -> None:
    async def body(made: Lake) -> None:
        reader = await made.opened()
        assert made.known(reader) == made.keys_of(*made.members[:3])
        assert made.keys_of(made.members[3])
        assert {member for member, _ in made.processes.asked} == set(made.members[:3])
        made.processes.asked.clear()
        assert made.known(await made.opened()) == made.known(reader)
        assert made.processes.asked == []

    in_lake(tmp_path, body)


# --- another ring -----------------------------------------------------------------------------------------


def test_another_ring_sends_clients_back_in_the_step_in_which_the_head_uses_it(tmp_path: Path) -> None:
    in_lake(tmp_path, follows_the_ring)


async def follows_the_ring(made: Lake) -> None:
    reader = await made.opened()
    before = made.keys_of(made.members[1])
    made.processes.tables = later(made)
    made.known(reader)
    made.homes.look()
    assert not reader.is_current, "an earlier ring is used"
    made.put_all()
    assert made.known(await made.opened()) == made.keys_of(*made.members[:3])
    assert made.keys_of(made.members[1]) != before


def test_a_ring_that_arrives_while_indexes_are_opened_is_the_one_that_is_handed_out(tmp_path: Path) -> None:
    async def body(made: Lake) -> None:
        def change(member: MemberId, request: m.Request) -> None:
            made.processes.before = None
            made.processes.tables = later(made)
            made.homes.look()

        made.processes.before = change
        reader = await made.opened()
        assert reader.is_current
        assert reader.ring_epoch == made.processes.tables[0].ring_epoch == 2

    in_lake(tmp_path, body)


# --- processes that end -----------------------------------------------------------------------------------


def test_the_index_of_a_process_that_ended_is_not_used_nor_handed_out_again(tmp_path: Path) -> None:
    in_lake(tmp_path, forgets_what_ended)


async def forgets_what_ended(made: Lake) -> None:
    reader, first = await made.opened(), made.members[0]
    numbers = [index.number for index in (await made.homes.shared()).indexes]
    made.processes.start(first)  # without any key
    assert not reader.is_current, "a stale index is used"
    again = await made.opened()
    assert made.known(again) == made.keys_of(*made.members[1:3])
    anew = [index.number for index in (await made.homes.shared()).indexes]
    assert len(set(numbers) & set(anew)) == 2, "an index that ended has its number to itself"


def test_an_index_of_the_process_before_is_not_taken_for_that_of_the_next(tmp_path: Path) -> None:
    async def body(made: Lake) -> None:
        first = made.members[0]
        before = made.processes.homes[first]

        def restart(member: MemberId, request: m.Request) -> None:
            if member == first and isinstance(request, m.OpenKeyedIndex):
                made.processes.before = None
                made.processes.start(first)

        made.processes.before = restart
        assert made.known(await made.opened()) == made.keys_of(*made.members[1:3])
        assert before.is_ended

    in_lake(tmp_path, body)


def test_a_replaced_index_is_opened_anew(tmp_path: Path) -> None:
    async def body(made: Lake) -> None:
        reader, first = await made.opened(), made.members[0]
        before = made.processes.homes.pop(first)
        made.processes.start(first)
        made.put_all()
        before.replace()
        assert not reader.is_current
        assert made.known(await made.opened()) == made.keys_of(*made.members[:3])

    in_lake(tmp_path, body)


def test_a_member_that_is_away_is_opened_when_it_answers_again(tmp_path: Path) -> None:
    async def body(made: Lake) -> None:
        first = made.members[0]
        gone = made.processes.homes.pop(first)
        reader = await made.opened()
        assert made.known(reader) == made.keys_of(*made.members[1:3])
        made.processes.homes[first] = gone
        made.local.answered(first)
        made.known(reader)  # it was asked only now
        await trio.sleep(KEYS_RETRY_S)
        made.local.answered(first)
        assert not reader.is_current
        assert made.known(await made.opened()) == made.keys_of(*made.members[:3])

    in_lake(tmp_path, body)


def test_a_member_that_is_found_away_is_not_relied_on(tmp_path: Path) -> None:
    async def body(made: Lake) -> None:
        reader, first = await made.opened(), made.members[0]
        made.local.away(first)
        assert not reader.is_current
        made.local.away(first)
        gone = made.processes.homes.pop(first)
        reader = await made.opened()
        assert made.known(reader) == made.keys_of(*made.members[1:3])
        made.processes.homes[first] = gone
        await trio.sleep(KEYS_RETRY_S)
        made.local.answered(first)
        assert made.known(await made.opened()) == made.keys_of(*made.members[:3])

    in_lake(tmp_path, body)


def test_members_that_are_reached_over_tcp_or_have_no_index_yet_are_left_out(tmp_path: Path) -> None:
    async def body(made: Lake) -> None:
        made.processes.over_tcp.add(made.members[0])
        made.processes.without.add(made.members[1])
        reader = await made.opened()
        assert made.known(reader) == made.keys_of(made.members[2])
        await trio.sleep(KEYS_RETRY_S)
        made.local.answered(made.members[0])
        made.known(reader)  # it would be refused again
        made.processes.without.clear()
        made.local.answered(made.members[1])
        assert made.known(await made.opened()) == made.keys_of(*made.members[1:3])

    in_lake(tmp_path, body)


# --- segments ---------------------------------------------------------------------------------------------


def test_segments_are_opened_at_their_home_once_and_those_of_no_home_are_not(tmp_path: Path) -> None:
    async def body(made: Lake) -> None:
        indexes = (await made.homes.shared()).indexes
        places = [index.number << SEGMENT_BITS | segment for index in indexes for segment in (3, 5)]
        unknown = [indexes[0].number << SEGMENT_BITS | SEGMENTS, 4000 << SEGMENT_BITS | 3]
        found, descriptors = await made.local.segments([*places, *unknown])
        assert found == places
        assert len(set(descriptors)) == len(places) == segments_open()
        made.processes.asked.clear()
        assert await made.local.segments(places) == (places, descriptors)
        assert made.processes.asked == []
        made.processes.start(indexes[0].member)
        await made.homes.shared()
        assert (await made.local.segments(places))[0] == places[2:], "the process that had them ended"

    in_lake(tmp_path, body)


def test_a_segment_of_the_process_after_is_not_taken_for_one_of_that_before(tmp_path: Path) -> None:
    async def body(made: Lake) -> None:
        index = (await made.homes.shared()).indexes[0]

        def restart(member: MemberId, request: m.Request) -> None:
            made.processes.before = None
            made.processes.start(member)

        made.processes.before = restart
        assert await made.local.segments([index.number << SEGMENT_BITS | 3]) == ([], [])

    in_lake(tmp_path, body)


def test_descriptors_of_segments_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.head.local_keys.LOCAL_SEGMENTS_MAX", 4)

    async def body(made: Lake) -> None:
        number = (await made.homes.shared()).indexes[0].number
        for first in range(0, 30, 3):
            places = [number << SEGMENT_BITS | segment for segment in range(first, first + 3)]
            assert (await made.local.segments(places))[0] == places
        assert segments_open() == 4

    in_lake(tmp_path, body)


# --- bugs that are noticed --------------------------------------------------------------------------------


def test_that_an_earlier_ring_stays_in_use_would_be_noticed(tmp_path: Path) -> None:
    with mock.patch.object(LocalKeys, "use_ring"), pytest.raises(AssertionError, match="an earlier ring is used"):
        in_lake(tmp_path, follows_the_ring)


def test_that_the_index_of_an_ended_process_is_used_would_be_noticed(tmp_path: Path) -> None:
    live = mock.patch("lakefs.stamps.stamps.StampReader.is_live", new=True)
    with live, pytest.raises(AssertionError, match="a stale index is used"):
        in_lake(tmp_path, forgets_what_ended)

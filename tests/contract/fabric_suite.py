"""The contract of the RDMA port: the same tests for the simulated network and for an adapter in the lab.

A file that imports these tests has a fixture `rig`, which opens fabrics that reach each other.
"""

from __future__ import annotations

import mmap
import random
import select
from collections.abc import Callable
from typing import Final

import msgspec
import pytest

from lakefs.errors import FabricFailed, InvalidArgument
from lakefs.transport.fabric import ACCESS_REFUSED, FLUSHED, NO_ANSWER, SEND_WINDOW, SLICE_BYTES, Piece, Remote
from tests.contract import fabric_sides as sides
from tests.contract.fabric_sides import (
    BOTH,
    MARK,
    PAGE,
    Pair,
    Rig,
    Side,
    completions,
    failures,
    joined,
    new_pair,
    poster,
    random_bytes,
    silent,
    untouched,
)


def test_a_read_fetches_the_peers_bytes_and_touches_nothing_beside_them(pair: Pair) -> None:
    size = SLICE_BYTES + 3 * PAGE
    content = random_bytes(1, size)
    here, region = pair.near.memory(bytes([MARK]) * size, Remote.NONE)
    _, there = pair.far.memory(content, Remote.READ)
    dice = random.Random(2)
    cases = [(0, 0, 1), (size - 1, size - 1, 1), (7, 4095, SLICE_BYTES), (0, size - SLICE_BYTES, SLICE_BYTES)]
    for _ in range(20):
        length = dice.choice([dice.randrange(1, 200), dice.randrange(1, SLICE_BYTES)])
        cases.append((dice.randrange(size - length), dice.randrange(size - length), length))
    for to, start, length in cases:
        here[:size] = bytes([MARK]) * size
        pair.near.link.post(9, [Piece(region, to, there.address + start, there.remote_key, length)])
        assert completions(pair.near.link, 1) == [(9, "")]
        expected = bytes([MARK]) * to + content[start : start + length] + bytes([MARK]) * (size - to - length)
        assert here[:size] == expected, (to, start, length)


def test_a_write_brings_the_bytes_to_the_peer_and_touches_nothing_beside_them(pair: Pair) -> None:
    size = SLICE_BYTES + 3 * PAGE
    content = random_bytes(3, size)
    _, region = pair.near.memory(content, Remote.NONE)
    there, theirs = pair.far.memory(bytes(size), Remote.WRITE)
    dice = random.Random(4)
    for length in [1, 63, 4096, 4097, SLICE_BYTES, *(dice.randrange(1, SLICE_BYTES) for _ in range(10))]:
        there[:size] = bytes([MARK]) * size
        start, to = dice.randrange(size - length), dice.randrange(size - length)
        pair.near.link.post(1, [Piece(region, start, theirs.address + to, theirs.remote_key, length, is_write=True)])
        assert failures(pair.near.link, 1) == [""]
        expected = bytes([MARK]) * to + content[start : start + length] + bytes([MARK]) * (size - to - length)
        assert there[:size] == expected, (start, to, length)


def test_completions_come_in_the_order_of_posts_with_their_tickets(pair: Pair) -> None:
    memory, region = pair.near.memory(random_bytes(5, SEND_WINDOW * PAGE), Remote.NONE)
    there, theirs = pair.far.memory(bytes(SEND_WINDOW * PAGE), BOTH)
    tickets = [(1 << 64) - 1 - number for number in range(SEND_WINDOW)]
    for number, ticket in enumerate(tickets):
        post = poster(pair.near.link, is_write=bool(number % 2))
        post(ticket, region, number * PAGE, theirs.address + number * PAGE, theirs.remote_key, PAGE)
    assert completions(pair.near.link, SEND_WINDOW) == [(ticket, "") for ticket in tickets]
    assert pair.near.link.poll() == []
    assert memory[: 2 * PAGE : PAGE] == there[: 2 * PAGE : PAGE]


def test_pieces_that_are_posted_together_are_moved_in_their_order(pair: Pair) -> None:
    content = random_bytes(6, SEND_WINDOW * PAGE)
    memory, region = pair.near.memory(bytes(SEND_WINDOW * PAGE), Remote.NONE)
    there, theirs = pair.far.memory(content, BOTH)
    places = [(region, at, theirs.address + at, theirs.remote_key, PAGE) for at in range(0, len(content), PAGE)]
    pair.near.link.post(7, [Piece(*place) for place in places])
    assert completions(pair.near.link, SEND_WINDOW) == [(7 + at, "") for at in range(SEND_WINDOW)]
    assert memory[:] == content
    there[:] = bytes(len(content))
    pair.near.link.post(0, [Piece(*place, is_write=True) for place in places])
    assert failures(pair.near.link, SEND_WINDOW) == [""] * SEND_WINDOW
    assert there[:] == content


def test_a_piece_that_is_refused_in_the_middle_has_those_before_it_moved(pair: Pair) -> None:
    content = random_bytes(7, 3 * PAGE)
    memory, region = pair.near.memory(bytes(3 * PAGE), Remote.NONE)
    _, theirs = pair.far.memory(content, BOTH)
    keys = [theirs.remote_key, theirs.remote_key ^ 0x100, theirs.remote_key]
    pair.near.link.post(
        5, [Piece(region, at * PAGE, theirs.address + at * PAGE, key, PAGE) for at, key in enumerate(keys)]
    )
    assert completions(pair.near.link, 3) == [(5, ""), (6, ACCESS_REFUSED), (7, FLUSHED)]
    assert memory[:PAGE] == content[:PAGE]
    assert not any(memory[PAGE:])


def test_a_write_before_a_read_is_seen_by_it(pair: Pair) -> None:
    _, region = pair.near.memory(b"fresh" + bytes(5), Remote.NONE)
    memory, back = pair.near.memory(bytes(5), Remote.NONE)
    _, theirs = pair.far.memory(b"stale", BOTH)
    pair.near.link.post(1, [Piece(region, 0, theirs.address, theirs.remote_key, 5, is_write=True)])
    pair.near.link.post(2, [Piece(back, 0, theirs.address, theirs.remote_key, 5)])
    assert failures(pair.near.link, 2) == ["", ""]
    assert memory[:5] == b"fresh"


def refused(pair: Pair, post: Callable[[], None]) -> None:
    """Check that what is posted is refused by the peer, and all behind it given up."""
    post()
    post()
    first, second = failures(pair.near.link, 2)
    assert first == ACCESS_REFUSED
    assert second == FLUSHED
    assert pair.near.link.is_broken
    with pytest.raises(FabricFailed):
        post()


@pytest.mark.parametrize("is_write", [False, True])
@pytest.mark.parametrize("bit", [0x1, 0x100, 0x10000, 0x80000000])
def test_a_wrong_key_is_refused(pair: Pair, bit: int, is_write: bool) -> None:
    here, region = pair.near.memory(bytes([MARK]) * PAGE, Remote.NONE)
    there, theirs = pair.far.memory(bytes(PAGE), BOTH)
    post = poster(pair.near.link, is_write=is_write)
    with untouched(here), untouched(there):
        refused(pair, lambda: post(1, region, 0, theirs.address, theirs.remote_key ^ bit, 64))


@pytest.mark.parametrize("is_write", [False, True])
@pytest.mark.parametrize("start", [-1, -PAGE, 1, PAGE - 1, PAGE, 1 << 40])
def test_a_range_outside_of_the_region_is_refused(pair: Pair, start: int, is_write: bool) -> None:
    """The memory around the region is the peer's, too: it is mapped, and not registered."""
    here, region = pair.near.memory(bytes([MARK]) * PAGE, Remote.NONE)
    there = mmap.mmap(-1, 3 * PAGE)
    theirs = pair.far.fabric.register(memoryview(there)[PAGE : 2 * PAGE], BOTH)
    post = poster(pair.near.link, is_write=is_write)
    with untouched(here), untouched(there):
        refused(pair, lambda: post(1, region, 0, theirs.address + start, theirs.remote_key, PAGE))


@pytest.mark.parametrize("given", [Remote.NONE, Remote.READ, Remote.WRITE, BOTH])
@pytest.mark.parametrize("is_write", [False, True])
@pytest.mark.parametrize("by", ["region", "link"])
def test_a_peer_has_only_the_rights_that_region_and_link_give(rig: Rig, given: Remote, is_write: bool, by: str) -> None:
    pair = new_pair(rig, given if by == "link" else BOTH)
    here, region = pair.near.memory(bytes([MARK]) * PAGE, Remote.NONE)
    there, theirs = pair.far.memory(bytes(PAGE), given if by == "region" else BOTH)
    post = poster(pair.near.link, is_write=is_write)
    if (Remote.WRITE if is_write else Remote.READ) in given:
        post(1, region, 0, theirs.address, theirs.remote_key, PAGE)
        assert failures(pair.near.link, 1) == [""]
        assert here[:] == there[:]
        return
    with untouched(here), untouched(there):
        refused(pair, lambda: post(1, region, 0, theirs.address, theirs.remote_key, PAGE))


def test_a_region_for_reading_alone_is_not_written_by_its_own_side(pair: Pair) -> None:
    here, region = pair.near.memory(bytes([MARK]) * PAGE, Remote.READ)
    _, theirs = pair.far.memory(bytes(PAGE), BOTH)
    with untouched(here):
        pair.near.link.post(1, [Piece(region, 0, theirs.address, theirs.remote_key, PAGE)])
        assert failures(pair.near.link, 1) != [""]
    assert pair.near.link.is_broken


def test_a_key_ends_with_its_region(pair: Pair) -> None:
    here, region = pair.near.memory(bytes([MARK]) * PAGE, Remote.NONE)
    there, theirs = pair.far.memory(bytes(PAGE), BOTH)
    theirs.close()
    theirs.close()
    with untouched(here), untouched(there):
        post = poster(pair.near.link, is_write=True)
        refused(pair, lambda: post(1, region, 0, theirs.address, theirs.remote_key, 64))


def test_a_key_is_of_no_use_through_a_link_of_another_fabric(rig: Rig, pair: Pair) -> None:
    here, region = pair.near.memory(bytes([MARK]) * PAGE, Remote.NONE)
    there, others = Side(rig.open()).memory(bytes(PAGE), BOTH)
    with untouched(here), untouched(there):
        post = poster(pair.near.link, is_write=True)
        refused(pair, lambda: post(1, region, 0, others.address, others.remote_key, 64))


def test_behind_a_failure_a_new_link_serves_the_same_regions(pair: Pair) -> None:
    memory, region = pair.near.memory(bytes(PAGE), Remote.NONE)
    _, theirs = pair.far.memory(random_bytes(6, PAGE), Remote.READ)
    refused(pair, lambda: pair.near.link.post(1, [Piece(region, 0, theirs.address, theirs.remote_key ^ 0x100, 64)]))
    pair.near.link.close()
    pair.far.link.close()
    pair.near.link, pair.far.link = pair.near.fabric.open_link(BOTH), pair.far.fabric.open_link(BOTH)
    joined(pair.near, pair.far)
    pair.near.link.post(2, [Piece(region, 0, theirs.address, theirs.remote_key, PAGE)])
    assert failures(pair.near.link, 1) == [""]
    assert memory[:] == random_bytes(6, PAGE)


def test_a_failure_breaks_no_other_link_of_the_fabric(rig: Rig, pair: Pair) -> None:
    other = joined(Side(pair.near.fabric), Side(pair.far.fabric))
    _, region = pair.near.memory(bytes(PAGE), Remote.NONE)
    _, theirs = pair.far.memory(bytes(PAGE), Remote.READ)
    refused(pair, lambda: pair.near.link.post(1, [Piece(region, 0, theirs.address, theirs.remote_key ^ 0x100, 64)]))
    other.near.link.post(2, [Piece(region, 0, theirs.address, theirs.remote_key, 64)])
    assert failures(other.near.link, 1) == [""]
    assert not other.near.link.is_broken


def test_a_peer_that_is_gone_is_found_out(rig: Rig) -> None:
    near, far = silent(rig)
    memory, region = near.memory(bytes([MARK]) * PAGE, Remote.NONE)
    _, theirs = far.memory(bytes(PAGE), BOTH)
    with untouched(memory):
        for _ in range(2):
            near.link.post(1, [Piece(region, 0, theirs.address, theirs.remote_key, 64)])
        assert failures(near.link, 2) == [NO_ANSWER, FLUSHED]


def test_a_region_stays_open_while_it_is_used_and_is_free_when_the_link_is_closed(rig: Rig) -> None:
    near, far = silent(rig)
    _, region = near.memory(bytes(PAGE), Remote.NONE)
    _, theirs = far.memory(bytes(PAGE), BOTH)
    near.link.post(1, [Piece(region, 0, theirs.address, theirs.remote_key, 64)])
    with pytest.raises(FabricFailed, match="in use"):
        region.close()
    near.link.close()
    region.close()


def test_no_more_than_the_window_is_in_flight(rig: Rig) -> None:
    near, far = silent(rig)
    _, region = near.memory(bytes(PAGE), Remote.NONE)
    _, theirs = far.memory(bytes(PAGE), BOTH)
    for number in range(SEND_WINDOW):
        near.link.post(number, [Piece(region, 0, theirs.address, theirs.remote_key, 64)])
    with pytest.raises(FabricFailed):
        near.link.post(99, [Piece(region, 0, theirs.address, theirs.remote_key, 64)])


def test_a_closed_link_does_nothing_more(pair: Pair) -> None:
    _, region = pair.near.memory(bytes(PAGE), Remote.NONE)
    _, theirs = pair.far.memory(bytes(PAGE), BOTH)
    pair.near.link.close()
    pair.near.link.close()
    assert pair.near.link.is_broken
    assert pair.near.link.poll() == []
    pair.near.link.arm()
    pair.near.link.take_events()
    with pytest.raises(FabricFailed):
        pair.near.link.post(1, [Piece(region, 0, theirs.address, theirs.remote_key, 64)])
    with pytest.raises(FabricFailed):
        pair.near.link.connect(pair.far.link.end)


def test_nothing_is_posted_before_the_link_is_joined(rig: Rig) -> None:
    side = Side(rig.open())
    _, region = side.memory(bytes(PAGE), BOTH)
    with pytest.raises(FabricFailed):
        side.link.post(1, [Piece(region, 0, region.address, region.remote_key, 64)])


def readable(descriptor: int, timeout_s: float = 0.0) -> bool:
    waiter = select.poll()
    waiter.register(descriptor, select.POLLIN)
    return bool(waiter.poll(timeout_s * 1000))


def test_the_descriptor_is_readable_when_armed_and_a_completion_has_come(pair: Pair) -> None:
    link = pair.near.link
    _, region = pair.near.memory(bytes(PAGE), Remote.NONE)
    _, theirs = pair.far.memory(bytes(PAGE), BOTH)
    for number in range(100):
        link.take_events()
        assert not readable(link.descriptor)
        link.arm()
        assert link.poll() == []
        assert not readable(link.descriptor)
        link.post(number, [Piece(region, 0, theirs.address, theirs.remote_key, 64)])
        assert readable(link.descriptor, sides.WAIT_S)
        assert completions(link, 1) == [(number, "")]
        link.take_events()
        assert not readable(link.descriptor)


def test_one_may_arm_often_without_waiting(pair: Pair) -> None:
    link = pair.near.link
    _, region = pair.near.memory(bytes(PAGE), Remote.NONE)
    _, theirs = pair.far.memory(bytes(PAGE), BOTH)
    for _ in range(300):
        link.arm()
        link.post(1, [Piece(region, 0, theirs.address, theirs.remote_key, 64)])
        assert failures(link, 1) == [""]
    link.take_events()
    assert not readable(link.descriptor)


ODD_ENDS: Final[list[dict[str, object]]] = [
    {"kind": ""},
    {"kind": "ethernet"},
    {"queue_pair": 0},
    {"queue_pair": -1},
    {"queue_pair": 1 << 24},
    {"queue_pair": 1 << 64},
    {"gid": b""},
    {"gid": bytes(16)},
    {"gid": bytes([1]) * 15},
    {"gid": bytes([1]) * 17},
    {"lid": -1},
    {"lid": 1 << 16},
    {"mtu_bytes": 0},
    {"mtu_bytes": 1500},
    {"mtu_bytes": 8192},
    {"first_packet": -1},
    {"first_packet": 1 << 24},
    {"reads_max": -1},
    {"reads_max": 256},
]


@pytest.mark.parametrize("change", ODD_ENDS, ids=[f"{next(iter(odd))}-{at}" for at, odd in enumerate(ODD_ENDS)])
def test_an_odd_end_is_refused_and_the_link_can_still_be_joined(rig: Rig, change: dict[str, object]) -> None:
    near, far = Side(rig.open()), Side(rig.open())
    with pytest.raises(InvalidArgument):
        near.link.connect(msgspec.structs.replace(far.link.end, **change))
    joined(near, far)
    _, region = near.memory(bytes(PAGE), Remote.NONE)
    _, theirs = far.memory(bytes(PAGE), BOTH)
    near.link.post(1, [Piece(region, 0, theirs.address, theirs.remote_key, 64)])
    assert failures(near.link, 1) == [""]


def test_an_end_of_another_kind_is_refused(rig: Rig) -> None:
    near, far = Side(rig.open()), Side(rig.open())
    other = {"roce": "infiniband", "infiniband": "roce"}[near.fabric.kind]
    with pytest.raises(InvalidArgument, match=other):
        near.link.connect(msgspec.structs.replace(far.link.end, kind=other))


def test_a_link_is_joined_once(pair: Pair) -> None:
    with pytest.raises(FabricFailed):
        pair.near.link.connect(pair.far.link.end)


@pytest.mark.parametrize(
    ("offset", "address", "key", "length"),
    [
        (0, 0, 0, 0),
        (0, 0, 0, -1),
        (0, 0, 0, SLICE_BYTES + 1),
        (-1, 0, 0, 1),
        (1, 0, 0, 2 * SLICE_BYTES),
        (2 * SLICE_BYTES, 0, 0, 1),
        (2 * SLICE_BYTES - 1, 0, 0, 2),
        (0, -1, 0, 1),
        (0, (1 << 64) - 1, 0, 2),
        (0, 0, -1, 1),
        (0, 0, 1 << 32, 1),
    ],
)
def test_what_is_no_slice_or_no_place_is_never_posted(
    pair: Pair, offset: int, address: int, key: int, length: int
) -> None:
    _, region = pair.near.memory(bytes(2 * SLICE_BYTES), BOTH)
    _, theirs = pair.far.memory(bytes(PAGE), BOTH)
    for is_write in (False, True):
        odd = Piece(region, offset, address, key, length, is_write)
        with pytest.raises(InvalidArgument):
            pair.near.link.post(1, [odd])
        with pytest.raises(InvalidArgument):
            pair.near.link.post(1, [Piece(region, 0, theirs.address, theirs.remote_key, 64), odd])
    assert pair.near.link.poll() == []
    assert not pair.near.link.is_broken


def test_a_region_of_another_fabric_is_not_posted(rig: Rig, pair: Pair) -> None:
    _, region = Side(rig.open()).memory(bytes(PAGE), BOTH)
    _, theirs = pair.far.memory(bytes(PAGE), BOTH)
    with pytest.raises(FabricFailed):
        pair.near.link.post(1, [Piece(region, 0, theirs.address, theirs.remote_key, 64)])


def test_a_closed_region_is_not_posted(pair: Pair) -> None:
    _, region = pair.near.memory(bytes(PAGE), BOTH)
    _, theirs = pair.far.memory(bytes(PAGE), BOTH)
    memory, good = pair.near.memory(bytes(PAGE), BOTH)
    region.close()
    with untouched(memory), pytest.raises(FabricFailed):
        pair.near.link.post(1, [Piece(each, 0, theirs.address, theirs.remote_key, 64) for each in (good, region)])
    assert pair.near.link.poll() == []
    assert not pair.near.link.is_broken
    good.close()


@pytest.mark.parametrize("memory", [b"read-only", bytearray(), (0, 10), (4096, 0), (4096, -1), ((1 << 64) - 1, 2)])
def test_what_is_no_memory_is_not_registered(rig: Rig, memory: bytes) -> None:
    with pytest.raises(InvalidArgument):
        rig.open().register(memory, Remote.READ)


def test_memory_named_by_its_address_is_registered(pair: Pair) -> None:
    content, region = pair.near.memory(random_bytes(7, PAGE), Remote.NONE)
    again = pair.near.fabric.register((region.address, region.length_bytes), Remote.READ)
    there, theirs = pair.far.memory(bytes(PAGE), Remote.NONE)
    pair.far.link.post(1, [Piece(theirs, 0, again.address, again.remote_key, PAGE)])
    assert failures(pair.far.link, 1) == [""]
    assert there[:] == content[:]


def test_a_closed_fabric_has_closed_all_that_was_its(rig: Rig, pair: Pair) -> None:
    memory, region = pair.near.memory(bytes(PAGE), BOTH)
    pair.near.fabric.close()
    pair.near.fabric.close()
    assert pair.near.link.is_broken
    region.close()
    with pytest.raises(FabricFailed):
        pair.near.fabric.open_link(BOTH)
    with pytest.raises(FabricFailed):
        pair.near.fabric.register(memory, BOTH)

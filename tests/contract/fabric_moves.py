"""The contract of movers over the RDMA port: the same tests for the simulated network and for an adapter in the lab.

A file that imports these tests has a fixture `rig`, which opens fabrics that reach each other.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from typing import Final

import pytest
import trio

from lakefs.errors import DeadlineExceeded, FabricFailed, InvalidArgument, LakeError
from lakefs.host.offload import ThreadOffload
from lakefs.transport.fabric import ACCESS_REFUSED, SEND_WINDOW, SLICE_BYTES, Link, Piece, Remote
from lakefs.transport.fabric_mover import Mover, TrioMover
from tests.contract import fabric_sides as sides
from tests.contract.fabric_sides import BOTH, PAGE, Pair, Rig, random_bytes, silent, untouched

Pieces = list[Piece]
Move = Callable[[Link, Pieces, float], None]


def move_in_a_thread(link: Link, pieces: Pieces, timeout_s: float) -> None:
    """Move by `Mover`."""
    Mover(link).move(pieces, timeout_s)


def move_in_trio(link: Link, pieces: Pieces, timeout_s: float) -> None:
    """Move by `TrioMover`, in a loop of its own."""

    async def run() -> None:
        async with ThreadOffload(1, "fabric-test") as offload:
            await TrioMover(link, offload).move(pieces, timeout_s)

    trio.run(run)


MOVES: Final = {"thread": move_in_a_thread, "trio": move_in_trio}


@pytest.fixture(params=MOVES)
def move(request: pytest.FixtureRequest) -> Move:
    return MOVES[request.param]


def _cut(seed: int, size: int) -> list[tuple[int, int]]:
    """Return (offset, length) of pieces that cover the size in a random order; one is empty."""
    dice = random.Random(seed)
    marks = sorted({0, size, *(dice.randrange(size) for _ in range(6)), SLICE_BYTES, 2 * SLICE_BYTES})
    cut = [(start, end - start) for start, end in pairwise(marks)] + [(size, 0)]
    dice.shuffle(cut)
    return cut


@pytest.mark.parametrize("seed", range(3))
def test_a_mover_moves_pieces_of_any_length_both_ways(pair: Pair, move: Move, seed: int) -> None:
    size = SEND_WINDOW * SLICE_BYTES + 12_345
    content = random_bytes(seed, size)
    memory, region = pair.near.memory(bytes(size), Remote.NONE)
    there, theirs = pair.far.memory(content, BOTH)
    cut = _cut(seed, size)
    reads = [Piece(region, start, theirs.address + start, theirs.remote_key, length) for start, length in cut]
    move(pair.near.link, reads, sides.WAIT_S)
    assert memory[:size] == content
    there[:] = bytes(len(there))
    move(pair.near.link, [piece._replace(is_write=True) for piece in reads], sides.WAIT_S)
    assert there[:size] == content
    move(pair.near.link, [], sides.WAIT_S)
    assert not pair.near.link.is_broken


def test_what_has_arrived_can_be_used_while_the_rest_is_moved(pair: Pair) -> None:
    size = 2 * SEND_WINDOW * SLICE_BYTES + 5
    content = random_bytes(12, size)
    memory, region = pair.near.memory(bytes(size), Remote.NONE)
    _, theirs = pair.far.memory(content, Remote.READ)
    marks = [0, 1000, SLICE_BYTES + 1, size]
    pieces = [
        Piece(region, begin, theirs.address + begin, theirs.remote_key, end - begin) for begin, end in pairwise(marks)
    ]
    told: list[int] = []

    def meanwhile(moved: int) -> None:
        assert told[-1:] < [moved]
        assert memory[:moved] == content[:moved]
        told.append(moved)

    Mover(pair.near.link).move(pieces, sides.WAIT_S, meanwhile)
    assert memory[:size] == content
    assert told, "more than the window was moved without a word"
    assert 0 < told[0] <= told[-1] < size


def test_a_use_of_what_has_arrived_that_fails_ends_the_move_and_frees_its_memory(pair: Pair) -> None:
    size = 2 * SEND_WINDOW * SLICE_BYTES
    _, region = pair.near.memory(bytes(size), Remote.NONE)
    _, theirs = pair.far.memory(bytes(size), Remote.READ)

    def meanwhile(moved: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Mover(pair.near.link).move([Piece(region, 0, theirs.address, theirs.remote_key, size)], sides.WAIT_S, meanwhile)
    region.close()


def test_moves_of_many_threads_take_turns(pair: Pair) -> None:
    mover, errors, count, size = Mover(pair.near.link), list[BaseException](), 8, 100_000
    _, theirs = pair.far.memory(random_bytes(8, size), Remote.READ)

    def work() -> None:
        try:
            memory, region = pair.near.memory(bytes(size), Remote.NONE)
            for _ in range(4):
                memory[:] = bytes(len(memory))
                mover.move([Piece(region, 0, theirs.address, theirs.remote_key, size)], sides.WAIT_S)
                assert memory[:size] == random_bytes(8, size)
            region.close()
        except (LakeError, AssertionError) as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_moves_of_many_tasks_take_turns(pair: Pair) -> None:
    size = 100_000
    _, theirs = pair.far.memory(random_bytes(9, size), Remote.READ)

    async def work(mover: TrioMover) -> None:
        memory, region = pair.near.memory(bytes(size), Remote.NONE)
        for _ in range(4):
            memory[:] = bytes(len(memory))
            await mover.move([Piece(region, 0, theirs.address, theirs.remote_key, size)], sides.WAIT_S)
            assert memory[:size] == random_bytes(9, size)
        region.close()

    async def run() -> None:
        async with ThreadOffload(2, "fabric-test") as offload:
            mover = TrioMover(pair.near.link, offload)
            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(work, mover)
            await mover.aclose()
            assert mover.is_broken

    trio.run(run)


def test_a_move_that_the_peer_refuses_fails_and_frees_its_memory(pair: Pair, move: Move) -> None:
    _, region = pair.near.memory(bytes(4 * SLICE_BYTES), Remote.NONE)
    _, theirs = pair.far.memory(bytes(4 * SLICE_BYTES), BOTH)
    good = Piece(region, 0, theirs.address, theirs.remote_key, 2 * SLICE_BYTES)
    with pytest.raises(FabricFailed, match=ACCESS_REFUSED):
        move(pair.near.link, [good, good._replace(remote_key=theirs.remote_key ^ 0x100), good], sides.WAIT_S)
    assert pair.near.link.is_broken
    region.close()
    with pytest.raises(FabricFailed):
        move(pair.near.link, [good], sides.WAIT_S)


def test_a_mover_whose_link_is_broken_fails_at_once_and_blocks_nobody(pair: Pair) -> None:
    _, region = pair.near.memory(bytes(PAGE), Remote.NONE)
    _, theirs = pair.far.memory(bytes(PAGE), BOTH)
    piece, mover = Piece(region, 0, theirs.address, theirs.remote_key, PAGE), Mover(pair.near.link)
    pair.near.link.close()
    for _ in range(2):
        with pytest.raises(FabricFailed):
            mover.move([piece], 0.2)

    async def run() -> None:
        async with ThreadOffload(1, "fabric-test") as offload:
            other = TrioMover(pair.near.link, offload)
            for _ in range(2):
                with pytest.raises(FabricFailed):
                    await other.move([piece], 0.2)
            await other.aclose()

    trio.run(run)
    mover.close()


def test_an_impossible_piece_is_refused_and_leaves_nothing_in_flight(pair: Pair, move: Move) -> None:
    _, region = pair.near.memory(bytes(PAGE), Remote.NONE)
    _, theirs = pair.far.memory(bytes(PAGE), BOTH)
    good = Piece(region, 0, theirs.address, theirs.remote_key, PAGE)
    with pytest.raises(InvalidArgument):
        move(pair.near.link, [good, good._replace(offset=1)], sides.WAIT_S)
    region.close()


def test_a_move_ends_at_its_deadline_and_frees_its_memory(rig: Rig, move: Move) -> None:
    near, far = silent(rig)
    memory, region = near.memory(bytes(PAGE), Remote.NONE)
    _, theirs = far.memory(random_bytes(10, PAGE), BOTH)
    with ExitStack() as stack:
        stack.enter_context(untouched(memory))
        with pytest.raises((DeadlineExceeded, FabricFailed)) as caught:
            move(near.link, [Piece(region, 0, theirs.address, theirs.remote_key, PAGE)], 0.02)
        assert type(caught.value) is DeadlineExceeded
        region.close()
    assert near.link.is_broken


def test_a_move_whose_link_is_closed_by_another_ends(rig: Rig, move: Move) -> None:
    near, far = silent(rig)
    _, region = near.memory(bytes(PAGE), Remote.NONE)
    _, theirs = far.memory(bytes(PAGE), BOTH)
    closer = threading.Timer(0.02, near.fabric.close)
    closer.start()
    with pytest.raises((FabricFailed, DeadlineExceeded)):
        move(near.link, [Piece(region, 0, theirs.address, theirs.remote_key, PAGE)], 0.2)
    closer.join()


def test_a_cancelled_move_frees_its_memory(rig: Rig) -> None:
    near, far = silent(rig)
    memory, region = near.memory(bytes(PAGE), Remote.NONE)
    _, theirs = far.memory(bytes(PAGE), BOTH)

    async def run() -> None:
        async with ThreadOffload(1, "fabric-test") as offload:
            mover = TrioMover(near.link, offload)
            with trio.move_on_after(0.02) as scope:
                await mover.move([Piece(region, 0, theirs.address, theirs.remote_key, PAGE)], sides.WAIT_S)
            assert scope.cancelled_caught

    with untouched(memory):
        trio.run(run)
        assert near.link.is_broken
        region.close()

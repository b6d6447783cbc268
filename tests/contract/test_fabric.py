"""The simulated RDMA network: the port's contract, in good weather and bad, and bugs that the contract must find."""

from __future__ import annotations

import dataclasses
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pytest
import trio

from lakefs.errors import DeadlineExceeded, FabricFailed, LakeError
from lakefs.host.offload import ThreadOffload
from lakefs.transport import fabric_mover
from lakefs.transport.fabric import NO_ANSWER, SLICE_BYTES, Completion, Fabric, Link, Piece, Region, Remote
from lakefs.transport.fabric_mover import Mover, TrioMover
from tests import simulated_fabric
from tests.contract import fabric_moves, fabric_sides, fabric_suite
from tests.contract.fabric_moves import *
from tests.contract.fabric_sides import *
from tests.contract.fabric_suite import *
from tests.simulated_fabric import SimulatedFabric, SimulatedLink, SimulatedRegion, SimulatedWire, Weather

WEATHERS: Final = {"fair": Weather(), "rough": Weather(loss=0.2, shuffle=True, delay_s=0.0005)}
PIECE: Final = 2 * SLICE_BYTES


@dataclass
class SimulatedRig:
    """Fabrics of one simulated wire."""

    wire: SimulatedWire

    def open(self) -> Fabric:
        """Open one more fabric."""
        return self.wire.fabric()


@pytest.fixture(params=WEATHERS)
def rig(request: pytest.FixtureRequest) -> Iterator[SimulatedRig]:
    with SimulatedWire(7, WEATHERS[request.param]) as wire:
        yield SimulatedRig(wire)


@pytest.fixture
def wire() -> Iterator[SimulatedWire]:
    with SimulatedWire(8) as made:
        yield made


def a_read(pair: Pair, size: int) -> tuple[mmap.mmap, Region, Piece]:
    """Return memory, its region, and a READ that fills it."""
    memory, region = pair.near.memory(bytes(size), Remote.NONE)
    _, theirs = pair.far.memory(random_bytes(11, size), BOTH)
    return memory, region, Piece(region, 0, theirs.address, theirs.remote_key, size)


# --- what an adapter does at its own time --------------------------------------------------------------


def test_a_move_that_is_cancelled_while_its_packets_are_held_changes_no_memory_later(wire: SimulatedWire) -> None:
    pair = new_pair(SimulatedRig(wire))
    memory, region, piece = a_read(pair, PIECE)
    wire.hold()

    async def run() -> None:
        async with ThreadOffload(1, "fabric-test") as offload:
            with trio.move_on_after(0.02):
                await TrioMover(pair.near.link, offload).move([piece], WAIT_S)

    trio.run(run)
    with untouched(memory):
        region.close()
        wire.release()
        time.sleep(0.05)


@pytest.mark.parametrize("end", ["kill", "cut"])
def test_a_peer_that_vanishes_in_the_middle_of_a_move_fails_it(wire: SimulatedWire, move: Move, end: str) -> None:
    pair = new_pair(SimulatedRig(wire))
    memory, region, piece = a_read(pair, 4 * SLICE_BYTES)
    wire.hold()
    wire.release(operations=1)

    def vanish() -> None:
        while memory[SLICE_BYTES - 1 : SLICE_BYTES] == b"\0":
            time.sleep(0)
        if end == "kill":
            assert isinstance(pair.far.fabric, SimulatedFabric)
            wire.kill(pair.far.fabric)
        else:
            wire.cut()
        wire.release()

    thread = threading.Thread(target=vanish)
    thread.start()
    with pytest.raises(FabricFailed, match=NO_ANSWER):
        move(pair.near.link, [piece], WAIT_S)
    thread.join()
    region.close()
    assert memory[:SLICE_BYTES] == random_bytes(11, 4 * SLICE_BYTES)[:SLICE_BYTES]
    assert not any(memory[2 * SLICE_BYTES :])
    wire.mend()
    again = new_pair(SimulatedRig(wire))
    memory, region, piece = a_read(again, PIECE)
    move(again.near.link, [piece], WAIT_S)
    assert memory[:PIECE] == random_bytes(11, PIECE)


def test_packets_that_are_lost_for_a_moment_come_in_the_end(wire: SimulatedWire, move: Move) -> None:
    wire.weather = dataclasses.replace(wire.weather, silence_s=0.2)
    pair = new_pair(SimulatedRig(wire))
    memory, _, piece = a_read(pair, PIECE)
    wire.cut()
    timer = threading.Timer(0.05, wire.mend)
    timer.start()
    move(pair.near.link, [piece], WAIT_S)
    timer.join()
    assert memory[:PIECE] == random_bytes(11, PIECE)


def test_limits_of_an_adapter_are_refusals_with_a_reason(wire: SimulatedWire) -> None:
    fabric = wire.fabric(links_max=2, registered_bytes_max=2 * PAGE)
    links = [fabric.open_link(BOTH) for _ in range(2)]
    with pytest.raises(FabricFailed, match="queue pairs"):
        fabric.open_link(BOTH)
    links[0].close()
    fabric.open_link(BOTH)
    region = fabric.register(mmap.mmap(-1, 2 * PAGE), BOTH)
    with pytest.raises(FabricFailed, match="locked"):
        fabric.register(mmap.mmap(-1, PAGE), BOTH)
    region.close()
    fabric.register(mmap.mmap(-1, PAGE), BOTH)
    assert fabric.registered_bytes == PAGE


def late_to_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a completion come between a mover's look and its arming, and so make nothing readable."""
    arm = SimulatedLink.arm

    def late(link: SimulatedLink) -> None:
        until = time.monotonic() + WAIT_S
        while link.operations:
            assert time.monotonic() < until
            time.sleep(0)
        arm(link)

    monkeypatch.setattr(SimulatedLink, "arm", late)
    monkeypatch.setattr(fabric_mover, "_POLLS_BEFORE_A_WAIT", 1)


def moves_though_late(wire: SimulatedWire, move: Move, timeout_s: float) -> None:
    pair = new_pair(SimulatedRig(wire))
    memory, _, piece = a_read(pair, PIECE)
    wire.hold()
    timer = threading.Timer(0.02, wire.release)
    timer.start()
    try:
        move(pair.near.link, [piece], timeout_s)
    finally:
        timer.join()
    assert memory[:PIECE] == random_bytes(11, PIECE)


def test_a_completion_just_before_the_link_is_armed_is_not_missed(
    wire: SimulatedWire, move: Move, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_to_arm(monkeypatch)
    moves_though_late(wire, move, WAIT_S)


def test_that_a_mover_that_does_not_look_again_would_be_found(
    wire: SimulatedWire, move: Move, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_to_arm(monkeypatch)

    def armed_only(self: Any) -> bool:
        self._link.arm()
        return False

    monkeypatch.setattr(fabric_mover._Move, "settle_armed", armed_only)
    with pytest.raises(DeadlineExceeded):
        moves_though_late(wire, move, 0.5)


# --- bugs, each of which a test of the contract finds --------------------------------------------------


def rights_ignored(patch: pytest.MonkeyPatch) -> None:
    _find_another(patch, lambda found: dataclasses.replace(found, remote=BOTH))


def range_a_byte_too_long(patch: pytest.MonkeyPatch) -> None:
    _find_another(
        patch,
        lambda found: dataclasses.replace(found, memory=found.memory._replace(length_bytes=found.length_bytes + 1)),
    )


def range_a_byte_too_early(patch: pytest.MonkeyPatch) -> None:
    def earlier(found: SimulatedRegion) -> SimulatedRegion:
        memory = found.memory
        return dataclasses.replace(
            found, memory=memory._replace(address=memory.address - 1, length_bytes=memory.length_bytes + 1)
        )

    _find_another(patch, earlier)


def _find_another(patch: pytest.MonkeyPatch, change: Callable[[SimulatedRegion], SimulatedRegion]) -> None:
    find = SimulatedFabric.find

    def planted(self: SimulatedFabric, key: int) -> SimulatedRegion | None:
        found = find(self, key)
        return change(found) if found else None

    patch.setattr(SimulatedFabric, "find", planted)


def key_of_any_fabric(patch: pytest.MonkeyPatch) -> None:
    def planted(self: SimulatedFabric, key: int) -> SimulatedRegion | None:
        return next((fabric.regions[key] for fabric in self.wire._fabrics if key in fabric.regions), None)

    patch.setattr(SimulatedFabric, "find", planted)


def key_of_a_few_bits(patch: pytest.MonkeyPatch) -> None:
    def planted(self: SimulatedFabric, key: int) -> SimulatedRegion | None:
        return next((region for known, region in self.regions.items() if not (known ^ key) & 0xFFFF), None)

    patch.setattr(SimulatedFabric, "find", planted)


def region_closed_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedRegion, "close", lambda self: None)


def region_closed_in_use(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedRegion, "close", lambda self: self.fabric.regions.pop(self.remote_key, None))


def a_byte_too_many(patch: pytest.MonkeyPatch) -> None:
    copy = simulated_fabric._copy
    patch.setattr(simulated_fabric, "_copy", lambda operation, start, length: copy(operation, start, length + 1))


def completions_out_of_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedLink, "complete", lambda self, completion: self._completed.appendleft(completion))


def completion_before_its_bytes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        SimulatedWire, "_plan", lambda self, length: [(start, PAGE) for start in range(0, length - PAGE, PAGE)]
    )


def no_event(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedLink, "complete", lambda self, completion: self._completed.append(completion))


def event_without_arming(patch: pytest.MonkeyPatch) -> None:
    def planted(self: SimulatedLink, completion: Completion) -> None:
        self._completed.append(completion)
        os.eventfd_write(self.descriptor, 1)

    patch.setattr(SimulatedLink, "complete", planted)
    patch.setattr(SimulatedLink, "take_events", lambda self: None)


def link_goes_on_behind_a_failure(patch: pytest.MonkeyPatch) -> None:
    end = SimulatedWire._end

    def planted(self: SimulatedWire, link: SimulatedLink, failure: str) -> None:
        end(self, link, failure)
        link.has_failed = False

    patch.setattr(SimulatedWire, "_end", planted)


def link_closed_without_its_work(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedLink, "close", lambda self: setattr(self, "is_broken", True))


def ends_unchecked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(simulated_fabric, "check_end", lambda end: None)


def posts_unchecked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(simulated_fabric, "check_post", lambda *_: None)


def slices_without_the_last(patch: pytest.MonkeyPatch) -> None:
    slices = fabric_mover._slices

    def planted(pieces: Sequence[Piece]) -> Iterator[Piece]:
        return iter(list(slices(pieces))[:-1])

    patch.setattr(fabric_mover, "_slices", planted)


def slices_at_their_piece_s_begin(patch: pytest.MonkeyPatch) -> None:
    slices = fabric_mover._slices

    def planted(pieces: Sequence[Piece]) -> Iterator[Piece]:
        return (part._replace(offset=pieces[0].offset) for piece in pieces for part in slices([piece]))

    patch.setattr(fabric_mover, "_slices", planted)


def move_forgets_what_is_in_flight(patch: pytest.MonkeyPatch) -> None:
    """The mover leaves the link open behind failures, deadlines and cancellations."""
    patch.setattr(Mover, "move", _forgetful_move)
    patch.setattr(TrioMover, "move", _forgetful_trio_move)


def _forgetful_move(self: Mover, pieces: Sequence[Piece], timeout_s: float) -> None:
    move, until = fabric_mover._Move(self._link, pieces), time.monotonic() + timeout_s
    while move.is_under_way:
        move.post_and_look()
        if time.monotonic() > until:
            raise DeadlineExceeded("late")


async def _forgetful_trio_move(self: TrioMover, pieces: Sequence[Piece], timeout_s: float) -> None:
    move = fabric_mover._Move(self._link, pieces)
    with trio.move_on_after(timeout_s) as scope:
        while move.is_under_way:
            move.post_and_look()
            await trio.lowlevel.checkpoint()
    if scope.cancelled_caught:
        raise DeadlineExceeded("late")


def moves_at_once(patch: pytest.MonkeyPatch) -> None:
    """The mover takes no turns: one move counts the other's completions."""

    def planted(self: Mover, link: Link) -> None:
        self._link = link
        self._lock = _NoLock()  # type: ignore[assignment]

    patch.setattr(Mover, "__init__", planted)


class _NoLock:
    def acquire(self, timeout: float = 0) -> bool:
        return True

    def release(self) -> None:
        return None


suite, moves = fabric_suite, fabric_moves
PLANTED: Final[list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[..., None], tuple[Any, ...]]]] = [
    (rights_ignored, suite.test_a_peer_has_only_the_rights_that_region_and_link_give, (Remote.READ, True, "region")),
    (rights_ignored, suite.test_a_peer_has_only_the_rights_that_region_and_link_give, (Remote.NONE, False, "region")),
    (range_a_byte_too_long, suite.test_a_range_outside_of_the_region_is_refused, (1, True)),
    (range_a_byte_too_early, suite.test_a_range_outside_of_the_region_is_refused, (-1, False)),
    (key_of_any_fabric, suite.test_a_key_is_of_no_use_through_a_link_of_another_fabric, ()),
    (key_of_a_few_bits, suite.test_a_wrong_key_is_refused, (0x80000000, True)),
    (region_closed_late, suite.test_a_key_ends_with_its_region, ()),
    (region_closed_in_use, suite.test_a_region_stays_open_while_it_is_used_and_is_free_when_the_link_is_closed, ()),
    (a_byte_too_many, suite.test_a_read_fetches_the_peers_bytes_and_touches_nothing_beside_them, ()),
    (a_byte_too_many, suite.test_a_write_brings_the_bytes_to_the_peer_and_touches_nothing_beside_them, ()),
    (completions_out_of_order, suite.test_completions_come_in_the_order_of_posts_with_their_tickets, ()),
    (completion_before_its_bytes, suite.test_a_read_fetches_the_peers_bytes_and_touches_nothing_beside_them, ()),
    (no_event, suite.test_the_descriptor_is_readable_when_armed_and_a_completion_has_come, ()),
    (event_without_arming, suite.test_the_descriptor_is_readable_when_armed_and_a_completion_has_come, ()),
    (link_goes_on_behind_a_failure, suite.test_a_wrong_key_is_refused, (1, False)),
    (link_closed_without_its_work, moves.test_a_move_ends_at_its_deadline_and_frees_its_memory, (move_in_trio,)),
    (ends_unchecked, suite.test_an_odd_end_is_refused_and_the_link_can_still_be_joined, ({"mtu_bytes": 1500},)),
    (posts_unchecked, suite.test_what_is_no_slice_or_no_place_is_never_posted, (0, 0, 0, SLICE_BYTES + 1)),
    (slices_without_the_last, moves.test_a_mover_moves_pieces_of_any_length_both_ways, (move_in_a_thread, 0)),
    (slices_at_their_piece_s_begin, moves.test_a_mover_moves_pieces_of_any_length_both_ways, (move_in_trio, 0)),
    (move_forgets_what_is_in_flight, moves.test_a_move_ends_at_its_deadline_and_frees_its_memory, (move_in_a_thread,)),
    (move_forgets_what_is_in_flight, moves.test_a_cancelled_move_frees_its_memory, ()),
    (moves_at_once, moves.test_moves_of_many_threads_take_turns, ()),
]


@pytest.mark.parametrize(("bug", "test", "arguments"), PLANTED)
def test_a_planted_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None],
    test: Callable[..., None],
    arguments: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fabric_sides, "WAIT_S", 0.5)
    names = test.__code__.co_varnames[: test.__code__.co_argcount]
    with SimulatedWire(9) as wire:
        rig = SimulatedRig(wire)
        made: list[Any] = [{"rig": rig, "pair": None}[name] for name in names if name in ("rig", "pair")]
        given = [new_pair(rig) if value is None else value for value in made]
        bug(monkeypatch)
        with pytest.raises((AssertionError, LakeError, pytest.fail.Exception)):
            test(*given, *arguments)
        monkeypatch.undo()

"""Rights of heads to repeat the stamps of names: how long they last, and what comes before them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import trio

from engine.format.group_parts import FIRST_SHARD
from engine.group_log.leader_log import LeaderLog
from engine.group_log.log_bounds import LEADER_MARGIN_S
from engine.head import head_stamps
from engine.head.head_stamps import HeadStamps
from engine.metadata.head_turns import RIGHT_S, SLOTS_AT_ONCE, Followed, HeadTurns
from lakefs.errors import CoordinatorLost
from lakefs.stamps.stamps import STAMP
from lakefs.wire import messages as m
from tests.sim.world.clock import SimClock
from tests.store_rig import run
from tests.turns_rig import Names, scene

# --- rights --------------------------------------------------------------------------------------------


def test_a_right_counts_from_the_sending_of_its_request() -> None:
    async def body(names: Names) -> None:
        (head,) = names.heads
        assert head.own is not None
        head.stop()
        await trio.sleep(0.31)  # the answer is on its way
        asked = head.right_end_s() - RIGHT_S  # when the right of before was asked for
        await trio.sleep(0.4)
        head.own.running.set()
        await trio.testing.wait_all_tasks_blocked(0.0001)
        assert head.right_end_s() < trio.current_time() + RIGHT_S - 0.4
        assert head.right_end_s() >= asked + RIGHT_S

    scene(body)


def test_a_leader_waits_longer_than_any_head_uses_its_right() -> None:
    async def body(names: Names) -> None:
        (head,) = names.heads
        for _ in range(20):
            (follower,) = names.turns._heads
            assert follower.right_until >= head.right_end_s() + 0.04 * RIGHT_S
            await trio.sleep(0.17)

    scene(body)


def test_no_right_is_longer_than_the_lease_lasts() -> None:
    async def body(names: Names) -> None:
        (head,) = names.heads
        ends = trio.current_time() + 3
        names.turns.left_s = lambda: ends - trio.current_time()
        await trio.sleep(2.9)
        assert head.right_end_s() == pytest.approx(ends, abs=0.31)
        assert head.right_end_s() <= ends
        await trio.sleep(2)
        assert head.right_end_s() <= ends
        (follower,) = names.turns._heads
        assert follower.right_until <= ends + 0.05

    scene(body)


class _Lease:
    left = 5.0

    def left_s(self) -> float:
        return self.left


def test_a_leader_gives_rights_while_its_lease_has_more_than_the_margin_left() -> None:
    async def main() -> None:
        lease: Any = _Lease()
        nothing: Any = None
        log = LeaderLog(nothing, nothing, nothing, lease, nothing, nothing)
        assert log.rights_s() == 5.0 - LEADER_MARGIN_S
        lease.left = LEADER_MARGIN_S - 0.1
        assert log.rights_s() == 0
        lease.left = 5.0
        log.lose(CoordinatorLost("another replica leads"))
        assert log.rights_s() == 0

    trio.run(main)


def test_rights_are_counted_by_the_clock_that_goes_on_while_the_machine_is_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    stamps = HeadStamps()
    with monkeypatch.context() as patched:
        patched.setattr(time, "clock_gettime_ns", asked.append)
        stamps._now_ns()
    assert asked == [time.CLOCK_BOOTTIME]
    stamps.close()


@pytest.mark.parametrize("part", [None, bytearray(8)])
def test_a_right_is_taken_behind_the_turns_that_come_with_it(part: bytearray | None) -> None:
    steps: list[str] = []

    class Noted:
        def raise_to(self, stamps: bytes) -> None:
            steps.append("turn")

        def raise_part(self, part: bytearray, stamps: bytes) -> None:
            steps.append("turn")

        def __setattr__(self, name: str, value: object) -> None:
            steps.append(name)

        right_end_ns = 1

    stamps = object.__new__(HeadStamps)
    stamps._stamps = Noted()  # type: ignore[assignment]
    stamps._shards = {FIRST_SHARD: head_stamps.Followed(part, turns=b"turns")}
    assert stamps.make(m.TurnsFollowed(7, STAMP.pack(1, 1), 5), 100) == 7
    assert steps == ["turn", "right_end_ns"]


def test_a_turn_is_said_behind_the_step_that_made_it() -> None:
    async def body(names: Names) -> None:
        (head,) = names.heads
        for _ in range(5):
            (known,) = await head.stat()
            await names.change()
            assert not head.equal(known)
            assert head.own is not None
            last = head.own.asked[-1]
            assert isinstance(last, m.FollowTurns)
            assert last.said == names.turns.last

    scene(body)


def test_a_right_is_given_only_with_the_last_of_many_turns() -> None:
    async def main() -> None:
        turns = HeadTurns(SimClock())
        head = turns.open(0)
        head.noted[:] = b"\xff" * len(head.noted)
        turns.turn_all()
        count = 0
        while True:
            sent: list[Followed] = []
            turns.follow(head, 1.0, sent.append)
            (followed,) = sent
            count += len(followed.stamps) // STAMP.size
            assert len(followed.stamps) <= SLOTS_AT_ONCE * STAMP.size
            if followed.number:
                break
            assert followed.right_s == 0
        assert followed.right_s == RIGHT_S
        assert count == len(head.noted) * 8
        assert head.noted == bytes(len(head.noted))

    run(main)

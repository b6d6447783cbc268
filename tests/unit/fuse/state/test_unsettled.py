"""Changes that a mount does not know to be durable, and the syncs that make them so."""

from __future__ import annotations

import trio
import trio.testing

from fuse.state.unsettled import BOOTS_MAX, INODES_MAX, SETTLE_S, Unsettled
from lakefs.errors import EngineUnreachable

ONE, TWO = b"one", b"two"
FOLDER, FILE = 7, 8


def settle_for(unsettled: Unsettled, boots: list[bytes], seconds: float, *, failing: bool = False) -> int:
    """Let it settle for so long; return the number of syncs.  `boots`: the engines before and after each sync."""
    syncs = 0

    async def sync() -> None:
        nonlocal syncs
        syncs += 1
        if len(boots) > 1:
            boots.pop(0)
        if failing:
            raise EngineUnreachable("gone")

    async def main() -> None:
        with trio.move_on_after(seconds):
            await unsettled.settle(lambda: boots[0], sync)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return syncs


def test_a_change_in_an_engine_that_is_gone_is_not_forgotten_for_one_in_the_next() -> None:
    unsettled = Unsettled()
    unsettled.note(ONE, [FOLDER])
    unsettled.note(TWO, [FOLDER, FILE])
    assert unsettled.concerns(FILE)
    assert unsettled.take(FOLDER) == {ONE, TWO}
    assert unsettled.take(FOLDER) == set()


def test_one_folder_is_told_of_its_own_changes_whoever_was_told_of_others() -> None:
    unsettled = Unsettled()
    unsettled.note(ONE, [FOLDER])
    unsettled.note(ONE, [FILE])
    assert unsettled.take(FILE) == {ONE}
    assert unsettled.take(FOLDER) == {ONE}


def test_what_is_kept_is_bounded() -> None:
    unsettled = Unsettled()
    for boot in range(2 * BOOTS_MAX):
        unsettled.note(boot.to_bytes(1, "big"), [FOLDER])
    assert len(unsettled.take(FOLDER)) == BOOTS_MAX
    unsettled.note(ONE, range(INODES_MAX + 1))
    assert not unsettled.concerns(0)
    assert unsettled.concerns(INODES_MAX)


def test_a_change_that_nobody_syncs_is_known_to_be_durable_after_a_while() -> None:
    unsettled = Unsettled()
    unsettled.note(ONE, [FOLDER])
    assert settle_for(unsettled, [ONE], SETTLE_S * 10) == 1
    assert unsettled.take(FOLDER) == set()


def test_a_sync_that_a_later_engine_answered_says_nothing_of_the_change() -> None:
    unsettled = Unsettled()
    unsettled.note(ONE, [FOLDER])
    assert settle_for(unsettled, [ONE, TWO], SETTLE_S * 10) == 1
    assert unsettled.take(FOLDER) == {ONE}


def test_what_is_lost_already_is_not_synced_in_vain() -> None:
    unsettled = Unsettled()
    unsettled.note(ONE, [FOLDER])
    assert settle_for(unsettled, [TWO], SETTLE_S * 10) == 0
    assert unsettled.take(FOLDER) == {ONE}


def test_a_sync_that_fails_leaves_the_change_to_whoever_syncs_next() -> None:
    unsettled = Unsettled()
    unsettled.note(ONE, [FOLDER])
    assert settle_for(unsettled, [ONE], SETTLE_S * 10, failing=True) == 1
    assert unsettled.take(FOLDER) == {ONE}

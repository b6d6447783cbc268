"""Heads that repeat the stamps of names: nothing that was answered is missed, and nobody waits longer than a right."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from engine.head.head_stamps import HeadStamps
from engine.metadata import head_turns
from engine.metadata.head_turns import HEADS_MAX, RIGHTS_OVER_S
from lakefs.errors import EngineBusy, EngineUnreachable, InvalidArgument, SessionLost
from lakefs.wire import messages as m
from tests.names_rig import names_store
from tests.sim.world.disk import SimDisk
from tests.store_rig import ask, run
from tests.turns_rig import BOOTED_NS, A, HeldLog, Names, boottime_ns, scene

# --- heads that are well -------------------------------------------------------------------------------


def test_a_known_name_is_repeated_until_it_changes_anywhere_and_no_change_waits_for_heads_that_are_well() -> None:
    async def body(names: Names) -> None:
        first, second = names.heads
        (known,), (also,) = await first.stat(), await second.stat()
        await trio.sleep(20)  # rights are renewed
        assert first.repeats(known)
        assert second.repeats(also)
        assert await names.change() < 0.001
        assert not first.equal(known)
        assert not second.equal(also)
        (anew,) = await first.stat()
        assert first.repeats(anew)
        assert await names.change("b") < 0.001
        assert await names.change(durable=False) < 0.001
        assert not first.repeats(anew)

    scene(body, heads=2)


def test_a_name_that_is_absent_and_a_folder_are_known_too() -> None:
    async def body(names: Names) -> None:
        (head,) = names.heads
        known = await head.stat(("bkt", "no such"), A)
        assert all(map(head.repeats, known))
        await names.change("no such")
        assert [head.repeats(each) for each in known] == [False, True]

    scene(body)


def test_answers_to_changes_have_stamps_of_their_folders() -> None:
    async def body(names: Names) -> None:
        (head,) = names.heads
        await head.stat()
        request = m.SetAttributes("bkt", "a", mode=0o600, folders=True)
        answer = await head.link.ask(request, m.NameResults)
        assert answer.results[0].folder is not None
        assert head.repeats(answer.results[0].folder.stamps)
        visible = await head.link.ask(
            m.SetAttributes("bkt", "a", mode=0o400, folders=True, durable=False), m.NameResults
        )
        assert visible.results[0].folder is not None
        assert visible.results[0].folder.stamps == b""

    scene(body)


# --- heads that are stopped ----------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [True, False])
def test_a_change_is_answered_when_a_stopped_head_may_repeat_what_it_knew_no_more(durable: bool) -> None:
    async def body(names: Names) -> None:
        (head,) = names.heads
        (known,) = await head.stat()
        head.stop()
        assert 0.2 < await names.change(durable=durable) < RIGHTS_OVER_S + 0.001
        assert head.equal(known)
        assert not head.repeats(known)
        assert await names.change(durable=durable) < 0.001  # once
        head.go_on()
        await names.until(head.has_right)
        assert not head.equal(known)

    scene(body)


def test_a_turn_that_was_sent_and_is_not_said_is_waited_for() -> None:
    async def body(names: Names) -> None:
        (head,) = names.heads
        (known,) = await head.stat()
        log = HeldLog(names.store)
        head.stop()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(names.change)
            await trio.sleep(0.1)  # it was sent by now
            log.may_append.set()
            await trio.sleep(0.1)
            assert head.repeats(known)
            await names.look()
            assert not head.repeats(known)

    scene(body)


@pytest.mark.parametrize("durable", [True, False])
def test_no_reading_of_a_change_is_answered_before_the_heads_have_turned(durable: bool) -> None:
    async def body(names: Names) -> None:
        (head,) = names.heads
        (known,) = await head.stat()
        head.stop()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(names.change)
            await trio.sleep(0.1)
            assert head.repeats(known)
            await names.look(durable=durable)
            assert not head.repeats(known)

    scene(body)


def test_a_refusal_that_shows_a_change_is_not_answered_before_the_heads_have_turned() -> None:
    async def body(names: Names) -> None:
        (head,) = names.heads
        (known,) = await head.stat(("new", "a"))
        head.stop()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                ask, names.client, m.MakeFolder("new", "f", create_bucket=True, durable=False), m.NameResults
            )
            await trio.sleep(0.1)
            assert head.repeats(known)
            with pytest.raises(Exception, match="exists"):
                await ask(names.client, m.MakeFolder("new", "f", exclusive=True, durable=False), m.NameResults)
            assert not head.repeats(known)

    scene(body)


def test_changes_of_what_a_stopped_head_does_not_know_wait_for_nobody() -> None:
    async def body(names: Names) -> None:
        (head,) = names.heads
        await names.change("folder/b")
        await head.stat(("other", "c"))
        head.stop()
        assert await names.change("folder/b") < 0.001

    scene(body)


def test_a_head_that_leaves_keeps_its_right_and_one_that_says_goodbye_does_not() -> None:
    async def body(names: Names) -> None:
        gone, polite = names.heads
        await polite.stat()
        assert polite.own is not None
        polite.stop()
        await polite.own.client.call(m.CloseTurns())
        assert await names.change() < 0.001
        (known,) = await gone.stat()
        assert gone.own is not None
        gone.stop()
        await gone.own.client.aclose()
        assert len(names.turns._heads) == 1
        assert await names.change() > 0.2
        assert not gone.repeats(known)

    scene(body, heads=2)


# --- what is only visible, or not yet durable ----------------------------------------------------------


def test_what_is_not_durable_has_no_stamps_unless_the_answer_waits_for_that() -> None:
    async def body(names: Names) -> None:
        (head,) = names.heads
        await head.stat()
        log = HeldLog(names.store)
        await names.change(durable=False)
        assert await head.stat(durable=False) == [b""]
        answers: list[bytes] = []

        async def stat() -> None:
            answers.extend(await head.stat())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stat)
            await trio.sleep(1)
            assert not answers
            log.may_append.set()
        assert head.repeats(answers[0])

    scene(body)


def test_a_head_counts_as_one_that_was_sent_a_stamp_when_its_answer_is_read() -> None:
    async def body(names: Names) -> None:
        (head,) = names.heads
        await head.stamps.join(head.link)
        log = HeldLog(names.store)
        await names.change("b", durable=False)
        answers: list[bytes] = []

        async def stat() -> None:
            answers.extend(await head.stat())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stat)
            await trio.sleep(0.1)  # it was read, and waits for the log
            await names.change(durable=False)
            log.may_append.set()
        assert answers[0]
        assert not head.equal(answers[0])

    scene(body)


# --- beginnings and ends -------------------------------------------------------------------------------


def test_nothing_stands_that_was_sent_over_an_earlier_connection() -> None:
    async def body(names: Names) -> None:
        (head,) = names.heads
        (known,) = await head.stat()
        head.lose()
        await trio.testing.wait_all_tasks_blocked()
        assert not head.has_right()
        await names.until(head.has_right)
        assert not head.equal(known)
        head.stamps._stamps.raise_to(known)  # an answer that was on its way
        assert not head.equal(known)
        await names.change()
        assert not head.repeats(known)

    scene(body)


def test_answers_have_no_stamps_while_no_turns_are_followed() -> None:
    async def body(names: Names) -> None:
        (head,) = names.heads
        await head.stat()
        head.stop()
        (follower,) = names.turns._heads
        names.turns.leave(follower)
        assert await head.link.ask(m.StatNames([A], stamps=True), m.NameResults) is not None
        assert (await head.link.ask(m.StatNames([A], stamps=True), m.NameResults)).results[0].stamps == b""
        with pytest.raises(SessionLost, match="have ended"):
            await ask(names.client, m.JoinTurns(b"0" * 16), m.NameResults)

    scene(body)


def test_names_that_stop_take_rights_back_at_once_or_wait_for_their_end() -> None:
    async def body(names: Names) -> None:
        well, stopped = names.heads
        before = trio.current_time()
        stopped.stop()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(names.turns.end)
            await trio.sleep(0.01)
            assert not well.has_right()
            assert stopped.has_right()
        assert not stopped.has_right()
        assert trio.current_time() - before <= RIGHTS_OVER_S
        before = trio.current_time()
        await names.turns.end()
        assert trio.current_time() == before

    scene(body, heads=2)


def test_names_that_were_killed_answer_nothing_before_all_rights_are_over() -> None:
    async def main() -> None:
        disk = SimDisk()
        with trio.CancelScope() as killed:
            async with names_store(disk):
                killed.cancel()
                await trio.lowlevel.checkpoint()
        opened = trio.current_time()
        async with names_store(disk):
            assert trio.current_time() - opened == pytest.approx(RIGHTS_OVER_S)
        opened = trio.current_time()
        async with names_store(disk):
            assert trio.current_time() == opened

    run(main)


def test_heads_are_bounded_and_odd_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(names: Names) -> None:
        for odd in (m.FollowTurns(0, 0), m.JoinTurns(b"")):
            with pytest.raises(SessionLost):
                await names.client.call(odd)
        for base in (-1, 1 << 63):
            with pytest.raises(InvalidArgument, match="no base"):
                await names.client.call(m.OpenTurns(base))
        await names.client.call(m.OpenTurns(0))
        for request in (m.OpenTurns(0), m.FollowTurns(1, 0), m.FollowTurns(0, -1), m.FollowTurns(0, 1 << 40)):
            with pytest.raises(InvalidArgument):
                await names.client.call(request)
        monkeypatch.setattr(head_turns, "HEADS_MAX", 2)
        await names.client.call(m.CloseTurns())
        names.turns.open(0)
        with pytest.raises(EngineBusy, match="heads follow"):
            await names.client.call(m.OpenTurns(0))

    assert HEADS_MAX >= 96
    scene(body)


def test_a_head_that_has_lost_an_answer_with_turns_follows_anew() -> None:
    async def body(names: Names) -> None:
        opened = (await names.client.call(m.OpenTurns(1 << 40))).message
        assert isinstance(opened, m.TurnsOpened)
        await names.client.call(m.FollowTurns(0, 0))
        await names.client.call(m.JoinTurns(opened.turns))
        await names.client.call(m.StatNames([A], stamps=True))
        await names.change(durable=False)
        lost = (await names.client.call(m.FollowTurns(0, 0))).message
        assert isinstance(lost, m.TurnsFollowed)
        assert (lost.number, bool(lost.stamps)) == (1, True)
        with pytest.raises(SessionLost, match="was lost"):
            await names.client.call(m.FollowTurns(0, 0))

    scene(body)


def test_an_index_that_is_rebuilt_turns_all_that_heads_know() -> None:
    async def body(names: Names) -> None:
        (head,) = names.heads
        (known,) = await head.stat()
        await names.store.metadata.rebuild_online()
        await names.look()
        assert not head.repeats(known)
        assert boottime_ns() > BOOTED_NS

    scene(body)


def test_a_head_goes_on_when_names_cannot_be_reached() -> None:
    async def main() -> None:
        stamps = HeadStamps(boottime_ns)

        def refuse() -> Any:
            raise EngineUnreachable("nobody answers")

        with trio.move_on_after(20):
            await stamps.run(refuse)
        assert stamps.turns() == b""
        stamps.close()

    run(main)

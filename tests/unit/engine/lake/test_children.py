"""Processes as the parent that keeps them running sees them; other programs are in their place."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from engine.lake.children import NEWS_EVERY_S, REPORT_BYTES_MAX, open_children, open_parent, report_failure
from engine.lake.member_processes import MemberPlan, MemberProcess, MemberProcesses
from lakefs.errors import StoreLocked

LOCKED_ONCE = f"""
import os, sys, time
if not os.path.exists("unlocked"):
    open("unlocked", "w").close()
    sys.exit({StoreLocked.exit_code})
os.write(int(sys.argv[1]), b'["unix:/nowhere"]\\n')
time.sleep(600)
"""


ENDS_WITH_A_REASON = """
import os, sys
descriptor = int(sys.argv[1])
if not os.path.exists("served"):
    open("served", "w").close()
    os.write(descriptor, b"[]\\n")
os.write(descriptor, b'"the disk failed"\\n')
sys.exit(74)
"""


ENDS_ONCE = """
import os, sys, time
os.write(int(sys.argv[1]), b"[]\\n")
if not os.path.exists("runs-on"):
    os.remove("kept")
    sys.exit(1)
time.sleep(600)
"""


async def nothing(_: MemberProcess) -> None:
    """Record nothing."""


def test_a_member_is_waited_for_while_a_process_of_an_earlier_run_holds_its_lock(tmp_path: Path) -> None:
    code = f"import os; os.chdir({str(tmp_path)!r}){LOCKED_ONCE}"
    plan = MemberPlan(tmp_path, tmp_path / "s", [sys.executable, "-c", code])

    async def main() -> None:
        with trio.fail_after(30):
            async with open_children([plan], nothing) as processes:
                await processes.wait_settled()
                [member] = processes.all
                assert member.is_serving
                assert member.restarts == 1
                assert member.addresses == ["unix:/nowhere"]

    trio.run(main)


def test_a_member_is_not_started_again_in_a_folder_that_holds_nothing(tmp_path: Path) -> None:
    code = f"import os; os.chdir({str(tmp_path)!r}){ENDS_ONCE}"
    kept = tmp_path / "kept"
    kept.touch()

    async def main() -> None:
        looked_twice, served_again = trio.Event(), trio.Event()
        looks: list[bool] = []

        def is_wanted() -> bool:
            looks.append(kept.exists())
            if looks[-2:] == [False, False]:
                looked_twice.set()
            return looks[-1]

        async def served(member: MemberProcess) -> None:
            if member.restarts:
                served_again.set()

        plan = MemberPlan(tmp_path, tmp_path / "s", [sys.executable, "-c", code], is_wanted)
        with trio.fail_after(60):
            async with open_children([plan], served) as processes:
                [member] = processes.all
                await looked_twice.wait()
                assert not member.is_serving
                kept.touch()
                (tmp_path / "runs-on").touch()
                await served_again.wait()
                assert member.is_serving

    trio.run(main)


def test_the_reason_for_which_a_member_ends_is_known_and_given_up_when_it_serves(tmp_path: Path) -> None:
    code = f"import os; os.chdir({str(tmp_path)!r}){ENDS_WITH_A_REASON}"
    processes_of: list[MemberProcesses] = []
    reasons: list[str] = []
    ended_twice = trio.Event()

    async def served(member: MemberProcess) -> None:
        reasons.append(member.reason)

    def is_wanted() -> bool:
        if processes_of[0].all[0].restarts == 2:
            ended_twice.set()
        return True

    async def main() -> None:
        plan = MemberPlan(tmp_path, tmp_path / "s", [sys.executable, "-c", code], is_wanted)
        with trio.fail_after(60):
            async with open_children([plan], served) as processes:
                processes_of.append(processes)
                [member] = processes.all
                await ended_twice.wait()
                assert member.reason == "the disk failed"
                assert reasons == [""]

    trio.run(main)


def test_what_a_process_of_a_later_release_says_besides_is_passed_over(tmp_path: Path) -> None:
    code = """
import os, sys, time
os.write(int(sys.argv[1]), b'{"progress": 1}\\n[1, 2]\\nodd\\n["unix:/nowhere"]\\n')
time.sleep(600)
"""
    plan = MemberPlan(tmp_path, tmp_path / "s", [sys.executable, "-c", code])

    async def main() -> None:
        with trio.fail_after(30):
            async with open_children([plan], nothing) as processes:
                await processes.wait_settled()
                assert processes.all[0].addresses == ["unix:/nowhere"]

    trio.run(main)


def test_a_reason_of_any_length_and_kind_is_one_line_to_the_parent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for reason in ("short", "\n\x01" * 5000, "ü" * 5000):
            report_failure(theirs.fileno(), reason)
            line = ours.recv(1 << 20)
            assert len(line) <= REPORT_BYTES_MAX
            assert (line[-1:], line.count(b"\n")) == (b"\n", 1)
            assert reason.startswith(msgspec.json.decode(line, type=str))
    report_failure(theirs.fileno(), "to nobody")


def test_children_of_a_cancelled_block_end_cleanly_and_are_waited_for(tmp_path: Path) -> None:
    code = """
import os, signal, sys, time
def end(*_):
    time.sleep(0.3)
    open("ended", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
os.write(int(sys.argv[1]), b"[]\\n")
time.sleep(600)
"""
    plan = MemberPlan(tmp_path, tmp_path / "s", [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}){code}"])

    async def main() -> None:
        with trio.fail_after(30):
            with trio.CancelScope() as scope:
                async with open_children([plan], nothing) as processes:
                    await processes.wait_settled()
                    scope.cancel()
                    await trio.sleep_forever()
            [member] = processes.all
            assert member.process is not None
            assert member.process.returncode == 0
            assert (tmp_path / "ended").exists()

    trio.run(main)


def test_news_from_two_tasks_reach_a_child_one_after_the_other(tmp_path: Path) -> None:
    code = """
import os, socket, sys
parent = socket.socket(fileno=int(sys.argv[1]))
parent.sendall(b"[]\\n")
heard = b""
while heard.count(b"\\n") < 2:
    heard += parent.recv(4096)
open("heard", "wb").write(heard)
"""
    plan = MemberPlan(tmp_path, tmp_path / "s", [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}){code}"])

    async def main() -> None:
        with trio.fail_after(30):
            async with open_children([plan], nothing) as processes:
                await processes.wait_settled()
                [member] = processes.all
                process = member.process
                assert process is not None
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(member.tell, "one")
                    nursery.start_soon(member.tell, "two")
                await process.wait()
        lines = (tmp_path / "heard").read_bytes().split()
        assert sorted(lines) == [b'"one"', b'"two"']

    trio.run(main)


SAYS_NEWS = """
import os, sys, time
descriptor = int(sys.argv[1])
os.write(descriptor, b'[]\\n{"count": 1, "notes": "' + b"x" * 100_000 + b'"}\\n{"count": 2}\\n')
while not os.path.exists("end"):
    time.sleep(0.01)
"""


def test_figures_of_a_process_are_those_that_it_said_last_and_end_with_it(tmp_path: Path) -> None:
    code = f"import os; os.chdir({str(tmp_path)!r}){SAYS_NEWS}"
    plan = MemberPlan(tmp_path, tmp_path / "s", [sys.executable, "-c", code])

    async def main() -> None:
        with trio.fail_after(30):
            async with open_children([plan], nothing) as processes:
                await processes.wait_settled()
                [member] = processes.all
                while member.news != {"count": 2}:  # noqa: ASYNC110 - a process of its own says it
                    await trio.sleep(0.01)
                (tmp_path / "end").touch()
                while member.is_serving:  # noqa: ASYNC110
                    await trio.sleep(0.01)
                assert member.news == {}

    trio.run(main)


def test_figures_are_said_when_they_have_changed() -> None:
    figures = {"count": 1}

    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        async with open_parent(theirs.detach()) as parent, trio.open_nursery() as nursery:
            nursery.start_soon(parent.keep_telling, lambda: dict(figures))
            for count in (1, 2):
                figures["count"] = count
                await trio.sleep(3 * NEWS_EVERY_S)
                assert ours.recv(1000) == b'{"count":%d}\n' % count
            nursery.cancel_scope.cancel()
        ours.close()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("is_stopping", [False, True])
def test_the_end_of_the_parent_stops_a_process_once(monkeypatch: pytest.MonkeyPatch, is_stopping: bool) -> None:
    """A second signal would end the wait for requests in flight."""
    signals: list[int] = []
    monkeypatch.setattr(os, "kill", lambda _, number: signals.append(number))

    class Stand:
        """A serving process, as far as its parent hears of it."""

        def __init__(self) -> None:
            self.addresses = ["unix:/nowhere"]
            self.stopping = trio.Event()

    async def main() -> None:
        ours, theirs = socket.socketpair()
        running: Any = Stand()
        async with open_parent(theirs.detach()) as parent:
            await parent.report(running)
            assert ours.recv(100) == b'["unix:/nowhere"]\n'
            if is_stopping:
                running.stopping.set()
            ours.close()
            await trio.testing.wait_all_tasks_blocked()

    trio.run(main)
    assert signals == ([] if is_stopping else [signal.SIGTERM])

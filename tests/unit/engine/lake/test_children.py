"""Processes as the parent that keeps them running sees them; other programs are in their place."""

from __future__ import annotations

import sys
from pathlib import Path

import trio

from engine.lake.children import open_children
from engine.lake.member_processes import MemberPlan, MemberProcess
from lakefs.errors import StoreLocked

LOCKED_ONCE = f"""
import os, sys, time
if not os.path.exists("unlocked"):
    open("unlocked", "w").close()
    sys.exit({StoreLocked.exit_code})
os.write(int(sys.argv[1]), b'["unix:/nowhere"]\\n')
time.sleep(600)
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

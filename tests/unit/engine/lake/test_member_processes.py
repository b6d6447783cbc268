"""Members' processes as their parent sees them; the members are other programs."""

from __future__ import annotations

import sys
from pathlib import Path

import trio

from engine.lake.member_processes import MemberPlan, MemberProcess, open_member_processes
from lakefs.errors import StoreLocked

LOCKED_ONCE = f"""
import os, sys, time
if not os.path.exists("unlocked"):
    open("unlocked", "w").close()
    sys.exit({StoreLocked.exit_code})
os.write(int(sys.argv[1]), b'["unix:/nowhere"]\\n')
time.sleep(600)
"""


async def nothing(_: MemberProcess) -> None:
    """Record nothing."""


def test_a_member_is_waited_for_while_a_process_of_an_earlier_run_holds_its_lock(tmp_path: Path) -> None:
    code = f"import os; os.chdir({str(tmp_path)!r}){LOCKED_ONCE}"
    plan = MemberPlan(tmp_path, tmp_path / "s", [sys.executable, "-c", code])

    async def main() -> None:
        with trio.fail_after(30):
            async with open_member_processes([plan], nothing) as processes:
                await processes.wait_settled()
                [member] = processes.members
                assert member.is_serving
                assert member.restarts == 1
                assert member.addresses == ["unix:/nowhere"]

    trio.run(main)

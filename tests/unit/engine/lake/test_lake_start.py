"""The start of a lake on several folders, with members that are other programs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import trio

from engine.lake.lake_process import LakeOptions, run_lake
from lakefs.config.settings import load


def silent_member(folder: Path, socket: Path, lake_id: bytes, address: object) -> Sequence[str]:
    """A member that runs and never serves."""
    return ["sh", "-c", f"touch {folder}/runs; exec sleep 600"]


def test_a_signal_ends_a_start_that_waits_for_a_member(tmp_path: Path) -> None:
    folders = [tmp_path / f"d{number}" for number in range(2)]
    settings = {"protect": "1+1", "s3": "off", "admin": "off", "socket": str(tmp_path / "s")}
    config = load(file=os.devnull, flags={"data": tuple(map(str, folders)), **settings})
    printed: list[str] = []

    def wait_for_members() -> None:
        while not all((folder / "runs").exists() for folder in folders):
            time.sleep(0.01)

    async def stop_when_members_run() -> None:
        await trio.to_thread.run_sync(wait_for_members, abandon_on_cancel=True)
        os.kill(os.getpid(), signal.SIGTERM)

    async def main() -> None:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stop_when_members_run)
                await run_lake(
                    config, printer=printed.append, member_command=silent_member, options=LakeOptions(accept_loss=True)
                )

    trio.run(main)
    assert printed == ["stopped"]

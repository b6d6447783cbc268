"""Engines and clients killed while many write, round after round on one store.

After each round: every acknowledged name has its bytes, what was not acknowledged is whole or absent, and the store
checks out.  At the end nothing of what was interrupted takes room.

`LAKE_CRASH_ROUNDS` sets the number of rounds (20), `LAKE_CRASH_SEED` what they do; a failing seed is printed.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.crash.quiet_store import inspect
from tests.crash.store_check import check_store, check_writer
from tests.crash.writer import write
from tests.e2e.served import Served

TORTURE = bool(os.environ.get("LAKE_TORTURE"))
ROUNDS = int(os.environ.get("LAKE_CRASH_ROUNDS", "200" if TORTURE else "20"))
SEED = os.environ.get("LAKE_CRASH_SEED", "") or str(random.SystemRandom().randrange(10**9))
WRITERS = ("ann", "bob", "cat")


@pytest.mark.slow
def test_no_acknowledged_change_is_lost_whoever_is_killed() -> None:
    generator = random.Random(SEED)
    with TemporaryDirectory(prefix="lake-") as name:
        folder = Path(name)
        engine = Served(folder)
        engine.good("bucket", "create", "crash")
        try:
            for number in range(ROUNDS):
                where = f"LAKE_CRASH_SEED={SEED}, round {number}"
                kill_in_the_middle(engine, folder, generator, f"{SEED} {number}")
                engine.start()
                for writer in WRITERS:
                    check_writer(engine.server, folder / f"{writer}.journal", writer, where)
                check_store(engine.server, WRITERS, where)
        finally:
            if engine.process is not None and engine.process.poll() is None:
                engine.kill()
        left = inspect(engine.data)
        assert left.fsck["damage"] == 0, left.fsck
        assert left.leaked_bytes <= 0, left


def kill_in_the_middle(engine: Served, folder: Path, generator: random.Random, seed: str) -> None:
    """Let writers write until a number of acknowledgements has arrived; then end the engine, after some of them."""
    fork = multiprocessing.get_context("fork")
    reading, writing = os.pipe()
    writers = [
        fork.Process(target=write, args=(engine.server, writer, seed, folder / f"{writer}.journal", writing))
        for writer in WRITERS
    ]
    for process in writers:
        process.start()
    os.close(writing)
    wanted = generator.randrange(3, 60)
    while wanted > 0 and (told := os.read(reading, wanted)):
        wanted -= len(told)
    for process in generator.sample(writers, generator.choice((0, 0, 1, 3))):
        process.kill()
    if generator.random() < 0.2:
        assert engine.stop() == 0
    else:
        engine.kill()
    for process in writers:
        process.kill()  # a writer that waits for the engine need not wait any longer
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), f"a writer failed: {process.exitcode}"
    os.close(reading)

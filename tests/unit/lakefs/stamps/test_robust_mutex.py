"""The mutex of stamps: readers see the end of an engine, in whatever way it ends, before another can have its lock.

An engine of these tests is a child process that holds a lock file with `flock`, as an engine holds its store.
"""

from __future__ import annotations

import fcntl
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from engine.format.layouts import Op, Table
from engine.memory.sealed_memory import SealedMemory
from lakefs.stamps.stamps import StampMemory, StampReader, memory_bytes

COUNT: Final = 1 << 10
KILLS: Final = 50
RECORD: Final = (Table.NAMES, b"a")


def _made() -> tuple[SealedMemory, StampMemory]:
    memory = SealedMemory("stamps", memory_bytes(COUNT))
    stamps = StampMemory(memory.view, (Table.NAMES,))
    stamps.begin()
    return memory, stamps


@contextmanager
def _engine(lock: Path, live: Callable[[StampMemory], None]) -> Iterator[tuple[int, StampReader]]:
    """Run `live` in a child that has the lock and stamps; yield its process and a reader."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        try:
            ours.close()
            fcntl.flock(os.open(lock, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
            memory, stamps = _made()
            for _ in range(3):  # an engine has other threads, which may be the last to end
                threading.Thread(target=threading.Event().wait, daemon=True).start()
            socket.send_fds(theirs, [b"!"], [memory.descriptor])
            live(stamps)
        finally:
            os._exit(0)
    theirs.close()
    try:
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        reader = StampReader(descriptors[0])
        os.close(descriptors[0])
        yield child, reader
    finally:
        ours.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _wait_for(lock: Path) -> None:
    """Take the lock as soon as it is free, then give it up."""
    descriptor = os.open(lock, os.O_RDWR)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                continue
    finally:
        os.close(descriptor)


def _turn_for_ever(stamps: StampMemory) -> None:
    while True:
        stamps.turn([(Op.PUT, *RECORD, b"")])


def test_no_stamp_stands_when_the_lock_of_a_killed_engine_is_free(tmp_path: Path) -> None:
    rng = random.Random(1)
    for number in range(KILLS):
        lock = tmp_path / str(number)
        with _engine(lock, _turn_for_ever) as (child, reader):
            assert reader.is_live
            time.sleep(rng.choice((0.0, rng.random() / 100)))
            os.kill(child, signal.SIGKILL)
            _wait_for(lock)
            assert not reader.is_live


def test_no_stamp_stands_when_the_lock_of_a_stopped_engine_is_free(tmp_path: Path) -> None:
    with _engine(tmp_path / "lock", lambda stamps: stamps.end()) as (_, reader):
        _wait_for(tmp_path / "lock")
        assert not reader.is_live


def test_no_stamp_stands_when_a_process_exits_without_an_end(tmp_path: Path) -> None:
    with _engine(tmp_path / "lock", lambda _: None) as (_, reader):
        _wait_for(tmp_path / "lock")
        assert not reader.is_live


def test_stamps_end_with_the_thread_that_began_them() -> None:
    made: list[tuple[SealedMemory, StampMemory]] = []
    thread = threading.Thread(target=lambda: made.append(_made()))
    thread.start()
    thread.join()
    [(memory, stamps)] = made
    while stamps.is_live:  # the thread has left Python, and is about to leave the kernel
        time.sleep(0.001)
    stamps.end()
    memory.close()


def test_a_forked_child_cannot_end_its_parents_stamps() -> None:
    memory, stamps = _made()
    child = os.fork()
    if not child:
        stamps.end()
        del stamps
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert stamps.is_live
    stamps.end()
    memory.close()


def test_another_thread_ends_stamps_and_leaves_the_mutex_to_its_owner() -> None:
    memory, stamps = _made()
    thread = threading.Thread(target=stamps.end)
    thread.start()
    thread.join()
    assert not stamps.is_live
    stamps.end()
    memory.close()


def test_several_engines_in_one_thread_end_one_by_one_in_any_order() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        made = [_made() for _ in range(3)]
        left = set(order)
        for number in order:
            memory, stamps = made[number]
            stamps.end()
            memory.close()
            left.remove(number)
            assert [stamps.is_live for _, stamps in made] == [number in left for number in range(3)]


# In a process of its own: when memory with a held mutex is unmapped, the thread's list of mutexes leads nowhere.
_FREED = """
import gc, os, sys, threading
sys.path.insert(0, {root!r})
from tests.unit.lakefs.stamps.test_robust_mutex import _made

held = [_made()]
memory = held[0][0]
lent = os.dup(memory.descriptor)

def free():
    held.clear()
    gc.collect()

if {how!r} == "thread":
    thread = threading.Thread(target=free)
    thread.start()
    thread.join()
else:
    free()
memory.close()
del memory
gc.collect()
inode = str(os.fstat(lent).st_ino)
print("mapped" if any(line.split()[4] == inode for line in open("/proc/self/maps")) else "unmapped")
for _ in range(10):
    memories = [_made() for _ in range(3)]
    for memory, stamps in memories:
        stamps.end()
        memory.close()
print("good")
"""


@pytest.mark.parametrize(("how", "left"), [("thread", "mapped"), ("owner", "unmapped")])
def test_memory_is_leaked_if_another_thread_frees_it_and_unmapped_if_its_owner_does(how: str, left: str) -> None:
    root = str(Path(__file__).parents[4])
    done = subprocess.run([sys.executable, "-c", _FREED.format(root=root, how=how)], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [left, "good"], "")

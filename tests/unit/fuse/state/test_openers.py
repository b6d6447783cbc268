"""Programs that have a file open, as `/proc` shows them: real processes, and files of a local folder."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import trio

from fuse.kernel.mount_point import devices_of_mounts
from fuse.state.openers import DESCRIPTORS_MAX, OpenedFile, Program, descriptor_count, program_of
from lakefs.host.offload import InlineOffload

HERE = os.getpid()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file."""
    found = tmp_path / "file"
    found.write_bytes(b"content")
    return found


def opened(path: Path, access: int = os.O_WRONLY, device: str = "") -> OpenedFile:
    """Return how a descriptor shows the file."""
    status = path.stat()
    own = device or f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    return OpenedFile(frozenset({status.st_ino, 1 << 62}), access, own)


def count(program: Program | None, file: OpenedFile) -> int:
    """Return how many descriptors the program has."""
    assert program is not None
    return trio.run(descriptor_count, program, file, InlineOffload())


def test_a_program_is_its_process_whichever_thread_asks() -> None:
    found: list[Program | None] = []
    thread = threading.Thread(target=lambda: found.append(program_of(threading.get_native_id())))
    thread.start()
    thread.join()
    assert [program.process for program in (*found, program_of(HERE)) if program] == [HERE, HERE]
    assert program_of(0) is None, "a process of another namespace"
    assert program_of(-1) is None
    assert program_of((1 << 22) + 1) is None, "no process has such a number"


def test_descriptors_are_counted_by_file_access_and_device(path: Path, tmp_path: Path) -> None:
    program = program_of(HERE)
    assert count(program, opened(path)) == 0
    descriptors = [os.open(path, os.O_WRONLY), os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)]
    descriptors += [os.open(path, os.O_RDONLY), os.open(path, os.O_PATH), os.open(tmp_path, os.O_RDONLY)]
    descriptors.append(os.dup(descriptors[0]))
    try:
        assert count(program, opened(path)) == 3
        assert count(program, opened(path, os.O_RDONLY)) == 1
        assert count(program, opened(path, os.O_RDWR)) == 0
        assert count(program, opened(path, device="9999:1")) == 0
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    assert count(program, opened(path)) == 0


def test_a_process_that_has_ended_and_one_with_its_number_have_nothing(path: Path) -> None:
    with path.open("wb") as output:
        child = subprocess.Popen(["sleep", "100"], stdout=output)
    program = program_of(child.pid)
    assert count(program, opened(path)) == 1
    earlier = Program(child.pid, 0.0)
    assert count(earlier, opened(path)) == 0, "it began after the open"
    child.kill()
    time.sleep(0.1)
    assert count(program, opened(path)) == 0, "not waited for yet"
    child.wait()
    assert count(program, opened(path)) == 0
    assert devices_of_mounts(child.pid) == {}


def test_the_descriptors_of_a_process_whose_first_thread_has_ended_are_its_threads(path: Path) -> None:
    text = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=[60]).start()"
    exit_alone = "ctypes.CDLL(None).syscall(60, 0)"
    with path.open("wb") as output:
        child = subprocess.Popen([sys.executable, "-c", f"{text}; {exit_alone}"], stdout=output)
    try:
        while b"\nState:\tZ" not in Path(f"/proc/{child.pid}/status").read_bytes():
            time.sleep(0.01)
        assert count(program_of(child.pid), opened(path)) == 1
    finally:
        child.kill()
        child.wait()


def test_more_descriptors_than_are_looked_at_count_as_none(path: Path) -> None:
    with path.open("ab") as file:
        assert count(program_of(HERE), opened(path)) == 1
        others = [os.dup(0) for _ in range(100)]
        assert count(program_of(HERE), opened(path)) == 1
        try:
            others += [os.dup(0) for _ in range(DESCRIPTORS_MAX)]
            assert count(program_of(HERE), opened(path)) == 0
        finally:
            for descriptor in others:
                os.close(descriptor)
        assert file.tell() == len(b"content")

"""Sealed memory: a client can only read what it holds of it, in whatever way it opens it again."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from engine.memory.sealed_memory import SealedMemory
from lakefs.errors import EngineBusy
from tests.descriptors import descriptor_count

_PUNCH_AND_KEEP = 0x02 | 0x01


@pytest.fixture
def memory() -> Iterator[SealedMemory]:
    made = SealedMemory("test", 64 << 10)
    made.view[:5] = b"bytes"
    yield made
    made.close()


def _attacks(descriptor: int) -> list[str]:
    """Return the forbidden changes that a process with the descriptor was able to make."""
    done: list[str] = []
    tries: dict[str, Callable[[int], object]] = {
        "write": lambda fd: os.pwrite(fd, b"x", 0),
        "truncate": lambda fd: os.ftruncate(fd, 0),
        "grow": lambda fd: os.ftruncate(fd, 1 << 20),
        "allocate": lambda fd: os.posix_fallocate(fd, 0, 1 << 20),
        "map for writing": lambda fd: mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_WRITE),
        "unseal": lambda fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    }
    for flags in (None, os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_TRUNC):
        try:
            opened = os.dup(descriptor) if flags is None else os.open(f"/proc/{os.getpid()}/fd/{descriptor}", flags)
        except OSError:
            continue
        if _punch(opened):
            done.append(f"punch ({flags})")
        if _remapped_for_writing(opened):
            done.append(f"mprotect ({flags})")
        for name, attempt in tries.items():
            try:
                attempt(opened)
                done.append(f"{name} ({flags})")
            except (OSError, ValueError):
                continue
        os.close(opened)
    return done


def _punch(descriptor: int) -> bool:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.fallocate(descriptor, _PUNCH_AND_KEEP, ctypes.c_long(0), ctypes.c_long(mmap.PAGESIZE)) == 0)


def _remapped_for_writing(descriptor: int) -> bool:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    shared, readable, writable = 1, 1, 2
    at = libc.mmap(None, ctypes.c_size_t(mmap.PAGESIZE), readable, shared, descriptor, ctypes.c_long(0))
    if at in (None, ctypes.c_void_p(-1).value):
        return False
    changed = libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(mmap.PAGESIZE), readable | writable) == 0
    libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(mmap.PAGESIZE))
    return bool(changed)


def test_a_descriptor_of_sealed_memory_cannot_write_truncate_or_punch_also_when_it_is_opened_again(
    memory: SealedMemory,
) -> None:
    assert _attacks(memory.descriptor) == []
    assert bytes(memory.view[:5]) == b"bytes"
    assert os.fstat(memory.descriptor).st_size == 64 << 10


def test_the_attacks_of_that_test_do_harm_where_there_are_no_seals() -> None:
    descriptor = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 64 << 10)
    done = {attack.partition(" (")[0] for attack in _attacks(descriptor)}
    os.close(descriptor)
    assert {"write", "truncate", "grow", "map for writing", "punch", "mprotect"} <= done


def test_another_process_with_the_descriptor_cannot_write_either(memory: SealedMemory) -> None:
    code = (
        "import os, sys\n"
        "fd = int(sys.argv[1])\n"
        "for path in (f'/proc/self/fd/{fd}', f'/proc/{os.getppid()}/fd/{fd}'):\n"
        "    try:\n"
        "        again = os.open(path, os.O_RDWR)\n"
        "        os.pwrite(again, b'other', 0)\n"
        "        sys.exit('wrote')\n"
        "    except OSError: pass\n"
        "print(os.pread(fd, 5, 0).decode())\n"
    )
    argv = [sys.executable, "-c", code, str(memory.descriptor)]
    done = subprocess.run(argv, pass_fds=[memory.descriptor], capture_output=True, text=True, check=True)
    assert done.stdout == "bytes\n"


def test_the_maker_writes_through_its_mapping_and_readers_see_it(memory: SealedMemory) -> None:
    memory.view[:5] = b"fresh"
    assert os.pread(memory.descriptor, 5, 0) == b"fresh"


def test_memory_that_cannot_be_had_is_an_error_and_no_signal() -> None:
    with pytest.raises(EngineBusy, match="cannot be had"):
        SealedMemory("test", 1 << 60)


def test_a_descriptor_that_cannot_be_had_is_told_as_memory_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = descriptor_count()
    monkeypatch.setattr("engine.memory.sealed_memory._reopened", refuse)
    with pytest.raises(EngineBusy, match="cannot be had"):
        SealedMemory("test", 64 << 10)
    assert descriptor_count() == before


def test_memory_is_given_back_when_it_is_closed() -> None:
    made = SealedMemory("test", 1 << 20)
    view = made.view[:10]
    made.close()  # a view is left: the memory lives until that is released
    view[:3] = b"abc"
    view.release()
    again = SealedMemory("test", 1 << 20)
    descriptor = again.descriptor
    again.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)

"""Costs of a piece of work beside time: CPU of server and client processes, bytes that the disk took, memory.

CPU is each process's own accounting, to the nanosecond.  Disk bytes are the block device's own counter (field 7 of
its `stat`, in sectors of 512 bytes): it counts writes of all processes on the machine, so it means something only on
a quiet one.  A file system without a block device of its own (tmpfs, overlay) has no counter.
"""

from __future__ import annotations

import ctypes
import os
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.harness.cpu import cpu_s

SECTOR_BYTES: Final = 512
_WRITTEN_SECTORS: Final = 6
_libc: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Memory:
    """RssAnon, private memory; RssShmem, shared memory that is mapped.  Not the page cache."""

    private_bytes: int
    shared_bytes: int


def memory_of(pids: Iterable[int]) -> Memory:
    """Return the memory of these processes together; a shared page counts in each."""
    found = {"RssAnon": 0, "RssShmem": 0}
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in found:
                found[name] += int(value.split()[0]) << 10
    return Memory(found["RssAnon"], found["RssShmem"])


class Device:
    """The block device below a folder's file system."""

    def __init__(self, folder: Path) -> None:
        number = os.stat(folder).st_dev
        self._folder = folder
        self._stat = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
        self.counts = self._stat.exists()
        """True if there is such a device."""

    def written_bytes(self) -> int:
        """Return the bytes written since the machine started; 0 without a device."""
        if not self.counts:
            return 0
        return int(self._stat.read_text().split()[_WRITTEN_SECTORS]) * SECTOR_BYTES

    def settle(self) -> None:
        """Write out everything that the file system still holds back: syncfs(2)."""
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if _libc.syncfs(descriptor):
                raise OSError(ctypes.get_errno(), "syncfs")
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class Spent:
    """Costs of one piece of work.  `device_bytes`: None if they were not counted."""

    elapsed_s: float
    server_cpu_s: float
    client_cpu_s: float
    device_bytes: int | None
    memory: Memory


def _own_cpu_s() -> float:
    """Return the CPU time of this process and of its children that were waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def account(
    work: Callable[[], object],
    *,
    servers: Callable[[], Sequence[int]],
    clients: Callable[[], Sequence[int]],
    device: Device | None,
) -> Spent:
    """Do the work; return its costs.

    `servers`, `clients`: return processes; called before and after, so that processes started in between count.  This
    process is a client, and so are children that it waits for.  With a `device`, held-back writes are flushed before
    and after, outside the time, so that the figure has this work's bytes and no others.
    """
    if device is not None:
        device.settle()
    written = 0 if device is None else device.written_bytes()
    served_s, asked_s = cpu_s(servers()), cpu_s(clients()) + _own_cpu_s()
    begin = time.perf_counter()
    work()
    elapsed_s = time.perf_counter() - begin
    served_s, asked_s = cpu_s(servers()) - served_s, cpu_s(clients()) + _own_cpu_s() - asked_s
    memory = memory_of(servers())
    if device is None or not device.counts:
        return Spent(elapsed_s, served_s, asked_s, None, memory)
    device.settle()
    return Spent(elapsed_s, served_s, asked_s, device.written_bytes() - written, memory)

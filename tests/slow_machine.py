"""The time for which a machine kept processes from running.  A test of a promised time does not count it.

The kernel counts for each thread how long it was ready to run and waited for a core.  A hypervisor counts for how long
it had the cores for other machines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


class LostTime:
    """Counts from its creation how long this process and the given ones, all threads, waited for a core."""

    def __init__(self, *pids: int) -> None:
        self._pids = (os.getpid(), *pids)
        self._before = self._now()

    def seconds(self) -> float:
        """Return the seconds that were lost, added up over threads; 0 where the kernel does not count them."""
        return max(0.0, self._now() - self._before)

    def _now(self) -> float:
        return _stolen_s() + sum(_waited_s(pid) for pid in self._pids)


@contextmanager
def excused_when_slow(lost_s: float, *pids: int) -> Iterator[None]:
    """Skip a test that fails after this process and the given ones waited longer than `lost_s` for a core.

    It is for tests of limits of time that are short so that the test is: on a machine that stands still for as long,
    what they say is about the machine.
    """
    lost = LostTime(*pids)
    try:
        yield
    except Exception as error:
        waited_s = lost.seconds()
        if waited_s < lost_s:
            raise
        pytest.skip(f"the machine was too slow: its cores were {waited_s:.1f} s away, then {error!r}"[:500])


def _waited_s(pid: int) -> float:
    nanoseconds = 0
    for schedstat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            nanoseconds += int(schedstat.read_text().split()[1])
        except (OSError, IndexError):  # the thread has ended
            continue
    return nanoseconds / 1e9


def _stolen_s() -> float:
    fields = Path("/proc/stat").read_text().partition("\n")[0].split()
    return int(fields[8]) * _TICK_S

"""Mirrored disks of the names: which copies are good, and who may open them.

A machine has some devices; copies lie on up to m + 1 of them.  A list with a number says which copies are good; every
device has one.  A write is answered when all copies of the list have it.  A copy whose device is gone is thrown out by
a list with the next number, durable on enough devices before the next answer.  Two sets of devices, one that a list was
made durable on and one that an opening reads, always share a device.

A state is (devices, process):

- device: (up, number of its list, list as bits, its copy has every acknowledged write);
- process: () when none runs, or (phase, number, list): a list is being written, or the process serves.

An opening makes the highest list that it finds durable as it is, then one with the next number, then serves.  Lists of
the same number are of openings and processes that did not see each other: at most one of them was ever served, so only
copies in all of them count as good.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import and_
from typing import Final, NamedTuple

Device = tuple[int, int, int, int]
Devices = tuple[Device, ...]
Process = tuple[int, int, int] | tuple[()]
State = tuple[Devices, Process]
Step = tuple[str, State]

SETTLING, WRITING, SERVING = 0, 1, 2
"""An opening makes the list that it found durable; a new list is being made durable; the process answers."""


class Rules(NamedTuple):
    """The rules; each can be weakened by itself."""

    opening_wants_enough: bool = True
    opening_wants_more_than_m: bool = True
    opening_settles_the_last_list: bool = True
    opening_writes_a_list: bool = True
    equal_numbers_are_intersected: bool = True
    list_is_durable_first: bool = True
    writes_reach_all_copies: bool = True


AS_DESIGNED: Final = Rules()


class Mirrors:
    """The model: devices, losses to outlive, and the highest number of a list."""

    def __init__(self, devices: int, m: int, last: int, rules: Rules = AS_DESIGNED) -> None:
        self._rules, self._last = rules, last
        self._count, self._copies = devices, min(m + 1, devices)
        wanted = max(devices // 2 + 1, devices - m)
        if rules.opening_wants_more_than_m:
            wanted = min(devices, max(wanted, m + 1))
        self._durable_on = max(devices - wanted + 1, 1)
        self._opens_with = wanted if rules.opening_wants_enough else 1
        if not rules.opening_wants_more_than_m:
            self._durable_on = max(devices - m, 1)

    def initial(self) -> State:
        first = (1 << self._copies) - 1
        devices = tuple((1, 1, first, int(d < self._copies)) for d in range(self._count))
        return devices, (SERVING, 1, first)

    def form(self, state: State) -> State:
        return state

    def broken(self, state: State) -> str | None:
        devices, process = state
        if process and process[0] == SERVING:
            for d, (_, _, _, current) in enumerate(devices):
                if process[2] >> d & 1 and not current:
                    return f"the copy on device {d} is served, and lacks an acknowledged write"
        return None

    def steps(self, state: State) -> Iterator[Step]:
        devices, process = state
        for d, device in enumerate(devices):
            word = "vanishes" if device[0] else "comes back"
            yield f"device {d} {word}", (_put(devices, d, (1 - device[0], *device[1:])), process)
        if not process:
            yield from self._opening(devices)
            return
        yield "the process is killed", (devices, ())
        if process[0] == SERVING:
            yield from self._serving(devices, process)
        else:
            yield from self._listing(devices, process)

    def _opening(self, devices: Devices) -> Iterator[Step]:
        found = [device for device in devices if device[0]]
        if len(found) < self._opens_with:
            return
        number = max(device[1] for device in found)
        lists = {device[2] for device in found if device[1] == number}
        for good in {reduce(and_, lists)} if self._rules.equal_numbers_are_intersected else lists:
            if good & _up(devices):
                word = f"a process opens list {number} of {_named(good)}"
                if self._rules.opening_settles_the_last_list:
                    yield word, (devices, (SETTLING, number, good))
                elif self._rules.opening_writes_a_list or good & ~_up(devices):
                    yield from self._next(word, devices, number, good & _up(devices))
                else:
                    yield word, (devices, (SERVING, number, good))

    def _listing(self, devices: Devices, process: tuple[int, int, int]) -> Iterator[Step]:
        phase, number, good = process
        durable = sum(1 for device in devices if device[1:3] == (number, good))
        for d, (up, has, listed, current) in enumerate(devices):
            if up and (has, listed) != (number, good):
                written = _put(devices, d, (up, number, good, current))
                yield f"list {number} of {_named(good)} is durable on device {d}", (written, process)
        if durable < self._durable_on and self._rules.list_is_durable_first:
            return
        if not self._rules.opening_wants_more_than_m and any(
            device[0] and device[1:3] != process[1:] for device in devices
        ):
            return  # even if all devices that are up have the list, an opening may see none of them
        if phase == WRITING or (not self._rules.opening_writes_a_list and not good & ~_up(devices)):
            yield f"the process serves with list {number}", (devices, (SERVING, number, good))
        elif good & _up(devices):
            yield from self._next("the opening goes on", devices, number, good & _up(devices))

    def _serving(self, devices: Devices, process: tuple[int, int, int]) -> Iterator[Step]:
        _, number, good = process
        up = _up(devices)
        if not good & ~up or (good & up and not self._rules.writes_reach_all_copies):
            after = tuple((*device[:3], (good & up) >> d & 1) for d, device in enumerate(devices))
            yield "a write is acknowledged", (after, process)
        if good & ~up and good & up:
            yield from self._next("copies that are gone are thrown out", devices, number, good & up)
        if good.bit_count() < self._copies and not good & ~up:
            for d, (is_up, has, listed, _) in enumerate(devices):
                if is_up and not good >> d & 1:
                    made = _put(devices, d, (1, has, listed, 1))
                    yield from self._next(f"a copy is made on device {d}", made, number, good | 1 << d)

    def _next(self, word: str, devices: Devices, number: int, good: int) -> Iterator[Step]:
        if number < self._last:
            yield f"{word}: list {number + 1} of {_named(good)}", (devices, (WRITING, number + 1, good))


def _put(devices: Devices, d: int, device: Device) -> Devices:
    return (*devices[:d], device, *devices[d + 1 :])


def _up(devices: Devices) -> int:
    return sum(device[0] << d for d, device in enumerate(devices))


def _named(good: int) -> str:
    return "+".join(str(d) for d in range(good.bit_length()) if good >> d & 1) or "none"

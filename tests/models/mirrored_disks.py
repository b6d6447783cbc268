"""Mirrored disks of the names: which copies are good, and which of them may open by themselves.

The rules of `engine.mirror.good_copies`, `list_choice`, `mirror_opening` and `new_copy`, in small.  A machine has some
devices; copies lie on up to m + 1 of them.  A list says which copies are good; each of these has it.  It knows which
lists it came from, and nothing else about others: two lists may be made from one by processes that did not see each
other.  A change is answered when all good copies have it.  A copy that fails is left out of the next list, which is
durable on all copies that it names before the answer.

A state is (devices, lists, process, blanks):

- device: (up, list that readers see, list that a power loss leaves, its copy has all that was answered); a list is its
  number in `lists`, -1 for none: an empty device, or a new copy that has no list yet;
- list: (copies as bits, copies of it that are lost for ever, lists it came from as bits); a list that no device has and
  no process writes is forgotten;
- process: () when none runs, or (phase, list, wanted, asked, failed, good, before), sets of copies as bits.  A list is
  being written on the `wanted`; those `asked` have not answered yet.  `good` are those that answered before, none while
  it opens.  `before` are the copies, and how many are lost, of each list that a device may have as its newest;
- blanks: how many devices may still be replaced by empty ones.

A device that vanishes may come back as it was, or without what it had not synced: so a power loss is no step by itself.
Devices that are exchanged are the same state.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import groupby, permutations, product
from typing import Final, NamedTuple

Device = tuple[int, int, int, int]
Devices = tuple[Device, ...]
List = tuple[int, int, int]
Lists = tuple[List, ...]
Copies = tuple[int, int]
"""Copies as bits, and how many more are lost."""
Running = tuple[int, int, int, int, int, int, tuple[Copies, ...]]
Process = Running | tuple[()]
State = tuple[Devices, Lists, Process, int]
Step = tuple[str, State]

SETTLING, WRITING, SERVING = 0, 1, 2
"""An opening makes the list it chose durable as it is; a list is written on all its copies; the process answers."""


class Rules(NamedTuple):
    """The rules; each can be weakened by itself."""

    contradicted_lists_do_not_count: bool = True
    only_lists_that_count_replace_others: bool = True
    opening_wants_more_than_half: bool = True
    opening_syncs_what_it_reads: bool = True
    opening_settles_the_list: bool = True
    settled_on_more_than_half: bool = True
    at_most_half_is_left_out: bool = True
    unfinished_lists_count_too: bool = True
    list_is_durable_first: bool = True
    changes_reach_all_copies: bool = True
    failure_of_a_new_copy_waits: bool = True


AS_BUILT: Final = Rules()


class Mirrors:
    """The model: devices, losses to outlive, and how many devices may be replaced by empty ones."""

    def __init__(self, devices: int, m: int, blanks: int, rules: Rules = AS_BUILT, *, stale_only: bool = False) -> None:
        """`stale_only`: look for stale copies, not for copies that are all there and do not open."""
        self._rules, self._blanks, self._count, self._stale_only = rules, blanks, devices, stale_only
        self._copies = min(m + 1, devices)

    def initial(self) -> State:
        first = (1 << self._copies) - 1
        devices = tuple((1, 0, 0, 1) if d < self._copies else (1, -1, -1, 0) for d in range(self._count))
        return devices, ((first, 0, 0),), (SERVING, 0, 0, 0, 0, first, ()), self._blanks

    def form(self, state: State) -> State:
        keys = [_key(state, d) for d in range(self._count)]
        order = sorted(range(self._count), key=keys.__getitem__)
        ties = [tuple(permutations(tied)) for _, tied in groupby(order, key=keys.__getitem__)]
        return min(_exchanged(state, sum(chosen, ())) for chosen in product(*ties))

    def broken(self, state: State) -> str | None:
        devices, lists, process, _ = state
        if process and process[0] == SERVING:
            for d, (_, _, _, current) in enumerate(devices):
                if process[5] >> d & 1 and not current:
                    return f"the copy on device {d} is served, and lacks something that was answered"
        is_all_there = lists and all(device[0] for device in devices) and not any(lost for _, lost, _ in lists)
        if is_all_there and not process and not self._stale_only and self._chosen(devices, lists) is None:
            return "all copies are there, and do not open"
        return None

    def steps(self, state: State) -> Iterator[Step]:
        devices, lists, process, blanks = state
        for d in range(self._count):
            yield from self._device(d, state)
        if not process:
            yield from self._opening(devices, lists, blanks)
            return
        yield "the process is killed", _kept(devices, lists, (), blanks)
        if process[0] == SERVING:
            yield from self._serving(devices, lists, process, blanks)
            return
        yield from self._listing(devices, lists, process, blanks)
        if process[0] == WRITING and process[5]:
            yield from self._answering(devices, lists, process, blanks)

    # --- devices -----------------------------------------------------------------------------------------

    def _device(self, d: int, state: State) -> Iterator[Step]:
        devices, lists, process, blanks = state
        up, seen, kept, current = devices[d]
        if up:
            for left in {seen, kept}:
                word = f"device {d} vanishes" if left == seen else f"device {d} vanishes, and forgets its list"
                yield word, _kept(_put(devices, d, (0, left, left, current)), lists, process, blanks)
            return
        yield f"device {d} comes back", (_put(devices, d, (1, seen, kept, current)), lists, process, blanks)
        is_used = process and (process[2] | process[5]) >> d & 1
        if blanks and not is_used and (seen >= 0 or any(one[0] >> d & 1 for one in lists)):
            yield f"device {d} is replaced by an empty one", _emptied(d, devices, lists, process, blanks - 1, 0)

    # --- opening -----------------------------------------------------------------------------------------

    def _opening(self, devices: Devices, lists: Lists, blanks: int) -> Iterator[Step]:
        chosen = self._chosen(devices, lists)
        if chosen is None:
            return
        listed, used = chosen
        word = f"a process opens list {listed} with {_named(used)}"
        if self._rules.opening_syncs_what_it_reads:
            devices = tuple((up, seen, seen if up else kept, current) for up, seen, kept, current in devices)
        behind = sum(1 << d for d in _bits(used) if devices[d][1] != listed)
        if behind and self._rules.opening_settles_the_list:
            yield word, _kept(devices, lists, (SETTLING, listed, used, behind, 0, 0, ()), blanks)
        else:
            yield word, self._next(devices, lists, listed, used, (lists[listed][:2],), 0, blanks)

    def _chosen(self, devices: Devices, lists: Lists) -> tuple[int, int] | None:
        """Return the list that an opening chooses, and its copies that are there."""
        up = [d for d, device in enumerate(devices) if device[0]]
        held = {d: devices[d][1] for d in up if devices[d][1] >= 0}
        counting = found = set(held.values())
        if self._rules.contradicted_lists_do_not_count:
            counting = {x for x in found if all(_came(lists, held[d], x) for d in held if lists[x][0] >> d & 1)}
        later = counting if self._rules.only_lists_that_count_replace_others else found
        newest = [x for x in counting if not any(y != x and _came(lists, y, x) for y in later)]
        if len(newest) != 1:
            return None
        copies, lost, _ = lists[newest[0]]
        used = sum(1 << d for d in up if copies >> d & 1)
        is_enough = 2 * used.bit_count() > copies.bit_count() + lost or not self._rules.opening_wants_more_than_half
        return (newest[0], used) if used and is_enough else None

    # --- lists -------------------------------------------------------------------------------------------

    def _next(
        self,
        devices: Devices,
        lists: Lists,
        listed: int,
        wanted: int,
        before: tuple[Copies, ...],
        good: int,
        blanks: int,
    ) -> State:
        """Begin to write the list that follows `listed`, or stop."""
        counted = before if self._rules.unfinished_lists_count_too else before[:1]
        if not wanted or (
            self._rules.at_most_half_is_left_out
            and any(2 * (copies & wanted).bit_count() < copies.bit_count() + lost for copies, lost in counted)
        ):
            return _kept(devices, lists, (), blanks)
        following = (*lists, (wanted, 0, lists[listed][2] | 1 << listed))
        own = (wanted, 0)
        process = (WRITING, len(lists), wanted, wanted, 0, good, before if own in before else (*before, own))
        return _kept(devices, following, process, blanks)

    def _listing(self, devices: Devices, lists: Lists, process: Running, blanks: int) -> Iterator[Step]:
        _, listed, wanted, asked, failed, good, before = process
        if asked == wanted and not self._rules.list_is_durable_first and process[0] == WRITING:
            yield "the process serves", _kept(devices, lists, (SERVING, listed, 0, 0, 0, wanted, ()), blanks)
        for d in _bits(asked):
            up, _, kept, current = devices[d]
            left = asked & ~(1 << d)
            lost = (process[0], listed, wanted, left, failed | 1 << d, good, before)
            if not up:
                yield f"list {listed} fails on device {d}", self._answered(devices, lists, lost, blanks)
                continue
            written = _put(devices, d, (up, listed, listed, current))
            done = (process[0], listed, wanted, left, failed, good, before)
            yield f"list {listed} is durable on device {d}", self._answered(written, lists, done, blanks)
            if kept != listed:
                renamed = _put(devices, d, (up, listed, kept, current))
                word = f"list {listed} is on device {d}, and its sync fails"
                yield word, self._answered(renamed, lists, lost, blanks)

    def _answered(self, devices: Devices, lists: Lists, process: Running, blanks: int) -> State:
        phase, listed, wanted, asked, failed, good, before = process
        if asked:
            return _kept(devices, lists, process, blanks)
        left = wanted & ~failed
        if phase == SETTLING:
            copies, lost, _ = lists[listed]
            if self._rules.settled_on_more_than_half and 2 * left.bit_count() <= copies.bit_count() + lost:
                return _kept(devices, lists, (), blanks)
            return self._next(devices, lists, listed, left, (lists[listed][:2],), 0, blanks)
        if not failed:
            return _kept(devices, lists, (SERVING, listed, 0, 0, 0, wanted, ()), blanks)
        return self._next(devices, lists, listed, left, before, good, blanks)

    # --- answers -----------------------------------------------------------------------------------------

    def _answering(self, devices: Devices, lists: Lists, process: Running, blanks: int) -> Iterator[Step]:
        """Answer a change that found no fault, while a list is written."""
        asked = process[5]
        if self._rules.failure_of_a_new_copy_waits:
            for copies, _ in process[6]:
                asked |= copies
        if not asked & ~_up(devices):
            yield "a change is answered while a list is written", (_changed(devices, asked), lists, process, blanks)

    def _serving(self, devices: Devices, lists: Lists, process: Running, blanks: int) -> Iterator[Step]:
        _, listed, _, _, _, good, _ = process
        up, before = _up(devices), (lists[listed][:2],)
        failing = good & ~up
        if not failing or (good & up and not self._rules.changes_reach_all_copies):
            yield "a change is answered", (_changed(devices, good & up), lists, process, blanks)
        for also in {0, *(1 << d for d in _bits(good & up))}:
            if failing | also and good & ~(failing | also):
                word = f"{_named(failing | also)} thrown out"
                yield word, self._next(devices, lists, listed, good & ~(failing | also), before, good, blanks)
        if good.bit_count() < self._copies and not failing:
            for d in _bits(up & ~good):
                if devices[d][1] < 0:
                    made = _emptied(d, devices, lists, process, blanks, 1)
                    added = made[2]
                    assert added, "the process goes on"
                    before = (made[1][added[1]][:2],)
                    new = self._next(made[0], made[1], added[1], good | 1 << d, before, good, blanks)
                    yield f"a copy is made on device {d}", new


def _kept(devices: Devices, lists: Lists, process: Process, blanks: int) -> State:
    """Return the state without lists that nobody has, the others numbered as they are met."""
    order: list[int] = []
    for _, seen, kept, _ in devices:
        order += [one for one in (seen, kept) if one >= 0 and one not in order][: 2 if seen != kept else 1]
    if process and process[1] not in order:
        order.append(process[1])
    if order == list(range(len(lists))):
        return devices, lists, process, blanks
    number = {one: position for position, one in enumerate(order)} | {-1: -1}
    left = tuple(
        (*lists[one][:2], sum(1 << position for position, other in enumerate(order) if lists[one][2] >> other & 1))
        for one in order
    )
    devices = tuple((up, number[seen], number[kept], current) for up, seen, kept, current in devices)
    if process:
        process = (process[0], number[process[1]], *process[2:])
    return devices, left, process, blanks


def _emptied(d: int, devices: Devices, lists: Lists, process: Process, blanks: int, current: int) -> State:
    """Return the state with an empty copy on the device; the one that was there is lost to all lists."""
    bit = 1 << d
    lists = tuple((one[0] & ~bit, one[1] + 1, one[2]) if one[0] & bit else one for one in lists)
    if process:
        before = tuple((copies & ~bit, lost + 1) if copies & bit else (copies, lost) for copies, lost in process[6])
        process = (*process[:6], before)
    return _kept(_put(devices, d, (devices[d][0], -1, -1, current)), lists, process, blanks)


def _key(state: State, d: int) -> tuple[int, ...]:
    """Return facts about a device that do not depend on its number."""
    (up, seen, kept, current), lists, process = state[0][d], state[1], state[2]
    held = lists[seen][0].bit_count() if seen >= 0 else 0
    named = sum(one[0] >> d & 1 for one in lists)
    used = process[2:6] if process else ()
    return (up, current, seen >= 0, seen != kept, held, named, *(copies >> d & 1 for copies in used))


@cache
def _masks(order: tuple[int, ...]) -> tuple[int, ...]:
    """Return each set of devices when these take the places 0, 1, ..."""
    return tuple(sum(1 << place for place, d in enumerate(order) if mask >> d & 1) for mask in range(1 << len(order)))


def _exchanged(state: State, order: tuple[int, ...]) -> State:
    devices, lists, process, blanks = state
    to = _masks(order)
    lists = tuple((to[copies], lost, came) for copies, lost, came in lists)
    if process:
        phase, listed, wanted, asked, failed, good, before = process
        moved = tuple((to[copies], lost) for copies, lost in before)
        process = (phase, listed, to[wanted], to[asked], to[failed], to[good], moved)
    return _kept(tuple(devices[d] for d in order), lists, process, blanks)


def _came(lists: Lists, one: int, other: int) -> bool:
    return one == other or bool(lists[one][2] >> other & 1)


def _put(devices: Devices, d: int, device: Device) -> Devices:
    return (*devices[:d], device, *devices[d + 1 :])


def _changed(devices: Devices, copies: int) -> Devices:
    return tuple((up, seen, kept, current & copies >> d) for d, (up, seen, kept, current) in enumerate(devices))


def _up(devices: Devices) -> int:
    return sum(device[0] << d for d, device in enumerate(devices))


def _bits(mask: int) -> list[int]:
    return [d for d in range(mask.bit_length()) if mask >> d & 1]


def _named(mask: int) -> str:
    return "+".join(str(d) for d in _bits(mask)) or "none"

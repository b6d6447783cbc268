"""The log of groups in the coordinator: replicas of the names of which one leads, parts, trimming, crashes.

A group has one or two parts, each put by one transaction that compares the leader's key; the header is in the last
part.  Every request that was sent may arrive at any time, any number of times, and its answer may be lost: so it stays
under way, and may also never arrive.  The leader's key may be gone at any time, as if its lease had run out: a leader
that is only slow does not know it.  (`leases` has the time, and the reads.)

A state is (coordinator, requests under way, replicas, acknowledged, budget):

- coordinator: (term of the last leader, who has the key or NOBODY, log, groups trimmed); the log has for each sequence
  the groups whose first and second part lie there, 0 for none;
- request: (term, index in the log, part, group): a put, or of -group, the removal of a leftover; where TRIMS stands for
  the part, the removal of a group that these replicas, as bits, have said that they have;
- replica: (phase, term, groups in memory, group under way, its parts that are done, journal, synced, said);
  `synced` is a length of the journal, and `said` what the replica's record says of it;
- acknowledged: the group that was acknowledged at each index of the log, 0 for none;
- budget: (groups, losses of a disk) still to come.

A group is a number, odd for two parts.  -group is one of which a part is missing.  Replicas that are exchanged are the
same state.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Final, NamedTuple

Groups = tuple[int, ...]
Log = tuple[tuple[int, int], ...]
Coordinator = tuple[int, int, Log, int]
Request = tuple[int, int, int, int]
Requests = frozenset[Request]
Replica = tuple[int, int, Groups, int, int, Groups, int, int]
Replicas = tuple[Replica, ...]
Budget = tuple[int, int]
State = tuple[Coordinator, Requests, Replicas, Groups, Budget]
Step = tuple[str, State]

NOBODY: Final = -1
LOST, FOLLOWS, READS, CLEARS, LEADS, REFUSED = range(6)
"""Its disk is empty; it follows the log; it has the key and is to read the log; it removes a leftover; it serves; it
was refused though it has the key."""
TRIMS: Final = 2
_NOTHING: Final = (0, 0)


class Rules(NamedTuple):
    """The rules; each can be weakened by itself."""

    append_compares_the_leader: bool = True
    append_compares_the_part: bool = True
    parts_go_in_order: bool = True
    last_part_is_acknowledged: bool = True
    taken_is_done_with_equal_bytes: bool = True
    part_is_no_group: bool = True
    key_comes_before_the_reading: bool = True
    leader_reads_to_the_end: bool = True
    reading_begins_at_its_own_end: bool = True
    old_replicas_do_not_lead: bool = True
    trimming_is_recorded: bool = True
    """The log says up to where it was trimmed; else its lowest key is taken for that."""
    only_groups_behind_the_trimmed_are_taken: bool = True
    """A part that arrives once more when its group was trimmed is in the log again."""
    leftovers_are_removed: bool = True
    removal_compares_the_part: bool = True
    journal_follows_the_log: bool = True
    trimmed_behind_two: bool = True
    trimmed_behind_syncs: bool = True
    trimming_compares_the_records: bool = True
    new_replicas_say_so_first: bool = True


AS_DESIGNED: Final = Rules()


class GroupLog:
    """The model: replicas, groups that clients bring, leaders, and disks that are lost."""

    def __init__(
        self, replicas: int = 2, rules: Rules = AS_DESIGNED, *, groups: int = 2, leaders: int = 2, losses: int = 1
    ) -> None:
        self._count, self._rules = replicas, rules
        self._groups, self._leaders, self._losses = groups, leaders, losses

    def initial(self) -> State:
        replica = (FOLLOWS, 0, (), 0, 0, (), 0, 0)
        return (0, NOBODY, (), 0), frozenset(), (replica,) * self._count, (), (self._groups, self._losses)

    def form(self, state: State) -> State:
        (term, holder, log, trimmed), requests, replicas, acknowledged, budget = state
        if self._rules.append_compares_the_leader and self._rules.taken_is_done_with_equal_bytes:
            # Those of earlier leaders do nothing any more, and that their sender may learn so is a restart.
            requests = frozenset(request for request in requests if request[0] == term and holder != NOBODY)
        order = sorted(range(self._count), key=lambda r: (replicas[r], r == holder))
        holder = order.index(holder) if holder != NOBODY else NOBODY
        if any(request[2] == TRIMS for request in requests):
            requests = frozenset(_renamed(request, order) for request in requests)
        exchanged = tuple(replicas[r] for r in order)
        return (term, holder, log, trimmed), requests, exchanged, acknowledged, budget

    # --- promises ----------------------------------------------------------------------------------------

    def broken(self, state: State) -> str | None:
        (term, holder, log, trimmed), _, replicas, acknowledged, _ = state
        for r, (phase, own, memory, _, _, journal, _, _) in enumerate(replicas):
            if phase == REFUSED:
                return f"replica {r} has the leader's key, and its group was refused"
            if phase == LEADS and own == term and r == holder and not _has(memory, acknowledged):
                return f"leader {r} lacks a group that was acknowledged"
            for groups in (memory, journal):
                if any(group < 0 for group in groups):
                    return f"replica {r} took a part for a group"
                if len(set(groups)) != len(groups):
                    return f"replica {r} has a group twice"
            if any(_whole(log, i) != group for i, group in enumerate(journal) if i >= trimmed):
                return f"the journal of replica {r} is no prefix of the log"
        return _differing(replicas, acknowledged) or _missing(state)

    # --- steps -------------------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[Step]:
        (term, holder, log, trimmed), requests, replicas, _, _ = state
        if holder != NOBODY:
            yield "the leader's key is gone", ((term, NOBODY, log, trimmed), *state[1:])
        for request in sorted(requests):
            yield from self._trimming(state, request) if request[2] == TRIMS else self._arrival(state, request)
        for r, replica in enumerate(replicas):
            phase = replica[0]
            yield from self._disk(state, r)
            if phase == FOLLOWS:
                yield from self._may_lead(state, r)
            if phase == READS:
                yield self._reading(state, r)
            if phase == LEADS:
                yield from self._leads(state, r)

    def _arrival(self, state: State, request: Request) -> Iterator[Step]:
        """Let a request arrive: with an answer that its sender waits for, or that it never has."""
        (term, holder, log, trimmed), requests, replicas, acknowledged, budget = state
        own, index, part, group = request
        is_leader = own == term and holder != NOBODY
        found = _part(log, index, part)
        if group > 0:
            done = (is_leader or not self._rules.append_compares_the_leader) and (
                not found or not self._rules.append_compares_the_part
            )
            left = group
        else:
            done = is_leader and (found == -group or (bool(found) and not self._rules.removal_compares_the_part))
            left = 0
        after = (term, holder, _with(log, index, part, left), trimmed) if done else state[0]
        behind: State = (after, requests, replicas, acknowledged, budget)
        word = f"{'removal' if group < 0 else 'part'} {part} of group {abs(group)} of term {own} arrives"
        if after != state[0]:
            yield f"{word} at {index}", behind
        for r, replica in enumerate(replicas):
            if replica[1] == own and self._waits_for(replica, request):
                yield f"{word} at {index}, and replica {r} is answered", self._answered(behind, r, request, found, done)

    def _waits_for(self, replica: Replica, request: Request) -> bool:
        phase, _, memory, group, done, _, _, _ = replica
        if phase == CLEARS:
            return request[3] < 0
        return phase == LEADS and request[1:] == (len(memory), done, group)

    def _answered(self, state: State, r: int, request: Request, found: int, done: bool) -> State:
        (term, holder, _, _), _, replicas, _, _ = state
        own, index, _, group = request
        is_leader = own == term and holder != NOBODY
        if group < 0:
            # A removal that was done before finds nothing: that is an answer as well.
            phase = LEADS if is_leader else FOLLOWS
            return _changed(state, r, (phase, own, replicas[r][2] if is_leader else (), 0, 0, *replicas[r][5:]))
        if not done and (is_leader or not self._rules.append_compares_the_leader):
            done = found == group
        if not done and found and not self._rules.taken_is_done_with_equal_bytes:
            done = True
        if done:
            return self._part_is_done(state, r, index)
        return _changed(state, r, _closed(replicas[r], REFUSED if is_leader else FOLLOWS))

    def _part_is_done(self, state: State, r: int, index: int) -> State:
        coordinator, requests, replicas, acknowledged, budget = state
        phase, own, memory, group, done, _, _, _ = replicas[r]
        done += 1
        is_last = done == _parts(group)
        if is_last or not self._rules.last_part_is_acknowledged:
            acknowledged = _acknowledged(acknowledged, index, group)
        if is_last:
            memory, group, done = (*memory, group), 0, 0
        else:
            requests |= {(own, index, done, group)}
        replicas = _put(replicas, r, (phase, own, memory, group, done, *replicas[r][5:]))
        return coordinator, requests, replicas, acknowledged, budget

    def _may_lead(self, state: State, r: int) -> Iterator[Step]:
        (term, holder, log, trimmed), requests, replicas, acknowledged, budget = state
        read_before = not self._rules.key_comes_before_the_reading
        if read_before and (read := self._read(state, r)):
            yield f"replica {r} reads the log to its end", _changed(state, r, (FOLLOWS, 0, read, *replicas[r][3:]))
        if holder == NOBODY and term < self._leaders:
            has_read = read_before and replicas[r][2]
            taken = (LEADS if has_read else READS, term + 1, *replicas[r][2:])
            after = (term + 1, r, log, trimmed)
            word = f"replica {r} takes the leader's key" + (", and serves" if has_read else "")
            yield word, (after, requests, _put(replicas, r, taken), acknowledged, budget)

    def _read(self, state: State, r: int) -> Groups | None:
        """Return what a replica has when it has read the log to its end; None: the log does not reach down to it."""
        (_, _, log, trimmed), _, replicas, _, _ = state
        journal = replicas[r][5]
        low = trimmed
        if not self._rules.trimming_is_recorded:
            low = next((i for i, pair in enumerate(log) if pair != _NOTHING), 0)
        if low > len(journal) and self._rules.old_replicas_do_not_lead:
            return None
        groups, index = journal, max(len(journal), low)
        if not self._rules.leader_reads_to_the_end:
            return groups
        if not self._rules.reading_begins_at_its_own_end:
            index = low
        while taken := self._taken(log, index):
            groups, index = (*groups, taken), index + 1
        return groups

    def _reading(self, state: State, r: int) -> Step:
        (term, holder, log, trimmed), requests, replicas, acknowledged, budget = state
        own = replicas[r][1]
        read = self._read(state, r)
        if read is None:
            kept = NOBODY if holder == r and term == own else holder
            closed = _put(replicas, r, _closed(replicas[r], FOLLOWS))
            word = f"replica {r} is too old, and gives the key back"
            return word, ((term, kept, log, trimmed), requests, closed, acknowledged, budget)
        index = len(read)
        left = _part(log, index, 0)
        phase = LEADS
        if left and self._rules.leftovers_are_removed and self._rules.leader_reads_to_the_end:
            phase = CLEARS
            requests |= {(own, index, 0, -left)}
        replicas = _put(replicas, r, (phase, own, read, 0, 0, *replicas[r][5:]))
        word = f"replica {r} reads the log to its end" + (", and a leftover" if phase == CLEARS else "")
        return word, (state[0], requests, replicas, acknowledged, budget)

    def _taken(self, log: Log, index: int) -> int:
        """Return the group that a reader takes from the log; 0 for none."""
        group = _whole(log, index)
        if not group and not self._rules.part_is_no_group:
            return -_part(log, index, 0)
        return group

    def _leads(self, state: State, r: int) -> Iterator[Step]:
        (term, holder, _, trimmed), requests, replicas, acknowledged, (groups, losses) = state
        _, own, memory, group, _, _, _, _ = replicas[r]
        if not group and groups:
            for parts in (1, 2):
                new = 2 * (self._groups - groups + 1) + parts - 1
                sent = {(own, len(memory), 0, new)}
                if not self._rules.parts_go_in_order:
                    sent |= {(own, len(memory), part, new) for part in range(parts)}
                leading = _put(replicas, r, (LEADS, own, memory, new, 0, *replicas[r][5:]))
                word = f"group {new} of {parts} parts is closed at leader {r}"
                yield word, (state[0], requests | sent, leading, acknowledged, (groups - 1, losses))
        if own == term and r == holder and trimmed < len(memory):
            yield from self._counts(state, r)

    def _counts(self, state: State, r: int) -> Iterator[Step]:
        """Let a leader find that replicas have the first group of the log."""
        (term, _, _, trimmed), requests, replicas, acknowledged, budget = state
        having = {other for other in range(self._count) if replicas[other][7] > trimmed}
        if not self._rules.trimmed_behind_syncs and len(replicas[r][5]) > trimmed:
            having.add(r)
        for counted in combinations(sorted(having), 2 if self._rules.trimmed_behind_two else 1):
            sent = (term, trimmed, TRIMS, sum(1 << other for other in counted))
            if sent not in requests:
                word = f"leader {r} finds group {trimmed} at replicas {counted}"
                yield word, (state[0], requests | {sent}, replicas, acknowledged, budget)

    def _trimming(self, state: State, request: Request) -> Iterator[Step]:
        (term, holder, log, trimmed), _, replicas, _, _ = state
        own, index, _, counted = request
        if own != term or holder == NOBODY or index != trimmed:
            return
        rules = self._rules
        is_said = all(replica[7] > index or not counted >> r & 1 for r, replica in enumerate(replicas))
        if is_said or not (rules.trimming_compares_the_records and rules.trimmed_behind_syncs):
            after = _with(_with(log, index, 0, 0), index, 1, 0)
            yield f"the log is trimmed at {index}", ((term, holder, after, trimmed + 1), *state[1:])

    # --- disks -------------------------------------------------------------------------------------------

    def _disk(self, state: State, r: int) -> Iterator[Step]:
        (_, _, log, trimmed), _, replicas, _, (groups, losses) = state
        phase, own, memory, group, done, journal, synced, said = replicas[r]
        if phase == LOST:
            yield from self._begins_anew(state, r)
            return
        if phase == FOLLOWS and len(journal) < trimmed:
            yield from self._begins_anew(state, r)
        index = len(journal)
        following = 0
        if phase == FOLLOWS and (index >= trimmed or not self._rules.only_groups_behind_the_trimmed_are_taken):
            following = self._taken(log, index)
        if phase in (CLEARS, LEADS):
            following = (*memory, 0)[index] if index <= len(memory) else 0
            if index == len(memory) and not self._rules.journal_follows_the_log:
                following = group
        if following:
            written = (phase, own, memory, group, done, (*journal, following), synced, said)
            yield f"replica {r} writes group {following} to its journal", _changed(state, r, written)
        if synced < index:
            yield (
                f"replica {r} syncs its journal",
                _changed(state, r, (phase, own, memory, group, done, journal, index, said)),
            )
        if said != synced:
            yield f"replica {r} says {synced}", _changed(state, r, (*replicas[r][:7], synced))
        if phase != FOLLOWS:
            yield f"replica {r} restarts", _changed(state, r, _closed(replicas[r], FOLLOWS))
        if synced < index:
            power = (FOLLOWS, 0, (), 0, 0, journal[:synced], synced, said)
            yield f"replica {r} loses its power", _changed(state, r, power)
        if losses:
            lost = _changed(state, r, (LOST, 0, (), 0, 0, (), 0, said))
            yield f"replica {r} loses its disk", (*lost[:4], (groups, losses - 1))

    def _begins_anew(self, state: State, r: int) -> Iterator[Step]:
        trimmed, replicas = state[0][3], state[2]
        said = 0 if self._rules.new_replicas_say_so_first else replicas[r][7]
        for p, (phase, _, _, _, _, journal, synced, _) in enumerate(replicas):
            if p != r and phase != LOST and synced >= trimmed:
                begun = (FOLLOWS, 0, (), 0, 0, journal[:synced], synced, said)
                yield f"replica {r} begins anew from replica {p}", _changed(state, r, begun)


def _renamed(request: Request, order: list[int]) -> Request:
    """Return the request with its replicas at their new places."""
    term, index, part, counted = request
    if part != TRIMS:
        return request
    return term, index, part, sum(1 << place for place, r in enumerate(order) if counted >> r & 1)


def _parts(group: int) -> int:
    return 1 + (group & 1)


def _part(log: Log, index: int, part: int) -> int:
    return log[index][part] if index < len(log) else 0


def _with(log: Log, index: int, part: int, group: int) -> Log:
    """Return the log with a part put or removed; nothing is at its end."""
    pairs = [*log, *[_NOTHING] * (index + 1 - len(log))]
    pairs[index] = (group, pairs[index][1]) if part == 0 else (pairs[index][0], group)
    while pairs and pairs[-1] == _NOTHING:
        del pairs[-1]
    return tuple(pairs)


def _whole(log: Log, index: int) -> int:
    """Return the group whose last part, with the header, is in the log; negative when its first is not; 0: none."""
    if index >= len(log):
        return 0
    first, second = log[index]
    if second:
        return second if first == second else -second
    return first if _parts(first) == 1 else 0


def _closed(replica: Replica, phase: int) -> Replica:
    """Return the replica as it opens again: its memory is what its journal has."""
    return (phase, 0, (), 0, 0, *replica[5:])


def _acknowledged(acknowledged: Groups, index: int, group: int) -> Groups:
    padded = [*acknowledged, *[0] * (index + 1 - len(acknowledged))]
    padded[index] = group if padded[index] in (0, group) else -group
    return tuple(padded)


def _has(groups: Groups, acknowledged: Groups) -> bool:
    return all(i < len(groups) and groups[i] == group for i, group in enumerate(acknowledged) if group)


def _differing(replicas: Replicas, acknowledged: Groups) -> str | None:
    """Return a complaint when two groups were taken, or acknowledged, at one sequence."""
    longest = max((replica[5] for replica in replicas), key=len)
    for replica in replicas:
        if replica[5] != longest[: len(replica[5])]:
            return "two groups at one sequence"
    if any(group < 0 for group in acknowledged):
        return "two groups were acknowledged at one sequence"
    return None


def _missing(state: State) -> str | None:
    """Return a complaint when an acknowledged group can be lost by one more disk."""
    (_, _, log, trimmed), _, replicas, acknowledged, _ = state
    blank = sum(1 for replica in replicas if replica[0] == LOST)
    for i, group in enumerate(acknowledged):
        if not group:
            continue
        if i >= trimmed and _whole(log, i) != group:
            return f"group {group} was acknowledged and is not in the log"
    for i in range(trimmed):
        having = sum(1 for replica in replicas if replica[6] > i)
        if having + blank < 2:
            return "a group was trimmed that fewer than two replicas have"
    return None


def _put(replicas: Replicas, r: int, replica: Replica) -> Replicas:
    return (*replicas[:r], replica, *replicas[r + 1 :])


def _changed(state: State, r: int, replica: Replica) -> State:
    return (*state[:2], _put(state[2], r, replica), *state[3:])

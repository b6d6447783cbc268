"""Reads at the leader of names, under the lease on which its key lives; time is a small number of ticks.

A leader asks for its lease again (a keep-alive), and reads while it is sure to have it.  Both may be late: the request,
and the answer.  A leader that takes no step while ticks pass is one that was stopped.  A clock may lose a tick, once in
a run.  The log is only a number of groups here: `group_log` has the rest.

A state is (coordinator, replicas, acknowledged, clocks):

- coordinator: (term of the last leader, who has the key or NOBODY, ticks left of its lease, groups in the log);
- replica: (phase, term, groups in memory, ticks that it still reads, keep-alive); the keep-alive is (age since it was
  sent, ANSWERED when the coordinator has done it), or () when none is under way; all by the replica's own clock;
- acknowledged: how many groups were;
- clocks: how many ticks may still be lost.

Replicas that are exchanged are the same state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

Coordinator = tuple[int, int, int, int]
KeepAlive = tuple[int, int] | tuple[()]
Replica = tuple[int, int, int, int, KeepAlive]
Replicas = tuple[Replica, ...]
State = tuple[Coordinator, Replicas, int, int]
Step = tuple[str, State]

NOBODY: Final = -1
FOLLOWS, READS_LOG, LEADS = range(3)
SENT, DONE, DONE_WITHOUT = range(3)
"""A keep-alive under way: it was sent; the lease has its whole time again; there was no lease any more."""


class Rules(NamedTuple):
    """The rules; each can be weakened by itself."""

    reads_are_under_the_lease: bool = True
    lease_counts_from_the_sending: bool = True
    a_second_is_left: bool = True
    clocks_count_while_suspended: bool = True
    lost_leases_are_not_renewed: bool = True
    followers_do_not_read: bool = True
    """A follower has a lease as well, and no key on it."""


AS_DESIGNED: Final = Rules()


class Leases:
    """The model: ticks of a lease, groups, and leaders."""

    def __init__(self, ticks: int = 2, rules: Rules = AS_DESIGNED, *, groups: int = 1, leaders: int = 2) -> None:
        self._ticks, self._rules, self._groups, self._leaders = ticks, rules, groups, leaders

    def initial(self) -> State:
        replica = (FOLLOWS, 0, 0, 0, ())
        return (0, NOBODY, 0, 0), (replica, replica), 0, 1

    def form(self, state: State) -> State:
        (term, holder, left, log), (one, other), acknowledged, clocks = state
        if (one, holder == 0) <= (other, holder == 1):
            return state
        holder = 1 - holder if holder != NOBODY else NOBODY
        return (term, holder, left, log), (other, one), acknowledged, clocks

    def broken(self, state: State) -> str | None:
        _, replicas, acknowledged, _ = state
        for r, (phase, _, memory, reads, _) in enumerate(replicas):
            may_read = phase == LEADS or (phase == FOLLOWS and not self._rules.followers_do_not_read)
            if may_read and (reads or not self._rules.reads_are_under_the_lease) and memory < acknowledged:
                return f"replica {r} answers a read without a group that was acknowledged before"
        return None

    def steps(self, state: State) -> Iterator[Step]:
        yield from self._time(state)
        coordinator, replicas, acknowledged, clocks = state
        term, holder, left, log = coordinator
        for r, (phase, own, memory, reads, keep_alive) in enumerate(replicas):

            def behind(replica: Replica, after: Coordinator = coordinator, r: int = r) -> State:
                return after, _put(replicas, r, replica), acknowledged, clocks

            yield from self._keep_alive(state, r)
            if phase == FOLLOWS:
                if memory < log:
                    yield f"replica {r} follows the log", behind((phase, own, memory + 1, reads, keep_alive))
                if holder == NOBODY and term < self._leaders:
                    taken = (term + 1, r, self._ticks, log)
                    yield f"replica {r} takes the leader's key", behind((READS_LOG, term + 1, memory, 0, ()), taken)
            elif phase == READS_LOG:
                yield f"replica {r} reads the log to its end", behind((LEADS, own, log, reads, keep_alive))
            else:
                yield f"replica {r} follows", behind((FOLLOWS, 0, memory, 0, ()))
                if own == term and r == holder and log < self._groups:
                    appended = (term, holder, left, log + 1)
                    led = (phase, own, memory + 1, reads, keep_alive)
                    yield (
                        f"a group of replica {r} is in the log, and acknowledged",
                        (appended, _put(replicas, r, led), log + 1, clocks),
                    )

    def _keep_alive(self, state: State, r: int) -> Iterator[Step]:
        (term, holder, left, log), replicas, acknowledged, clocks = state
        phase, own, memory, reads, keep_alive = replicas[r]

        def behind(keep_alive: KeepAlive, reads: int = reads, left: int = left) -> State:
            replica = (phase, own, memory, reads, keep_alive)
            return (term, holder, left, log), _put(replicas, r, replica), acknowledged, clocks

        if not keep_alive:
            if phase != FOLLOWS or not self._rules.followers_do_not_read:
                yield f"replica {r} sends a keep-alive", behind((0, SENT))
            return
        age, done = keep_alive
        yield f"the keep-alive of replica {r} is lost", behind(())
        if done == SENT:
            if own == term and r == holder:
                yield f"the lease of replica {r} is kept alive", behind((age, DONE), left=self._ticks)
            elif phase == FOLLOWS:
                yield f"the other lease of replica {r} is kept alive", behind((age, DONE))
            else:
                yield f"there is no lease of replica {r} any more", behind((age, DONE_WITHOUT))
        elif done == DONE_WITHOUT and self._rules.lost_leases_are_not_renewed:
            yield f"replica {r} learns that its lease is lost", behind((), 0)
        else:
            since = age if self._rules.lease_counts_from_the_sending else 0
            renewed = self._ticks - since - (1 if self._rules.a_second_is_left else 0)
            yield f"replica {r} has its keep-alive's answer", behind((), max(reads, renewed, 0))

    def _time(self, state: State) -> Iterator[Step]:
        (term, holder, left, log), replicas, acknowledged, clocks = state
        left = max(0, left - 1)
        after = (term, holder if left else NOBODY, left, log)
        yield "a tick", (after, tuple(self._older(replica) for replica in replicas), acknowledged, clocks)
        for r in range(2):
            other = self._older(replicas[1 - r])
            stood = _put(_put(replicas, 1 - r, other), r, replicas[r])
            if clocks:
                yield f"a tick that the clock of replica {r} loses", (after, stood, acknowledged, clocks - 1)
            if not self._rules.clocks_count_while_suspended:
                yield f"a tick while the machine of replica {r} is suspended", (after, stood, acknowledged, clocks)

    def _older(self, replica: Replica) -> Replica:
        phase, own, memory, reads, keep_alive = replica
        if keep_alive:
            keep_alive = (min(keep_alive[0] + 1, self._ticks), keep_alive[1])
        return phase, own, memory, max(0, reads - 1), keep_alive


def _put(replicas: Replicas, r: int, replica: Replica) -> Replicas:
    return (*replicas[:r], replica, *replicas[r + 1 :])

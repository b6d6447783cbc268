"""Stamps across machines: a leader of names, the next one, a head that repeats the leader's counters, and its client.

One name, whose stamp is the version that it is bound to.  The head's memory has the counter and the end of a right to
use it; the client on its machine keeps an answer, and repeats it in three steps, which may be far apart: it loads the
right's end, compares the stamp, and looks at the clock.  What passes from the leader to the head is in order: turns,
answers, rights.  A side that takes no step while ticks pass is one that was stopped, or cannot be reached.  The clock
of the head's machine may lose a tick, once in a run.  The leader keeps the end of the rights that it gave: when its
process is killed, the next one on its machine revokes its lease behind that end, and whoever leads then begins.

A state is (leader, log, answered, on the way, head, client, ticks that may still be lost):

- leader: (ticks left of its lease, version, the head was sent the present one, ticks of the head's right that it gave,
  newest turn that the head has not said, version + 1 of an answer for the head that waits, the next leader has begun,
  ticks to the end of the right that it has kept);
- log: the version that the log has; the next leader begins with it;
- answered: the newest version that any answer has told, with the next leader only what the log has;
- on the way to the head: (TURN, version), (ANSWER, version), (RIGHT, ticks);
- head: (version of its counter, ticks left of its right, age + 1 of its request for a right, turn that it says, turn
  that it has said and not made);
- client: (version that it keeps or -1, (steps taken, ticks left to the end, `answered` when it began, version)).

Where the head joins the next leader, that one takes the place of the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

Leader = tuple[int, int, int, int, int, int, int, int]
Message = tuple[int, int]
Messages = tuple[Message, ...]
Head = tuple[int, int, int, int, int]
Read = tuple[int, int, int, int]
Client = tuple[int, Read]
State = tuple[Leader, int, int, Messages, Head, Client, int]
Step = tuple[str, State]

TURN, ANSWER, RIGHT = range(3)
IDLE, BEGUN, BEHIND, REPEATED = range(4)
"""No read; its first step is done; its second; its answer was wrong."""
_NO_READ: Final = (IDLE, 0, 0, 0)
_NOTHING_KEPT: Final = (-1, _NO_READ)
_NEW_HEAD: Final = (0, 0, 0, 0, 0)


class Rules(NamedTuple):
    """The rules; each can be weakened by itself."""

    changes_wait_for_heads: bool = True
    reads_wait_for_heads: bool = True
    rights_end_with_the_lease: bool = True
    rights_are_given_under_the_lease: bool = True
    rights_count_from_the_sending: bool = True
    rights_end_before_the_lease: bool = True
    rights_end_before_their_record: bool = True
    """The leader waits for longer than the head uses its right: their clocks differ."""
    clocks_count_while_suspended: bool = True
    said_behind_the_turn: bool = True
    end_is_loaded_first: bool = True
    taught_behind_durable: bool = True
    noted_when_read: bool = True
    """The head counts as one that was sent the stamp from the step on in which its answer was read."""
    rights_stay_behind_turns: bool = True
    joining_ends_what_clients_keep: bool = True
    ends_are_kept_before_rights_are_given: bool = True
    restarts_wait_for_the_kept_end: bool = True


AS_DESIGNED: Final = Rules()


class HeadStamps:
    """The model: changes of the name, ticks of a lease and of a right, and messages on the way at once."""

    def __init__(
        self, changes: int = 1, rules: Rules = AS_DESIGNED, *, lease: int = 2, right: int = 2, messages: int = 2
    ) -> None:
        self._rules, self._changes = rules, changes
        self._lease, self._right, self._messages = lease, right, messages

    def initial(self) -> State:
        return (self._lease, 0, 0, 0, 0, 0, 0, 0), 0, 0, (), _NEW_HEAD, _NOTHING_KEPT, 1

    def form(self, state: State) -> State:
        return state

    def broken(self, state: State) -> str | None:
        steps, _, answered, version = state[5][1]
        if steps != REPEATED:
            return None
        if version < answered:
            return f"the client repeats version {version}, and {answered} was told before it began"
        return f"the client repeats version {version}, which is not in the log"

    def steps(self, state: State) -> Iterator[Step]:
        yield from self._time(state)
        yield from self._changing(state)
        yield from self._answering(state)
        yield from self._rights(state)
        yield from self._next_leader(state)
        yield from self._head(state)
        yield from self._client(state)

    # --- leader ------------------------------------------------------------------------------------------

    def _changing(self, state: State) -> Iterator[Step]:
        (lease, version, known, right, owed, answer, following, kept), log, answered, queue, head, client, clocks = (
            state
        )
        if following:
            return
        if version < self._changes and (not known or len(queue) < self._messages):
            new = version + 1
            turned = (*queue, (TURN, new)) if known else queue
            leader = (lease, new, 0, right, new if known else owed, answer, 0, kept)
            word = ", and a turn is sent" if known else ""
            yield f"the leader decides version {new}{word}", (leader, log, answered, turned, head, client, clocks)
        if log < version:
            yield f"the log has version {log + 1}", (state[0], log + 1, answered, queue, head, client, clocks)
        has_turned = not owed or not right
        if answered < version and (has_turned or not self._rules.changes_wait_for_heads):
            yield (
                f"the change to version {version} is answered: visible",
                (state[0], log, version, queue, head, client, clocks),
            )
        if answered < log and (has_turned or not self._rules.changes_wait_for_heads):
            yield f"the change to version {log} is answered", (state[0], log, log, queue, head, client, clocks)
        if answered < log and (has_turned or not self._rules.reads_wait_for_heads):
            yield f"another's read of version {log} is answered", (state[0], log, log, queue, head, client, clocks)

    def _answering(self, state: State) -> Iterator[Step]:
        """Let the leader read for a client of the head, and answer when that is durable."""
        (lease, version, known, right, owed, answer, following, kept), log, answered, queue, head, client, clocks = (
            state
        )
        if following:
            return
        noted = self._rules.noted_when_read
        if lease and not answer:
            leader = (lease, version, 1 if noted else known, right, owed, version + 1, 0, kept)
            yield (
                f"the leader reads version {version} for the head",
                (leader, log, answered, queue, head, client, clocks),
            )
        if not answer or len(queue) == self._messages:
            return
        read = answer - 1
        if (read <= log and (not owed or not right)) or not self._rules.taught_behind_durable:
            sent = (*queue, (ANSWER, read))
            leader = (lease, version, known if noted else 1, right, owed, 0, 0, kept)
            yield f"the head is sent version {read}", (leader, log, answered, sent, head, client, clocks)

    def _rights(self, state: State) -> Iterator[Step]:
        (lease, version, known, right, owed, answer, following, kept), log, answered, queue, head, client, clocks = (
            state
        )
        if following:
            return
        if lease and lease < self._lease:
            leader = (self._lease, version, known, right, owed, answer, 0, kept)
            yield "the leader's lease is kept alive", (leader, log, answered, queue, head, client, clocks)
        if kept < right:
            leader = (lease, version, known, right, owed, answer, 0, right)
            yield "the leader keeps the end of the right", (leader, log, answered, queue, head, client, clocks)
        is_asked = head[2] and not any(kind == RIGHT for kind, _ in queue)
        if not is_asked or len(queue) == self._messages:
            return
        before = 1 if self._rules.rights_end_before_the_lease else 0
        longer = 1 if self._rules.rights_end_before_their_record else 0
        ticks = self._right
        if self._rules.rights_end_with_the_lease and (lease or self._rules.rights_are_given_under_the_lease):
            ticks = min(ticks, lease - before)
        if ticks <= 0 or (not lease and self._rules.rights_are_given_under_the_lease):
            return
        given = (RIGHT, ticks)
        sent = (*queue, given) if self._rules.rights_stay_behind_turns else (given, *queue)
        right = max(right, ticks + longer)
        kept = right if self._rules.ends_are_kept_before_rights_are_given else kept
        leader = (lease, version, known, right, owed, answer, 0, kept)
        yield f"the leader gives a right of {ticks} ticks", (leader, log, answered, sent, head, client, clocks)

    def _next_leader(self, state: State) -> Iterator[Step]:
        leader, log, answered, queue, head, client, clocks = state
        if not leader[6]:
            begun = (0, log, 0, leader[3], 0, 0, 1, 0)
            if not leader[0]:
                yield f"the next leader begins with version {log}", (begun, log, log, queue, head, client, clocks)
            elif not leader[7] or not self._rules.restarts_wait_for_the_kept_end:
                yield (
                    f"the leader is killed, its restart revokes its lease, and the next begins with version {log}",
                    (begun, log, log, queue, head, client, clocks),
                )
            return
        if log < self._changes:
            changed = (0, log + 1, 0, leader[3], 0, 0, 1, 0)
            yield (
                f"the next leader changes to version {log + 1}, and answers",
                (changed, log + 1, log + 1, queue, head, client, clocks),
            )
        joined = (self._lease, log, 0, 0, 0, 0, 0, 0)
        if self._rules.joining_ends_what_clients_keep:
            head, client = _NEW_HEAD, _NOTHING_KEPT
        yield "the head joins the next leader", (joined, log, answered, (), (*head[:2], 0, 0, 0), client, clocks)

    # --- head and client ---------------------------------------------------------------------------------

    def _head(self, state: State) -> Iterator[Step]:
        leader, log, answered, queue, (counter, right, asked, says, turning), client, clocks = state

        def behind(head: Head, queue: Messages = queue) -> State:
            return leader, log, answered, queue, head, client, clocks

        if says:
            owed = 0 if leader[4] <= says else leader[4]
            heard = (*leader[:4], owed, *leader[5:])
            after = (counter, right, asked, 0, turning)
            yield (
                f"the leader hears that version {says} was turned",
                (heard, log, answered, queue, after, client, clocks),
            )
        if turning:
            yield f"the head turns to version {turning}", behind((max(counter, turning), right, asked, says, 0))
            return
        if not asked and not leader[6]:
            yield "the head asks for a right", behind((counter, right, 1, says, 0))
        if not queue:
            return
        (kind, number), queue = queue[0], queue[1:]
        if kind == TURN and self._rules.said_behind_the_turn:
            yield f"the head turns to version {number}", behind((number, right, asked, number, 0), queue)
        elif kind == TURN:
            yield (
                f"the head says that it turned to version {number}",
                behind((counter, right, asked, number, number), queue),
            )
        elif kind == RIGHT:
            since = asked - 1 if self._rules.rights_count_from_the_sending else 0
            until = max(right, number - since, 0)
            yield f"the head has a right for {until} ticks", behind((counter, until, 0, says, 0), queue)
        else:
            head = (max(counter, number), right, asked, says, 0)
            taught = (number, client[1])
            told = max(answered, number) if number <= log else answered
            yield f"the client keeps version {number}", (leader, log, told, queue, head, taught, clocks)

    def _client(self, state: State) -> Iterator[Step]:
        """Take a step of a repeated answer.  One that finds the stamp turned, or the right over, asks the head."""
        leader, log, answered, queue, head, (kept, (steps, end, before, version)), clocks = state

        def behind(read: Read) -> State:
            return leader, log, answered, queue, head, (kept, read), clocks

        loads_first = self._rules.end_is_loaded_first
        if steps == IDLE and kept >= 0:
            if loads_first and head[1]:
                yield (
                    f"the client loads the right's end, {head[1]} ticks ahead",
                    behind((BEGUN, head[1], answered, kept)),
                )
            elif not loads_first and head[0] == kept:
                yield f"the client finds the stamp of version {kept}", behind((BEGUN, 0, answered, kept))
        elif steps == BEGUN and loads_first and head[0] == version:
            yield f"the client finds the stamp of version {version}", behind((BEHIND, end, before, version))
        elif steps == BEGUN and not loads_first and head[1]:
            yield f"the client loads the right's end, {head[1]} ticks ahead", behind((BEHIND, head[1], before, version))
        elif steps == BEHIND and end and (version < before or version > log):
            yield "the client looks at the clock, and repeats its answer", behind((REPEATED, 0, before, version))

    def _time(self, state: State) -> Iterator[Step]:
        (lease, version, known, right, owed, answer, following, kept), log, answered, queue, head, client, clocks = (
            state
        )
        counter, end, asked, says, turning = head
        keeps, (steps, loaded, before, repeated) = client
        older = (max(0, lease - 1), version, known, max(0, right - 1), owed, answer, following, max(0, kept - 1))
        asked = min(asked + 1, self._right + 1) if asked else 0
        after = (counter, max(0, end - 1), asked, says, turning)
        read = (keeps, (steps, max(0, loaded - 1), before, repeated))
        yield "a tick", (older, log, answered, queue, after, read, clocks)
        if clocks:
            yield "a tick that the head's clock loses", (older, log, answered, queue, head, client, clocks - 1)
        if not self._rules.clocks_count_while_suspended:
            yield "a tick while the head's machine is suspended", (older, log, answered, queue, head, client, clocks)

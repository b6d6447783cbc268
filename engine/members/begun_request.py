"""`BegunRequest`: a request to a member that no task waits for; its answer is handed to a function.

A task, with what cancels it, costs more than the rest of a short read.  With many at once, that is most of it.

Rules kept here:
- Errors are those of `Members.call`, and what they say of the member is noted as there.
- `done` is called once, or never after `give_up`.
- Nobody here looks at the clock: the caller does, and calls `expire`.

Used on the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import outcome

from engine.members.member_link import MemberClient, MemberLink
from lakefs.errors import EngineBusy, EngineUnreachable, LakeError
from lakefs.limits import MEMBER_ANSWER_S
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import Request

Done = Callable[[Reply | LakeError], None]


def begin_request(link: MemberLink, request: Request, into: Sequence[memoryview], done: Done) -> BegunRequest | None:
    """Send a request on a link's connection; None if it has none that takes it.  See `BeginningMembers.begin`."""
    client, begins = link.client, link.begins
    if client is None or begins is None:
        return None
    begun = BegunRequest(link, client, done)
    give_up = begins.begin(request, into, begun.answered)
    if give_up is None:
        return None
    begun.sent(give_up)
    return begun


class BegunRequest:
    """A request in flight.  Made by `begin_request`."""

    __slots__ = ("_client", "_done", "_give_up", "_link")

    def __init__(self, link: MemberLink, client: MemberClient, done: Done) -> None:
        self._link = link
        self._client = client
        self._done: Done | None = done
        self._give_up: Callable[[], None] | None = None

    def sent(self, give_up: Callable[[], None]) -> None:
        """Note that the request was sent, and the call that gives it up."""
        self._give_up = give_up
        self._link.begin()

    def give_up(self) -> None:
        """See `Begun`."""
        if self._end() is not None and self._give_up is not None:
            self._give_up()

    def expire(self) -> None:
        """See `Begun`."""
        done = self._end()
        if done is None:
            return
        if self._give_up is not None:
            self._give_up()
        self._link.lose(self._client, EngineUnreachable(f"a request was not answered within {MEMBER_ANSWER_S:g} s"))
        done(lost_error(self._link))

    def answered(self, result: outcome.Outcome[Reply]) -> None:
        """Take the answer of the connection."""
        done = self._end()
        if done is None:
            return
        if isinstance(result, outcome.Value):
            done(result.value)
            return
        assert isinstance(result, outcome.Error), "there is nothing else"
        assert isinstance(result.error, LakeError), "connections answer with replies or LakeErrors"
        done(self._noted(result.error))

    def _noted(self, error: LakeError) -> LakeError:
        """Note what an error says of the member; return the error for the caller."""
        if isinstance(error, EngineUnreachable) or (isinstance(error, EngineBusy) and self._client.draining):
            self._link.lose(self._client, error)
            return lost_error(self._link)
        return error

    def _end(self) -> Done | None:
        """End the request; return what is to be called, None if it has ended before."""
        done, self._done = self._done, None
        if done is not None:
            self._link.end()
        return done


def lost_error(link: MemberLink) -> EngineUnreachable:
    """Return the error for a request whose connection was lost."""
    reason = "" if link.away is None else link.away.message
    member = link.member.hex()
    return EngineUnreachable(reason or f"member {member[:12]}: the connection was lost", subject=member)

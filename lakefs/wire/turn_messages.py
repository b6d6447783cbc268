"""Messages by which a head of a lake repeats the stamps of the names that lead; see `lakefs.wire.messages`.

Only names that lead answer them (FEATURE_TURNS).  A head follows the turns over one connection of its own, and joins
each client's connection to them: stamps in the answers on that connection are of the turns that it has joined.
"""

from __future__ import annotations

from lakefs.wire.base import Done, Message, Request


class TurnsOpened(Message, frozen=True):
    """The id of the turns that this connection follows."""

    turns: bytes


class OpenTurns(Request, frozen=True):
    """Follow the turns of stamps over this connection, which follows none yet.

    `base` is added to the value of each stamp that is sent.  A head takes a higher one each time, higher than all
    values that it had: so no stamp stands that was sent before.  EngineBusy: too many heads follow.
    """

    OP = 128
    REPLY = TurnsOpened
    base: int


class TurnsFollowed(Message, frozen=True):
    """Stamps that have turned, a set, and the right to use stamps for some time from the sending of the request on.

    `number` is that of the last turn in it.  A right of 0 gives none, and takes none back.  `over`: these names give no
    right any more; the head ends its own, and sends CloseTurns.
    """

    number: int
    stamps: bytes
    right_ns: int
    over: bool = False


class FollowTurns(Request, frozen=True):
    """Get the next turns, as soon as there are any, and at the latest after `wait_ns`.

    `said` is the `number` of the answer before: the head has made these turns, and no client finds an older stamp
    standing any more.  One request at a time.  SessionLost if this connection follows no turns.
    """

    OP = 129
    REPLY = TurnsFollowed
    said: int
    wait_ns: int


class CloseTurns(Request, frozen=True):
    """End the turns of this connection.  The head uses no right any more: nothing waits for it from now on."""

    OP = 130
    REPLY = Done


class JoinTurns(Request, frozen=True):
    """Let answers on this connection have stamps of these turns, for a client of the head that follows them.

    SessionLost if they have ended.
    """

    OP = 131
    REPLY = Done
    turns: bytes

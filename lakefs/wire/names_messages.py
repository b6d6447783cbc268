"""Messages to the leader of a names shard of a lake, from the process that drives gc and checks over the whole lake.

Only names that lead a shard answer them.  See `lakefs.wire.messages`.
"""

from __future__ import annotations

from lakefs.wire.base import Done, Message, Request
from lakefs.wire.session_messages import ReportReply


class GenerationJoined(Message, frozen=True):
    """The shard has joined the generation; the number of uploads that it removed before because they were too old."""

    expired_uploads: int


class JoinGeneration(Request, frozen=True):
    """Bind nothing any more on answers of members below this gc generation minus one.

    Before that uploads are removed that are too old.  Joining a generation again, or an earlier one, changes nothing.
    """

    OP = 140
    REPLY = GenerationJoined
    generation: int


class RefuseEpochs(Request, frozen=True):
    """Bind nothing any more on answers of members under ring epochs before `oldest`."""

    OP = 141
    REPLY = Done
    oldest: int


class BeginRoots(Request, frozen=True):
    """Begin a walk through all blobs that the names refer to.  It is of this connection, and ends each earlier one."""

    OP = 142
    REPLY = Done


class RootsPage(Message, frozen=True):
    """Blobs, and for each its owner: empty for a lease, `n` and 8 bytes for a node, `p` and a key for a part.

    `done`: nothing is left, and all that the walk has seen is durable.
    """

    blobs: list[bytes]
    owners: list[bytes]
    done: bool = False


class NextRoots(Request, frozen=True):
    """Get the next page of the walk; `page` is the number of those before.

    SessionLost, also for another page than the next, ends the walk: it does not say that nothing is left.
    """

    OP = 143
    REPLY = RootsPage
    page: int


class RootNamed(Message, frozen=True):
    """The bucket and key of an owner, or what it is where it has none, for a message."""

    name: str


class NameRoot(Request, frozen=True):
    """Get the name of an owner that a page of roots had.  InvalidArgument for what is no owner."""

    OP = 144
    REPLY = RootNamed
    owner: bytes


class CheckNames(Request, frozen=True):
    """Check the names of the shard, and the content that they refer to, as RunFsck does.

    The named chunks are kept for this connection, for ReadNamedChunks.  EngineBusy while another check runs.
    """

    OP = 145
    REPLY = ReportReply
    full: bool = False


class NamedChunksPage(Message, frozen=True):
    """The first 8 bytes of digests, ascending, in the body.  `more`: there are further ones.

    `complete` is false when there were too many to be kept: then some are missing.
    """

    more: bool
    complete: bool = True


class ReadNamedChunks(Request, frozen=True):
    """Get some of the named chunks that CheckNames found on this connection: those above `after`; -1: the first.

    SessionLost if there are none.
    """

    OP = 146
    REPLY = NamedChunksPage
    after: int = -1

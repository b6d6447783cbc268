"""Messages about the connection, storing chunks in put sessions, events, and the engine's upkeep.

Upkeep is gc, fsck, scrub, sync.  See `lakefs.wire.messages`.
"""

from __future__ import annotations

from typing import Final

from lakefs.wire.base import Done, Message, Request

FEATURE_STAMPS: Final = 1 << 0
"""Bit of HelloReply's `features`: the engine has stamps (`OpenStamps`)."""
FEATURE_FABRIC: Final = 1 << 1
"""Bit of HelloReply's `features`: the engine has an RDMA device (`FabricOpen`)."""
FEATURE_PLACES: Final = 1 << 2
"""Bit of HelloReply's `features`: the engine checks what a change was decided upon.

It honours `folder`, `alone`, `blob` and `gone` of a Condition, takes conditions in Rename, MakeFolder, MakeSymlink and
RemoveFolder, and tells of folders (`folders`).
"""
FEATURE_WATCH_ALL: Final = 1 << 3
"""Bit of HelloReply's `features`: Watch of the bucket "" sends the events of all buckets."""

FEATURE_SEGMENTS: Final = 1 << 4
"""Bit of HelloReply's `features`: the engine gives segments' files, and pins places in them.  See FEATURE_EACH."""
FEATURE_SLABS: Final = 1 << 5
"""Bit of HelloReply's `features`: the engine gives slabs of its DRAM tier, if it has one."""
FEATURE_SOURCES: Final = 1 << 6
"""Bit of HelloReply's `features`: the engine reads files whose descriptor it is sent."""
FEATURE_LENT_MEMORY: Final = 1 << 7
"""Bit of HelloReply's `features`: the engine copies from memory that is lent to it, and into it."""
FEATURE_SHARED_INDEX: Final = 1 << 8
"""Bit of HelloReply's `features`: the engine gives its shared index, if it has one."""
FEATURE_KEYED_INDEX: Final = 1 << 9
"""Bit of HelloReply's `features`: the engine gives its keyed index, if it has one."""
FEATURE_EACH: Final = 1 << 10
"""Bit of HelloReply's `features`: the reply names what goes by memory, each by its bit: the six above, and stamps.

Without this bit (an older engine) a client on the engine's machine asks for each.
"""
FEATURE_KEY_HOMES: Final = 1 << 11
"""Bit of HelloReply's `features`: this is a head, which gives the keyed indexes of members on its machine."""
FEATURE_TURNS: Final = 1 << 12
"""Bit of HelloReply's `features`: these names send heads the turns of their stamps (`OpenTurns`)."""
FEATURE_EXCHANGE: Final = 1 << 13
"""Bit of HelloReply's `features`: the engine exchanges names (`Exchange`)."""
SHARED_BY_ENGINES: Final = (
    FEATURE_EACH
    | FEATURE_SEGMENTS
    | FEATURE_SLABS
    | FEATURE_SOURCES
    | FEATURE_LENT_MEMORY
    | FEATURE_SHARED_INDEX
    | FEATURE_KEYED_INDEX
)
"""The bits that every engine with segments sets; a service without them sets those that it can serve."""

# --- connection --------------------------------------------------------------------------------------


class HelloReply(Message, frozen=True):
    """The server's identity and limits.  A client that has cached descriptors of a store compares the ids.

    `features`: the FEATURE_ bits.
    """

    protocol: int
    server: str
    store_id: bytes
    engine_id: bytes
    boot_id: bytes
    features: int
    domains: list[bytes]
    inflight_max: int
    body_bytes_max: int
    batch_max: int
    descriptors: bool
    read_only: bool = False


class Hello(Request, frozen=True):
    """First request of every connection.  `token` is required over TCP."""

    OP = 1
    REPLY = HelloReply
    protocol: int
    client: str
    features: int = 0
    token: str = ""

    def __repr__(self) -> str:
        """Leave out the token: messages end up in logs."""
        return f"Hello(protocol={self.protocol}, client={self.client!r}, features={self.features})"


class Ping(Request, frozen=True):
    """Answered at once."""

    OP = 2
    REPLY = Done


class StatusReply(Message, frozen=True):
    """JSON text of the engine's state, as `lake status --json` prints it."""

    status_json: str


class Status(Request, frozen=True):
    """Ask for the engine's state, for people and scripts."""

    OP = 3
    REPLY = StatusReply


class NoteGateway(Request, frozen=True):
    """Note what an S3 gateway on this connection has answered since its process began; Status lists it.

    The connection's last note counts, until the connection ends.  `process`: its process id.  `door`: it has a door;
    `repeated`: of its `answers`, those that the door repeated; `passed_on`: requests that the door left to Python, by
    reason.  The texts are printable ASCII.
    """

    OP = 4
    REPLY = Done
    url: str
    process: int
    door: bool
    answers: int
    repeated: int
    passed_on: dict[str, int]


# --- sessions and chunks -----------------------------------------------------------------------------


class SessionOpened(Message, frozen=True):
    """The id of a put session: 16 bytes."""

    session: bytes


class SessionOpen(Request, frozen=True):
    """Begin a put session.  Chunks stored or found present are held until the session ends.

    It ends with a Commit that says so, with SessionEnd, or 60 s after its last connection.
    """

    OP = 10
    REPLY = SessionOpened
    domain: int = 0


class SessionJoin(Request, frozen=True):
    """Use a session from this connection too.  SessionLost when it has ended."""

    OP = 11
    REPLY = Done
    session: bytes


class SessionEnd(Request, frozen=True):
    """End a session: its holds are dropped; names committed through it stay."""

    OP = 12
    REPLY = Done
    session: bytes


class Offered(Message, frozen=True):
    """For each offered chunk, in order: True if the store has it.  The session now holds the present ones."""

    present: list[bool]


class Offer(Request, frozen=True):
    """Ask which chunks need not be sent.  A digest is only a hint: it holds an existing chunk and creates nothing."""

    OP = 13
    REPLY = Offered
    session: bytes
    chunks: list[bytes]


class Stored(Message, frozen=True):
    """Ids that the engine computed, in order, and for each True if the chunk was new.  The chunks are durable."""

    chunks: list[bytes]
    fresh: list[bool]


class StoreChunks(Request, frozen=True):
    """Store the payloads that follow each other in the body; `kinds` and `lengths` in order; each 1 B to 4 MiB."""

    OP = 14
    REPLY = Stored
    session: bytes
    kinds: list[int]
    lengths: list[int]


class SourceOpened(Message, frozen=True):
    """The number of a registered descriptor, valid on this connection."""

    source: int


class SourceOpen(Request, frozen=True):
    """Register the descriptor sent along (a regular file on a local file system) for the engine to read from."""

    OP = 15
    REPLY = SourceOpened


class SourceClose(Request, frozen=True):
    """Forget a registered descriptor."""

    OP = 16
    REPLY = Done
    source: int


class StoreFromSource(Request, frozen=True):
    """Store data chunks read from a registered descriptor at the offsets.  SourceChanged when it is too short."""

    OP = 17
    REPLY = Stored
    session: bytes
    source: int
    offsets: list[int]
    lengths: list[int]


# --- events and upkeep -------------------------------------------------------------------------------


class WatchEvent(Message, frozen=True):
    """Sent on the watch's stream.  kind: put, delete, rename (key to to_key), resync (look at everything again)."""

    kind: str
    sequence: int
    bucket: str = ""
    key: str = ""
    to_bucket: str = ""
    to_key: str = ""
    node: int = 0


class Watch(Request, frozen=True):
    """Send events of a bucket, in order, after they are durable, until the stream is cancelled.  First answer: Done.

    The bucket "" is all buckets, those that are made later too; a `resync` of all then has the bucket "".

    `others_only`: leave out changes made by requests of the same connection.
    """

    OP = 50
    REPLY = Done
    bucket: str
    others_only: bool = False


class ReportReply(Message, frozen=True):
    """JSON text of a report, as the command prints it with --json."""

    report_json: str


class RunGc(Request, frozen=True):
    """Run one full cycle of garbage collection, then compaction; `compact`: also where compaction frees little."""

    OP = 60
    REPLY = ReportReply
    compact: bool = False


class RunFsck(Request, frozen=True):
    """Check the store while it serves; `full` reads every byte."""

    OP = 61
    REPLY = ReportReply
    full: bool = False


class Sync(Request, frozen=True):
    """Wait until every change that was visible before is durable.  StoreReadOnly when that cannot happen."""

    OP = 62
    REPLY = Done


class RunScrub(Request, frozen=True):
    """Continue the scrub's pass, or begin one, for `for_s` seconds (at most 60; 0: not at all), and report on it.

    The report's `done` says if a pass ended in that time.  `rate_bytes_per_s`: 0 is unbounded, -1 the engine's own.
    `restart` begins a new pass.  With `damaged` the report has the quarantine: chunks, and the objects they are in.
    """

    OP = 63
    REPLY = ReportReply
    for_s: float = 0.0
    rate_bytes_per_s: int = -1
    restart: bool = False
    damaged: bool = False


OUT_AFTER_S_MIN: Final = 60
"""Least silence after which a member may be made out: twice its lease."""
OUT_AFTER_S_MAX: Final = 30 * 24 * 3600
OUT_STOPS: Final = ("machine", "rack", "zone", "off")
"""Values of `SetLake.out_stops`."""


class SetLake(Request, frozen=True):
    """Change settings of a whole lake; safe to repeat.  InvalidArgument for values that it does not take.

    `out_after_s`: silence after which a member is made out; 0: as it is.  `out_stops`: none is while more are away than
    the largest machine, rack or zone has; off: that is not looked at; empty: as it is.
    """

    OP = 66
    REPLY = Done
    out_after_s: int = 0
    out_stops: str = ""


class AddNamesShard(Request, frozen=True):
    """Add a names shard to a lake with etcd; waits until a machine serves it, some seconds at most.

    The report: `shard`, and `machine`, the id of the one that serves it, empty if none did in that time.
    PreconditionFailed while the shard that was added last is not served, and beyond the most that there may be.
    """

    OP = 67
    REPLY = ReportReply


MEMBER_DRAIN: Final = 1
MEMBER_REMOVE: Final = 2
NAMES_REMOVE: Final = 3


class ChangeMember(Request, frozen=True):
    """Change a member of a lake; safe to repeat.  `change`: MEMBER_DRAIN, its places go to others and its shards move;
    MEMBER_REMOVE, it is of the lake no more; NAMES_REMOVE, `member` is a replica of the names, whose machine is gone.

    PreconditionFailed for one that is out or removed and cannot be drained, and for one that has places or shards, or
    cannot be asked, and is to be removed; `accept_loss`: it is lost, and what it had is made from others.  For the
    replica that leads, too.  InvalidArgument for a member or a replica that the lake does not have.
    """

    OP = 64
    REPLY = Done
    member: bytes
    change: int
    accept_loss: bool = False

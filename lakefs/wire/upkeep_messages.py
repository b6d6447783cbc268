"""Messages about events, and about the engine's upkeep: gc, fsck, scrub, sync."""

from __future__ import annotations

from lakefs.wire.base import Done, Message, Request


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

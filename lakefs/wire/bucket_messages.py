"""Messages about buckets and their settings; see `lakefs.wire.messages`."""

from __future__ import annotations

from lakefs.wire.base import Done, Message, Request


class BucketStat(Message, frozen=True):
    """A bucket: its name, creation time, node, and settings.

    `anonymous_read`: faces that have users serve reads of this bucket without credentials.  `versioning`: "" (never
    enabled), "enabled", "suspended".
    """

    name: str
    created_ns: int
    node: int
    anonymous_read: bool = False
    versioning: str = ""


class Buckets(Message, frozen=True):
    """Buckets in byte order."""

    buckets: list[BucketStat]


class BucketList(Request, frozen=True):
    """List all buckets, or only the one called `name`."""

    OP = 30
    REPLY = Buckets
    name: str = ""


class BucketCreate(Request, frozen=True):
    """Make a bucket; AlreadyExists."""

    OP = 31
    REPLY = Buckets
    name: str


class BucketRemove(Request, frozen=True):
    """Remove an empty bucket; BucketNotFound, BucketNotEmpty."""

    OP = 32
    REPLY = Done
    name: str


class BucketSet(Request, frozen=True):
    """Change settings of a bucket; None leaves a setting as it is.  BucketNotFound.

    `versioning` is "enabled" or "suspended"; a bucket that kept versions never returns to "".
    """

    OP = 34
    REPLY = Buckets
    name: str
    anonymous_read: bool | None = None
    versioning: str | None = None

"""Messages about buckets and their settings, versions of keys, and access keys; see `lakefs.wire.messages`.

Access keys are for front ends that have users, such as S3; the native protocol itself checks none.
"""

from __future__ import annotations

from lakefs.wire.base import Done, Message, Request

# --- buckets -----------------------------------------------------------------------------------------


class CorsRule(Message, frozen=True):
    """A rule of cross-origin requests: which pages of other sites may ask for what, as browsers hold them to it.

    `origins` and `headers` may each have one `*` in a pattern.  `exposed`: headers of answers that a page may read.
    `max_age_s`: seconds for which a browser may rely on the answer; None: the rule does not say.
    """

    origins: list[str]
    methods: list[str]
    headers: list[str] = []
    exposed: list[str] = []
    max_age_s: int | None = None
    rule_id: str = ""


class BucketStat(Message, frozen=True):
    """A bucket: its name, creation time, node, and settings.

    `anonymous_read`: faces that have users serve reads of this bucket without credentials.  `versioning`: "" (never
    enabled), "enabled", "suspended".  `tags` and `cors` are empty in a list of all buckets.
    """

    name: str
    created_ns: int
    node: int
    anonymous_read: bool = False
    versioning: str = ""
    tags: dict[str, str] = {}
    cors: list[CorsRule] = []


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

    `versioning` is "enabled" or "suspended"; a bucket that kept versions never returns to "".  `tags` and `cors`
    replace all that the bucket has; RequestTooLarge above 32 KiB of both.  An older engine ignores both:
    what the answer does not have was not set.
    """

    OP = 34
    REPLY = Buckets
    name: str
    anonymous_read: bool | None = None
    versioning: str | None = None
    tags: dict[str, str] | None = None
    cors: list[CorsRule] | None = None


# --- versions of keys --------------------------------------------------------------------------------


class VersionEntry(Message, frozen=True):
    """One version of a page; `is_prefix` entries are rolled up at the delimiter and have no other field set.

    `version` is its id, "null" for one written while no versions were kept.  `is_latest`: the key is bound to this
    version, or it is the newest delete marker.  `is_marker`: a delete marker; it has a time, and nothing else.
    `checksum_names`: those under which checksums are kept with it.  `bound_ns` as in ObjectStat.
    """

    key: str
    is_prefix: bool = False
    version: str = ""
    is_latest: bool = False
    is_marker: bool = False
    size_bytes: int = 0
    etag: str = ""
    mtime_ns: int = 0
    kind: int = 2
    node: int = 0
    checksum_names: list[str] = []
    bound_ns: int = 0

    @property
    def last_modified_ns(self) -> int:
        """The time at which the name was bound to its content: S3's Last-Modified."""
        return self.bound_ns or self.mtime_ns


class ListedVersions(Message, frozen=True):
    """A page: keys in byte order, the newest version of a key first.  `next_after` is empty on the last page."""

    entries: list[VersionEntry]
    next_after: str = ""
    next_version: str = ""


class ListVersions(Request, frozen=True):
    """List versions of keys with the prefix, rolled up at `delimiter` ("" or "/"), at most `limit`.

    The page begins after the version `after_version` of the key `after`; without `after_version`, after all versions of
    that key, which may be a rolled-up prefix: everything below it is skipped.  In a bucket that never kept versions
    each name is one version, "null".  If `after_version` is a `null` that was removed since it was listed, the page
    begins with all versions of that key except the one it is bound to.
    """

    OP = 35
    REPLY = ListedVersions
    bucket: str
    prefix: str = ""
    after: str = ""
    after_version: str = ""
    delimiter: str = ""
    limit: int = 1000


# --- access keys -------------------------------------------------------------------------------------


class AccessKeyStat(Message, frozen=True):
    """An access key of a face that has users.  `buckets`: the only buckets that it may use; empty: all.

    `secret_key` is empty unless the request asked for it.
    """

    access_key: str
    buckets: list[str]
    read_only: bool
    created_ns: int
    secret_key: str = ""

    def __repr__(self) -> str:
        """Leave out the secret: messages end up in logs."""
        limits = f"buckets={self.buckets}, read_only={self.read_only}"
        return f"AccessKeyStat(access_key={self.access_key!r}, {limits}, created_ns={self.created_ns})"


class AccessKeys(Message, frozen=True):
    """Access keys in byte order.  `next_after` is empty on the last page."""

    keys: list[AccessKeyStat]
    next_after: str = ""


class AccessKeyCreate(Request, frozen=True):
    """Make an access key and its secret; the answer has both.

    `buckets` need not exist; names are compared when the key is used.
    """

    OP = 80
    REPLY = AccessKeys
    buckets: list[str] = []
    read_only: bool = False


class AccessKeyList(Request, frozen=True):
    """List access keys after `after`, or only `access_key` (none when it is unknown); with secrets if `secrets`."""

    OP = 81
    REPLY = AccessKeys
    access_key: str = ""
    secrets: bool = False
    after: str = ""
    limit: int = 1000


class AccessKeyRemove(Request, frozen=True):
    """Revoke an access key: AccessKeyList no longer returns it.  AccessKeyNotFound."""

    OP = 82
    REPLY = Done
    access_key: str

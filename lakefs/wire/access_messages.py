"""Messages about access keys, used by faces that have users; see `lakefs.wire.messages`."""

from __future__ import annotations

from lakefs.wire.base import Done, Message, Request


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

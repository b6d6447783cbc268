"""Records of the tables that are kept as msgpack arrays; `docs/format.md` describes them.

The first field is the version; fields are appended to, never moved.  An unknown version is refused by whoever reads.
"""

from __future__ import annotations

import msgspec


class BucketRecord(msgspec.Struct, frozen=True, array_like=True):
    """A bucket's fixed properties and its settings; stored as msgpack array, first field the version."""

    version: int = 1
    domain: int = 0
    created_ns: int = 0
    versioning: int = 0
    policy: dict[str, str] = {}


class AccessKeyRecord(msgspec.Struct, frozen=True, array_like=True):
    """What an access key may do, and its secret; stored as msgpack array, first field the version."""

    version: int
    secret_key: str
    buckets: list[str]
    read_only: bool
    created_ns: int

    def __repr__(self) -> str:
        """Without the secret."""
        return f"AccessKeyRecord(buckets={self.buckets}, read_only={self.read_only})"

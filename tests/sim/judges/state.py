"""What the model keeps: the names of a store at one moment, and what they are bound to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from lakefs.errors import LakeError
from lakefs.ids import BlobId

NO_BLOB: Final = BlobId(b"")
MARK: Final = "user.mark"
"""The extended attribute that workloads set on objects and symlinks."""


class Bound(NamedTuple):
    """What a key is bound to: a blob or the target of a symlink, its mark, its ETag where that is not the blob's.

    As a version: whether it is `null`, and its order, 0 where that is not known.
    """

    blob: BlobId
    target: bytes = b""
    mark: bytes = b""
    etag: str = ""
    is_null: bool = True
    order: int = 0

    def plain(self) -> Bound:
        """Without what it is as a version."""
        return self._replace(is_null=True, order=0)


Keys = Mapping[str, Bound]
State = Mapping[str, Keys]
"""Bucket to key to what it is bound to.  Never changed in place."""
EMPTY: State = {}

Answer = Bound | None | type[LakeError]
"""What an item gives: what the name is bound to now (None: nothing, or it was not there), or the error."""

"""The state of the model: the names of a store at one moment, and what they are bound to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from lakefs.errors import LakeError
from lakefs.ids import BlobId

NO_BLOB: Final = BlobId(b"")
MARK: Final = "user.mark"
"""The extended attribute that workloads set on objects and symlinks."""


class Bound(NamedTuple):
    """The value of a key: a blob or the target of a symlink, its mark, and its ETag if that is not the blob's.

    As a version: whether it is `null`, and its order, 0 where that is not known.
    """

    blob: BlobId
    target: bytes = b""
    mark: bytes = b""
    etag: str = ""
    is_null: bool = True
    order: int = 0

    def plain(self) -> Bound:
        """Return the value without the fields of a version."""
        return self._replace(is_null=True, order=0)


Keys = Mapping[str, Bound]
State = Mapping[str, Keys]
"""Bucket to key to value.  Never changed in place."""
EMPTY: State = {}

Answer = Bound | None | type[LakeError]
"""An item's answer: what the name is bound to now (None: nothing, or it did not exist), or the error."""

"""The port by which code that has only an inode uses its open file."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from lakefs.wire.messages import ListEntry, ObjectStat


class OpenContent(Protocol):
    """The content of an open inode, for code that has only the inode.  `fuse.open_file.OpenFile` implements it."""

    @property
    def is_dirty(self) -> bool:
        """True if something was written that the store does not have."""
        ...

    def note(self, stat: ObjectStat) -> None:
        """Take over a changed record of the name; the content is the same."""
        ...

    async def follow(self, found: ObjectStat | ListEntry) -> bool:
        """Show the content that the node's name has now, if it is this one with something appended; else False."""
        ...

    async def commit(self, *, durable: bool) -> None:
        """Store written bytes; visible on return, and durable too if `durable`."""
        ...

    async def release(self, *, stores: bool = False) -> None:
        """Remove a handle; the last one, or one that `stores`, stores what is unstored."""
        ...

    def abandon(self) -> None:
        """Close without waiting; unstored bytes stay in the staging folder."""
        ...

    async def renew_lease(self) -> None:
        """Lease the content again after the connection was lost, where the name still has it."""
        ...

    def at_rest(self, *, stored: bool = False) -> AbstractAsyncContextManager[None]:
        """Keep commits out of the block; with `stored`, written bytes are committed first."""
        ...

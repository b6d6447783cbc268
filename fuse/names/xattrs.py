"""Extended attributes: which names are stored, and the answers for the others.

Names that begin with `user.`, `trusted.` or `security.` are stored.  The kernel decides who may read and write them;
`trusted.` names are listed only for root.  ACLs and file capabilities are not stored: a read finds none, and setting
them fails with ENOTSUP.  A mount does not honour file capabilities, and the kernel asks for them before each write.
"""

from __future__ import annotations

import errno
from typing import Final

from pyfuse3 import ENOATTR, FUSEError

from fuse.names.attribute_changes import AttributeChanges
from fuse.names.lookups import Lookups
from fuse.state.inodes import Inode
from lakefs.errors import KeyNotFound

_KINDS: Final = (b"user.", b"trusted.", b"security.")
_CAPABILITIES: Final = b"security.capability"
_ACLS: Final = b"system.posix_acl_"


class ExtendedAttributes:
    """Extended attributes of all inodes of a mount.  Every method raises FUSEError for names that are not stored."""

    def __init__(self, lookups: Lookups, changes: AttributeChanges) -> None:
        self._lookups = lookups
        self._changes = changes

    async def value(self, inode: Inode, name: bytes) -> bytes:
        """Return the value of an attribute."""
        if name == _CAPABILITIES or name.startswith(_ACLS):
            raise FUSEError(ENOATTR)
        value = (await self._lookups.xattrs(inode)).get(_kept(name))
        if value is None:
            raise FUSEError(ENOATTR)
        return value

    async def names(self, inode: Inode, *, for_root: bool) -> list[bytes]:
        """Return the names of all attributes; `trusted.` names only for root."""
        names = [name.encode() for name in await self._lookups.xattrs(inode)]
        return [name for name in names if for_root or not name.startswith(b"trusted.")]

    async def set(self, inode: Inode, name: bytes, value: bytes) -> None:
        """Set an attribute; durable as changes of names are."""
        if name == _CAPABILITIES:
            raise FUSEError(errno.ENOTSUP)
        await self._changes.set_xattr(inode, _kept(name), value)

    async def remove(self, inode: Inode, name: bytes) -> None:
        """Remove an attribute."""
        if name == _CAPABILITIES:
            raise FUSEError(ENOATTR)
        try:
            await self._changes.set_xattr(inode, _kept(name), None)
        except KeyNotFound:
            raise FUSEError(ENOATTR) from None


def _kept(name: bytes) -> str:
    """Return the name as the store has it.  ENOTSUP, EINVAL, EILSEQ."""
    kind = next((kind for kind in _KINDS if name.startswith(kind)), None)
    if kind is None:
        raise FUSEError(errno.ENOTSUP)
    if name == kind:
        raise FUSEError(errno.EINVAL)
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise FUSEError(errno.EILSEQ) from None

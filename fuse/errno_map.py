"""Errors as errnos, for the mount: those of the one table (`lakefs.errors`), with what only the mount knows.

The mount translates here, once, at its edge; a raw error that escapes a FUSE handler could take the whole mount down.
An exception outside the tree is a bug: EIO, and the caller logs it.
"""

from __future__ import annotations

import errno
from typing import Final

from lakefs.errors import EngineUnreachable, LakeError, SessionLost

_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)
_LOST: Final = (EngineUnreachable, SessionLost)
"""The mount has waited for the engine.  Programs know EIO from a file; ENOTCONN would mean that the mount has died."""


def errno_of(error: BaseException) -> int:
    """Return the errno for `error`; EIO for a lost engine, and for anything outside the tree.

    An error caused by a lack of descriptors keeps that errno (EMFILE, ENFILE), whatever the descriptor was for.
    """
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in _NO_DESCRIPTORS:
        return cause.errno
    if isinstance(error, LakeError) and not isinstance(error, _LOST):
        return error.errno
    return errno.EIO

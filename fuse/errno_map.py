"""The one table from the errors of `lakefs.errors` to errno, for the mount.

Every leaf of the tree has a row.  Any other exception is a bug: EIO, and the caller logs it.  The mount translates
here, once, at its edge; a raw error that escapes a FUSE handler could take the whole mount down.

Applications act on errno, so the choice favours their use of it: EAGAIN is never used (a blocking call must not
see it), and damage is EIO, as a disk would report it.  An error caused by a lack of descriptors keeps EMFILE or ENFILE.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from lakefs import errors

ERRNO_BY_ERROR: Final[Mapping[type[errors.LakeError], int]] = MappingProxyType(
    {
        errors.InvalidArgument: errno.EINVAL,
        errors.InvalidName: errno.EINVAL,
        errors.BucketNotFound: errno.ENOENT,
        errors.KeyNotFound: errno.ENOENT,
        errors.AlreadyExists: errno.EEXIST,
        errors.BucketNotEmpty: errno.ENOTEMPTY,
        errors.FolderNotEmpty: errno.ENOTEMPTY,
        errors.IsAFolder: errno.EISDIR,
        errors.NotAFolder: errno.ENOTDIR,
        # The file at the name is no longer the one that was opened.
        errors.PreconditionFailed: errno.ESTALE,
        errors.PermissionDenied: errno.EACCES,
        # Staged bytes changed during the store: nothing was stored under the name.
        errors.SourceChanged: errno.EIO,
        errors.RequestTooLarge: errno.E2BIG,
        errors.ConfigError: errno.EINVAL,
        errors.LocalFileError: errno.EIO,
        errors.AccessKeyNotFound: errno.ENOKEY,
        errors.UploadNotFound: errno.ENOENT,
        errors.InvalidPart: errno.EINVAL,
        errors.InvalidPartOrder: errno.EINVAL,
        errors.PartTooSmall: errno.EINVAL,
        errors.KeyDeleted: errno.ENOENT,
        errors.VersionNotFound: errno.ENOENT,
        errors.VersionIsMarker: errno.EINVAL,
        errors.SpaceNotFound: errno.ENOENT,
        # The mount has waited for the engine; ENOTCONN would mean that the mount itself has died.
        errors.EngineUnreachable: errno.EIO,
        errors.EngineBusy: errno.EBUSY,
        errors.DeadlineExceeded: errno.ETIMEDOUT,
        errors.SessionLost: errno.EIO,
        errors.StaleGrant: errno.EIO,
        errors.ChunkNotFound: errno.EIO,
        errors.StoreFull: errno.ENOSPC,
        errors.StoreLocked: errno.EBUSY,
        errors.StoreReadOnly: errno.EROFS,
        errors.StoreUnusable: errno.EIO,
        errors.UnsupportedVersion: errno.EPROTONOSUPPORT,
        errors.AddressInUse: errno.EADDRINUSE,
        errors.Unchecked: errno.EIO,
        errors.DiskFailed: errno.EIO,
        errors.FabricFailed: errno.EIO,
        errors.ChunkDamaged: errno.EIO,
        errors.IndexDamaged: errno.EIO,
        errors.JournalDamaged: errno.EIO,
        errors.StoreDamaged: errno.EIO,
        errors.ProtocolError: errno.EPROTO,
        errors.InternalError: errno.EIO,
    }
)


_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)


def errno_of(error: BaseException) -> int:
    """Return the errno for `error`; EIO for anything outside the tree.

    An error caused by a lack of descriptors keeps that errno (EMFILE, ENFILE), whatever the descriptor was for.
    """
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in _NO_DESCRIPTORS:
        return cause.errno
    for kind in type(error).__mro__:
        number = ERRNO_BY_ERROR.get(kind)
        if number is not None:
            return number
    return errno.EIO

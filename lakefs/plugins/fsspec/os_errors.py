"""The one table from the errors of `lakefs.errors` to errno, for programs that use the lake as a file system.

Python makes the class from the errno: FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError,
PermissionError, ConnectionRefusedError, ConnectionResetError, TimeoutError, otherwise OSError.  The error of the lake
is the cause (`__cause__`), and its message is the text.

An error about a local file keeps the errno and the path that the operating system gave.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, ParamSpec, TypeVar

from lakefs import errors

P = ParamSpec("P")
R = TypeVar("R")

ERRNO_BY_ERROR: Final[Mapping[type[errors.LakeError], int]] = MappingProxyType(
    {
        errors.InvalidArgument: errno.EINVAL,
        errors.InvalidName: errno.EINVAL,
        errors.BucketNotFound: errno.ENOENT,
        errors.KeyNotFound: errno.ENOENT,
        errors.SpaceNotFound: errno.ENOENT,
        errors.AlreadyExists: errno.EEXIST,
        errors.BucketNotEmpty: errno.ENOTEMPTY,
        errors.FolderNotEmpty: errno.ENOTEMPTY,
        errors.IsAFolder: errno.EISDIR,
        errors.NotAFolder: errno.ENOTDIR,
        # The object at the name is no longer the one that is appended to.
        errors.PreconditionFailed: errno.ESTALE,
        errors.PermissionDenied: errno.EACCES,
        errors.SourceChanged: errno.EIO,
        errors.RequestTooLarge: errno.E2BIG,
        errors.ConfigError: errno.EINVAL,
        errors.LocalFileError: errno.EIO,
        errors.AccessKeyNotFound: errno.ENOENT,
        errors.UploadNotFound: errno.ENOENT,
        errors.InvalidPart: errno.EINVAL,
        errors.InvalidPartOrder: errno.EINVAL,
        errors.PartTooSmall: errno.EINVAL,
        errors.KeyDeleted: errno.ENOENT,
        errors.VersionNotFound: errno.ENOENT,
        errors.VersionIsMarker: errno.EINVAL,
        errors.EngineUnreachable: errno.ECONNREFUSED,
        errors.EngineBusy: errno.EBUSY,
        errors.DeadlineExceeded: errno.ETIMEDOUT,
        errors.SessionLost: errno.ECONNRESET,
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


def os_error(error: errors.LakeError) -> OSError:
    """Return the OSError for an error of the lake; the caller raises it from that error."""
    cause = error.__cause__
    if isinstance(error, errors.LocalFileError) and isinstance(cause, OSError) and cause.errno:
        return OSError(cause.errno, error.message, cause.filename or error.subject)
    number = next((ERRNO_BY_ERROR[kind] for kind in type(error).__mro__ if kind in ERRNO_BY_ERROR), errno.EIO)
    return OSError(number, error.message, error.subject) if error.subject else OSError(number, error.message)


def os_call(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function; its errors of the lake are raised as OSError."""
    try:
        return function(*args, **kwargs)
    except errors.LakeError as error:
        raise os_error(error) from error


def missing(path: str) -> FileNotFoundError:
    """Return the error for a path at which nothing exists."""
    return FileNotFoundError(errno.ENOENT, "no such object, folder or bucket in the lake", path)


def is_a_folder(path: str) -> IsADirectoryError:
    """Return the error for a folder where an object is wanted."""
    return IsADirectoryError(errno.EISDIR, "is a folder of the lake, not an object", path)


def exists_already(path: str) -> FileExistsError:
    """Return the error for a path that is taken where a new one is wanted."""
    return FileExistsError(errno.EEXIST, "exists already in the lake", path)

"""Errors of the lake as OSError, for programs that use it as a file system; their errno is that of `lakefs.errors`.

Python makes the class from the errno: FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError,
PermissionError, ConnectionRefusedError, ConnectionResetError, TimeoutError, otherwise OSError.  The error of the lake
is the cause (`__cause__`), and its message is the text.

An error about a local file keeps the errno and the path that the operating system gave.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from lakefs import errors

P = ParamSpec("P")
R = TypeVar("R")


def os_error(error: errors.LakeError) -> OSError:
    """Return the OSError for an error of the lake; the caller raises it from that error."""
    cause = error.__cause__
    if isinstance(error, errors.LocalFileError) and isinstance(cause, OSError) and cause.errno:
        return OSError(cause.errno, str(error), cause.filename or error.subject)
    return OSError(error.errno, str(error), error.subject) if error.subject else OSError(error.errno, str(error))


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

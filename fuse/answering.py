"""Answers of operations: their errors become errnos, at this edge and nowhere else.

An unexpected error fails its own operation with EIO and is logged.  (Anything else would take the whole mount down.)
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

import structlog
import trio
from pyfuse3 import FUSEError

from fuse.errno_map import errno_of
from fuse.state.mount import Mount
from lakefs.errors import LakeError

_log: Final = structlog.get_logger(__name__)


class HasMount(Protocol):
    """The operations of a mount."""

    _mount: Mount


S = TypeVar("S", bound=HasMount)
P = ParamSpec("P")
R = TypeVar("R")


def answering(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Translate the errors of a method to FUSEError."""

    @functools.wraps(method)
    async def answered(self: S, /, *args: P.args, **options: P.kwargs) -> R:
        try:
            self._mount.staging.take_over()
            return await method(self, *args, **options)
        except (FUSEError, trio.Cancelled):
            raise
        except LakeError as error:
            raise FUSEError(errno_of(error)) from error
        except OSError as error:
            raise FUSEError(error.errno or errno.EIO) from error
        except Exception as error:
            _log.exception("an operation of the mount failed unexpectedly", operation=method.__name__)
            raise FUSEError(errno.EIO) from error

    return answered

"""Answers of operations: their errors become errnos, at this edge and nowhere else.

An unexpected error fails its own operation with EIO and is logged.  (Anything else would take the whole mount down.)
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar, cast

import structlog
import trio
from pyfuse3 import FUSEError, RequestContext

from fuse.errno_map import errno_of
from fuse.names.repeats import Repeats
from fuse.state.mount import Mount
from lakefs.errors import LakeError

_log: Final = structlog.get_logger(__name__)


class HasMount(Protocol):
    """The operations of a mount."""

    _mount: Mount


class HasRepeats(HasMount, Protocol):
    """Operations that the kernel repeats."""

    _repeats: Repeats


S = TypeVar("S", bound=HasMount)
T = TypeVar("T", bound=HasRepeats)
P = ParamSpec("P")
R = TypeVar("R")
_Method = Callable[Concatenate[S, P], Coroutine[Any, Any, R]]


def answering(method: _Method[S, P, R]) -> _Method[S, P, R]:
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


def repeatable(method: _Method[T, P, R]) -> _Method[T, P, R]:
    """Let an operation's second ESTALE within one call be ENOENT; its last argument is the request's context.

    Its errors are translated, as `answering` does.
    """
    answering_method = answering(method)

    @functools.wraps(method)
    async def answered(self: T, /, *arguments: P.args, **options: P.kwargs) -> R:
        repeats, thread = self._repeats, _thread(arguments)
        operation = (method.__name__, arguments[0])
        is_repeat = repeats.begin(thread, arguments, operation) is not None
        try:
            answer = await answering_method(self, *arguments, **options)
        except FUSEError as error:
            if error.errno == errno.ESTALE and not is_repeat:
                repeats.refuse(thread, trio.current_time(), operation=operation)
                raise
            repeats.end(thread)
            if error.errno == errno.ESTALE:
                raise FUSEError(errno.ENOENT) from error
            raise
        repeats.end(thread)
        return answer

    return answered


def step_of_repeat(look_up: _Method[T, P, R]) -> _Method[T, P, R]:
    """Let a look-up's ESTALE within a repeat be ENOENT; else as `repeatable`."""
    answering_look_up = answering(look_up)

    @functools.wraps(look_up)
    async def answered(self: T, /, *arguments: P.args, **options: P.kwargs) -> R:
        repeats, thread = self._repeats, _thread(arguments)
        folder, name = arguments[:2]
        is_step = repeats.begin_look_up(thread, folder, name)
        try:
            answer = await answering_look_up(self, *arguments, **options)
        except FUSEError as error:
            if error.errno == errno.ESTALE and not is_step:
                repeats.refuse(thread, trio.current_time(), reads=True, looked_up=name)
                raise
            repeats.note_absent(thread, folder, name)
            if error.errno == errno.ESTALE:
                raise FUSEError(errno.ENOENT) from error
            raise
        repeats.end_look_up(thread, name)
        return answer

    return answered


def _thread(arguments: tuple[object, ...]) -> int:
    return cast(RequestContext, arguments[-1]).pid

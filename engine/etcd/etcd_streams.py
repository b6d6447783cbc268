"""Reads a stream of gRPC, an iterator that blocks, in a thread which it has for itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, cast

import grpc
import trio

from engine.etcd.etcd_status import Status, status_of

ENDED: Final = Status(grpc.StatusCode.UNAVAILABLE, "the stream ended")


async def read_answers(stream: Any, take: Callable[[Any], Awaitable[bool]]) -> Status:
    """Give the answers of a stream to `take`, one after the other, until it returns True, or the stream ends.

    The thread ends when this is cancelled.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_cancelled_with, stream)
        status = await trio.to_thread.run_sync(_read_in_thread, stream, take, limiter=_OWN_THREAD)
        nursery.cancel_scope.cancel()
    return status


class _OwnThread:
    """In the place of a limiter of threads: a stream has one for as long as it lasts, and takes none from others."""

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        """Take a thread at once."""
        await trio.lowlevel.checkpoint()

    def release_on_behalf_of(self, borrower: object) -> None:
        """Give it back."""


_OWN_THREAD: Final = cast(trio.CapacityLimiter, _OwnThread())


def _read_in_thread(stream: Iterable[Any], take: Callable[[Any], Awaitable[bool]]) -> Status:
    try:
        for answer in stream:
            if trio.from_thread.run(take, answer):
                break
    except grpc.RpcError as error:
        return status_of(error)
    return ENDED


async def _cancelled_with(stream: Any) -> None:
    """End a stream when this task is cancelled, so that its thread ends."""
    try:
        await trio.sleep_forever()
    finally:
        stream.cancel()

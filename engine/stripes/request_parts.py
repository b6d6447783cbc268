"""Cuts what goes to one member, or is asked of it, into requests within the limits of a frame.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from lakefs.limits import BATCH_MAX, BODY_BYTES_MAX

T = TypeVar("T")


def request_parts(items: Sequence[T], bytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the items of each request, in order; `bytes_of` is what one takes of a body."""
    part: list[T] = []
    room = BODY_BYTES_MAX
    for item in items:
        size = bytes_of(item)
        if part and (size > room or len(part) == BATCH_MAX):
            yield part
            part, room = [], BODY_BYTES_MAX
        part.append(item)
        room -= size
    if part:
        yield part

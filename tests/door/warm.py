"""Reads of objects that the door knows, whose content must be right."""

from __future__ import annotations

from typing import Final

from tests.door.asks import Ask
from tests.door.line import Line, Reply
from tests.door.stored import KIB, OBJECTS, THINGS, content_of
from tests.door.world import World

HOT: Final = (f"size-{4 * KIB}", f"size-{64 * KIB - 1}", f"size-{64 * KIB}", "size-1048576")
"""Objects of THINGS."""
LARGE: Final = 8 << 20
"""Bytes of the object `large`: more than the buffers between a gateway and its client hold."""
_TIMES: Final = 4
"""Requests after which the door knows an object."""


def content(key: str) -> bytes:
    """Return the content of an object of THINGS."""
    return content_of(LARGE) if key == "large" else OBJECTS[THINGS, key].content


def get(made: World, line: Line, key: str) -> Reply:
    """Get an object; the content must be right."""
    reply = line.ask(made.raw(Ask(f"/{THINGS}/{key}")))
    assert reply.status == 200, reply.head
    assert reply.body == content(key), f"wrong bytes of {key}"
    return reply


def warm(made: World, line: Line) -> None:
    """Have all hot objects answered so often that the door knows them."""
    for key in HOT:
        for _ in range(_TIMES):
            get(made, line, key)

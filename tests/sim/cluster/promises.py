"""Promises to the clients of a simulated lake: the contents that each key may have.

A key is written by one client, and read by all.  After an answer it has one content.  After a request that failed it
has one of several, and rests for `RESTS_S`: until then the request may yet be done.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import trio

from tests.sim.judges.history import SimFailure

RESTS_S = 30.0
"""Longer than any request is under way."""
Content = tuple[bytes, ...]
"""The chunks of an object."""


@dataclass
class Key:
    """One key: what it may have now, and everything that it could have had so far."""

    may_be: list[Content | None] = field(default_factory=lambda: [None])
    ever: list[Content | None] = field(default_factory=lambda: [None])
    rests_until: float = 0.0

    @property
    def rests(self) -> bool:
        """True while a request for it may yet be done."""
        return trio.current_time() < self.rests_until

    def begins(self, content: Content | None) -> None:
        """Note that it may get a content from now on."""
        if content not in self.may_be:
            self.may_be.append(content)
        self.ever.append(content)
        self.rests_until = trio.current_time() + RESTS_S

    def has(self, content: Content | None) -> None:
        """Note an answer: it has this content."""
        self.may_be = [content]
        self.ever.append(content)
        self.rests_until = 0.0


@dataclass(frozen=True)
class Look:
    """The beginning of a read of a key."""

    key: Key
    allowed: tuple[Content | None, ...]
    mark: int

    def contents(self) -> list[Content | None]:
        """Return what the key had at some moment since."""
        return [*self.allowed, *self.key.ever[self.mark :]]


class Promises:
    """All keys."""

    def __init__(self) -> None:
        self.keys: dict[str, Key] = {}
        self.buckets: set[str] = set()
        """Buckets that exist, and are not removed: nobody finds that one is missing."""

    def key(self, name: str) -> Key:
        """Return a key."""
        return self.keys.setdefault(name, Key())

    def look(self, name: str) -> Look:
        """Begin a read."""
        key = self.key(name)
        return Look(key, tuple(key.may_be), len(key.ever))

    def looks(self, bucket: str) -> dict[str, Look]:
        """Begin a read of all keys BUCKET/NAME that are known so far."""
        return {name: self.look(name) for name in self.keys if name.startswith(f"{bucket}/")}

    def check_listed(self, looks: Mapping[str, Look], listed: Container[str]) -> None:
        """Check which of these keys were listed."""
        for name, look in looks.items():
            is_right = any((content is not None) == (name in listed) for content in look.contents())
            if not is_right:
                raise SimFailure(
                    f"{name} is {'listed, and has no' if name in listed else 'not listed, and has'} content"
                )

    def check(self, name: str, look: Look, found: bytes | None) -> None:
        """Check what a read found; None: no such key."""
        allowed = look.contents()
        if not any(found == (None if content is None else b"".join(content)) for content in allowed):
            told = "nothing" if found is None else f"{len(found)} bytes {found[:20]!r}"
            raise SimFailure(f"{name} has {told}, and could have had {[_text(content) for content in allowed]}")


def _text(content: Content | None) -> str:
    return "nothing" if content is None else f"{sum(map(len, content))} bytes {b''.join(content)[:20]!r}"

"""A client that uses a few objects as registers through S3, and notes when it called what and what it found.

A value is a number.  The object that holds it has the number in its content, its ETag and its metadata, and its length
follows from it.  Each answer must be about one value in all of them: an answer that mixes two is an error by itself.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.errors import LakeError
from tests.door.asks import Ask, Key, raw_of
from tests.door.line import Line, Reply
from tests.linear import NOTHING, UNKNOWN, Nothing, Operation, Value

BUCKET: Final = "registers"
_LENGTHS: Final = (48, 3200, 65_536, 70_000, 48, 1008, 48, 262_144)
_TYPE: Final = "value/"
_UNIT_BYTES: Final = 16
_CACHED: Final = 2000
_REFUSED_S: Final = 0.01
"""Pause of a client that nobody listens to."""
_REFUSED: Final = 500
"""Statuses from here on leave the outcome open."""


@lru_cache(maxsize=_CACHED)
def content_of(value: int) -> bytes:
    """Return the content that stands for a value."""
    return b"%016d" % value * (_LENGTHS[value % len(_LENGTHS)] // _UNIT_BYTES)


@lru_cache(maxsize=_CACHED)
def etag_of(value: int) -> str:
    """Return the ETag of the object that holds a value."""
    return f'"{hashlib.md5(content_of(value), usedforsecurity=False).hexdigest()}"'


class Values:
    """Gives out the numbers; each is written once."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def next(self) -> int:
        """Return a new value."""
        with self._lock:
            return next(self._numbers)


class Lost(Exception):
    """Nobody knows whether a request was carried out."""


class NotSent(Lost):
    """A request was not carried out: nobody listens."""


@dataclass
class Notes:
    """Operations of one client by key, and counts."""

    operations: list[tuple[str, Operation]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class Client:
    """One client on one connection; `act` does one operation."""

    def __init__(
        self,
        name: str,
        address: tuple[str, int],
        native: str,
        key: Key,
        values: Values,
        names: tuple[str, ...],
        *,
        is_writer: bool,
    ) -> None:
        """`native`: the engine's address, for renames; `names`: keys of the objects."""
        self.notes = Notes()
        self._name = name
        self._address = address
        self._native = native
        self._lake: Lake | None = None
        self._keys: Mapping[str, Key] = {"owner": key}
        self._values = values
        self._names = names
        self._chance = random.Random(name)
        self._line: Line | None = None
        self._kinds = ("put", "put", "put", "delete", "copy", "rename", "swap") if is_writer else ()

    def act(self) -> None:
        """Write one of the objects if this is a writer, and read it, or another, a few times."""
        name = self._chance.choice(self._names)
        if self._kinds:
            self._write(name, self._chance.choice(self._kinds))
        for _ in range(1 if self._kinds else 4):
            self._read(name)

    def close(self) -> None:
        """Close its connections."""
        self._drop()
        if self._lake is not None:
            self._lake.close()

    # --- operations ------------------------------------------------------------------------------------

    def _read(self, name: str) -> None:
        kind = self._chance.choice(("get", "get", "get", "head", "range"))
        headers = (("range", f"bytes={_UNIT_BYTES}-{3 * _UNIT_BYTES - 1}"),) if kind == "range" else ()
        ask = Ask(f"/{BUCKET}/{name}", "HEAD" if kind == "head" else "GET", headers=headers)
        called = time.monotonic()
        try:
            reply = self._ask(ask)
        except Lost:
            return
        found = self._found(kind, reply)
        self._note(name, kind, called, found=found)

    def _found(self, kind: str, reply: Reply) -> Value:
        """Return the value in an answer, which must be in all its parts."""
        if reply.status == 404:
            return None
        assert reply.status == (206 if kind == "range" else 200), f"no answer to a {kind}: {reply.head!r}"
        value = int(reply.header("x-amz-meta-value") or reply.header("content-type").removeprefix(_TYPE))
        content = content_of(value)
        expected = {"get": content, "head": b"", "range": content[_UNIT_BYTES : 3 * _UNIT_BYTES]}[kind]
        assert reply.body == expected, f"the headers are of {value}: {reply.head!r} {reply.body[:64]!r}"
        assert reply.header("etag") == etag_of(value), f"the content is of {value}: {reply.head!r}"
        length = len(content if kind == "head" else expected)
        assert reply.header("content-length") == str(length), f"the content is of {value}: {reply.head!r}"
        return value

    def _write(self, name: str, kind: str) -> None:
        value = None if kind == "delete" else self._values.next()
        private = f"{self._name}-source-{value}"
        if value is not None and kind in ("copy", "rename"):
            try:
                self._done(self._put(private, value))
            except Lost:
                return
        called = time.monotonic()
        found: Value | Nothing = NOTHING
        try:
            if kind == "rename":
                self._rename(private, name)
            elif kind == "swap":
                assert value is not None
                old = self._values_seen(name)
                reply = self._ask(self._put_ask(name, value, (("if-match", etag_of(old)),)))
                if reply.status in (404, 412):
                    return
                self._done(reply)
                found = old
            elif kind == "delete":
                self._done(self._ask(Ask(f"/{BUCKET}/{name}", "DELETE")))
            elif kind == "copy":
                copied = (("x-amz-copy-source", f"/{BUCKET}/{private}"), ("content-length", "0"))
                self._done(self._ask(Ask(f"/{BUCKET}/{name}", "PUT", headers=copied)))
            else:
                assert value is not None
                self._done(self._put(name, value))
        except NotSent:
            return
        except Lost:
            self._note(name, kind, called, writes=value, is_lost=True)
            return
        self._note(name, kind, called, found=found, writes=value)

    def _values_seen(self, name: str) -> int:
        """Return the last value that this client found in an object; 0, which no object ever holds, without one."""
        for key, operation in reversed(self.notes.operations):
            if key == name and isinstance(operation.found, int):
                return operation.found
        return 0

    def _rename(self, source: str, target: str) -> None:
        """Rename by the native protocol.  Any error leaves it open what happened: the client tries again by itself."""
        try:
            self._lake = self._lake or connect(self._native)
            self._lake.move(f"{BUCKET}/{source}", f"{BUCKET}/{target}")
        except LakeError as error:
            raise Lost from error

    def _put(self, name: str, value: int) -> Reply:
        return self._ask(self._put_ask(name, value))

    def _put_ask(self, name: str, value: int, headers: tuple[tuple[str, str], ...] = ()) -> Ask:
        """Return a PUT that says its value in a header: the door gathers those with a content type only."""
        content = content_of(value)
        said = ("content-type", f"{_TYPE}{value}") if value % 2 else ("x-amz-meta-value", str(value))
        more = (said, ("content-length", str(len(content))))
        return Ask(f"/{BUCKET}/{name}", "PUT", headers=(*headers, *more), body=content)

    # --- requests --------------------------------------------------------------------------------------

    def _ask(self, ask: Ask) -> Reply:
        """Send a request; Lost if its outcome is not known."""
        try:
            line = self._connected()
            line.send(raw_of(ask, self._keys))
            reply = line.reply(is_head=ask.method == "HEAD")
        except TimeoutError as error:
            raise AssertionError(f"{self._name}: {ask.method} {ask.path} was not answered") from error
        except OSError as error:
            self._drop()
            raise Lost from error
        if reply.is_last:
            self._drop()
        if reply.status >= _REFUSED:
            self.notes.counts[f"{reply.status} {reply.code}"] += 1
            raise Lost
        return reply

    def _connected(self) -> Line:
        try:
            self._line = self._line or Line(self._address)
        except OSError as error:
            threading.Event().wait(_REFUSED_S)
            raise NotSent from error
        return self._line

    def _done(self, reply: Reply) -> None:
        """Check that a change was carried out.  A copy says late that it was not."""
        if b"<Error>" in reply.body[:300] and reply.status == 200:
            raise Lost
        assert reply.status in (200, 204), reply

    def _drop(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _note(
        self,
        name: str,
        kind: str,
        called: float,
        *,
        found: Value | Nothing = NOTHING,
        writes: Value | Nothing = NOTHING,
        is_lost: bool = False,
    ) -> None:
        ended = UNKNOWN if is_lost else time.monotonic()
        self.notes.operations.append((name, Operation(called, ended, found, writes, f"{self._name} {kind}")))
        self.notes.counts["lost" if is_lost else kind] += 1

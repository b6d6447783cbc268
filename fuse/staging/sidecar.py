"""The sidecar of a staging file: its name and the bytes that count, so that they are known after a crash.

    N.bytes   the staged bytes at their offsets, sparse; bytes outside the ranges mean nothing
    N.json    JSON objects, one a line; each is a change since the line before

    {"format": 1, "name", "time_ns", "size", "base", "base_bytes", "ranges": [[begin, end]], "end"}   everything, anew
    {"ranges": [[begin, end]]}                                                       these bytes are staged, too
    {"size", "base_bytes", "end"}                                                    the length changed
    {"name"}                                                                         the name changed

Rules kept here:
- The last range continues to the end of the bytes file, so that writing on at the end needs no line.  Exception: if the
  last line (name lines apart) has `end`, the range ended there, and bytes behind do not count.  So a process may be
  killed at any instant: the lines and the length of the bytes file define exactly what was written (only a write
  that had not returned is in doubt).
- A line is appended by one call; a torn last line (power loss) and all behind it is ignored.
- An empty sidecar belongs to no file.  Nothing is synced here but by `SidecarFile.sync`.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from fuse.staging.byte_ranges import RangeSet

FORMAT: Final = 1
BYTES_SUFFIX: Final = ".bytes"
SIDECAR_SUFFIX: Final = ".json"
SIDECAR_BYTES_MAX: Final = 64 << 20
"""Longest sidecar that is read: a mount's bound of 2^20 ranges is at most 45 MiB of text."""


@dataclass(frozen=True)
class Base:
    """The stored content that a file was opened on."""

    size_bytes: int
    node: int = 0
    blob: bytes = b""


@dataclass
class SidecarState:
    """The contents of a sidecar."""

    name: str
    time_ns: int
    size: int
    base: Base | None
    base_bytes: int
    """Length of the part, from 0, whose bytes are the base's where nothing is staged."""
    ranges: RangeSet = field(default_factory=RangeSet)

    @property
    def is_changed(self) -> bool:
        """True if there is anything that the base does not have."""
        return self.base is None or bool(len(self.ranges)) or self.size != self.base.size_bytes

    @property
    def is_complete(self) -> bool:
        """True if no byte of the base is needed."""
        return self.ranges.contains(0, self.base_bytes)


def whole_line(state: SidecarState) -> bytes:
    """Return the line with the whole state."""
    base = state.base
    return _line(
        {
            "format": FORMAT,
            "name": _encodable(state.name),
            "time_ns": state.time_ns,
            "size": state.size,
            "base": base and {"size": base.size_bytes, "node": base.node, "blob": base.blob.hex()},
            "base_bytes": state.base_bytes,
            "ranges": list(state.ranges),
            "end": state.ranges.end,
        }
    )


def ranges_line(begin: int, end: int) -> bytes:
    """Return the line for staged bytes; the bytes file ends where the last range does."""
    return b'{"ranges":[[%d,%d]]}\n' % (begin, end)


def closing_line(begin: int, end: int) -> bytes:
    """Return the line with the last range, which ends it: bytes behind do not count until the next line."""
    return b'{"ranges":[[%d,%d]],"end":%d}\n' % (begin, end, end)


def size_line(size: int, base_bytes: int, end: int) -> bytes:
    """Return the line for another length."""
    return b'{"size":%d,"base_bytes":%d,"end":%d}\n' % (size, base_bytes, end)


def name_line(name: str) -> bytes:
    """Return the line for another name."""
    return _line({"name": _encodable(name)})


def replay(text: bytes, bytes_length: int) -> SidecarState | None:
    """Return the sidecar's state, given the length of its bytes file; None if it does not begin as a sidecar does."""
    state: SidecarState | None = None
    end: int | None = 0
    for line in text.split(b"\n"):
        try:
            found: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
            if "format" in found:
                state = _whole(found)
            elif state is None:
                return None
            else:
                _apply(state, found)
            if found.keys() & {"ranges", "end"}:
                end = found.get("end")
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, OverflowError):
            break  # torn; all behind it is ignored
    if state is None:
        return None
    counted = bytes_length if end is None else min(end, bytes_length)
    state.ranges.cut(counted)
    if len(state.ranges):
        state.ranges.add(state.ranges.last_begin, counted)
    state.size = max(state.size, state.ranges.end)
    return state


def _whole(found: dict[str, Any]) -> SidecarState:
    if found["format"] != FORMAT:
        raise ValueError("another format")
    base = found["base"]
    return SidecarState(
        str(found["name"]),
        int(found["time_ns"]),
        int(found["size"]),
        base and Base(int(base["size"]), int(base["node"]), bytes.fromhex(base["blob"])),
        int(found["base_bytes"]),
        RangeSet(_range(*found_range) for found_range in found["ranges"]),
    )


def _apply(state: SidecarState, found: dict[str, Any]) -> None:
    if "name" in found:
        state.name = str(found["name"])
    if "size" in found:
        state.size, state.base_bytes = int(found["size"]), int(found["base_bytes"])
        state.ranges.cut(state.size)
    for found_range in found.get("ranges", ()):
        begin, end = _range(*found_range)
        state.ranges.add(begin, end)
        state.size = max(state.size, end)
    if "end" in found and len(state.ranges):
        state.ranges.add(state.ranges.last_begin, int(found["end"]))


def _range(begin: int, end: int) -> tuple[int, int]:
    if not 0 <= begin <= end:
        raise ValueError("no range")
    return begin, end


def _line(content: dict[str, Any]) -> bytes:
    return msgspec.json.encode(content) + b"\n"


def _encodable(name: str) -> str:
    return name.encode("utf-8", "replace").decode()


class SidecarFile:
    """A sidecar being written.  An OSError of any call is the caller's to translate; nothing was appended then."""

    COMPACT_BYTES: Final = 64 << 10

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = os.open(path, _FLAGS, 0o600)
        self._length = 0
        self._compact_at = self.COMPACT_BYTES

    @property
    def is_long(self) -> bool:
        """True if `rewrite` is due."""
        return self._length > self._compact_at

    def append(self, line: bytes) -> None:
        """Append a line, whole or not at all."""
        try:
            if os.pwrite(self._descriptor, line, self._length) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
        except OSError:
            os.ftruncate(self._descriptor, self._length)
            raise
        self._length += len(line)

    def rewrite(self, line: bytes) -> None:
        """Replace all lines by one, atomically."""
        new = f"{self._path}.new"
        descriptor = os.open(new, _FLAGS | os.O_TRUNC, 0o600)
        try:
            if os.pwrite(descriptor, line, 0) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), new)
            os.replace(new, self._path)
        except OSError:
            os.close(descriptor)
            os.unlink(new)
            raise
        os.close(self._descriptor)
        self._descriptor, self._length = descriptor, len(line)
        self._compact_at = max(self.COMPACT_BYTES, 2 * len(line))

    def empty(self) -> None:
        """Remove all lines: the sidecar belongs to no file from now on."""
        os.ftruncate(self._descriptor, 0)
        self._length = 0
        self._compact_at = self.COMPACT_BYTES

    def sync(self) -> None:
        """Make the lines durable."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)


_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

"""The sidecar of a staging file: what it is of, and which of its bytes count, for whoever finds it after a crash.

    N.bytes   the staged bytes at their offsets, sparse; what is outside of the ranges means nothing
    N.json    JSON objects, one a line; each is what has happened since the one before

    {"format": 1, "name", "time_ns", "size", "base", "base_bytes", "ranges": [[begin, end]], "end"}   everything, anew
    {"ranges": [[begin, end]]}                                                       these bytes are staged, too
    {"size", "base_bytes", "end"}                                                    it was given another length
    {"name"}                                                                         it was renamed

Rules kept here:
- The last range goes on to the end of the bytes file, so that writing on at the end needs no line; unless the last
  line but for names has `end`: then it ended there, and nothing behind counts.  So a process may be killed at any
  instant, and the lines with the length of the bytes file say exactly what was written (only a write that had not
  returned is in doubt).
- A line is appended by one call; a torn last line (power loss) and what follows is not there.
- An empty sidecar belongs to nobody.  Nothing is synced here.
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
    """What a sidecar says."""

    name: str
    time_ns: int
    size: int
    base: Base | None
    base_bytes: int
    """Bytes from 0 that are those of the base, where nothing is staged."""
    ranges: RangeSet = field(default_factory=RangeSet)

    @property
    def is_changed(self) -> bool:
        """Whether there is anything that the base does not have."""
        return self.base is None or bool(len(self.ranges)) or self.size != self.base.size_bytes

    @property
    def is_complete(self) -> bool:
        """Whether no byte of the base is needed."""
        return self.ranges.contains(0, self.base_bytes)


def whole_line(state: SidecarState) -> bytes:
    """The line that says everything."""
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
    """Bytes were staged; the bytes file ends where the last range does."""
    return b'{"ranges":[[%d,%d]]}\n' % (begin, end)


def closing_line(begin: int, end: int) -> bytes:
    """The last range, and that nothing behind it counts until the next line."""
    return b'{"ranges":[[%d,%d]],"end":%d}\n' % (begin, end, end)


def size_line(size: int, base_bytes: int, end: int) -> bytes:
    """Another length."""
    return b'{"size":%d,"base_bytes":%d,"end":%d}\n' % (size, base_bytes, end)


def name_line(name: str) -> bytes:
    """Another name."""
    return _line({"name": _encodable(name)})


def replay(text: bytes, bytes_length: int) -> SidecarState | None:
    """What the sidecar says, given the length of its bytes file; None when it does not begin as one does."""
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
            break  # torn, and so is what follows
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
    """A sidecar being written.  OSError of every call is the caller's to translate; then nothing was appended."""

    COMPACT_BYTES: Final = 64 << 10

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = os.open(path, _FLAGS, 0o600)
        self._length = 0
        self._compact_at = self.COMPACT_BYTES

    @property
    def is_long(self) -> bool:
        """Whether `rewrite` is due."""
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
        """It belongs to nobody from now on."""
        os.ftruncate(self._descriptor, 0)
        self._length = 0
        self._compact_at = self.COMPACT_BYTES

    def sync(self) -> None:
        """Make what it says durable."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)


_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

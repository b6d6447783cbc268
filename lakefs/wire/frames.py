"""Frames: the fixed header, its checksum, and a reader that is fed bytes.  Sans-IO; `docs/protocol.md` is normative.

A frame is a header of 32 bytes, a control part (message, then extension), and a body.  The header's CRC covers
header and control part.  A body has no CRC: payload is checked against chunk ids and granule checksums.

Rules kept here:
- Sizes are compared with the reader's limits before anything is allocated or waited for.
- A frame start is returned whole and checked, or not at all; after an error the reader is unusable.
- Body bytes are copied only when they already lie in the receive buffer; the driver receives the rest directly into
  the memory that the caller gave.

This module does not interpret frames: `lakefs.wire.connection` knows the kinds and their meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import msgspec

from lakefs.errors import InvalidArgument, ProtocolError, RequestTooLarge
from lakefs.host.crc import crc32c
from lakefs.ids import Buffer
from lakefs.layout import Layout
from lakefs.limits import BODY_BYTES_MAX, CONTROL_BYTES_MAX, DESCRIPTORS_PER_FRAME_MAX, RECEIVE_BUFFER_BYTES

PROTOCOL_VERSION: Final = 1

FRAME_HEADER: Final = Layout(
    "frame header",
    32,
    [
        ("magic", "4s"),
        ("kind", "B"),
        ("flags", "B"),
        ("op", "H"),
        ("stream_id", "I"),
        ("control_bytes", "I"),
        ("body_bytes", "I"),
        ("deadline_ms", "I"),
        ("extension_bytes", "H"),
        ("descriptor_count", "B"),
        ("reserved", "B"),
        ("crc", "I"),
    ],
)
FRAME_MAGIC: Final = b"LAK1"
HEADER_BYTES: Final = FRAME_HEADER.size
CRC_OFFSET: Final = FRAME_HEADER.offset_of("crc")
FLAGS_CRITICAL: Final = 0xF0
"""Flag bits that a receiver must know; it may ignore the others."""

assert CRC_OFFSET == HEADER_BYTES - 4, "the CRC is the header's last field"
assert DESCRIPTORS_PER_FRAME_MAX < 1 << 8, "a count of descriptors fits its byte"
assert max(CONTROL_BYTES_MAX, BODY_BYTES_MAX) < 1 << 32, "lengths fit their fields"

_encode = msgspec.msgpack.Encoder().encode
_unpack_header = FRAME_HEADER.unpack_from
_pack_header = FRAME_HEADER.pack


class Kind(IntEnum):
    """Kind of a frame."""

    REQUEST = 1
    REPLY = 2
    FAILURE = 3
    EVENT = 4
    CANCEL = 5
    END = 6  # end of the stream; on stream 0 the goodbye of a draining server


class FrameStart(msgspec.Struct, frozen=True, gc=False):
    """Header and control part of a frame whose CRC was right.  `kind` may be one that a newer peer defines."""

    kind: int
    flags: int
    op: int
    stream_id: int
    body_bytes: int
    deadline_ms: int
    descriptor_count: int
    message: bytes
    extension: bytes


def pack_frame(
    kind: Kind,
    op: int,
    stream_id: int,
    message: msgspec.Struct | None = None,
    body_bytes: int = 0,
    *,
    descriptor_count: int = 0,
    deadline_ms: int = 0,
    extension: bytes = b"",
    flags: int = 0,
) -> bytes:
    """Return header and control part as one bytes object; the caller sends the body and the descriptors.

    InvalidArgument for text that UTF-8 cannot encode; RequestTooLarge when control part, body or descriptors pass
    the limits that every receiver has.
    """
    try:
        control = _encode(message) + extension if message is not None else extension
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{error.object!a} is no text that UTF-8 can say; rename it") from error
    if len(control) > CONTROL_BYTES_MAX or body_bytes > BODY_BYTES_MAX:
        raise RequestTooLarge(
            f"a frame of {len(control)} bytes of control part and {body_bytes} of body passes the limits of "
            f"{CONTROL_BYTES_MAX} and {BODY_BYTES_MAX}; ask for less in one request"
        )
    if descriptor_count > DESCRIPTORS_PER_FRAME_MAX:
        raise RequestTooLarge(f"{descriptor_count} descriptors in one frame; at most {DESCRIPTORS_PER_FRAME_MAX}")
    header = _pack_header(
        FRAME_MAGIC,
        kind,
        flags,
        op,
        stream_id,
        len(control),
        body_bytes,
        deadline_ms,
        len(extension),
        descriptor_count,
        0,
        0,
    )[:CRC_OFFSET]
    return header + crc32c(control, crc32c(header)).to_bytes(4, "little") + control


class FrameReader:
    """Cuts received bytes into frame starts and bodies.

    The driver receives into `space()`, calls `received(count)`, and calls `next_frame()` until it returns None.  After
    a frame start with a body it calls `take_body` or `skip_body` before the next `next_frame`.

    `control_bytes_max` and `body_bytes_max` may be raised between frames, when Hello was accepted.
    """

    __slots__ = (
        "_body_left",
        "_end",
        "_memory",
        "_skipping",
        "_small",
        "_start",
        "_view",
        "body_bytes_max",
        "control_bytes_max",
    )

    def __init__(
        self,
        *,
        control_bytes_max: int = CONTROL_BYTES_MAX,
        body_bytes_max: int = BODY_BYTES_MAX,
        buffer_bytes: int = RECEIVE_BUFFER_BYTES,
    ) -> None:
        assert buffer_bytes >= HEADER_BYTES, "a header fits the receive buffer"
        self.control_bytes_max = control_bytes_max
        self.body_bytes_max = body_bytes_max
        self._small = bytearray(buffer_bytes)
        self._memory = self._small
        self._view = memoryview(self._memory)
        self._start = 0
        self._end = 0
        self._body_left = 0
        self._skipping = False

    @property
    def mid_frame(self) -> bool:
        """True while a frame has begun and not ended: the peer has bytes left to send."""
        return self._end > self._start or self._body_left > 0

    @property
    def buffered_bytes(self) -> int:
        """Count of bytes received and not yet consumed."""
        return self._end - self._start

    def space(self) -> memoryview:
        """Return memory for the next bytes, never empty.  Call it after `next_frame` returned None; then `received`."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start and self._end > len(self._memory) // 2:
            self._move_to(self._memory)
        assert self._end < len(self._memory), "a receive into no memory would look like the peer's end"
        return self._view[self._end :]

    def received(self, count: int) -> None:
        """Note that `count` bytes were put into `space()`."""
        assert 0 <= count <= len(self._memory) - self._end, "more bytes than there was space"
        self._end += count

    def next_frame(self) -> FrameStart | None:
        """Return the next frame's start, or None when more bytes are needed.

        ProtocolError for a wrong magic or CRC, RequestTooLarge for sizes over the limits.
        """
        if self._body_left:
            assert self._skipping, "a body was neither taken nor skipped"
            if not self._skip():
                return None
        if self._end - self._start < HEADER_BYTES:
            return None
        start = self._start
        (
            magic,
            kind,
            flags,
            op,
            stream_id,
            control_bytes,
            body_bytes,
            deadline_ms,
            extension_bytes,
            descriptors,
            _,
            crc,
        ) = _unpack_header(self._memory, start)
        if magic != FRAME_MAGIC:
            raise ProtocolError("the peer sent something that is no frame of this protocol")
        if control_bytes > self.control_bytes_max or body_bytes > self.body_bytes_max:
            raise RequestTooLarge(
                f"a frame announces {control_bytes} bytes of control part and {body_bytes} of body; "
                f"at most {self.control_bytes_max} and {self.body_bytes_max} are accepted here"
            )
        if extension_bytes > control_bytes or descriptors > DESCRIPTORS_PER_FRAME_MAX:
            raise ProtocolError("a frame's header contradicts itself")
        end = start + HEADER_BYTES + control_bytes
        if self._end < end:
            if end - start > len(self._memory):
                self._move_to(bytearray(end - start))
            return None
        control = bytes(self._view[start + HEADER_BYTES : end])
        if crc32c(control, crc32c(self._view[start : start + CRC_OFFSET])) != crc:
            raise ProtocolError("a frame does not match its checksum")
        self._consume(end)
        self._body_left = body_bytes
        message = control[: control_bytes - extension_bytes] if extension_bytes else control
        extension = control[control_bytes - extension_bytes :] if extension_bytes else b""
        return FrameStart(kind, flags, op, stream_id, body_bytes, deadline_ms, descriptors, message, extension)

    def take_body(self, parts: Sequence[Buffer]) -> list[memoryview]:
        """Copy the received part of the body into `parts` (writable, exactly the body's length in all).

        Returns the memory that is still to be filled, in order.  The driver receives directly into it before it calls
        `space()` again.
        """
        assert not self._skipping, "a body is taken or skipped, not both"
        missing: list[memoryview] = []
        for part in parts:
            view = memoryview(part)
            count = min(len(view), self._end - self._start)
            if count:
                view[:count] = self._view[self._start : self._start + count]
                self._consume(self._start + count)
            self._body_left -= len(view)
            if count < len(view):
                missing.append(view[count:])
        assert self._body_left == 0, "a body's parts are not of its length"
        return missing

    def skip_body(self) -> None:
        """Drop the body of the frame just returned, as its bytes arrive."""
        assert self._body_left, "the frame has a body"
        self._skipping = True

    def _skip(self) -> bool:
        count = min(self._body_left, self._end - self._start)
        self._consume(self._start + count)
        self._body_left -= count
        self._skipping = self._body_left > 0
        return not self._skipping

    def _consume(self, end: int) -> None:
        assert self._start <= end <= self._end, "only received bytes are consumed"
        self._start = end
        if self._memory is not self._small and self._start == self._end:
            self._move_to(self._small)

    def _move_to(self, memory: bytearray) -> None:
        """Move the unconsumed bytes to the front of `memory`, which may be the current one, and receive there."""
        held = bytes(self._view[self._start : self._end])
        assert len(held) <= len(memory), "received bytes fit the new memory"
        self._memory = memory
        self._view = memoryview(memory)
        self._view[: len(held)] = held
        self._start, self._end = 0, len(held)

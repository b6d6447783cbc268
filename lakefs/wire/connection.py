"""The two ends of a connection of the native protocol.  Sans-IO; `docs/protocol.md` is normative.

`ServerConnection` and `ClientConnection` own a `FrameReader`, track the open streams, decode messages, and return
events that say what the driver has to do next.  The drivers (trio server, trio client, blocking client) only move
bytes and descriptors.

Rules kept here:
- A client's first frame is Hello.  Until Hello is accepted, no other request is decoded and bodies are refused.
- Each request stream gets exactly one final frame: reply, failure, or end of stream.  A watch's reply is not final.
- A `LakeError` raised by `next_event` ends the connection; every other failure concerns one stream.
- A body announced by an event is pending in `reader`: the driver takes or skips it before the next event.  Bodies
  of refused and ignored frames are skipped here.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from lakefs.errors import LakeError, PermissionDenied, ProtocolError, UnsupportedVersion
from lakefs.ids import Buffer
from lakefs.limits import BODY_BYTES_MAX, CONTROL_BYTES_MAX, HELLO_CONTROL_BYTES_MAX
from lakefs.wire.frames import FLAGS_CRITICAL, PROTOCOL_VERSION, FrameReader, FrameStart, Kind, pack_frame
from lakefs.wire.messages import (
    FEATURE_EXCHANGE,
    FEATURE_FABRIC,
    FEATURE_PLACES,
    FEATURE_STAMPS,
    FEATURE_TURNS,
    FEATURE_WATCH_ALL,
    REQUESTS,
    SHARED_BY_ENGINES,
    Failure,
    Hello,
    HelloReply,
    Message,
    Request,
    Watch,
    WatchEvent,
)

STREAM_ID_MAX: Final = (1 << 32) - 1
FEATURES_CRITICAL: Final = 0xFFFF_FFFF_0000_0000
"""Feature bits of Hello and its reply that the receiver must know; it may ignore the low 32."""
KNOWN_FEATURES: Final = (
    FEATURE_STAMPS
    | FEATURE_FABRIC
    | FEATURE_PLACES
    | FEATURE_WATCH_ALL
    | FEATURE_TURNS
    | FEATURE_EXCHANGE
    | SHARED_BY_ENGINES
)
ERROR_TEXT_MAX: Final = 4096
"""Most characters sent of a failure's message, and of its subject."""

_decode_request: Final[dict[int, Callable[[bytes], Request]]] = {
    op: msgspec.msgpack.Decoder(request).decode for op, request in REQUESTS.items()
}
_decode_reply: Final[dict[int, Callable[[bytes], Message]]] = {
    op: msgspec.msgpack.Decoder(request.REPLY).decode for op, request in REQUESTS.items()
}
_decode_failure: Final = msgspec.msgpack.Decoder(Failure).decode
_decode_event: Final = msgspec.msgpack.Decoder(WatchEvent).decode
_UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError)
"""Errors that decoding raises: for a wrong shape, for text that is not UTF-8, for nesting that is too deep."""
_REQUEST: Final = int(Kind.REQUEST)
_REPLY: Final = int(Kind.REPLY)


class RequestReceived(msgspec.Struct, frozen=True, gc=False):
    """A request to serve; its stream is open until a final frame is packed for it."""

    stream_id: int
    request: Request
    body_bytes: int
    deadline_ms: int
    descriptor_count: int


class RequestRefused(msgspec.Struct, frozen=True, gc=False):
    """A request to be answered with `failure`, a frame ready to send.  The connection stays open."""

    failure: bytes
    descriptor_count: int


class CancelReceived(msgspec.Struct, frozen=True, gc=False):
    """The client no longer waits for an open stream; the stream still gets its final frame."""

    stream_id: int


class FrameIgnored(msgspec.Struct, frozen=True, gc=False):
    """A frame without meaning for this end; the driver closes the descriptors that arrived with it."""

    descriptor_count: int


ServerEvent = RequestReceived | RequestRefused | CancelReceived | FrameIgnored


class ServerConnection:
    """The server's end.  `greeted` is set by `accept_hello`, after the driver has checked the peer."""

    def __init__(self) -> None:
        self.reader = FrameReader(control_bytes_max=HELLO_CONTROL_BYTES_MAX, body_bytes_max=0)
        self.greeted = False
        self._open: dict[int, int] = {}  # stream id -> op

    def next_event(self) -> ServerEvent | None:
        """Return the event of the client's next frame, or None when more bytes are needed.

        ProtocolError and RequestTooLarge end the connection: send `farewell(error)` and close.
        """
        frame = self.reader.next_frame()
        if frame is None:
            return None
        if frame.kind == _REQUEST:
            return self._request(frame)
        if frame.body_bytes:
            self.reader.skip_body()
        if not self.greeted:
            raise ProtocolError("the first frame of a connection is Hello")
        if frame.kind in (Kind.REPLY, Kind.FAILURE, Kind.EVENT):
            raise ProtocolError(f"a client does not send frames of kind {frame.kind}")
        if frame.kind == Kind.CANCEL and frame.stream_id in self._open:
            return CancelReceived(frame.stream_id)
        return FrameIgnored(frame.descriptor_count)

    def accept_hello(self, hello: Hello, *, token: str | None, trusted: bool) -> None:
        """Let the client in.  Raises UnsupportedVersion, or PermissionDenied for a wrong or missing token.

        With `token` None only trusted clients are let in.  After an error the driver closes the connection.
        """
        assert not self.greeted, "a connection has one Hello"
        if hello.protocol < PROTOCOL_VERSION:
            raise UnsupportedVersion(
                f"the client speaks protocol {hello.protocol}, this engine {PROTOCOL_VERSION}; update the client"
            )
        _refuse_unknown_features(hello.features, "client")
        if not trusted and not _same_token(hello.token, token):
            raise PermissionDenied(
                "the token is missing or wrong; give the content of DATA/native.token with LAKE_TOKEN or --token-file"
            )
        self.greeted = True
        self.reader.control_bytes_max = CONTROL_BYTES_MAX
        self.reader.body_bytes_max = BODY_BYTES_MAX

    def reply(
        self, stream_id: int, message: Message, body_bytes: int = 0, descriptor_count: int = 0, *, final: bool = True
    ) -> bytes:
        """Return the reply's frame start.  RequestTooLarge when it passes a frame's limits; the stream stays open."""
        assert final or self._open[stream_id] == Watch.OP, "only a watch goes on after its reply"
        frame = pack_frame(
            Kind.REPLY, self._open[stream_id], stream_id, message, body_bytes, descriptor_count=descriptor_count
        )
        if final:
            del self._open[stream_id]
        return frame

    def failure(self, stream_id: int, error: LakeError) -> bytes:
        """Return the failure frame that ends a stream."""
        return _pack_failure(self._open.pop(stream_id), stream_id, error)

    def event(self, stream_id: int, event: WatchEvent) -> bytes:
        """Return the frame of one event on a watch's stream."""
        assert self._open[stream_id] == Watch.OP, "only a watch has events"
        return pack_frame(Kind.EVENT, self._open[stream_id], stream_id, event)

    def end(self, stream_id: int) -> bytes:
        """Return the frame that ends a stream without an answer: the watch is over, or the request was cancelled."""
        return pack_frame(Kind.END, self._open.pop(stream_id), stream_id)

    def is_open(self, stream_id: int) -> bool:
        """Return True if the stream still waits for its final frame."""
        return stream_id in self._open

    def _request(self, frame: FrameStart) -> ServerEvent:
        stream_id, op = frame.stream_id, frame.op
        if stream_id == 0 or stream_id in self._open:
            raise ProtocolError(f"a request came on stream {stream_id}, which is in use")
        if op != Hello.OP and not self.greeted:
            raise ProtocolError("the first frame of a connection is Hello")
        decode = _decode_request.get(op)
        if decode is None:
            return self._refuse(
                frame, UnsupportedVersion(f"this engine does not know operation {op}; update the engine")
            )
        if frame.flags & FLAGS_CRITICAL:
            error = UnsupportedVersion(f"this engine does not know frame flags {frame.flags:#04x}; update the engine")
            return self._refuse(frame, error)
        if op == Hello.OP and self.greeted:
            return self._refuse(frame, ProtocolError("a connection has one Hello"))
        try:
            request = decode(frame.message)
        except _UNREADABLE as error:
            name = REQUESTS[op].__name__
            return self._refuse(frame, ProtocolError(f"the message is no {name} request: {error}"))
        assert self.greeted or not frame.body_bytes, "no body is accepted before Hello"
        self._open[stream_id] = op
        return RequestReceived(stream_id, request, frame.body_bytes, frame.deadline_ms, frame.descriptor_count)

    def _refuse(self, frame: FrameStart, error: LakeError) -> RequestRefused:
        if frame.body_bytes:
            self.reader.skip_body()
        return RequestRefused(_pack_failure(frame.op, frame.stream_id, error), frame.descriptor_count)


class ReplyReceived(msgspec.Struct, frozen=True, gc=False):
    """The reply on a stream; final unless the request was a Watch."""

    stream_id: int
    message: Message
    body_bytes: int
    descriptor_count: int


class FailureReceived(msgspec.Struct, frozen=True):
    """A stream ended with an error.

    Tracked by Python's gc: once raised, the error refers to stack frames that hold this event.
    """

    stream_id: int
    error: LakeError


class EventReceived(msgspec.Struct, frozen=True, gc=False):
    """An event of a watch."""

    stream_id: int
    event: WatchEvent


class StreamEnded(msgspec.Struct, frozen=True, gc=False):
    """A stream ended without an answer: a watch is over, or the request had been cancelled."""

    stream_id: int


class GoodbyeReceived(msgspec.Struct, frozen=True, gc=False):
    """The server is draining: it finishes open streams and refuses new requests."""


ClientEvent = ReplyReceived | FailureReceived | EventReceived | StreamEnded | GoodbyeReceived | FrameIgnored


class ClientConnection:
    """The client's end.  The driver sends no more requests at a time than the HelloReply's `inflight_max`."""

    def __init__(self) -> None:
        self.reader = FrameReader()
        self._open: dict[int, int] = {}  # stream id -> op
        self._last_stream_id = 0

    @property
    def open_count(self) -> int:
        """Count of streams that wait for their final frame."""
        return len(self._open)

    def is_open(self, stream_id: int) -> bool:
        """Return True if the stream still waits for its final frame."""
        return stream_id in self._open

    def request(
        self, request: Request, body_bytes: int = 0, descriptor_count: int = 0, *, deadline_ms: int = 0
    ) -> tuple[int, bytes]:
        """Open a stream; return its id and the request's frame start.  RequestTooLarge."""
        stream_id = self._last_stream_id % STREAM_ID_MAX + 1
        while stream_id in self._open:
            stream_id = stream_id % STREAM_ID_MAX + 1
        frame = pack_frame(
            Kind.REQUEST,
            request.OP,
            stream_id,
            request,
            body_bytes,
            descriptor_count=descriptor_count,
            deadline_ms=deadline_ms,
        )
        assert 1 <= stream_id <= STREAM_ID_MAX, "stream 0 is the connection itself"
        self._last_stream_id = stream_id
        self._open[stream_id] = request.OP
        return stream_id, frame

    def withdraw(self, stream_id: int) -> None:
        """Close the stream of a request of which no byte was sent."""
        del self._open[stream_id]

    def cancel(self, stream_id: int) -> bytes:
        """Return the frame that says the client no longer waits for the stream.  Its final frame still arrives."""
        return pack_frame(Kind.CANCEL, 0, stream_id)

    def next_event(self) -> ClientEvent | None:
        """Return the event of the server's next frame, or None when more bytes are needed.

        A raised LakeError ends the connection: the server's own error (a failure on stream 0), or ProtocolError.
        """
        frame = self.reader.next_frame()
        if frame is None:
            return None
        if frame.kind != _REPLY and frame.body_bytes:
            self.reader.skip_body()
        if frame.stream_id == 0:
            return self._of_connection(frame)
        if frame.kind not in _FROM_SERVER:
            return FrameIgnored(frame.descriptor_count)
        if frame.stream_id not in self._open:
            raise ProtocolError(f"the engine answered on stream {frame.stream_id}, which is not open")
        return self._of_stream(frame)

    def _of_connection(self, frame: FrameStart) -> ClientEvent:
        if frame.kind == Kind.FAILURE:
            raise _failure_of(frame)
        if frame.kind == Kind.END:
            return GoodbyeReceived()
        if frame.kind in _FROM_SERVER:
            raise ProtocolError(f"a frame of kind {frame.kind} came on stream 0")
        return FrameIgnored(frame.descriptor_count)

    def _of_stream(self, frame: FrameStart) -> ClientEvent:
        stream_id = frame.stream_id
        if frame.flags & FLAGS_CRITICAL:
            raise UnsupportedVersion(f"the engine uses frame flags {frame.flags:#04x} that this client does not know")
        op = self._open[stream_id]
        if frame.kind == Kind.EVENT:
            return EventReceived(stream_id, _decoded(_decode_event, frame.message))
        if frame.kind != _REPLY or op != Watch.OP:
            del self._open[stream_id]
        if frame.kind == _REPLY:
            message = _decoded(_decode_reply[op], frame.message)
            return ReplyReceived(stream_id, message, frame.body_bytes, frame.descriptor_count)
        if frame.kind == Kind.FAILURE:
            return FailureReceived(stream_id, _failure_of(frame))
        return StreamEnded(stream_id)


_FROM_SERVER: Final = frozenset((Kind.REPLY, Kind.FAILURE, Kind.EVENT, Kind.END))


def check_hello_reply(reply: HelloReply) -> None:
    """Raise UnsupportedVersion for a server that this client cannot understand."""
    if reply.protocol != PROTOCOL_VERSION:
        raise UnsupportedVersion(
            f"the engine answers in protocol {reply.protocol}, this client speaks {PROTOCOL_VERSION}; update the client"
        )
    _refuse_unknown_features(reply.features, "engine")


def reply_memory(into: Sequence[memoryview], body_bytes: int) -> tuple[bool, list[Buffer]]:
    """Return memory for a reply's body: (False, slices of `into`) if it fits there, else (True, new memory)."""
    if sum(map(len, into)) < body_bytes:
        return True, [bytearray(body_bytes)]
    parts: list[Buffer] = []
    for view in into:
        if body_bytes:
            parts.append(view[:body_bytes])
            body_bytes -= len(parts[-1])
    assert not body_bytes, "the parts are as long as the body"
    return False, parts


def farewell(error: LakeError) -> bytes:
    """Return the failure on stream 0 that a server sends before it closes a connection."""
    return _pack_failure(0, 0, error)


def goodbye() -> bytes:
    """Return the frame by which a draining server asks its clients to close their connections."""
    return pack_frame(Kind.END, 0, 0)


def _refuse_unknown_features(features: int, whose: str) -> None:
    unknown = features & FEATURES_CRITICAL & ~KNOWN_FEATURES
    if unknown:
        bits = ", ".join(str(bit) for bit in range(64) if unknown >> bit & 1)
        raise UnsupportedVersion(f"the {whose} needs protocol features that are not known here: bits {bits}")


def _same_token(given: str, expected: str | None) -> bool:
    """Compare in constant time, which reveals nothing about the expected token."""
    if not expected:
        return False
    return hmac.compare_digest(given.encode(), expected.encode())


def _pack_failure(op: int, stream_id: int, error: LakeError) -> bytes:
    failure: Failure = Failure(error.wire_code, _sendable(error.message), _sendable(error.subject))
    return pack_frame(Kind.FAILURE, op, stream_id, failure)


def _sendable(text: str) -> str:
    """Return the text cut to ERROR_TEXT_MAX, with lone surrogates (from file names that are not UTF-8) escaped."""
    return text[:ERROR_TEXT_MAX].encode(errors="backslashreplace").decode()


def _failure_of(frame: FrameStart) -> LakeError:
    failure: Failure = _decoded(_decode_failure, frame.message)
    return failure.as_error()


def _decoded(decode: Callable[[bytes], Any], message: bytes) -> Any:
    try:
        return decode(message)
    except _UNREADABLE as error:
        raise ProtocolError(f"the engine's message cannot be read: {error}") from error

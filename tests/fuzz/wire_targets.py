"""The readers of the native protocol: frames, messages, and a connection seen from either end.

Nothing at random has a right checksum, so inputs are sealed first (`sealed`): the frames in them get the checksum that
their bytes need.  An input whose first byte is even is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Final, cast, get_args

import msgspec

from lakefs.errors import LakeError, PermissionDenied, ProtocolError, RequestTooLarge, UnsupportedVersion
from lakefs.host.crc import crc32c
from lakefs.limits import CONTROL_BYTES_MAX
from lakefs.wire.connection import (
    CancelReceived,
    ClientConnection,
    EventReceived,
    FailureReceived,
    FrameIgnored,
    GoodbyeReceived,
    ReplyReceived,
    RequestReceived,
    RequestRefused,
    ServerConnection,
    StreamEnded,
    check_hello_reply,
    farewell,
)
from lakefs.wire.frames import (
    CRC_OFFSET,
    FRAME_HEADER,
    FRAME_MAGIC,
    HEADER_BYTES,
    FrameReader,
    FrameStart,
    Kind,
    pack_frame,
)
from lakefs.wire.messages import REQUESTS, Done, Failure, Hello, HelloReply, Message, Ping, Request, Watch, WatchEvent
from tests.fuzz.target import Target

_TOKEN: Final = "a token"
_RESERVED_OFFSET: Final = FRAME_HEADER.offset_of("reserved")
_encode: Final = msgspec.msgpack.Encoder().encode
_MESSAGES: Final[tuple[type[Message], ...]] = (
    *REQUESTS.values(),
    *dict.fromkeys(request.REPLY for request in REQUESTS.values()),
    Failure,
    WatchEvent,
)


# --- frames --------------------------------------------------------------------------------------------


def sealed(data: bytes) -> bytes:
    """Return the input with right checksums in all frames that are whole, as far as one follows another."""
    found = bytearray(data)
    start = 0
    while start + HEADER_BYTES <= len(found) and found[start : start + 4] == FRAME_MAGIC:
        fields = FRAME_HEADER.unpack_from(found, start)
        control, body = fields[5], fields[6]
        end = start + HEADER_BYTES + control
        if end > len(found):
            break
        crc = crc32c(found[start + HEADER_BYTES : end], crc32c(found[start : start + CRC_OFFSET]))
        found[start + CRC_OFFSET : start + HEADER_BYTES] = crc.to_bytes(4, "little")
        start = end + body
    return bytes(found)


def _stream(data: bytes) -> bytes:
    return sealed(data[1:]) if data[:1] and data[0] & 1 else data[1:]


def _fed(reader: FrameReader, data: bytes, step: int) -> Iterator[None]:
    """Feed bytes, `step` at a time or as many as there is space for; what is whole is taken before more arrives."""
    at = 0
    while at < len(data):
        at += _put(reader, data[at : at + step])
        yield


def _put(reader: FrameReader, piece: bytes) -> int:
    """Feed bytes, but not more than there is space for; return how many."""
    space = reader.space()
    count = min(len(space), len(piece))
    assert count, "the driver was given no space"
    space[:count] = piece[:count]
    del space
    reader.received(count)
    return count


def read_frames(data: bytes) -> None:
    """Read frames: whole and byte by byte the same; each is packed again to the bytes that it was read from."""
    stream = _stream(data)
    whole = _frames(stream, 4096)
    assert whole == _frames(stream, 1 if len(stream) < 600 else 977)
    at = 0
    for frame in whole:
        if not isinstance(frame, FrameStart):
            return
        again = pack_frame(
            cast(Kind, frame.kind),
            frame.op,
            frame.stream_id,
            cast(msgspec.Struct, msgspec.Raw(frame.message)),
            frame.body_bytes,
            descriptor_count=frame.descriptor_count,
            deadline_ms=frame.deadline_ms,
            extension=frame.extension,
            flags=frame.flags,
        )
        came = bytearray(stream[at : at + len(again)])
        if came[_RESERVED_OFFSET]:  # ignored when read, zero when written
            came[_RESERVED_OFFSET] = 0
            came = bytearray(sealed(bytes(came)))
        assert again == came, "a frame is not packed as it came"
        at += len(again) + frame.body_bytes


def _frames(stream: bytes, step: int) -> list[FrameStart | str]:
    reader = FrameReader()
    found: list[FrameStart | str] = []
    try:
        for _ in _fed(reader, stream, step):
            while (frame := reader.next_frame()) is not None:
                found.append(frame)
                if frame.body_bytes:
                    reader.skip_body()
            assert reader.buffered_bytes <= HEADER_BYTES + CONTROL_BYTES_MAX
    except (ProtocolError, RequestTooLarge) as error:
        found.append(error.message)
    return found


# --- messages ------------------------------------------------------------------------------------------


def read_message(data: bytes) -> None:
    """Read a control part as the message of each type: what is understood is sent again as it was understood."""
    if len(data) < 1:
        return
    shape = _MESSAGES[data[0] % len(_MESSAGES)]
    try:
        message = msgspec.msgpack.decode(data[1:], type=shape)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return  # errors for which lakefs.wire.connection calls a message unreadable
    again = _encode(message)
    assert _encode(msgspec.msgpack.decode(again, type=shape)) == again  # not ==: a number may be NaN
    assert "secret" not in repr(message) or "secret_key=" not in repr(message)
    if isinstance(message, HelloReply):
        try:
            check_hello_reply(message)
        except UnsupportedVersion:
            return
    if isinstance(message, Failure):
        error = message.as_error()
        assert isinstance(error, LakeError)
        _only_frame(farewell(error))


def _only_frame(frame: bytes) -> FrameStart:
    reader = FrameReader()
    _put(reader, frame)
    found = reader.next_frame()
    assert found is not None
    assert not reader.buffered_bytes
    return found


# --- the server's end ----------------------------------------------------------------------------------


def read_server(data: bytes) -> None:
    """Read what a client sends: whole and in pieces the same; Hello is first; each request gets one final frame."""
    stream = _stream(data)
    whole = _served(stream, 4096)
    assert whole == _served(stream, 1 if len(stream) < 600 else 977)


def _served(stream: bytes, step: int) -> list[str]:
    wire = ServerConnection()
    told: list[str] = []
    open_streams: list[int] = []
    ended: LakeError | None = None
    try:
        for _ in _fed(wire.reader, stream, step):
            while (event := wire.next_event()) is not None:
                told.append(repr(event))
                _serve(wire, event, open_streams)
    except (ProtocolError, RequestTooLarge, UnsupportedVersion, PermissionDenied) as error:
        ended = error
    if ended is not None:
        told.append(f"{type(ended).__name__}: {ended.message}")
        assert _only_frame(farewell(ended)).stream_id == 0
    return told


def _serve(wire: ServerConnection, event: object, open_streams: list[int]) -> None:
    if isinstance(event, RequestRefused):
        assert _only_frame(event.failure).kind == Kind.FAILURE
    elif isinstance(event, CancelReceived):
        assert wire.greeted
        _only_frame(wire.end(event.stream_id))
        open_streams.remove(event.stream_id)
    elif isinstance(event, RequestReceived):
        stream_id = event.stream_id
        assert wire.is_open(stream_id)
        assert stream_id not in open_streams
        if event.body_bytes:
            wire.reader.skip_body()
        if isinstance(event.request, Hello):
            wire.accept_hello(event.request, token=_TOKEN, trusted=event.request.client == "trusted")
            assert event.request.client == "trusted" or event.request.token == _TOKEN, "let in without the token"
            _only_frame(wire.reply(stream_id, Done()))
        else:
            assert wire.greeted
            _answer(wire, event, open_streams)
    else:
        assert isinstance(event, FrameIgnored)


def _answer(wire: ServerConnection, event: RequestReceived, open_streams: list[int]) -> None:
    """Answer some requests, fail some, and leave some open for a cancel."""
    stream_id = event.stream_id
    if stream_id % 3 == 0:
        open_streams.append(stream_id)
        return
    if isinstance(event.request, Watch):
        _only_frame(wire.reply(stream_id, Done(), final=False))
        _only_frame(wire.end(stream_id))
    elif stream_id % 3 == 1:
        _only_frame(wire.reply(stream_id, Done()))
    else:
        _only_frame(wire.failure(stream_id, ProtocolError(f"no: {event.request!r}"[:200])))
    assert not wire.is_open(stream_id)


# --- the client's end ----------------------------------------------------------------------------------


def read_client(data: bytes) -> None:
    """Read what a server sends to a client that waits for an answer of each kind: each gets just one final event."""
    stream = _stream(data)
    whole = _asked(stream, 4096)
    assert whole == _asked(stream, 1 if len(stream) < 600 else 977)


def _asked(stream: bytes, step: int) -> list[str]:
    wire = ClientConnection()
    for request in _samples():
        wire.request(request)
    before = wire.open_count
    told: list[str] = []
    finals = 0
    try:
        for _ in _fed(wire.reader, stream, step):
            while (event := wire.next_event()) is not None:
                told.append(repr(event))
                finals += _is_final(wire, event)
    except LakeError as error:  # the server may send any error of the tree on stream 0
        told.append(f"{type(error).__name__}: {error.message}")
    else:
        assert wire.open_count == before - finals
    return told


def _is_final(wire: ClientConnection, event: object) -> bool:
    if isinstance(event, ReplyReceived):
        if event.body_bytes:
            wire.reader.skip_body()
        return not wire.is_open(event.stream_id)
    if isinstance(event, FailureReceived | StreamEnded):
        assert not wire.is_open(event.stream_id)
        return True
    assert isinstance(event, EventReceived | GoodbyeReceived | FrameIgnored)
    return False


# --- good inputs ---------------------------------------------------------------------------------------


@cache
def _samples() -> tuple[Request, ...]:
    """Return a request of each kind, with the least that its fields hold."""
    return tuple(cast(Request, sample_of(shape)) for shape in REQUESTS.values())


def sample_of(shape: type[Message]) -> Message:
    """Return a message of that type, with a small value in each field that has no default."""
    fields = msgspec.structs.fields(shape)
    return shape(*(_value(found.type) for found in fields if found.required))


def _value(kind: Any) -> object:
    plain: dict[object, object] = {int: 1, str: "name", bytes: b"\x01" * 16, bool: True, float: 1.0}
    if kind in plain:
        return plain[kind]
    origin = getattr(kind, "__origin__", None)
    if origin is list:
        return [_value(get_args(kind)[0])]
    if origin is dict:
        return {_value(get_args(kind)[0]): _value(get_args(kind)[1])}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return sample_of(cast(type[Message], kind))
    return _value(get_args(kind)[0])  # a union or an annotated type: the first


def _good_messages() -> list[bytes]:
    return [bytes([number]) + _encode(sample_of(shape)) for number, shape in enumerate(_MESSAGES)]


def _hello(client: str, token: str = "") -> bytes:
    return pack_frame(Kind.REQUEST, Hello.OP, 1, Hello(1, client, 0, token))


def _request(request: Request, stream_id: int, body: bytes = b"") -> bytes:
    return pack_frame(Kind.REQUEST, request.OP, stream_id, request, len(body), deadline_ms=5) + body


def _good_sessions() -> list[bytes]:
    each = [_request(request, number) for number, request in enumerate(_samples()[1:], 2)]
    greeted = b"\x01" + _hello("trusted")
    return [
        b"\x01" + _hello("a", _TOKEN) + _request(Ping(), 2),
        b"\x01" + _hello("nobody", "wrong"),
        greeted + _request(Ping(), 3, b"a body") + pack_frame(Kind.CANCEL, 0, 3),
        greeted + pack_frame(Kind.CANCEL, 0, 9) + pack_frame(cast(Kind, 99), 0, 5, Done(), extension=b"later"),
        *(greeted + b"".join(each[at : at + 6]) for at in range(0, len(each), 6)),
    ]


def _good_answers() -> list[bytes]:
    frames: list[bytes] = []
    for number, request in enumerate(_samples(), 1):
        frames.append(pack_frame(Kind.REPLY, request.OP, number, sample_of(request.REPLY), 3) + b"abc")
    failure = Failure(1, "no such thing", "a name")
    watch = next(number for number, request in enumerate(_samples(), 1) if isinstance(request, Watch))
    event = pack_frame(Kind.EVENT, Watch.OP, watch, sample_of(WatchEvent))
    return [
        *(b"\x01" + b"".join(frames[at : at + 6]) for at in range(0, len(frames), 6)),
        b"\x01" + pack_frame(Kind.FAILURE, 0, 2, failure) + pack_frame(Kind.END, 0, 3),
        b"\x01" + event + event + pack_frame(Kind.END, 0, watch) + pack_frame(Kind.END, 0, 0),
        b"\x01" + farewell(ProtocolError("go")),
    ]


def _good_streams() -> list[bytes]:
    found = [*_good_sessions(), *_good_answers()]
    return found + [b"\0" + stream[1:] for stream in found[::4]]


_MSGPACK_TOKENS: Final = (
    *(bytes([byte]) for byte in (0x80, 0x90, 0xA0, 0xC0, 0xC1, 0xC2, 0xC3, 0xC4, 0xCA, 0xCB, 0xCF, 0xD3)),
    *(b"\x91" * 40, b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"),
    *(b"\xdb\xff\xff\xff\xff", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\0" * 7, b"\xff", b"\xa3\xed\xa0\x80"),
    *(b"\xc7\x00\x01", b"\xd6\xff\x00\x00\x00\x00", b"\xcb\x7f\xf0" + b"\0" * 6, b"\x98", b"\xa4name"),
)
_FRAME_TOKENS: Final = (
    *_MSGPACK_TOKENS,
    *(FRAME_MAGIC, b"\0" * 4, b"\x01\0\0\0", b"\xff" * 4, b"\0\0\x80\0", b"\x10\0", b"\x02\0\0\0"),
    *(pack_frame(kind, 0, 2) for kind in Kind),
    *(pack_frame(Kind.REQUEST, op, 2) for op in (1, 2, 14, 40)),
)
WIRE_TARGETS: Final = (
    Target("frames", read_frames, _good_streams(), _FRAME_TOKENS, (LakeError,)),
    Target("messages", read_message, _good_messages(), _MSGPACK_TOKENS, (LakeError,)),
    Target("server", read_server, _good_sessions(), _FRAME_TOKENS, (LakeError,)),
    Target("client", read_client, _good_answers(), _FRAME_TOKENS, (LakeError,)),
)

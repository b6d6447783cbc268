"""Both ends of a connection without I/O: what each frame means, and what ends a stream or the connection."""

from __future__ import annotations

import contextlib
import gc
import weakref

import msgspec
import pytest
from hypothesis import example, given, strategies as st

from lakefs.errors import (
    ERROR_TABLE,
    EngineBusy,
    InvalidArgument,
    KeyNotFound,
    LakeError,
    PermissionDenied,
    ProtocolError,
    RequestTooLarge,
    UnsupportedVersion,
)
from lakefs.limits import HELLO_CONTROL_BYTES_MAX
from lakefs.wire.connection import (
    CancelReceived,
    ClientConnection,
    ClientEvent,
    EventReceived,
    FailureReceived,
    FrameIgnored,
    GoodbyeReceived,
    ReplyReceived,
    RequestReceived,
    RequestRefused,
    ServerConnection,
    ServerEvent,
    StreamEnded,
    check_hello_reply,
    farewell,
    goodbye,
    reply_memory,
)
from lakefs.wire.frames import FrameReader, Kind, pack_frame
from lakefs.wire.messages import (
    REQUESTS,
    BucketList,
    Buckets,
    BucketStat,
    Done,
    Failure,
    Hello,
    HelloReply,
    Message,
    Ping,
    StoreChunks,
    Watch,
    WatchEvent,
)

HELLO = Hello(1, "test")
TOKEN = "secret"


class Extended(Message, frozen=True):
    """A Hello of the future, with one more field."""

    protocol: int = 1
    client: str = "future"
    features: int = 0
    token: str = ""
    mood: str = "sunny"


def give(reader: FrameReader, payload: bytes) -> None:
    space = reader.space()
    space[: len(payload)] = payload
    reader.received(len(payload))


def at_server(server: ServerConnection, payload: bytes) -> ServerEvent | None:
    give(server.reader, payload)
    return server.next_event()


def at_client(client: ClientConnection, payload: bytes) -> ClientEvent | None:
    give(client.reader, payload)
    return client.next_event()


def greeted() -> ServerConnection:
    server = ServerConnection()
    event = at_server(server, pack_frame(Kind.REQUEST, 1, 1, HELLO))
    assert isinstance(event, RequestReceived)
    assert isinstance(event.request, Hello)
    server.accept_hello(event.request, token=None, trusted=True)
    server.reply(1, Done())
    return server


def failure_in(frame: bytes) -> tuple[int, Failure]:
    reader = FrameReader()
    give(reader, frame)
    start = reader.next_frame()
    assert start is not None
    assert start.kind == Kind.FAILURE
    return start.stream_id, msgspec.msgpack.decode(start.message, type=Failure)


# --- hello ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame",
    [
        pack_frame(Kind.REQUEST, Ping.OP, 1, Ping()),
        pack_frame(Kind.REQUEST, 999, 1, Ping()),
        pack_frame(Kind.CANCEL, 0, 1),
        pack_frame(Kind.REPLY, 1, 1, Done()),
        goodbye(),
    ],
)
def test_nothing_but_hello_is_heard_at_the_beginning(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        at_server(ServerConnection(), frame)


def test_a_stranger_can_make_us_hold_neither_bodies_nor_large_control_parts() -> None:
    with pytest.raises(RequestTooLarge):
        at_server(ServerConnection(), pack_frame(Kind.REQUEST, 1, 1, HELLO, 1))
    long = pack_frame(Kind.REQUEST, 1, 1, Hello(1, "x" * HELLO_CONTROL_BYTES_MAX))
    with pytest.raises(RequestTooLarge):
        at_server(ServerConnection(), long[:1000])


@pytest.mark.parametrize(
    ("given_token", "expected"), [("", TOKEN), ("wrong", TOKEN), ("secre", TOKEN), ("", None), ("", ""), ("é", TOKEN)]
)
def test_a_wrong_or_missing_token_keeps_a_stranger_out(given_token: str, expected: str | None) -> None:
    server = ServerConnection()
    with pytest.raises(PermissionDenied):
        server.accept_hello(Hello(1, "test", 0, given_token), token=expected, trusted=False)
    assert not server.greeted


def test_the_token_lets_a_stranger_in_and_trust_needs_none() -> None:
    for hello, trusted in ((Hello(1, "test", 0, TOKEN), False), (HELLO, True)):
        server = ServerConnection()
        server.accept_hello(hello, token=TOKEN, trusted=trusted)
        assert server.greeted


def test_an_unknown_version_or_feature_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedVersion, match="protocol 0"):
        ServerConnection().accept_hello(Hello(0, "old"), token=None, trusted=True)
    with pytest.raises(UnsupportedVersion, match="bits 40"):
        ServerConnection().accept_hello(Hello(1, "new", 1 << 40), token=None, trusted=True)
    ServerConnection().accept_hello(Hello(9, "new", 1 << 3), token=None, trusted=True)


def test_a_client_refuses_an_engine_that_it_does_not_understand() -> None:
    reply = HelloReply(1, "engine", b"s", b"e", b"b", 7, [], 64, 1, 1, True)
    check_hello_reply(reply)
    with pytest.raises(UnsupportedVersion):
        check_hello_reply(msgspec.structs.replace(reply, protocol=2))
    with pytest.raises(UnsupportedVersion, match="bits 63"):
        check_hello_reply(msgspec.structs.replace(reply, features=1 << 63))


def test_a_second_hello_is_refused_and_the_connection_lives() -> None:
    server = greeted()
    event = at_server(server, pack_frame(Kind.REQUEST, 1, 5, HELLO))
    assert isinstance(event, RequestRefused)
    stream_id, failure = failure_in(event.failure)
    assert (stream_id, failure.wire_code) == (5, ProtocolError.wire_code)
    assert isinstance(at_server(server, pack_frame(Kind.REQUEST, 2, 5, Ping())), RequestReceived)


def test_fields_of_the_future_are_ignored() -> None:
    event = at_server(ServerConnection(), pack_frame(Kind.REQUEST, 1, 1, Extended()))
    assert isinstance(event, RequestReceived)
    assert event.request == Hello(1, "future")


# --- the server's end ----------------------------------------------------------------------------------


def test_an_unknown_op_is_answered_on_its_stream_and_its_body_is_dropped() -> None:
    server = greeted()
    event = at_server(server, pack_frame(Kind.REQUEST, 999, 3, Ping(), 100, descriptor_count=2))
    assert isinstance(event, RequestRefused)
    assert event.descriptor_count == 2
    stream_id, failure = failure_in(event.failure)
    assert (stream_id, failure.wire_code) == (3, UnsupportedVersion.wire_code)
    following = at_server(server, bytes(100) + pack_frame(Kind.REQUEST, 2, 4, Ping()))
    assert isinstance(following, RequestReceived)
    assert following.stream_id == 4


@pytest.mark.parametrize(("flags", "heard"), [(0x01, True), (0x0F, True), (0x10, False), (0x80, False)])
def test_unknown_flags_are_ignored_or_refused_by_their_place(flags: int, heard: bool) -> None:
    event = at_server(greeted(), pack_frame(Kind.REQUEST, 2, 3, Ping(), flags=flags))
    assert isinstance(event, RequestReceived) == heard
    assert isinstance(event, RequestRefused) != heard


def test_a_frame_of_an_unknown_kind_is_read_and_ignored() -> None:
    server = greeted()
    future = bytearray(pack_frame(Kind.REQUEST, 7, 3, Ping(), 10, descriptor_count=1))
    future[4] = 99
    future[28:32] = crc_of(future)
    assert at_server(server, bytes(future)) == FrameIgnored(1)
    following = at_server(server, bytes(10) + pack_frame(Kind.REQUEST, 2, 4, Ping()))
    assert isinstance(following, RequestReceived)


def crc_of(frame: bytes | bytearray) -> bytes:
    from crc32c import crc32c

    return crc32c(bytes(frame[32:]), crc32c(bytes(frame[:28]))).to_bytes(4, "little")


def test_a_message_of_another_shape_is_refused_on_its_stream() -> None:
    event = at_server(greeted(), pack_frame(Kind.REQUEST, StoreChunks.OP, 3, Ping(), 5))
    assert isinstance(event, RequestRefused)
    stream_id, failure = failure_in(event.failure)
    assert (stream_id, failure.wire_code) == (3, ProtocolError.wire_code)
    assert "StoreChunks" in failure.message


@pytest.mark.parametrize("stream_id", [0, 7])
def test_a_request_on_a_stream_in_use_ends_the_connection(stream_id: int) -> None:
    server = greeted()
    at_server(server, pack_frame(Kind.REQUEST, 2, 7, Ping()))
    with pytest.raises(ProtocolError):
        at_server(server, pack_frame(Kind.REQUEST, 2, stream_id, Ping()))


@pytest.mark.parametrize("kind", [Kind.REPLY, Kind.FAILURE, Kind.EVENT])
def test_a_client_that_answers_ends_the_connection(kind: Kind) -> None:
    with pytest.raises(ProtocolError):
        at_server(greeted(), pack_frame(kind, 2, 7, Done()))


def test_a_cancel_is_heard_on_open_streams_only() -> None:
    server = greeted()
    at_server(server, pack_frame(Kind.REQUEST, 2, 7, Ping()))
    assert at_server(server, pack_frame(Kind.CANCEL, 0, 7)) == CancelReceived(7)
    assert at_server(server, pack_frame(Kind.CANCEL, 0, 8)) == FrameIgnored(0)
    server.end(7)
    assert at_server(server, pack_frame(Kind.CANCEL, 0, 7)) == FrameIgnored(0)


def test_a_reply_that_no_frame_can_hold_leaves_the_stream_open_for_a_failure() -> None:
    server = greeted()
    at_server(server, pack_frame(Kind.REQUEST, BucketList.OP, 7, BucketList()))
    huge = Buckets([BucketStat("x" * 1000, 0, 0)] * 5000)
    with pytest.raises(RequestTooLarge):
        server.reply(7, huge)
    assert failure_in(server.failure(7, KeyNotFound("k", subject="s")))[1] == Failure(4, "k", "s")
    assert not server.is_open(7)


def test_long_error_texts_are_shortened() -> None:
    _, failure = failure_in(farewell(KeyNotFound("m" * 100_000, subject="s" * 100_000)))
    assert len(failure.message) == len(failure.subject) == 4096


def test_file_names_that_are_not_utf8_can_be_in_errors_and_not_in_requests() -> None:
    name = b"caf\xe9".decode(errors="surrogateescape")
    _, failure = failure_in(farewell(KeyNotFound(f"no {name}", subject=name)))
    assert (failure.message, failure.subject) == ("no caf\\udce9", "caf\\udce9")
    with pytest.raises(InvalidArgument, match="UTF-8"):
        ClientConnection().request(BucketList(name))


@given(st.sampled_from(sorted(REQUESTS)), st.binary(max_size=100))
@example(24, b"\x94\xa1\x80")
@example(2, b"\xdc\x00\x01" + b"\x91" * 10_000)
def test_no_message_bytes_end_a_connection_that_has_begun(op: int, message: bytes) -> None:
    frame = bytearray(pack_frame(Kind.REQUEST, op, 3, extension=message))
    frame[24:26] = bytes(2)  # the bytes are the message, not an extension
    frame[28:32] = crc_of(frame)
    event = at_server(greeted(), bytes(frame))
    assert isinstance(event, RequestReceived | RequestRefused)


# --- the client's end ----------------------------------------------------------------------------------


def test_answers_find_their_streams_in_any_order() -> None:
    client = ClientConnection()
    first, _ = client.request(Ping())
    second, _ = client.request(BucketList())
    buckets = Buckets([BucketStat("b", 1, 2)])
    assert at_client(client, pack_frame(Kind.REPLY, 30, second, buckets)) == ReplyReceived(second, buckets, 0, 0)
    assert at_client(client, pack_frame(Kind.REPLY, 2, first, Done())) == ReplyReceived(first, Done(), 0, 0)
    assert client.open_count == 0


@pytest.mark.parametrize("row", ERROR_TABLE, ids=lambda row: row.error.__name__)
def test_every_error_arrives_as_itself(row: object) -> None:
    error_class = row.error  # type: ignore[attr-defined]
    client = ClientConnection()
    stream_id, _ = client.request(Ping())
    sent = Failure(error_class.wire_code, "why", "what")
    event = at_client(client, pack_frame(Kind.FAILURE, 2, stream_id, sent))
    assert isinstance(event, FailureReceived)
    assert type(event.error) is error_class
    assert (event.error.message, event.error.subject) == ("why", "what")


def test_a_failure_on_stream_zero_ends_the_connection_with_that_error() -> None:
    with pytest.raises(EngineBusy, match="full"):
        at_client(ClientConnection(), farewell(EngineBusy("full")))


def test_a_goodbye_is_told() -> None:
    assert at_client(ClientConnection(), goodbye()) == GoodbyeReceived()


def test_a_watch_stays_open_until_its_end() -> None:
    client = ClientConnection()
    stream_id, _ = client.request(Watch("b"))
    event = WatchEvent("put", 4, "b", "k")
    assert isinstance(at_client(client, pack_frame(Kind.REPLY, 50, stream_id, Done())), ReplyReceived)
    assert at_client(client, pack_frame(Kind.EVENT, 50, stream_id, event)) == EventReceived(stream_id, event)
    assert client.open_count == 1
    assert at_client(client, pack_frame(Kind.END, 50, stream_id)) == StreamEnded(stream_id)
    assert client.open_count == 0


@pytest.mark.parametrize(
    "frame",
    [
        pack_frame(Kind.REPLY, 2, 9, Done()),
        pack_frame(Kind.END, 2, 9),
        pack_frame(Kind.REPLY, 2, 0, Done()),
        pack_frame(Kind.REPLY, 2, 1, Failure(1, "not empty")),
        pack_frame(Kind.FAILURE, 2, 1, Done()),
        pack_frame(Kind.REPLY, 2, 1, Done(), flags=0x20),
    ],
)
def test_an_engine_that_breaks_the_protocol_ends_the_connection(frame: bytes) -> None:
    client = ClientConnection()
    client.request(BucketList())
    with pytest.raises(LakeError):
        at_client(client, frame)


def test_streams_are_numbered_anew_without_taking_one_in_use() -> None:
    client = ClientConnection()
    watch, _ = client.request(Watch("b"))
    client._last_stream_id = 2**32 - 2
    assert client.request(Ping())[0] == 2**32 - 1
    assert client.request(Ping())[0] not in (0, watch)


@given(st.lists(st.integers(0, 20), max_size=5), st.integers(1, 60))
def test_a_reply_lands_in_the_callers_memory_when_it_fits(lengths: list[int], body_bytes: int) -> None:
    into = [memoryview(bytearray(length)) for length in lengths]
    own, parts = reply_memory(into, body_bytes)
    assert own == (sum(lengths) < body_bytes)
    assert sum(map(len, parts)) == body_bytes
    for part in parts:
        memoryview(part)[:] = b"x" * len(part)
    written = b"".join(into)
    assert written == (bytes(len(written)) if own else (b"x" * body_bytes).ljust(len(written), b"\0"))


def test_an_error_that_was_told_and_raised_keeps_nothing_alive() -> None:
    class Kept:
        pass

    def raise_it() -> weakref.ref[Kept]:
        kept = Kept()
        event = FailureReceived(1, EngineBusy("busy"))
        with contextlib.suppress(EngineBusy):
            raise event.error
        return weakref.ref(kept)

    kept = raise_it()
    gc.collect()
    assert kept() is None

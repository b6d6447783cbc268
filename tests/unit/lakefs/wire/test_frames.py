"""Frames: what was packed is read back, however the bytes arrive; anything else is refused before it costs memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import given, strategies as st

from lakefs.errors import LakeError, ProtocolError, RequestTooLarge
from lakefs.limits import BODY_BYTES_MAX, CONTROL_BYTES_MAX, DESCRIPTORS_PER_FRAME_MAX
from lakefs.wire.frames import FRAME_HEADER, HEADER_BYTES, FrameReader, FrameStart, Kind, pack_frame
from lakefs.wire.messages import BucketList, Ping


@dataclasses.dataclass(frozen=True)
class Frame:
    """A frame with its body, as a test sends and receives it."""

    kind: Kind
    op: int
    stream_id: int
    name: str
    body: bytes
    extension: bytes
    deadline_ms: int
    descriptor_count: int

    @property
    def packed(self) -> bytes:
        start = pack_frame(
            self.kind,
            self.op,
            self.stream_id,
            BucketList(self.name),
            len(self.body),
            extension=self.extension,
            deadline_ms=self.deadline_ms,
            descriptor_count=self.descriptor_count,
        )
        return start + self.body

    def is_start(self, start: FrameStart) -> bool:
        expected = pack_frame(self.kind, self.op, self.stream_id, BucketList(self.name))[HEADER_BYTES:]
        return (
            start.kind == self.kind
            and start.op == self.op
            and start.stream_id == self.stream_id
            and start.message == expected
            and start.extension == self.extension
            and start.body_bytes == len(self.body)
            and start.deadline_ms == self.deadline_ms
            and start.descriptor_count == self.descriptor_count
            and start.flags == 0
        )


frames = st.builds(
    Frame,
    kind=st.sampled_from(Kind),
    op=st.integers(0, 65535),
    stream_id=st.integers(0, 2**32 - 1),
    name=st.text(max_size=100),
    body=st.binary(max_size=300),
    extension=st.binary(max_size=50),
    deadline_ms=st.integers(0, 2**32 - 1),
    descriptor_count=st.integers(0, DESCRIPTORS_PER_FRAME_MAX),
)
ONE = Frame(Kind.REQUEST, 30, 7, "models", b"payload", b"\x80", 1500, 2)


def feed(reader: FrameReader, piece: bytes) -> None:
    """Feed a reader all of a piece; the caller has taken every frame before."""
    space = reader.space()
    count = min(len(space), len(piece))
    space[:count] = piece[:count]
    reader.received(count)
    assert count == len(piece), "a test's pieces fit the space"


def read_all(reader: FrameReader, pieces: Iterable[bytes]) -> list[tuple[FrameStart, bytes]]:
    """Feed these pieces like a driver, never more at once than the reader takes; return the frames."""
    found: list[tuple[FrameStart, bytes]] = []
    memory = bytearray()
    missing: list[memoryview] = []
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            target = missing[0] if missing else reader.space()
            count = min(len(target), len(rest))
            target[:count] = rest[:count]
            rest = rest[count:]
            if missing:
                missing[0] = target[count:]
                missing = [view for view in missing if view]
            else:
                reader.received(count)
            while not missing:
                if found and memory:
                    found[-1] = (found[-1][0], bytes(memory))
                    memory = bytearray()
                start = reader.next_frame()
                if start is None:
                    break
                found.append((start, b""))
                if start.body_bytes:
                    memory = bytearray(start.body_bytes)
                    missing = reader.take_body(split(memoryview(memory)))
    assert not missing, "the last body came whole"
    return found


def split(view: memoryview) -> list[memoryview]:
    """Return two parts, so that bodies across parts are always tested."""
    return [view[: len(view) // 2], view[len(view) // 2 :]]


def cut(payload: bytes, positions: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(position % (len(payload) + 1) for position in positions), len(payload)]
    return [payload[start:end] for start, end in itertools.pairwise(edges)]


@given(st.lists(frames, max_size=6), st.lists(st.integers(0, 10_000), max_size=8), st.integers(32, 200))
def test_frames_come_out_as_packed_however_the_bytes_are_cut(
    sent: list[Frame], positions: list[int], buffer_bytes: int
) -> None:
    stream = b"".join(frame.packed for frame in sent)
    found = read_all(FrameReader(buffer_bytes=buffer_bytes), cut(stream, positions))
    assert len(found) == len(sent)
    for frame, (start, body) in zip(sent, found, strict=True):
        assert frame.is_start(start)
        assert body == frame.body


def test_a_frame_comes_out_whole_when_it_arrives_byte_by_byte() -> None:
    reader = FrameReader()
    [(start, body)] = read_all(reader, [bytes([byte]) for byte in ONE.packed])
    assert ONE.is_start(start)
    assert body == ONE.body
    assert not reader.mid_frame


def test_bytes_behind_a_frame_stay_for_the_next() -> None:
    reader = FrameReader()
    [(_, body)] = read_all(reader, [ONE.packed + b"LAK1 and more"])
    assert body == ONE.body
    assert reader.mid_frame
    assert reader.buffered_bytes == 13


@pytest.mark.parametrize("length", range(len(ONE.packed) - len(ONE.body)))
def test_a_truncated_frame_start_is_waited_for_and_noticed(length: int) -> None:
    reader = FrameReader()
    feed(reader, ONE.packed[:length])
    assert reader.next_frame() is None
    assert reader.mid_frame == (length > 0)


def test_a_truncated_body_is_waited_for_and_noticed() -> None:
    reader = FrameReader()
    feed(reader, ONE.packed[:-3])
    start = reader.next_frame()
    assert start is not None
    memory = bytearray(start.body_bytes)
    [missing] = reader.take_body([memory])
    assert len(missing) == 3
    missing[:] = ONE.body[-3:]
    assert memory == ONE.body


@given(st.integers(0, (len(ONE.packed) - len(ONE.body)) * 8 - 1))
def test_no_flipped_bit_of_header_or_control_part_goes_unnoticed(bit: int) -> None:
    damaged = bytearray(ONE.packed)
    damaged[bit // 8] ^= 1 << bit % 8
    reader = FrameReader()
    feed(reader, bytes(damaged) + bytes(1000))
    try:
        start = reader.next_frame()
    except LakeError:
        return
    assert start is None, "only a frame that got longer is waited for"
    sizes = range(FRAME_HEADER.offset_of("control_bytes"), FRAME_HEADER.offset_of("body_bytes"))
    assert bit // 8 in sizes


@given(st.binary(min_size=HEADER_BYTES, max_size=200).filter(lambda garbage: not garbage.startswith(b"LAK1")))
def test_garbage_is_refused_as_soon_as_a_header_is_there(garbage: bytes) -> None:
    reader = FrameReader()
    feed(reader, garbage)
    with pytest.raises(ProtocolError):
        reader.next_frame()


def header(**changes: int) -> bytes:
    """Return a header that announces sizes nobody sent."""
    values: dict[str, int | bytes] = dict.fromkeys((field.name for field in FRAME_HEADER.fields), 0)
    values |= {"magic": b"LAK1", "kind": 1, "op": 2, "stream_id": 1, **changes}
    return FRAME_HEADER.pack(*values.values())


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"control_bytes": CONTROL_BYTES_MAX + 1}, RequestTooLarge),
        ({"body_bytes": BODY_BYTES_MAX + 1}, RequestTooLarge),
        ({"control_bytes": 2**32 - 1, "body_bytes": 2**32 - 1}, RequestTooLarge),
        ({"control_bytes": 3, "extension_bytes": 4}, ProtocolError),
        ({"descriptor_count": DESCRIPTORS_PER_FRAME_MAX + 1}, ProtocolError),
    ],
)
def test_sizes_over_the_limits_are_refused_from_the_header_alone(
    changes: dict[str, int], error: type[LakeError]
) -> None:
    reader = FrameReader()
    feed(reader, header(**changes))
    with pytest.raises(error):
        reader.next_frame()


def test_a_control_part_larger_than_the_buffer_is_read_and_its_memory_given_back() -> None:
    reader = FrameReader(buffer_bytes=64)
    small = len(reader.space())
    long = dataclasses.replace(ONE, name="n" * 10_000)
    [(start, body)] = read_all(reader, [long.packed])
    assert long.is_start(start)
    assert body == ONE.body
    assert len(reader.space()) == small


@given(st.lists(st.integers(0, 10_000), max_size=8), st.integers(1, 500))
def test_a_skipped_body_is_dropped_and_the_next_frame_is_found(positions: list[int], length: int) -> None:
    skipped = dataclasses.replace(ONE, body=b"x" * length)
    reader = FrameReader(buffer_bytes=100)
    starts: list[FrameStart] = []
    for piece in cut(skipped.packed + pack_frame(Kind.REQUEST, 2, 8, Ping()), positions):
        while piece:
            room = len(reader.space())
            feed(reader, piece[:room])
            piece = piece[room:]
            while (start := reader.next_frame()) is not None:
                starts.append(start)
                if start.body_bytes:
                    reader.skip_body()
    assert [start.stream_id for start in starts] == [7, 8]
    assert not reader.mid_frame


def too_long_name() -> bytes:
    return pack_frame(Kind.REQUEST, 30, 1, BucketList("x" * CONTROL_BYTES_MAX))


@pytest.mark.parametrize(
    "packing",
    [
        too_long_name,
        lambda: pack_frame(Kind.REPLY, 1, 1, None, BODY_BYTES_MAX + 1),
        lambda: pack_frame(Kind.REPLY, 1, 1, None, 0, descriptor_count=DESCRIPTORS_PER_FRAME_MAX + 1),
    ],
)
def test_a_frame_that_nobody_would_accept_is_not_packed(packing: Callable[[], bytes]) -> None:
    with pytest.raises(RequestTooLarge):
        packing()


def test_a_body_that_is_neither_taken_nor_skipped_is_a_bug_that_shows() -> None:
    reader = FrameReader()
    feed(reader, ONE.packed)
    assert reader.next_frame() is not None
    with pytest.raises(AssertionError):
        reader.next_frame()

"""The native layer against a kernel that the test plays: what is answered, what libfuse is given, what answers get."""

from __future__ import annotations

import errno
import os
import random
import shutil
import struct
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from fuse.native import layer

if not layer.IS_BUILT:
    pytest.skip("the native module is not built", allow_module_level=True)

from fuse.native import _layer
from lakefs.limits import GRANULE_BYTES, KIB, MIB
from tests.unit.fuse.native.kernel import (
    CREATE,
    ENTRY_BYTES,
    IN_HEADER,
    INIT,
    LOOKUP,
    OPEN,
    OPEN_OUT,
    OUT_HEADER,
    READ,
    READ_IN,
    Answer,
    Kernel,
    checksums,
    kernel,
    taught,
)

HANDLE = 7


def _pieces(seed: int, *lengths: int) -> list[bytes]:
    return [random.Random(seed + number).randbytes(length) for number, length in enumerate(lengths)]


def _is_given(found: Answer | bytes, unique: int) -> bool:
    return isinstance(found, bytes) and IN_HEADER.unpack_from(found)[2] == unique


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 100, 4096, 65_536, 65_537, 70_000, 300_000, MIB]), min_size=1, max_size=5),
    cut=st.integers(0, 5000),
    reads=st.lists(st.tuples(st.floats(0, 1.1), st.integers(0, 128), st.integers(0, MIB)), min_size=1, max_size=12),
)
def test_reads_are_those_of_the_pieces_in_a_row(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], cut: int, reads: list[tuple[float, int, int]]
) -> None:
    pieces = _pieces(1, *lengths)
    whole = b"".join(pieces)[: max(0, sum(lengths) - cut)]
    path = tmp_path_factory.mktemp("segment") / "file"
    content, descriptor = taught(str(path), pieces, size=len(whole))
    with kernel() as device:
        content.add(HANDLE)
        for at, shift, size in reads:
            offset = int(at * len(whole)) + shift
            unique = device.read(HANDLE, offset, size)
            found = device.settle()
            assert found == Answer(unique, 0, whole[offset : offset + size])
        content.end()
    os.close(descriptor)


def test_a_page_that_was_checked_with_its_granule_is_checked_when_it_is_read_again(tmp_path: Path) -> None:
    (piece,) = _pieces(2, 3 * GRANULE_BYTES)
    content, descriptor = taught(str(tmp_path / "file"), [piece])
    content.add(HANDLE)
    with kernel() as device:
        for offset in (GRANULE_BYTES + 8192, GRANULE_BYTES + 12_288):
            unique = device.read(HANDLE, offset, 4096)
            assert device.settle() == Answer(unique, 0, piece[offset : offset + 4096])
        spoiled = GRANULE_BYTES + 12_288 + 5
        os.pwrite(descriptor, bytes([piece[spoiled] ^ 1]), 4096 + spoiled)
        unique = device.read(HANDLE, GRANULE_BYTES + 8192, 4096)
        assert device.settle() == Answer(unique, 0, piece[GRANULE_BYTES + 8192 : GRANULE_BYTES + 12_288])
        assert content.knows(0)
        unique = device.read(HANDLE, GRANULE_BYTES + 12_288, 100)
        assert _is_given(device.settle(), unique)
        assert not content.knows(0)
        content.end()
    os.close(descriptor)


@pytest.mark.parametrize("size", [100, 4096, 70_000, MIB])
@pytest.mark.parametrize("at", [0, 70_000, 5 * GRANULE_BYTES + 3, 16 * GRANULE_BYTES - 1])
def test_damage_anywhere_in_a_granule_is_never_answered(tmp_path: Path, size: int, at: int) -> None:
    (piece,) = _pieces(3, 16 * GRANULE_BYTES)
    content, descriptor = taught(str(tmp_path / "file"), [piece])
    os.pwrite(descriptor, bytes([piece[at] ^ 0x80]), 4096 + at)
    content.add(HANDLE)
    offset = max(0, at - size + 1)
    with kernel() as device:
        unique = device.read(HANDLE, offset, size)
        assert _is_given(device.settle(), unique)
        assert not content.knows(0), "a piece whose check failed is Python's"
        content.end()
    os.close(descriptor)


def test_memory_that_changes_is_noticed(tmp_path: Path) -> None:
    (piece,) = _pieces(4, 2 * GRANULE_BYTES)
    memory = bytearray(piece)
    content = _layer.Content(len(piece), [len(piece)])
    with pytest.raises(OSError, match="Invalid argument"):
        content.teach_memory(0, memoryview(memory)[:-1], checksums(piece))
    content.teach_memory(0, memoryview(memory), checksums(piece))
    content.add(HANDLE)
    with kernel() as device:
        unique = device.read(HANDLE, 100, 70_000)
        assert device.settle() == Answer(unique, 0, piece[100:70_100])
        memory[70_000] ^= 1
        unique = device.read(HANDLE, 100, 70_000)
        assert _is_given(device.settle(), unique)
        content.end()
    memory.append(0)  # nothing holds it any more


def test_what_was_not_taught_or_has_ended_is_libfuses(tmp_path: Path) -> None:
    (first,) = _pieces(5, GRANULE_BYTES)
    content, descriptor = taught(str(tmp_path / "file"), [first])
    longer = _layer.Content(2 * GRANULE_BYTES, [GRANULE_BYTES, GRANULE_BYTES])
    longer.teach(0, descriptor, 4096, 0, checksums(first))
    content.add(HANDLE)
    longer.add(HANDLE + 1)
    with kernel() as device:
        for handle, offset, size in (
            (HANDLE + 2, 0, 4096),  # a handle that was not added
            (HANDLE + 1, GRANULE_BYTES - 1, 2),  # into a piece that was not taught
            (HANDLE, 0, MIB + 1),  # longer than the layer's memory
            (HANDLE, 0, 0xFFFFFFFF),
        ):
            unique = device.read(handle, offset, size)
            assert _is_given(device.settle(), unique)
        for behind in (GRANULE_BYTES, GRANULE_BYTES + 1, GRANULE_BYTES + 4096, 2**63, 2**64 - 1):
            unique = device.read(HANDLE, behind, MIB)
            assert device.settle() == Answer(unique, 0, b"")
        content.end()
        unique = device.read(HANDLE, 0, 4096)
        assert _is_given(device.settle(), unique)
        _layer.remove(HANDLE + 1)
        unique = device.read(HANDLE + 1, 0, 4096)
        assert _is_given(device.settle(), unique)
    with pytest.raises(OSError, match="Stale"):
        content.add(HANDLE)
    os.close(descriptor)


def test_messages_of_odd_lengths_are_libfuses(tmp_path: Path) -> None:
    (piece,) = _pieces(6, GRANULE_BYTES)
    content, descriptor = taught(str(tmp_path / "file"), [piece])
    content.add(HANDLE)
    body = READ_IN.pack(HANDLE, 0, 4096, 0, 0, 0, 0)
    with kernel() as device:
        for odd, length in (
            (body[:-1], None),
            (body[:24], None),
            (b"", None),
            (body, 4096),
            (body, 0),
            (body + b"x", 80),
        ):
            unique = device.ask(READ, odd, length=length)
            assert _is_given(device.settle(), unique)
        unique = device.read(HANDLE, 0, 10)
        assert device.settle() == Answer(unique, 0, piece[:10])
        content.end()
    os.close(descriptor)


def test_the_layer_rests_when_nothing_is_read_and_every_request_arrives_once(tmp_path: Path) -> None:
    (piece,) = _pieces(7, 4 * GRANULE_BYTES)
    content, descriptor = taught(str(tmp_path / "file"), [piece])
    content.add(HANDLE)
    chosen = random.Random(8)
    before = _layer.counters()
    with kernel() as device:
        answered: set[int] = set()
        passed: set[int] = set()
        expected_reads: set[int] = set()
        expected_others: set[int] = set()
        for round_ in range(40):
            for _ in range(100):
                if round_ % 2:
                    expected_others.add(device.ask(LOOKUP, b"name\0"))
                else:
                    offset = chosen.randrange(len(piece))
                    expected_reads.add(device.read(HANDLE, offset, 4096))
            while len(answered) < len(expected_reads) or len(passed) < len(expected_others):
                found = device.settle()
                if isinstance(found, Answer):
                    assert found.error == 0
                    assert found.unique not in answered
                    answered.add(found.unique)
                else:
                    unique = IN_HEADER.unpack_from(found)[2]
                    assert unique not in passed
                    passed.add(unique)
        assert answered == expected_reads
        assert passed == expected_others
        content.end()
    assert _layer.counters()["wakes"] - before["wakes"] >= 5, "it rests between, and wakes"
    os.close(descriptor)


def test_an_end_waits_for_reads_and_nothing_of_it_is_answered_afterwards(tmp_path: Path) -> None:
    """Readers never see bytes that were written after the content has ended: as a write through the mount would be."""
    size = 16 * GRANULE_BYTES
    (piece,) = _pieces(9, size)
    with kernel() as device:
        for number in range(30):
            content, descriptor = taught(str(tmp_path / f"f{number}"), [piece])
            content.add(HANDLE)
            uniques = {device.read(HANDLE, 0, size) for _ in range(8)}
            first = device.settle()
            content.end()
            reads = _layer.counters()["reads"]
            os.ftruncate(descriptor, 0)
            os.close(descriptor)
            left = set(uniques)
            found: Answer | bytes = first
            while True:
                if isinstance(found, Answer):
                    assert found.body == piece
                    left.remove(found.unique)
                else:
                    left.remove(IN_HEADER.unpack_from(found)[2])
                if not left:
                    break
                found = device.settle()
            assert _layer.counters()["reads"] == reads, "none was answered after the end"


def test_opens_get_their_backing_and_nothing_else_does() -> None:
    with kernel() as device:
        plain = OPEN_OUT.pack(9, layer.FOPEN_KEEP_CACHE, 0)

        def answered(opcode: int, body: bytes, error: int = 0) -> bytes:
            unique = device.ask(opcode, b"\0" * 16)
            assert _is_given(device.next_given(), unique)
            _layer.send(OUT_HEADER.pack(OUT_HEADER.size + len(body), error, unique), body)
            return device.answer().body

        def want() -> None:
            layer.answer_open(9, backing=5, flags=layer.FOPEN_PASSTHROUGH, without=layer.FOPEN_KEEP_CACHE)

        wanted = OPEN_OUT.pack(9, layer.FOPEN_PASSTHROUGH, 5)
        want()
        assert answered(READ, plain) == plain, "sixteen bytes of a file are no answer to OPEN"
        assert answered(OPEN, OPEN_OUT.pack(8, 0, 0)) == OPEN_OUT.pack(8, 0, 0)
        assert answered(OPEN, b"") == b""
        assert answered(OPEN, plain) == wanted
        assert answered(OPEN, plain) == plain, "once"
        want()
        entry = random.Random(1).randbytes(ENTRY_BYTES)
        assert answered(CREATE, entry + plain) == entry + wanted
        want()
        assert layer.take_back_open(9)
        assert not layer.take_back_open(9)
        assert answered(CREATE, entry + plain) == entry + plain


def test_too_many_wanted_opens_are_refused() -> None:
    with kernel():
        for handle in range(1, 513):
            layer.answer_open(handle)
        with pytest.raises(OSError, match="No space"):
            layer.answer_open(513)
        layer.answer_open(512)
        with pytest.raises(OSError, match="Invalid"):
            layer.answer_open(0)


@pytest.mark.parametrize(("offered", "wanted"), [(False, True), (True, True), (True, False)])
def test_the_handshake_takes_what_the_kernel_offers_and_the_mount_wants(offered: bool, wanted: bool) -> None:
    flags, flags2 = (1 << 30 | 1 << 18, 1 << 5) if offered else (0, 0)
    with kernel(passthrough=wanted) as device:
        unique = device.ask(INIT, struct.pack("<5I11I", 7, 45, 1 << 17, flags, flags2, *[0] * 11))
        assert _is_given(device.next_given(), unique)
        _layer.send(OUT_HEADER.pack(80, 0, unique), struct.pack("<4IHHIIHHII6I", 7, 38, 1 << 17, 3, *[0] * 14))
        body = struct.unpack("<4IHHIIHHII6I", device.answer().body)
        is_taken = offered and wanted
        assert body[3] == 3 | (flags if is_taken else flags & 1 << 18)
        assert (body[10], body[11]) == ((flags2, 1) if is_taken else (0, 0))
        assert layer.has_passthrough() is is_taken


def test_a_device_that_is_gone_ends_the_session(tmp_path: Path) -> None:
    (piece,) = _pieces(10, GRANULE_BYTES)
    content, descriptor = taught(str(tmp_path / "file"), [piece])
    content.add(HANDLE)
    with kernel() as device:
        unique = device.read(HANDLE, 0, 10)
        assert device.settle() == Answer(unique, 0, piece[:10])
        last = device.ask(LOOKUP, b"name\0")
        device.socket.shutdown(2)
        given = device.next_given()
        if given:
            assert _is_given(given, last)
        content.end()
    os.close(descriptor)


def test_what_the_device_refuses_is_an_error_of_its_writer() -> None:
    """Answers and notices are written at once: libfuse's caller gets the kernel's errno."""
    with kernel() as device:
        device.socket.close()
        for unique in (2, 0):
            with pytest.raises(BrokenPipeError):
                _layer.send(OUT_HEADER.pack(OUT_HEADER.size + 4, 0, unique), b"text")
    with pytest.raises(OSError, match="No such device") as failed:
        _layer.send(OUT_HEADER.pack(OUT_HEADER.size, 0, 2), b"")
    assert failed.value.errno == errno.ENODEV


def test_the_queue_has_a_bound_and_threads_wait_for_room(tmp_path: Path) -> None:
    (piece,) = _pieces(11, GRANULE_BYTES)
    content, descriptor = taught(str(tmp_path / "file"), [piece])
    content.add(HANDLE)
    with kernel() as device:
        unique = device.read(HANDLE, 0, 10)
        assert device.settle() == Answer(unique, 0, piece[:10])
        expected: list[int] = []
        sending = threading.Thread(
            target=lambda: expected.extend(device.ask(LOOKUP, bytes(300 * KIB)) for _ in range(150))
        )
        before = _layer.counters()["passed_on"]
        sending.start()
        sending.join(0.5)
        assert _layer.counters()["passed_on"] - before <= 16 * MIB // (300 * KIB)
        assert sending.is_alive(), "what has no room is left in the device"
        found = [IN_HEADER.unpack_from(device.next_given())[2] for _ in range(150)]
        sending.join()
        assert sorted(found) == expected
        content.end()
    os.close(descriptor)


def test_thousands_of_handles_come_and_go() -> None:
    contents = [_layer.Content(1, [1]) for _ in range(50)]
    chosen = random.Random(12)
    before = _layer.counters()["handles"]
    present: set[int] = set()
    numbers = [chosen.getrandbits(64) for _ in range(90_000)]
    for _ in range(150_000):
        handle = chosen.choice(numbers)
        if handle in present and chosen.random() < 0.6:
            _layer.remove(handle)
            present.remove(handle)
        else:
            chosen.choice(contents).add(handle)
            present.add(handle)
    assert _layer.counters()["handles"] - before == len(present)
    with kernel() as device:
        for handle in numbers[:5000]:
            unique = device.read(handle, 1, 1)  # behind the end: the answer needs no bytes
            found = device.settle()
            assert found == Answer(unique, 0, b"") if handle in present else _is_given(found, unique)
    for handle in present:
        _layer.remove(handle)
    assert _layer.counters()["handles"] == before


def test_a_layout_that_is_odd_is_refused() -> None:
    for size, lengths in ((1, []), (1, [0]), (2, [1]), (1, [65 * MIB]), (1, [1] * 16_385)):
        with pytest.raises((OSError, ValueError)):
            _layer.Content(size, lengths)
    content = _layer.Content(1, [1])
    for index, descriptor, place, crcs in (
        (1, 3, 0, b"1234"), (0, -1, 0, b"1234"), (0, 3, 2**63, b"1234"), (0, 3, 0, b"12345678"), (0, 3, 0, b""),
    ):  # fmt: skip
        with pytest.raises(OSError, match="Invalid"):
            content.teach(index, descriptor, place, 0, crcs)


def test_threads_that_read_while_contents_end_and_begin(tmp_path: Path) -> None:
    """Handles change their contents under readers; every answer is whole and of one of them."""
    versions = [_pieces(20 + number, 2 * GRANULE_BYTES)[0] for number in range(2)]
    files = [taught(str(tmp_path / f"v{number}"), [piece])[1] for number, piece in enumerate(versions)]
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            for descriptor, piece in zip(files, versions, strict=True):
                content = _layer.Content(len(piece), [len(piece)])
                content.teach(0, descriptor, 4096, 0, checksums(piece))
                content.add(HANDLE)
                content.end()

    changing = threading.Thread(target=change)
    with kernel() as device:
        changing.start()
        try:
            _read_many(device, set(versions))
        finally:
            stop.set()
            changing.join()
        _layer.remove(HANDLE)
    for descriptor in files:
        os.close(descriptor)


def _read_many(device: Kernel, versions: set[bytes]) -> None:
    for _ in range(1500):
        unique = device.read(HANDLE, 0, 2 * GRANULE_BYTES)
        found = device.settle()
        if isinstance(found, Answer):
            assert found.unique == unique
            assert found.body in versions
        else:
            assert _is_given(found, unique)


@pytest.mark.slow
def test_its_threads_share_nothing_without_a_lock(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    program = tmp_path / "threads"
    source = Path(__file__).with_name("threads.c")
    command = [
        str(compiler),
        "-O1",
        "-g",
        "-fsanitize=thread",
        "-w",
        str(source),
        "-o",
        str(program),
        "-lpthread",
        "-ldl",
    ]
    if compiler is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("there is no compiler with -fsanitize=thread")
    ran = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout

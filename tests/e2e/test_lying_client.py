"""Clients that lie, change their minds or fall asleep, against a real engine: they harm nobody but themselves."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lakefs.client.blocking.engine import BlockingEngine, connect_blocking
from lakefs.client.connect import connect
from lakefs.client.facade import driver_of
from lakefs.content.manifest import CutKind, Entry, Manifest, build, encode
from lakefs.errors import ChunkDamaged, ChunkNotFound, InvalidArgument, KeyNotFound, SessionLost, SourceChanged
from lakefs.ids import ChunkId, ChunkKind, chunk_id_of, data_chunk_id
from lakefs.wire import messages as m
from tests.e2e.served import ROOT, Served, environment, serving
from tests.served_devices import CYCLES, SEGMENTS

KIB = 1 << 10
MIB = 1 << 20
PLAIN = m.ObjectAttributes()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with TemporaryDirectory(prefix="lake-") as folder:
        with serving(Path(folder), "--native", "127.0.0.1:0") as engine:
            yield engine


@pytest.fixture
def engine(served: Served) -> Iterator[BlockingEngine]:
    with connect_blocking(served.server) as client:
        yield client


def open_session(engine: BlockingEngine) -> bytes:
    reply = engine.call(m.SessionOpen()).message
    assert isinstance(reply, m.SessionOpened)
    return reply.session


def store(engine: BlockingEngine, session: bytes, *payloads: bytes, kind: int = 1) -> list[ChunkId]:
    request = m.StoreChunks(session, [kind] * len(payloads), [len(payload) for payload in payloads])
    reply = engine.call(request, payloads).message
    assert isinstance(reply, m.Stored)
    return [ChunkId(chunk) for chunk in reply.chunks]


def bind(engine: BlockingEngine, session: bytes, key: str, blob: bytes) -> m.ObjectStat:
    """Commit one name; raise its failure."""
    change = m.NameChange("lies", key, blob, PLAIN, create_bucket=True)
    reply = engine.call(m.Commit(session, [change])).message
    assert isinstance(reply, m.NameResults)
    (result,) = reply.results
    if result.failure is not None:
        raise result.failure.as_error()
    assert result.stat is not None
    return result.stat


def manifest_of(entries: list[tuple[ChunkId, int]], *, level: int = 0, size: int | None = None) -> bytes:
    total = sum(length for _, length in entries) if size is None else size
    return encode(Manifest(CutKind.FIXED, level, total, tuple(Entry(*entry) for entry in entries)))


def is_there(served: Served, key: str) -> bool:
    with connect(served.server) as client:
        return client.exists(f"lies/{key}")


# --- ids and manifests ---------------------------------------------------------------------------------


def test_an_offer_of_what_nobody_stored_creates_nothing(served: Served, engine: BlockingEngine) -> None:
    session = open_session(engine)
    never = data_chunk_id(b"never stored")
    reply = engine.call(m.Offer(session, [never])).message
    assert reply == m.Offered([False])
    with pytest.raises(ChunkNotFound):
        bind(engine, session, "offered", never)
    assert not is_there(served, "offered")


def test_the_engine_names_payloads_itself_whatever_the_client_calls_them(
    served: Served, engine: BlockingEngine
) -> None:
    session = open_session(engine)
    claimed = data_chunk_id(b"what the client says it sends")
    (named,) = store(engine, session, b"what it sends")
    assert named == data_chunk_id(b"what it sends")
    with pytest.raises(ChunkNotFound):
        bind(engine, session, "claimed", claimed)
    assert not is_there(served, "claimed")


def test_manifests_that_lie_bind_no_name(served: Served, engine: BlockingEngine) -> None:
    session = open_session(engine)
    one, two = store(engine, session, b"1" * 1000, b"2" * 70_000)
    absent = data_chunk_id(b"absent")
    lies = {
        "short": [(one, 999), (two, 70_000)],
        "long": [(one, 1000), (two, 70_001)],
        "swapped": [(one, 70_000), (two, 1000)],
        "absent": [(one, 1000), (absent, 6)],
    }
    for key, entries in lies.items():
        (top,) = store(engine, session, manifest_of(entries), kind=2)
        with pytest.raises((InvalidArgument, ChunkNotFound)):
            bind(engine, session, key, top)
        assert not is_there(served, key)


def test_bytes_that_are_no_manifest_are_refused_as_one(served: Served, engine: BlockingEngine) -> None:
    session = open_session(engine)
    one, two = store(engine, session, b"1" * 1000, b"2" * 1000)
    good = manifest_of([(one, 1000), (two, 1000)])
    cases = {
        "garbage": os.urandom(112),
        "size": manifest_of([(one, 1000), (two, 1000)], size=1 << 60),
        "cut off": good[:-7],
        "lone": manifest_of([(one, 1000)]),
        "level": manifest_of([(one, 1000), (two, 1000)], level=3),
        "version": good[:4] + b"\x09" + good[5:],
    }
    for key, payload in cases.items():
        with pytest.raises(InvalidArgument):
            (top,) = store(engine, session, payload, kind=2)
            bind(engine, session, key, top)
        assert not is_there(served, key)
    # The same bytes as data are just data.
    (as_data,) = store(engine, session, cases["garbage"])
    assert bind(engine, session, "as data", as_data).size_bytes == 112


def test_a_kind_byte_that_lies_names_another_chunk(served: Served, engine: BlockingEngine) -> None:
    session = open_session(engine)
    one, two = store(engine, session, b"1" * 1000, b"2" * 1000)
    payload = manifest_of([(one, 1000), (two, 1000)])
    (as_data,) = store(engine, session, payload)
    with pytest.raises(ChunkNotFound):
        bind(engine, session, "kind", bytes([ChunkKind.MANIFEST]) + as_data[1:])
    for blob in (b"", b"\x01", b"\x07" + as_data[1:], as_data + b"\0"):
        with pytest.raises(InvalidArgument):
            bind(engine, session, "kind", blob)
    assert not is_there(served, "kind")


def tree_of(engine: BlockingEngine, session: bytes, entries: list[tuple[ChunkId, int]]) -> ChunkId:
    """Store a level-1 manifest over full level-0 ones."""
    (top,) = store(engine, session, manifest_of(entries, level=1), kind=2)
    return top


def test_children_that_are_not_what_their_parent_says_are_refused(served: Served, engine: BlockingEngine) -> None:
    session = open_session(engine)
    (byte,) = store(engine, session, b"x")
    full = manifest_of([(byte, 1)] * 8192)
    part = manifest_of([(byte, 1)] * 5)
    full_id, part_id = store(engine, session, full, part, kind=2)
    lies = {
        "wrong length": [(full_id, 8192), (part_id, 6)],
        "not full, not last": [(part_id, 8192), (full_id, 8192)],
        "missing child": [(full_id, 8192), (chunk_id_of(ChunkKind.MANIFEST, b"none"), 5)],
    }
    for key, entries in lies.items():
        with pytest.raises((InvalidArgument, ChunkNotFound)):
            bind(engine, session, key, tree_of(engine, session, entries))
        assert not is_there(served, key)


def test_a_child_named_many_times_is_one_child_with_one_content(served: Served, engine: BlockingEngine) -> None:
    """A large file of zeros is like this: its manifests are all the same."""
    session = open_session(engine)
    (byte,) = store(engine, session, b"x")
    tree = build(CutKind.FIXED, ((byte, 1) for _ in range(3 * 8192)))
    for identifier, payload in tree.manifests:
        assert store(engine, session, payload, kind=2) == [identifier]
    stat = bind(engine, session, "repeated", tree.blob)
    assert (stat.size_bytes, stat.chunk_count) == (3 * 8192, 3 * 8192)
    with connect(served.server) as client:
        assert client.get("lies/repeated") == b"x" * (3 * 8192)


def test_nothing_is_bound_through_a_session_that_is_not_there(served: Served, engine: BlockingEngine) -> None:
    with pytest.raises(SessionLost):
        bind(engine, os.urandom(16), "no session", data_chunk_id(b"x"))


# --- sources that change -------------------------------------------------------------------------------


@contextmanager
def changing_file(path: Path, size: int) -> Iterator[None]:
    """Change a file's bytes all the time, through a mapping, without a change of its times."""
    path.write_bytes(bytes(size))
    stop = threading.Event()

    def change() -> None:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as view:
            value = 0
            while not stop.is_set():
                value = (value + 1) % 256
                for start in range(0, size, 64 * KIB):
                    view[start : start + 64] = bytes([value]) * 64

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_what_is_stored_from_a_changing_file_is_what_its_id_says(
    served: Served, engine: BlockingEngine, tmp_path: Path
) -> None:
    session = open_session(engine)
    stored: list[ChunkId] = []
    with changing_file(tmp_path / "changing", 2 * MIB), (tmp_path / "changing").open("rb") as file:
        opened = engine.call(m.SourceOpen(), descriptors=[file.fileno()]).message
        assert isinstance(opened, m.SourceOpened)
        for _ in range(40):
            reply = engine.call(m.StoreFromSource(session, opened.source, [0, MIB], [MIB, MIB])).message
            assert isinstance(reply, m.Stored)
            stored += [ChunkId(chunk) for chunk in reply.chunks]
    for chunk in dict.fromkeys(stored):
        answer = engine.call(m.ReadChunks([chunk], [0], [0]))
        assert data_chunk_id(answer.body.joined()) == chunk
    assert len(set(stored)) > 2, "the file did not change while it was read"


@pytest.mark.parametrize("way", ["socket", "tcp"])
@pytest.mark.parametrize("how", ["shrinks", "changes"])
def test_a_source_that_shrinks_or_changes_is_not_stored(tmp_path: Path, served: Served, way: str, how: str) -> None:
    """The put itself notices, whether the engine reads the file by its descriptor, or the client does."""
    path = tmp_path / "source"
    path.write_bytes(os.urandom(40 * MIB))
    address = served.server
    token = None
    if way == "tcp":
        (address,) = [line.split()[1] for line in served.printed if "tcp://" in line]
        token = served.token()
    with connect(address, token=token) as client:

        def spoil(done: int, present: int) -> None:
            if how == "shrinks":
                os.truncate(path, 5 * MIB)
            else:
                with path.open("r+b") as file:
                    file.write(b"changed")
                os.utime(path, ns=(1, 1))

        with pytest.raises(SourceChanged, match="nothing was stored") as caught:
            client.put(f"lies/{way}-{how}", path, progress=spoil, create_bucket=True)
        assert str(path) in caught.value.message
        assert not client.exists(f"lies/{way}-{how}")
        client.put(f"lies/{way}-{how}", path, create_bucket=True)
        assert client.get(f"lies/{way}-{how}") == path.read_bytes()


# --- clients that sleep --------------------------------------------------------------------------------

SLEEPER = """
import mmap, os, signal, sys
from lakefs.client.blocking.engine import connect_blocking
from lakefs.client.facade import driver_of
from lakefs.wire import messages as m

address, fork = sys.argv[1:]
with connect_blocking(address) as engine:
    opened = engine.call(m.OpenObjects([("sleep", "victim")], lease=False)).message.results[0].opened
    reply = engine.call(m.OpenSegments(sorted({grant.segment for grant in opened.grants})))
descriptors = dict(zip(reply.message.segments, reply.descriptors))
views = {segment: mmap.mmap(fd, 0, prot=mmap.PROT_READ) for segment, fd in descriptors.items()}
print("holding", flush=True)
if fork == "fork" and os.fork():
    os._exit(0)
if fork == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    sys.stdin.readline()
for grant, length in zip(opened.grants, opened.lengths):
    content = os.pread(descriptors[grant.segment], length, grant.offset)
    mapped = views[grant.segment][grant.offset : grant.offset + length]
    print(content.hex(), flush=True)
    print(mapped.hex(), flush=True)
"""


@pytest.mark.one_engine(SEGMENTS)
@pytest.mark.parametrize("way", ["stop", "fork"])
def test_a_sleeping_holder_of_descriptors_sees_its_own_bytes_or_zeros(served: Served, way: str) -> None:
    content = os.urandom(9 * MIB)
    with connect(served.server) as client:
        client.put("sleep/victim", content, create_bucket=True)
    sleeper = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, served.server, way],
        env=environment(),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert sleeper.stdout is not None
    assert sleeper.stdin is not None
    try:
        assert sleeper.stdout.readline() == b"holding\n"
        if way == "stop":
            _, status = os.waitpid(sleeper.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
        with connect(served.server) as client:
            client.remove("sleep/victim")
            assert client.gc()["freed_bytes"] >= 9 * MIB
            others = {f"sleep/other{number}": os.urandom(9 * MIB) for number in range(3)}
            for name, other in others.items():
                client.put(name, other, create_bucket=True)
            for name in others:
                client.remove(name)
            client.gc()
            client.put("sleep/victim", os.urandom(9 * MIB))
        if way == "stop":
            sleeper.send_signal(signal.SIGCONT)
        sleeper.stdin.write(b"go on\n")
        sleeper.stdin.close()
        seen = [bytes.fromhex(line.decode()) for line in sleeper.stdout]
    finally:
        sleeper.kill()
        sleeper.wait()
        sleeper.stdout.close()
    assert len(seen) == 6
    for index, found in enumerate(seen):
        start = index // 2 * 4 * MIB
        own = content[start : start + len(found)]
        # Page by page: room is given back in whole pages.
        for at in range(0, len(found), 4096):
            page = found[at : at + 4096]
            assert page == own[at : at + 4096] or not any(page), f"chunk {index // 2}, offset {at}"


def test_a_reader_that_finds_zeros_never_takes_them_for_content(served: Served) -> None:
    """The holder of an old grant asks again, and gets an error that the object is gone."""
    content = os.urandom(300 * KIB)
    with connect(served.server) as reader, connect(served.server) as other:
        other.put("sleep/gone", content, create_bucket=True)
        reader.get("sleep/gone")
        driver = driver_of(reader)
        opened = driver.run(driver.steps.open("sleep/gone"))
        driver.run(driver.steps.close(opened))
        other.remove("sleep/gone")
        for _ in range(CYCLES):
            other.gc()
        with pytest.raises((ChunkNotFound, KeyNotFound, ChunkDamaged)) as caught:
            driver.run(driver.steps.read(opened, 0, len(content)))
        assert not isinstance(caught.value, ChunkDamaged), "what is gone is not damaged"
        json.dumps(caught.value.message)

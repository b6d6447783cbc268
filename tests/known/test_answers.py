"""A client that repeats answers and one that asks each time are given the same ones, whatever has changed before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.client.facade import driver_of
from lakefs.content.verify import Check
from lakefs.errors import KeyNotFound
from lakefs.limits import GRANULE_BYTES, HOT_INDEX_SLOTS_MIN, UNLEASED_BELOW_BYTES
from lakefs.shared_index.table import SharedTable
from lakefs.shared_index.table_format import table_bytes
from lakefs.wire import messages as m
from tests.e2e.served import Served
from tests.known.clients import everything, into, learned, outcome, read_whole, reader, requests
from tests.known.history import ASKED, BUCKET, ROOM, History
from tests.known.planted import look_at_no_stamps
from tests.lengths import repeated
from tests.served_devices import SHORT

pytestmark = [pytest.mark.thorough, pytest.mark.one_engine(SHORT)]

CHANGES = 60
SEEDS = repeated((1,), (1, 2, 3))
ONE = f"{BUCKET}/one"
LONGEST = 256 << 10


def same_answers(engine: Served, writer: Lake, kind: str, check: Check, seed: int) -> None:
    """Change things at random; after each change ask both clients for everything, twice."""
    history = History(writer, seed)
    with (
        reader(kind, engine.server, check=check) as repeating,
        reader("blocking", engine.server, check=check, repeats=False) as asking,
    ):
        for _ in range(CHANGES):
            history.change()
            for _ in range(2):
                assert everything(repeating, ASKED, ROOM) == everything(asking, ASKED, ROOM), history.tried[-5:]
        assert asking.known.answered == 0
        assert repeating.known.answered > 10 * CHANGES, repeating.known


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("check", list(Check))
def test_whatever_changes_both_clients_answer_alike(
    engine: Served, writer: Lake, kind: str, check: Check, seed: int
) -> None:
    same_answers(engine, writer, kind, check, seed)


def test_a_client_that_looks_at_no_stamps_is_noticed(engine: Served, writer: Lake, kind: str) -> None:
    with look_at_no_stamps(), pytest.raises(AssertionError, match=r"_put|_remove|_move|_copy|_make|_set|_upload"):
        same_answers(engine, writer, kind, Check.CRC32C, 1)


# --- what is answered, and what it takes -------------------------------------------------------------------


def test_known_names_take_no_request_and_their_reads_are_counted(engine: Served, writer: Lake) -> None:
    contents = {f"{BUCKET}/{size}": os.urandom(size) for size in (0, 1, 4096, GRANULE_BYTES)}
    writer.put_many(list(contents.items()))
    with connect(engine.server) as lake:
        learned(lake, *contents)
        sent, before = requests(lake), lake.known.answered
        for name, content in contents.items():
            assert lake.get(name) == lake.get(f"lake://{name}") == content
            assert lake.stat(name).size_bytes == len(content)
            assert lake.exists(name)
            assert read_whole(lake, name) == (lake.stat(name), content)
        assert lake.get_many(list(contents)) == list(contents.values())
        assert sent == []
        assert lake.known.answered == before + 7 * len(contents)
        assert lake.known.names == len(contents)


def test_up_to_a_quarter_of_a_mebibyte_is_known_and_longer_content_asked_for(engine: Served, writer: Lake) -> None:
    """An object of more than 64 KiB is opened with a lease all the same."""
    contents = {f"{BUCKET}/{size}": os.urandom(size) for size in (GRANULE_BYTES + 1, 100_000, LONGEST, LONGEST + 1)}
    for name, content in contents.items():
        writer.put(name, content)
    *known, unknown = contents
    with connect(engine.server) as lake:
        for _ in range(5):
            for name, content in contents.items():
                assert lake.get(name) == content
        learned(lake, *known)
        sent = requests(lake)
        assert lake.get_many(known) == [contents[name] for name in known]
        assert lake.stat(unknown).size_bytes == LONGEST + 1
        assert sent == []
        assert lake.get(unknown) == contents[unknown]
        assert read_whole(lake, known[0])[1] == contents[known[0]]
        opening = [request for request in sent if isinstance(request, m.OpenObjects)]
        assert [request.lease_from for request in opening] == [UNLEASED_BELOW_BYTES, 0]


def test_a_command_that_reads_one_object_sends_one_request(engine: Served, writer: Lake) -> None:
    writer.put(ONE, b"1")
    with connect(engine.server) as lake:
        sent = requests(lake)
        lake.get(ONE)
        assert list(map(type, sent)) == [m.OpenObjects]
        lake.get(ONE)
        lake.get(ONE)
        kinds = list(map(type, sent))
        assert kinds.count(m.OpenStamps) == kinds.count(m.OpenSharedIndex) == 1


def test_one_missing_name_is_asked_for_alone(engine: Served, writer: Lake) -> None:
    names = [f"{BUCKET}/{number}" for number in range(5)]
    writer.put_many([(name, name.encode()) for name in names])
    with connect(engine.server) as lake:
        learned(lake, *names)
        writer.put(names[2], b"new")
        sent = requests(lake)
        assert lake.get_many(names) == [b"new" if name == names[2] else name.encode() for name in names]
        assert [request.names for request in sent if isinstance(request, m.OpenObjects)] == [[(BUCKET, "2")]]


def test_an_opened_object_stays_readable_without_a_lease(engine: Served, writer: Lake, kind: str) -> None:
    content = os.urandom(5000)
    writer.put(ONE, content)
    with reader(kind, engine.server) as client:
        learned(client, ONE)
        before = client.known.answered
        with client.open(ONE) as opened:
            assert client.known.answered == before + 1
            writer.remove(ONE)
            for _ in range(2):
                writer.gc(compact=True)
            assert opened.read() == content
        with pytest.raises(KeyNotFound):
            client.open(ONE)


def test_what_one_caller_gets_another_cannot_change(engine: Served, writer: Lake) -> None:
    writer.put(ONE, b"1", user_metadata={"a": "b"})
    with connect(engine.server) as lake:
        learned(lake, ONE)
        lake.stat(ONE).user_metadata["a"] = "c"
        assert lake.stat(ONE).user_metadata == {"a": "b"}


def test_progress_is_called_and_a_short_buffer_refused_as_ever(engine: Served, writer: Lake) -> None:
    writer.put(ONE, b"12345")
    with connect(engine.server) as lake, connect(engine.server, repeats=False) as asking:
        learned(lake, ONE)
        told: list[tuple[int, int]] = []
        lake.get(ONE, progress=lambda done, there: told.append((done, there)))
        assert told == [(5, 0)]
        for client in (lake, asking):
            assert "only 3" in str(outcome(lambda client=client: client.get_into(ONE, bytearray(3))))  # type: ignore[misc]


def test_a_tcp_client_and_one_that_wants_no_repeats_ask_each_time(tmp_path: Path) -> None:
    served = Served(tmp_path, "--native", "127.0.0.1:0")
    try:
        where = next(line.split()[-1] for line in served.printed if "tcp://" in line)
        token = served.token()
        for lake in (connect(where, token=token), connect(served.server, repeats=False)):
            with lake:
                lake.put(ONE, b"1", create_bucket=True)
                assert [lake.get(ONE) for _ in range(5)] == [b"1"] * 5
                assert lake.known.names == lake.known.answered == 0
    finally:
        served.kill()


# --- content that is not right, or not at hand -----------------------------------------------------------


def test_flipped_bytes_of_a_segment_are_never_returned(tmp_path: Path, kind: str) -> None:
    """The bytes in the page cache are changed under a client that reads there."""
    served = Served(tmp_path, "--dram-tier-bytes", "0")
    try:
        with connect(served.server) as writer, reader(kind, served.server, check=Check.CRC32C) as client:
            for at in (0, 100, 4095):
                content = os.urandom(4096)
                writer.put(ONE, content, create_bucket=True)
                learned(client, ONE)
                segment, offset = _place_of(served, content)
                with open(segment, "r+b", buffering=0) as file:
                    os.pwrite(file.fileno(), bytes([content[at] ^ 1]), offset + at)
                before = client.known.answered
                for call in (lambda: client.get(ONE), lambda: client.get_many([ONE]), lambda: into(client, ONE, 4096)):
                    found = outcome(call)
                    assert found in (content, [content], (4096, content)) or "ChunkDamaged" in str(found)
                assert client.known.answered == before
    finally:
        served.kill()


def _place_of(engine: Served, content: bytes) -> tuple[Path, int]:
    for segment in (engine.data / "segments").rglob("*"):
        if segment.is_file() and (at := segment.read_bytes().find(content)) >= 0:
            return segment, at
    raise AssertionError("the content is in no segment")


def test_a_blake3_client_believes_no_checksum_of_the_engine(engine: Served, writer: Lake) -> None:
    """The index has the place and the CRC32C of other content: only the hash tells."""
    contents = [os.urandom(4096), os.urandom(4096)]
    names = [f"{BUCKET}/{number}" for number in range(2)]
    writer.put_many(list(zip(names, contents, strict=True)))
    chunks = [bytes(writer.stat(name).blob) for name in names]
    for check, found in ((Check.BLAKE3, contents[0]), (Check.CRC32C, contents[1])):
        with connect(engine.server, check=check) as lake:
            learned(lake, *names)
            known = driver_of(lake)._known
            reads = driver_of(lake).shares.index.at_hand()
            assert known is not None
            assert reads is not None
            place = reads.index.find(chunks[1])
            assert place is not None
            lying = SharedTable(bytearray(table_bytes(HOT_INDEX_SLOTS_MIN)), HOT_INDEX_SLOTS_MIN)
            lying.put(chunks[0], *place)
            before = lake.known.answered
            known._table.use_places(lying)
            buffer = bytearray(4096)
            assert lake.get(names[0]) == found
            assert lake.get_many(names[:1]) == [found]
            assert lake.get_into(names[0], buffer) == 4096
            assert bytes(buffer) == found
            assert read_whole(lake, names[0])[1] == found
            assert lake.known.answered == before + (4 if check is Check.CRC32C else 0)


def test_content_that_was_moved_is_found_again(engine: Served, writer: Lake) -> None:
    names = [f"{BUCKET}/{number}" for number in range(200)]
    contents = [os.urandom(2000) for _ in names]
    writer.put_many(list(zip(names, contents, strict=True)))
    with connect(engine.server) as lake:
        learned(lake, *names[:1])
        lake.get_many(names)
        for name in names[20:]:
            writer.remove(name)
        for _ in range(2):
            writer.gc(compact=True)
        for _ in range(3):
            assert lake.get_many(names[:20]) == contents[:20]
        learned(lake, *names[:20])

"""A client that finds keys in the keyed index has the answers of one that asks, and sends no request for them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

import pytest

from lakefs.client.blocking.driver import BlockingDriver
from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.client.trio.driver import TrioDriver
from lakefs.content.verify import Check
from lakefs.direct.keyed_reads import KeyedReads
from lakefs.errors import EngineUnreachable, InvalidArgument, SpaceNotFound
from lakefs.limits import KEY_NOTES_MAX, KIB
from lakefs.put.keyed import Outcome
from lakefs.shares.keys_in_use import KeysInUse
from lakefs.wire import messages as m
from tests.e2e.served import Served
from tests.keyed.clients import AskingSpace, Reader, contents, index_of, loaded, space_of
from tests.keyed.plants import any_bytes_are_believed, once
from tests.known.clients import requests

SIZES: Final = (1, 900, 4096, 64 * KIB, 64 * KIB + 1, 150_000)
ROOM: Final = 200_000
CHANGES: Final = 40


def value_of(key: bytes, turn: int, size: int) -> bytes:
    """Return a value that names its key in all of its bytes."""
    text = b"<%s %d>" % (key, turn)
    return (text * (size // len(text) + 1))[:size]


def keys_of(count: int) -> list[bytes]:
    return [b"key %d " % number + bytes([number % 7]) * (number % 40) for number in range(count)]


def warm(space: Reader, keys: list[bytes]) -> None:
    """Read until the client has the index and the descriptors that it needs."""
    for _ in range(3):
        contents(space, keys, ROOM)
        space.match(keys)


# --- without a request ------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [Check.CRC32C, Check.NONE])
def test_keys_are_matched_loaded_and_read_without_a_request(engine: Served, writer: Lake, check: Check) -> None:
    keys = keys_of(len(SIZES))
    values = [value_of(key, 0, size) for key, size in zip(keys, SIZES, strict=True)]
    with connect(engine.server, check=check) as lake:
        space = lake.space("space")
        space.put_many(keys, values)
        warm(space, keys)
        loaded(space, keys, ROOM)
        sent = requests(lake)
        assert space.match([*keys[:2], b"absent", *keys[2:]]) == (2, [True] * 2 + [False] + [True] * 4)
        assert contents(space, [*keys, b"absent"], ROOM) == [*values, b""]
        assert loaded(space, [b"absent", *keys], ROOM) == [b"", *values]
        assert contents(space, keys, 4096) == [*values[:3], b"", b"", b""], "values that do not fit are misses"
        assert space.match([b"absent"]) == (0, [False])
        assert space.match([]) == (0, [])
        assert sent == []


@pytest.mark.one_engine("the members count the requests, and a head's status does not add them up")
def test_a_trio_client_needs_no_request_either(engine: Served, writer: Lake) -> None:
    keys = keys_of(4)
    values = [value_of(key, 0, size) for key, size in zip(keys, SIZES, strict=False)]
    writer.space("space").put_many(keys, values)

    def asked() -> int:
        counts: dict[str, int] = writer.status()["keyed"]
        return counts["matched"] + counts["missed"] + counts["loaded"]

    with space_of("trio", engine.server, "space") as space:
        warm(space, keys)
        before = asked()
        assert space.match([*keys, b"absent"]) == (4, [True] * 4 + [False])
        assert contents(space, keys, ROOM) == values
        assert loaded(space, keys, ROOM) == values
        assert asked() == before


@pytest.mark.one_engine("a head gives no places of chunks by their ids, and sends the bytes")
def test_a_client_that_checks_by_blake3_asks_for_ids_and_matches_without(engine: Served, writer: Lake) -> None:
    keys = keys_of(3)
    values = [value_of(key, 0, 900) for key in keys]
    with connect(engine.server) as lake:
        space = lake.space("space")
        space.put_many(keys, values)
        warm(space, keys)
        sent = requests(lake)
        assert space.match(keys) == (3, [True] * 3)
        assert sent == []
        assert contents(space, keys, ROOM) == values
        assert list(map(type, sent)) == [m.KeyedMatch]
        assert loaded(space, keys, ROOM) == values
        assert m.KeyedLoad in map(type, sent)


def test_values_of_several_parts_are_matched_here_and_read_by_the_engine(engine: Served, writer: Lake) -> None:
    long = random.Random(1).randbytes(5 << 20)
    with connect(engine.server, check=Check.CRC32C) as lake:
        space = lake.space("space")
        space.put_many([b"long", b"short"], [long, b"short"])
        warm(space, [b"long", b"short"])
        sent = requests(lake)
        assert space.match([b"long", b"short"]) == (2, [True, True])
        assert sent == []
        assert contents(space, [b"short", b"long"], 5 << 20) == [b"short", long]
        assert [request.keys for request in sent if isinstance(request, m.KeyedMatch)] == [[b"long"]]
        assert loaded(space, [b"short", b"long"], 5 << 20) == [b"short", long]


def test_an_answer_stands_if_the_engine_goes_before_the_index_is_renewed(
    engine: Served, writer: Lake, kind: str
) -> None:
    space = writer.space("space")
    gone = mock.patch.object(KeysInUse, "renewal", side_effect=EngineUnreachable("planted"))
    due = mock.patch.object(KeysInUse, "is_due", new=True)
    with space_of(kind, engine.server, "space") as reader, gone, due:
        assert space.put_many([b"k"], [b"v"]).outcomes == [Outcome.STORED]
        assert reader.match([b"k", b"none"]) == (1, [True, False])


def test_without_an_index_everything_is_asked_for(engine: Served, writer: Lake) -> None:
    keys = keys_of(3)
    with connect(engine.server, check=Check.CRC32C) as lake:
        space = lake.space("space")
        space.put_many(keys, keys)
        with mock.patch.object(type(space._index), "at_hand", return_value=None):
            assert space.match([*keys, b"absent"]) == (3, [True] * 3 + [False])
            assert contents(space, keys, 100) == keys


def test_bad_keys_are_refused_as_ever(engine: Served, writer: Lake) -> None:
    with connect(engine.server, check=Check.CRC32C) as lake:
        space = lake.space("space")
        space.put_many([b"k"], [b"v"])
        warm(space, [b"k"])
        for keys in ([b""], [b"k", b"k"], [b"x" * 65], ["k"]):
            with pytest.raises(InvalidArgument):
                space.match(keys)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument):
                space.get_many_into(keys, [bytearray(1) for _ in keys])  # type: ignore[arg-type]


def test_slots_that_overlap_or_lie_outside_are_refused(engine: Served, writer: Lake) -> None:
    with connect(engine.server, check=Check.CRC32C) as lake, lake.pool(size_bytes=1000) as pool:
        space = lake.space("space")
        space.put_many([b"a", b"b"], [b"a" * 100, b"b" * 100])
        warm(space, [b"a", b"b"])
        assert space.load([b"a", b"b"], pool, [0, 100]) == [100, 100]
        for offsets, rooms in (([0, 50], [100, 100]), ([0, 950], [100, 100]), ([-1, 200], []), ([0], []), ([5, 5], [])):
            with pytest.raises(InvalidArgument):
                space.load([b"a", b"b"], pool, offsets, rooms)
        assert space.load([b"a", b"b"], pool, [0, 99]) == [0, 100], "up to the next slot"


# --- what is true -------------------------------------------------------------------------------------------


def test_a_removed_space_is_gone_at_once_and_one_of_its_name_is_another(
    engine: Served, writer: Lake, kind: str
) -> None:
    keys = keys_of(5)
    writer.space("space").put_many(keys, keys)
    with space_of(kind, engine.server, "space") as space:
        warm(space, keys)
        assert space.match(keys).prefix == 5
        writer.remove_space("space")
        for call in (space.match, lambda keys: contents(space, keys, ROOM)):
            with pytest.raises(SpaceNotFound):
                call(keys)
        again = writer.space("space")
        assert again.number != space.number
        assert again.match(keys) == (0, [False] * 5)
        with pytest.raises(SpaceNotFound):
            space.match(keys)
        again.put_many(keys[:1], [b"other"])
        with space_of(kind, engine.server, "space") as other:
            warm(other, keys)
            assert contents(other, keys, ROOM) == [b"other", b"", b"", b"", b""]


def test_values_that_compaction_moved_are_read_right_and_then_without_a_request(engine: Served, writer: Lake) -> None:
    right_after_moves(engine)


def right_after_moves(engine: Served) -> None:
    """Read values, have them moved, read them again, and once more without a request."""
    keys = keys_of(60)
    with connect(engine.server, check=Check.CRC32C) as lake:
        space = lake.space("space")
        stored = {key: os.urandom(9_000) for key in keys}
        space.put_many(keys, list(stored.values()))
        warm(space, keys)
        kept = keys[::3]
        space.remove([key for key in keys if key not in kept])
        lake.gc(compact=True)
        sent = requests(lake)
        values = [stored[key] for key in kept]
        assert contents(space, kept, ROOM) == values, "other bytes"
        assert sent, "nothing was moved"
        warm(space, kept)
        sent.clear()
        assert contents(space, kept, ROOM) == loaded(space, kept, ROOM) == values
        assert sent == []


@pytest.mark.one_engine("a head's tier may have the bytes that rot at a member")
def test_a_rotten_value_is_a_miss_and_a_new_one_replaces_it(engine: Served, writer: Lake, kind: str) -> None:
    value = random.Random(kind).randbytes(50_000)
    writer.space("space").put_many([b"rots", b"stays"], [value, b"stays"])
    with space_of(kind, engine.server, "space") as space:
        warm(space, [b"rots", b"stays"])
        spoil(engine, value)
        for _ in range(2):  # the engine finds the damage, and then knows it when it is asked for the key
            assert contents(space, [b"rots", b"stays"], ROOM) == [b"", b"stays"]
        assert space.match([b"rots", b"stays"]) == (0, [False, True])
        assert writer.space("space").put_many([b"rots"], [value]).outcomes == [Outcome.STORED]
        assert contents(space, [b"rots", b"stays"], ROOM) == [value, b"stays"]


def spoil(engine: Served, value: bytes) -> None:
    """Flip a byte of a value in its segment."""
    for path in engine.segments():
        at = path.read_bytes().find(value)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 1000)
                file.write(bytes([value[1000] ^ 1]))
            return
    raise AssertionError("the value is in no segment")


def test_used_keys_are_noted_so_that_eviction_knows(engine: Served, writer: Lake) -> None:
    keys = keys_of(4)
    with connect(engine.server, check=Check.CRC32C) as lake:
        space = lake.space("space")
        space.put_many(keys, keys)
        warm(space, keys)
        sent: list[m.Request] = []
        engine_client = space._driver._engine
        tell = engine_client.tell

        def noting(request: m.Request) -> bool:
            sent.append(request)
            return tell(request)

        with mock.patch.object(engine_client, "tell", noting):
            deadline = time.monotonic() + 10
            while not sent and time.monotonic() < deadline:
                space.match([*keys[:3], b"absent"])
                contents(space, keys[3:], ROOM)
        (noted,) = sent
        assert isinstance(noted, m.NoteReads)
        assert noted.space == space.number
        assert set(noted.keys) == set(keys)
        assert len(noted.keys) <= KEY_NOTES_MAX


@pytest.mark.parametrize(("kind", "driver"), [("blocking", BlockingDriver), ("trio", TrioDriver)])
def test_used_keys_are_told_before_a_put_which_may_evict(
    engine: Served, writer: Lake, kind: str, driver: type[Any]
) -> None:
    keys = keys_of(4)
    writer.space("space").put_many(keys, keys)
    told: list[tuple[bool, list[bytes]]] = []
    tell = driver.tell

    def noting(self: Any, request: m.NoteReads) -> bool:
        told.append((writer.space("space").match([b"new"]).prefix == 1, request.keys))
        return bool(tell(self, request))

    with space_of(kind, engine.server, "space") as space, mock.patch.object(driver, "tell", noting):
        warm(space, keys)
        space.match(keys[:3])
        told.clear()
        space.put_many([b"new"], [b"x"])
        [(is_put, noted)] = told
        assert not is_put
        assert noted[-3:] == keys[:3]
        told.clear()
        space.put_many([b"newer"], [b"x"])
        assert told == [], "nothing was used since"


# --- whatever changes ---------------------------------------------------------------------------------------


class History:
    """Changes at random, and what they were."""

    def __init__(self, lake: Lake, seed: int) -> None:
        self.lake = lake
        self.rng = random.Random(seed)
        self.space = lake.space("space")
        self.keys = keys_of(12)
        self.turn = 0
        self.tried: list[str] = []

    def change(self) -> None:
        change: Callable[[], Any] = self.rng.choice(
            [self._put] * 5 + [self._remove] * 4 + [self._collect, self._new_connection]
        )
        self.tried.append(change.__name__)
        change()

    def _some(self) -> list[bytes]:
        return self.rng.sample(self.keys, self.rng.randint(1, 4))

    def _put(self) -> None:
        self.turn += 1
        keys = self._some()
        self.space.put_many(keys, [value_of(key, self.turn, self.rng.choice(SIZES)) for key in keys])

    def _remove(self) -> None:
        self.space.remove(self._some())

    def _collect(self) -> None:
        self.lake.gc(compact=True)

    def _new_connection(self) -> None:
        self.lake.status()


def same_answers(engine: Served, writer: Lake, kind: str, seed: int) -> None:
    """Change things at random; after each change ask both clients for everything, twice."""
    history = History(writer, seed)
    asking = AskingSpace(writer, history.space.number)
    absent = [b"never"]
    with space_of(kind, engine.server, "space") as space:
        warm(space, history.keys)
        for _ in range(CHANGES):
            history.change()
            for _ in range(2):
                keys = history.keys + absent
                right = contents(asking, keys, ROOM)
                assert space.match(keys) == asking.match(keys), history.tried[-5:]
                assert contents(space, keys, ROOM) == right, history.tried[-5:]
                assert loaded(space, keys, ROOM) == right, history.tried[-5:]
        assert index_of(space).at_hand() is not None


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_whatever_changes_both_clients_answer_alike(engine: Served, writer: Lake, kind: str, seed: int) -> None:
    same_answers(engine, writer, kind, seed)


def test_that_any_bytes_are_believed_would_be_noticed(engine: Served, writer: Lake) -> None:
    with any_bytes_are_believed(), pytest.raises(AssertionError, match="other bytes"):
        right_after_moves(engine)


def test_that_answers_are_believed_for_ever_would_be_noticed(engine: Served, writer: Lake) -> None:
    plant = mock.patch.object(KeyedReads, "match", once(KeyedReads.match))
    with plant, pytest.raises(AssertionError, match=r"_put|_remove|_collect"):
        same_answers(engine, writer, "blocking", 1)

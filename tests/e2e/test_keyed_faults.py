"""Keyed blobs of a real engine under bad input and faults, in the hands of both clients, locally and over TCP."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import lakefs
from engine.keyed.spaces import KEYED_PART_CHARGE
from lakefs.client.blocking.spaces import Space
from lakefs.client.connect import connect
from lakefs.errors import EngineUnreachable, InvalidArgument, RequestTooLarge, SpaceNotFound
from lakefs.limits import ENGINE_WAIT_S, KEYED_QUOTA_BYTES_MIN, MIB
from lakefs.plugins.kv.block_moves import BlockMoves
from lakefs.plugins.kv.movers import Connection, Movers, SpaceSettings
from lakefs.put.keyed import Outcome
from tests.e2e.keyed_hands import HANDS, Hand, hand_on
from tests.e2e.served import WAIT_S, Served, serving
from tests.e2e.test_clock_jumps import DAY_S, YEAR_S, ShiftedEngine
from tests.e2e.test_damage import flip, place_of
from tests.e2e.test_shared_memory import SCRIBBLER
from tests.served_devices import DEVICES

pytestmark = pytest.mark.thorough

ENDED_S = ENGINE_WAIT_S + 2.5
"""A call that waits for a lost engine has ended by then, on a busy machine too."""


@pytest.fixture(scope="module")
def both() -> Iterator[Served]:
    """One engine that also listens on TCP; each test uses a space of its own."""
    with TemporaryDirectory(prefix="lake-") as folder, serving(Path(folder), "--native", "127.0.0.1:0") as engine:
        yield engine


@pytest.fixture
def engine(folder: Path) -> Iterator[Served]:
    with serving(folder, "--native", "127.0.0.1:0") as served:
        yield served


@pytest.fixture(params=HANDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def values_of(count: int, size: int, seed: object = 0) -> tuple[list[bytes], list[bytes]]:
    """Return keys and values."""
    chance = random.Random(f"{count} {size} {seed}")
    return [chance.randbytes(36) for _ in range(count)], [chance.randbytes(size) for _ in range(count)]


# --- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [[b"good", b""], [b"good", b"x" * 65], [b"good", b"other", b"good"]])
def test_keys_that_cannot_be_are_refused_and_nothing_is_done(both: Served, kind: str, bad: list[bytes]) -> None:
    with hand_on(both, kind, f"bad {kind}") as space:
        space.put([b"x" * 64, b"y"], [b"longest", b"shortest"])
        for call in (
            lambda: space.match(bad),
            lambda: space.put(bad, [b"v"] * len(bad)),
            lambda: space.get(bad, 10),
            lambda: space.load(bad, 10),
            lambda: space.remove(bad),
        ):
            with pytest.raises(InvalidArgument):
                call()
        assert space.match([b"x" * 64, b"y", b"good", b"other"]) == (2, [True, True, False, False])


def test_a_space_that_is_gone_is_said_to_be_in_every_call(both: Served, kind: str) -> None:
    name = f"gone {kind}"
    with hand_on(both, kind, name) as space:
        keys, values = values_of(3, 5000, kind)
        space.put(keys, values)
        both.good("kv", "purge", name)
        for call in (
            lambda: space.match(keys),
            lambda: space.put(keys, values),
            lambda: space.get(keys, 5000),
            lambda: space.load(keys, 5000),
            lambda: space.remove(keys),
        ):
            with pytest.raises(SpaceNotFound):
                call()
    with hand_on(both, kind, name) as again:
        assert again.match(keys).present == [False] * 3
        assert again.put(keys, values).outcomes == [Outcome.STORED] * 3


def test_a_value_longer_than_the_quota_fails_alone_and_a_quota_that_shrinks_is_kept(both: Served, kind: str) -> None:
    quota = KEYED_QUOTA_BYTES_MIN
    with hand_on(both, kind, f"quota {kind}", quota=4 * quota) as space, connect(both.server) as lake:
        keys, values = values_of(50, 2 * MIB, kind)
        assert space.put(keys, values).outcomes == [Outcome.STORED] * 50
        lake.space(f"quota {kind}", quota=quota)  # less than there is
        result = space.put([b"too long", b"short"], [bytes(quota), b"v"])
        assert result.outcomes == [Outcome.FAILED, Outcome.STORED]
        assert isinstance(result.failures[0], RequestTooLarge)
        found = space.get(keys, 2 * MIB)
        assert all(value in (b"", right) for value, right in zip(found, values, strict=True))
        until = time.monotonic() + (WAIT_S if DEVICES else 0)  # homes at which no put waits for room evict in a while
        while taken(lake, f"quota {kind}") > quota:
            assert time.monotonic() < until


def taken(lake: lakefs.Lake, name: str) -> int:
    """Return what counts against a space's quota."""
    (stat,) = [stat for stat in lake.spaces() if stat.name == name]
    return stat.value_bytes + stat.entries * KEYED_PART_CHARGE


@pytest.mark.parametrize("offsets", [[0, 4999], [0, 0], [5000, 2500]])
def test_slots_of_a_load_that_overlap_are_refused(both: Served, kind: str, offsets: list[int]) -> None:
    with hand_on(both, kind, f"overlap {kind}") as space:
        keys, values = values_of(2, 5000, kind)
        space.put(keys, values)
        order = sorted(offsets)
        if order[1] - order[0] >= 5000 or order[0] == order[1]:
            with pytest.raises(InvalidArgument):
                space.load(keys, 5000, offsets)
        else:  # the first slot ends where the second begins: its value does not fit
            found = space.load(keys, 5000, offsets)
            first = offsets.index(order[0])
            assert found[first] == b""
            assert found[1 - first] == values[1 - first]


# --- two writers, and memory that changes ----------------------------------------------------------------


@pytest.mark.parametrize("second", ["trio unix", "blocking tcp"])
def test_of_two_writers_of_a_key_one_stores_it_and_all_read_that(both: Served, second: str) -> None:
    name = f"race {second}"
    keys, mine = values_of(120, 30_000, 1)
    _, theirs = values_of(120, 30_000, 2)
    with hand_on(both, "blocking unix", name) as one, hand_on(both, second, name) as two:
        outcomes: dict[str, list[Outcome]] = {"one": [], "two": []}

        def put(hand: Hand, who: str, values: list[bytes]) -> None:
            for first in range(0, len(keys), 6):
                outcomes[who] += hand.put(keys[first : first + 6], values[first : first + 6]).outcomes

        threads = [
            threading.Thread(target=put, args=(one, "one", mine)),
            threading.Thread(target=put, args=(two, "two", theirs)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert all({a, b} == {Outcome.STORED, Outcome.PRESENT} for a, b in zip(*outcomes.values(), strict=True))
        right = [m if o is Outcome.STORED else t for m, t, o in zip(mine, theirs, outcomes["one"], strict=True)]
        assert one.get(keys, 30_000) == two.get(keys, 30_000) == two.load(keys, 30_000) == right


def test_memory_that_is_overwritten_during_a_put_gives_some_value_and_harms_no_other(both: Served) -> None:
    others, right = values_of(8, 70_000, "others")
    with connect(both.server) as lake, lake.shared_memory(4 * MIB) as memory:
        space = lake.space("scribbled")
        space.put_many(others, right)
        scribbler = subprocess.Popen(
            [sys.executable, "-c", SCRIBBLER, str(memory.descriptor)],
            pass_fds=[memory.descriptor],
            stdout=subprocess.PIPE,
        )
        try:
            assert scribbler.stdout is not None
            assert scribbler.stdout.readline() == b"begun\n"
            for turn in range(20):
                keys = [b"%d %d" % (turn, index) for index in range(16)]
                slots = [memory.slot(index * 256 * 1024, 256 * 1024) for index in range(16)]
                result = space.put_many(keys, slots)
                assert result.outcomes == [Outcome.STORED] * 16, result.failures
                buffers = [bytearray(256 * 1024) for _ in keys]
                assert space.get_many_into(keys, buffers) == [256 * 1024] * 16  # checked by their ids
                again = [bytearray(256 * 1024) for _ in keys]
                assert space.get_many_into(keys, again) == [256 * 1024] * 16
                assert again == buffers
        finally:
            scribbler.kill()
            scribbler.wait()
            if scribbler.stdout is not None:
                scribbler.stdout.close()
        buffers = [bytearray(70_000) for _ in others]
        space.get_many_into(others, buffers)
        assert buffers == right
        assert lake.fsck(full=True)["damage"] == 0


# --- the engine is killed --------------------------------------------------------------------------------


def killed_during(engine: Served, call: threading.Thread) -> float:
    """Kill the engine while a call waits for it; returns the seconds until the call has ended."""
    assert engine.process is not None
    engine.process.send_signal(signal.SIGSTOP)
    call.start()
    time.sleep(0.3)  # the request is sent, and is not answered
    waits = call.is_alive()
    began = time.monotonic()
    engine.kill()
    assert waits, "the call needed no engine"
    call.join(WAIT_S)
    assert not call.is_alive()
    return time.monotonic() - began


@pytest.mark.parametrize("kind", ["blocking unix", "trio unix"])
@pytest.mark.parametrize("way", ["load", "get", "put"])  # a match of known keys needs no engine
def test_a_call_ends_in_time_when_its_engine_is_killed(engine: Served, kind: str, way: str) -> None:
    keys, values = values_of(16, 300_000)
    with hand_on(engine, kind, "killed") as space:
        space.put(keys, values)
        assert space.load(keys, 300_000) == values
        more, _ = values_of(2, 5000, "more")
        calls: dict[str, Callable[[], object]] = {
            "load": lambda: space.load(keys, 300_000),
            "get": lambda: space.get(keys, 300_000),
            "put": lambda: space.put(more, [b"v" * 5000] * 2),
        }
        errors: list[BaseException] = []

        def run() -> None:
            try:
                calls[way]()
            except EngineUnreachable as error:
                errors.append(error)

        assert killed_during(engine, threading.Thread(target=run)) < ENDED_S
        assert len(errors) == 1
        engine.start()
        assert space.load(keys, 300_000) == space.get(keys, 300_000) == values
        assert space.put(more, [b"v" * 5000] * 2).outcomes.count(Outcome.FAILED) == 0


def test_blocks_of_a_plug_in_are_misses_while_the_engine_is_away_and_are_stored_again(engine: Served) -> None:
    size, count = 100_000, 12
    memory = bytearray(os.urandom(size * count))
    right = bytes(memory)
    keys = [b"block %d" % index for index in range(count)]
    settings = SpaceSettings(engine.server, "blocks")
    movers = Movers("kv", lambda: Connection(settings))
    try:
        moves = BlockMoves(movers, memoryview(memory), size)
        moves.store(1, keys, list(range(count)), [0] * count)
        movers.wait_idle()
        assert [len(ended.moved) for ended in moves.collect()] == [count]

        def load_many() -> None:
            for number in range(20):  # each of them would wait for the engine
                moves.load(number, keys, list(range(count)))
            movers.wait_idle()

        assert killed_during(engine, threading.Thread(target=load_many)) < ENDED_S
        ended = moves.collect()
        assert len(ended) == 20
        assert all(job.failed == keys for job in ended)
        memory[:] = right  # computed again
        engine.start()
        moves.store(30, [*keys, b"new"], [*range(count), 0], [0] * (count + 1))
        movers.wait_idle()
        memory[:] = bytes(len(memory))
        moves.load(31, keys, list(range(count)))
        movers.wait_idle()
        assert [len(job.moved) for job in moves.collect()] == [count + 1, count]
        assert memory == right
    finally:
        movers.close()


# --- rot, and the clock ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["load", "get"])
def test_a_rotten_block_is_a_miss_is_quarantined_and_is_stored_again(engine: Served, kind: str, way: str) -> None:
    keys, values = values_of(3, 200_000)
    with hand_on(engine, kind, "rotten") as space:
        space.put(keys, values)
    engine.stop()
    path, offset = place_of(engine.data, values[1])
    flip(path, offset + 100_000, 3)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    engine.start()
    with hand_on(engine, kind, "rotten") as space:
        read = space.load if way == "load" else space.get
        for _ in range(2):  # the first finds the damage; the second request tells the keyed index
            assert read(keys, 200_000) == [values[0], b"", values[2]]
        assert space.match(keys) == (1, [True, False, True]), "it is known to be damaged"
        assert quarantined(engine) in (None, 1)
        assert space.put(keys, values).outcomes == [Outcome.PRESENT, Outcome.STORED, Outcome.PRESENT]
        assert read(keys, 200_000) == values
    assert quarantined(engine) in (None, 0)
    with connect(engine.server) as lake:
        assert lake.fsck(full=True)["damage"] == 0


def quarantined(engine: Served) -> int | None:
    """Return the number of chunks in quarantine; a head does not say those of its members."""
    with connect(engine.server) as lake:
        return None if DEVICES else int(lake.status()["scrub"]["quarantined_chunks"])


def wait_until_present(space: Space, keys: list[bytes], right: list[bool]) -> None:
    """Wait for upkeep, until which a match without a request may find values that have expired: 10 s."""
    until = time.monotonic() + WAIT_S
    while space.match(keys).present != right and time.monotonic() < until:
        time.sleep(0.1)
    assert space.match(keys).present == right


@pytest.mark.slow
def test_a_clock_that_is_set_back_loses_no_value_and_one_set_forward_ends_those_whose_time_is_over() -> None:
    with TemporaryDirectory(prefix="lake-") as folder:
        shifted = ShiftedEngine(Path(folder))
        keys, values = values_of(4, 50_000)
        try:
            with lakefs.connect(shifted.server) as lake:
                space = lake.space("clock", ttl="7d")
                space.put_many(keys[:2], values[:2])
                for off_s in (-YEAR_S, -YEAR_S + DAY_S, 6 * DAY_S):
                    shifted.set_date(off_s)
                    assert space.match(keys[:2]).prefix == 2
                    assert space.put_many(keys[:1], values[1:2]).outcomes == [Outcome.PRESENT]
                shifted.set_date(-YEAR_S)
                assert space.put_many(keys[2:], values[2:]).outcomes == [Outcome.STORED] * 2
                shifted.kill()
                shifted.start()
                assert space.match(keys).prefix == 4
                shifted.set_date(0)  # those that were put a year ago are over
                wait_until_present(space, keys, [True, True, False, False])
                shifted.set_date(8 * DAY_S)
                wait_until_present(space, keys, [False] * 4)
                assert lake.spaces()[0].entries == 0
                assert space.put_many(keys, values).outcomes == [Outcome.STORED] * 4
                assert lake.fsck(full=True)["damage"] == 0
        finally:
            shifted.kill()

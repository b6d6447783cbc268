"""Bytes that changed on the disk are never sent as good; and a machine that offers little is served all the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.door.asks import Ask
from tests.door.line import Line
from tests.door.stored import HOT, KIB, THINGS, Stored, content_of, path_of, put
from tests.door.world import World, repeated, world
from tests.e2e.served import LAKE
from tests.e2e.test_damage import flip, place_of
from tests.served_devices import DEVICES, SHORT

pytestmark = pytest.mark.slow
SIZES = (100, 4 * KIB, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 200 * KIB, 1 << 20)
TIMES = 4
PLANTED = (sys.executable, "-m", "tests.door.planted_lake")
NO_LOCKED_MEMORY = ("sh", "-c", 'ulimit -l 0; exec "$0" "$@"')


@pytest.fixture(scope="module", params=["", "0"], ids=["DRAM tier", "no DRAM tier"])
def made(request: pytest.FixtureRequest) -> Iterator[World]:
    options = ["--dram-tier-bytes", request.param] if request.param else []
    with world(*options) as made:
        yield made


def flipped_bytes_are_noticed(made: World, size: int, at: int) -> None:
    """Flip a bit of an object that was answered before: an answer that is whole and good has the right bytes."""
    key = f"flipped-{size}-{at}"
    content = content_of(size, key)
    path = f"/{THINGS}/{key}"
    put(made.send, made.keys, path, Stored(content))
    first = max(0, min(at, size - 64))
    ranges = ((), (("range", f"bytes={first}-{first + 63}"),))
    with Line(made.door_address) as line:
        for headers in ranges * TIMES:
            assert line.ask(made.raw(Ask(path, headers=headers))).status in (200, 206)
        file, offset = place_of(made.engine.data, content[:512])
        flip(file, offset + at, bit=3)
        for headers in ranges * TIMES:
            raw = made.raw(Ask(path, headers=headers))
            expected = content[first : first + 64] if headers else content
            with Line(made.door_address) as fresh:
                for asked in (line, fresh):
                    _check_answer(asked, raw, expected)
    put(made.send, made.keys, path, Stored(content))
    assert made.agree([made.raw(Ask(path))] * TIMES)


def _check_answer(line: Line, raw: bytes, expected: bytes) -> None:
    try:
        reply = line.ask(raw)
    except ConnectionError:  # cut short, here or before: the client knows
        return
    if reply.status in (200, 206):
        assert reply.body == expected, "flipped bytes were sent as good"
    else:
        assert reply.status == 500, reply.head


@pytest.mark.parametrize("size", SIZES)
def test_flipped_bytes_are_never_sent_as_good(made: World, size: int) -> None:
    for at in sorted({0, size // 2, size - 1}):
        flipped_bytes_are_noticed(made, size, at)


@pytest.mark.one_engine(SHORT)
def test_a_gateway_that_does_not_check_is_noticed(made: World) -> None:
    with made.beside((*PLANTED, "no-check")) as planted:
        with pytest.raises(AssertionError, match="flipped bytes were sent as good"):
            flipped_bytes_are_noticed(planted, 1 << 20, 5000)


LITTLE = {
    "no locked memory": ((), (*NO_LOCKED_MEMORY, *LAKE)),
    "no DRAM tier": (("--dram-tier-bytes", "0"), ()),
    "no shared index": (("--hot-index", "off"), ()),
    "none of them": (("--dram-tier-bytes", "0", "--hot-index", "off"), (*NO_LOCKED_MEMORY, *LAKE)),
}


@pytest.mark.parametrize("name", LITTLE)
def test_a_machine_that_offers_little_is_served_all_the_same(name: str) -> None:
    options, program = LITTLE[name]
    with world(*options, program=program or LAKE, engine_program=program) as made:
        if program:
            for process in (made.with_door.process, made.engine.process):
                assert process is not None
                [line] = [
                    line
                    for line in Path(f"/proc/{process.pid}/limits").read_text().splitlines()
                    if line.startswith("Max locked memory")
                ]
                assert line.split()[3] == "0"
        for bucket, key in HOT:
            made.agree([made.raw(Ask(path_of(bucket, key), method)) for method in ("GET", "HEAD", "GET") * 2])
        path = path_of(THINGS, "little")
        for number in range(5):
            put(made.send, made.keys, path, Stored(content_of(1000, f"{number}")))
            answers = made.agree([made.raw(Ask(path))] * 3)
            assert content_of(1000, f"{number}") in answers[0]
        assert DEVICES or repeated(made.with_door) > 0

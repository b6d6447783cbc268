"""`python -m bench.head_keyed [--rounds N]`: keys at a head of a lake beside one engine, sides interleaved.

One lake has three members at 2+1 on this machine, so keys have three homes.  Another has one member on the client's
machine and three on a second one (a process with a loopback address of its own); used there are keys whose home is on
the second machine: the client asks its head by the socket, and that the member by TCP.  Beside it stands one engine
whose client came by TCP.

All values are in the page cache.  Counted is CPU of client and server together (all processes, also the members'), and
the median time of a call.  Values are checked by CRC32C, as a KV cache's are.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import lakefs
from bench.harness.content import payload
from bench.harness.cpu import process_tree
from bench.harness.machines import LakeMachine
from bench.harness.measure import wait_until
from bench.harness.process import ROOT, EngineProcess
from bench.harness.turns import Call, Turns, lines, take_turns
from lakefs.client.facade import driver_of
from lakefs.get.keyed import find_present
from lakefs.lake.spaces import SpaceSteps

KIB: Final = 1 << 10
BLOCK: Final = 64 * KIB
KEYS: Final = 128
"""Keys of one match."""
AT_ONCE: Final = 16
"""Blocks of one load."""
WARM_UP: Final = 3
HEAD, ENGINE = "head", "one engine"
AWAY, BY_TCP = "head, homes elsewhere", "one engine by TCP"
MATCH, ASKED = f"match of {KEYS} keys", "the same, by request"
LOAD, MOVED = f"load of {AT_ONCE} x 64 KiB", "the same load, by request"
CALLS: Final = {MATCH: 256, ASKED: 64, LOAD: 128, MOVED: 64}
"""Calls of one side before the next side's turn."""
WAIT_S: Final = 60.0


def new_keys(count: int) -> list[bytes]:
    """Return keys that nobody has."""
    return [os.urandom(32) for _ in range(count)]


@contextmanager
def turns_of(lake: lakefs.Lake, keys: Sequence[bytes], pids: Sequence[int]) -> Iterator[Turns]:
    """Context manager: the rows of a client that has used these keys."""
    space, driver, keys = lake.space("bench"), driver_of(lake), [*keys]
    targets = [bytearray(BLOCK) for _ in range(AT_ONCE)]
    for some in _batched(keys):
        space.put_many(some, [payload(BLOCK) for _ in some])
        space.get_many_into(some, targets)  # a load from the disk does not bring values into the page cache, this does
    with lake.pool(size_bytes=AT_ONCE * BLOCK) as pool:
        offsets = [each * BLOCK for each in range(AT_ONCE)]

        def some_of(number: int) -> list[bytes]:
            begin = number * AT_ONCE % KEYS
            return keys[begin : begin + AT_ONCE]

        def load(number: int) -> None:
            assert space.load(some_of(number), pool, offsets) == [BLOCK] * AT_ONCE

        def load_by_request(number: int) -> None:
            steps = SpaceSteps(driver.steps, space.number).load(some_of(number), pool, offsets)
            assert driver.run(steps) == [BLOCK] * AT_ONCE

        rows: dict[str, Call] = {
            MATCH: lambda _: space.match(keys),
            ASKED: lambda _: driver.run(find_present(space.number, keys)),
            LOAD: load,
            MOVED: load_by_request,
        }
        turns = Turns(pids, rows, CALLS)
        turns.warm_up(WARM_UP)
        yield turns


@contextmanager
def near(folder: Path, *flags: str) -> Iterator[Turns]:
    """Context manager: a server on this machine, and a client at its socket."""
    folder.mkdir()
    with EngineProcess(folder, *flags) as engine, engine.connect(check=lakefs.Check.CRC32C) as lake:
        with turns_of(lake, new_keys(KEYS), process_tree(engine.pid)) as turns:
            yield turns


@contextmanager
def by_tcp(folder: Path) -> Iterator[Turns]:
    """Context manager: one engine, and a client that came by TCP."""
    folder.mkdir()
    with EngineProcess(folder, "--native", "127.0.0.1:0") as engine:
        address = next(line.split()[1] for line in engine.printed if "tcp://" in line)
        token = (engine.data / "native.token").read_text().strip()
        with lakefs.connect(address, token=token, check=lakefs.Check.CRC32C) as lake:
            with turns_of(lake, new_keys(KEYS), process_tree(engine.pid)) as turns:
                yield turns


@contextmanager
def away(folder: Path) -> Iterator[Turns]:
    """Context manager: a client at the head of one machine, and keys whose homes are on the other."""
    with ExitStack() as stack:
        first, second = LakeMachine(folder / "first", "127.0.0.1", 1), LakeMachine(folder / "second", "127.0.0.2", 3)
        first.init("bench", "--protect=2+1", "--accept-loss")
        stack.enter_context(first)
        second.join(first)
        stack.enter_context(second)
        lake = stack.enter_context(first.connect(check=lakefs.Check.CRC32C))
        pids = [*process_tree(first.pid), *process_tree(second.pid)]
        yield stack.enter_context(turns_of(lake, _homes_elsewhere(first, lake), pids))


def _homes_elsewhere(machine: LakeMachine, lake: lakefs.Lake) -> list[bytes]:
    """Return keys of which the client knows nothing without a request, because their home is on another machine."""
    wait_until(lambda: _is_settled(machine), WAIT_S, "the other machine's devices did not become members")
    space = lake.space("bench")
    keys = new_keys(4 * KEYS)
    for some in _batched(keys):
        space.put_many(some, [payload(KIB) for _ in some])

    def is_known() -> bool:
        space.match(keys)
        return any(space.try_match([key]) == [True] for key in keys)

    wait_until(is_known, WAIT_S, "the client does not learn the keys whose home is on its machine")
    elsewhere = [key for key in keys if space.try_match([key]) != [True]]
    assert KEYS <= len(elsewhere) < len(keys), f"{len(elsewhere)} of {len(keys)} have their homes elsewhere"
    space.remove(elsewhere)
    return elsewhere[:KEYS]


def _is_settled(machine: LakeMachine) -> bool:
    status = machine.status()
    return status["ring_epochs"] == 1 and sum(bool(each["up"] and each["places"]) for each in status["members"]) == 4


def _batched(keys: Sequence[bytes]) -> Iterator[list[bytes]]:
    for first in range(0, len(keys), AT_ONCE):
        yield [*keys[first : first + AT_ONCE]]


def main() -> None:
    """Print lines for each row: CPU and time of a call of both sides, and their ratio."""
    parser = argparse.ArgumentParser(prog="python -m bench.head_keyed")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".keyed-") as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "devices").mkdir()
        devices = [part for number in (2, 3) for part in ("--data", str(folder / "devices" / str(number)))]
        here = {
            HEAD: stack.enter_context(near(folder / "lake", *devices, "--protect", "2+1", "--accept-loss")),
            ENGINE: stack.enter_context(near(folder / "engine")),
        }
        elsewhere = {
            AWAY: stack.enter_context(away(folder / "machines")),
            BY_TCP: stack.enter_context(by_tcp(folder / "tcp")),
        }
        for sides in (here, elsewhere):
            take_turns(sides, [*CALLS], rounds)
            for row in CALLS:
                print(*lines(sides, row), sep="\n", flush=True)


if __name__ == "__main__":
    main()

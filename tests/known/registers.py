"""Objects as registers under faults, read by native clients that repeat answers: is what they found linearizable?

`test_registers` runs a little of it.  An engine with small files, and clients in threads, some of them blocking and
some in trio: each has a connection of its own, answers known names from its own memory, and reads and writes the same
few objects.  During each round one thing happens: the engine is killed and started again, or stopped by SIGSTOP for a
while, or gc and compaction run all the time.  After each round the history of each object must be linearizable
(`tests.linear`).

    python -m tests.known.registers --rounds 500 --seed 7
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.content.verify import Check
from lakefs.errors import KeyNotFound, LakeError, OperationalError, PreconditionFailed
from tests.crash.small_engine import WarmEngine
from tests.door.register_client import Values, content_of
from tests.door.rounds import Rounds
from tests.known.clients import KINDS, read_whole, reader
from tests.linear import NOTHING, UNKNOWN, Nothing, Operation, Value
from tests.sim.__main__ import say

BUCKET: Final = "registers"
READERS: Final = 2
"""Readers of each kind."""
WRITERS: Final = 2
STEPS: Final = 60
FAULTS: Final = ("nothing", "kill the engine", "stop the engine", "collect and compact", "kill the engine twice")
_ROOM: Final = 1 << 18
_DIGITS: Final = 16


class Notes:
    """Operations by name, and counts; of one client in one round."""

    def __init__(self, who: str) -> None:
        self.who = who
        self.operations: list[tuple[str, Operation]] = []
        self.counts: Counter[str] = Counter()

    def add(
        self,
        name: str,
        kind: str,
        called: float,
        *,
        found: Value | Nothing = NOTHING,
        writes: Value | Nothing = NOTHING,
        ended: float | None = None,
    ) -> None:
        until = time.monotonic() if ended is None else ended
        self.operations.append((name, Operation(called, until, found, writes, f"{self.who} {kind}")))
        self.counts["lost" if until == UNKNOWN else kind] += 1


def value_of(content: bytes) -> int:
    """Return the value that a content stands for; it must be whole."""
    value = int(content[:_DIGITS])
    assert content == content_of(value), f"content of {value} is torn"
    return value


class ReadingClient:
    """Reads objects in every way that may be answered from memory."""

    def __init__(self, kind: str, client: Any, names: Sequence[str], notes: Notes) -> None:
        self._client, self._names, self.notes = client, names, notes
        self._chance = random.Random(notes.who + kind)

    def act(self) -> None:
        """Read one object a few times, and then all of them."""
        name = self._chance.choice(self._names)
        for _ in range(4):
            kind = self._chance.choice(("get", "get", "stat", "open", "get_into", "exists"))
            self._one(name, kind)
        self._all()

    def _one(self, name: str, kind: str) -> None:
        called = time.monotonic()
        try:
            found: Value | Nothing = getattr(self, f"_{kind}")(f"{BUCKET}/{name}")
        except KeyNotFound:
            found = None
        except OperationalError:
            return
        self.notes.add(name, kind, called, found=found)

    def _get(self, name: str) -> int:
        return value_of(self._client.get(name))

    def _stat(self, name: str) -> int:
        stat = self._client.stat(name)
        value = int(stat.user_metadata["value"])
        assert stat.size_bytes == len(content_of(value))
        return value

    def _open(self, name: str) -> int:
        stat, content = read_whole(self._client, name)
        assert stat.user_metadata["value"] == str(value_of(content))
        return value_of(content)

    def _get_into(self, name: str) -> int:
        buffer = bytearray(_ROOM)
        return value_of(bytes(buffer[: self._client.get_into(name, buffer)]))

    def _exists(self, name: str) -> Value | Nothing:
        return NOTHING if self._client.exists(name) else None

    def _all(self) -> None:
        called = time.monotonic()
        try:
            contents = self._client.get_many([f"{BUCKET}/{name}" for name in self._names])
        except (KeyNotFound, OperationalError):
            return
        for name, content in zip(self._names, contents, strict=True):
            self.notes.add(name, "get_many", called, found=value_of(content))


class WritingClient:
    """Writes objects in every way, by a client that reads them, too."""

    def __init__(self, lake: Lake, names: Sequence[str], values: Values, notes: Notes) -> None:
        self._lake, self._names, self._values, self.notes = lake, names, values, notes
        self._chance = random.Random(notes.who)
        self._reading = ReadingClient("writer", lake, names, notes)

    def act(self) -> None:
        """Write an object, and read what there is."""
        name = self._chance.choice(self._names)
        kind = self._chance.choice(("put", "put", "put", "delete", "copy", "rename", "swap"))
        value = None if kind == "delete" else self._values.next()
        private = f"{self.notes.who}-source-{value}"
        with suppress(OperationalError, KeyNotFound):
            if kind in ("copy", "rename"):
                assert value is not None
                self._put(private, value)
            self._write(name, kind, value, private)
        self._reading.act()

    def _write(self, name: str, kind: str, value: int | None, private: str) -> None:
        found: Value | Nothing = NOTHING
        etag = ""
        if kind == "swap":
            stat = self._lake.stat(f"{BUCKET}/{name}")
            found, etag = int(stat.user_metadata["value"]), stat.etag
        called = time.monotonic()
        try:
            if kind == "delete":
                self._lake.remove(f"{BUCKET}/{name}")
            elif kind == "copy":
                self._lake.copy(f"{BUCKET}/{private}", f"{BUCKET}/{name}")
            elif kind == "rename":
                self._lake.move(f"{BUCKET}/{private}", f"{BUCKET}/{name}")
            else:
                assert value is not None
                self._put(name, value, etag)
        except (PreconditionFailed, KeyNotFound):
            if kind == "swap":
                return  # it may have been done, and its answer lost: a retry is refused
            raise
        except LakeError:
            self.notes.add(name, kind, called, writes=value, ended=UNKNOWN)
            return
        self.notes.add(name, kind, called, found=found, writes=value)

    def _put(self, name: str, value: int, etag: str = "") -> None:
        metadata = {"value": str(value)}
        self._lake.put(f"{BUCKET}/{name}", content_of(value), user_metadata=metadata, if_match=etag)


class Registers(Rounds[Any]):
    """One store, its clients, and the rounds."""

    steps = STEPS
    cycles = 1

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(seed)
        self._values = Values()
        self._stack = ExitStack()
        self.engine = WarmEngine(folder, "--log-level", "error")
        self._stack.callback(self.engine.close)
        with connect(self.engine.server) as lake:
            lake.create_bucket(BUCKET)
        server = self.engine.server
        checks = (Check.CRC32C, Check.BLAKE3)
        self._readers = [
            (kind, self._stack.enter_context(reader(kind, server, check=checks[at % 2])))
            for kind in KINDS
            for at in range(READERS)
        ]
        self._writers = [self._stack.enter_context(connect(server)) for _ in range(WRITERS)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def repeated(self) -> int:
        """Names that clients have answered from their own memory."""
        clients: list[Any] = [client for _, client in self._readers] + self._writers
        return sum(client.known.answered for client in clients)

    def run(self, rounds: int, faults: Sequence[str] = FAULTS, said: Callable[[str], None] = lambda _: None) -> None:
        """See `Rounds.run`."""
        super().run(rounds, faults, said)

    def __str__(self) -> str:
        return f"{super().__str__()}; {self.repeated} answers from memory"

    def clients(self, number: int, names: Sequence[str]) -> list[Any]:
        """See `Rounds.clients`: readers of each kind, and writers."""
        readers = [
            ReadingClient(kind, client, names, Notes(f"{number}-r{at}-{kind}"))
            for at, (kind, client) in enumerate(self._readers)
        ]
        return readers + [
            WritingClient(lake, names, self._values, Notes(f"{number}-w{at}")) for at, lake in enumerate(self._writers)
        ]


def main() -> int:
    """Run the rounds; 0 when all histories are linearizable and answers were repeated."""
    parser = argparse.ArgumentParser(prog="python -m tests.known.registers")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with TemporaryDirectory(prefix="lake-") as folder, Registers(Path(folder), asked.seed) as registers:
        registers.run(asked.rounds, said=say)
        say(str(registers))
        return 0 if registers.repeated else 1


if __name__ == "__main__":
    raise SystemExit(main())

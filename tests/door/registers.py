"""Objects as registers under faults: is what clients found linearizable?  `test_registers` runs a little of it.

An engine with small files and three S3 ports: its own, and two gateways.  Clients of all three write, remove, copy
over, rename over, swap and read the same few objects.  During each round one thing happens: the engine or a gateway is
killed and started again, or stopped by SIGSTOP for a while, or gc and compaction run all the time.  After each round
the history of each object must be linearizable (`linear`): so no answer is older than what was acknowledged before the
request, in whichever process.

    python -m tests.door.registers --rounds 500 --seed 7
"""

from __future__ import annotations

import argparse
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Self

from lakefs.client.connect import connect
from tests.crash.small_engine import WarmEngine
from tests.door.line import address_of
from tests.door.register_client import BUCKET, Client, Values
from tests.door.rounds import Rounds, stop_for_a_while
from tests.door.world import door, gathered, new_key, repeated
from tests.e2e.gateways import Gateway
from tests.e2e.s3_client import KEYS_ARE_FRESH_S
from tests.e2e.served import LAKE
from tests.sim.__main__ import say

STEPS: Final = 40
"""Steps of each client in a round: some 1,200 requests of all of them."""
READERS: Final = 2
WRITERS: Final = 1
"""Clients of each port."""
_CYCLES: Final = 2
"""Cycles of gc in a round; beside busy clients each takes seconds."""
_FAULTS: Final = (
    "nothing",
    "kill the engine",
    "stop the engine",
    "kill a gateway",
    "stop a gateway",
    "collect and compact",
    "kill the engine twice",
)


class Registers(Rounds[Client]):
    """One store, its three ports, and the rounds."""

    steps = STEPS
    cycles = _CYCLES

    def __init__(self, folder: Path, seed: int, program: Sequence[str] = ()) -> None:
        """`program`: a command whose Python path has a planted bug, for the gateways."""
        super().__init__(seed)
        self._program = program
        self._values = Values()
        port = _free_port()
        self.engine = WarmEngine(folder, "--log-level", "error", "--s3", f"127.0.0.1:{port}", *door("on"))
        with connect(self.engine.server) as lake:
            lake.create_bucket(BUCKET)
            self._key = new_key(lake)
        self._gateways = [self._start("127.0.0.1:0") for _ in range(2)]
        self._addresses = [("127.0.0.1", port), *(address_of(gateway.url) for gateway in self._gateways)]
        self._repeated = self._gathered = 0.0
        time.sleep(KEYS_ARE_FRESH_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for gateway in self._gateways:
            gateway.process.send_signal(signal.SIGCONT)
            gateway.process.kill()
            gateway.ended()
        self.engine.close()

    @property
    def repeated(self) -> float:
        """Answers that the doors of the gateways gave."""
        return self._repeated + sum(map(repeated, self._gateways))

    @property
    def gathered(self) -> float:
        """PUTs among them."""
        return self._gathered + sum(map(gathered, self._gateways))

    def run(self, rounds: int, faults: Sequence[str] = _FAULTS, said: Callable[[str], None] = lambda _: None) -> None:
        """See `Rounds.run`."""
        super().run(rounds, faults, said)

    def __str__(self) -> str:
        return f"{super().__str__()}; {self.repeated:.0f} answers of the door, {self.gathered:.0f} to PUTs"

    def clients(self, number: int, names: Sequence[str]) -> list[Client]:
        """See `Rounds.clients`: those of the three ports."""
        return [
            Client(
                f"{number}-{kind}{at}-{place}",
                address,
                self.engine.server,
                self._key,
                self._values,
                tuple(names),
                is_writer=kind == "w",
            )
            for place, address in enumerate(self._addresses)
            for kind, count in (("r", READERS), ("w", WRITERS))
            for at in range(count)
        ]

    def ended(self, client: Client) -> None:
        """Close its connections."""
        client.close()

    def happen(self, fault: str) -> None:
        """See `Rounds.happen`: the faults of gateways, too."""
        gateway = self._chance.randrange(len(self._gateways))
        match fault:
            case "kill a gateway":
                old = self._gateways[gateway]
                self._repeated += repeated(old)
                self._gathered += gathered(old)
                old.process.kill()
                old.ended()
                self._gateways[gateway] = self._start(old.url.removeprefix("http://"))
            case "stop a gateway":
                stop_for_a_while(self._gateways[gateway].process.pid)
            case _:
                super().happen(fault)

    def _start(self, address: str) -> Gateway:
        options = ("--s3", address, "--log-level", "error", *door("off" if self._program else "on"))
        return Gateway(self.engine.server, *options, program=self._program or LAKE)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def main() -> int:
    """Run the rounds; 0 when all histories are linearizable and the doors gave answers."""
    parser = argparse.ArgumentParser(prog="python -m tests.door.registers")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="lake-")))
        registers = stack.enter_context(Registers(folder, asked.seed))
        registers.run(asked.rounds, said=say)
        say(str(registers))
        return 0 if registers.repeated and registers.gathered else 1


if __name__ == "__main__":
    raise SystemExit(main())

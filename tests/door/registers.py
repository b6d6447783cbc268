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
import os
import random
import signal
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Self

from lakefs.client.connect import connect
from lakefs.errors import OperationalError
from tests.crash.small_engine import WarmEngine
from tests.door.line import address_of
from tests.door.linear import Operation, contradiction
from tests.door.register_client import BUCKET, Client, Values
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
NAMES: Final = 3
_STOPPED_S: Final = 0.3
_CYCLES: Final = 2
"""Cycles of gc in a round; beside busy clients each takes seconds."""
_SAID_EVERY: Final = 50
_SHOWN: Final = 12
"""Operations that are shown around one that no order explains."""
_FAULTS: Final = (
    "nothing",
    "kill the engine",
    "stop the engine",
    "kill a gateway",
    "stop a gateway",
    "collect and compact",
    "kill the engine twice",
)


class Registers:
    """One store, its three ports, and the rounds."""

    def __init__(self, folder: Path, seed: int, program: Sequence[str] = ()) -> None:
        """`program`: a command whose Python path has a planted bug, for the gateways."""
        self._chance = random.Random(seed)
        self._program = program
        self._values = Values()
        port = _free_port()
        self.engine = WarmEngine(folder, "--log-level", "error", "--s3", f"127.0.0.1:{port}", *door("on"))
        with connect(self.engine.server) as lake:
            lake.create_bucket(BUCKET)
            self._key = new_key(lake)
        self._gateways = [self._start("127.0.0.1:0") for _ in range(2)]
        self._addresses = [("127.0.0.1", port), *(address_of(gateway.url) for gateway in self._gateways)]
        self.figures: Counter[str] = Counter()
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
        """Run so many rounds, the faults in turn.  AssertionError names the round."""
        for number in range(rounds):
            fault = faults[number % len(faults)]
            try:
                self._round(number, fault)
            except AssertionError as error:
                raise AssertionError(f"round {number}, {fault}: {error}") from error
            self.figures["rounds"] += 1
            if self.figures["rounds"] % _SAID_EVERY == 0:
                said(str(self))

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.figures.items()))
        return f"{counts}; {self.repeated:.0f} answers of the door, {self.gathered:.0f} to PUTs"

    # --- one round -------------------------------------------------------------------------------------

    def _round(self, number: int, fault: str) -> None:
        names = tuple(f"{number}-{which}" for which in "abc"[:NAMES])
        clients = [
            Client(
                f"{number}-{kind}{at}-{place}",
                address,
                self.engine.server,
                self._key,
                self._values,
                names,
                is_writer=kind == "w",
            )
            for place, address in enumerate(self._addresses)
            for kind, count in (("r", READERS), ("w", WRITERS))
            for at in range(count)
        ]
        ended = threading.Event()
        errors: list[BaseException] = []
        threads = [threading.Thread(target=_work, args=(client, errors, ended)) for client in clients]
        for thread in threads:
            thread.start()
        try:
            self._fault(fault)
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        self._judge(clients)

    def _judge(self, clients: Sequence[Client]) -> None:
        """Check the histories of the objects."""
        histories: defaultdict[str, list[Operation]] = defaultdict(list)
        for client in clients:
            self.figures.update(client.notes.counts)
            for name, operation in client.notes.operations:
                histories[name].append(operation)
        for name, history in histories.items():
            wrong = contradiction(history)
            assert wrong is None, f"{name} is no register:\n" + _around(history, wrong)

    # --- faults ----------------------------------------------------------------------------------------

    def _fault(self, fault: str) -> None:
        """Do it while the clients work, a while after they began."""
        threading.Event().wait(self._chance.uniform(0.05, 0.4))
        gateway = self._chance.randrange(len(self._gateways))
        match fault:
            case "kill the engine" | "kill the engine twice":
                for _ in range(2 if fault.endswith("twice") else 1):
                    self.engine.kill()
                    self.engine.start()
            case "stop the engine":
                assert self.engine.process is not None
                _stop_for_a_while(self.engine.process.pid)
            case "kill a gateway":
                old = self._gateways[gateway]
                self._repeated += repeated(old)
                self._gathered += gathered(old)
                old.process.kill()
                old.ended()
                self._gateways[gateway] = self._start(old.url.removeprefix("http://"))
            case "stop a gateway":
                _stop_for_a_while(self._gateways[gateway].process.pid)
            case "collect and compact":
                self._collect()

    def _collect(self) -> None:
        with connect(self.engine.server) as lake:
            for _ in range(_CYCLES):
                try:
                    lake.gc(compact=True)
                    self.figures["cycles of gc"] += 1
                except OperationalError:
                    return

    def _start(self, address: str) -> Gateway:
        options = ("--s3", address, "--log-level", "error", *door("off" if self._program else "on"))
        return Gateway(self.engine.server, *options, program=self._program or LAKE)


def _work(client: Client, errors: list[BaseException], ended: threading.Event) -> None:
    """Do the steps of a round, and go on until the fault is over."""
    try:
        count = 0
        while not errors and (count < STEPS or not ended.is_set()):
            client.act()
            count += 1
    except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
        errors.append(error)
    finally:
        client.close()


def _stop_for_a_while(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    threading.Event().wait(_STOPPED_S)
    os.kill(pid, signal.SIGCONT)


def _around(history: Sequence[Operation], wrong: Operation) -> str:
    """Return the operations around one, as text, those of long before and after left out."""
    ordered = sorted(history, key=lambda operation: operation.called)
    at = ordered.index(next(one for one in ordered if one.called == wrong.called and one.who == wrong.who))
    shown = ordered[max(0, at - _SHOWN) : at + _SHOWN]
    return "\n".join(f"{'->' if one.called == wrong.called else '  '} {one}" for one in shown)


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

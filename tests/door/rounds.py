"""Rounds of clients at work on registers while one thing happens; after each the histories must be linearizable."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from lakefs.client.connect import connect
from lakefs.errors import OperationalError
from tests.crash.small_engine import WarmEngine
from tests.linear import Operation, contradiction

_STOPPED_S: Final = 0.3
_SAID_EVERY: Final = 50
_SHOWN: Final = 12
"""Operations that are shown around one that no order explains."""


class Noted(Protocol):
    """Operations of one client by key, and counts."""

    operations: list[tuple[str, Operation]]
    counts: Counter[str]


class Actor(Protocol):
    """One client; `act` does some operations."""

    @property
    def notes(self) -> Noted: ...

    def act(self) -> None: ...


A = TypeVar("A", bound=Actor)


class Rounds(Generic[A]):
    """The rounds of one store."""

    engine: WarmEngine
    steps: int
    """Steps of each client in a round."""
    cycles: int
    """Cycles of gc in a round."""
    names: Final = 3

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.figures: Counter[str] = Counter()

    def clients(self, number: int, names: Sequence[str]) -> list[A]:
        """Return the clients of one round, which work on objects with these names."""
        raise NotImplementedError

    def ended(self, client: A) -> None:
        """Release what a client has that has done its steps."""

    def run(self, rounds: int, faults: Sequence[str], said: Callable[[str], None] = lambda _: None) -> None:
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
        return ", ".join(f"{count} {name}" for name, count in sorted(self.figures.items()))

    def _round(self, number: int, fault: str) -> None:
        clients = self.clients(number, [f"{number}-{which}" for which in "abc"[: self.names]])
        ended = threading.Event()
        errors: list[BaseException] = []
        threads = [threading.Thread(target=self._work, args=(client, errors, ended)) for client in clients]
        for thread in threads:
            thread.start()
        try:
            threading.Event().wait(self._chance.uniform(0.05, 0.4))  # the clients work by then
            self.happen(fault)
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        self._judge([client.notes for client in clients])

    def _work(self, client: A, errors: list[BaseException], ended: threading.Event) -> None:
        """Do the steps of a round, and go on until the fault is over."""
        try:
            count = 0
            while not errors and (count < self.steps or not ended.is_set()):
                client.act()
                count += 1
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            errors.append(error)
        finally:
            self.ended(client)

    def _judge(self, notes: Sequence[Noted]) -> None:
        """Check the histories of the objects."""
        histories: defaultdict[str, list[Operation]] = defaultdict(list)
        for one in notes:
            self.figures.update(one.counts)
            for name, operation in one.operations:
                histories[name].append(operation)
        for name, history in histories.items():
            wrong = contradiction(history)
            assert wrong is None, f"{name} is no register:\n" + _around(history, wrong)

    def happen(self, fault: str) -> None:
        """Do what the round is for; the faults of the engine are known here."""
        match fault:
            case "kill the engine" | "kill the engine twice":
                for _ in range(2 if fault.endswith("twice") else 1):
                    self.engine.kill()
                    self.engine.start()
            case "stop the engine":
                assert self.engine.process is not None
                stop_for_a_while(self.engine.process.pid)
            case "collect and compact":
                self._collect()

    def _collect(self) -> None:
        with connect(self.engine.server) as lake:
            for _ in range(self.cycles):
                try:
                    lake.gc(compact=True)
                    self.figures["cycles of gc"] += 1
                except OperationalError:
                    return


def stop_for_a_while(pid: int) -> None:
    """Stop a process by SIGSTOP, and let it go on."""
    os.kill(pid, signal.SIGSTOP)
    threading.Event().wait(_STOPPED_S)
    os.kill(pid, signal.SIGCONT)


def _around(history: Sequence[Operation], wrong: Operation) -> str:
    """Return the operations around one, as text, those of long before and after left out."""
    ordered = sorted(history, key=lambda operation: operation.called)
    at = ordered.index(next(one for one in ordered if one.called == wrong.called and one.who == wrong.who))
    shown = ordered[max(0, at - _SHOWN) : at + _SHOWN]
    return "\n".join(f"{'->' if one.called == wrong.called else '  '} {one}" for one in shown)

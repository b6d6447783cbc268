"""A load on a lake that never pauses: puts and gets at each machine, of which every answer is compared."""

from __future__ import annotations

import random
import threading
import time
from types import TracebackType
from typing import Final

import lakefs
from bench.harness.machines import LakeMachine

OBJECT_BYTES: Final = (100, 70_000, 600_000)
PAUSE_S: Final = 0.05
"""Between two operations of one client: the machines share two cores with their clients here."""
_WRONG: Final = "other bytes of"


class Load:
    """Puts and gets that never pause: a thread for each machine; every answer is compared."""

    def __init__(self, machines: list[LakeMachine]) -> None:
        self.operations = 0
        self.failed: list[str] = []
        self.longest_s = 0.0
        self.refused = 0
        """Operations that failed while `forgives`; what a failed put has done is unknown."""
        self.forgives = False
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._use, args=(machine,), daemon=True) for machine in machines]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _use(self, machine: LakeMachine) -> None:
        rng = random.Random(machine.host)
        known: dict[str, list[bytes]] = {}
        with machine.connect() as lake:
            while not self._ended.wait(PAUSE_S):
                name = f"bench/{machine.host}/{rng.randrange(50)}"
                began = time.monotonic()
                failure = self._step(lake, rng, name, known)
                took_s = time.monotonic() - began
                with self._lock:
                    self.operations += 1
                    if failure and self.forgives and not failure.startswith(_WRONG):
                        self.refused += 1
                    else:
                        self.longest_s = max(self.longest_s, took_s)
                        self.failed += [failure] if failure else []

    @staticmethod
    def _step(lake: lakefs.Lake, rng: random.Random, name: str, known: dict[str, list[bytes]]) -> str:
        """Put or get one object; return how it failed, empty if it did not.

        `known` has the contents that a name may have: several after a put that failed.
        """
        try:
            if name not in known or rng.random() < 0.3:
                content = rng.randbytes(rng.choice(OBJECT_BYTES))
                known[name] = [*known.get(name, [b""]), content]
                lake.put(name, content)
                known[name] = [content]
            elif lake.get(name) not in known[name]:
                return f"{_WRONG} {name}"
        except lakefs.LakeError as error:
            return f"{name}: {error}"
        return ""

"""Objects are registers for clients that repeat answers, whatever is killed.

More: `python -m tests.known.registers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.known.planted import look_at_no_stamps
from tests.known.registers import FAULTS, Registers
from tests.served_devices import DEVICES, SHORT

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
ROUNDS = 2 * len(FAULTS)


@contextmanager
def registers() -> Iterator[Registers]:
    with TemporaryDirectory(prefix="lake-") as folder, Registers(Path(folder), seed=1) as made:
        yield made


def test_what_clients_find_is_linearizable_while_the_engine_is_killed_and_stopped() -> None:
    with registers() as made:
        made.run(ROUNDS)
        for figure in ("lost", "copy", "rename", "swap", "delete", "cycles of gc", "open", "get_many", "stat"):
            assert made.figures[figure], f"nothing was tried: {made}"
        reads = sum(made.figures[kind] for kind in ("get", "get_into", "get_many", "stat", "open"))
        assert reads > 1000, str(made)
        assert made.repeated > reads / 20 or (DEVICES and not made.repeated), str(made)


@pytest.mark.one_engine(SHORT)
def test_clients_that_look_at_no_stamps_are_noticed() -> None:
    with look_at_no_stamps(), registers() as made, pytest.raises(AssertionError, match="is no register"):
        made.run(ROUNDS, faults=["nothing"])

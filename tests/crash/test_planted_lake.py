"""That the cycles can fail: an engine with a bug in it does not get through them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.crash.cycles import Cycles
from tests.crash.small_engine import PLANTED_LAKE

CYCLES = 25


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["answer-first"])
def test_an_engine_that_answers_before_its_journal_is_caught(bug: str) -> None:
    with TemporaryDirectory(prefix="lake-") as name, Cycles(Path(name), "planted") as cycles:
        cycles.engine.program = [*PLANTED_LAKE, bug]
        with pytest.raises(AssertionError, match=r"^cycle \d+:"):
            cycles.run(CYCLES, look_every=CYCLES)

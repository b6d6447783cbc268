"""The native readers of shared memory under the sanitizers, over bad memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fuzz.sanitized_modules import BUGS, MODULES, build, feed

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
INPUTS = 1000


@pytest.mark.parametrize("part", MODULES)
def test_no_reader_of_shared_memory_reaches_beyond_it(tmp_path: Path, part: str) -> None:
    seed = int.from_bytes(os.urandom(6), "little")
    wrong = feed(build(tmp_path, part), part, INPUTS, seed)
    assert not wrong, f"seed {seed}: {wrong}"


@pytest.mark.parametrize("part", MODULES)
def test_a_reader_that_does_is_noticed(tmp_path: Path, part: str) -> None:
    wrong = feed(build(tmp_path, part, BUGS[part]), part, INPUTS, seed=1)
    assert "AddressSanitizer" in wrong
    assert BUGS[part].shown in wrong

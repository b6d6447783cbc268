"""The checks of each reader in `make test` and `make test-all`; more inputs: `python -m tests.fuzz`."""

from __future__ import annotations

from typing import Final

from tests.fuzz.inputs import Inputs
from tests.fuzz.target import Target

FEW_INPUTS: Final = 1_500
INPUTS: Final = 12_000
"""For each reader; `make torture` takes a million."""
INPUTS_TO_NOTICE: Final = 20_000
"""Far more than a planted bug needs."""


def reads_what_is_good(target: Target) -> None:
    """Check that good inputs are read."""
    for data in target.good:
        target.read(data)


def survives_changed_inputs(target: Target, count: int) -> None:
    """Check that kept inputs, and so many changed ones, are read or refused."""
    for data in target.bases:
        target.survives(data)
    inputs = Inputs(target.bases, target.tokens, seed=1)
    for _ in range(count):
        target.survives(inputs.next())

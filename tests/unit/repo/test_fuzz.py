"""Fuzz tests of all readers of bytes in the gateway: any bytes are read, or refused with an error of S3.

The other readers are in `test_fuzz_native`.
"""

from __future__ import annotations

import hmac

import pytest

from tests.fuzz.held import FEW_INPUTS, INPUTS, INPUTS_TO_NOTICE, reads_what_is_good, survives_changed_inputs
from tests.fuzz.inputs import Inputs
from tests.fuzz.target import Target
from tests.fuzz.targets import GATEWAY_TARGETS


@pytest.mark.parametrize("target", GATEWAY_TARGETS, ids=lambda target: target.name)
def test_good_inputs_are_read(target: Target) -> None:
    reads_what_is_good(target)


@pytest.mark.slow
@pytest.mark.parametrize("target", GATEWAY_TARGETS, ids=lambda target: target.name)
def test_changed_inputs_are_read_or_refused(target: Target) -> None:
    survives_changed_inputs(target, FEW_INPUTS)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("target", GATEWAY_TARGETS, ids=lambda target: target.name)
def test_many_changed_inputs_are_read_or_refused(target: Target) -> None:
    survives_changed_inputs(target, INPUTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["signed", "aws-chunked"])
def test_a_signature_that_nobody_compares_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [target] = [target for target in GATEWAY_TARGETS if target.name == name]
    monkeypatch.setattr(hmac, "compare_digest", lambda one, other: True)
    inputs = Inputs(target.bases, target.tokens, seed=1)
    with pytest.raises(AssertionError, match="forged"):
        for _ in range(INPUTS_TO_NOTICE):
            target.survives(inputs.next())

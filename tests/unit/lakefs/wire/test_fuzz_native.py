"""Fuzz tests of all readers of bytes beside the gateway: any bytes are read, or refused with an error of the tree.

The readers: the native protocol from either end, the store's files, manifests, heads of safetensors files, settings and
arguments.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from engine.format import records
from lakefs.content import manifest
from lakefs.host.crc import crc32c
from lakefs.wire import connection, frames
from tests.fuzz.held import FEW_INPUTS, INPUTS, INPUTS_TO_NOTICE, reads_what_is_good, survives_changed_inputs
from tests.fuzz.inputs import Inputs
from tests.fuzz.setting_targets import SETTING_TARGETS
from tests.fuzz.store_targets import STORE_TARGETS
from tests.fuzz.target import Target
from tests.fuzz.wire_targets import WIRE_TARGETS

NATIVE_TARGETS = (*WIRE_TARGETS, *STORE_TARGETS, *SETTING_TARGETS)


@pytest.mark.parametrize("target", NATIVE_TARGETS, ids=lambda target: target.name)
def test_good_inputs_are_read(target: Target) -> None:
    reads_what_is_good(target)


@pytest.mark.slow
@pytest.mark.parametrize("target", NATIVE_TARGETS, ids=lambda target: target.name)
def test_changed_inputs_are_read_or_refused(target: Target) -> None:
    survives_changed_inputs(target, FEW_INPUTS)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("target", NATIVE_TARGETS, ids=lambda target: target.name)
def test_many_changed_inputs_are_read_or_refused(target: Target) -> None:
    survives_changed_inputs(target, INPUTS)


class _Agreeable(int):
    """A checksum that equals any other."""

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def _forget_the_checksum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(frames, "crc32c", lambda *given: _Agreeable(crc32c(*given)))


def _let_everybody_in(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(connection, "_same_token", lambda given, expected: True)


def _trust_the_lengths(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(manifest, "_check_sizes", lambda level, size, sizes: None)


def _expect_good_records(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(records, "UNREADABLE", ())


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("frames", _forget_the_checksum),
        ("server", _let_everybody_in),
        ("manifest", _trust_the_lengths),
        ("records", _expect_good_records),
    ],
)
def test_a_planted_bug_is_found(
    name: str, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    [target] = [target for target in NATIVE_TARGETS if target.name == name]
    plant(monkeypatch)
    inputs = Inputs(target.bases, target.tokens, seed=1)
    with pytest.raises((AssertionError, msgspec.MsgspecError)):
        for _ in range(INPUTS_TO_NOTICE):
            target.survives(inputs.next())

"""Well-formed requests without sense are done or refused, and leave the store whole."""

from __future__ import annotations

from functools import partial

import pytest

from engine.namespace import buckets
from engine.requests.table import OF_THE_COORDINATOR
from lakefs.wire import messages as m
from tests.contract.engines import LAKE
from tests.fuzz.requests import survive, survive_at_names
from tests.store_rig import run

REQUESTS = 1500


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_senseless_requests_are_done_or_refused(seed: int) -> None:
    done, refused = run(lambda: survive(seed, REQUESTS))
    assert done > REQUESTS // 8
    assert refused > REQUESTS // 8


MEMBERS_OWN = [shape for op, shape in m.REQUESTS.items() if 100 <= op < 110]


@pytest.mark.parametrize("seed", range(2))
def test_senseless_requests_to_a_member_are_done_or_refused(seed: int) -> None:
    shapes: list[type[m.Request]] = [*MEMBERS_OWN, m.ReadChunks, m.RunScrub, m.RunGc, m.PutObjects]
    done, refused = run(lambda: survive(seed, 800, shapes, LAKE))
    assert done > 80
    assert refused > 80


@pytest.mark.parametrize("seed", range(2))
def test_senseless_requests_to_a_coordinator_are_done_or_refused(seed: int) -> None:
    done, refused = run(lambda: survive_at_names(seed, 1500, OF_THE_COORDINATOR))
    assert done > 100
    assert refused > 100


def test_a_check_that_was_forgotten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "check_bucket_name", lambda name: name.encode())
    monkeypatch.setattr(buckets, "check_new_bucket_name", lambda name: None)
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        for seed in range(6):
            run(partial(survive, seed, REQUESTS))

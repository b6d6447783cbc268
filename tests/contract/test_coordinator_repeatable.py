"""The contract of `Coordinator`: transactions that may be repeated, over every implementation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

import pytest

from engine.coordinator.coordinator import Compare, Delete, Entry, HasRevision, HasValue, IsAbsent, Outcome, Put
from lakefs.ids import Revision
from tests.contract.coordinators import KINDS, CoordinatorKind, Opened, entry_of, keys_of, opened_by, put
from tests.unit.support.metadata_rig import run

HOLDING: Final[list[Compare]] = [
    IsAbsent(b"absent"),
    HasRevision(b"one", Revision(1)),
    HasRevision(b"two", Revision(3)),
    HasValue(b"two", b""),
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    """Open a new coordinator: `async with opened() as coordinator`."""
    kind: CoordinatorKind = request.param
    return opened_by(request, kind, tmp_path)


def test_a_transaction_that_may_be_repeated_does_and_shows_the_same(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            await put(coordinator, b"one", b"1")
            await put(coordinator, b"two", b"2")
            await put(coordinator, b"two", b"")
            entries = {key: (await coordinator.get(key)).entry for key in (b"one", b"two", b"absent")}
            compares = [*HOLDING, IsAbsent(b"one")]
            for held in (HOLDING, compares):
                again = partial(coordinator.transact, held, [Put(b"then", b"3")], [Put(b"else", b"4"), Delete(b"one")])
                done = await again(is_repeatable=True)
                assert done.outcome is (Outcome.DONE if held is HOLDING else Outcome.CONFLICT)
                assert done.seen == tuple(entries[compare.key] for compare in held)
            assert await keys_of(coordinator) == [b"else", b"then", b"two"]
            assert (await entry_of(coordinator, b"then")).revision == 4
            assert (done.revision, (await entry_of(coordinator, b"else")).revision) == (5, 5)
            nothing = await coordinator.transact([], [Delete(b"absent")], is_repeatable=True)
            assert (nothing.outcome, nothing.revision) == (Outcome.DONE, 5)

    run(scenario)


def test_a_transaction_that_may_be_repeated_does_nothing_with_a_lease_that_ended(opened: Opened) -> None:
    async def scenario() -> None:
        async with opened() as coordinator:
            lease = await coordinator.lease(60)
            gone = await coordinator.lease(60)
            await coordinator.revoke(gone)
            ask = partial(coordinator.transact, [IsAbsent(b"a")], is_repeatable=True)
            for then_ops, else_ops, outcome in (
                ([Put(b"b", b"1"), Put(b"a", b"1", gone)], [Put(b"c", b"1", lease)], Outcome.LEASE_GONE),
                ([Put(b"a", b"1", lease)], [Put(b"b", b"1", gone)], Outcome.DONE),
            ):
                done = await ask(then_ops, else_ops)
                assert (done.outcome, done.seen) == (outcome, (None,))
            entry = await entry_of(coordinator, b"a")
            assert entry == Entry(b"a", b"1", Revision(1), lease)
            refused = await ask([Put(b"b", b"2")], [Put(b"b", b"2", gone)])
            assert (refused.outcome, refused.seen) == (Outcome.LEASE_GONE, (entry,))
            assert await keys_of(coordinator) == [b"a"]

    run(scenario)

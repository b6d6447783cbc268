"""Keyed blobs over crashes: the promises hold in many seeds, and each of these planted bugs breaks one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final
from unittest import mock

import pytest
import trio

from engine.chunks.bound_payloads import BoundPayloads
from engine.format.columns import singly
from engine.format.keyed import KeyedValue, value_key
from engine.format.layouts import Mutation, Op, Table
from engine.keyed import values as values_module
from engine.keyed.keyed_blobs import KeyedBlobs
from engine.keyed.spaces import Usage
from engine.keyed.upkeep import KeyedUpkeep
from engine.keyed.values import Values
from engine.metadata.group_commit import Committer
from engine.sessions.references import References
from engine.tables.merged_tables import TableTransaction
from engine.tables.views import Transaction
from engine.tiers.keyed_index import KeyedIndex
from engine.upkeep.gc import Collector
from lakefs.errors import LakeError
from lakefs.shared_index.key_format import id_of_record
from tests.lengths import repeated
from tests.sim.judges.history import SimFailure
from tests.sim.keyed_world import MET, KeyedWorld

pytestmark = pytest.mark.thorough

SEEDS: Final = 30
MORE: Final = repeated(1, 2)
BUG_SEEDS: Final = 40


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(part * SEEDS, (part + 1) * SEEDS) for part in range(MORE)])
def test_promises_about_keyed_blobs_hold_over_crashes(seeds: range) -> None:
    met: Counter[str] = Counter()
    for seed in seeds:
        world = KeyedWorld(seed)
        try:
            world.run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        met.update(world.met)
    assert all(met[what] for what in MET), met


# --- planted bugs --------------------------------------------------------------------------------------


def gc_forgets_values() -> AbstractContextManager[Any]:
    async def nothing(self: Collector, cycle: object) -> None:
        await trio.lowlevel.checkpoint()

    return mock.patch.object(Collector, "_mark_values", nothing)


def gc_forgets_what_is_put_while_it_runs() -> AbstractContextManager[Any]:
    return mock.patch.object(References, "keep", return_value=None)


def a_present_key_is_replaced() -> AbstractContextManager[Any]:
    def put(self: Values, txn: Transaction, usage: Usage, number: int, key: bytes, value: KeyedValue, **_: Any) -> None:
        values_module.remove_value(txn, usage, number, key)
        usage.add(value)
        txn.put(Table.KEYED, value_key(number, key), value.pack())

    return mock.patch.multiple(Values, put=put, find=lambda *_: None)


def a_put_is_answered_before_it_is_durable() -> AbstractContextManager[Any]:
    original = BoundPayloads.store

    async def store(self: BoundPayloads, payloads: Sequence[Any], bind: Any, **_: Any) -> Any:
        return await original(self, payloads, bind, durable=False)

    return mock.patch.object(BoundPayloads, "store", store)


def removals_leave_the_usage() -> AbstractContextManager[Any]:
    return mock.patch.object(Usage, "take", return_value=None)


def removals_leave_the_parts() -> AbstractContextManager[Any]:
    original = Usage.take

    def take(self: Usage, value: KeyedValue) -> None:
        original(self, value)
        self._parts = (self._parts or 0) + len(value.lengths)

    return mock.patch.object(Usage, "take", take)


def expiries_stay_when_their_value_goes() -> AbstractContextManager[Any]:
    return mock.patch("engine.keyed.values._forget", lambda txn, usage, number, key, value: usage.take(value))


def values_of_removed_spaces_stay() -> AbstractContextManager[Any]:
    return mock.patch.object(KeyedUpkeep, "_purge", return_value=False)


def expired_values_stay() -> AbstractContextManager[Any]:
    return mock.patch.object(KeyedUpkeep, "_expire", return_value=False)


def quotas_are_not_kept() -> AbstractContextManager[Any]:
    return mock.patch.multiple(KeyedBlobs, room=lambda *_: None, excess=lambda *_: 0)


def numbers_are_used_again() -> AbstractContextManager[Any]:
    def unpack(value: bytes) -> tuple[int]:
        return (int.from_bytes(value, "little") - 1,)

    counter = mock.Mock(wraps=None)
    counter.unpack = unpack
    counter.pack = lambda number: number.to_bytes(8, "little")
    return mock.patch("engine.keyed.spaces.COUNTER_RECORD", counter)


def entries_stay_when_their_value_goes() -> AbstractContextManager[Any]:
    original = KeyedIndex.records_durable

    def records_durable(self: KeyedIndex, mutations: list[Mutation]) -> None:
        original(self, [mutation for mutation in mutations if mutation[0] is not Op.DELETE])

    return mock.patch.object(KeyedIndex, "records_durable", records_durable)


def entries_come_before_their_group_is_durable() -> AbstractContextManager[Any]:
    original = Committer._join

    def join(self: Committer, transaction: TableTransaction) -> Any:
        sequence = original(self, transaction)
        for tables, observe in self._record_observers:
            observe([mutation for mutation in singly(transaction.mutations) if mutation[1] in tables])
        return sequence

    return mock.patch.object(Committer, "_join", join)


def places_are_those_of_another_key() -> AbstractContextManager[Any]:
    original, last = KeyedIndex._enter, list[Any]()

    def enter(self: KeyedIndex, key: bytes, value: bytes, place: Any) -> None:
        last.append(place)
        original(self, key, value, last[max(0, len(last) - 2)])

    return mock.patch.object(KeyedIndex, "_enter", enter)


def keys_are_looked_up_in_any_space() -> AbstractContextManager[Any]:
    def of_any_space(key: bytes) -> bytes:
        return id_of_record(key[:1] + b"\0\0\0\1" + key[5:])

    return mock.patch("engine.tiers.keyed_index.id_of_record", of_any_space)


def a_removed_space_is_still_found() -> AbstractContextManager[Any]:
    return mock.patch.object(KeyedIndex, "_space_durable", return_value=None)


BUGS: Final[list[tuple[Callable[[], AbstractContextManager[Any]], int]]] = [
    (gc_forgets_values, 10),
    (gc_forgets_what_is_put_while_it_runs, BUG_SEEDS),
    (a_present_key_is_replaced, 10),
    (a_put_is_answered_before_it_is_durable, 30),
    (removals_leave_the_usage, 10),
    (removals_leave_the_parts, 10),
    (expiries_stay_when_their_value_goes, 20),
    (values_of_removed_spaces_stay, 10),
    (expired_values_stay, 20),
    (quotas_are_not_kept, 10),
    (numbers_are_used_again, 20),
    (entries_stay_when_their_value_goes, 10),
    (entries_come_before_their_group_is_durable, 2 * BUG_SEEDS),
    (places_are_those_of_another_key, 10),
    (keys_are_looked_up_in_any_space, 10),
    (a_removed_space_is_still_found, 20),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "seeds"), BUGS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_planted_bug_in_keyed_blobs_is_noticed(plant: Callable[[], AbstractContextManager[Any]], seeds: int) -> None:
    for seed in range(seeds):
        try:
            with plant():
                KeyedWorld(seed).run()
        except (SimFailure, LakeError, AssertionError, BaseExceptionGroup):
            return
    pytest.fail(f"not noticed in {seeds} seeds")

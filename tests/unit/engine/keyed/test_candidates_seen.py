"""Eviction, a round at a time: which values go of those that the hand has seen in earlier rounds."""

from __future__ import annotations

import pytest
import trio

from engine.format.keyed import value_key
from engine.keyed import spaces as spaces_module
from engine.keyed.spaces import EVICT_ABOVE, KEYED_PART_CHARGE
from engine.keyed.upkeep import KeyedUpkeep
from engine.metadata.pacing import Pacing
from engine.store.store import Store
from lakefs.limits import MIB
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.contract.test_requests_keyed import space_of
from tests.store_rig import ask, client_of, run, session_of, simulated_store, store_chunks
from tests.unit.engine.keyed.test_upkeep import QUOTA, commit_keys, key_of, values_in

SHARES = 100


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the store from running rounds by itself, and let a value of a byte count a hundredth of a quota."""

    async def never(self: KeyedUpkeep) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(KeyedUpkeep, "run", never)
    monkeypatch.setattr(spaces_module, "KEYED_PART_CHARGE", QUOTA // SHARES - 1)


async def put_shares(client: EngineClient, space: int, depths: dict[bytes, int]) -> None:
    """Put values that count a hundredth of QUOTA each."""
    session = await session_of(client)
    (chunk,) = await store_chunks(client, session, [b"x"])
    assert set((await commit_keys(client, session, space, chunk, depths)).outcomes) == {m.KEYED_STORED}


async def evict_to(store: Store, upkeep: KeyedUpkeep, count: int) -> None:
    """Set the quota so that one round leaves `count` values, and run that round."""
    await space_of(client_of(store), quota_bytes=int(count * (QUOTA // SHARES) / 0.98) + 1)
    await upkeep.round()


@pytest.mark.usefixtures("by_hand")
def test_the_best_value_to_evict_was_removed_and_the_round_goes_on_with_the_next() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client, upkeep = client_of(store), KeyedUpkeep(store.metadata, store.keyed, store.clock)
            space = await space_of(client, quota_bytes=4 * QUOTA)
            keys = [key_of(index) for index in range(SHARES + 20)]
            await put_shares(client, space, {key: depth for depth, key in enumerate(keys)})
            await evict_to(store, upkeep, SHARES + 10)  # all are seen
            assert set(values_in(store, space)) == set(keys[: SHARES + 10]), "the deepest went"
            await ask(client, m.KeyedRemove(space, [keys[SHARES + 9]]), m.KeyedOutcomes)
            await evict_to(store, upkeep, SHARES)
            assert set(values_in(store, space)) == set(keys[:SHARES]), "one round is enough"

    run(main)


@pytest.mark.usefixtures("by_hand")
def test_what_a_value_counted_when_it_was_seen_is_halved_as_all_counts_are() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client, upkeep = client_of(store), KeyedUpkeep(store.metadata, store.keyed, store.clock)
            space = await space_of(client, quota_bytes=4 * QUOTA)
            old, *others = [key_of(index) for index in range(SHARES + 10)]
            await put_shares(client, space, dict.fromkeys([old, *others], 0))
            store.keyed.note_used(space, [old] * 2 + others[3:] * 6)
            await evict_to(store, upkeep, SHARES + 7)  # all are seen
            assert set(values_in(store, space)) == {old, *others[3:]}
            before = store.keyed.halvings
            while store.keyed.halvings < before + 2:
                store.keyed.note_used(space, [b"other %d" % index for index in range(256)])
            new = [key_of(-1 - index) for index in range(3)]
            await space_of(client, quota_bytes=4 * QUOTA)
            await put_shares(client, space, dict.fromkeys(new, 0))
            store.keyed.note_used(space, new)
            assert store.keyed.uses(value_key(space, old)) < store.keyed.uses(value_key(space, new[0]))
            await evict_to(store, upkeep, SHARES + 8)
            left = set(values_in(store, space))
            assert len(left) == SHARES + 8
            assert old not in left, "it was used before those that were used lately"
            assert set(new) <= left

    run(main)


def test_a_value_that_is_stored_in_an_empty_space_stays_however_long_it_is() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            space, session = await space_of(client, quota_bytes=QUOTA), await session_of(client)
            (chunk,) = await store_chunks(client, session, [bytes(MIB)])
            whole = int(QUOTA * EVICT_ABOVE) // MIB
            most = int(QUOTA * EVICT_ABOVE) - (whole + 1) * KEYED_PART_CHARGE
            assert most // MIB == whole
            (rest, more) = await store_chunks(client, session, [bytes(most % MIB), bytes(most % MIB + 1)])
            for last, outcome in ((more, m.KEYED_FAILED), (rest, m.KEYED_STORED)):
                parts = [chunk] * whole + [last]
                request = m.KeyedCommit(session, space, [b"k"], [len(parts)], parts)
                assert (await ask(client, request, m.KeyedOutcomes)).outcomes == [outcome]
            await trio.sleep(20)
            assert values_in(store, space) == [b"k"]

    run(main)


def test_many_spaces_that_lose_very_many_values_hold_up_no_put_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async def rest(self: Pacing, times: float = 0) -> None:
        await trio.sleep(0.02)

    async def main() -> None:
        monkeypatch.setattr(Pacing, "rest", rest)
        monkeypatch.setattr(spaces_module, "KEYED_PART_CHARGE", MIB)
        async with simulated_store() as store:
            client = client_of(store)
            most = QUOTA // (MIB + 1)
            other = await space_of(client, "other", quota_bytes=QUOTA)
            await put_shares(client, other, {key_of(index): 0 for index in range(most - 1)})
            many = [await space_of(client, f"many {number}") for number in range(30)]
            for number in many:
                await put_shares(client, number, {key_of(index): 0 for index in range(most + 500)})
            for number in range(len(many)):
                await space_of(client, f"many {number}", quota_bytes=QUOTA)
            store.keyed.round_wanted.set()
            await trio.sleep(0.5)
            for index in range(5):
                await put_shares(client, other, {b"%d %d" % (index, more): 0 for more in range(20)})
            left = [len(values_in(store, number)) for number in many]
            assert max(left) > most, "it is under way still"
            await trio.sleep(60)
            assert max(len(values_in(store, number)) for number in many) <= most

    run(main)

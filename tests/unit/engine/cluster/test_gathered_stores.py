"""Chunks of many puts are stored together: who waits, which error goes to whom, and whose memory is whose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import trio
import trio.testing

from engine.members.ports import NewChunk
from engine.stripes.gathered_stores import GATHER_S, GatheredStores
from engine.stripes.stripe_shards import PORTION_BYTES
from lakefs.cluster.erasure import ErasureCode
from lakefs.errors import StoreFull
from lakefs.ids import ChunkId, GcGeneration
from lakefs.limits import CHUNK_BYTES
from tests.store_rig import run
from tests.unit.engine.cluster.stripe_rig import GENERATION, Fault, Rig, id_of, in_lake, new, payload_of


class Members:
    """Stores nothing, slowly, and notes the portions."""

    def __init__(self) -> None:
        self.portions: list[list[ChunkId]] = []
        self.refused: set[ChunkId] = set()
        self.may_answer = trio.Event()
        self.ended = 0

    async def store(self, generation: GcGeneration, chunks: Sequence[NewChunk]) -> Mapping[ChunkId, bool]:
        self.portions.append([each.chunk for each in chunks])
        try:
            await self.may_answer.wait()
            if any(each.chunk in self.refused for each in chunks):
                raise StoreFull("no room")
            return {each.chunk: True for each in chunks}
        finally:
            self.ended += 1


def gathering() -> tuple[Members, GatheredStores]:
    members = Members()
    return members, GatheredStores(ErasureCode(4, 2), members.store, 1)


def chunks_of(*numbers: int, length: int = 100) -> dict[ChunkId, NewChunk]:
    made = [new(payload_of(length, number)) for number in numbers]
    return {each.chunk: each for each in made}


def test_calls_that_wait_are_stored_together_and_one_that_is_alone_waits_for_nobody() -> None:
    async def main() -> None:
        members, stores = gathering()
        fresh: list[Mapping[ChunkId, bool]] = []

        async def put(number: int) -> None:
            fresh.append(await stores.store(GENERATION, chunks_of(number)))

        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(put, number)
            await trio.testing.wait_all_tasks_blocked()
            assert [len(portion) for portion in members.portions] == [1]
            members.may_answer.set()
        assert [len(portion) for portion in members.portions] == [1, 9]
        assert sorted(chunk for each in fresh for chunk in each) == sorted(chunks_of(*range(10)))
        assert all(len(each) == 1 and all(each.values()) for each in fresh), "each call has its own chunks"

    run(main)


def test_a_refused_chunk_is_the_error_of_its_own_put_alone() -> None:
    async def main() -> None:
        members, stores = gathering()
        members.refused = set(chunks_of(3))
        failed: list[int] = []

        async def put(number: int) -> None:
            try:
                await stores.store(GENERATION, chunks_of(number))
            except StoreFull:
                failed.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(put, number)
            await trio.testing.wait_all_tasks_blocked()
            members.may_answer.set()
        assert failed == [3]

    run(main)


def test_a_portion_has_one_generation_no_chunk_twice_and_no_more_than_its_bytes() -> None:
    async def main() -> None:
        members, stores = gathering()
        a, b, c = chunks_of(1), chunks_of(2), chunks_of(3)
        calls = [(1, a), (1, b), (1, b), (2, c), (2, a)]
        calls += [(2, chunks_of(number, number + 10, length=CHUNK_BYTES)) for number in (4, 5, 6)]
        assert 2 * 2 * CHUNK_BYTES * 3 // 2 == PORTION_BYTES

        async with trio.open_nursery() as nursery:
            for generation, chunks in calls:
                nursery.start_soon(stores.store, GcGeneration(generation), chunks)
                await trio.testing.wait_all_tasks_blocked()
            members.may_answer.set()
        assert members.portions == [[*a], [*b], [*b], [*c, *a, *calls[5][1]], [*calls[6][1], *calls[7][1]]]

    run(main)


def test_a_slow_member_holds_up_other_puts_for_a_moment_only() -> None:
    async def main() -> None:
        members, stores = gathering()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stores.store, GENERATION, chunks_of(1))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(stores.store, GENERATION, chunks_of(2))
            nursery.start_soon(stores.store, GENERATION, chunks_of(3))
            await trio.sleep(GATHER_S + 0.01)
            assert [len(portion) for portion in members.portions] == [1, 2]
            members.may_answer.set()

    run(main)


@pytest.mark.parametrize("cancelled", [0, 1, 2])
def test_a_cancelled_call_has_its_memory_back_only_when_nothing_reads_it(cancelled: int) -> None:
    """The first is stored alone, the second stores the portion of both that wait, the third is in it."""

    async def main() -> None:
        members, stores = gathering()
        scopes = [trio.CancelScope() for _ in range(3)]
        done: list[int] = []
        returned_at: dict[int, int] = {}

        async def put(number: int) -> None:
            try:
                with scopes[number]:
                    await stores.store(GENERATION, chunks_of(number))
                    done.append(number)
            finally:
                returned_at[number] = members.ended

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(put, number)
                await trio.testing.wait_all_tasks_blocked()
            if cancelled:
                await trio.sleep(2 * GATHER_S)  # both that wait are on their way
                await trio.testing.wait_all_tasks_blocked()
            scopes[cancelled].cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert (cancelled in returned_at) == (cancelled == 0), "what is stored with others is waited for"
            members.may_answer.set()
        assert {*done} | {cancelled} == {0, 1, 2}, "others are stored"
        if cancelled:
            assert returned_at[cancelled] >= 1, "its portion had ended"

    run(main)


def test_a_cancelled_call_that_waits_is_not_stored() -> None:
    async def main() -> None:
        members, stores = gathering()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stores.store, GENERATION, chunks_of(1))
            await trio.testing.wait_all_tasks_blocked()
            with trio.move_on_after(GATHER_S / 2):
                await stores.store(GENERATION, chunks_of(2))
            members.may_answer.set()
        assert members.portions == [[*chunks_of(1)]]

    run(main)


def test_many_puts_ask_each_member_a_few_times() -> None:
    async def body(rig: Rig) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(64):
                nursery.start_soon(rig.store, payload_of(4096, number))
        assert rig.members.calls["StoreShards"] <= 3 + 2 * 6, "the first alone, the others in two portions at most"
        for number in range(64):
            await rig.reads_back(payload_of(4096, number))

    in_lake(body)


def test_a_member_that_is_full_for_one_is_no_error_of_others() -> None:
    async def body(rig: Rig) -> None:
        for number in range(1, 6):
            rig.members.faults[id_of(number)] = Fault.FULL
        failed: list[int] = []

        async def put(number: int) -> None:
            try:
                await rig.store(payload_of(4096, number))
            except StoreFull:
                failed.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(put, number)
            await trio.testing.wait_all_tasks_blocked()
            for number in range(3, 6):
                del rig.members.faults[id_of(number)]
            for number in range(8, 16):
                nursery.start_soon(put, number)
        stored = [number for number in range(16) if number not in failed]
        assert set(stored) >= set(range(8, 16))
        assert failed, "one member with room is too few"
        for number in stored:
            await rig.reads_back(payload_of(4096, number))

    in_lake(body)

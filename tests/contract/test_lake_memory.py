"""Puts from shared memory, whichever driver and connection: the same content, and no payload in bodies if possible."""

from __future__ import annotations

import gc
import random

import pytest
import trio

from engine.sessions import lendings
from lakefs.client.trio.lake import TrioLake
from lakefs.errors import InvalidArgument, InvalidName, KeyNotFound, PreconditionFailed
from lakefs.limits import CHUNK_BYTES
from lakefs.put.shared_memory import SharedMemory, Slot
from lakefs.steps.steps import Step
from lakefs.wire import messages as m
from tests.contract.engines import Kind
from tests.contract.test_lake import Driven, content_of, run, safetensors
from tests.seen_steps import asks, seen

SIZES = [0, 1, 65_535, 65_536, CHUNK_BYTES, 2 * CHUNK_BYTES + 70_000]


def filled(memory: SharedMemory, content: bytes) -> Slot:
    slot = memory.allocate(len(content))
    slot.buffer[:] = content
    return slot


def sent_by_memory(lake: Driven) -> bool:
    """Return whether no data chunk was sent in a body since the last call.  Something must have been stored."""
    asked = list(lake.asked)
    lake.asked.clear()
    bodies = [
        request
        for request in asked
        if isinstance(request, m.PutObjects) or (isinstance(request, m.StoreChunks) and 1 in request.kinds)
    ]
    slots = [request for request in asked if isinstance(request, m.PutSlots | m.StoreSlots)]
    assert bodies or slots
    return not bodies


async def returned(lake: Driven, *memories: SharedMemory) -> None:
    for memory in memories:
        await lake.run(lake.steps.return_memory(memory))
        gc.collect()  # the traceback of an expected error refers to the memory, and keeps its mapping
        memory.close()
    if lake.engine.store is not None:
        assert lake.engine.store.lent.statistics()["count"] == 0


@pytest.mark.parametrize("size", SIZES)
def test_a_slot_that_was_put_is_what_is_got(kind: Kind, size: int) -> None:
    async def body(lake: Driven) -> None:
        memory = SharedMemory(3 * CHUNK_BYTES)
        content = content_of(size)
        slot = filled(memory, content)
        result = await lake.run(lake.steps.put("bkt/slot", slot, content_type="text/plain"))
        assert (result.size_bytes, result.new_bytes, result.stat.size_bytes) == (size, size, size)
        assert result.stat.content_type == "text/plain"
        assert sent_by_memory(lake) == lake.engine.client.carries_descriptors
        slot.buffer[:] = bytes(size)
        assert await lake.run(lake.steps.get("bkt/slot")) == content
        with pytest.raises(PreconditionFailed):
            await lake.run(lake.steps.put("bkt/slot", slot, if_absent=True))
        await returned(lake, memory)

    run(kind, body)


def test_many_slots_and_buffers_are_put_in_order(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        first, second = SharedMemory(CHUNK_BYTES), SharedMemory(CHUNK_BYTES)
        contents = {f"bkt/{number}": content_of(1000 + 9000 * number) for number in range(40)}
        data = [
            (name, content if number % 3 == 0 else filled((first, second)[number % 3 - 1], content))
            for number, (name, content) in enumerate(contents.items())
        ]
        stats = await lake.run(lake.steps.put_many(data, in_flight=16))
        assert [f"{stat.bucket}/{stat.key}" for stat in stats] == list(contents)
        assert await lake.run(lake.steps.get_many(list(contents))) == list(contents.values())
        slots = [asked for asked in lake.asked if isinstance(asked, m.PutSlots)]
        assert bool(slots) == lake.engine.client.carries_descriptors
        for name, error in ((("bkt/long", first.slot(0, 0)), None), (("", first.slot(0, 1)), InvalidName)):
            if error is not None:
                with pytest.raises(error):
                    await lake.run(lake.steps.put_many([("bkt/new", b"1"), name]))
        with pytest.raises(KeyNotFound):
            await lake.run(lake.steps.get("bkt/new"))
        await returned(lake, first, second)

    run(kind, body)


def test_a_slot_with_a_safetensors_file_is_cut_at_its_tensors(kind: Kind) -> None:
    content = safetensors({"a": 3 << 20, "b": 1 << 20, "c": 5000, "d": 2 << 20}, random.Random(1))

    async def body(lake: Driven) -> None:
        memory = SharedMemory(len(content))
        by_slot = await lake.run(lake.steps.put("bkt/slot", filled(memory, content)))
        by_bytes = await lake.run(lake.steps.put("bkt/bytes", content))
        assert by_slot.stat.blob == by_bytes.stat.blob
        assert by_bytes.stat.chunk_count > 2
        await returned(lake, memory)

    run(kind, body)


def test_slots_are_parts_of_an_upload(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        memory = SharedMemory(2 * CHUNK_BYTES)
        content = content_of(CHUNK_BYTES + 5)
        upload = await lake.run(lake.steps.create_upload("bkt/whole"))
        part = await lake.run(lake.steps.put_part(upload, 1, filled(memory, content)))
        assert sent_by_memory(lake) == lake.engine.client.carries_descriptors
        await lake.run(lake.steps.complete_upload(upload, [(part.number, part.etag)]))
        assert await lake.run(lake.steps.get("bkt/whole")) == content
        await returned(lake, memory)

    run(kind, body)


def test_memory_is_lent_anew_when_the_engine_does_not_know_it_any_more(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        memory = SharedMemory(3 * CHUNK_BYTES)
        content = content_of(2 * CHUNK_BYTES + 1)
        slot = filled(memory, content)
        small = memory.slot(0, 100)
        for put, names in (
            (lambda: lake.steps.put("bkt/one", small), ["bkt/one"]),
            (lambda: lake.steps.put("bkt/many", slot), ["bkt/many"]),
            (lambda: lake.steps.put_many([("bkt/a", small), ("bkt/b", b"b")]), ["bkt/a", "bkt/b"]),
        ):
            lake.steps.lent[memory] = 4711
            await lake.run(put())
            for name in names:
                found = await lake.run(lake.steps.get(name))
                assert found in (content, content[:100], b"b")
            number = lake.steps.lent.get(memory)
            assert number != 4711 or not lake.engine.client.carries_descriptors
            await lake.run(lake.steps.return_memory(memory))
        await returned(lake, memory)

    run(kind, body)


def test_what_cannot_be_lent_is_sent(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lendings, "LENT_MEMORIES_PER_CONNECTION_MAX", 1)

    async def body(lake: Driven) -> None:
        memories = [SharedMemory(3 * CHUNK_BYTES) for _ in range(2)]
        for memory, size in zip(memories, (10, 10), strict=True):
            await lake.run(lake.steps.put("bkt/x", filled(memory, content_of(size))))
        if lake.engine.store is not None:
            assert not sent_by_memory(lake)
        large = content_of(CHUNK_BYTES + 1)
        await lake.run(lake.steps.put("bkt/large", filled(memories[1], large)))
        await lake.run(lake.steps.put_many([("bkt/y", filled(memories[1], b"y"))]))
        assert await lake.run(lake.steps.get_many(["bkt/large", "bkt/y"])) == [large, b"y"]
        await returned(lake, *memories)

    run(kind, body)


def test_an_object_of_a_batch_that_is_longer_than_a_chunk_is_refused(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        memory = SharedMemory(2 * CHUNK_BYTES)
        with pytest.raises(InvalidArgument):
            await lake.run(lake.steps.put_many([("bkt/a", b"a"), ("bkt/long", memory.slot(0, CHUNK_BYTES + 1))]))
        memory.close()

    run(kind, body)


@pytest.mark.parametrize("many", [True, False])
def test_a_put_that_was_cancelled_has_its_lending_ended(kind: Kind, many: bool) -> None:
    async def body(lake: Driven) -> None:
        if not (isinstance(lake.lake, TrioLake) and lake.engine.client.carries_descriptors):
            return
        memory = SharedMemory(CHUNK_BYTES)
        slot = filled(memory, content_of(1000))
        with trio.CancelScope() as scope:

            def see(step: Step, answer: object) -> None:
                if asks(step, m.PutSlots):
                    scope.cancel()

            put = lake.steps.put_many([("bkt/a", slot)]) if many else lake.steps.put("bkt/a", slot)
            await lake.run(seen(put, see))
        assert scope.cancelled_caught
        assert lake.count(m.ReturnMemory) == 1
        await lake.run(lake.steps.put_many([("bkt/b", slot)]))
        assert await lake.run(lake.steps.get("bkt/b")) == content_of(1000)
        assert lake.count(m.LendMemory) == 2
        await returned(lake, memory)

    run(kind, body)


@pytest.mark.parametrize("size", [7, CHUNK_BYTES])
def test_a_payload_that_is_there_already_is_not_new(kind: Kind, size: int) -> None:
    async def body(lake: Driven) -> None:
        memory = SharedMemory(CHUNK_BYTES)
        content = content_of(size)
        sources: list[bytes | Slot] = [content, filled(memory, content), content]
        results = [await lake.run(lake.steps.put(f"bkt/{at}", source)) for at, source in enumerate(sources)]
        assert [(result.size_bytes, result.new_bytes) for result in results] == [(size, size), (size, 0), (size, 0)]
        await returned(lake, memory)

    run(kind, body)

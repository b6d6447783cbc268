"""Memory of streamed answers: bounded for each client and for all, in order, fair, warm, and safe when cancelled."""

from __future__ import annotations

import ctypes
import errno
import random
from itertools import pairwise

import pytest
import trio
import trio.testing

from engine.requests.answer_memory import AnswerBuffer, AnswerMemory
from lakefs.limits import BODY_BYTES_MAX, KIB, MIB
from tests.store_rig import run


def address_of(buffer: AnswerBuffer) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer.view))


async def asking(nursery: trio.Nursery, memory: AnswerMemory, client: str, size_bytes: int) -> list[AnswerBuffer]:
    """Start a task that takes memory, and let it wait; return the list in which the memory will be."""
    taken: list[AnswerBuffer] = []

    async def take() -> None:
        taken.append(await memory.take(client, size_bytes))

    nursery.start_soon(take)
    await trio.testing.wait_all_tasks_blocked()
    return taken


def test_a_client_waits_until_its_answers_are_sent_and_another_does_not() -> None:
    async def main() -> None:
        memory = AnswerMemory(client_bytes=8 * MIB)
        first, second = await memory.take("slow", 4 * MIB), await memory.take("slow", 4 * MIB)
        async with trio.open_nursery() as nursery:
            third = await asking(nursery, memory, "slow", 4 * MIB)
            behind = await asking(nursery, memory, "slow", 128 * KIB)
            other = await memory.take("quick", 4 * MIB)
            assert not third
            assert not behind, "it came later than one that waits"
            assert memory.waiting == 2
            first.release()
            await trio.testing.wait_all_tasks_blocked()
            assert len(third) == 1
            assert not behind
            second.release()
            await trio.testing.wait_all_tasks_blocked()
            assert len(behind) == 1
        for buffer in (*third, *behind, other):
            buffer.release()
        assert (memory.held_bytes, memory.waiting) == (0, 0)

    run(main)


def test_an_answer_longer_than_what_a_client_may_hold_gets_memory_alone() -> None:
    async def main() -> None:
        memory = AnswerMemory(client_bytes=2 * MIB, total_bytes=4 * MIB)
        small = await memory.take("client", 300 * KIB)
        async with trio.open_nursery() as nursery:
            large = await asking(nursery, memory, "client", BODY_BYTES_MAX)
            assert not large
            small.release()
        assert len(large[0].view) == BODY_BYTES_MAX
        large[0].release()

    run(main)


def test_clients_get_scarce_memory_in_turn() -> None:
    async def main() -> None:
        memory = AnswerMemory(client_bytes=4 * MIB, total_bytes=4 * MIB)
        held = await memory.take("first", 4 * MIB)
        order: list[str] = []

        async def ask(client: str) -> None:
            buffer = await memory.take(client, 4 * MIB)
            order.append(client)
            await trio.testing.wait_all_tasks_blocked()
            buffer.release()

        async with trio.open_nursery() as nursery:
            for client in ("greedy", "greedy", "greedy", "modest"):
                nursery.start_soon(ask, client)
                await trio.testing.wait_all_tasks_blocked()
            held.release()
        assert order == ["greedy", "modest", "greedy", "greedy"]

    run(main)


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_task_that_is_cancelled_takes_nothing_and_stops_nobody(leaver: int) -> None:
    async def main() -> None:
        memory = AnswerMemory(client_bytes=4 * MIB, total_bytes=6 * MIB)
        held = await memory.take("a", 4 * MIB)
        scopes = [trio.CancelScope() for _ in range(3)]
        taken: list[int] = []

        async def ask(index: int, client: str, size_bytes: int) -> None:
            with scopes[index]:
                buffer = await memory.take(client, size_bytes)
                taken.append(index)
                buffer.release()

        async with trio.open_nursery() as nursery:
            for index, (client, size_bytes) in enumerate((("b", 4 * MIB), ("b", MIB), ("c", 2 * MIB))):
                nursery.start_soon(ask, index, client, size_bytes)
                await trio.testing.wait_all_tasks_blocked()
            scopes[leaver].cancel()
            await trio.testing.wait_all_tasks_blocked()
            if not leaver:
                assert sorted(taken) == [1, 2], "what waited behind the one that left fits"
            held.release()
        assert sorted(taken) == [index for index in range(3) if index != leaver]
        assert (memory.held_bytes, memory.waiting) == (0, 0)

    run(main)


def test_memory_that_was_used_last_is_used_first_and_only_so_much_is_kept() -> None:
    async def main() -> None:
        memory = AnswerMemory(client_bytes=64 * MIB, kept_bytes=6 * MIB)
        buffers = [await memory.take("client", 2 * MIB) for _ in range(4)]
        last = address_of(buffers[-1])
        for buffer in buffers:
            buffer.release()
        assert memory.kept_bytes == 6 * MIB
        again = await memory.take("client", 2 * MIB - 100)
        assert len(again.view) == 2 * MIB - 100
        assert address_of(again) == last
        other = await memory.take("client", 8 * MIB)
        other.release()
        assert memory.kept_bytes == 0, "what is longer than all that may be kept is not"
        again.release()
        assert memory.kept_bytes == 2 * MIB
        with pytest.raises(AssertionError, match="twice"):
            again.release()

    run(main)


def test_where_the_system_has_no_memory_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOMEM, "none")

    async def main() -> None:
        memory = AnswerMemory()
        with monkeypatch.context() as patch:
            patch.setattr("engine.requests.answer_memory.mmap.mmap", none)
            with pytest.raises(OSError, match="none"):
                await memory.take("client", MIB)
        assert memory.held_bytes == 0
        (await memory.take("client", MIB)).release()

    run(main)


def in_units(size_bytes: int) -> int:
    """Return the length of the memory for so many bytes: 128 KiB, doubled as often as needed."""
    unit = 128 * KIB
    while unit < size_bytes:
        unit *= 2
    return unit


@pytest.mark.parametrize("seed", range(20))
def test_any_mix_of_clients_keeps_the_bounds_and_ends(seed: int) -> None:
    rng = random.Random(seed)
    client_bytes, total_bytes, kept_bytes = (rng.randint(1, 40) * 256 * KIB for _ in range(3))
    memory = AnswerMemory(client_bytes=client_bytes, total_bytes=total_bytes, kept_bytes=kept_bytes)
    live: list[tuple[str, int, int]] = []
    done = 0

    def check() -> None:
        assert sum(length for _, length, _ in live) <= memory.held_bytes
        assert memory.held_bytes <= total_bytes or len(live) <= 1
        assert memory.kept_bytes <= kept_bytes
        for client in {client for client, _, _ in live}:
            own = [length for of, length, _ in live if of == client]
            assert sum(own) <= client_bytes or len(own) == 1
        places = sorted((place, place + length) for _, length, place in live)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(places)), "shared memory"

    async def ask(size_bytes: int) -> None:
        nonlocal done
        client = rng.choice("abcde")
        with trio.move_on_after(rng.random() if rng.random() < 0.3 else 1e9):
            buffer = await memory.take(client, size_bytes)
            entry = client, in_units(size_bytes), address_of(buffer)
            live.append(entry)
            check()
            buffer.view[:1] = buffer.view[-1:] = b"x"
            try:
                await trio.sleep(rng.random())
            finally:
                live.remove(entry)
                buffer.release()
        done += 1

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(120):
                nursery.start_soon(ask, rng.randint(1, 1 << rng.randint(1, 24)))
                if rng.random() < 0.2:
                    await trio.sleep(rng.random() / 3)

    run(main)
    assert done == 120
    assert (memory.held_bytes, memory.waiting, memory._clients) == (0, 0, {})

"""Gc over a lake beside clients: content that moves, is bound or opened amid the walk stays."""

from __future__ import annotations

from typing import Protocol

import pytest
import trio
import trio.testing

from engine.sessions.references import References
from engine.upkeep.roots import Roots
from lakefs.ids import MemberId
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from tests.lake_rig import SmallLake, layout, old, small_lake, with_lake
from tests.sim.world.determinism import run_seeded

ONE, TWO = b"one" * 50, b"two" * 30_000


class Act(Protocol):
    """Something that happens to the name of an object."""

    __name__: str

    async def __call__(self, lake: SmallLake, name: str) -> None: ...


def race(*acts: Act) -> None:
    """Let each act begin at each checkpoint of a cycle in turn, on content of its own, which stays readable."""
    delay, beside = 0, True

    async def main() -> None:
        nonlocal beside
        async with small_lake(2, batch=1) as lake:
            await names_around(lake, *acts)
            await old(lake)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lake.collect)
                for _ in range(delay):
                    await trio.lowlevel.checkpoint()
                beside = delay == 0 or lake.gc.running
                for act in acts:
                    nursery.start_soon(act, lake, act.__name__)
            for _ in range(3):
                for act in acts:
                    assert await lake.is_readable(*content_of(act)), f"lost by {act.__name__} at checkpoint {delay}"
                await lake.collect()

    while beside:
        run_seeded(main, delay, clock=trio.testing.MockClock(autojump_threshold=0))
        delay += 4
    assert delay >= 40, "the cycle is walked in steps"


def content_of(act: Act) -> tuple[bytes, bytes]:
    return content_named(act.__name__)


def content_named(name: str) -> tuple[bytes, bytes]:
    return name.encode(), TWO


async def names_around(lake: SmallLake, *acts: Act) -> None:
    """Names that are acted upon, some before and some behind them."""
    for act in acts:
        await lake.put(f"folder of {act.__name__}/", b"folder")
    for number in range(12):
        await lake.put(f"before {number}", b"%d" % number)
    for act in acts:
        await lake.put(act.__name__, *content_of(act))
    await lake.put("behind", b"behind")


async def copy_and_remove(lake: SmallLake, name: str) -> None:
    await lake.copy(name, f"to {name}")
    await lake.delete(name)


async def copy_to_a_folder_key(lake: SmallLake, name: str) -> None:
    await lake.copy(name, f"folder of {name}/")
    await lake.delete(name)


async def copy_over_a_folder_key(lake: SmallLake, name: str) -> None:
    """The node behind the walk has the content for a moment only, and hands it on to a new one."""
    await lake.copy(name, f"folder of {name}/")
    await lake.delete(name)
    await trio.sleep(0.001)
    await lake.copy(f"folder of {name}/", f"to {name}")
    await lake.copy("behind", f"folder of {name}/")


async def rename(lake: SmallLake, name: str) -> None:
    await lake.rename(name, f"to {name}")


async def put_again(lake: SmallLake, name: str) -> None:
    await lake.delete(name)
    await lake.put(f"to {name}", *content_named(name))


async def make_a_part(lake: SmallLake, name: str) -> None:
    upload = await lake.begin_upload("upload")
    blob, chunks = layout(content_named(name))
    generation = await lake.state.generation()
    await lake.store_chunks(chunks, generation)
    await lake.record_part(upload, blob, generation)
    await lake.delete(name)


async def open_and_remove(lake: SmallLake, name: str) -> None:
    await lake.lease(name)
    await lake.delete(name)


def test_content_that_moves_amid_the_walk_stays() -> None:
    race(copy_and_remove, copy_to_a_folder_key, copy_over_a_folder_key, rename, put_again, make_a_part, open_and_remove)


def test_a_walk_that_does_not_look_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Roots, "_note_rebound", lambda self, sequence, notes: None)
    with pytest.raises(AssertionError, match="lost by copy_to_a_folder_key"):
        race(copy_to_a_folder_key)


def test_a_walk_that_forgets_leases_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(References, "leased_blobs", lambda self: iter(()))
    with pytest.raises(AssertionError, match="lost by open_and_remove"):
        race(open_and_remove)


def test_nothing_is_swept_before_what_the_walk_saw_is_durable() -> None:
    async def main(lake: SmallLake) -> None:
        await lake.put("gone", ONE)
        await old(lake)
        seen: list[bool] = []
        removed = 0

        async def hook(member: MemberId, request: m.Request) -> Reply | None:
            nonlocal removed
            if isinstance(request, m.GcMark) and not removed:
                removed = await lake.remove_without_waiting("gone")
                assert lake.names.metadata.durable_sequence < removed
            if isinstance(request, m.GcSweep):
                seen.append(lake.names.metadata.durable_sequence >= removed > 0)
            return None

        lake.members.hook = hook
        await lake.collect()
        assert seen == [True] * 3

    with_lake(main)

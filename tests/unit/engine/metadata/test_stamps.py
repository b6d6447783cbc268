"""Stamps of an engine: they live exactly as long as it has its store, and turn when the index is replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

from engine.metadata.stamps import Stamps
from engine.store.store import Store
from engine.superblock import superblock as superblocks
from lakefs.errors import EngineBusy, IndexDamaged, StoreDamaged, StoreReadOnly
from lakefs.ids import Sequence
from lakefs.stamps.stamps import StampReader
from lakefs.wire import messages as m
from tests.sim.world.disk import SimDisk
from tests.store_rig import ask, client_of, put, run, simulated_store


def _reader(store: Store) -> StampReader:
    assert store.metadata.stamps is not None
    return StampReader(store.metadata.stamps.descriptor)


async def _stamps_of(store: Store, key: str) -> bytes:
    request = m.StatNames([("bkt", key)], stamps=True)
    return (await ask(client_of(store), request, m.NameResults)).results[0].stamps


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[StampReader]:
    """Collect a reader of each engine's stamps, as soon as these have begun."""
    made: list[StampReader] = []
    original = Stamps.begin

    def begin(self: Stamps) -> None:
        original(self)
        made.append(StampReader(self.descriptor))

    monkeypatch.setattr(Stamps, "begin", begin)
    return made


@pytest.fixture
def lived_at_release(monkeypatch: pytest.MonkeyPatch, readers: list[StampReader]) -> list[bool]:
    """Note whether stamps live at the moment at which a store's lock is released."""
    noted: list[bool] = []
    original: Callable[..., superblocks.OpenedStore] = superblocks.open_store

    def open_store(*arguments: Any, **named: Any) -> superblocks.OpenedStore:
        opened = original(*arguments, **named)
        close = opened.lock.close

        def closed() -> None:
            noted.append(readers[-1].is_live)
            close()

        monkeypatch.setattr(opened.lock, "close", closed)
        return opened

    monkeypatch.setattr(superblocks, "open_store", open_store)
    return noted


def test_stamps_live_from_the_opening_to_the_stop_and_end_before_the_lock_is_released(
    readers: list[StampReader], lived_at_release: list[bool]
) -> None:
    disk = SimDisk(1)

    async def main() -> None:
        async with simulated_store(disk) as store:
            await put(client_of(store), "a", b"1")
            assert readers[-1].stand(await _stamps_of(store, "a"))

    run(main)
    run(main)
    assert lived_at_release == [False, False]
    assert [reader.is_live for reader in readers] == [False, False]


def test_stamps_of_one_engine_say_nothing_of_anothers(readers: list[StampReader]) -> None:
    disk = SimDisk(1)
    sets: list[bytes] = []

    async def main() -> None:
        async with simulated_store(disk) as store:
            if not sets:
                await put(client_of(store), "a", b"1")
            sets.append(await _stamps_of(store, "a"))
            assert [reader.stand(sets[0]) for reader in readers[:-1]] == [False] * (len(readers) - 1)

    run(main)
    run(main)
    assert len(readers) == 2


class _Failure(Exception):
    pass


def test_stamps_end_when_the_body_fails(readers: list[StampReader], lived_at_release: list[bool]) -> None:
    async def main() -> None:
        async with simulated_store():
            raise _Failure

    with pytest.raises(_Failure):
        run(main)
    assert lived_at_release == [False]


@pytest.mark.parametrize("place", ["engine.store.metadata_life.open_metadata", "engine.store.opening.Segments.open"])
def test_stamps_end_when_the_opening_fails_halfway(
    readers: list[StampReader], lived_at_release: list[bool], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    async def fails(*_: object, **__: object) -> None:
        await trio.lowlevel.checkpoint()
        raise StoreDamaged("planted")

    monkeypatch.setattr(place, fails)

    async def main() -> None:
        async with simulated_store():
            raise AssertionError("the store was opened")

    with pytest.raises(StoreDamaged, match="planted"):
        run(main)
    assert lived_at_release == [False]


def test_stamps_end_when_the_opening_is_cancelled(readers: list[StampReader], lived_at_release: list[bool]) -> None:
    async def main() -> None:
        count, opened = 0, False
        while not opened:
            with trio.CancelScope() as scope:
                try:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(_cancel_after, count, scope)
                        async with simulated_store():
                            opened = True
                            nursery.cancel_scope.cancel()
                except* StoreReadOnly:  # the committer was cancelled before the opening was
                    pass
            count += 1

    run(main)
    assert len(readers) > 5
    assert not any(lived_at_release)
    assert not any(reader.is_live for reader in readers)


async def _cancel_after(checkpoints: int, scope: trio.CancelScope) -> None:
    for _ in range(checkpoints):
        await trio.lowlevel.checkpoint()
    scope.cancel()


@pytest.mark.parametrize("error", [EngineBusy("no memory"), OSError(95, "no robust mutex")])
def test_an_engine_that_cannot_have_stamps_serves_without_them(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    if isinstance(error, OSError):

        class Unlockable:
            turn = turn_all = of = None
            begin = fails

            def __init__(self, *_: object) -> None:
                pass

        monkeypatch.setattr("engine.metadata.stamps.StampMemory", Unlockable)
    else:
        monkeypatch.setattr("engine.metadata.stamps.SealedMemory", fails)

    async def main() -> None:
        async with simulated_store() as store:
            assert store.metadata.stamps is None
            assert not store.hello(descriptors=True).features & m.FEATURE_STAMPS
            await put(client_of(store), "a", b"1")
            assert await _stamps_of(store, "a") == b""

    run(main)


def test_a_rebuilt_index_turns_all_stamps() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            reader = _reader(store)
            await put(client_of(store), "a", b"1")
            sets = [await _stamps_of(store, key) for key in ("a", "missing")]
            assert all(map(reader.stand, sets))
            await store.metadata.rebuild_online()
            assert not any(map(reader.stand, sets))
            assert reader.stand(await _stamps_of(store, "a"))

    run(main)


def test_a_decision_that_raises_turns_nothing_and_one_that_cannot_turn_changes_nothing() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            reader = _reader(store)
            await put(client_of(store), "a", b"1")
            found = await _stamps_of(store, "a")
            await ask(client_of(store), m.DeleteNames([("bkt", "a")], m.Condition(etags=["no"])), m.NameResults)
            assert reader.stand(found)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(store.metadata._committer, "turn_stamps", _fails)
                with pytest.raises(IndexDamaged):
                    await put(client_of(store), "a", b"2")
            assert reader.stand(await _stamps_of(store, "a"))
            assert reader.stand(found)

    run(main)


def _fails(mutations: object) -> None:
    raise IndexDamaged("planted")


def test_stamps_turn_before_any_observer_hears_of_a_change() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            reader = _reader(store)
            await put(client_of(store), "a", b"1")
            found = await _stamps_of(store, "a")
            heard: list[bool] = []

            def joined(sequence: Sequence, notes: list[object]) -> None:
                heard.append(reader.stand(found))

            store.metadata.on_joined(joined)
            await put(client_of(store), "a", b"2")
            assert heard
            assert not any(heard)

    run(main)

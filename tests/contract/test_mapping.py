"""Objects as memory: their bytes, in one row where chunks are whole pages, kept in place while they are mapped."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import trio

from engine.segments.files import SEGMENTS_FOLDER
from lakefs.client.blocking.lake import Lake
from lakefs.client.trio.lake import TrioLake
from lakefs.content.verify import Check
from lakefs.errors import ChunkDamaged, EngineUnreachable, InvalidArgument, KeyNotFound
from lakefs.get.mapping import MAP_ATTEMPTS, MappedObject, _pin
from lakefs.get.opened import Opened
from lakefs.ids import ChunkId
from lakefs.limits import BATCH_MAX, CHUNK_BYTES
from lakefs.wire.engine_port import Reply
from lakefs.wire.media import MEDIUM_SEGMENT
from lakefs.wire.messages import Done, Grant, PinChunks, Pinned, UnpinChunks
from tests.contract.engines import Kind
from tests.contract.test_lake import MANY, Driven, content_of, run

ROW = content_of(3 * CHUNK_BYTES + 5)


async def mapped(
    lake: Driven,
    use: Callable[[MappedObject], object],
    name: str = "bkt/k",
    *,
    offset: int = 0,
    length: int | None = None,
    check: Check | None = None,
) -> None:
    """`use` a mapping within its block, in a lake of either kind."""
    if isinstance(lake.lake, TrioLake):
        async with lake.lake.map(name, offset, length, check=check) as memory:
            use(memory)
        return
    assert isinstance(lake.lake, Lake)
    blocking = lake.lake

    def block() -> None:
        with blocking.map(name, offset, length, check=check) as memory:
            use(memory)

    await trio.to_thread.run_sync(block)


def pins(lake: Driven) -> int:
    return 0 if lake.engine.store is None else lake.engine.store.segments.pins.statistics()["chunks"]


@pytest.mark.parametrize("check", Check)
def test_a_mapping_shows_the_objects_bytes_and_pins_them_meanwhile(kind: Kind, check: Check) -> None:
    async def body(lake: Driven) -> None:
        if not lake.steps.offers.segments:
            await lake.run(lake.steps.put("bkt/k", b"small"))
            with pytest.raises(InvalidArgument, match="Unix socket of one engine only"):
                await mapped(lake, print)
            return
        for content in (b"", b"small", content_of(65_536), content_of(300_001), ROW):
            await lake.run(lake.steps.put("bkt/k", content))

            def use(memory: MappedObject, content: bytes = content) -> None:
                assert memory.view == content
                assert memory.view.readonly
                assert memory.is_pinned()
                assert memory.stat.size_bytes == len(content)
                if lake.engine.store is not None and content:
                    assert pins(lake) == len(memory.chunks) > 0
                if content:
                    array = np.frombuffer(memory.view, dtype=np.uint8)
                    assert array.tobytes() == content
                    assert not array.flags.writeable
                    assert not array.flags.owndata

            await mapped(lake, use, check=check)
            assert pins(lake) == 0

    run(kind, body)


def test_ranges_are_mapped_and_chunks_that_are_not_whole_pages_come_in_pieces(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        if not lake.steps.offers.segments:
            return
        await lake.run(lake.steps.put("bkt/k", ROW))
        for offset, length in (
            (0, 1),
            (5, 4096),
            (CHUNK_BYTES - 1, 2),
            (CHUNK_BYTES, None),
            (len(ROW) - 3, 99),
            (len(ROW), 5),
        ):
            wanted = ROW[offset:] if length is None else ROW[offset : offset + length]

            def use(memory: MappedObject, wanted: bytes = wanted) -> None:
                assert memory.view == wanted

            await mapped(lake, use, offset=offset, length=length)
        upload = await lake.run(lake.steps.create_upload("bkt/parts"))
        for number, part in enumerate((content_of(5_300_003), content_of(70_001)), 1):
            await lake.run(lake.steps.put_part(upload, number, part))
        parts = await lake.run(lake.steps.parts_page(upload))
        await lake.run(lake.steps.complete_upload(upload, [(part.number, part.etag) for part in parts.parts]))
        whole = content_of(5_300_003) + content_of(70_001)

        def use_pieces(memory: MappedObject) -> None:
            assert len(memory.pieces) > 1
            assert b"".join(memory.pieces) == whole
            with pytest.raises(InvalidArgument, match="pieces"):
                memory.view  # noqa: B018 - it raises

        await mapped(lake, use_pieces, "bkt/parts")
        with pytest.raises(InvalidArgument, match="no range"):
            await mapped(lake, print, offset=-1)
        with pytest.raises(KeyNotFound):
            await mapped(lake, print, "bkt/missing")
        assert pins(lake) == 0

    run(kind, body)


def test_mapped_bytes_stay_while_the_object_goes_and_its_room_after_them(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        store = lake.engine.store
        if not lake.steps.offers.segments or store is None or not isinstance(lake.lake, TrioLake):
            return
        await lake.run(lake.steps.put("bkt/k", MANY))
        async with lake.lake.map("bkt/k") as memory:
            before = sum(map(len, memory.pieces))
            await lake.run(lake.steps.remove("bkt/k"))
            await lake.run(lake.steps.gc())
            assert b"".join(memory.pieces) == MANY
            assert before == len(MANY)
        assert pins(lake) == 0

    run(kind, body)


def test_what_outlives_its_block_is_told_and_stays_mapped(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        if not lake.steps.offers.segments:
            return
        await lake.run(lake.steps.put("bkt/k", ROW))
        kept: list[object] = []
        with pytest.raises(BufferError, match="must be gone"):
            await mapped(lake, lambda memory: kept.append(np.frombuffer(memory.view, dtype=np.uint8)))
        (array,) = kept
        assert isinstance(array, np.ndarray)
        assert array.tobytes() == ROW
        kept.clear()

        def fail(memory: MappedObject) -> None:
            array = np.frombuffer(memory.view, dtype=np.uint8)
            raise ZeroDivisionError(array.shape)

        with pytest.raises(ZeroDivisionError) as raised:
            await mapped(lake, fail)
        assert "must be gone" in raised.value.__notes__[0]

    run(kind, body)


class LikeTorch:
    """A reader like torch: it gives the buffer's lock back, reads on at its address, and keeps the object alive."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.address, self.length = _address_of(view), len(view)

    def tobytes(self) -> bytes:
        return ctypes.string_at(self.address, self.length)


def _address_of(view: memoryview) -> int:
    array = np.frombuffer(view, dtype=np.uint8)
    return int(array.ctypes.data)


def test_what_holds_the_view_but_no_buffer_keeps_it_mapped_too(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        if not lake.steps.offers.segments:
            return
        await lake.run(lake.steps.put("bkt/k", ROW))
        kept: list[LikeTorch] = []
        with pytest.raises(BufferError, match="must be gone"):
            await mapped(lake, lambda memory: kept.append(LikeTorch(memory.view)))
        assert kept[0].tobytes() == ROW  # otherwise this process dies here
        kept.clear()
        with pytest.raises(BufferError, match="must be gone"):
            await mapped(lake, lambda memory: kept.append(LikeTorch(memory.view[5:])))
        assert kept[0].tobytes() == ROW[5:]
        kept.clear()
        await mapped(lake, lambda memory: LikeTorch(memory.view).tobytes())

    run(kind, body)


def test_a_torch_tensor_that_outlives_its_block_is_told_and_stays_mapped(kind: Kind) -> None:
    torch = pytest.importorskip("torch", reason="is not installed")

    async def body(lake: Driven) -> None:
        if not lake.steps.offers.segments:
            return
        await lake.run(lake.steps.put("bkt/k", ROW))
        kept: list[Any] = []
        with pytest.raises(BufferError, match="must be gone"):
            await mapped(lake, lambda memory: kept.append(torch.frombuffer(memory.view, dtype=torch.uint8)))
        assert kept[0].numpy().tobytes() == ROW

    run(kind, body)


def test_a_mapping_pinned_on_a_connection_that_was_lost_meanwhile_is_made_again(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        if not lake.steps.offers.segments:
            return
        await lake.run(lake.steps.put("bkt/k", ROW))
        driver = type(lake.driver)
        epochs: list[int] = []
        answers = [False, False, True]

        def is_connected(_: object) -> bool:
            return answers.pop(0) if answers else True

        def use(memory: MappedObject) -> None:
            assert memory.view == ROW
            assert memory.is_pinned()
            epochs.append(memory.epoch)

        with mock.patch.object(driver, "is_connected", is_connected):
            await mapped(lake, use)
            assert (epochs, answers) == ([lake.driver.epoch], [])
            answers.extend([False] * MAP_ATTEMPTS)
            with pytest.raises(EngineUnreachable, match="was lost while bkt/k"):
                await mapped(lake, use)

    run(kind, body)


def test_pins_of_two_connections_are_not_taken_for_those_of_one() -> None:
    chunks = [ChunkId(number.to_bytes(33, "big")) for number in range(BATCH_MAX + 1)]
    opened = cast("Opened", SimpleNamespace(name="bkt/k", stat=None))
    steps = _pin(opened, chunks)
    grant = Grant(MEDIUM_SEGMENT, 1, 0, 1, 1, 0, 0)
    sent: list[Any] = []

    def answer(step: Any, reply: Reply) -> Any:
        sent.append(step.effect.request)
        steps.send("ticket")
        return steps.send(reply)

    step = answer(next(steps), Reply(Pinned([grant] * BATCH_MAX), epoch=3))
    step = answer(step, Reply(Pinned([grant]), epoch=4))
    with pytest.raises(EngineUnreachable, match="was lost while bkt/k"):
        answer(step, Reply(Done(), epoch=4))
    assert [type(request) for request in sent] == [PinChunks, PinChunks, UnpinChunks]
    assert sent[2].chunks == [chunks[-1]]  # the others' pins ended with their connection


@pytest.mark.parametrize("check", Check)
def test_damage_under_a_mapping_is_met_when_it_is_made(kind: Kind, check: Check) -> None:
    kind.need_segments()

    async def body(lake: Driven) -> None:
        if not lake.steps.offers.segments:
            return
        await lake.run(lake.steps.put("bkt/k", MANY))
        _flip(lake.engine.folder / "store" / SEGMENTS_FOLDER, MANY[CHUNK_BYTES + 1000 : CHUNK_BYTES + 1100])
        if check is Check.NONE:
            await mapped(lake, lambda memory: memory.pieces, check=check)
        else:
            with pytest.raises(ChunkDamaged, match="bkt/k"):
                await mapped(lake, print, check=check)
        assert pins(lake) == 0

    run(kind, body)


def _flip(folder: Path, needle: bytes) -> None:
    for path in folder.iterdir():
        at = path.read_bytes().find(needle)
        if at >= 0:
            with path.open("r+b") as file:
                os.pwrite(file.fileno(), bytes([needle[0] ^ 1]), at)

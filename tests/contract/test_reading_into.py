"""Reading into memory of the caller's: whatever lends it, whichever driver and connection."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from engine.segments.files import SEGMENTS_FOLDER
from lakefs.content.verify import Check
from lakefs.errors import ChunkDamaged, InvalidArgument, KeyNotFound
from lakefs.get.objects import GET_MANY_BATCH
from lakefs.host.writable_memory import writable_memory
from lakefs.limits import CHUNK_BYTES
from tests.contract.engines import Kind
from tests.contract.test_lake import Driven, content_of, run

SIZES = [0, 1, 40_000, 65_536, 65_537, 300_000, CHUNK_BYTES, CHUNK_BYTES + 70_000]
PLACES = len(SIZES)


class Tensor:
    """Memory that is lent as torch's tensors lend theirs."""

    def __init__(self, length: int, *, is_cpu: bool = True, contiguous: bool = True) -> None:
        self.memory = (ctypes.c_ubyte * length)()
        self.nbytes = length
        self.is_cpu = is_cpu
        self._contiguous = contiguous

    def data_ptr(self) -> int:
        return ctypes.addressof(self.memory)

    def is_contiguous(self) -> bool:
        return self._contiguous


def test_many_objects_land_in_memory_of_any_kind(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        for size in SIZES:
            await lake.run(lake.steps.put(f"bkt/{size}", content_of(size)))
        names = [f"bkt/{size}" for size in SIZES]
        buffers = [bytearray(size + 3) for size in SIZES]
        lake.asked.clear()
        assert await lake.run(lake.steps.get_many_into(names, buffers)) == SIZES
        assert [bytes(buffer) for buffer in buffers] == [content_of(size) + bytes(3) for size in SIZES]
        assert sum(type(asked).__name__ == "OpenObjects" for asked in lake.asked) == 1
        arrays = [np.zeros((-(-size // 8), 2), dtype=">f4") for size in SIZES]
        assert await lake.run(lake.steps.get_many_into(names, arrays)) == SIZES
        for array, size in zip(arrays, SIZES, strict=True):
            assert array.tobytes()[:size] == content_of(size)
        tensors = [Tensor(size) for size in SIZES]
        assert await lake.run(lake.steps.get_many_into(names, tensors)) == SIZES
        assert [bytes(tensor.memory) for tensor in tensors] == [content_of(size) for size in SIZES]

    run(kind, body)


def test_an_object_may_be_wanted_often_and_more_than_a_batch_is_read(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        await lake.run(lake.steps.put_many([("bkt/a", content_of(65_536)), ("bkt/b", content_of(9))]))
        count = GET_MANY_BATCH + 3
        memory = np.zeros((count, 65_536), dtype=np.uint8)
        names = ["bkt/a" if index % 2 else "bkt/b" for index in range(count)]
        sizes = await lake.run(lake.steps.get_many_into(names, list(memory)))
        assert sizes == [65_536 if index % 2 else 9 for index in range(count)]
        for index in (1, count - 2):
            assert memory[index].tobytes() == content_of(65_536)
        assert memory[count - 1, :9].tobytes() == content_of(9)
        assert not memory[count - 1, 9:].any()

    run(kind, body)


def test_what_cannot_be_filled_is_refused_before_a_byte_is_moved(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        await lake.run(lake.steps.put_many([("bkt/a", content_of(70_000)), ("bkt/b", content_of(70_000))]))
        first = bytearray(70_000)
        for bad, why in (
            (bytearray(69_999), "has 70000 bytes"),
            (bytes(70_000), "read-only"),
            (np.zeros((70_000, 2), dtype=np.uint8)[:, 0], "not contiguous"),
            (np.zeros(70_000, dtype="datetime64[s]"), "lends no memory"),
            (object(), "lends no memory"),
            (Tensor(70_000, is_cpu=False), "not in this machine's memory"),
            (Tensor(70_000, contiguous=False), "not contiguous"),
        ):
            with pytest.raises(InvalidArgument, match=why) as raised:
                await lake.run(lake.steps.get_many_into(["bkt/a", "bkt/b"], [first, bad]))  # type: ignore[list-item]
            assert raised.value.subject == "bkt/b"
        with pytest.raises(KeyNotFound, match="bkt/missing"):
            await lake.run(lake.steps.get_many_into(["bkt/a", "bkt/missing"], [first, bytearray(1)]))
        with pytest.raises(InvalidArgument, match="do not go together"):
            await lake.run(lake.steps.get_many_into(["bkt/a"], []))
        assert first == bytes(70_000)

    run(kind, body)


@pytest.mark.parametrize("check", Check)
def test_only_bytes_that_are_asked_for_unverified_are_not_checked(kind: Kind, check: Check) -> None:
    kind.need_segments()
    if kind.simulated:
        pytest.skip("the files of this store are in memory")

    async def body(lake: Driven) -> None:
        object.__setattr__(lake.steps, "check", check)
        sizes = {"bkt/small": 65_536, "bkt/short": 150_000, "bkt/large": 900_000}
        contents = {name: content_of(size) for name, size in sizes.items()}
        for name, content in contents.items():
            await lake.run(lake.steps.put(name, content))
        for path in (lake.engine.folder / "store" / SEGMENTS_FOLDER).iterdir():
            stored = path.read_bytes()
            for content in contents.values():
                if (at := stored.find(content[1000:1100])) >= 0:
                    with path.open("r+b") as file:
                        file.seek(at)
                        file.write(bytes([content[1000] ^ 1]))
        for name, content in contents.items():
            memory = bytearray(len(content))
            if check is Check.NONE and lake.steps.offers.segments:
                await lake.run(lake.steps.get_many_into([name], [memory]))
                assert memory[:1000] + memory[1001:] == content[:1000] + content[1001:]
                assert memory[1000] == content[1000] ^ 1
            else:
                with pytest.raises(ChunkDamaged, match=name):
                    await lake.run(lake.steps.get_many_into([name], [memory]))

    run(kind, body)


def test_lent_memory_is_the_lenders_own() -> None:
    lenders: tuple[Any, ...] = (bytearray(12), memoryview(bytearray(12)), np.zeros((2, 3), dtype=np.uint16), Tensor(12))
    for lent in lenders:
        writable_memory(lent, "x")[:] = b"twelve bytes"
        assert bytes(lent.memory if isinstance(lent, Tensor) else memoryview(lent).cast("B")) == b"twelve bytes"
    assert len(writable_memory(np.zeros((3, 0)), "x")) == len(writable_memory(Tensor(0), "x")) == 0

"""`LakeReader` against a file in memory: whatever is read and sought, also when the store fails in between."""

from __future__ import annotations

import io
import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fsspec")

from lakefs.errors import EngineUnreachable
from lakefs.limits import MIB
from lakefs.plugins.fsspec.reader import BUFFER_BYTES, LakeReader

CONTENT = random.Random(1).randbytes(5 * MIB + 77)
STEPS = 40


class Source(io.BytesIO):
    """An opened object, as far as the reader uses it, that fails as often as a test wants."""

    def __init__(self, rng: random.Random, failing: float) -> None:
        super().__init__(CONTENT)
        self.stat = SimpleNamespace(size_bytes=len(CONTENT))
        self._rng = rng
        self._failing = failing

    def read_next(self, length: int) -> bytes:
        self._may_fail()
        return self.read(length)

    def readinto(self, buffer: Any) -> int:
        self._may_fail()
        view = memoryview(buffer)
        return super().readinto(view[: self._rng.choice([len(view), 100_000, 1_500_000])])

    def _may_fail(self) -> None:
        if self._rng.random() < self._failing:
            raise EngineUnreachable("the engine is gone")


def step(reader: LakeReader, rng: random.Random) -> None:
    """Do one thing with a reader, and compare it with the content from where the reader says that it is."""
    at = reader.tell()
    what = rng.choice(["read", "read", "readinto", "readinto", "seek", "readline"])
    size = rng.choice([1, 100, 70_000, BUFFER_BYTES - 1, BUFFER_BYTES, 2 * MIB, 3 * MIB + 1])
    if what == "read":
        found = reader.read(size)
        assert found == CONTENT[at : at + size]
    elif what == "readinto":
        buffer = bytearray(size)
        count = reader.readinto(buffer)
        found = bytes(buffer[:count])
        assert found == CONTENT[at : at + count]
        assert count or at == len(CONTENT)
    elif what == "readline":
        found = reader.readline()
        assert CONTENT[at:].startswith(found)
    else:
        to = rng.choice([0, at + rng.randint(-1000, 1000), rng.randrange(len(CONTENT)), len(CONTENT) - 5])
        reader.seek(min(max(0, to), len(CONTENT)))
        return
    assert reader.tell() == at + len(found)


@pytest.mark.parametrize("failing", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(60))
def test_bytes_are_those_of_where_the_reader_is_also_after_errors(seed: int, failing: float) -> None:
    rng = random.Random(seed)
    with LakeReader(SimpleNamespace(), "bucket/key", Source(rng, failing)) as reader:  # type: ignore[arg-type]
        for _ in range(STEPS):
            try:
                step(reader, rng)
            except OSError:
                assert failing

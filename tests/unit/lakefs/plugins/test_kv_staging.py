"""The memory through which plug-ins load: what is given up is that, as a whole, and a bounded number of times."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from typing import cast

import pytest

from lakefs.client.blocking.spaces import Space
from lakefs.errors import EngineBusy, EngineUnreachable, InvalidArgument
from lakefs.get.pools import Pool
from lakefs.plugins.kv import staging as staged
from lakefs.plugins.kv.staging import ABANDONED_MAX, Staging

KEYS = [b"a", b"b", b"c"]


class Loads:
    """A space whose loads fail as a test says, and whose engine keeps every memory mapped."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.mapped: list[mmap.mmap] = []
        self.calls: list[list[bytes]] = []

    def try_get_many_into(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> None:
        return None

    def load(self, keys: Sequence[bytes], pool: Pool, offsets: Sequence[int], rooms: Sequence[int]) -> list[int]:
        self.calls.append(list(keys))
        self.mapped.append(mmap.mmap(pool.descriptor, pool.size_bytes))
        for key, offset in zip(keys, offsets, strict=True):
            pool.buffer[offset : offset + 8] = key * 8
        if self.error is not None:
            raise self.error
        return [8] * len(keys)

    def as_space(self) -> Space:
        return cast("Space", self)

    def leave(self) -> None:
        """End the engine's mappings."""
        while self.mapped:
            self.mapped.pop().close()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loads]:
    monkeypatch.setattr(staged, "STAGING_BYTES", 64)
    made = Loads()
    yield made
    made.leave()


def targets_of(size: int = 8) -> list[memoryview]:
    return [memoryview(bytearray(size)) for _ in KEYS]


def test_values_are_copied_to_their_targets_in_batches_that_fit(loads: Loads) -> None:
    staging, targets = Staging(), targets_of(24)
    assert staging.load(loads.as_space(), KEYS, targets) == [8] * 3
    assert [bytes(target[:9]) for target in targets] == [key * 8 + b"\0" for key in KEYS]
    assert loads.calls == [[b"a", b"b"], [b"c"]]
    staging.close()
    staging.close()


def test_what_the_engine_writes_after_a_load_was_given_up_is_in_no_target(loads: Loads) -> None:
    staging, targets = Staging(), targets_of()
    loads.error = EngineUnreachable("it does not answer")
    with pytest.raises(EngineUnreachable):
        staging.load(loads.as_space(), KEYS, targets)
    loads.mapped[0][:] = b"e" * len(loads.mapped[0])
    loads.error = None
    assert staging.load(loads.as_space(), KEYS, targets) == [8] * 3
    loads.mapped[0][:] = b"f" * len(loads.mapped[0])
    assert [bytes(target) for target in targets] == [key * 8 for key in KEYS]
    staging.close()


def test_no_more_than_a_few_memories_are_given_up_and_still_in_use(loads: Loads) -> None:
    before = set(os.listdir("/proc/self/fd"))
    staging = Staging()
    loads.error = EngineUnreachable("it does not answer")
    for _ in range(ABANDONED_MAX + 1):
        with pytest.raises(EngineUnreachable):
            staging.load(loads.as_space(), KEYS, targets_of())
    with pytest.raises(EngineBusy, match="still under way"):
        staging.load(loads.as_space(), KEYS, targets_of())
    loads.leave()
    loads.error = None
    assert staging.load(loads.as_space(), KEYS, targets_of()) == [8] * 3
    staging.close()
    loads.leave()
    assert set(os.listdir("/proc/self/fd")) == before


def test_other_errors_give_nothing_up(loads: Loads) -> None:
    staging = Staging()
    loads.error = InvalidArgument("no")
    for _ in range(10):
        with pytest.raises(InvalidArgument):
            staging.load(loads.as_space(), KEYS, targets_of())
    staging.close()

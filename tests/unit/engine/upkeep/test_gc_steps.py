"""Steps of gc on the loop: short ones while a client writes, so that none of its requests waits long for one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import pytest

from engine.metadata.metadata_store import Metadata
from engine.metadata.pacing import Pacing
from engine.process.embedded import EmbeddedEngine
from lakefs.limits import GC_BATCH, GC_BATCH_BESIDE_WRITERS
from lakefs.wire import messages as m
from tests.store_rig import ask, client_of, gc, put, run, simulated_store

VALUES: Final = 600
NAMES: Final = 300


async def filled(client: EmbeddedEngine) -> None:
    """Store values of a space, which share one chunk, and names."""
    space = (await ask(client, m.SpaceOpen("space"), m.SpaceStat)).number
    keys = [b"key %d" % number for number in range(VALUES)]
    request = m.KeyedPut(space, keys, [1] * VALUES, [5] * VALUES)
    assert not (await ask(client, request, m.KeyedOutcomes, *[b"value"] * VALUES)).failures
    for number in range(NAMES):
        await put(client, f"name {number}", b"content %d" % number)


class Walk:
    """Records that a cycle reads between two rests."""

    def __init__(self) -> None:
        self.steps = [0]

    @contextmanager
    def noted(self, *, somebody_writes: bool) -> Iterator[None]:
        """Context manager: count what is read by scans and look-ups, which begin anew with each rest."""
        rest, view = Pacing.rest, Metadata.view

        async def noting_rest(pacing: Pacing, *args: float) -> None:
            self.steps.append(0)
            await rest(pacing, *args)

        @contextmanager
        def noting_view(metadata: Metadata) -> Iterator[Any]:
            with view(metadata) as made:
                yield mock.Mock(wraps=made, scan=lambda *args: self._counted(made.scan(*args)), sequence=made.sequence)

        with (
            mock.patch.object(Pacing, "rest", noting_rest),
            mock.patch.object(Metadata, "view", noting_view),
            mock.patch.object(Pacing, "somebody_writes", new=somebody_writes),
        ):
            yield

    def _counted(self, entries: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        for entry in entries:
            self.steps[-1] += 1
            yield entry


@pytest.mark.parametrize(("somebody_writes", "most"), [(True, GC_BATCH_BESIDE_WRITERS), (False, GC_BATCH)])
def test_a_cycle_walks_few_records_at_a_time_while_a_client_writes(somebody_writes: bool, most: int) -> None:
    async def main() -> Mapping[str, Any]:
        async with simulated_store() as store:
            client = client_of(store)
            await filled(client)
            with walk.noted(somebody_writes=somebody_writes):
                return await gc(client)

    walk = Walk()
    report = run(main)
    assert report["freed_chunks"] == 0
    assert report["live_chunks"] >= NAMES
    assert sum(walk.steps) >= VALUES + 2 * NAMES, "not all was walked"
    assert max(walk.steps) == most

"""An idle store sleeps: a machine with many devices spends nothing on them while nobody asks."""

from __future__ import annotations

import trio

from lakefs.wire import messages as m
from tests.store_rig import ask, client_of, run, simulated_store


def test_an_idle_store_has_nothing_to_do_for_a_while() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            await trio.sleep(5)
            assert next_s() > 30

            await ask(client_of(store), m.BucketCreate("bkt"), m.Buckets)
            assert store.metadata._tables.overlay.entry_count > 0
            await trio.sleep(0.1)
            assert next_s() <= 1
            await trio.sleep(2)
            assert store.metadata._tables.overlay.entry_count == 0
            assert next_s() > 30

    run(main)


def next_s() -> float:
    """Return the seconds until a task that sleeps is woken."""
    return trio.lowlevel.current_statistics().seconds_to_next_deadline

"""Observers of decisions: they get the notes that they asked for, until they end."""

from __future__ import annotations

import trio

from engine.format.layouts import Table
from engine.tables.views import Transaction
from tests.sim.world.disk import SimDisk
from tests.unit.support.metadata_rig import opened, run

NAMES = Table.NAMES


def test_an_observer_gets_the_decisions_with_notes_that_it_asked_for_until_it_ends() -> None:
    async def scenario() -> None:
        async with opened(SimDisk(6)) as metadata:

            async def commit(key: bytes, *notes: object) -> None:
                def decide(txn: Transaction) -> None:
                    txn.insert(NAMES, key, b"")
                    txn.note(*notes)

                _, sequence = await metadata.commit(decide)
                await metadata.wait_durable(sequence)

            texts, all_notes, durable = list[object](), list[object](), list[object]()
            end_texts = metadata.on_joined(lambda _, notes: texts.extend(notes), [str])
            metadata.on_joined(lambda _, notes: all_notes.extend(notes))
            end_durable = metadata.on_durable(lambda _, notes: durable.extend(notes))
            assert metadata.noted_at() < trio.current_time()
            await commit(b"1", 1)
            await commit(b"2", "two", 2)
            await commit(b"3")
            assert texts == ["two", 2]
            assert metadata.noted_at() <= trio.current_time()
            end_texts()
            end_durable()
            await commit(b"4", "four")
            assert texts == ["two", 2]
            assert durable == [1, "two", 2]
            assert all_notes == [1, "two", 2, "four"]

    run(scenario)

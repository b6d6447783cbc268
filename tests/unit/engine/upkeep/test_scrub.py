"""Scrub: what it reads, what it finds, where it continues, and what quarantine does with that."""

from __future__ import annotations

import random
from functools import partial

import pytest
import trio

from engine.chunks.chunk_store import find_chunk
from engine.format.layouts import Table
from engine.segments.stored_check import AREA_BYTES, BATCH_BYTES, RUN_RECORDS, Stored, batches_of, bytes_of, runs_of
from engine.store.store import Store
from engine.upkeep.scrub import SAVE_INTERVAL_S, STATE_KEY
from lakefs.errors import ChunkDamaged
from lakefs.ids import ChunkId
from lakefs.limits import KIB, MIB
from lakefs.wire import messages as m
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimDisk
from tests.store_rig import ask, client_of, delete, fsck, gc, put, read, records, run, simulated_store

SIZES = (1, 1000, 30_000, 64 * KIB - 1, 64 * KIB, 300 * KIB, 2 * MIB)


async def fill(store: Store) -> dict[str, ChunkId]:
    """Put objects of one chunk each, of every kind of place."""
    client = client_of(store)
    generator = random.Random(5)
    return {f"o{size}": ChunkId((await put(client, f"o{size}", generator.randbytes(size))).blob) for size in SIZES}


def content_of(size: int) -> bytes:
    """Return the content that `fill` stored as `o{size}`."""
    generator = random.Random(5)
    return {each: generator.randbytes(each) for each in SIZES}[size]


async def spoil(store: Store, chunk: ChunkId, at: int = 0) -> None:
    """Flip one bit of a chunk on the medium."""
    record = records(store)[chunk]
    path = f"segments/{record.segment:016x}." + store.segments.register.kinds[record.segment].name.lower()
    file = store.disk.open(path)
    byte = bytearray(1)
    file.pread_into(memoryview(byte), record.offset + at)
    file.pwrite(bytes([byte[0] ^ 0x10]), record.offset + at)
    file.close()


def test_a_pass_reads_every_live_byte_and_finds_nothing_where_nothing_is_wrong() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            await fill(store)
            assert await store.scrubber.advance(1e6, rate_bytes_per_s=0)
            status = store.scrubber.status()
            assert status["state"] == "idle"
            assert status["last_pass"]["chunks"] == len(SIZES)
            assert status["last_pass"]["checked_bytes"] == sum(SIZES)
            assert status["last_pass"]["damage_found"] == 0
            assert await store.damaged() == []

    run(main)


@pytest.mark.parametrize("size", SIZES)
def test_any_spoilt_payload_is_found_and_named(size: int) -> None:
    async def main() -> None:
        async with simulated_store() as store:
            stored = await fill(store)
            client = client_of(store)
            await ask(client, m.Copy("bkt", f"o{size}", "bkt", "copy"), m.NameResults)
            await spoil(store, stored[f"o{size}"], size - 1)
            await store.scrubber.advance(1e6)
            assert store.scrubber.state.last_damaged == 1
            (found,) = await store.damaged()
            assert found["objects"] == ["bkt/copy", f"bkt/o{size}"]
            noted = store.quarantine.noted(10)[0]
            assert (noted.chunk, noted.code) == (stored[f"o{size}"], "chunk-damaged")

    run(main)


def test_good_bytes_put_again_end_the_quarantine_and_mend_every_object() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            stored = await fill(store)
            client = client_of(store)
            chunk = stored["o30000"]
            await spoil(store, chunk)
            await store.scrubber.advance(1e6)
            with pytest.raises(ChunkDamaged):
                await read(client, chunk)
            await put(client, "another name", content_of(30_000))
            assert await store.damaged() == []
            assert await read(client, chunk) == content_of(30_000)
            await store.scrubber.advance(1e6)
            assert store.scrubber.state.last_damaged == 0
            assert (await fsck(client))["damage"] == 0

    run(main)


def test_a_chunk_whose_place_is_good_again_leaves_quarantine() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            stored = await fill(store)
            await spoil(store, stored["o65536"])
            await store.scrubber.advance(1e6)
            assert len(store.quarantine) == 1
            await spoil(store, stored["o65536"])  # the same bit once more: as it was
            await store.scrubber.advance(1e6)
            assert len(store.quarantine) == 0
            assert store.scrubber.totals.released == 1

    run(main)


def test_the_quarantine_is_there_after_a_restart_and_gone_with_the_last_name() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk) as store:
            stored = await fill(store)
            await spoil(store, stored["o1000"])
            await store.scrubber.advance(1e6)
        async with simulated_store(disk) as store:
            (found,) = await store.damaged()
            assert found["objects"] == ["bkt/o1000"]
            client = client_of(store)
            await delete(client, "o1000")
            await gc(client)
            assert await store.damaged() == []

    run(main)


def test_a_pass_goes_on_behind_a_restart_where_it_stood() -> None:
    async def main() -> None:
        disk, clock = SimDisk(), SimClock()
        async with simulated_store(disk, clock=clock) as store:
            await fill(store)
            assert not await store.scrubber.advance(0.5, rate_bytes_per_s=64 * KIB)
            before = store.scrubber.state
            assert 0 < before.chunks < len(SIZES)
        async with simulated_store(disk, clock=clock) as store:
            assert store.scrubber.state == before
            assert store.scrubber.status()["state"] == "paused"
            assert await store.scrubber.advance(1e6, rate_bytes_per_s=0)
            assert store.scrubber.state.last_chunks == len(SIZES)
            assert store.scrubber.totals.chunks == len(SIZES) - before.chunks
            assert await store.scrubber.advance(1e6, restart=True)
            assert store.scrubber.state.passes == 2

    run(main)


def test_a_crash_costs_a_pass_no_more_than_what_was_not_noted_yet() -> None:
    async def main() -> None:
        disk, clock = SimDisk(), SimClock()
        async with simulated_store(disk, clock=clock) as store:
            await fill(store)
            assert not await store.scrubber.advance(SAVE_INTERVAL_S + 5, rate_bytes_per_s=32 * KIB)
            with store.metadata.view() as view:
                assert view.get(Table.COUNTERS, STATE_KEY) is not None

    run(main)


def test_the_rate_is_kept() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            await fill(store)
            began = trio.current_time()
            await store.scrubber.advance(1e6, rate_bytes_per_s=MIB)
            largest = max(SIZES)
            assert trio.current_time() - began >= (sum(SIZES) - largest) / MIB

    run(main)


def test_two_go_on_by_turns_with_one_pass() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            await fill(store)
            turns: list[str] = []

            async def scrub(name: str) -> None:
                done = False
                while not done:
                    done = await store.scrubber.advance(1e6, rate_bytes_per_s=MIB)
                    turns.append(name)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(scrub, "a")
                nursery.start_soon(scrub, "b")
            assert sorted(set(turns)) == ["a", "b"]
            assert store.scrubber.state.passes == 1
            assert store.scrubber.totals.payload_bytes == sum(SIZES)

    run(main)


def test_chunks_that_go_while_they_are_read_are_no_damage() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            await fill(store)
            client = client_of(store)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.scrubber.advance, 1e6)
                for size in SIZES:
                    await trio.sleep(0.001)
                    await delete(client, f"o{size}")
                    await gc(client)
            assert await store.damaged() == []
            assert store.scrubber.totals.damaged == 0

    run(main)


def test_runs_are_bounded_and_hold_every_chunk_once() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            for number in range(200):
                await put(client, str(number), random.Random(number).randbytes(number * 37 % 5000 + 1))
            await fill(store)
            stored = [Stored(chunk, record) for chunk, record in records(store).items()]
            runs = list(runs_of(stored))
            assert sorted(i.chunk for run_ in runs for i in run_) == sorted(i.chunk for i in stored)
            assert len(runs) < len(stored) / 4
            for each in runs:
                assert len(each) <= RUN_RECORDS
                span = each[-1].record.offset + each[-1].record.extent_bytes - each[0].record.offset
                assert span <= AREA_BYTES

    run(main)


def test_batches_hold_every_run_once_and_no_more_than_a_thread_may_do_in_one_go() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            await fill(store)
            client = client_of(store)
            for number in range(100):
                await put(client, str(number), bytes([number]) * 2000)
                await put(client, "spacer", random.Random(number).randbytes(64 * KIB - 1))
            stored = [Stored(chunk, record) for chunk, record in records(store).items()]
            apart = [item for item in stored if item.record.stored_bytes != 64 * KIB - 1]
            runs = list(runs_of(apart))
            batches = list(batches_of(runs))
            assert [run_ for batch in batches for run_ in batch] == runs
            assert len(batches) < len(runs) / 4
            for batch in batches:
                assert sum(map(len, batch)) <= RUN_RECORDS
                assert len(batch) == 1 or sum(map(bytes_of, batch)) <= BATCH_BYTES

    run(main)


@pytest.mark.parametrize(("at_once", "page"), [(2, 100), (100, 3), (2, 3), (1, 1)])
def test_a_pass_checks_all_however_the_records_fall_into_pages(
    at_once: int, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.upkeep.scrub.GC_BATCH", at_once)
    monkeypatch.setattr("engine.upkeep.scrub.PAGE_RECORDS_MAX", page)

    async def main() -> None:
        async with simulated_store() as store:
            stored = await fill(store)
            await spoil(store, stored["o1000"])
            assert await store.scrubber.advance(1e6, rate_bytes_per_s=0)
            assert store.scrubber.state.last_chunks == len(SIZES)
            assert store.scrubber.state.last_damaged == 1

    run(main)


def test_who_asks_for_full_speed_does_not_wait_for_the_slow_one_that_is_at_it() -> None:
    async def main() -> None:
        clock = SimClock()
        async with simulated_store(clock=clock) as store:
            await fill(store)
            began = clock.monotonic()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(store.scrubber.advance, 3600.0, rate_bytes_per_s=16 * KIB))
                await trio.sleep(0.001)
                assert store.scrubber.running
                while not await store.scrubber.advance(3600.0, rate_bytes_per_s=0):
                    pass
                nursery.cancel_scope.cancel()
            # At 16 KiB/s the pass takes 150 s.
            assert clock.monotonic() - began < 30
            assert store.scrubber.state.last_chunks == len(SIZES)

    run(main)


def test_a_scrub_that_has_no_time_does_nothing_but_tell() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            stored = await fill(store)
            reply = await ask(client_of(store), m.RunScrub(damaged=True), m.ReportReply)
            assert '"done": false' in reply.report_json
            assert '"damaged": []' in reply.report_json
            assert store.scrubber.state.chunks == 0
            with store.metadata.view() as view:
                assert find_chunk(view, stored["o1"]) is not None

    run(main)


def test_a_date_that_was_set_back_behind_the_last_pass_makes_one_due() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            now_ns = store.clock.wall_ns()
            assert store.scrubber.due_in_s(3600.0, now_ns) > 0
            assert store.scrubber.due_in_s(3600.0, now_ns + 10**18) == 0

    run(main)

"""Gc over a lake: dead content is freed in the second cycle after it was last touched; what a name refers to stays."""

from __future__ import annotations

from tests.lake_rig import layout, small_lake
from tests.store_rig import run

ONE, TWO, THREE = b"one" * 50, b"two" * 30_000, b"three" * 20


def test_dead_content_is_freed_in_the_second_cycle_after_it_was_last_touched() -> None:
    async def main() -> None:
        async with small_lake() as lake:
            await lake.put("kept", ONE, TWO)
            await lake.put("gone", TWO, THREE)
            await lake.delete("gone")
            everything = await lake.chunks()
            report = await lake.collect()
            assert (report.generation, report.freed_shards) == (2, 0), "touched in generation 1, which may bind yet"
            assert await lake.chunks() == everything
            report = await lake.collect()
            assert report.freed_shards == 4, "a chunk and a manifest, mirrored"
            assert await lake.chunks() == {chunk for chunk, _ in layout((ONE, TWO))[1]}
            assert await lake.is_readable(ONE, TWO)
            assert [each.kept_because for each in report.members] == [""] * 3

    run(main)

"""Blocks by keys, beside the file tiers of vLLM and LMCache: loads from memory and from disk, durable puts.

The sides of `keyed-get-64k` read blocks that lie in a tmpfs, a store of ours and the files of the peers.  Those of
`keyed-put-64k` write to the measured disk: ours are durable when the call ends, the peers' are not.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bench.harness.content import payload
from bench.harness.measure import Bench, Paired, Scenario, Sides, at_least, at_most, timed
from bench.harness.mounts import forget_pages_below
from bench.harness.process import ROOT, EngineProcess
from bench.harness.sampled import ALONE, OURS, CouldNotRun, Entrant, Sampled, Side, Target
from bench.peers.fio import Job
from bench.peers.kv_blocks import write_block
from bench.peers.kv_clients import Spec
from bench.peers.kv_contest import KvSide, Moved, kv_scenario
from bench.peers.kv_hosts import LakeKeyed, LakeLoadedById
from bench.scenarios.pool import BLOCKS, FIO, KIB, MEMORY_FOLDER, MIB, fio_side, timed_calls
from lakefs.content.verify import Check

PLUGINS: Final = ROOT / ".venv-plugins/bin/python"
VLLM: Final = "vllm 0.33, fs"
LMCACHE: Final = "lmcache 0.5.6, fs_native"
AS_TIER: Final = f"{OURS}, as vllm's tier"
AS_CONNECTOR: Final = f"{OURS}, as lmcache's connector"
BY_ID: Final = f"{OURS}, load_many by ids"
NOTHING: Final = "nothing"
P50: Final = "p50_us"


def _sides(engine: str, folder: str) -> tuple[KvSide, ...]:
    return (
        KvSide(AS_TIER, "vllm-lake", engine, python=PLUGINS),
        KvSide(AS_CONNECTOR, "lmcache-lake", engine, python=PLUGINS),
        KvSide(VLLM, "vllm-fs", folder, python=PLUGINS),
        KvSide(LMCACHE, "lmcache-fs", folder, python=PLUGINS),
    )


GETS: Final = (
    KvSide(OURS, "lake-keyed", "memory-engine"),
    KvSide(f"{OURS}, get_many_into", "lake-keyed-into", "memory-engine"),
    KvSide(BY_ID, "lake-by-id", "memory-engine"),
    *_sides("memory-engine", "memory-folder"),
    KvSide("copy + CRC32C", "copies-crc", "folder"),
    KvSide(NOTHING, "nothing", "folder", reads=False),
)
PUTS: Final = (
    KvSide(OURS, "lake-keyed", "engine"),
    *_sides("engine", "folder"),
    KvSide("files, synced each", "files", "folder"),
    KvSide(NOTHING, "nothing", "folder", reads=False),
)


@contextmanager
def disk_sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: values of 1 MiB that are in no cache, by keys; and a file of the same length."""
    count = bench.scale.pick(512, 32)
    source = bench.folder / "source"
    with source.open("wb") as file:
        for _ in range(count):
            file.write(payload(MIB))
    with EngineProcess(bench.folder) as engine:
        keys = [index.to_bytes(32, "little") for index in range(count)]
        with engine.connect() as lake:
            space = lake.space("bench")
            for first in range(0, count, BLOCKS):
                space.put_many(keys[first : first + BLOCKS], [payload(MIB) for _ in range(BLOCKS)])
        forget = partial(forget_pages_below, engine.data)
        yield [
            Entrant(OURS, partial(_loads, engine, keys, Check.CRC32C, forget)),
            Entrant(f"{OURS}, unverified", partial(_loads, engine, keys, Check.NONE, forget)),
            Entrant(FIO, partial(fio_side, source, Job("read", MIB, count * MIB, depth=BLOCKS))),
        ]


@contextmanager
def _loads(engine: EngineProcess, keys: Sequence[bytes], check: Check, forget: object) -> Iterator[Side]:
    assert callable(forget)
    with engine.connect(check=check) as lake, lake.pool(size_bytes=len(keys) * MIB) as pool:
        space = lake.space("bench")

        def load(taken: Sequence[int]) -> None:
            wanted, offsets = [keys[index] for index in taken], [index * MIB for index in taken]
            assert space.load(wanted, pool, offsets, [MIB] * BLOCKS) == [MIB] * BLOCKS

        yield Side(timed_calls(load, len(keys), MIB, len(keys) // BLOCKS), forget, lambda: [engine.pid])


@contextmanager
def same_values(bench: Bench) -> Iterator[Sides]:
    """Context manager: the same values into the same pool by keys and by ids, each call after one of the other kind.

    Two clients with values of their own would compare the memory that they got, too: the first of two that do the same
    is up to a fifth slower.
    """
    if not MEMORY_FOLDER.is_dir():
        raise CouldNotRun(f"there is no {MEMORY_FOLDER}")
    count, calls = bench.scale.pick(1024, 64), bench.scale.pick(1000, 8)
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER) as name, EngineProcess(Path(name)) as engine:
        client = LakeLoadedById(Spec("lake-by-id", engine.address, 64 * KIB, count))
        try:
            for first in range(0, count, BLOCKS):
                for index in range(BLOCKS):
                    write_block(first + index, client.slot(index))
                client.put(range(first, first + BLOCKS), 0)
            p50 = [0.0, 0.0]

            def by_keys() -> float:
                taken: tuple[list[float], list[float]] = ([], [])
                for call in range(2 * calls):
                    begin = call * (BLOCKS + 1) % (count - BLOCKS)
                    load = (LakeKeyed.get, LakeLoadedById.get)[call % 2]
                    taken[call % 2].append(timed(partial(load, client, range(begin, begin + BLOCKS), begin)))
                p50[:] = map(statistics.median, taken)
                return p50[0]

            by_keys()
            yield Sides(by_keys, lambda: p50[1])
        finally:
            client.close()


SCENARIOS: Final[tuple[Scenario, ...]] = (
    kv_scenario(
        "keyed-get-64k",
        "load of 16 x 64 KiB by keys, from memory, CRC32C",
        Moved("get", 64 * KIB, 16, 1024, 400),
        GETS,
        targets=(
            Target(P50, at_most(0.5, "x"), VLLM),
            Target(P50, at_most(0.7, "x"), LMCACHE),
            Target(P50, at_most(0.5, "x"), VLLM, AS_TIER),
            Target(P50, at_most(0.7, "x"), LMCACHE, AS_CONNECTOR),
        ),
        generator=NOTHING,
        expected_s=60,
        figure=P50,
    ),
    Paired(
        "keyed-by-id",
        "p50 of loads of 16 x 64 KiB by keys, from memory, CRC32C / of the same values by load_many",
        "s",
        at_most(1.05, "x"),
        same_values,
    ),
    Sampled(
        "keyed-get-1m",
        "load of 16 x 1 MiB by keys, from disk, CRC32C",
        "bytes_per_s",
        disk_sides,
        generator=ALONE,
        expected_s=20,
        targets=(Target("bytes_per_s", at_least(0.85, "x"), FIO),),
    ),
    kv_scenario(
        "keyed-put-64k",
        "put of 16 x 64 KiB by keys, durable",
        Moved("put", 64 * KIB, 16, 64, 40),
        PUTS,
        targets=(Target(P50, at_most(1, "x"), VLLM), Target(P50, at_most(1, "x"), VLLM, AS_TIER)),
        generator=NOTHING,
        expected_s=60,
        figure=P50,
    ),
)

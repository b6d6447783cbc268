"""Two vLLM engines in one program: vLLM's own factory makes their tiers, and blocks go from one to the other.

The first has vLLM's own shared region, which the engine is lent; from the second's memory blocks are copied.  An engine
with another model, other weights under the same path, or a salt has none of them.

Run with the Python of `.venv-plugins`; LAKE_SERVER names the engine.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

import lakefs

BLOCK = 65536
ROWS = 32
WAIT_S = 60.0


def memory() -> Any:
    return np.frombuffer(mmap.mmap(-1, ROWS * BLOCK), np.int8).reshape(ROWS, BLOCK)


def shared_region() -> SharedOffloadRegion:
    return SharedOffloadRegion(f"lake-test-{os.getpid()}", ROWS, None, BLOCK, BLOCK)


def offloading_config(model: str, extra: dict[str, Any], engine_id: str = "e") -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("l0", "l1"), 0),),
        worker_kv_bytes_per_block=BLOCK,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id=engine_id,
        model=OffloadingModelConfig(model, "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )


def tier(rows: Any, model: str = "llama/8b", region: SharedOffloadRegion | None = None, **options: Any) -> Any:
    config = offloading_config(model, {})
    spec = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None, _scheduler_mmap=region)
    named = {"type": "LakeTier", "module_path": "lakefs.plugins.kv.vllm_tier", **options}
    return SecondaryTierFactory.create_secondary_tier(named, memoryview(rows), spec)


def finished(made: Any) -> Any:
    """Return the only job that ends next."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        jobs = list(made.get_finished_jobs())
        if jobs:
            (job,) = jobs
            return job
        time.sleep(0.001)
    raise AssertionError("no job has ended")


def looked_up(made: Any, keys: list[Any], request: str) -> list[Any]:
    """Return what the look-ups of one request come to, step by step as the scheduler asks."""
    context = ReqContext(request)
    made.on_new_request(context)
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        results = [made.lookup(key, context) for key in keys]
        if LookupResult.RETRY not in results:
            made.on_request_finished(context)
            return results
        made.on_schedule_end(None)
        time.sleep(0.001)
    raise AssertionError("a look-up was never answered")


def stored(made: Any, keys: list[Any]) -> None:
    made.submit_store(TransferJob(5, keys, np.arange(len(keys)), False, ReqContext("stores")))
    assert finished(made).success


def other_weights_have_other_blocks(folder: Path) -> None:
    """A finetune is saved over the model, with the same length, configuration and index."""
    (folder / "config.json").write_text("{}")
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(3 << 20))
    key = make_offload_key(b"k" * 32, 0)
    first = tier(memory(), str(folder))
    stored(first, [key])
    same = tier(memory(), str(folder))
    assert looked_up(same, [key], "same") == [LookupResult.HIT]
    weights.write_bytes(bytes(2 << 20) + b"w" * (1 << 20))
    tuned, salted = tier(memory(), str(folder)), tier(memory(), str(folder), salt="fp8")
    assert len({made.space_name for made in (first, same, tuned, salted)}) == 3
    for made in (tuned, salted):
        assert looked_up(made, [key], "other") == [LookupResult.MISS]
    for made in (first, same, tuned, salted):
        made.shutdown()


def another_length_is_a_miss_and_is_replaced(made: Any, key: Any) -> None:
    """A value that is no block of this host, under a key that it asks for."""
    with lakefs.connect() as lake:
        space = lake.space(made.space_name)
        space.remove([bytes(key)])
        space.put_many([bytes(key)], [b"of another length"])
    assert looked_up(made, [key], "r5") == [LookupResult.MISS]
    stored(made, [key])
    assert looked_up(made, [key], "r6") == [LookupResult.HIT]
    made.submit_load(TransferJob(6, [key], np.arange(1), True, ReqContext("loads")))
    assert finished(made).success


def main() -> None:
    region, second = shared_region(), memory()
    first = region.base_tensor.numpy().reshape(ROWS, BLOCK)
    first[:] = np.random.default_rng(1).integers(-128, 127, (ROWS, BLOCK), dtype=np.int8)
    keys = [make_offload_key(bytes([number]) * 32, 0) for number in range(16)]
    one, two, other = tier(first, region=region), tier(second), tier(memory(), "another/model")
    assert (one._moves.is_lent, two._moves.is_lent) == (True, False)
    context = ReqContext("stores")
    for number, key in enumerate(keys):
        context.set_offload_key_position(key, 16 * (number + 1))
    assert looked_up(one, keys, "r1") == [LookupResult.MISS] * 16

    one.submit_store(TransferJob(1, keys, np.arange(16), False, context))
    assert one.has_pending_work()
    done = finished(one)
    assert (done.job_id, done.success, done.transfer_bytes) == (1, True, 16 * BLOCK)
    assert not one.has_pending_work()
    assert looked_up(two, keys, "r2") == [LookupResult.HIT] * 16
    assert looked_up(other, keys, "r3") == [LookupResult.MISS] * 16, "another model's blocks are not these"

    absent = make_offload_key(b"z" * 32, 0)
    two.submit_load(TransferJob(7, [*keys, absent], np.arange(17)[::-1], True, context))
    two.drain_jobs()
    done = finished(two)
    assert (done.success, list(done.successful_keys)) == (False, keys)
    assert (second[1:17][::-1] == first[:16]).all()
    assert looked_up(two, [keys[0], absent], "r4") == [LookupResult.HIT, LookupResult.MISS]

    one.submit_load(TransferJob(9, [*keys, absent], np.arange(17)[::-1] + 15, True, context))
    done = finished(one)
    assert (done.success, list(done.successful_keys)) == (False, keys)
    assert (first[16:32][::-1] == first[:16]).all(), "the engine wrote them to the region"

    for made in (one, two):
        made.submit_store(TransferJob(8, keys, np.arange(16), False, context))
        assert finished(made).success, "a prompt that both computed is stored once"
    for made in (one, two):
        another_length_is_a_miss_and_is_replaced(made, keys[0])
    with TemporaryDirectory() as folder:
        other_weights_have_other_blocks(Path(folder))
    for made in (one, two, other):
        made.shutdown()
    region.cleanup()
    sys.stdout.write(f"{one.space_name}\n")


if __name__ == "__main__":
    main()

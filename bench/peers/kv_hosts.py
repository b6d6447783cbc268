"""Clients of the key-value scenarios that find blocks by keys: our spaces, and tiers as vLLM and LMCache drive them.

vLLM's tiers and LMCache's connectors are made and driven by those libraries' own interfaces, ours like theirs: a job is
submitted, and this thread waits for its end as the host's tests do (`drain_jobs`; the event descriptor).  They run in
the Python of `.venv-plugins`, which `make plugins` installs.

What each side promises: ours checks each block where it arrives (CRC32C), and a block is durable when its put has
ended.  vLLM's `fs` writes with O_DIRECT where it can, LMCache's `fs_native` to the page cache; neither syncs or checks.
"""

from __future__ import annotations

import importlib
import os
import select
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

from bench.peers.kv_clients import KvClient, LakeClient, Spec
from lakefs.content.verify import Check
from lakefs.get.pools import Pool
from lakefs.ids import data_chunk_id
from lakefs.put.shared_memory import SharedMemory

KEY_BYTES: Final = 32
SPACE: Final = "bench"
PAGE: Final = 4096


def key_of(key: int) -> bytes:
    """Return the key of a block: distinct from its first byte on, as hashes are."""
    return key.to_bytes(KEY_BYTES, "little")


# --- our spaces ------------------------------------------------------------------------------------------


class LakeKeyed(LakeClient):
    """Our blocking client by keys, with CRC32C: `space.load` into lent memory, `space.put_many` from its slots."""

    check = Check.CRC32C

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self._space = self.lake.space(f"{SPACE}-{os.getpid()}")

    def make_pool(self, size_bytes: int) -> memoryview:
        """Return memory that is lent both ways."""
        self._pool = Pool(size_bytes=size_bytes)
        self._memory = SharedMemory(self._pool.size_bytes, descriptor=self._pool.descriptor)
        return self._pool.buffer

    def get(self, keys: Sequence[int], first: int) -> None:
        """Load into the slots."""
        offsets = [(first + index) * self.block_bytes for index in range(len(keys))]
        lengths = self._space.load(list(map(key_of, keys)), self._pool, offsets, [self.block_bytes] * len(keys))
        _all_there(lengths, self.block_bytes)

    def put(self, keys: Sequence[int], first: int) -> None:
        """Store the slots; durable on return."""
        size = self.block_bytes
        slots = [self._memory.slot((first + index) * size, size) for index in range(len(keys))]
        if self._space.put_many(list(map(key_of, keys)), slots).failures:
            raise RuntimeError("a block was not stored")

    def drop(self, keys: Sequence[int]) -> None:
        """Remove the values, and let gc free the space."""
        self._space.remove(list(map(key_of, keys)))
        self.lake.gc()


class LakeKeyedInto(LakeKeyed):
    """The same, reading by `get_many_into`."""

    def get(self, keys: Sequence[int], first: int) -> None:
        """Read into the slots."""
        slots = [self.slot(first + index) for index in range(len(keys))]
        _all_there(self._space.get_many_into(list(map(key_of, keys)), slots), self.block_bytes)


class LakeLoadedById(LakeKeyed):
    """The same values by the ids of their chunks: `lake.load_many`."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self._ids: dict[int, bytes] = {}

    def get(self, keys: Sequence[int], first: int) -> None:
        """Load into the slots."""
        offsets = [(first + index) * self.block_bytes for index in range(len(keys))]
        _all_there(self.lake.load_many([self._ids[key] for key in keys], self._pool, offsets), self.block_bytes)

    def put(self, keys: Sequence[int], first: int) -> None:
        """Store by key, and note the ids."""
        super().put(keys, first)
        self._ids |= {key: bytes(data_chunk_id(self.slot(first + index))) for index, key in enumerate(keys)}


def _all_there(lengths: Sequence[int], size: int) -> None:
    if any(length != size for length in lengths):
        raise RuntimeError(f"{sum(length != size for length in lengths)} of {len(lengths)} blocks are missing")


# --- tiers of vLLM ---------------------------------------------------------------------------------------


class VllmTier(KvClient):
    """A secondary tier, made by vLLM's factory, over vLLM's own shared region.

    Its model is named `package`, for engines that share one; else it has one of its own.
    """

    @abstractmethod
    def tier(self, spec: Spec) -> dict[str, Any]:
        """Return the entry of `secondary_tiers`."""

    def __init__(self, spec: Spec) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        super().__init__(spec)
        base: Any = importlib.import_module("vllm.v1.kv_offload.base")
        tiering: Any = importlib.import_module("vllm.v1.kv_offload.tiering.base")
        factory: Any = importlib.import_module("vllm.v1.kv_offload.tiering.factory")
        self._job, self._key = tiering.TransferJob, base.make_offload_key
        self._context = base.ReqContext("bench")
        self._number = 0
        rows = self.pool.cast("B", (spec.slots, spec.block_bytes))
        self._tier = factory.SecondaryTierFactory.create_secondary_tier(self.tier(spec), rows, self._spec_of(spec))

    def make_pool(self, size_bytes: int) -> memoryview:
        """Return vLLM's region."""
        if self.block_bytes % PAGE:
            raise RuntimeError("vLLM's rows are whole pages")
        module: Any = importlib.import_module("vllm.v1.kv_offload.cpu.shared_offload_region")
        count = size_bytes // self.block_bytes
        self._region = module.SharedOffloadRegion(
            f"lake-bench-{os.getpid()}", count, None, self.block_bytes, self.block_bytes
        )
        memory: memoryview = memoryview(self._region.base_tensor.numpy()).cast("B")
        return memory

    def _spec_of(self, spec: Spec) -> Any:
        config: Any = importlib.import_module("vllm.v1.kv_offload.config")
        made = config.OffloadingConfig(
            groups=(config.OffloadingGroupConfig(16, ("l0", "l1"), 0),),
            worker_kv_bytes_per_block=spec.block_bytes,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="bench",
            model=config.OffloadingModelConfig(spec.package or f"bench/{os.getpid()}", "bfloat16"),
            cache=config.OffloadingCacheConfig(16, 1),
            parallel=config.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
        return SimpleNamespace(config=made, blocks_per_chunk=1, kv_events_config=None, _scheduler_mmap=self._region)

    def get(self, keys: Sequence[int], first: int) -> None:
        """Submit a load and wait for it."""
        self._tier.submit_load(self._transfer(keys, first, is_load=True))
        self._ended()

    def put(self, keys: Sequence[int], first: int) -> None:
        """Submit a store and wait for it."""
        self._tier.submit_store(self._transfer(keys, first, is_load=False))
        self._ended()

    def _transfer(self, keys: Sequence[int], first: int, *, is_load: bool) -> Any:
        self._number += 1
        numpy: Any = importlib.import_module("numpy")
        names = [self._key(key_of(key), 0) for key in keys]
        return self._job(self._number, names, numpy.arange(first, first + len(keys)), is_load, self._context)

    def _ended(self) -> None:
        self._tier.drain_jobs()
        [result] = self._tier.get_finished_jobs()
        if not result.success:
            raise RuntimeError("a job of the tier failed")

    def close(self) -> None:
        """Shut the tier down, and remove vLLM's region."""
        self._tier.shutdown()
        self._region.cleanup()


class VllmLake(VllmTier):
    """Our tier."""

    def tier(self, spec: Spec) -> dict[str, Any]:
        """Return the entry that docs/kv-cache.md has."""
        return {"type": "LakeTier", "module_path": "lakefs.plugins.kv.vllm_tier", "server": spec.address}


class VllmFiles(VllmTier):
    """vLLM's `fs` tier below the folder `address`, with its default threads."""

    def tier(self, spec: Spec) -> dict[str, Any]:
        """Return its entry."""
        return {"type": "fs", "root_dir": tempfile.mkdtemp(dir=spec.address)}


# --- connectors of LMCache -------------------------------------------------------------------------------


class LmcacheConnector(KvClient):
    """A native connector of LMCache, as its adapter drives it."""

    @abstractmethod
    def connector(self, spec: Spec) -> Any:
        """Return the connector."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self._connector = self.connector(spec)
        self._event = self._connector.event_fd()

    def get(self, keys: Sequence[int], first: int) -> None:
        """Submit a batch of reads and wait for it."""
        self._ended(self._connector.submit_batch_get(self._names(keys), self._slots(keys, first)), len(keys))

    def put(self, keys: Sequence[int], first: int) -> None:
        """Submit a batch of writes and wait for it."""
        self._ended(self._connector.submit_batch_set(self._names(keys), self._slots(keys, first)), 0)

    def _names(self, keys: Sequence[int]) -> list[str]:
        return [f"bench@0@0@{key_of(key).hex()}" for key in keys]

    def _slots(self, keys: Sequence[int], first: int) -> list[memoryview]:
        return [self.slot(first + index) for index in range(len(keys))]

    def _ended(self, number: int, count: int) -> None:
        select.select([self._event], [], [])
        [(ended, is_good, reason, each)] = self._connector.drain_completions()
        if ended != number or not is_good or (count and each and not all(each)):
            raise RuntimeError(f"an operation of the connector failed: {reason}")

    def close(self) -> None:
        """Close it."""
        self._connector.close()


class LmcacheLake(LmcacheConnector):
    """Our connector."""

    def connector(self, spec: Spec) -> Any:
        """Return it, with its default settings."""
        module: Any = importlib.import_module("lakefs.plugins.kv.lmcache_connector")
        return module.LakeConnector(spec.address, f"lmcache-{os.getpid()}")


class LmcacheFiles(LmcacheConnector):
    """LMCache's `fs_native` below the folder `address`, with its default of four threads."""

    def connector(self, spec: Spec) -> Any:
        """Return it."""
        module: Any = importlib.import_module("lmcache.lmcache_fs")
        return module.LMCacheFSClient(tempfile.mkdtemp(dir=spec.address), 4)


HOSTS: Final[dict[str, Callable[[Spec], KvClient]]] = {
    "lake-keyed": LakeKeyed,
    "lake-keyed-into": LakeKeyedInto,
    "lake-by-id": LakeLoadedById,
    "vllm-lake": VllmLake,
    "vllm-fs": VllmFiles,
    "lmcache-lake": LmcacheLake,
    "lmcache-fs": LmcacheFiles,
}

"""The parts of vLLM that its tier uses.

`LakeTier` has every method listed here as called by vLLM, with these parameters, and uses nothing that is not listed.
"""

from __future__ import annotations

from typing import Final

from lakefs.plugins.kv.offers import calls, has, takes, wants

PACKAGE: Final = "vllm"
_BASE: Final = "vllm.v1.kv_offload.base"
_CONFIG: Final = "vllm.v1.kv_offload.config"
_TIER: Final = "vllm.v1.kv_offload.tiering.base"
_LOOKUP: Final = "vllm.v1.kv_offload.tiering.async_lookup"
_ARGUMENTS: Final = ("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector")
OFFERS: Final = (
    wants(
        _TIER,
        "SecondaryTierManager",
        "lookup",
        "submit_store",
        "submit_load",
        "get_finished_jobs",
        "on_new_request",
        "drain_jobs",
    ),
    calls(_TIER, "SecondaryTierManager.__init__", *_ARGUMENTS),
    calls(_TIER, "SecondaryTierManager.lookup", "key", "req_context"),
    calls(_TIER, "SecondaryTierManager.submit_store", "job_metadata"),
    calls(_TIER, "SecondaryTierManager.submit_load", "job_metadata"),
    calls(_TIER, "SecondaryTierManager.get_finished_jobs"),
    calls(_TIER, "SecondaryTierManager.has_pending_work"),
    calls(_TIER, "SecondaryTierManager.on_new_request", "req_context"),
    calls(_TIER, "SecondaryTierManager.on_request_finished", "req_context"),
    calls(_TIER, "SecondaryTierManager.on_schedule_end", "context"),
    calls(_TIER, "SecondaryTierManager.drain_jobs"),
    calls(_TIER, "SecondaryTierManager.shutdown"),
    has(_TIER, "TransferJob", "job_id", "keys", "chunk_ids", "req_context"),
    has(_TIER, "JobResult", "job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"),
    takes(_TIER, "JobResult", "job_id", "success"),
    has(_BASE, "ReqContext", "req_id"),
    takes(_BASE, "ReqContext.get_offload_key_position", "key"),
    has(_BASE, "LookupResult", "RETRY", "HIT", "MISS"),
    has(_BASE, "Medium", "STORAGE"),
    takes(_BASE, "RequestOffloadingContext"),
    calls(_BASE, "OffloadingSpec.__init__", "config"),
    has(_CONFIG, "OffloadingConfig", "groups", "model", "cache", "parallel", "extra_config"),
    has(_CONFIG, "OffloadingModelConfig", "name", "dtype"),
    has(_CONFIG, "OffloadingCacheConfig", "tokens_per_hash", "blocks_per_chunk"),
    has(_CONFIG, "OffloadingParallelConfig", "rank", "world_size", "is_parallelism_agnostic"),
    wants(_LOOKUP, "AsyncLookupManager", "batch_lookup"),
    takes(_LOOKUP, "AsyncLookupManager.__init__", "tier_type"),
    calls(_LOOKUP, "AsyncLookupManager.batch_lookup", "keys", "req_context"),
    takes(_LOOKUP, "AsyncLookupManager.lookup", "key", "req_context"),
    takes(_LOOKUP, "AsyncLookupManager.mark_miss", "keys"),
    takes(_LOOKUP, "AsyncLookupManager.cleanup", "req_id"),
    takes(_LOOKUP, "AsyncLookupManager.flush"),
    takes(_LOOKUP, "AsyncLookupManager.shutdown"),
    has("vllm.platforms", "current_platform", "device_name"),
)

"""The name of vLLM's space: it stands for all that a block's bytes depend on, beside the block's key.

It is made of the model's content (`lakefs.plugins.kv.model_files`), vLLM's minor release and platform, the length of a
block, a salt, and every field of vLLM's offloading configuration but those of NOT_IN_NAME.  A field that is not known
here counts: a later vLLM that has one more makes other spaces, never the same space for other bytes.

Nothing of vLLM is imported here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

from lakefs.plugins.kv.model_files import Model

_REPLICA: Final = "replicas compute the same blocks"
_ONE_LAYOUT: Final = "vLLM says that the blocks have the same bytes in every layout of workers"
NOT_IN_NAME: Final[Mapping[str, str]] = {
    "model.name": "the model's content is in the name, or its name if that cannot be seen",
    "engine_id": "it names an engine, not what that computes",
    "enable_kv_cache_events": "events tell of blocks and change none",
    "groups.sliding_window_size_in_chunks": "how many blocks of a request are kept, not what is in them",
    "parallel.data_parallel_index": _REPLICA,
    "parallel.data_parallel_size": _REPLICA,
    "parallel.data_parallel_rank_local": _REPLICA,
    "parallel.rank": "it has a place of its own in the name",
    "extra_config.spec_name": "the same rows, whoever keeps them in memory",
    "extra_config.spec_module_path": "as spec_name",
    "extra_config.cpu_bytes_to_use": "how many rows there are",
    "extra_config.secondary_tiers": "where blocks are stored; this plug-in's salt is in the name",
    "extra_config.block_size": "the number of blocks in a chunk is in the name",
    "extra_config.blocks_per_chunk": "the number of blocks in a chunk is in the name",
    "extra_config.canonical_layout": "there is a field of that name",
    "extra_config.eviction_policy": "which blocks are kept",
    "extra_config.cache_policy_module_path": "which blocks are kept",
    "extra_config.store_threshold": "which blocks are stored",
    "extra_config.max_tracker_size": "which blocks are stored",
    "extra_config.offload_prompt_only": "which blocks are stored",
    "extra_config.self_describing_kv_events": "events tell of blocks and change none",
    "extra_config.backpressure": "when blocks are stored",
    "extra_config.tier_poll_interval_s": "when tiers are asked",
    "extra_config.sync_load_budget_bytes": "when blocks are loaded",
}
"""Fields that do not count, each with the reason."""
NOT_IN_ONE_LAYOUT: Final[Mapping[str, str]] = {
    "worker_kv_bytes_per_block": f"{_ONE_LAYOUT}; the length of a whole block is in the name",
    "parallel.world_size": _ONE_LAYOUT,
    "parallel.tp_size": _ONE_LAYOUT,
    "parallel.pp_size": _ONE_LAYOUT,
    "parallel.pcp_size": _ONE_LAYOUT,
    "parallel.dcp_size": _ONE_LAYOUT,
}
"""Fields that do not count where blocks are the same under every layout of workers."""
UNSEEN: Final = (
    "overrides of the model's configuration (--hf-overrides, --dtype, --quantization, --load-format, attention "
    "backends), a draft model, other weights of a LoRA adapter under its path, and weights that are changed in a "
    "running engine"
)
"""Text for people: on what bytes depend that vLLM does not tell a tier; docs/kv-cache.md has all of it."""


def space_of(config: Any, model: Model, row_bytes: int, release: str, platform: str, salt: str) -> str:
    """Return the part of a space's name that stands for what `row_bytes` bytes of a block depend on.

    `config`: vLLM's OffloadingConfig.  `release`: vLLM's version.
    """
    is_one_layout = bool(config.parallel.is_parallelism_agnostic or getattr(config, "replicated_layout", False))
    left_out = {**NOT_IN_NAME, **NOT_IN_ONE_LAYOUT} if is_one_layout else NOT_IN_NAME
    counted = {
        "host": f"vllm {'.'.join(release.split('.')[:2])} {platform}",
        "model": model.identity,
        "salt": salt,
        "row_bytes": row_bytes,
        "config": _plain(config, "", left_out),
    }
    digest = hashlib.sha256(json.dumps(counted, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]
    label = model.label.replace("/", "_")
    readable = "".join(letter if letter.isascii() and letter.isprintable() else "_" for letter in label)[:80]
    return f"{readable}-{digest}-r{0 if is_one_layout else config.parallel.rank}"


def unseen_by(model: Model, name: str) -> str:
    """Return a sentence for the log: what may change without another name of the space, unless there is a salt."""
    text = f"The space's name does not stand for {UNSEEN}"
    if model.unseen:
        text += f"; nor for the content and the revision of {name}, because {model.unseen}"
    return f"{text}. Engines that differ in one of those need an option `salt` each, or have each other's blocks"


def _plain(value: Any, path: str, left_out: Mapping[str, str]) -> Any:
    """Return a configuration as JSON has it, without the fields that are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        named = {str(name): (f"{path}.{name}" if path else str(name), item) for name, item in value.items()}
        return {name: _plain(item, at, left_out) for name, (at, item) in named.items() if at not in left_out}
    if isinstance(value, list | tuple):
        return [_plain(item, path, left_out) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return f"{type(value).__name__} {value}"

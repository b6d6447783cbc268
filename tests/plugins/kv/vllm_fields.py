"""Every field of vLLM's configuration: it is in a space's name, or listed here with the reason why not.

Run with the Python of `.venv-plugins`.  Prints a line for each field that is neither, and for each that is listed and
does not exist; a later vLLM that has one more field needs a decision, which goes here.

A tier gets an OffloadingConfig, made from VllmConfig; so both are walked.  A `*` stands for all fields of a part about
which the reason holds whatever they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

from vllm.config import VllmConfig
from vllm.v1.kv_offload.config import OffloadingConfig

from lakefs.plugins.kv.model_files import Model
from lakefs.plugins.kv.vllm_space import NOT_IN_NAME, NOT_IN_ONE_LAYOUT, space_of
from tests.plugins.kv.vllm_host import BLOCK, offloading_config

Parts = dict[str, str]
"""Names of fields, by the path of their part of the configuration."""

IN_NAME: Final[dict[str, Parts]] = {
    "the model's content, or its name": {"model_config": "model hf_config hf_text_config is_submodel_config"},
    "model.max_model_len": {"model_config": "max_model_len"},
    "model.dtype": {"cache_config": "cache_dtype"},
    "groups": {"cache_config": "block_size user_specified_block_size effective_attention_block_size"},
    "cache.tokens_per_hash": {"cache_config": "hash_block_size prefix_match_unit"},
    "kv_cache_layout": {"cache_config": "kv_cache_layout"},
    "parallel": {
        "parallel_config": "tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size rank world_size "
        "decode_context_parallel_size"
    },
    "extra_config": {"kv_transfer_config": "kv_connector_extra_config"},
    "vLLM's platform": {"device_config": "device device_type"},
}
"""Parts of the name, and the fields that each stands for."""

SALT: Final[dict[str, Parts]] = {
    "overrides of the model's configuration": {
        "model_config": "hf_overrides hf_config_path config_format model_class_overrides model_impl runner convert "
        "disable_sliding_window spec_target_max_model_len trust_remote_code model_weights seed "
        "word_embeddings_untied_by_checkpoint",
        "diffusion_config": "*",
        "": "additional_config",
    },
    "`dtype`, quantization": {
        "model_config": "dtype quantization allow_deprecated_quantization",
        "model_config.quantization_config": "*",
        "cache_config": "kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype",
        "": "quant_config",
    },
    "how weights are loaded": {"load_config": "load_format model_loader_extra_config ignore_patterns"},
    "the revision of a model that is no local path": {"model_config": "revision code_revision"},
    "attention backends": {
        "attention_config": "backend backend_per_kind mla_prefill_backend indexer_kv_dtype use_non_causal "
        "minimax_m3_msa_decode_backend minimax_m3_indexer_cp",
        "attention_config.hisparse_config": "*",
    },
    "how workers share a block": {
        "parallel_config": "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size "
        "_allow_auto_resolve_cp_interleave_size worker_cls worker_extension_cls",
        "cache_config": "mamba_block_size mamba_page_size_padded skip_page_size_padded mamba_cache_mode use_replayssm "
        "replayssm_buffer_len use_kda_recoverssm enable_mamba_shared_prefix_checkpoint kv_sharing_fast_prefill "
        "swa_bounded_replay sliding_window is_attention_free",
        "kv_transfer_config": "enable_permute_local_kv",
    },
    "a draft model": {"speculative_config": "*"},
    "LoRA adapter": {"lora_config": "lora_dtype target_modules default_mm_loras enable_tower_connector_lora"},
    "images, sound and video": {
        "model_config.multimodal_config": "mm_processor_kwargs media_io_kwargs mm_device_do_normalize "
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path video_pruning_rate "
        "video_pruning_method interleave_mm_strings language_model_only enable_mm_embeds allow_missing_mm_embeddings "
        "mm_hasher_algorithm"
    },
    "weights that are changed in a running engine": {
        "weight_transfer_config": "*",
        "model_config": "enable_sleep_mode sleep_preserve_parameter_names",
    },
}
"""Fields that change blocks and that no tier gets to know, by the words of docs/kv-cache.md: `salt` is for these."""

CHANGES_NOTHING: Final[dict[str, Parts]] = {
    "keys are made of tokens: text is something else": {
        "model_config": "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init renderer_num_workers "
        "io_processor_plugin served_model_name enable_prompt_embeds",
        "structured_outputs_config": "*",
        "reasoning_config": "*",
    },
    "what is computed from blocks, not what is in them": {
        "model_config": "max_logprobs logprobs_mode return_sampling_mask use_fp64_gumbel generation_config "
        "override_generation_config logits_processors",
        "model_config.pooler_config": "*",
        "watermark_config": "*",
        "aux_output_config": "*",
    },
    "which kernels compute, within their rounding": {
        "model_config": "enforce_eager disable_cascade_attn",
        "attention_config": "flash_attn_version flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv "
        "tq_max_kv_splits_for_cuda_graph use_trtllm_attention disable_flashinfer_q_quantization "
        "use_prefill_query_quantization trtllm_ragged_backend indexer_sparse_logits indexer_tp_shard_min_rows "
        "sparse_mla_force_mqa sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n "
        "flex_attn_q_block_size flex_attn_kv_block_size",
        "mamba_config": "*",
        "kernel_config": "*",
        "kernel_config.ir_op_priority": "*",
        "compilation_config": "*",
        "compilation_config.pass_config": "*",
        "compilation_config.dynamic_shapes_config": "*",
        "": "optimization_level performance_mode",
    },
    "where weights and caches lie, and how large they are": {
        "model_config": "sleep_mode_backend sleep_mode_offload_cudagraph enable_cumem_allocator "
        "enable_nccl_comm_suspend",
        "load_config": "download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
        "safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location",
        "offload_config": "*",
        "offload_config.uva": "*",
        "offload_config.prefetch": "*",
        "engram_config": "*",
        "cache_config": "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks "
        "simple_cpu_offload_num_blocks kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes "
        "kv_offloading_size kv_offloading_backend _block_size_resolved",
        "lora_config": "max_lora_rank max_loras fully_sharded_loras max_cpu_loras specialize_active_lora "
        "enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels",
    },
    "it makes keys, or says which are kept": {
        "cache_config": "enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval "
        "cache_hit_alignment_tokens"
    },
    "when and where work is done": {
        "scheduler_config": "*",
        "parallel_config": "data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local "
        "data_parallel_master_ip data_parallel_rpc_port dp_sync_interval data_parallel_master_port "
        "data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb is_moe_model enable_hc_sp "
        "enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter enable_eplb "
        "expert_placement_strategy all2all_backend max_parallel_loading_workers disable_custom_all_reduce "
        "enable_shm_tensor_arena enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size "
        "dbo_decode_token_threshold dbo_prefill_token_threshold disable_nccl_for_dp_synchronization "
        "ray_workers_use_nsight ray_runtime_env placement_group distributed_executor_backend master_addr master_port "
        "node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids "
        "distributed_timeout_seconds cpu_distributed_timeout_seconds _data_parallel_master_port_list _coord_store_port "
        "dcp_comm_backend dcp_q_replicate data_parallel_index _api_process_count _api_process_rank "
        "enable_fault_tolerance",
        "parallel_config.eplb_config": "*",
        "parallel_config.fault_tolerance_config": "*",
        "kv_transfer_config": "kv_connector engine_id kv_buffer_device kv_role kv_port kv_connector_module_path "
        "kv_load_failure_policy",
        "ec_transfer_config": "*",
        "ec_manager_config": "*",
        "model_config.multimodal_config": "limit_per_prompt mm_processor_cache_gb mm_processor_cache_type "
        "mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb",
        "": "shutdown_timeout instance_id",
    },
    "who may ask, and who watches": {
        "model_config": "allowed_local_media_path allowed_media_domains hf_token enable_trace_replay",
        "kv_events_config": "*",
        "observability_config": "*",
        "logging_config": "*",
        "profiler_config": "*",
        "watchdog_config": "*",
    },
}
"""Reasons, and the fields of which each holds."""


def walked(config: type, path: str, seen: set[type]) -> Iterator[tuple[str, str]]:
    """Iterate over the path of each part of a configuration, and the names of its fields that are no parts."""
    hints = get_type_hints(config)
    for field in fields(config):
        parts = [each for each in types_of(hints[field.name]) if isinstance(each, type) and is_dataclass(each)]
        if not parts:
            yield path, field.name
        for part in parts:
            if part not in seen:
                seen.add(part)
                yield from walked(part, f"{path}.{field.name}" if path else field.name, seen)


def types_of(hint: Any) -> Iterator[Any]:
    inner = get_args(hint)
    yield from (each for one in inner for each in types_of(one)) if inner else (hint,)


def problems_of_listing() -> Iterator[str]:
    """Compare VllmConfig with what is listed."""
    listed: dict[tuple[str, str], int] = {}
    for group in (IN_NAME, SALT, CHANGES_NOTHING):
        for parts in group.values():
            for path, names in parts.items():
                for name in names.split():
                    listed[path, name] = listed.get((path, name), 0) + 1
    yield from (f"{path}.{name} is listed {count} times" for (path, name), count in listed.items() if count > 1)
    used = set()
    for path, name in walked(VllmConfig, "", {VllmConfig}):
        above = [".".join(path.split(".")[:depth]) for depth in range(len(path.split(".")), 0, -1)]
        found = [each for each in ((path, name), *((one, "*") for one in above)) if each in listed]
        if found:
            used.add(found[0])
        else:
            yield f"{path}.{name} is new: does a block depend on it?"
    yield from (f"{path}.{name} is listed and does not exist" for path, name in listed if (path, name) not in used)
    page = " ".join((Path(__file__).parents[3] / "docs/kv-cache.md").read_text().split())
    yield from (f"docs/kv-cache.md does not say that salt stands for: {what}" for what in SALT if what not in page)


def problems_of_names() -> Iterator[str]:
    """Change each field of an OffloadingConfig: the name changes, unless the field is listed as not in it."""
    config = offloading_config("llama/8b", {})
    config = replace(config, parallel=replace(config.parallel, is_parallelism_agnostic=False))
    known = set()
    for path, other in changed(config, ""):
        known.add(path)
        if (name_of(other) == name_of(config)) != (path in NOT_IN_NAME and path != "parallel.rank"):
            yield f"{path}: its place in the name is not what NOT_IN_NAME says"
    for path in (*NOT_IN_NAME, *NOT_IN_ONE_LAYOUT):
        if path not in known and not path.startswith("extra_config."):
            yield f"{path} does not exist in OffloadingConfig"


def name_of(config: OffloadingConfig) -> str:
    return space_of(config, Model("content 0", "m"), BLOCK, "0.33.0", "cuda", "")


def changed(config: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Iterate over a configuration with another value in one of its fields, and the field's path."""
    for field in fields(config):
        at, value = f"{path}.{field.name}" if path else field.name, getattr(config, field.name)
        if is_dataclass(value):
            others = changed(value, at)
        elif field.name == "groups":
            others = ((name, (group,)) for name, group in changed(value[0], at))
        else:
            others = iter([(at, not value if isinstance(value, bool) else (value, "another"))])
        for name, other in others:
            yield name, replace(config, **{field.name: other})


def main() -> None:
    problems = [*problems_of_listing(), *problems_of_names()]
    sys.stdout.write("".join(f"{problem}\n" for problem in problems))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()

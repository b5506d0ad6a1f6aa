"""What every server uses of SGLang 0.5.17 outside of a forward pass: plug-in, arguments, scheduler and radix tree."""

from __future__ import annotations

from sglang_mla_ext.adapter.compat.table import attributes, function, methods

_SCHEDULER = "managers.scheduler.Scheduler"
_ARGS = "server_args.ServerArgs"
_WEIGHTS = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_TREE = "mem_cache.radix_cache"

PLUGIN = (
    *function("plugins.hook_registry.HookRegistry.register", "target hook hook_type", "hooks"),
    *attributes("plugins.hook_registry.HookRegistry", "_patched", "which hooks are in place"),
    *attributes("plugins.hook_registry.HookType", "BEFORE AFTER AROUND", "hooks"),
    *function("layers.attention.attention_registry.register_attention_backend", "name", "the backend's factory"),
    *function("distributed.parallel_state.get_tp_group", "", "whether all ranks have the same options"),
    *attributes("distributed.parallel_state.GroupCoordinator", "cpu_group world_size", "the same"),
)
ARGUMENTS = (
    *function(f"{_ARGS}.add_cli_args", "parser", "our flags"),
    *function(f"{_ARGS}.from_cli_args", "args", "our flags"),
    *function(f"{_ARGS}.__post_init__", "self", "page size; unsupported features"),
    *methods(_ARGS, "get_attention_backends", "is the backend asked for"),
    *methods(_ARGS, "use_mla_backend get_model_config", "unsupported models"),
    *attributes(_ARGS, "device page_size kv_cache_dtype disable_prefill_cuda_graph", "defaults"),
    *attributes(
        _ARGS,
        """
        attn_cp_size dcp_size disable_cuda_graph_padding disable_radix_cache disaggregation_mode dllm_algorithm dp_size
        dtype enable_deterministic_inference enable_dp_attention enable_flexkv enable_hierarchical_cache enable_lmcache
        enable_lora enable_memory_saver enable_mixed_chunk enable_page_major_kv_layout enable_pdmux
        enable_streaming_session enable_two_batch_overlap enable_unified_memory moe_a2a_backend pp_size
        radix_cache_backend
        rl_on_policy_target speculative_algorithm tp_size
        """,
        "which features are asked for, and which of them are unsupported",
    ),
    *attributes(_ARGS, "cuda_graph_config", "no graphs in prefill beside an FP8 cache"),
    *attributes(_ARGS, "mem_fraction_static", "whether the memory for expanded prefixes can be there"),
    *attributes(_ARGS, "disable_chunked_prefix_cache", "whether prefill makes keys and values of cached prompts"),
    *attributes("environ.Envs", "SGLANG_MAX_KV_CHUNK_CAPACITY", "of how many tokens at a time"),
    *attributes(
        "model_executor.cuda_graph_config.CudaGraphConfig", "prefill decode", "the same; whether steps are mixed"
    ),
    *attributes("model_executor.cuda_graph_config.PhaseConfig", "backend", "the same"),
    *attributes("environ", "envs", "unsupported features"),
    *attributes(
        "environ.Envs",
        "SGLANG_ENABLE_UNIFIED_RADIX_TREE SGLANG_EXPERIMENTAL_CPP_RADIX_TREE",
        "unsupported features",
    ),
    *function("server_args.add_attention_backend_choices", "choices", "the backend's name"),
    *function("server_args.add_chunked_prefix_cache_attention_backend", "backend_name", "prefill over a prefix"),
    *function("configs.model_config.is_deepseek_dsa", "config", "sparse attention is unsupported"),
    *function("configs.hybrid_arch.mambaish_config", "model_config", "linear attention is unsupported"),
    *attributes(
        "configs.model_config.ModelConfig",
        "context_len hf_config hidden_size kv_lora_rank qk_rope_head_dim",
        "the model's dimensions",
    ),
)
SCHEDULING = (
    *function(f"{_SCHEDULER}.__init__", "self server_args", "the radix tree"),
    *attributes(_SCHEDULER, "tree_cache running_batch metrics_collector", "the radix tree; who runs; metrics"),
    *methods(_SCHEDULER, "is_fully_idle", "when expansions may be dropped"),
    *methods(_SCHEDULER, "flush_cache on_idle", "dropping expansions"),
    *function(f"{_WEIGHTS}._observe_weight_load", "self source", "dropping expansions"),
    *attributes("observability.metrics_collector.SchedulerMetricsCollector", "labels", "metrics"),
    *attributes("managers.schedule_batch.ScheduleBatch", "reqs", "the requests of a step"),
    *attributes("managers.schedule_batch.Req", "rid last_node", "a request's path in the radix tree"),
    *attributes("managers.schedule_batch.Req", "req_pool_idx", "slots of a request"),
    *attributes("managers.schedule_batch.Req", "input_embeds positional_embed_overrides", "prompts not told by tokens"),
    *methods("managers.schedule_batch.Req", "finished", "who runs"),
    *function("managers.utils.validate_input_length", "req max_req_input_len allow_auto_truncate", "empty prompts"),
    *attributes("managers.schedule_batch.Req", "origin_input_ids", "the same"),
)
TREE = (
    *attributes(f"{_TREE}.RadixCache", "disable", "is there a radix tree"),
    *attributes(f"{_TREE}.RadixCache", "root_node page_size", "whether a node is still in the tree"),
    *attributes(f"{_TREE}.TreeNode", "parent key value lock_ref id", "paths, slots, and who holds them"),
    *attributes(f"{_TREE}.TreeNode", "children host_value", "whether a node is still in the tree"),
    *function(f"{_TREE}.RadixKey.child_key", "self page_size", "what a node is called by its parent"),
    *function(
        f"{_TREE}.RadixCache._split_node",
        "self key child split_len",
        "a split leaves the old node object its end, which expansions are known by, and gives both nodes its locks",
    ),
    *function(
        f"{_TREE}.RadixCache.inc_lock_ref",
        "self node",
        "locks a node and all above it: from a node that one request holds down, nobody else does",
    ),
    *function(f"{_TREE}.RadixCache.dec_lock_ref", "self node", "unlocks a node and all above it"),
    *function(f"{_TREE}.RadixCache._delete_leaf", "self node", "an evicted node's parent forgets it"),
)

USED_AT_START = (*PLUGIN, *ARGUMENTS, *SCHEDULING, *TREE)

"""What this package uses of SGLang, by release; checked by contract.py, which says how.

Two directions: what our code uses of SGLang's (`Use`, here and in uses_in_a_pass.py), and what SGLang reads of an
attention backend (`Read`, in reads.py). Imports nothing of SGLang.
"""

from __future__ import annotations

from sglang_mla_ext.adapter.compat.reads import READ_OF_BACKEND
from sglang_mla_ext.adapter.compat.sglang_0_5_17.uses_in_a_pass import IN_A_PASS
from sglang_mla_ext.adapter.compat.use import Release, Use, attributes, function, methods

_SCHEDULER = "managers.scheduler.Scheduler"
_KV_MANAGER = "disaggregation.common.conn.CommonKVManager"
_ARGS = "server_args.ServerArgs"
_WEIGHTS = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

_PLUGIN = (
    *function("plugins.hook_registry.HookRegistry.register", "target hook hook_type", "hooks"),
    *attributes("plugins.hook_registry.HookRegistry", "_patched", "which hooks are in place"),
    *attributes("plugins.hook_registry.HookType", "BEFORE AFTER AROUND", "hooks"),
    *function("layers.attention.attention_registry.register_attention_backend", "name", "the backend's factory"),
    *function("utils.common.support_triton", "backend", "torch code beside our backend on a CPU"),
    *function("runtime_context.get_stream", "name", "LongCat-Flash on a CPU"),
    Use(
        "sglang.kernels.ops.moe.ep_moe_kernels.zero_experts_compute_triton",
        "function",
        "the same",
        ("expert_indices", "expert_scales", "num_experts", "zero_expert_type", "hidden_states"),
    ),
    *function("mem_cache.pool_host.base.HostKVCache.__init__", "self", "a host cache on a CPU"),
    *attributes("mem_cache.pool_host.mla", "ALLOC_MEMORY_FUNCS", "the same"),
    *function(
        "model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch",
        "self model_runner",
        "DP attention on a CPU",
    ),
    *function("disaggregation.nixl.conn.NixlKVManager.__init__", "self", "NIXL on a CPU"),
    *function("disaggregation.nixl.conn._normalize_kv_mem_kinds", "kinds expected_len", "the same"),
    *function(
        "disaggregation.prefill.SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk", "self", "the same"
    ),
    *function("layers.dp_attention.memcpy_triton", "dst src dim offset sz offset_src", "the same"),
    *(
        use
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor")
        for of in (name, f"_{name}")
        for use in function(f"distributed.parallel_state.GroupCoordinator.{of}", "self output input", "the same")
    ),
)
_ARGUMENTS = (
    *function(f"{_ARGS}.add_cli_args", "parser", "our flags"),
    *function(f"{_ARGS}.from_cli_args", "args", "our flags"),
    *function(f"{_ARGS}.__post_init__", "self", "page size; unsupported features"),
    *methods(_ARGS, "get_attention_backends", "is the backend asked for"),
    *methods(_ARGS, "use_mla_backend get_model_config", "unsupported models"),
    *attributes(_ARGS, "device page_size kv_cache_dtype disable_prefill_cuda_graph", "defaults"),
    *attributes(_ARGS, "enable_memory_saver", "read from runtime_context.get_exec() for the FP8 pool"),
    *attributes(
        _ARGS,
        """
        attn_cp_size dcp_size decoupled_spec_role disable_chunked_prefix_cache disable_radix_cache disaggregation_mode
        disaggregation_decode_enable_radix_cache disaggregation_transfer_backend
        dllm_algorithm dtype enable_deterministic_inference enable_flexkv enable_hierarchical_cache enable_lmcache
        enable_lora enable_mixed_chunk enable_multi_layer_eagle enable_page_major_kv_layout enable_pdmux
        enable_streaming_session enable_two_batch_overlap enable_unified_memory flashinfer_mla_disable_ragged pp_size
        hicache_storage_backend quantization_param_path radix_cache_backend rl_on_policy_target speculative_adaptive
        speculative_eagle_topk hicache_io_backend hicache_mem_layout
        """,
        "unsupported features",
    ),
    *attributes(_ARGS, "cuda_graph_config", "no graphs in prefill beside an FP8 cache"),
    *attributes(_ARGS, "dp_size tokenizer_worker_num", "the rank of a request"),
    *attributes("model_executor.cuda_graph_config.CudaGraphConfig", "prefill", "the same"),
    *attributes("model_executor.cuda_graph_config.PhaseConfig", "backend", "the same"),
    *function("server_args.prepare_server_args", "argv", "examining a launch command"),
    *function("plugins.load_plugins", "", "the same"),
    *attributes(
        "environ.Envs",
        "SGLANG_ENABLE_UNIFIED_RADIX_TREE SGLANG_EXPERIMENTAL_CPP_RADIX_TREE",
        "unsupported features",
    ),
    *function("server_args.add_attention_backend_choices", "choices", "the backend's name"),
    *function("server_args.add_chunked_prefix_cache_attention_backend", "backend_name", "prefill over a prefix"),
    *function("configs.model_config.is_deepseek_dsa", "config", "sparse attention is unsupported"),
    *attributes(
        "configs.model_config.ModelConfig",
        "context_len hf_config hidden_size kv_lora_rank qk_rope_head_dim",
        "the model's dimensions",
    ),
)
_DRAFTS = "speculative.draft_utils.DraftBackendFactory"
_SPECULATION = (
    *attributes(
        _ARGS,
        """
        speculative_algorithm speculative_attention_mode speculative_draft_attention_backend
        speculative_draft_model_path speculative_draft_model_revision speculative_num_draft_tokens
        """,
        "speculative decoding: who verifies how many drafts, and the draft model's backend",
    ),
    *function(f"{_ARGS}.override", "self source", "the draft model's backend"),
    *function(
        "configs.model_config.ModelConfig.from_server_args",
        "server_args model_path model_revision is_draft_model",
        "the draft model's backend",
    ),
    *attributes("configs.model_config.ModelConfig", "attention_arch", "the draft model's backend"),
    *attributes("configs.model_config.AttentionArch", "MLA", "the draft model's backend"),
    *attributes("environ", "envs", "unsupported features"),
    *attributes("environ.Envs", "SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "unsupported features"),
    *methods(_DRAFTS, "create_decode_backend create_draft_extend_backend", "naming the draft model's backends"),
    *attributes(_DRAFTS, "draft_attn_backend", "their name"),
    *attributes(
        "layers.attention.flashmla_backend.FlashMLAMultiStepDraftBackend", "attn_backends", "those of each step", "list"
    ),
    *attributes("layers.attention.attention_registry", "ATTENTION_BACKENDS", "the draft model's backend"),
)
_SCHEDULING = (
    *function(f"{_SCHEDULER}.__init__", "self server_args", "the radix tree"),
    *attributes(_SCHEDULER, "tree_cache running_batch metrics_collector", "the radix tree; who runs; metrics"),
    *attributes(_SCHEDULER, "disagg_prefill_inflight_queue", "who has run on a prefill server", "list"),
    *function(f"{_KV_MANAGER}.__init__", "self args", "what a prefill or decode server says of its cache"),
    *attributes("disaggregation.base.conn.KVArgs", "kv_cache_dtype_str", "the same"),
    *methods(_SCHEDULER, "is_fully_idle", "when expansions may be dropped"),
    *function(f"{_WEIGHTS}.release_memory_occupation", "self recv_req", "dropping expansions"),
    *function(f"{_WEIGHTS}.resume_memory_occupation", "self recv_req", "what is in our buffers is lost"),
    *attributes("managers.io_struct.ReleaseMemoryOccupationReqInput", "tags", "which memory sleeps"),
    *attributes("managers.io_struct.ResumeMemoryOccupationReqInput", "tags", "which memory wakes up"),
    *methods(_SCHEDULER, "flush_cache on_idle", "dropping expansions"),
    *function(f"{_SCHEDULER}.get_internal_state", "self recv_req", "/server_info"),
    *attributes("managers.io_struct.GetInternalStateReqOutput", "internal_state", "/server_info"),
    *attributes("observability.metrics_collector.SchedulerMetricsCollector", "labels", "metrics"),
    *function(f"{_WEIGHTS}._observe_weight_load", "self source", "dropping expansions"),
    *attributes("managers.schedule_batch.ScheduleBatch", "reqs", "the requests of a step"),
    *attributes("managers.schedule_batch.Req", "rid last_node", "a request's path in the radix tree"),
    *methods("managers.schedule_batch.Req", "finished", "who runs"),
    *attributes("mem_cache.radix_cache.RadixCache", "disable", "is there a radix tree"),
    *attributes("mem_cache.radix_cache.RadixCache", "root_node page_size", "whether a node is still in the tree"),
    *attributes("mem_cache.radix_cache.TreeNode", "parent key value lock_ref id", "paths, slots, and who holds them"),
    *attributes("mem_cache.radix_cache.TreeNode", "children host_value", "whether a node is still in the tree"),
    *function("mem_cache.radix_cache.RadixKey.child_key", "self page_size", "what a node is called by its parent"),
    *function(
        "mem_cache.radix_cache.RadixCache._split_node",
        "self key child split_len",
        "a split leaves the old node object its end, which expansions are known by, and gives both nodes its locks",
    ),
    *function(
        "mem_cache.radix_cache.RadixCache.inc_lock_ref",
        "self node",
        "locks a node and all above it: from a node that one request holds down, nobody else does",
    ),
    *function("mem_cache.radix_cache.RadixCache.dec_lock_ref", "self node", "unlocks a node and all above it"),
    *function("mem_cache.radix_cache.RadixCache._delete_leaf", "self node", "an evicted node's parent forgets it"),
)
_ROUTING = (
    *function("managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler", "self obj", "a request's rank"),
    *attributes("managers.tokenizer_manager.TokenizerManager", "server_args rid_to_state", "a request's rank"),
    *attributes(
        "managers.io_struct.TokenizedGenerateReqInput",
        "rid input_ids sampling_params routed_dp_rank extra_key lora_id",
        "a request's rank",
    ),
    *attributes("managers.io_struct.BatchTokenizedGenerateReqInput", "batch", "a request's rank"),
)
_STATUS = (
    *function("utils.auth.add_api_key_middleware", "app", "the status page: the server's app, with a key"),
    *function("utils.auth.app_has_admin_force_endpoints", "app", "the status page: the server's app, without"),
    *function("entrypoints.http_server.get_global_state", "", "the status page: whom to ask"),
    *attributes("entrypoints.http_server._GlobalState", "tokenizer_manager", "the same"),
    *methods("managers.tokenizer_manager.TokenizerManager", "get_internal_state", "the same"),
)

SGLANG_0_5_17 = Release(
    uses=(
        *(*_PLUGIN, *_ARGUMENTS, *_SPECULATION, *_SCHEDULING, *_ROUTING, *_STATUS),
        *IN_A_PASS,
    ),
    read_of_backend=READ_OF_BACKEND,
)

"""Contract with SGLang 0.5.17: code that every server uses outside of a forward pass, such as plug-in, arguments,
scheduler and radix tree."""

from __future__ import annotations

USED_AT_START = """
hooks
    plugins.hook_registry.HookRegistry: register(target, hook, hook_type)
    plugins.hook_registry.HookType: BEFORE AFTER AROUND
which hooks are in place: plugins.hook_registry.HookRegistry: _patched
the backend's factory: layers.attention.attention_registry: register_attention_backend(name)
whether all ranks have the same options
    distributed.parallel_state: get_tp_group()
    distributed.parallel_state.GroupCoordinator: cpu_group world_size
our flags: server_args.ServerArgs: add_cli_args(parser) from_cli_args(args)
page size; unsupported features: server_args.ServerArgs: __post_init__(self)
is the backend asked for: server_args.ServerArgs: get_attention_backends(self)
unsupported models: server_args.ServerArgs: use_mla_backend(self) get_model_config(self)
defaults: server_args.ServerArgs: device page_size kv_cache_dtype disable_prefill_cuda_graph
which features are asked for, and which of them are unsupported
    server_args.ServerArgs: attn_cp_size dcp_size disable_cuda_graph_padding disable_radix_cache disaggregation_mode
        dllm_algorithm dp_size dtype enable_deterministic_inference enable_dp_attention enable_flexkv
        enable_hierarchical_cache enable_lmcache enable_lora enable_memory_saver enable_mixed_chunk
        enable_page_major_kv_layout enable_pdmux enable_streaming_session enable_two_batch_overlap
        enable_unified_memory moe_a2a_backend pp_size radix_cache_backend rl_on_policy_target speculative_algorithm
        tp_size
no graphs in prefill beside an FP8 cache: server_args.ServerArgs: cuda_graph_config
whether the memory for expanded prefixes can be there: server_args.ServerArgs: mem_fraction_static
whether prefill makes keys and values of cached prompts: server_args.ServerArgs: disable_chunked_prefix_cache
of how many tokens prefill makes keys and values at a time: environ.Envs: SGLANG_MAX_KV_CHUNK_CAPACITY
no graphs in prefill beside an FP8 cache; whether steps are mixed
    model_executor.cuda_graph_config.CudaGraphConfig: prefill decode
    model_executor.cuda_graph_config.PhaseConfig: backend
unsupported features
    environ: envs
    environ.Envs: SGLANG_ENABLE_UNIFIED_RADIX_TREE SGLANG_EXPERIMENTAL_CPP_RADIX_TREE
the backend's name: server_args: add_attention_backend_choices(choices)
prefill over a prefix: server_args: add_chunked_prefix_cache_attention_backend(backend_name)
sparse attention is unsupported: configs.model_config: is_deepseek_dsa(config)
linear attention is unsupported: configs.hybrid_arch: mambaish_config(model_config)
the model's dimensions
    configs.model_config.ModelConfig: context_len hf_config hidden_size kv_lora_rank qk_rope_head_dim
the radix tree: managers.scheduler.Scheduler: __init__(self, server_args)
the radix tree; who runs; metrics: managers.scheduler.Scheduler: tree_cache running_batch metrics_collector
when expansions may be dropped: managers.scheduler.Scheduler: is_fully_idle(self)
dropping expansions
    managers.scheduler.Scheduler: flush_cache(self) on_idle(self)
    managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager: _observe_weight_load(self, source)
metrics: observability.metrics_collector.SchedulerMetricsCollector: labels
the requests of a step: managers.schedule_batch.ScheduleBatch: reqs
a request's path in the radix tree: managers.schedule_batch.Req: rid last_node
slots of a request: managers.schedule_batch.Req: req_pool_idx
which prompts are alike: managers.schedule_batch.Req: input_embeds positional_embed_overrides extra_key
who runs, and how long it is: managers.schedule_batch.Req: finished(self) seqlen
empty prompts
    managers.utils: validate_input_length(req, max_req_input_len, allow_auto_truncate)
    managers.schedule_batch.Req: origin_input_ids
is there a radix tree: mem_cache.radix_cache.RadixCache: disable
whether a node is still in the tree
    mem_cache.radix_cache.RadixCache: root_node page_size
    mem_cache.radix_cache.TreeNode: children host_value
paths, slots, and who holds them: mem_cache.radix_cache.TreeNode: parent key value lock_ref id
what a node is called by its parent: mem_cache.radix_cache.RadixKey: child_key(self, page_size)
a split leaves the old node object its end, which expansions are known by, and gives both nodes its locks
    mem_cache.radix_cache.RadixCache: _split_node(self, key, child, split_len)
locks a node and all above it: from a node that one request holds down, nobody else does
    mem_cache.radix_cache.RadixCache: inc_lock_ref(self, node)
unlocks a node and all above it: mem_cache.radix_cache.RadixCache: dec_lock_ref(self, node)
an evicted node's parent forgets it: mem_cache.radix_cache.RadixCache: _delete_leaf(self, node)
"""

"""Contract with SGLang 0.5.23, where it differs from that with 0.5.17."""

from __future__ import annotations

from sglang_mla_ext.adapter.compat.table import Changes, Feature, Read, needed_for, use

_ARGS = "server_args.ServerArgs"
_OVERRIDES = "arg_groups.overrides"
_BATCH = "model_executor.forward_batch_info.ForwardBatch"
_MHA_BATCH = "model_executor.forward_batch_deepseek_mha_mixin.ForwardBatchDeepSeekMHAMixin"
_REQ = "managers.schedule_batch.Req"
_DRAFT_WORKER = "speculative.eagle_worker_v2.EagleDraftWorker"
_DRAFT_GRAPH = "speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner"
_DRAFT_INPUT = "speculative.eagle_info.EagleDraftExtendInput"
_SCHEDULER = "managers.scheduler.Scheduler"
_SCHEDULE_BATCH = "managers.schedule_batch.ScheduleBatch"
_LINEAR_POOL = "mem_cache.memory_pool.HybridLinearKVPool"
_OLD_TREE = "mem_cache.radix_cache"
_TREE = "mem_cache.unified_radix_cache.UnifiedRadixCache"
_CORE = "mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface"
_NODE = "mem_cache.unified_cache.unified_tree_core_interface.TreePathNodeInfo"

ARGUMENTS = (
    *needed_for(
        Feature.EXAMINING,
        use("arg_groups.validation_hook.validate_ib_devices", "function", "another machine's devices", "device_str"),
    ),
    # What the user gave is kept, and what was decided is beside it.
    use(f"{_ARGS}.resolve_once", "function", "page size; unsupported features", "self"),
    use(f"{_ARGS}._resolution_finished", "attribute", "whether they are resolved"),
    use(f"{_OVERRIDES}.ResolvedView", "class", "arguments as they were decided on"),
    use(f"{_OVERRIDES}.resolved_view", "function", "the same", "server_args"),
    use(f"{_OVERRIDES}.attention_backends_of", "function", "is the backend asked for", "cfg"),
    use(f"{_OVERRIDES}.use_mla_backend", "function", "unsupported models", "server_args"),
    use(f"{_OVERRIDES}.model_config_of", "function", "unsupported models", "server_args"),
    *needed_for(
        Feature.DRAFTS,
        use(f"{_OVERRIDES}.declare_resolution", "function", "the draft model's backend", "server_args source"),
    ),
    use(f"{_ARGS}.enable_unified_cache_external_linker", "attribute", "unsupported features"),
    use(f"{_ARGS}.enable_layernorm_sp", "attribute", "unsupported features"),
    use(f"{_ARGS}.enable_kv_cache_sharding", "attribute", "unsupported features"),
    use(f"{_ARGS}.enable_nvidia_megakernel", "attribute", "unsupported features"),
    use(f"{_ARGS}.enable_pd_role_switch", "attribute", "unsupported features"),
    use(f"{_ARGS}.disaggregation_decode_retraction_backup", "attribute", "unsupported features"),
    use(f"{_ARGS}.attn_dp_size", "attribute", "whether there is DP attention"),
    use(f"{_ARGS}.chunked_prefill_size", "attribute", "tokens of a prefill pass"),
    use(f"{_ARGS}.max_prefill_tokens", "attribute", "tokens of a prefill pass"),
    use("server_args.add_attention_backend_choices", "attribute", "the backend's name"),
    use("server_args.add_chunked_prefix_cache_attention_backend", "attribute", "prefill over a prefix"),
)
PASSES = (
    use(
        f"{_MHA_BATCH}.prepare_chunked_prefix_cache_info",
        "function",
        "SGLang's chunks start where expanded prefixes end",
        "self device",
        "pack_all_prefix_chunks single_chunk dense_metadata",
    ),
    use(
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.end_weight_update",
        "function",
        "dropping expansions",
        "self recv_req",
    ),
    use(f"{_REQ}.kv", "attribute", "slots of a request"),
    use("managers.schedule_batch.ReqKvInfo.req_pool_idx", "attribute", "slots of a request"),
    *needed_for(
        Feature.FP8,
        use(
            "mem_cache.memory_pool.MLATokenToKVPool.set_mla_kv_buffer",
            "function",
            "storing keys in two parts",
            "self layer loc_info cache_k_nope cache_k_rope",
        ),
        use(
            "mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mla_kv_pool",
            "function",
            "our pool in place of SGLang's",
            "self max_total_num_tokens mla_pool_class",
        ),
        use(
            "mem_cache.kv_cache_configurator.KVCacheConfigurator._build_hybrid_linear_kv_pool",
            "function",
            "the same beside linear attention",
            "self",
            "mla_pool_class",
        ),
    ),
    *needed_for(
        Feature.PREFILL_GRAPH,
        use(
            "layers.radix_attention.RadixAttention._eager_attention",
            "function",
            "attention between two segments of a prefill graph",
            "self q k v output save_kv_cache",
        ),
        use(
            "mem_cache.kv_index_translator.KVIndexTranslator.pack_read_stream",
            "function",
            "slots of tails",
            "self plan",
            "req_pool_indices seq_lens indptr out kv_start_idx",
        ),
        use("model_executor.cuda_graph_config.PhaseConfig.bs", "attribute", "rows of prefill graphs"),
        use(f"{_BATCH}.kv_loc_plan", "attribute", "slots of tails"),
    ),
)
MIXED_WITH_DRAFTS = needed_for(
    Feature.PAIRED,
    *(
        use(f"{owner}.{name}", kind, "verify steps with new tokens", *more)
        for owner, name, kind, *more in (
            (_SCHEDULER, "running_batch", "attribute"),
            (_SCHEDULE_BATCH, "copy", "function", "self"),
            (_REQ, "seqlen", "attribute"),
            (_BATCH, "_init_num_token_non_padded", "function", "self", "device is_draft_worker"),
            ("layers.logits_processor.LogitsProcessorOutput", "hidden_states", "attribute"),
            ("model_executor.model_runner.ModelRunnerOutput", "logits_output", "attribute"),
            (_ARGS, "speculative_eagle_topk", "attribute"),
            ("environ.Envs", "SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "attribute"),
        )
    ),
    *(
        use(f"{owner}.{name}", kind, "the draft over new tokens of verify steps", *more)
        for owner, name, kind, *more in (
            ("speculative.base_spec_worker.BaseSpecWorker", "draft_worker", "attribute"),
            (_DRAFT_WORKER, "_draft_extend_for_prefill", "function", "self batch target_hidden_states next_token_ids"),
            (_DRAFT_WORKER, "_draft_extend_for_decode", "function", "self batch batch_result"),
            (_DRAFT_GRAPH, "execute", "function", "self forward_batch select_index"),
            (_DRAFT_GRAPH, "can_run_graph", "function", "self forward_batch"),
            (_DRAFT_GRAPH, "max_bs", "attribute"),
            (_BATCH, "capture_hidden_mode", "attribute"),
            (_BATCH, "mm_input_embeds", "attribute"),
            ("model_executor.model_runner.ModelRunner", "kv_index_translator", "attribute"),
            (_DRAFT_INPUT, "hidden_states", "attribute"),
            (_DRAFT_INPUT, "num_accept_tokens", "attribute"),
            (_DRAFT_INPUT, "num_correct_drafts", "attribute"),
            (_DRAFT_INPUT, "num_tokens_per_req", "attribute"),
            (_DRAFT_INPUT, "dsa_seed_topk_capture", "attribute"),
            ("mem_cache.kv_index_translator.KVIndexTranslator", "own_plan", "function", "self forward_batch"),
            ("mem_cache.kv_loc_plan.KVLocPlan", "bind", "function", "self batch reader"),
        )
    ),
)
LINEAR_LAYERS = (
    # Layers with MLA beside linear attention keep the numbers that they have in the model.
    use(f"{_LINEAR_POOL}.get_key_buffer", "function", "latent rows beside linear attention", "self layer_id"),
    use(
        f"{_LINEAR_POOL}.set_mla_kv_buffer",
        "function",
        "storing keys in two parts",
        "self layer loc_info cache_k_nope cache_k_rope",
    ),
    use(f"{_LINEAR_POOL}.layer_transfer_counter", "attribute", "waiting for rows that come from the host"),
    *needed_for(
        Feature.LINEAR_ON_CPU,
        use(
            "arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer",
            "function",
            "states are kept for the tree while passes overlap",
        ),
    ),
)
TREE = (
    # Numbers for nodes, and a core beside the cache, which gives whole paths on demand.
    use(f"{_TREE}.tree_core", "attribute", "the radix tree"),
    use(f"{_TREE}.disable", "attribute", "is there a radix tree"),
    use(f"{_CORE}.collect_path_info", "function", "paths", "self end_node_ids"),
    use(f"{_CORE}.is_root", "function", "whether a node is there", "self node_id"),
    use(f"{_CORE}.root_node_handle", "function", "slots of a path", "self"),
    use(f"{_CORE}.collect_full_device_indices", "function", "slots of a path", "self from_node_id until_node_id"),
    use(f"{_NODE}.node_id", "attribute", "paths"),
    use(f"{_NODE}.path_end", "attribute", "paths"),
    use(f"{_NODE}.num_children", "attribute", "paths"),
)

CHANGES = Changes(
    uses=(*ARGUMENTS, *PASSES, *MIXED_WITH_DRAFTS, *LINEAR_LAYERS, *TREE),
    renamed={"sgl_kernel.flash_mla": "sglang.kernels.ops.attention.flash_mla_interface"},
    gone=(
        f"{_ARGS}.__post_init__",
        f"{_ARGS}.get_attention_backends",
        f"{_ARGS}.use_mla_backend",
        f"{_ARGS}.get_model_config",
        f"{_ARGS}.override",
        f"{_ARGS}._validate_ib_devices",
        f"{_REQ}.req_pool_idx",
        f"{_OLD_TREE}.RadixCache",
        f"{_OLD_TREE}.TreeNode",
        f"{_OLD_TREE}.RadixKey",
        "environ.Envs.SGLANG_ENABLE_UNIFIED_RADIX_TREE",
        "environ.Envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE",
        "managers.cache_controller.HiCacheController.load_stream",
        "speculative.draft_utils.DraftBackendFactory.draft_attn_backend",
        "layers.attention.flashmla_backend.FlashMLAMultiStepDraftBackend",
    ),
    reads=(
        Read(
            "extend_dummy_seqs_capped_by_req_pool",
            "model_executor/runner/flashinfer_autotune.py",
            "how many requests a step to try kernels out may have",
        ),
        Read(
            "kv_index_translator",
            "model_executor/forward_batch_deepseek_mha_mixin.py",
            "prefill over a prefix: what turns slots into rows of the pool",
        ),
    ),
    fields_of={"sglang.srt.server_args.ServerArgs": "sglang.srt.server_args._INPUT_NAMESPACES"},
)

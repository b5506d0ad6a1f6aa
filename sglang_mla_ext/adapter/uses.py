"""What this package uses of SGLang, by release; checked by contract.py, which says how.

Two directions: what our code uses of SGLang's (`Use`, here), and what SGLang reads of an attention backend (`Read`, in
reads.py). Imports nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_mla_ext.adapter.reads import READ_OF_BACKEND, Read


@dataclass(frozen=True)
class Use:
    """One thing used of SGLang.

    Attributes:
        path: dotted path to it.
        kind: what it has to be: `class`, `function`, `attribute`, or `list` (an attribute that holds a list).
        why: what for.
        params: the leading parameter names that we rely on, in order; a class's are its constructor's.
        keywords: further parameters that we pass by name.
    """

    path: str
    kind: str
    why: str
    params: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()


@dataclass(frozen=True)
class Release:
    """One column of the contract: what is used of one line of releases, and what that reads of a backend.

    Attributes:
        fields_of: see SourceTree.
    """

    uses: tuple[Use, ...]
    read_of_backend: tuple[Read, ...]
    fields_of: Mapping[str, str] = field(default_factory=dict)


def _function(path: str, params: str, why: str, keywords: str = "") -> tuple[Use]:
    return (Use(f"sglang.srt.{path}", "function", why, tuple(params.split()), tuple(keywords.split())),)


def _attributes(owner: str, names: str, why: str, kind: str = "attribute") -> tuple[Use, ...]:
    return tuple(Use(f"sglang.srt.{owner}.{name}", kind, why) for name in names.split())


def _methods(owner: str, names: str, why: str) -> tuple[Use, ...]:
    """Methods that take no argument."""
    return tuple(Use(f"sglang.srt.{owner}.{name}", "function", why, ("self",)) for name in names.split())


_MHA_BATCH = "model_executor.forward_batch_deepseek_mha_mixin.ForwardBatchDeepSeekMHAMixin"
_HANDLER = "models.deepseek_common.attention_backend_handler"
_FORWARD = "models.deepseek_common.attention_forward_methods"
_BACKEND = "layers.attention.base_attn_backend.AttentionBackend"
_FLASHMLA = "layers.attention.flashmla_backend.FlashMLABackend"
_TORCH = "layers.attention.torch_native_backend.TorchNativeAttnBackend"
_MLA = "models.deepseek_v2.DeepseekV2AttentionMLA"
_POOL = "mem_cache.memory_pool.MLATokenToKVPool"
_CONFIGURATOR = "mem_cache.kv_cache_configurator.KVCacheConfigurator"
_HOST_CACHE = "managers.cache_controller.HiCacheController"
_SCHEDULER = "managers.scheduler.Scheduler"
_KV_MANAGER = "disaggregation.common.conn.CommonKVManager"
_ARGS = "server_args.ServerArgs"
_WEIGHTS = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

_PLUGIN = (
    *_function("plugins.hook_registry.HookRegistry.register", "target hook hook_type", "hooks"),
    *_attributes("plugins.hook_registry.HookRegistry", "_patched", "which hooks are in place"),
    *_attributes("plugins.hook_registry.HookType", "BEFORE AFTER AROUND", "hooks"),
    *_function("layers.attention.attention_registry.register_attention_backend", "name", "the backend's factory"),
    *_function("utils.common.support_triton", "backend", "torch code beside our backend on a CPU"),
    *_function("runtime_context.get_stream", "name", "LongCat-Flash on a CPU"),
    Use(
        "sglang.kernels.ops.moe.ep_moe_kernels.zero_experts_compute_triton",
        "function",
        "the same",
        ("expert_indices", "expert_scales", "num_experts", "zero_expert_type", "hidden_states"),
    ),
    *_function("mem_cache.pool_host.base.HostKVCache.__init__", "self", "a host cache on a CPU"),
    *_attributes("mem_cache.pool_host.mla", "ALLOC_MEMORY_FUNCS", "the same"),
    *_function(
        "model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch",
        "self model_runner",
        "DP attention on a CPU",
    ),
    *_function("disaggregation.nixl.conn.NixlKVManager.__init__", "self", "NIXL on a CPU"),
    *_function("disaggregation.nixl.conn._normalize_kv_mem_kinds", "kinds expected_len", "the same"),
    *_function(
        "disaggregation.prefill.SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk", "self", "the same"
    ),
    *_function("layers.dp_attention.memcpy_triton", "dst src dim offset sz offset_src", "the same"),
    *(
        use
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor")
        for of in (name, f"_{name}")
        for use in _function(f"distributed.parallel_state.GroupCoordinator.{of}", "self output input", "the same")
    ),
)
_ARGUMENTS = (
    *_function(f"{_ARGS}.add_cli_args", "parser", "our flags"),
    *_function(f"{_ARGS}.from_cli_args", "args", "our flags"),
    *_function(f"{_ARGS}.__post_init__", "self", "page size; unsupported features"),
    *_methods(_ARGS, "get_attention_backends", "is the backend asked for"),
    *_methods(_ARGS, "use_mla_backend get_model_config", "unsupported models"),
    *_attributes(_ARGS, "device page_size kv_cache_dtype disable_prefill_cuda_graph", "defaults"),
    *_attributes(_ARGS, "enable_memory_saver", "read from runtime_context.get_exec() for the FP8 pool"),
    *_attributes(
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
    *_attributes(_ARGS, "cuda_graph_config", "no graphs in prefill beside an FP8 cache"),
    *_attributes(_ARGS, "dp_size tokenizer_worker_num", "the rank of a request"),
    *_attributes("model_executor.cuda_graph_config.CudaGraphConfig", "prefill", "the same"),
    *_attributes("model_executor.cuda_graph_config.PhaseConfig", "backend", "the same"),
    *_function("server_args.prepare_server_args", "argv", "examining a launch command"),
    *_function("plugins.load_plugins", "", "the same"),
    *_attributes(
        "environ.Envs",
        "SGLANG_ENABLE_UNIFIED_RADIX_TREE SGLANG_EXPERIMENTAL_CPP_RADIX_TREE",
        "unsupported features",
    ),
    *_function("server_args.add_attention_backend_choices", "choices", "the backend's name"),
    *_function("server_args.add_chunked_prefix_cache_attention_backend", "backend_name", "prefill over a prefix"),
    *_function("configs.model_config.is_deepseek_dsa", "config", "sparse attention is unsupported"),
    *_attributes(
        "configs.model_config.ModelConfig",
        "context_len hf_config hidden_size kv_lora_rank qk_rope_head_dim",
        "the model's dimensions",
    ),
)
_DRAFTS = "speculative.draft_utils.DraftBackendFactory"
_SPECULATION = (
    *_attributes(
        _ARGS,
        """
        speculative_algorithm speculative_attention_mode speculative_draft_attention_backend
        speculative_draft_model_path speculative_draft_model_revision speculative_num_draft_tokens
        """,
        "speculative decoding: who verifies how many drafts, and the draft model's backend",
    ),
    *_function(f"{_ARGS}.override", "self source", "the draft model's backend"),
    *_function(
        "configs.model_config.ModelConfig.from_server_args",
        "server_args model_path model_revision is_draft_model",
        "the draft model's backend",
    ),
    *_attributes("configs.model_config.ModelConfig", "attention_arch", "the draft model's backend"),
    *_attributes("configs.model_config.AttentionArch", "MLA", "the draft model's backend"),
    *_attributes("environ", "envs", "unsupported features"),
    *_attributes("environ.Envs", "SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "unsupported features"),
    *_methods(_DRAFTS, "create_decode_backend create_draft_extend_backend", "naming the draft model's backends"),
    *_attributes(_DRAFTS, "draft_attn_backend", "their name"),
    *_attributes(
        "layers.attention.flashmla_backend.FlashMLAMultiStepDraftBackend", "attn_backends", "those of each step", "list"
    ),
    *_attributes("layers.attention.attention_registry", "ATTENTION_BACKENDS", "the draft model's backend"),
)
_SCHEDULING = (
    *_function(f"{_SCHEDULER}.__init__", "self server_args", "the radix tree"),
    *_attributes(_SCHEDULER, "tree_cache running_batch metrics_collector", "the radix tree; who runs; metrics"),
    *_attributes(_SCHEDULER, "disagg_prefill_inflight_queue", "who has run on a prefill server", "list"),
    *_function(f"{_KV_MANAGER}.__init__", "self args", "what a prefill or decode server says of its cache"),
    *_attributes("disaggregation.base.conn.KVArgs", "kv_cache_dtype_str", "the same"),
    *_methods(_SCHEDULER, "is_fully_idle", "when expansions may be dropped"),
    *_function(f"{_WEIGHTS}.release_memory_occupation", "self recv_req", "dropping expansions"),
    *_function(f"{_WEIGHTS}.resume_memory_occupation", "self recv_req", "what is in our buffers is lost"),
    *_attributes("managers.io_struct.ReleaseMemoryOccupationReqInput", "tags", "which memory sleeps"),
    *_attributes("managers.io_struct.ResumeMemoryOccupationReqInput", "tags", "which memory wakes up"),
    *_methods(_SCHEDULER, "flush_cache on_idle", "dropping expansions"),
    *_function(f"{_SCHEDULER}.get_internal_state", "self recv_req", "/server_info"),
    *_attributes("managers.io_struct.GetInternalStateReqOutput", "internal_state", "/server_info"),
    *_attributes("observability.metrics_collector.SchedulerMetricsCollector", "labels", "metrics"),
    *_function(f"{_WEIGHTS}._observe_weight_load", "self source", "dropping expansions"),
    *_attributes("managers.schedule_batch.ScheduleBatch", "reqs", "the requests of a step"),
    *_attributes("managers.schedule_batch.Req", "rid last_node", "a request's path in the radix tree"),
    *_methods("managers.schedule_batch.Req", "finished", "who runs"),
    *_attributes("mem_cache.radix_cache.RadixCache", "disable", "is there a radix tree"),
    *_attributes("mem_cache.radix_cache.RadixCache", "root_node page_size", "whether a node is still in the tree"),
    *_attributes("mem_cache.radix_cache.TreeNode", "parent key value lock_ref id", "paths, slots, and who holds them"),
    *_attributes("mem_cache.radix_cache.TreeNode", "children host_value", "whether a node is still in the tree"),
    *_function("mem_cache.radix_cache.RadixKey.child_key", "self page_size", "what a node is called by its parent"),
    *_function(
        "mem_cache.radix_cache.RadixCache._split_node",
        "self key child split_len",
        "a split leaves the old node object its end, which expansions are known by, and gives both nodes its locks",
    ),
    *_function(
        "mem_cache.radix_cache.RadixCache.inc_lock_ref",
        "self node",
        "locks a node and all above it: from a node that one request holds down, nobody else does",
    ),
    *_function("mem_cache.radix_cache.RadixCache.dec_lock_ref", "self node", "unlocks a node and all above it"),
    *_function("mem_cache.radix_cache.RadixCache._delete_leaf", "self node", "an evicted node's parent forgets it"),
)
_ROUTING = (
    *_function("managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler", "self obj", "a request's rank"),
    *_attributes("managers.tokenizer_manager.TokenizerManager", "server_args rid_to_state", "a request's rank"),
    *_attributes(
        "managers.io_struct.TokenizedGenerateReqInput",
        "rid input_ids sampling_params routed_dp_rank extra_key lora_id",
        "a request's rank",
    ),
    *_attributes("managers.io_struct.BatchTokenizedGenerateReqInput", "batch", "a request's rank"),
)
_STATUS = (
    *_function("utils.auth.add_api_key_middleware", "app", "the status page: the server's app, with a key"),
    *_function("utils.auth.app_has_admin_force_endpoints", "app", "the status page: the server's app, without"),
    *_function("entrypoints.http_server.get_global_state", "", "the status page: whom to ask"),
    *_attributes("entrypoints.http_server._GlobalState", "tokenizer_manager", "the same"),
    *_methods("managers.tokenizer_manager.TokenizerManager", "get_internal_state", "the same"),
)
_STEP = (
    *_function("model_executor.forward_batch_info.ForwardBatch.init_new", "batch model_runner", "a step's requests"),
    *_attributes(
        "model_executor.forward_batch_info.ForwardBatch",
        """
        _original_forward_mode batch_size extend_prefix_lens extend_prefix_lens_cpu extend_seq_lens_cpu forward_mode
        num_prefix_chunks out_cache_loc prefix_chunk_len prefix_chunk_starts prefix_chunk_starts_cpu req_pool_indices
        seq_lens
        """,
        "what a step computes",
    ),
    *_attributes("model_executor.forward_batch_info.ForwardBatch", "forward_metadata_ready", "running a pass again"),
    *_function("model_executor.runner.eager_runner.EagerRunner.execute", "self forward_batch", "the same"),
    *_methods(
        "model_executor.forward_batch_info.ForwardMode",
        "is_decode is_extend is_idle is_target_verify",
        "what a step computes",
    ),
    *_attributes(
        "model_executor.model_runner.ModelRunner",
        """
        device dtype is_draft_worker kv_cache_dtype memory_saver_adapter model model_config req_to_token_pool
        server_args token_to_kv_pool use_mla_backend
        """,
        "building the backend",
    ),
    *_function("model_executor.model_runner.ModelRunner.forward", "self forward_batch", "the shadow check"),
    *_function(
        f"{_MHA_BATCH}.prepare_chunked_prefix_cache_info",
        "self device",
        "SGLang's chunks start where expanded prefixes end",
    ),
    *_function(f"{_MHA_BATCH}.prepare_chunked_kv_indices", "self device", "the same"),
)
_POOLS = (
    *_attributes("mem_cache.memory_pool.ReqToTokenPool", "req_to_token size", "slots of a request's tokens"),
    *_attributes("disaggregation.decode.DecodeReqToTokenPool", "req_to_token size", "the same on a decode server"),
    *_function(f"{_CONFIGURATOR}._profile_available_bytes", "self", "taking our memory out of the KV budget"),
    *_function(f"{_CONFIGURATOR}.resolve_max_num_reqs", "self token_capacity", "the size of our page tables"),
    *_attributes(_CONFIGURATOR, "model model_dtype", "the size of our buffers"),
    *_function(
        "utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.region",
        "self tag",
        "our buffers give way when SGLang sleeps",
    ),
    *_attributes("constants", "GPU_MEMORY_TYPE_KV_CACHE", "the same"),
    *_function(f"{_CONFIGURATOR}._build_mla_kv_pool", "self max_total_num_tokens", "the FP8 pool"),
    *_attributes(
        _CONFIGURATOR,
        "device is_draft_worker kv_cache_dtype layer_info model_config pool_page_size server_args use_mla_backend",
        "the FP8 pool",
    ),
    *_attributes(
        "model_executor.model_runner_components.layer_setup.ModelLayerInfo",
        "num_effective_layers start_layer end_layer",
        "the FP8 pool",
    ),
    *_function(
        "model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        "self kvc num_layers",
        "the size of a row of the FP8 pool",
    ),
    *_function(
        f"{_POOL}.__init__",
        "self size page_size dtype kv_lora_rank qk_rope_head_dim layer_num device",
        "the FP8 pool",
        "enable_memory_saver start_layer end_layer",
    ),
    *_attributes(
        _POOL, "dtype kv_buffer kv_cache_dim kv_lora_rank qk_rope_head_dim start_layer", "the FP8 pool, and ours"
    ),
    *_function(f"{_POOL}._create_buffers", "self", "the FP8 pool"),
    *_function(f"{_POOL}.set_kv_buffer", "self layer loc_info cache_k cache_v", "storing keys"),
    *_function(f"{_POOL}.set_mla_kv_buffer", "self layer loc cache_k_nope cache_k_rope", "storing keys in two parts"),
    *_function(f"{_POOL}.get_mla_kv_buffer", "self layer loc dst_dtype", "the FP8 pool"),
    *_function(f"{_POOL}.get_key_buffer", "self layer_id", "latent rows"),
    *_function(f"{_POOL}.get_value_buffer", "self layer_id", "the FP8 pool"),
    *_attributes(_POOL, "layer_transfer_counter", "waiting for rows that come from the host"),
    *_function("managers.cache_controller.LayerDoneCounter.wait_until", "self threshold", "the same"),
    *_methods(_HOST_CACHE, "start_loading", "copies from the host after the step before"),
    *_attributes(_HOST_CACHE, "load_queue", "the same", "list"),
    *_attributes(_HOST_CACHE, "load_stream", "the same"),
    *_attributes(_SCHEDULER, "forward_stream", "the same"),
    *_function(
        "mem_cache.pool_host.mla.MLATokenToKVPoolHost.__init__",
        "self",
        "rows of the FP8 pool on the host",
        "override_kv_cache_dim",
    ),
    *_function("mem_cache.memory_pool.unwrap_write_loc", "loc_info", "storing keys"),
    *_function("runtime_context.get_exec", "", "the FP8 pool: features.enable_memory_saver"),
)
_LAYER = (
    *_function(f"{_HANDLER}.AttentionBackendRegistry.register", "backend_name handler_func", "forward methods"),
    *_function(f"{_HANDLER}.AttentionBackendRegistry.get_handler", "backend_name", "FlashMLA's choice of one"),
    *_attributes(f"{_HANDLER}.AttnForwardMethod", "MHA_CHUNKED_KV MLA", "prefill over expanded prefixes; on a CPU"),
    *_function(f"{_HANDLER}.is_in_tc_piecewise_cuda_graph", "", "no such prefill inside a graph"),
    *_function(f"{_HANDLER}.is_in_breakable_cuda_graph", "", "no such prefill inside a graph"),
    *_function(
        f"{_FORWARD}.forward_mla.DeepseekMLAForwardMixin._split_q_nope_pe",
        "self q latent_cache",
        "the query before it is absorbed",
    ),
    *_attributes(
        f"{_FORWARD}.forward_mla",
        "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS",
        "query and key in two parts: forward_absorb_core gives q_rope and k_rope to backends in this list",
        "list",
    ),
    *_function(
        f"{_FORWARD}.forward_mha.DeepseekMHAForwardMixin._chunked_prefix_attn_mha",
        "self q accum_output accum_lse forward_batch",
        "prefill over expanded prefixes",
    ),
    *_attributes(
        _MLA,
        """
        kv_lora_rank num_heads num_local_heads qk_nope_head_dim qk_rope_head_dim v_head_dim
        """,
        "the layer's dimensions",
    ),
    *_attributes(_MLA, "attn_mha attn_mqa", "the layer's id and scale"),
    *_attributes(_MLA, "kv_a_layernorm kv_b_proj use_deep_gemm_bmm w_kc w_scale w_vc", "expanding a prefix"),
    *_attributes(_MLA, "o_proj", "merging the shared part"),
    *_attributes(_MLA, "chunked_prefix_cache_threshold", "prefill with keys per head"),
    *_attributes(
        "layers.radix_attention.RadixAttention",
        "head_dim layer_id qk_head_dim scaling tp_q_head_num v_head_dim",
        "the layer's dimensions, id and scale",
    ),
)
_FORWARD_PARAMS = "self q k v layer forward_batch save_kv_cache"
_BACKENDS = (
    *_function(f"{_BACKEND}.init_forward_metadata", "self forward_batch", "our backend's interface"),
    *_function(f"{_BACKEND}.init_forward_metadata_out_graph", "self forward_batch in_capture", "the same"),
    *_function(f"{_BACKEND}.init_forward_metadata_in_graph", "self forward_batch", "the same"),
    *_function(f"{_BACKEND}.init_cuda_graph_state", "self max_bs max_num_tokens", "the same"),
    *_methods(_BACKEND, "get_cuda_graph_seq_len_fill_value", "the same"),
    *_function(f"{_BACKEND}.forward", _FORWARD_PARAMS, "the same"),
    *_function(f"{_BACKEND}.forward_decode", _FORWARD_PARAMS, "the same"),
    *_function(f"{_BACKEND}.forward_extend", _FORWARD_PARAMS, "the same"),
    *_function(f"{_FLASHMLA}.__init__", "self model_runner", "the stock backend on a GPU"),
    *_function(f"{_FLASHMLA}.init_forward_metadata", "self forward_batch", "the same"),
    *_function(f"{_FLASHMLA}.init_forward_metadata_out_graph", "self forward_batch in_capture", "the same"),
    *_function(f"{_FLASHMLA}.forward_decode", _FORWARD_PARAMS, "the same"),
    *_function(f"{_FLASHMLA}.forward_extend", _FORWARD_PARAMS, "the same"),
    *_attributes(_FLASHMLA, "enable_chunk_kv", "whether prefill with keys per head has an lse"),
    *_attributes(_FLASHMLA, "is_fp8_kvcache", "what an idle rank makes a schedule for"),
    *_attributes(_FLASHMLA, "max_context_len req_to_token_pool token_to_kv_pool", "the stock backend on a GPU"),
    *_function(f"{_TORCH}.__init__", "self model_runner", "the stock backend on a CPU"),
    *_function(f"{_TORCH}.init_forward_metadata", "self forward_batch", "the same"),
    *_function(f"{_TORCH}.forward_decode", _FORWARD_PARAMS, "the same"),
    *_function(f"{_TORCH}.forward_extend", _FORWARD_PARAMS, "the same"),
    *_attributes(_TORCH, "req_to_token_pool token_to_kv_pool", "the same"),
    Use(
        "sgl_kernel.flash_mla.get_mla_metadata",
        "function",
        "FlashMLA's schedule for private tails",
        ("cache_seqlens", "num_q_tokens_per_head_k", "num_heads_k"),
    ),
    Use(
        "sgl_kernel.flash_mla.flash_mla_with_kvcache",
        "function",
        "FlashMLA over private tails",
        ("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits"),
        ("softmax_scale", "causal"),
    ),
)

_EH_NORM = "sglang.kernels.ops.layernorm.fused_eh_norm"
_DRAFT = (
    Use(
        f"{_EH_NORM}.fused_eh_norm",
        "function",
        "drafting layers of small models",
        ("inputs_embeds", "previous_hidden", "enorm_weight", "hnorm_weight", "eps"),
    ),
    Use(f"{_EH_NORM}.is_supported_fused_eh_norm_hidden_size", "function", "the same", ("hidden_size",)),
)

SGLANG_0_5_17 = Release(
    uses=(
        *(*_PLUGIN, *_ARGUMENTS, *_SPECULATION, *_SCHEDULING, *_ROUTING, *_STATUS),
        *(*_STEP, *_POOLS, *_LAYER, *_BACKENDS, *_DRAFT),
    ),
    read_of_backend=READ_OF_BACKEND,
)

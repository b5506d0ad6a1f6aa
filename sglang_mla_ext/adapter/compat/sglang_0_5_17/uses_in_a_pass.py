"""What this package uses of SGLang in a forward pass: batches, pools, layers, attention backends; see uses.py."""

from __future__ import annotations

from sglang_mla_ext.adapter.compat.use import Use, attributes, function, methods

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

STEP = (
    *function("model_executor.forward_batch_info.ForwardBatch.init_new", "batch model_runner", "a step's requests"),
    *attributes(
        "model_executor.forward_batch_info.ForwardBatch",
        """
        _original_forward_mode batch_size extend_prefix_lens extend_prefix_lens_cpu extend_seq_lens_cpu forward_mode
        num_prefix_chunks out_cache_loc prefix_chunk_len prefix_chunk_starts prefix_chunk_starts_cpu req_pool_indices
        seq_lens
        """,
        "what a step computes",
    ),
    *attributes("model_executor.forward_batch_info.ForwardBatch", "forward_metadata_ready", "running a pass again"),
    *function("model_executor.runner.eager_runner.EagerRunner.execute", "self forward_batch", "the same"),
    *methods(
        "model_executor.forward_batch_info.ForwardMode",
        "is_decode is_extend is_idle is_target_verify",
        "what a step computes",
    ),
    *attributes(
        "model_executor.model_runner.ModelRunner",
        """
        device dtype is_draft_worker kv_cache_dtype memory_saver_adapter model model_config req_to_token_pool
        server_args token_to_kv_pool use_mla_backend
        """,
        "building the backend",
    ),
    *function("model_executor.model_runner.ModelRunner.forward", "self forward_batch", "the shadow check"),
    *function(
        f"{_MHA_BATCH}.prepare_chunked_prefix_cache_info",
        "self device",
        "SGLang's chunks start where expanded prefixes end",
    ),
    *function(f"{_MHA_BATCH}.prepare_chunked_kv_indices", "self device", "the same"),
)
POOLS = (
    *attributes("mem_cache.memory_pool.ReqToTokenPool", "req_to_token size", "slots of a request's tokens"),
    *attributes("disaggregation.decode.DecodeReqToTokenPool", "req_to_token size", "the same on a decode server"),
    *function(f"{_CONFIGURATOR}._profile_available_bytes", "self", "taking our memory out of the KV budget"),
    *function(f"{_CONFIGURATOR}.resolve_max_num_reqs", "self token_capacity", "the size of our page tables"),
    *attributes(_CONFIGURATOR, "model model_dtype", "the size of our buffers"),
    *function(
        "utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.region",
        "self tag",
        "our buffers give way when SGLang sleeps",
    ),
    *attributes("constants", "GPU_MEMORY_TYPE_KV_CACHE", "the same"),
    *function(f"{_CONFIGURATOR}._build_mla_kv_pool", "self max_total_num_tokens", "the FP8 pool"),
    *attributes(
        _CONFIGURATOR,
        "device is_draft_worker kv_cache_dtype layer_info model_config pool_page_size server_args use_mla_backend",
        "the FP8 pool",
    ),
    *attributes(
        "model_executor.model_runner_components.layer_setup.ModelLayerInfo",
        "num_effective_layers start_layer end_layer",
        "the FP8 pool",
    ),
    *function(
        "model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        "self kvc num_layers",
        "the size of a row of the FP8 pool",
    ),
    *function(
        f"{_POOL}.__init__",
        "self size page_size dtype kv_lora_rank qk_rope_head_dim layer_num device",
        "the FP8 pool",
        "enable_memory_saver start_layer end_layer",
    ),
    *attributes(
        _POOL, "dtype kv_buffer kv_cache_dim kv_lora_rank qk_rope_head_dim start_layer", "the FP8 pool, and ours"
    ),
    *function(f"{_POOL}._create_buffers", "self", "the FP8 pool"),
    *function(f"{_POOL}.set_kv_buffer", "self layer loc_info cache_k cache_v", "storing keys"),
    *function(f"{_POOL}.set_mla_kv_buffer", "self layer loc cache_k_nope cache_k_rope", "storing keys in two parts"),
    *function(f"{_POOL}.get_mla_kv_buffer", "self layer loc dst_dtype", "the FP8 pool"),
    *function(f"{_POOL}.get_key_buffer", "self layer_id", "latent rows"),
    *function(f"{_POOL}.get_value_buffer", "self layer_id", "the FP8 pool"),
    *attributes(_POOL, "layer_transfer_counter", "waiting for rows that come from the host"),
    *function("managers.cache_controller.LayerDoneCounter.wait_until", "self threshold", "the same"),
    *methods(_HOST_CACHE, "start_loading", "copies from the host after the step before"),
    *attributes(_HOST_CACHE, "load_queue", "the same", "list"),
    *attributes(_HOST_CACHE, "load_stream", "the same"),
    *attributes(_SCHEDULER, "forward_stream", "the same"),
    *function(
        "mem_cache.pool_host.mla.MLATokenToKVPoolHost.__init__",
        "self",
        "rows of the FP8 pool on the host",
        "override_kv_cache_dim",
    ),
    *function("mem_cache.memory_pool.unwrap_write_loc", "loc_info", "storing keys"),
    *function("runtime_context.get_exec", "", "the FP8 pool: features.enable_memory_saver"),
)
LAYER = (
    *function(f"{_HANDLER}.AttentionBackendRegistry.register", "backend_name handler_func", "forward methods"),
    *function(f"{_HANDLER}.AttentionBackendRegistry.get_handler", "backend_name", "FlashMLA's choice of one"),
    *attributes(f"{_HANDLER}.AttnForwardMethod", "MHA_CHUNKED_KV MLA", "prefill over expanded prefixes; on a CPU"),
    *function(f"{_HANDLER}.is_in_tc_piecewise_cuda_graph", "", "no such prefill inside a graph"),
    *function(f"{_HANDLER}.is_in_breakable_cuda_graph", "", "no such prefill inside a graph"),
    *function(
        f"{_FORWARD}.forward_mla.DeepseekMLAForwardMixin._split_q_nope_pe",
        "self q latent_cache",
        "the query before it is absorbed",
    ),
    *attributes(
        f"{_FORWARD}.forward_mla",
        "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS",
        "query and key in two parts: forward_absorb_core gives q_rope and k_rope to backends in this list",
        "list",
    ),
    *function(
        f"{_FORWARD}.forward_mha.DeepseekMHAForwardMixin._chunked_prefix_attn_mha",
        "self q accum_output accum_lse forward_batch",
        "prefill over expanded prefixes",
    ),
    *attributes(
        _MLA,
        """
        kv_lora_rank num_heads num_local_heads qk_nope_head_dim qk_rope_head_dim v_head_dim
        """,
        "the layer's dimensions",
    ),
    *attributes(_MLA, "attn_mha attn_mqa", "the layer's id and scale"),
    *attributes(_MLA, "kv_a_layernorm kv_b_proj use_deep_gemm_bmm w_kc w_scale w_vc", "expanding a prefix"),
    *attributes(_MLA, "o_proj", "merging the shared part"),
    *attributes(_MLA, "chunked_prefix_cache_threshold", "prefill with keys per head"),
    *attributes(
        "layers.radix_attention.RadixAttention",
        "head_dim layer_id qk_head_dim scaling tp_q_head_num v_head_dim",
        "the layer's dimensions, id and scale",
    ),
)
_FORWARD_PARAMS = "self q k v layer forward_batch save_kv_cache"
BACKENDS = (
    *function(f"{_BACKEND}.init_forward_metadata", "self forward_batch", "our backend's interface"),
    *function(f"{_BACKEND}.init_forward_metadata_out_graph", "self forward_batch in_capture", "the same"),
    *function(f"{_BACKEND}.init_forward_metadata_in_graph", "self forward_batch", "the same"),
    *function(f"{_BACKEND}.init_cuda_graph_state", "self max_bs max_num_tokens", "the same"),
    *methods(_BACKEND, "get_cuda_graph_seq_len_fill_value", "the same"),
    *function(f"{_BACKEND}.forward", _FORWARD_PARAMS, "the same"),
    *function(f"{_BACKEND}.forward_decode", _FORWARD_PARAMS, "the same"),
    *function(f"{_BACKEND}.forward_extend", _FORWARD_PARAMS, "the same"),
    *function(f"{_FLASHMLA}.__init__", "self model_runner", "the stock backend on a GPU"),
    *function(f"{_FLASHMLA}.init_forward_metadata", "self forward_batch", "the same"),
    *function(f"{_FLASHMLA}.init_forward_metadata_out_graph", "self forward_batch in_capture", "the same"),
    *function(f"{_FLASHMLA}.forward_decode", _FORWARD_PARAMS, "the same"),
    *function(f"{_FLASHMLA}.forward_extend", _FORWARD_PARAMS, "the same"),
    *attributes(_FLASHMLA, "enable_chunk_kv", "whether prefill with keys per head has an lse"),
    *attributes(_FLASHMLA, "is_fp8_kvcache", "what an idle rank makes a schedule for"),
    *attributes(_FLASHMLA, "max_context_len req_to_token_pool token_to_kv_pool", "the stock backend on a GPU"),
    *function(f"{_TORCH}.__init__", "self model_runner", "the stock backend on a CPU"),
    *function(f"{_TORCH}.init_forward_metadata", "self forward_batch", "the same"),
    *function(f"{_TORCH}.forward_decode", _FORWARD_PARAMS, "the same"),
    *function(f"{_TORCH}.forward_extend", _FORWARD_PARAMS, "the same"),
    *attributes(_TORCH, "req_to_token_pool token_to_kv_pool", "the same"),
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
DRAFT = (
    Use(
        f"{_EH_NORM}.fused_eh_norm",
        "function",
        "drafting layers of small models",
        ("inputs_embeds", "previous_hidden", "enorm_weight", "hnorm_weight", "eps"),
    ),
    Use(f"{_EH_NORM}.is_supported_fused_eh_norm_hidden_size", "function", "the same", ("hidden_size",)),
)

IN_A_PASS = (*STEP, *POOLS, *LAYER, *BACKENDS, *DRAFT)

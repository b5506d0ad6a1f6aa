"""What every server uses of SGLang 0.5.17 in a forward pass: batches, pools, layers, attention backends."""

from __future__ import annotations

from sglang_mla_ext.adapter.compat.table import attributes, function, methods

_BATCH = "model_executor.forward_batch_info.ForwardBatch"
_MHA_BATCH = "model_executor.forward_batch_deepseek_mha_mixin.ForwardBatchDeepSeekMHAMixin"
_HANDLER = "models.deepseek_common.attention_backend_handler"
_FORWARD = "models.deepseek_common.attention_forward_methods"
_BACKEND = "layers.attention.base_attn_backend.AttentionBackend"
_MLA = "models.deepseek_v2.DeepseekV2AttentionMLA"
_POOL = "mem_cache.memory_pool.MLATokenToKVPool"
_CONFIGURATOR = "mem_cache.kv_cache_configurator.KVCacheConfigurator"
_FORWARD_PARAMS = "self q k v layer forward_batch save_kv_cache"

STEP = (
    *function(f"{_BATCH}.init_new", "batch model_runner", "a step's requests"),
    *attributes(
        _BATCH,
        """
        _original_forward_mode batch_size extend_prefix_lens extend_prefix_lens_cpu extend_seq_lens_cpu forward_mode
        num_prefix_chunks out_cache_loc prefix_chunk_len prefix_chunk_starts prefix_chunk_starts_cpu req_pool_indices
        seq_lens
        """,
        "what a step computes",
    ),
    *attributes(_BATCH, "forward_metadata_ready", "running a pass again"),
    *function("model_executor.runner.eager_runner.EagerRunner.execute", "self forward_batch", "the same"),
    *function(
        "model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.execute",
        "self forward_batch",
        "the same",
    ),
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
    *function(f"{_CONFIGURATOR}._profile_available_bytes", "self", "taking our memory out of the KV budget"),
    *function(f"{_CONFIGURATOR}.resolve_max_num_reqs", "self token_capacity", "the size of our page tables"),
    *attributes(
        _CONFIGURATOR,
        "device is_draft_worker kv_cache_dtype model model_config model_dtype server_args use_mla_backend",
        "the size of our buffers; whether the pool is ours",
    ),
    *function(
        "utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.region",
        "self tag",
        "our buffers give way when SGLang sleeps",
    ),
    *attributes("constants", "GPU_MEMORY_TYPE_KV_CACHE", "the same"),
    *attributes(_POOL, "kv_lora_rank start_layer", "latent rows"),
    *function(f"{_POOL}.get_key_buffer", "self layer_id", "latent rows"),
    *attributes(_POOL, "layer_transfer_counter", "waiting for rows that come from the host"),
    *function("mem_cache.memory_pool.unwrap_write_loc", "loc_info", "storing keys"),
)
LAYER = (
    *function(f"{_HANDLER}.AttentionBackendRegistry.register", "backend_name handler_func", "forward methods"),
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
    *function(
        f"{_FORWARD}.forward_mha.DeepseekMHAForwardMixin.forward_normal_prepare",
        "self positions hidden_states forward_batch zero_allocator",
        "queries that are scaled by their positions, with keys per head",
    ),
    *function(
        "models.deepseek_common.utils._get_llama_4_scaling",
        "original_max_position_embeddings scaling_beta positions",
        "queries that are scaled by their positions",
    ),
    *attributes(
        _MLA,
        "kv_lora_rank num_heads num_local_heads qk_nope_head_dim qk_rope_head_dim v_head_dim",
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
BACKENDS = (
    *function(f"{_BACKEND}.init_forward_metadata", "self forward_batch", "our backend's interface"),
    *function(f"{_BACKEND}.init_forward_metadata_out_graph", "self forward_batch in_capture", "the same"),
    *function(f"{_BACKEND}.init_forward_metadata_in_graph", "self forward_batch", "the same"),
    *function(f"{_BACKEND}.init_cuda_graph_state", "self max_bs max_num_tokens", "the same"),
    *methods(_BACKEND, "get_cuda_graph_seq_len_fill_value", "the same"),
    *function(f"{_BACKEND}.forward", _FORWARD_PARAMS, "the same"),
    *function(f"{_BACKEND}.forward_decode", _FORWARD_PARAMS, "the same"),
    *function(f"{_BACKEND}.forward_extend", _FORWARD_PARAMS, "the same"),
)

USED_IN_A_PASS = (*STEP, *POOLS, *LAYER, *BACKENDS)

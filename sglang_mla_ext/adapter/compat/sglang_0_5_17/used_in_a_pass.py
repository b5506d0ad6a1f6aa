"""Contract with SGLang 0.5.17: code that every server uses in a forward pass, of batches, pools, layers and attention
backends."""

from __future__ import annotations

USED_IN_A_PASS = """
a step's requests: model_executor.forward_batch_info.ForwardBatch: init_new(batch, model_runner)
what a step computes
    model_executor.forward_batch_info.ForwardBatch: _original_forward_mode batch_size extend_prefix_lens
        extend_prefix_lens_cpu extend_seq_lens_cpu forward_mode num_prefix_chunks out_cache_loc prefix_chunk_len
        prefix_chunk_starts prefix_chunk_starts_cpu req_pool_indices seq_lens
    model_executor.forward_batch_info.ForwardMode: is_decode(self) is_extend(self) is_idle(self) is_target_verify(self)
running a pass again
    model_executor.forward_batch_info.ForwardBatch: forward_metadata_ready
    model_executor.runner.eager_runner.EagerRunner: execute(self, forward_batch)
    model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner: execute(self, forward_batch)
building the backend
    model_executor.model_runner.ModelRunner: device dtype is_draft_worker kv_cache_dtype memory_saver_adapter model
        model_config req_to_token_pool server_args token_to_kv_pool use_mla_backend
the shadow check: model_executor.model_runner.ModelRunner: forward(self, forward_batch)
what the shadow check reads: model_executor.model_runner.ModelRunner: war_fastpath_read_done_event
SGLang's chunks start where expanded prefixes end
    model_executor.forward_batch_deepseek_mha_mixin.ForwardBatchDeepSeekMHAMixin:
        prepare_chunked_prefix_cache_info(self, device) prepare_chunked_kv_indices(self, device)
slots of a request's tokens: mem_cache.memory_pool.ReqToTokenPool: req_to_token size
taking our memory out of the KV budget
    mem_cache.kv_cache_configurator.KVCacheConfigurator: _profile_available_bytes(self)
the size of our page tables
    mem_cache.kv_cache_configurator.KVCacheConfigurator: resolve_max_num_reqs(self, token_capacity)
the size of our buffers; whether the pool is ours
    mem_cache.kv_cache_configurator.KVCacheConfigurator: device is_draft_worker kv_cache_dtype model model_config
        model_dtype server_args use_mla_backend
our buffers give way when SGLang sleeps
    utils.torch_memory_saver_adapter.TorchMemorySaverAdapter: region(self, tag)
    constants: GPU_MEMORY_TYPE_KV_CACHE
latent rows: mem_cache.memory_pool.MLATokenToKVPool: kv_lora_rank start_layer get_key_buffer(self, layer_id)
waiting for rows that come from the host: mem_cache.memory_pool.MLATokenToKVPool: layer_transfer_counter
storing keys: mem_cache.memory_pool: unwrap_write_loc(loc_info)
forward methods
    models.deepseek_common.attention_backend_handler.AttentionBackendRegistry: register(backend_name, handler_func)
prefill over expanded prefixes; on a CPU
    models.deepseek_common.attention_backend_handler.AttnForwardMethod: MHA_CHUNKED_KV MLA
no such prefill inside a graph
    models.deepseek_common.attention_backend_handler: is_in_tc_piecewise_cuda_graph() is_in_breakable_cuda_graph()
the query before it is absorbed
    models.deepseek_common.attention_forward_methods.forward_mla.DeepseekMLAForwardMixin:
        _split_q_nope_pe(self, q, latent_cache)
query and key in two parts: forward_absorb_core gives q_rope and k_rope to backends in this list
    models.deepseek_common.attention_forward_methods.forward_mla: FORWARD_ABSORB_CORE_ATTENTION_BACKENDS[]
prefill over expanded prefixes
    models.deepseek_common.attention_forward_methods.forward_mha.DeepseekMHAForwardMixin:
        _chunked_prefix_attn_mha(self, q, accum_output, accum_lse, forward_batch)
queries that are scaled by their positions, with keys per head
    models.deepseek_common.attention_forward_methods.forward_mha.DeepseekMHAForwardMixin:
        forward_normal_prepare(self, positions, hidden_states, forward_batch, zero_allocator)
queries that are scaled by their positions
    models.deepseek_common.utils: _get_llama_4_scaling(original_max_position_embeddings, scaling_beta, positions)
the layer's dimensions
    models.deepseek_v2.DeepseekV2AttentionMLA: kv_lora_rank num_heads num_local_heads qk_nope_head_dim qk_rope_head_dim
        v_head_dim
the layer's id and scale: models.deepseek_v2.DeepseekV2AttentionMLA: attn_mha attn_mqa
expanding a prefix
    models.deepseek_v2.DeepseekV2AttentionMLA: kv_a_layernorm kv_b_proj use_deep_gemm_bmm w_kc w_scale w_vc
merging the shared part: models.deepseek_v2.DeepseekV2AttentionMLA: o_proj
prefill with keys per head: models.deepseek_v2.DeepseekV2AttentionMLA: chunked_prefix_cache_threshold
the layer's dimensions, id and scale
    layers.radix_attention.RadixAttention: head_dim layer_id qk_head_dim scaling tp_q_head_num v_head_dim
our backend's interface
    layers.attention.base_attn_backend.AttentionBackend: init_forward_metadata(self, forward_batch)
        init_forward_metadata_out_graph(self, forward_batch, in_capture)
        init_forward_metadata_in_graph(self, forward_batch) init_cuda_graph_state(self, max_bs, max_num_tokens)
        get_cuda_graph_seq_len_fill_value(self) forward(self, q, k, v, layer, forward_batch, save_kv_cache)
        forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache)
        forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache)
"""

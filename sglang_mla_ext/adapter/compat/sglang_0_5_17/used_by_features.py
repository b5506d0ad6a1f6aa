"""Contract with SGLang 0.5.17: code that only some servers use, by the feature that they are asked for."""

from __future__ import annotations

from sglang_mla_ext.adapter.compat.table import Feature

USED_BY_FEATURES = {
    Feature.GPU: """
        the stock backend
            layers.attention.flashmla_backend.FlashMLABackend: __init__(self, model_runner)
                init_forward_metadata(self, forward_batch)
                init_forward_metadata_out_graph(self, forward_batch, in_capture)
                forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache)
                forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache) max_context_len req_to_token_pool
                token_to_kv_pool
        whether prefill with keys per head has an lse
            layers.attention.flashmla_backend.FlashMLABackend: enable_chunk_kv
        what an idle rank makes a schedule for: layers.attention.flashmla_backend.FlashMLABackend: is_fp8_kvcache
        absorb in prefill is planned when it is run
            layers.attention.flashmla_backend.FlashMLABackend: prefill_wrapper_paged
        absorb in prefill over tails: layers.attention.flashmla_backend.FlashMLABackend: workspace_buffer
        FlashMLA's choice of a forward method
            models.deepseek_common.attention_backend_handler.AttentionBackendRegistry: get_handler(backend_name)
        FlashMLA's schedule for private tails
            sgl_kernel.flash_mla: get_mla_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k)
        FlashMLA over private tails
            sgl_kernel.flash_mla: flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v,
                tile_scheduler_metadata, num_splits, *, softmax_scale, causal)
    """,
    Feature.CPU: """
        rows without a graph: model_executor.cuda_graph_buffer_registry: build_eager_registry(*, max_bs)
        the stock backend
            layers.attention.torch_native_backend.TorchNativeAttnBackend: __init__(self, model_runner)
                init_forward_metadata(self, forward_batch)
                forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache)
                forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache)
        its attention of new tokens
            layers.attention.torch_native_backend.TorchNativeAttnBackend: _run_sdpa_forward_extend(self, query, output,
                k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens,
                encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size) req_to_token_pool
                token_to_kv_pool
        torch code beside our backend: utils.common: support_triton(backend)
        LongCat-Flash
            runtime_context: get_stream(name)
            sglang.kernels.ops.moe.ep_moe_kernels: zero_experts_compute_triton(expert_indices, expert_scales,
                num_experts, zero_expert_type, hidden_states)
        grammars
            constrained.xgrammar_backend: _allocate_token_bitmask(vocab_size, batch_size)
            constrained.xgrammar_backend.XGrammarGrammar: apply_vocab_mask(self, logits, vocab_mask)
        a host cache
            mem_cache.pool_host.base.HostKVCache: __init__(self)
            mem_cache.pool_host.mla: ALLOC_MEMORY_FUNCS
        an FP8 cache: mem_cache.kv_cache_configurator.KVCacheConfigurator: configure(self)
        DP attention
            model_executor.forward_batch_info.ForwardBatch: prepare_mlp_sync_batch(self, model_runner)
            layers.dp_attention: memcpy_triton(dst, src, dim, offset, sz, offset_src)
            distributed.parallel_state.GroupCoordinator: all_gather_into_tensor(self, output, input)
                _all_gather_into_tensor(self, output, input) reduce_scatter_tensor(self, output, input)
                _reduce_scatter_tensor(self, output, input)
        speculative decoding
            speculative.draft_utils.DraftBackendFactory:
                _create_backend(self, backend_name, backend_map, error_template) draft_model_runner
                speculative_num_steps
            model_executor.forward_batch_info.ForwardBatch: spec_info
            models.deepseek_v2.DeepseekV2ForCausalLM: set_embed_and_head(self, embed, head)
        NIXL
            disaggregation.nixl.conn.NixlKVManager: __init__(self)
            disaggregation.nixl.conn: _normalize_kv_mem_kinds(kinds, expected_len)
            disaggregation.prefill.SchedulerDisaggregationPrefillMixin: maybe_send_cached_prefix_chunk(self)
    """,
    Feature.LINEAR_ON_CPU: """
        torch in place of kernels
            model_executor.model_runner.ModelRunner: load_model(self)
            layers.attn_residual: _mix_fused(prefix_sum, bank, nvb, score_proj, score_norm)
                aggregate_stream_torch(prefix_sum, bank, nvb, score_proj, score_norm)
            layers.attention.linear.kda_backend: causal_conv1d_fn(x, weight, bias)
            layers.attention.linear.kernels.kda_triton: class TritonKDAKernel
            layers.attention.hybrid_linear_attn_backend: track_mamba_states_all_layers() track_mamba_states_if_needed()
            sglang.kernels.ops.attention.fla.fused_norm_gate.FusedRMSNormGated: forward(self, x, g)
    """,
    Feature.DRAFTS: """
        who verifies how many drafts, and the draft model's backend
            server_args.ServerArgs: decoupled_spec_role enable_multi_layer_eagle speculative_adaptive
                speculative_attention_mode speculative_draft_attention_backend speculative_draft_model_path
                speculative_draft_model_revision speculative_eagle_topk speculative_num_draft_tokens
        the draft model's backend
            server_args.ServerArgs: override(self, source)
            configs.model_config.ModelConfig: from_server_args(server_args, model_path, model_revision, is_draft_model)
                attention_arch
            configs.model_config.AttentionArch: MLA
            layers.attention.attention_registry: ATTENTION_BACKENDS
        unsupported features: environ.Envs: SGLANG_ENABLE_OVERLAP_PLAN_STREAM
        naming the draft model's backends
            speculative.draft_utils.DraftBackendFactory: create_decode_backend(self) create_draft_extend_backend(self)
        their name: speculative.draft_utils.DraftBackendFactory: draft_attn_backend
        those of each step: layers.attention.flashmla_backend.FlashMLAMultiStepDraftBackend: attn_backends[]
    """,
    Feature.SMALL_DRAFTS: """
        drafting layers of any hidden size
            sglang.kernels.ops.layernorm.fused_eh_norm:
                fused_eh_norm(inputs_embeds, previous_hidden, enorm_weight, hnorm_weight, eps)
                is_supported_fused_eh_norm_hidden_size(hidden_size)
    """,
    Feature.HOST_CACHE: """
        how rows are copied, and how they lie there: server_args.ServerArgs: hicache_io_backend hicache_mem_layout
        waiting for rows: managers.cache_controller.LayerDoneCounter: wait_until(self, threshold)
        copies from the host after the step before
            managers.cache_controller.HiCacheController: start_loading(self) load_queue[] load_stream
            managers.scheduler.Scheduler: forward_stream
        rows of the FP8 pool on the host
            mem_cache.pool_host.mla.MLATokenToKVPoolHost: __init__(self, *, override_kv_cache_dim)
    """,
    Feature.DISAGGREGATION: """
        unsupported features
            server_args.ServerArgs: disaggregation_decode_enable_radix_cache disaggregation_transfer_backend
        who has run on a prefill server: managers.scheduler.Scheduler: disagg_prefill_inflight_queue[]
        what a prefill or decode server says of its cache
            disaggregation.common.conn.CommonKVManager: __init__(self, args)
            disaggregation.base.conn.KVArgs: kv_cache_dtype_str
        slots of a request's tokens: disaggregation.decode.DecodeReqToTokenPool: req_to_token size
    """,
    Feature.FP8: """
        unsupported features
            server_args.ServerArgs: flashinfer_mla_disable_ragged hicache_storage_backend quantization_param_path
        our pool in place of SGLang's
            mem_cache.kv_cache_configurator.KVCacheConfigurator: _build_mla_kv_pool(self, max_total_num_tokens)
        our pool in place of SGLang's, beside linear attention
            mem_cache.kv_cache_configurator.KVCacheConfigurator: _build_hybrid_linear_kv_pool(self)
            mem_cache.memory_pool.HybridLinearKVPool: full_kv_pool full_attention_layer_id_mapping
        its size: mem_cache.kv_cache_configurator.KVCacheConfigurator: layer_info pool_page_size
        its layers
            model_executor.model_runner_components.layer_setup.ModelLayerInfo: num_effective_layers start_layer
                end_layer
        the size of a row
            model_executor.pool_configurator.DefaultPoolConfigurator: _compute_cell_size(self, kvc, num_layers)
        the FP8 pool
            mem_cache.memory_pool.MLATokenToKVPool: __init__(self, size, page_size, dtype, kv_lora_rank,
                qk_rope_head_dim, layer_num, device, *, enable_memory_saver, start_layer, end_layer) dtype kv_buffer
                kv_cache_dim qk_rope_head_dim _create_buffers(self)
        storing keys: mem_cache.memory_pool.MLATokenToKVPool: set_kv_buffer(self, layer, loc_info, cache_k, cache_v)
        storing keys in two parts
            mem_cache.memory_pool.MLATokenToKVPool: set_mla_kv_buffer(self, layer, loc, cache_k_nope, cache_k_rope)
        rows as numbers: mem_cache.memory_pool.MLATokenToKVPool: get_mla_kv_buffer(self, layer, loc, dst_dtype)
        there are none as one tensor: mem_cache.memory_pool.MLATokenToKVPool: get_value_buffer(self, layer_id)
        features.enable_memory_saver: runtime_context: get_exec()
    """,
    Feature.MEMORY_SAVER: """
        dropping expansions
            managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager:
                release_memory_occupation(self, recv_req)
        what is in our buffers is lost
            managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager:
                resume_memory_occupation(self, recv_req)
        which memory sleeps: managers.io_struct.ReleaseMemoryOccupationReqInput: tags
        which memory wakes up: managers.io_struct.ResumeMemoryOccupationReqInput: tags
    """,
    Feature.MIXED: """
        rows in place of new tokens: model_executor.model_runner.ModelRunner: _forward_raw(self, forward_batch)
        how many rows fit: model_executor.model_runner.ModelRunner: decode_cuda_graph_runner
        graphs of more rows than requests
            model_executor.runner.base_cuda_graph_runner: get_batch_sizes_to_capture(model_runner, captured_req_width)
        what is not mixed: server_args.ServerArgs: enable_return_routed_experts
        new tokens as rows
            model_executor.forward_batch_info.ForwardMode: DECODE EXTEND
            model_executor.forward_batch_info.ForwardBatch: extend_seq_lens global_forward_mode is_extend_in_batch
                is_prefill_only lora_ids mm_inputs orig_seq_lens positions return_logprob rids seq_lens_cpu
                seq_lens_sum token_ids_logprobs top_logprobs_nums
        whether all ranks agree: distributed.parallel_state: get_attn_tp_group()
        mixed steps where ranks agree on passes
            managers.scheduler_components.dp_attn: prepare_mlp_sync_batch_raw(local_batch, *, disable_cuda_graph)
            managers.scheduler_components.dp_attn.MLPSyncBatchInfo: _get_local_tensor(self) can_run_decode_cuda_graph
                is_extend_in_batch local_forward_mode
            managers.schedule_batch.ScheduleBatch: forward_mode is_extend_in_batch
            managers.scheduler.Scheduler: require_mlp_sync
        logits of last rows
            layers.logits_processor.LogitsMetadata: from_forward_batch(forward_batch) draft_extend_select_index
            model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner: max_bs
        mixing batch by batch
            managers.scheduler.Scheduler: _get_new_batch_prefill_raw(self, *, running_batch) chunked_prefill_size
                chunked_req is_mixed_chunk max_prefill_tokens page_size tp_worker waiting_queue
            managers.schedule_batch.ScheduleBatch: prepare_for_extend(self) is_empty(self)
        how many can be let in: managers.scheduler.Scheduler: get_num_allocatable_reqs(self, running_bs)
        who is let in
            managers.schedule_policy.PrefillAdder: add_one_req(self, req) can_run_list[] rem_chunk_tokens
                rem_input_tokens
            managers.schedule_policy.AddReqResult: OTHER
        drafts are verified with new tokens
            managers.scheduler.Scheduler: run_batch(self, batch) process_batch_result(self, batch, result)
                update_running_batch(self, batch) _apply_war_barrier(self) batch_record_buf enable_overlap result_queue
            managers.schedule_batch.ScheduleBatch: has_grammar out_cache_loc prefill_input_ids_cpu req_pool_indices
            model_executor.forward_batch_info.ForwardBatch: input_ids
        slots that are left for a prompt in pieces
            managers.scheduler.Scheduler: token_to_kv_pool_allocator
            mem_cache.base_prefix_cache.BasePrefixCache: evictable_size(self)
        whether running requests find a place in a mixed batch
            managers.schedule_batch.ScheduleBatch: check_decode_mem(self)
        what is mixed
            managers.schedule_batch.ScheduleBatch: batch_is_full decoding_reqs encoder_lens extend_lens
                extend_logprob_start_lens extend_num_tokens hicache_consumer_index prefix_lens return_hidden_states
                return_logprob seq_lens_cpu
            managers.schedule_batch.Req: host_hit_length is_prefill_only multimodal_inputs return_hidden_states
                return_logprob skip_radix_cache_insert
            model_executor.forward_batch_info.ForwardMode: is_mixed(self)
        last rows: layers.logits_processor.LogitsProcessorOutput: customized_info next_token_logits
        new tokens of a batch: managers.schedule_batch.Req: extend_range
        what is left of a prompt in pieces: managers.schedule_batch.Req: output_ids
        counting what mixed batches decode
            managers.schedule_batch.Req: is_retracted time_stats
            managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor:
                process_batch_result_prefill(self, batch, result) metrics_reporter
            managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter:
                forward_ct_decode num_generated_tokens report_decode_stats(self, can_run_cuda_graph, running_batch)
    """,
    Feature.SHARDED: """
        agreeing on what is sharded
            managers.scheduler_components.dp_attn.MLPSyncBatchInfo: all_gather(self, device, group) global_num_tokens
        queries and results
            distributed.parallel_state.GroupCoordinator: _all_to_all_single(self, output, input) device_group
                rank_in_group ranks
        its graphs: model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner: capture_bs
        what cannot be sharded: server_args.ServerArgs: elastic_ep_backend enable_dp_lm_head moe_dense_tp_size
    """,
    Feature.ROUTING: """
        the rank of a request: server_args.ServerArgs: tokenizer_worker_num
        a request's rank
            managers.tokenizer_manager.TokenizerManager: _dispatch_to_scheduler(self, obj) server_args rid_to_state
            managers.io_struct.TokenizedGenerateReqInput: rid input_ids sampling_params routed_dp_rank extra_key
                lora_id
            managers.io_struct.BatchTokenizedGenerateReqInput: batch
        health checks, which go to each rank in turn: managers.utils: is_health_check_generate_req(recv_req)
    """,
    Feature.STATUS: """
        the server's app, with a key: utils.auth: add_api_key_middleware(app)
        the server's app, without: utils.auth: app_has_admin_force_endpoints(app)
        whom to ask
            entrypoints.http_server: get_global_state()
            entrypoints.http_server._GlobalState: tokenizer_manager
            managers.tokenizer_manager.TokenizerManager: get_internal_state(self)
        /server_info
            managers.scheduler.Scheduler: get_internal_state(self, recv_req)
            managers.io_struct.GetInternalStateReqOutput: internal_state
        which rank it is of
            managers.scheduler.Scheduler: ps
            distributed.parallel_state_wrapper.ParallelState: dp_rank
    """,
    Feature.EXAMINING: """
        arguments as SGLang resolves them: server_args: prepare_server_args(argv)
        our plug-in beside them: plugins: load_plugins()
        how far such a server was run: server_args.ServerArgs: enable_torch_compile ep_size nnodes
        commands for another machine's InfiniBand devices
            server_args.ServerArgs: _validate_ib_devices(self, device_str)
    """,
}

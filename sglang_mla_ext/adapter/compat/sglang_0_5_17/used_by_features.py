"""What SGLang 0.5.17 is used for by some servers only, by the feature that they are asked for."""

from __future__ import annotations

from sglang_mla_ext.adapter.compat.table import Feature, attributes, function, methods, needed_for

_SCHEDULER = "managers.scheduler.Scheduler"
_ARGS = "server_args.ServerArgs"
_WEIGHTS = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_FLASHMLA = "layers.attention.flashmla_backend.FlashMLABackend"
_TORCH = "layers.attention.torch_native_backend.TorchNativeAttnBackend"
_FORWARD_PARAMS = "self q k v layer forward_batch save_kv_cache"
_DRAFTS = "speculative.draft_utils.DraftBackendFactory"
_EH_NORM = "sglang.kernels.ops.layernorm.fused_eh_norm"
_CONFIGURATOR = "mem_cache.kv_cache_configurator.KVCacheConfigurator"
_POOL = "mem_cache.memory_pool.MLATokenToKVPool"
_HOST_CACHE = "managers.cache_controller.HiCacheController"
_TOKENIZER = "managers.tokenizer_manager.TokenizerManager"
_FLASH_MLA = "sgl_kernel.flash_mla"

GPU = needed_for(
    Feature.GPU,
    *function(f"{_FLASHMLA}.__init__", "self model_runner", "the stock backend"),
    *function(f"{_FLASHMLA}.init_forward_metadata", "self forward_batch", "the same"),
    *function(f"{_FLASHMLA}.init_forward_metadata_out_graph", "self forward_batch in_capture", "the same"),
    *function(f"{_FLASHMLA}.forward_decode", _FORWARD_PARAMS, "the same"),
    *function(f"{_FLASHMLA}.forward_extend", _FORWARD_PARAMS, "the same"),
    *attributes(_FLASHMLA, "max_context_len req_to_token_pool token_to_kv_pool", "the same"),
    *attributes(_FLASHMLA, "enable_chunk_kv", "whether prefill with keys per head has an lse"),
    *attributes(_FLASHMLA, "is_fp8_kvcache", "what an idle rank makes a schedule for"),
    *attributes(_FLASHMLA, "prefill_wrapper_paged", "absorb in prefill is planned when it is run"),
    *attributes(_FLASHMLA, "workspace_buffer", "absorb in prefill over tails"),
    *function(
        "models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.get_handler",
        "backend_name",
        "FlashMLA's choice of a forward method",
    ),
    *function(
        f"{_FLASH_MLA}.get_mla_metadata",
        "cache_seqlens num_q_tokens_per_head_k num_heads_k",
        "FlashMLA's schedule for private tails",
    ),
    *function(
        f"{_FLASH_MLA}.flash_mla_with_kvcache",
        "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits",
        "FlashMLA over private tails",
        "softmax_scale causal",
    ),
)
_BATCH = "managers.schedule_batch.ScheduleBatch"
_FORWARD_BATCH = "model_executor.forward_batch_info.ForwardBatch"
_RESULTS = "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_ADDER = "managers.schedule_policy.PrefillAdder"
_REPORTER = "managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"

MIXED = needed_for(
    Feature.MIXED,
    *function(
        "model_executor.model_runner.ModelRunner._forward_raw", "self forward_batch", "rows in place of new tokens"
    ),
    *attributes("model_executor.model_runner.ModelRunner", "decode_cuda_graph_runner", "how many rows fit"),
    *function(
        "model_executor.runner.base_cuda_graph_runner.get_batch_sizes_to_capture",
        "model_runner captured_req_width",
        "graphs of more rows than requests",
    ),
    *attributes(_ARGS, "enable_return_routed_experts", "what is not mixed"),
    *attributes("model_executor.forward_batch_info.ForwardMode", "DECODE EXTEND", "new tokens as rows"),
    *function("distributed.parallel_state.get_attn_tp_group", "", "whether all ranks agree"),
    *function(
        "managers.scheduler_components.dp_attn.prepare_mlp_sync_batch_raw",
        "local_batch",
        "mixed steps where ranks agree on passes",
        "disable_cuda_graph",
    ),
    *function("managers.scheduler_components.dp_attn.MLPSyncBatchInfo._get_local_tensor", "self", "the same"),
    *attributes(
        "managers.scheduler_components.dp_attn.MLPSyncBatchInfo",
        "can_run_decode_cuda_graph is_extend_in_batch local_forward_mode",
        "the same",
    ),
    *attributes(_BATCH, "forward_mode is_extend_in_batch", "the same"),
    *attributes(_SCHEDULER, "require_mlp_sync", "the same"),
    *function("layers.logits_processor.LogitsMetadata.from_forward_batch", "forward_batch", "logits of last rows"),
    *attributes("layers.logits_processor.LogitsMetadata", "draft_extend_select_index", "the same"),
    *attributes("model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner", "max_bs", "the same"),
    *function(f"{_SCHEDULER}._get_new_batch_prefill_raw", "self", "mixing batch by batch", "running_batch"),
    *function(f"{_SCHEDULER}.get_num_allocatable_reqs", "self running_bs", "how many can be let in"),
    *function(f"{_ADDER}.add_one_req", "self req", "who is let in"),
    *attributes(_ADDER, "can_run_list", "the same", "list"),
    *attributes(_ADDER, "rem_chunk_tokens", "the same"),
    *attributes("managers.schedule_policy.AddReqResult", "OTHER", "the same"),
    *function(f"{_SCHEDULER}.run_batch", "self batch", "drafts are verified with new tokens"),
    *function(f"{_SCHEDULER}.process_batch_result", "self batch result", "the same"),
    *function(f"{_SCHEDULER}.update_running_batch", "self batch", "the same"),
    *function(f"{_SCHEDULER}._apply_war_barrier", "self", "the same"),
    *attributes(_SCHEDULER, "batch_record_buf enable_overlap", "the same"),
    *attributes(_BATCH, "has_grammar out_cache_loc prefill_input_ids_cpu req_pool_indices", "the same"),
    *attributes(_FORWARD_BATCH, "input_ids", "the same"),
    *attributes(
        _SCHEDULER,
        "chunked_prefill_size chunked_req is_mixed_chunk page_size tp_worker waiting_queue",
        "mixing batch by batch",
    ),
    *attributes(
        "managers.scheduler.Scheduler", "token_to_kv_pool_allocator", "slots that are left for a prompt in pieces"
    ),
    *methods("mem_cache.base_prefix_cache.BasePrefixCache", "evictable_size", "the same"),
    *methods(_BATCH, "prepare_for_extend is_empty", "the same"),
    *function(f"{_BATCH}.check_decode_mem", "self", "whether running requests find a place in a mixed batch"),
    *attributes(
        _BATCH,
        """
        batch_is_full decoding_reqs encoder_lens extend_lens extend_logprob_start_lens extend_num_tokens
        hicache_consumer_index prefix_lens return_hidden_states return_logprob seq_lens_cpu
        """,
        "what is mixed",
    ),
    *attributes(
        "managers.schedule_batch.Req",
        """
        host_hit_length is_prefill_only multimodal_inputs return_hidden_states return_logprob skip_radix_cache_insert
        """,
        "the same",
    ),
    *attributes("layers.logits_processor.LogitsProcessorOutput", "customized_info next_token_logits", "last rows"),
    *attributes(
        _FORWARD_BATCH,
        """
        extend_seq_lens global_forward_mode is_extend_in_batch is_prefill_only lora_ids mm_inputs orig_seq_lens
        positions return_logprob rids seq_lens_cpu seq_lens_sum token_ids_logprobs top_logprobs_nums
        """,
        "new tokens as rows",
    ),
    *methods("model_executor.forward_batch_info.ForwardMode", "is_mixed", "what is mixed"),
    *attributes("managers.schedule_batch.Req", "output_ids", "what is left of a prompt in pieces"),
    *attributes("managers.schedule_batch.Req", "is_retracted time_stats", "counting what mixed batches decode"),
    *function(f"{_RESULTS}.process_batch_result_prefill", "self batch result", "counting what mixed batches decode"),
    *attributes(_RESULTS, "metrics_reporter", "the same"),
    *attributes(_REPORTER, "forward_ct_decode num_generated_tokens", "the same"),
    *function(f"{_REPORTER}.report_decode_stats", "self can_run_cuda_graph running_batch", "the same"),
)
_GROUP = "distributed.parallel_state.GroupCoordinator"
_SYNC_INFO = "managers.scheduler_components.dp_attn.MLPSyncBatchInfo"
SHARDED = needed_for(
    Feature.SHARDED,
    *function(f"{_SYNC_INFO}.all_gather", "self device group", "agreeing on what is sharded"),
    *attributes(_SYNC_INFO, "global_num_tokens", "the same"),
    *function(f"{_GROUP}._all_to_all_single", "self output input", "queries and results"),
    *attributes(_GROUP, "device_group rank_in_group ranks", "the same"),
    *attributes("model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner", "capture_bs", "its graphs"),
    *attributes("managers.schedule_batch.Req", "extra_key", "names of prompts"),
    *attributes(_ARGS, "elastic_ep_backend enable_dp_lm_head moe_dense_tp_size", "what cannot be sharded"),
)
CPU = needed_for(
    Feature.CPU,
    *function("model_executor.cuda_graph_buffer_registry.build_eager_registry", "", "rows without a graph", "max_bs"),
    *function(f"{_TORCH}.__init__", "self model_runner", "the stock backend"),
    *function(f"{_TORCH}.init_forward_metadata", "self forward_batch", "the same"),
    *function(f"{_TORCH}.forward_decode", _FORWARD_PARAMS, "the same"),
    *function(f"{_TORCH}.forward_extend", _FORWARD_PARAMS, "the same"),
    *function(
        f"{_TORCH}._run_sdpa_forward_extend",
        "self query output k_cache v_cache req_to_token req_pool_indices seq_lens extend_prefix_lens extend_seq_lens "
        "encoder_lens scaling enable_gqa causal is_cross_attn sliding_window_size",
        "its attention of new tokens",
    ),
    *attributes(_TORCH, "req_to_token_pool token_to_kv_pool", "the same"),
    *function("utils.common.support_triton", "backend", "torch code beside our backend"),
    *function("runtime_context.get_stream", "name", "LongCat-Flash"),
    *function(
        "sglang.kernels.ops.moe.ep_moe_kernels.zero_experts_compute_triton",
        "expert_indices expert_scales num_experts zero_expert_type hidden_states",
        "the same",
    ),
    *function("constrained.xgrammar_backend._allocate_token_bitmask", "vocab_size batch_size", "grammars"),
    *function("constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask", "self logits vocab_mask", "the same"),
    *function("mem_cache.pool_host.base.HostKVCache.__init__", "self", "a host cache"),
    *attributes("mem_cache.pool_host.mla", "ALLOC_MEMORY_FUNCS", "the same"),
    *function(f"{_CONFIGURATOR}.configure", "self", "an FP8 cache"),
    *function(
        "model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch", "self model_runner", "DP attention"
    ),
    *function("layers.dp_attention.memcpy_triton", "dst src dim offset sz offset_src", "the same"),
    *(
        use
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor")
        for of in (name, f"_{name}")
        for use in function(f"distributed.parallel_state.GroupCoordinator.{of}", "self output input", "the same")
    ),
    *function(
        "speculative.draft_utils.DraftBackendFactory._create_backend",
        "self backend_name backend_map error_template",
        "speculative decoding",
    ),
    *attributes(
        "speculative.draft_utils.DraftBackendFactory",
        "draft_model_runner speculative_num_steps",
        "the same",
    ),
    *attributes(_FORWARD_BATCH, "spec_info", "the same"),
    *function("models.deepseek_v2.DeepseekV2ForCausalLM.set_embed_and_head", "self embed head", "the same"),
    *function("disaggregation.nixl.conn.NixlKVManager.__init__", "self", "NIXL"),
    *function("disaggregation.nixl.conn._normalize_kv_mem_kinds", "kinds expected_len", "the same"),
    *function(
        "disaggregation.prefill.SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk", "self", "the same"
    ),
)
DRAFTS = needed_for(
    Feature.DRAFTS,
    *attributes(
        _ARGS,
        """
        decoupled_spec_role enable_multi_layer_eagle speculative_adaptive speculative_attention_mode
        speculative_draft_attention_backend speculative_draft_model_path speculative_draft_model_revision
        speculative_eagle_topk speculative_num_draft_tokens
        """,
        "who verifies how many drafts, and the draft model's backend",
    ),
    *function(f"{_ARGS}.override", "self source", "the draft model's backend"),
    *function(
        "configs.model_config.ModelConfig.from_server_args",
        "server_args model_path model_revision is_draft_model",
        "the draft model's backend",
    ),
    *attributes("configs.model_config.ModelConfig", "attention_arch", "the draft model's backend"),
    *attributes("configs.model_config.AttentionArch", "MLA", "the draft model's backend"),
    *attributes("environ.Envs", "SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "unsupported features"),
    *methods(_DRAFTS, "create_decode_backend create_draft_extend_backend", "naming the draft model's backends"),
    *attributes(_DRAFTS, "draft_attn_backend", "their name"),
    *attributes(
        "layers.attention.flashmla_backend.FlashMLAMultiStepDraftBackend", "attn_backends", "those of each step", "list"
    ),
    *attributes("layers.attention.attention_registry", "ATTENTION_BACKENDS", "the draft model's backend"),
)
LINEAR_ON_CPU = needed_for(
    Feature.LINEAR_ON_CPU,
    *function("model_executor.model_runner.ModelRunner.load_model", "self", "torch in place of kernels"),
    *function("layers.attn_residual._mix_fused", "prefix_sum bank nvb score_proj score_norm", "the same"),
    *function("layers.attn_residual.aggregate_stream_torch", "prefix_sum bank nvb score_proj score_norm", "the same"),
    *function("layers.attention.linear.kda_backend.causal_conv1d_fn", "x weight bias", "the same"),
    *attributes("layers.attention.linear.kernels.kda_triton", "TritonKDAKernel", "the same", kind="class"),
    *function("layers.attention.hybrid_linear_attn_backend.track_mamba_states_all_layers", "", "the same"),
    *function("layers.attention.hybrid_linear_attn_backend.track_mamba_states_if_needed", "", "the same"),
    *function("sglang.kernels.ops.attention.fla.fused_norm_gate.FusedRMSNormGated.forward", "self x g", "the same"),
)
SMALL_DRAFTS = needed_for(
    Feature.SMALL_DRAFTS,
    *function(
        f"{_EH_NORM}.fused_eh_norm",
        "inputs_embeds previous_hidden enorm_weight hnorm_weight eps",
        "drafting layers of any hidden size",
    ),
    *function(f"{_EH_NORM}.is_supported_fused_eh_norm_hidden_size", "hidden_size", "the same"),
)
HOST_CACHE = needed_for(
    Feature.HOST_CACHE,
    *attributes(_ARGS, "hicache_io_backend hicache_mem_layout", "how rows are copied, and how they lie there"),
    *function("managers.cache_controller.LayerDoneCounter.wait_until", "self threshold", "waiting for rows"),
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
)
DISAGGREGATION = needed_for(
    Feature.DISAGGREGATION,
    *attributes(
        _ARGS, "disaggregation_decode_enable_radix_cache disaggregation_transfer_backend", "unsupported features"
    ),
    *attributes(_SCHEDULER, "disagg_prefill_inflight_queue", "who has run on a prefill server", "list"),
    *function(
        "disaggregation.common.conn.CommonKVManager.__init__",
        "self args",
        "what a prefill or decode server says of its cache",
    ),
    *attributes("disaggregation.base.conn.KVArgs", "kv_cache_dtype_str", "the same"),
    *attributes("disaggregation.decode.DecodeReqToTokenPool", "req_to_token size", "slots of a request's tokens"),
)
FP8 = needed_for(
    Feature.FP8,
    *attributes(
        _ARGS,
        "flashinfer_mla_disable_ragged hicache_storage_backend quantization_param_path",
        "unsupported features",
    ),
    *function(f"{_CONFIGURATOR}._build_mla_kv_pool", "self max_total_num_tokens", "our pool in place of SGLang's"),
    *function(f"{_CONFIGURATOR}._build_hybrid_linear_kv_pool", "self", "the same beside linear attention"),
    *attributes("mem_cache.memory_pool.HybridLinearKVPool", "full_kv_pool full_attention_layer_id_mapping", "the same"),
    *attributes(_CONFIGURATOR, "layer_info pool_page_size", "its size"),
    *attributes(
        "model_executor.model_runner_components.layer_setup.ModelLayerInfo",
        "num_effective_layers start_layer end_layer",
        "its layers",
    ),
    *function(
        "model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        "self kvc num_layers",
        "the size of a row",
    ),
    *function(
        f"{_POOL}.__init__",
        "self size page_size dtype kv_lora_rank qk_rope_head_dim layer_num device",
        "the FP8 pool",
        "enable_memory_saver start_layer end_layer",
    ),
    *attributes(_POOL, "dtype kv_buffer kv_cache_dim qk_rope_head_dim", "the FP8 pool"),
    *function(f"{_POOL}._create_buffers", "self", "the FP8 pool"),
    *function(f"{_POOL}.set_kv_buffer", "self layer loc_info cache_k cache_v", "storing keys"),
    *function(f"{_POOL}.set_mla_kv_buffer", "self layer loc cache_k_nope cache_k_rope", "storing keys in two parts"),
    *function(f"{_POOL}.get_mla_kv_buffer", "self layer loc dst_dtype", "rows as numbers"),
    *function(f"{_POOL}.get_value_buffer", "self layer_id", "there are none as one tensor"),
    *function("runtime_context.get_exec", "", "features.enable_memory_saver"),
)
MEMORY_SAVER = needed_for(
    Feature.MEMORY_SAVER,
    *function(f"{_WEIGHTS}.release_memory_occupation", "self recv_req", "dropping expansions"),
    *function(f"{_WEIGHTS}.resume_memory_occupation", "self recv_req", "what is in our buffers is lost"),
    *attributes("managers.io_struct.ReleaseMemoryOccupationReqInput", "tags", "which memory sleeps"),
    *attributes("managers.io_struct.ResumeMemoryOccupationReqInput", "tags", "which memory wakes up"),
)
ROUTING = needed_for(
    Feature.ROUTING,
    *attributes(_ARGS, "tokenizer_worker_num", "the rank of a request"),
    *function(f"{_TOKENIZER}._dispatch_to_scheduler", "self obj", "a request's rank"),
    *attributes(_TOKENIZER, "server_args rid_to_state", "a request's rank"),
    *attributes(
        "managers.io_struct.TokenizedGenerateReqInput",
        "rid input_ids sampling_params routed_dp_rank extra_key lora_id",
        "a request's rank",
    ),
    *attributes("managers.io_struct.BatchTokenizedGenerateReqInput", "batch", "a request's rank"),
)
STATUS = needed_for(
    Feature.STATUS,
    *function("utils.auth.add_api_key_middleware", "app", "the server's app, with a key"),
    *function("utils.auth.app_has_admin_force_endpoints", "app", "the server's app, without"),
    *function("entrypoints.http_server.get_global_state", "", "whom to ask"),
    *attributes("entrypoints.http_server._GlobalState", "tokenizer_manager", "the same"),
    *methods(_TOKENIZER, "get_internal_state", "the same"),
    *function(f"{_SCHEDULER}.get_internal_state", "self recv_req", "/server_info"),
    *attributes("managers.io_struct.GetInternalStateReqOutput", "internal_state", "/server_info"),
)
EXAMINING = needed_for(
    Feature.EXAMINING,
    *function("server_args.prepare_server_args", "argv", "arguments as SGLang resolves them"),
    *function("plugins.load_plugins", "", "our plug-in beside them"),
    *attributes(_ARGS, "enable_torch_compile ep_size nnodes", "how far such a server was run"),
    *function(f"{_ARGS}._validate_ib_devices", "self device_str", "commands for another machine's InfiniBand devices"),
)

USED_BY_FEATURES = (
    *(*GPU, *CPU, *LINEAR_ON_CPU, *DRAFTS, *SMALL_DRAFTS, *HOST_CACHE, *DISAGGREGATION),
    *(*FP8, *MEMORY_SAVER, *MIXED, *SHARDED, *ROUTING, *STATUS, *EXAMINING),
)

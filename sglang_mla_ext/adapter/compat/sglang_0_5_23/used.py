"""Contract with SGLang 0.5.23, where it differs from that with 0.5.17. Layers with MLA beside linear attention keep the
numbers that they have in the model."""

from __future__ import annotations

from sglang_mla_ext.adapter.compat.table import Changes, Feature, Read

USES = {
    Feature.EXAMINING: """
        another machine's devices: arg_groups.validation_hook: validate_ib_devices(device_str)
    """,
    Feature.BASE: """
        page size; unsupported features: server_args.ServerArgs: resolve_once(self)
        whether they are resolved: server_args.ServerArgs: _resolution_finished
        arguments as they were decided on: arg_groups.overrides: class ResolvedView resolved_view(server_args)
        is the backend asked for: arg_groups.overrides: attention_backends_of(cfg)
        unsupported models: arg_groups.overrides: use_mla_backend(server_args) model_config_of(server_args)
        unsupported features
            server_args.ServerArgs: enable_unified_cache_external_linker enable_layernorm_sp enable_kv_cache_sharding
                enable_nvidia_megakernel enable_pd_role_switch disaggregation_decode_retraction_backup
            environ.Envs: SGLANG_ENABLE_METADATA_GLUE_GRAPH
        whether there is DP attention: server_args.ServerArgs: attn_dp_size
        tokens of a prefill pass: server_args.ServerArgs: chunked_prefill_size max_prefill_tokens
        the backend's name: server_args: add_attention_backend_choices
        prefill over a prefix: server_args: add_chunked_prefix_cache_attention_backend
        SGLang's chunks start where expanded prefixes end
            model_executor.forward_batch_deepseek_mha_mixin.ForwardBatchDeepSeekMHAMixin:
                prepare_chunked_prefix_cache_info(self, device, *, pack_all_prefix_chunks, single_chunk,
                dense_metadata)
        dropping expansions
            managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager:
                end_weight_update(self, recv_req)
        which prompts are alike: managers.schedule_batch.Req: cache_salt
        what the shadow check reads: model_executor.model_runner.ModelRunner: shared_read_done_event
        slots of a request
            managers.schedule_batch.Req: kv
            managers.schedule_batch.ReqKvInfo: req_pool_idx
        latent rows beside linear attention: mem_cache.memory_pool.HybridLinearKVPool: get_key_buffer(self, layer_id)
        storing keys in two parts
            mem_cache.memory_pool.HybridLinearKVPool:
                set_mla_kv_buffer(self, layer, loc_info, cache_k_nope, cache_k_rope)
        waiting for rows that come from the host: mem_cache.memory_pool.HybridLinearKVPool: layer_transfer_counter
        the radix tree: mem_cache.unified_radix_cache.UnifiedRadixCache: tree_core
        is there a radix tree: mem_cache.unified_radix_cache.UnifiedRadixCache: disable
        paths
            mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface:
                collect_path_info(self, end_node_ids)
            mem_cache.unified_cache.unified_tree_core_interface.TreePathNodeInfo: node_id path_end num_children
        whether a node is there
            mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface: is_root(self, node_id)
        slots of a path
            mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface:
                root_node_handle(self) collect_full_device_indices(self, from_node_id, until_node_id)
    """,
    Feature.DRAFTS: """
        the draft model's backend: arg_groups.overrides: declare_resolution(server_args, source)
    """,
    Feature.FP8: """
        storing keys in two parts
            mem_cache.memory_pool.MLATokenToKVPool:
                set_mla_kv_buffer(self, layer, loc_info, cache_k_nope, cache_k_rope)
        our pool in place of SGLang's
            mem_cache.kv_cache_configurator.KVCacheConfigurator:
                _build_mla_kv_pool(self, max_total_num_tokens, mla_pool_class)
        our pool in place of SGLang's, beside linear attention
            mem_cache.kv_cache_configurator.KVCacheConfigurator: _build_hybrid_linear_kv_pool(self, *, mla_pool_class)
    """,
    Feature.MIXED: """
        new tokens of a batch: managers.schedule_batch.Req: extend_len
        counting what mixed batches decode
            managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter:
                report_decode_stats(self, can_run_cuda_graph, running_batch, num_generated_tokens)
    """,
    Feature.ROUTING: """
        a request's rank: managers.io_struct.TokenizedGenerateReqInput: cache_salt
    """,
    Feature.PREFILL_GRAPH: """
        attention between two segments of a prefill graph
            layers.radix_attention.RadixAttention: _eager_attention(self, q, k, v, output, save_kv_cache)
        slots of tails
            mem_cache.kv_index_translator.KVIndexTranslator:
                pack_read_stream(self, plan, *, req_pool_indices, seq_lens, indptr, out, kv_start_idx)
            model_executor.forward_batch_info.ForwardBatch: kv_loc_plan
        rows of prefill graphs: model_executor.cuda_graph_config.PhaseConfig: bs
    """,
    Feature.PAIRED: """
        verify steps with new tokens
            managers.scheduler.Scheduler: running_batch
            managers.schedule_batch.ScheduleBatch: copy(self)
            model_executor.forward_batch_info.ForwardBatch:
                _init_num_token_non_padded(self, *, device, is_draft_worker)
            layers.logits_processor.LogitsProcessorOutput: hidden_states
            model_executor.model_runner.ModelRunnerOutput: logits_output
            server_args.ServerArgs: speculative_eagle_topk
            environ.Envs: SGLANG_ENABLE_OVERLAP_PLAN_STREAM
        the draft over new tokens of verify steps
            speculative.base_spec_worker.BaseSpecWorker: draft_worker
            speculative.eagle_worker_v2.EagleDraftWorker:
                _draft_extend_for_prefill(self, batch, target_hidden_states, next_token_ids)
                _draft_extend_for_decode(self, batch, batch_result)
            speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner:
                execute(self, forward_batch, select_index) can_run_graph(self, forward_batch) max_bs
            model_executor.forward_batch_info.ForwardBatch: capture_hidden_mode mm_input_embeds
            model_executor.model_runner.ModelRunner: kv_index_translator
            speculative.eagle_info.EagleDraftExtendInput: hidden_states num_accept_tokens num_correct_drafts
                num_tokens_per_req dsa_seed_topk_capture
            mem_cache.kv_index_translator.KVIndexTranslator: own_plan(self, forward_batch)
            mem_cache.kv_loc_plan.KVLocPlan: bind(self, batch, reader)
    """,
    Feature.GRAPH_VARIANTS: """
        their attention
            layers.attention.flashattention_backend.FlashAttentionBackend: __init__(self, model_runner)
                init_cuda_graph_state(self, max_bs, max_num_tokens)
                init_forward_metadata_out_graph(self, forward_batch, in_capture)
                init_forward_metadata_in_graph(self, forward_batch)
                forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache, q_rope)
                forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache, q_rope) device forward_metadata
                num_splits page_size token_to_kv_pool
            layers.attention.flashattention_backend.FlashAttentionMetadata: cache_seqlens_int32 cu_seqlens_q
                max_seq_len_q page_table
            sglang.kernels.ops.attention.flash_attention: flash_attn_with_kvcache(q, k_cache, v_cache, *, qv,
                cache_seqlens, cache_leftpad, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, num_splits,
                ver)
        their capture and choice
            model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner:
                capture(self) attention_graph_variants model_runner
                _resolve_attention_variant(self, forward_batch, capture_batch_size)
            layers.attention.graph_variants.AttentionGraphVariants: select(self, forward_batch) capture_labels
            model_executor.runner_utils.capture_mode: get_capture_attention_variant()
    """,
    Feature.STATUS: """
        which rank it is of: runtime_context: get_parallel()
    """,
    Feature.LINEAR_ON_CPU: """
        states are kept for the tree while passes overlap
            arg_groups.mamba_hook: _platform_supports_mamba_cache_extra_buffer()
    """,
}

CHANGES = Changes(
    uses=USES,
    renamed={"sgl_kernel.flash_mla": "sglang.kernels.ops.attention.flash_mla_interface"},
    gone=(
        "server_args.ServerArgs.__post_init__",
        "server_args.ServerArgs.get_attention_backends",
        "server_args.ServerArgs.use_mla_backend",
        "server_args.ServerArgs.get_model_config",
        "server_args.ServerArgs.override",
        "server_args.ServerArgs._validate_ib_devices",
        "managers.schedule_batch.Req.req_pool_idx",
        "model_executor.model_runner.ModelRunner.war_fastpath_read_done_event",
        "managers.schedule_batch.Req.extend_range",
        "managers.scheduler.Scheduler.ps",
        "distributed.parallel_state_wrapper.ParallelState",
        "mem_cache.radix_cache.RadixCache",
        "mem_cache.radix_cache.TreeNode",
        "mem_cache.radix_cache.RadixKey",
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

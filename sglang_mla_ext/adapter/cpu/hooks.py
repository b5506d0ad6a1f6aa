"""Hooks of SGLang on a machine without a GPU."""

from __future__ import annotations

import os

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.cpu import dp_attention, drafts, extend, host_cache, linear_attention, missing_ops

TORCH = "layers.attention.torch_native_backend.TorchNativeAttnBackend"
GROUP = "distributed.parallel_state.GroupCoordinator"
GRAMMAR = "constrained.xgrammar_backend"
HOST_POOL = "mem_cache.pool_host.base.HostKVCache.__init__"
"""A function that step/hooks.py leaves alone: SGLang applies hooks to a function once, and these come first."""

AROUND = {
    "runtime_context.get_stream": missing_ops.around_get_stream,
    f"{GRAMMAR}._allocate_token_bitmask": missing_ops.around_allocate_bitmask,
    f"{GRAMMAR}.XGrammarGrammar.apply_vocab_mask": missing_ops.around_apply_mask,
    "disaggregation.prefill.SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk": (
        missing_ops.around_early_send
    ),
    "mem_cache.kv_cache_configurator.KVCacheConfigurator.configure": missing_ops.around_configure,
    "model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch": dp_attention.around_sync,
    "layers.dp_attention.memcpy_triton": dp_attention.around_copy,
    f"{GROUP}.all_gather_into_tensor": dp_attention.without_operator("_all_gather_into_tensor"),
    f"{GROUP}.reduce_scatter_tensor": dp_attention.without_operator("_reduce_scatter_tensor"),
    "speculative.draft_utils.DraftBackendFactory._create_backend": drafts.around_create_backend,
    f"{TORCH}.forward_extend": drafts.around_extend,
    "models.deepseek_v2.DeepseekV2ForCausalLM.set_embed_and_head": drafts.around_set_embed_and_head,
    f"{TORCH}._run_sdpa_forward_extend": extend.around_extend,
}


def install() -> None:
    """Register the hooks; SGLang applies them before it builds anything."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # `torch_native` has no other forward method than absorb for MLA models. For a backend that it has no rule for,
    # SGLang takes the Triton backend's, which needs keys per head in prefill.
    AttentionBackendRegistry.register("torch_native", lambda attention, forward_batch: AttnForwardMethod.MLA)
    around = {f"sglang.srt.{target}": hook for target, hook in AROUND.items()}
    around["sglang.kernels.ops.moe.ep_moe_kernels.zero_experts_compute_triton"] = missing_ops.around_zero_experts
    before = {
        "sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__": missing_ops.before_nixl,
        f"sglang.srt.{HOST_POOL}": host_cache.before_host_pool,
    }
    if installed.tree_of_linear_layers is None:  # models with linear attention can be served
        # SGLang copies inputs there in torch, which does not convert them: a server on the CPU has them in float32.
        os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")
        before["sglang.srt.model_executor.model_runner.ModelRunner.load_model"] = linear_attention.before_load
        keeps = "sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer"
        around[keeps] = linear_attention.around_keeps_states
    for kind, hooks in ((HookType.AROUND, around), (HookType.BEFORE, before)):
        for target, hook in hooks.items():
            HookRegistry.register(target, hook, kind)
    HookRegistry.register(f"sglang.srt.{HOST_POOL}", host_cache.after_host_pool, HookType.AFTER)
    # Newer releases ask by the second name where there is no GPU; of SGLang's backends Intel's alone has it.
    AttentionBackend.get_cuda_graph_seq_len_fill_value = dp_attention.padding
    AttentionBackend.get_cpu_graph_seq_len_fill_value = dp_attention.padding

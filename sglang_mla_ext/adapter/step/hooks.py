"""The hooks into SGLang's worker process, as a table.

Those of the start (start.py) may end it, with their message. Those of a running server are methods of the session
(session.py) and of its admission, which SGLang never sees fail. Those inside a layer (layer.py) raise what has the pass
run again (failure.py).

`contract.py` knows what they rely on. SGLang only logs a hook that fails to install, so the backend's factory asks
`assert_installed` for what its server needs before it builds anything.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter import failure
from sglang_mla_ext.adapter.build import start
from sglang_mla_ext.adapter.compat import contract, installed
from sglang_mla_ext.adapter.compat.table import Feature, dotted
from sglang_mla_ext.adapter.cpu import stubs
from sglang_mla_ext.adapter.step import layer, mixed
from sglang_mla_ext.adapter.step.admission import Admission
from sglang_mla_ext.adapter.step.paired import PairedSteps
from sglang_mla_ext.adapter.step.session import Session, process
from sglang_mla_ext.options import HybridMLAOptions

logger = logging.getLogger(__name__)

BEFORE, AFTER, AROUND = "before", "after", "around"
"""SGLang's kinds of hooks: one AFTER gets the result first, one AROUND the original."""

SESSION, ADMISSION, PAIRED, NONE = "session", "admission", "paired", ""
"""First argument of a hook. Without a session, hooks that get it or a part of it do nothing."""
PARTS: dict[str, Callable[[Session], Any]] = {
    SESSION: lambda session: session,
    ADMISSION: lambda session: session.admission,
    PAIRED: lambda session: session.admission.paired,
}


class Hook(NamedTuple):
    """One line of the table.

    Attributes:
        target: what of SGLang it is put on, as the oldest release has it, below `sglang.srt`.
        of, call: a method of the session, of its admission or of the admission's paired steps, or a function that gets
            the session first; or one of the start or of a layer, which gets none.
        feature: what needs it.
        without: the change of SGLang that would make it unnecessary.
    """

    target: str
    kind: str
    of: str
    call: Callable[..., Any]
    feature: Feature
    without: str


def table() -> list[Hook]:
    """Return all hooks of a worker process."""
    from sglang_mla_ext.adapter.latent import pool as latent_pool

    base, mixes, fp8, drafts = Feature.BASE, Feature.MIXED, Feature.FP8, Feature.DRAFTS
    batch, runner, workers = "managers.schedule_batch", "model_executor.runner", "managers.scheduler_components"
    weights = f"{workers}.weight_updater.SchedulerWeightUpdaterManager"
    forward = "models.deepseek_common.attention_forward_methods"
    configurator = "mem_cache.kv_cache_configurator.KVCacheConfigurator"
    scheduler, sync = "managers.scheduler.Scheduler", f"{workers}.dp_attn.MLPSyncBatchInfo"
    observer = "an observer of the scheduler's events"
    seams = "query before absorption and lse as arguments of the attention backend"
    asks = "the attention backend is asked which batches to mix"
    rows = "extend batches that a decode graph replays"
    memory = "an attention backend that reserves memory"
    layout = "an attention backend that brings its pool"
    # fmt: off
    hooks = [
        # the start
        Hook(f"{scheduler}.__init__", AROUND, NONE, start.around_scheduler_init, base, observer),
        Hook(f"{configurator}._profile_available_bytes", AFTER, NONE, start.after_profile_bytes, base, memory),
        Hook(f"{configurator}._build_mla_kv_pool", AROUND, NONE, latent_pool.around_build_mla_pool, fp8, layout),
        Hook(f"{configurator}._build_hybrid_linear_kv_pool",
             AROUND, NONE, latent_pool.around_build_hybrid_pool, fp8, layout),
        Hook("model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
             AFTER, NONE, latent_pool.after_cell_size, fp8, layout),
        Hook("mem_cache.pool_host.mla.MLATokenToKVPoolHost.__init__",
             AROUND, NONE, latent_pool.around_host_pool, Feature.HOST_CACHE, layout),
        Hook("disaggregation.common.conn.CommonKVManager.__init__",
             BEFORE, SESSION, start.before_kv_manager, Feature.DISAGGREGATION, layout),
        Hook(f"{runner}.base_cuda_graph_runner.get_batch_sizes_to_capture",
             AFTER, NONE, start.after_graph_sizes, mixes, rows),
        Hook("model_executor.cuda_graph_buffer_registry.build_eager_registry",
             AROUND, SESSION, start.around_eager_registry, Feature.CPU, rows),
        Hook("speculative.draft_utils.DraftBackendFactory.create_decode_backend",
             AFTER, NONE, installed.name_draft_backend, drafts, "a draft worker that names its backend"),
        Hook("speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend",
             AFTER, NONE, installed.name_draft_backend, drafts, "a draft worker that names its backend"),
        # which batch
        Hook(f"{scheduler}._get_new_batch_prefill_raw", AROUND, ADMISSION, Admission.new_batch, mixes, asks),
        Hook("managers.schedule_policy.PrefillAdder.add_one_req",
             AROUND, ADMISSION, Admission.add_request, mixes, asks),
        Hook(f"{batch}.ScheduleBatch.prepare_for_extend", AFTER, ADMISSION, Admission.prepared, mixes, asks),
        Hook(f"{workers}.dp_attn.prepare_mlp_sync_batch_raw", AROUND, ADMISSION, Admission.sync, mixes, asks),
        Hook(f"{sync}._get_local_tensor", BEFORE, ADMISSION, Admission.cast, mixes, asks),
        Hook(f"{workers}.batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_prefill",
             AFTER, ADMISSION, Admission.count_decoded, mixes, "decode metrics of MIXED batches"),
        Hook(f"{scheduler}.run_batch", AROUND, PAIRED, PairedSteps.run, mixes, rows),
        Hook(f"{scheduler}.process_batch_result", AROUND, PAIRED, PairedSteps.process, mixes, rows),
        # a pass
        Hook("model_executor.forward_batch_info.ForwardBatch.init_new",
             AFTER, SESSION, Session.begin_pass, base, observer),
        Hook("model_executor.model_runner.ModelRunner.forward", AROUND, SESSION, Session.forward, base, observer),
        Hook("model_executor.model_runner.ModelRunner._forward_raw",
             AROUND, SESSION, mixed.around_forward_raw, mixes, rows),
        Hook("layers.logits_processor.LogitsMetadata.from_forward_batch",
             AFTER, SESSION, mixed.select_last_rows, mixes, rows),
        Hook(f"{runner}.eager_runner.EagerRunner.execute",
             AROUND, SESSION, failure.around_pass, base, "a way to retry a pass without a plan"),
        Hook(f"{runner}.prefill_cuda_graph_runner.PrefillCudaGraphRunner.execute",
             AROUND, SESSION, failure.around_pass, base, "a way to retry a pass without a plan"),
        # a layer
        Hook(f"{forward}.forward_mla.DeepseekMLAForwardMixin._split_q_nope_pe",
             AFTER, NONE, layer.after_split_q, base, seams),
        Hook("models.deepseek_common.utils._get_llama_4_scaling", AFTER, NONE, layer.after_query_scaling, base, seams),
        Hook(f"{forward}.forward_mha.DeepseekMHAForwardMixin.forward_normal_prepare",
             AFTER, NONE, layer.after_queries_per_head, base, "scaled queries in prefill with keys per head"),
        Hook("model_executor.forward_batch_deepseek_mha_mixin.ForwardBatchDeepSeekMHAMixin.prepare_chunked_prefix_cache_info",
             AROUND, NONE, layer.around_chunk_info, base, "chunks of cached prefixes that begin behind a given token"),
        Hook(f"{forward}.forward_mha.DeepseekMHAForwardMixin._chunked_prefix_attn_mha",
             AROUND, NONE, layer.around_prefix_attention, base, "a backend's own attention to cached prefixes"),
        Hook("sglang.kernels.ops.layernorm.fused_eh_norm.fused_eh_norm",
             AROUND, NONE, layer.around_eh_norm, Feature.SMALL_DRAFTS, "a fused kernel for all hidden sizes"),
        # what is to be forgotten
        Hook(f"{scheduler}.flush_cache", AFTER, SESSION, Session.flushed, base, observer),
        Hook(f"{weights}._observe_weight_load", AFTER, SESSION, Session.weights_change, base, observer),
        Hook(f"{weights}.release_memory_occupation",
             AFTER, SESSION, Session.memory_released, Feature.MEMORY_SAVER, observer),
        Hook(f"{weights}.resume_memory_occupation",
             AFTER, SESSION, Session.memory_resumed, Feature.MEMORY_SAVER, observer),
        Hook(f"{scheduler}.on_idle", AFTER, SESSION, Session.idle, base, observer),
        # requests and reports
        Hook("managers.utils.validate_input_length", AFTER, SESSION, Session.refuse_empty, base, "the same refusal"),
        Hook(f"{scheduler}.get_internal_state", AFTER, SESSION, Session.report, Feature.STATUS, observer),
        Hook("managers.cache_controller.HiCacheController.start_loading",
             BEFORE, SESSION, Session.before_loading, Feature.HOST_CACHE, "loads that wait for the forward stream"),
    ]
    # fmt: on
    if installed.ends_weight_updates:
        hooks.append(Hook(f"{weights}.end_weight_update", AFTER, SESSION, Session.weights_change, base, observer))
    if installed.has_graph_variants:
        capture = f"{runner}.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture"
        own = "graph variants of the attention backend's own"
        hooks.append(Hook(capture, BEFORE, SESSION, Session.before_capture, Feature.GRAPH_VARIANTS, own))
    if HybridMLAOptions.from_env().prefix_sharding != "off":
        gathered = "words of the attention backend in the exchange before a pass"
        hooks.append(Hook(f"{sync}.all_gather", AFTER, ADMISSION, Admission.gathered, Feature.SHARDED, gathered))
    if stubs.needed():
        from sglang_mla_ext.adapter.stock.torch_native import after_support_triton

        without = "a backend says so itself"
        hooks.append(Hook("utils.common.support_triton", AFTER, NONE, after_support_triton, Feature.CPU, without))
    return hooks


def install() -> None:
    """Register the backend, its forward-method handler and all hooks, and have queries come in parts.

    Called before SGLang builds anything.
    """
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_attention_backend(BACKEND_NAME)(start.create_backend)
    contract.check([Feature.BASE, Feature.CPU if stubs.needed() else Feature.GPU])

    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    AttentionBackendRegistry.register(BACKEND_NAME, layer.forward_method)
    layer.accept_query_parts()
    by_path = {dotted(hook.target): hook for hook in table()}
    for path, (target, feature) in contract.targets(by_path).items():
        hook = by_path[path]
        HookRegistry.register(target, _with_session(hook), HookType(hook.kind))
        start.hooked[target] = feature


def _with_session(hook: Hook) -> Callable[..., Any]:
    """Return the function that SGLang calls."""
    if hook.of == NONE:
        return hook.call
    call, around = hook.call, hook.kind == AROUND
    of = PARTS[hook.of]

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        session = process.session
        if session is None:
            return args[0](*args[1:], **kwargs) if around else None
        return call(of(session), *args, **kwargs)

    return called

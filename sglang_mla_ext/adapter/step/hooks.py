"""The hooks into SGLang's worker process: each a few lines that hand over to the part that does the work.

Those of the start may end it, with their message: a server that does not do what it was told to would lie. Those of a
running server are guarded: what they raise is counted, nothing is shared for a while, and SGLang never sees it. Those
inside a layer raise what has the pass run again (failure.py).

`contract.py` knows what they rely on, and which features need it. SGLang only logs a hook that fails to install, so the
backend's factory asks `assert_installed` for what its server needs before it builds anything.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.compat import contract, installed
from sglang_mla_ext.adapter.compat.table import Feature
from sglang_mla_ext.adapter.launch import features, limits, models
from sglang_mla_ext.adapter.step import budget, failure, hooks_riding, nextn
from sglang_mla_ext.adapter.step.passes import Pass, passes
from sglang_mla_ext.adapter.step.worker import guarded, worker
from sglang_mla_ext.kernels.memory import Memory
from sglang_mla_ext.observe import Metrics
from sglang_mla_ext.options import HybridMLAOptions

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

METRICS_INTERVAL_S = 1.0

ACCEPT_LENGTH = "avg_spec_accept_length"
"""SGLang's name of the tokens that a verify step yields on average for each request."""

_SRT = "sglang.srt"
_WEIGHTS = f"{_SRT}.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_FORWARD = f"{_SRT}.models.deepseek_common.attention_forward_methods"
_hooked: dict[str, Feature] = {}
"""What is hooked, and what needs it."""


def install() -> None:
    """Register the backend, its forward-method handler and all hooks, and have queries come in parts.

    Called before SGLang builds anything.
    """
    import torch
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_attention_backend(BACKEND_NAME)(create_backend)
    contract.check([Feature.BASE, Feature.GPU if torch.cuda.is_available() else Feature.CPU])

    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    from sglang_mla_ext.adapter.latent import pool as latent_pool
    from sglang_mla_ext.adapter.step import layer as mla_layer

    AttentionBackendRegistry.register(BACKEND_NAME, mla_layer.forward_method)
    mla_layer.accept_query_parts()
    after = {
        f"{_SRT}.managers.scheduler.Scheduler.__init__": after_scheduler_init,
        f"{_SRT}.managers.scheduler.Scheduler.flush_cache": after_flush_cache,
        f"{_SRT}.managers.scheduler.Scheduler.on_idle": after_on_idle,
        f"{_SRT}.managers.scheduler.Scheduler.get_internal_state": after_get_internal_state,
        f"{_SRT}.managers.utils.validate_input_length": after_validate_length,
        f"{_WEIGHTS}._observe_weight_load": after_weight_load_begins,
        f"{_WEIGHTS}.release_memory_occupation": after_release_memory,
        f"{_WEIGHTS}.resume_memory_occupation": after_resume_memory,
        f"{_SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes": after_profile_bytes,
        f"{_SRT}.model_executor.forward_batch_info.ForwardBatch.init_new": after_forward_batch,
        f"{_SRT}.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size": (
            latent_pool.after_cell_size
        ),
        f"{_SRT}.managers.schedule_batch.ScheduleBatch.prepare_for_extend": hooks_riding.after_prepare_for_extend,
        f"{_SRT}.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
        ".process_batch_result_prefill": hooks_riding.after_prefill_result,
        f"{_SRT}.layers.logits_processor.LogitsMetadata.from_forward_batch": hooks_riding.after_logits_metadata,
        f"{_SRT}.model_executor.runner.base_cuda_graph_runner.get_batch_sizes_to_capture": (
            hooks_riding.after_graph_sizes
        ),
        f"{_FORWARD}.forward_mla.DeepseekMLAForwardMixin._split_q_nope_pe": mla_layer.after_split_q,
        f"{_SRT}.models.deepseek_common.utils._get_llama_4_scaling": mla_layer.after_query_scaling,
        f"{_FORWARD}.forward_mha.DeepseekMHAForwardMixin.forward_normal_prepare": mla_layer.after_queries_per_head,
        f"{_SRT}.speculative.draft_utils.DraftBackendFactory.create_decode_backend": after_draft_backend,
        f"{_SRT}.speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend": after_draft_backend,
    }
    if HybridMLAOptions.from_env().spread != "off":
        after[f"{_SRT}.managers.scheduler_components.dp_attn.MLPSyncBatchInfo.all_gather"] = (
            hooks_riding.after_sync_gather
        )
    if not torch.cuda.is_available():
        from sglang_mla_ext.adapter.step.stock_torch import after_support_triton

        after[f"{_SRT}.utils.common.support_triton"] = after_support_triton
    before = {
        f"{_SRT}.disaggregation.common.conn.CommonKVManager.__init__": before_kv_manager,
        f"{_SRT}.managers.cache_controller.HiCacheController.start_loading": before_loading,
        f"{_SRT}.managers.scheduler_components.dp_attn.MLPSyncBatchInfo._get_local_tensor": (
            hooks_riding.before_sync_info
        ),
    }
    around = {
        "sglang.kernels.ops.layernorm.fused_eh_norm.fused_eh_norm": nextn.around_eh_norm,
        f"{_SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mla_kv_pool": (
            latent_pool.around_build_mla_pool
        ),
        f"{_SRT}.model_executor.forward_batch_deepseek_mha_mixin"
        ".ForwardBatchDeepSeekMHAMixin.prepare_chunked_prefix_cache_info": mla_layer.around_chunk_info,
        f"{_SRT}.mem_cache.pool_host.mla.MLATokenToKVPoolHost.__init__": latent_pool.around_host_pool,
        f"{_SRT}.managers.scheduler.Scheduler._get_new_batch_prefill_raw": hooks_riding.around_new_batch,
        f"{_SRT}.managers.schedule_policy.PrefillAdder.add_one_req": hooks_riding.around_add_request,
        f"{_SRT}.managers.scheduler_components.dp_attn.prepare_mlp_sync_batch_raw": hooks_riding.around_sync,
        f"{_SRT}.model_executor.cuda_graph_buffer_registry.build_eager_registry": hooks_riding.around_eager_registry,
        f"{_SRT}.model_executor.model_runner.ModelRunner.forward": around_forward,
        f"{_SRT}.model_executor.model_runner.ModelRunner._forward_raw": hooks_riding.around_forward_raw,
        f"{_SRT}.model_executor.runner.eager_runner.EagerRunner.execute": around_pass,
        f"{_SRT}.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.execute": around_pass,
        f"{_FORWARD}.forward_mha.DeepseekMHAForwardMixin._chunked_prefix_attn_mha": mla_layer.around_prefix_attention,
    }
    targets = contract.targets([*before, *after, *around])
    for hooks, kind in ((before, HookType.BEFORE), (after, HookType.AFTER), (around, HookType.AROUND)):
        for path, hook in hooks.items():
            if path in targets:
                target, feature = targets[path]
                HookRegistry.register(target, hook, kind)
                _hooked[target] = feature


def assert_installed(asked: Collection[Feature] = (Feature.BASE,)) -> None:
    """
    Args:
        asked: the features whose hooks are needed.
    Raises:
        ContractError: one is not in place; SGLang's log has the reason.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    contract.check(asked)  # of what SGLang does not have, no hook was registered
    missing = [
        target for target, feature in _hooked.items() if feature in asked and target not in HookRegistry._patched
    ]
    if missing or not _hooked:
        raise contract.ContractError(
            f"--attention-backend {BACKEND_NAME}: hooks are not in place: {', '.join(missing) or 'all of them'}. "
            "The log above says why. Is SGLANG_PLUGINS set to a list without hybrid_mla?"
        )


def create_backend(runner: ModelRunner) -> AttentionBackend:
    """The factory that SGLang calls for `--attention-backend hybrid_mla`: for the model, and for its draft where that
    has no backend of its own."""
    import torch

    assert_installed()
    on_gpu = torch.cuda.is_available()
    fp8 = runner.kv_cache_dtype == torch.float8_e4m3fn  # the checkpoint may ask for it
    if runner.is_draft_worker:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

        return ATTENTION_BACKENDS[limits.draft_backend(runner.use_mla_backend, on_gpu, fp8)](runner)
    limits.check_dtype(runner.dtype)
    assert_installed(features.asked_for(runner.server_args, on_gpu) | ({Feature.FP8} if fp8 else set()))
    if fp8:
        limits.check_fp8_cache(runner.server_args, on_gpu=on_gpu)
    if worker.budget_bytes is None:
        raise contract.ContractError("SGLang built its attention backend before it sized its KV cache")
    from sglang_mla_ext.adapter.step import layer as mla_layer
    from sglang_mla_ext.adapter.step.build import build

    worker.pool = runner.token_to_kv_pool
    worker.memory = Memory(installed.memory_region(runner))
    options = worker.options
    mla_layer.accept_query_parts(not models.scales_queries(runner.server_args))
    # A second time, the states of linear attention would take their tokens twice.
    worker.repeats = installed.linear_layers(runner.server_args) is None
    worker.backend, worker.steps, worker.riding = build(runner, options, worker.budget_bytes, worker.memory)
    if worker.steps.spreading is not None:
        assert_installed([Feature.SPREAD, Feature.RIDING])
    if worker.riding is not None:
        _start_riding(asked=options.mixed_tokens is not None or runner.server_args.enable_mixed_chunk)
    return worker.backend


def _start_riding(asked: bool) -> None:
    """Let new tokens ride, if this SGLang has what that takes; a server runs without where nobody asked for it."""
    from sglang_mla_ext.adapter.step.mixing import Mixing

    try:
        assert_installed([Feature.RIDING])
    except contract.ContractError as error:
        if asked:
            raise
        logger.warning("hybrid_mla: no new tokens ride in decode steps: %s", error)
        worker.riding = None
    else:
        worker.mixing = Mixing(worker.riding)


def after_profile_bytes(available: int, configurator: KVCacheConfigurator, *args: Any, **kwargs: Any) -> int:
    """Take what we allocate out of what SGLang has for its KV cache. A draft model's is sized by the model's."""
    worker.options = budget.with_default(available, configurator, HybridMLAOptions.from_env())
    worker.budget_bytes = budget.reserve(available, configurator, worker.options)
    return available - worker.budget_bytes


def after_scheduler_init(result: None, scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
    worker.scheduler = scheduler
    if worker.steps is None:
        raise contract.ContractError(f"--attention-backend {BACKEND_NAME}: SGLang did not build the backend")
    worker.steps.attach(lambda: installed.TreeView(scheduler.tree_cache))
    if worker.steps.spreading is not None:
        worker.steps.spreading.begin(scheduler.tp_worker.model_runner)
    if worker.riding is not None:
        worker.riding.begin(scheduler.tp_worker.model_runner)
        if scheduler.require_mlp_sync:
            from sglang_mla_ext.adapter.step.voting import Voting

            worker.voting, worker.mixing = Voting(worker.riding), None
    if scheduler.metrics_collector is not None:
        worker.metrics = Metrics(scheduler.metrics_collector.labels)
    logger.info("hybrid_mla: ready; %s", worker.steps.reports.description)


def before_kv_manager(manager: Any, args: Any, *others: Any, **more: Any) -> None:
    """What a prefill or decode server tells its peers of its cache is made of these arguments."""
    from sglang_mla_ext.adapter.latent import pool as latent_pool

    args.kv_cache_dtype_str = latent_pool.dtype_for_peers(args.kv_cache_dtype_str, worker.pool)


@guarded("hearing of a forward pass")
def after_forward_batch(
    forward_batch: Any, cls: type, batch: Any, model_runner: ModelRunner, *args: Any, **kwargs: Any
) -> None:
    passes.end()  # a draft's comes, or the forward pass of the one before never came
    if model_runner.is_draft_worker or worker.steps is None or worker.scheduler is None:
        return
    rides = hooks_riding.rides(batch)
    worker.steps.before_forward(
        forward_batch.forward_mode,
        batch.reqs,
        _other_requests(worker.scheduler),
        forward_batch.extend_prefix_lens_cpu or (),
        forward_batch.extend_seq_lens_cpu or (),
        rides=rides,
        decoding=len(batch.decoding_reqs or ()) if rides else 0,
    )
    if worker.steps.spreading is not None:
        worker.steps.spreading.expand(forward_batch.req_pool_indices)
    _publish_metrics()


def around_forward(
    original: Callable[..., Any], runner: ModelRunner, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """`ModelRunner.forward`: the pass that was chosen runs, and ends with it."""
    if runner.is_draft_worker:
        return original(runner, forward_batch, *args, **kwargs)
    try:
        output = original(runner, forward_batch, *args, **kwargs)
        _launched(passes.now, forward_batch)
        return output
    finally:
        _end()


@guarded("ending a pass")
def _end() -> None:
    passes.end()


@guarded("checking a step")
def _launched(step: Pass, forward_batch: Any) -> None:
    if worker.backend is not None:
        worker.backend.end_step(forward_batch if step.ridden is None else step.ridden)
        if step.ridden is not None:
            worker.steps.counters.count_ride(step.plan, step.rows, step.decoding)


def _other_requests(scheduler: Scheduler) -> list[Req]:
    """Those that hold prefixes beside the requests of a prefill step: they are decoding, or on a prefill server, whose
    rows are on their way to a decode server. All ranks have the same."""
    return [*scheduler.running_batch.reqs, *(getattr(scheduler, "disagg_prefill_inflight_queue", None) or ())]


@guarded("forgetting what was flushed")
def after_flush_cache(success: bool, scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
    if success and worker.steps is not None:
        worker.steps.forget()


@guarded("forgetting what old weights gave")
def after_weight_load_begins(result: Any, *args: Any, **kwargs: Any) -> None:
    if worker.steps is not None:
        worker.steps.weights_change()


@guarded("forgetting what sleeps")
def after_release_memory(result: Any, manager: Any, recv_req: Any) -> None:
    """What is expanded is gone, whether or not SGLang could flush its cache. It does so after the memory is given back,
    so forgetting touches nothing on the device."""
    if worker.steps is not None and installed.gives_kv_memory(recv_req.tags):
        worker.steps.forget()


@guarded("clearing memory after sleep", loses_memory=True)
def after_resume_memory(result: Any, manager: Any, recv_req: Any) -> None:
    """The memory is there again, with any contents."""
    if worker.memory is not None and installed.gives_kv_memory(recv_req.tags):
        worker.memory.clear()


@guarded("looking for an empty prompt", only_shows=True)
def after_validate_length(error: str | None, req: Req, *args: Any, **kwargs: Any) -> str | None:
    """Refuse a prompt of no tokens, as SGLang refuses `"input_ids": []`: it has no row, so SGLang would take its first
    token from the logits of another request's."""
    return error or ("input_ids cannot be empty." if not req.origin_input_ids else None)


@guarded("becoming idle")
def after_on_idle(result: None, scheduler: Scheduler) -> None:
    if worker.steps is not None and scheduler.is_fully_idle():
        worker.steps.idle()
        _publish_metrics()


@guarded("reporting", only_shows=True)
def after_get_internal_state(result: Any, scheduler: Scheduler, recv_req: Any) -> None:
    if worker.steps is not None:
        state, report = result.internal_state, worker.steps.reports.status(worker.steps.pause)
        if ACCEPT_LENGTH in state:
            report[ACCEPT_LENGTH] = state[ACCEPT_LENGTH]
        state[BACKEND_NAME] = report


@guarded("waiting before rows come from the host")
def before_loading(controller: HiCacheController) -> None:
    if worker.scheduler is not None and controller.load_queue:
        installed.wait_before_loading(controller, worker.scheduler.forward_stream)


def around_pass(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    fail = worker.steps.fail if worker.steps is not None and worker.repeats else None
    return failure.around_pass(fail, original, *args, **kwargs)


def after_draft_backend(result: Any, factory: Any) -> None:
    installed.name_draft_backend(result, factory)


@guarded("publishing metrics", only_shows=True)
def _publish_metrics() -> None:
    now = time.monotonic()
    if worker.metrics is not None and worker.steps is not None and now - worker.metrics_time > METRICS_INTERVAL_S:
        worker.metrics_time = now
        shadow = worker.steps.shadow
        worker.metrics.publish(worker.steps.reports.report(), shadow.pop_errors() if shadow is not None else ())

"""Our state in one scheduler process, and the methods that SGLang calls through its hooks (hooks.py).

The backend's factory makes it whole; before that there is none, and the hooks of a running server do nothing. What they
raise is counted, nothing is shared for a while, and SGLang never sees it (`guarded`). Those that call SGLang's own
function guard only what is ours around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.failure import guarded, our_part
from sglang_mla_ext.adapter.step.admission import Admission
from sglang_mla_ext.adapter.step.graph_variants import GraphVariants
from sglang_mla_ext.adapter.step.mixed import MixedRule
from sglang_mla_ext.adapter.step.passes import passes
from sglang_mla_ext.reasons import Fallback

if TYPE_CHECKING:
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_mla_ext.adapter.step.backend import HybridMLABackend
    from sglang_mla_ext.adapter.step.steps import Steps
    from sglang_mla_ext.kernels.memory import Memory
    from sglang_mla_ext.options import HybridMLAOptions

ACCEPT_LENGTH = "avg_spec_accept_length"
"""SGLang's name of the tokens that a verify step yields on average for each request."""


class Session:
    """See the module.

    Attributes:
        pool: SGLang's, of latent rows.
        memory: where our large buffers are.
        repeats: whether a pass in which something of ours fails is run again.
        serves: whether the scheduler is complete. Passes before that are SGLang's own, to warm up and to capture.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        backend: HybridMLABackend,
        steps: Steps,
        rule: MixedRule,
        *,
        pool: KVCache,
        memory: Memory,
        repeats: bool,
    ) -> None:
        """
        Args:
            rule: when new tokens are rows of the decode graph.
        """
        self.scheduler, self.backend, self.steps = scheduler, backend, steps
        self.admission = Admission(rule, steps, scheduler)
        self.pool, self.memory, self.repeats = pool, memory, repeats
        self.serves = False

    def begin(self) -> None:
        """`Scheduler.__init__` is through."""
        scheduler, steps = self.scheduler, self.steps
        steps.attach(installed.TreeView(scheduler.tree_cache))
        runner = scheduler.tp_worker.model_runner
        if steps.sharded is not None:
            steps.sharded.begin(runner)
        self.admission.begin(runner, votes=scheduler.require_mlp_sync)
        if scheduler.metrics_collector is not None:
            steps.reports.publish_as(scheduler.metrics_collector.labels)
        self.serves = True

    # ---- a pass

    @guarded(Fallback.BEGIN_PASS)
    def begin_pass(
        self, forward_batch: Any, cls: type, batch: ScheduleBatch, runner: ModelRunner, *args: Any, **kwargs: Any
    ) -> None:
        """`ForwardBatch.init_new`: SGLang has chosen a batch."""
        passes.end()  # a draft's comes, or the forward pass of the one before never came
        if runner.is_draft_worker or not self.serves:
            return
        self.steps.coming = batch.reqs  # before anything that may fail on one of the ranks
        step = passes.begin(self.admission.choose(batch, forward_batch))
        lens = forward_batch.extend_prefix_lens_cpu or (), forward_batch.extend_seq_lens_cpu or ()
        # Prefixes are also held by requests that are decoding, or on a prefill server, whose rows are on their way to a
        # decode server. All ranks have the same.
        inflight = getattr(self.scheduler, "disagg_prefill_inflight_queue", None) or ()
        reqs, running = batch.reqs, [*self.scheduler.running_batch.reqs, *inflight]
        if step.joined is not None:
            lens = [*step.joined.prefix_lens, *(req.seqlen for req in reqs)], ()
            reqs, running = [*step.joined.reqs, *reqs], []
        self.steps.plan_pass(step, reqs, running, *lens)
        if self.steps.sharded is not None:
            self.steps.sharded.expand(forward_batch.req_pool_indices)
        self.steps.reports.publish(self.steps.shadow)

    def forward(
        self, original: Callable[..., Any], runner: ModelRunner, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """`ModelRunner.forward`: the pass that was chosen runs, and ends with it."""
        if runner.is_draft_worker:
            extended = self._extend_draft(runner, forward_batch)
            return original(runner, forward_batch, *args, **kwargs) if extended is None else extended
        if (done := passes.now.done) is not None:
            passes.end()
            return done
        launched = False
        try:
            output = original(runner, forward_batch, *args, **kwargs)
            launched = True
            if self.admission.paired.layout is not None:  # where keeping fails, they are computed again
                self._keep(output)
                output = self.admission.paired.of_step(output)
            return output
        finally:
            self._end_pass(runner, forward_batch, launched)

    @guarded(Fallback.EXTEND_DRAFT)
    def _extend_draft(self, runner: ModelRunner, forward_batch: Any) -> Any:
        with our_part(Fallback.EXTEND_DRAFT):
            return self.admission.paired.extend_draft(runner, forward_batch)

    @guarded(Fallback.TAKE_LAST_LOGITS)
    def _keep(self, output: Any) -> None:
        with our_part(Fallback.TAKE_LAST_LOGITS):
            self.admission.paired.keep(output)

    @guarded(Fallback.END_PASS)
    def _end_pass(self, runner: ModelRunner, forward_batch: Any, launched: bool) -> None:
        step = passes.now
        passes.end()
        if not launched:
            return
        if self.backend.preparation.end_step(forward_batch if step.as_rows is None else step.as_rows):
            installed.wait_for_whole_pass(runner)
        if step.joined is not None:
            new_tokens = step.joined.extend_num_tokens
            self.steps.counters.count_mixed(step.plan, step.rows.requests, step.decoding, new_tokens, verifies=True)
        elif step.as_rows is not None:
            new_tokens = step.rows.total - step.decoding
            self.steps.counters.count_mixed(step.plan, step.rows.requests, step.decoding, new_tokens)

    def before_capture(self, runner: Any) -> None:
        """`DecodeCudaGraphRunner.capture`: the graphs of the model, or of its draft."""
        if self.steps.plain_graphs and not runner.model_runner.is_draft_worker:
            GraphVariants(self.steps.shares_now).install(runner)

    # ---- what is to be forgotten

    @guarded(Fallback.FLUSH_CACHE)
    def flushed(self, success: bool, scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
        """`Scheduler.flush_cache`."""
        if success:
            self.steps.forget()

    @guarded(Fallback.UPDATE_WEIGHTS)
    def weights_change(self, result: Any, *args: Any, **kwargs: Any) -> None:
        """`_observe_weight_load`, before weights are loaded; `end_weight_update`, when all are there."""
        self.steps.weights_change()

    @guarded(Fallback.RELEASE_MEMORY)
    def memory_released(self, result: Any, manager: Any, recv_req: Any) -> None:
        """`release_memory_occupation`: what is expanded is gone, whether or not SGLang could flush its cache. It does
        so after the memory is given back, so forgetting touches nothing on the device."""
        if _is_kv_memory(recv_req.tags):
            self.steps.forget()

    @guarded(Fallback.RESUME_MEMORY, loses_memory=True)
    def memory_resumed(self, result: Any, manager: Any, recv_req: Any) -> None:
        """`resume_memory_occupation`: the memory is there again, with any contents."""
        if _is_kv_memory(recv_req.tags):
            self.memory.clear()

    @guarded(Fallback.BECOME_IDLE)
    def idle(self, result: None, scheduler: Scheduler) -> None:
        """`Scheduler.on_idle`."""
        if scheduler.is_fully_idle():
            self.steps.idle()
            self.steps.reports.publish(self.steps.shadow)

    # ---- requests and reports

    @guarded(Fallback.CHECK_PROMPT, only_shows=True)
    def refuse_empty(self, error: str | None, req: Req, *args: Any, **kwargs: Any) -> str | None:
        """`validate_input_length`: refuse a prompt of no tokens, as SGLang refuses `"input_ids": []`. It has no row, so
        SGLang would take its first token from the logits of another request's."""
        return error or ("input_ids cannot be empty." if not req.origin_input_ids else None)

    @guarded(Fallback.REPORT_STATE, only_shows=True)
    def report(self, result: Any, scheduler: Scheduler, recv_req: Any) -> None:
        """`Scheduler.get_internal_state`."""
        state, report = result.internal_state, self.steps.reports.status(self.steps.pause)
        report["rank"] = installed.dp_rank(scheduler)
        if ACCEPT_LENGTH in state:
            report[ACCEPT_LENGTH] = state[ACCEPT_LENGTH]
        state[BACKEND_NAME] = report

    @guarded(Fallback.LOAD_FROM_HOST)
    def before_loading(self, controller: HiCacheController) -> None:
        """`HiCacheController.start_loading`."""
        if controller.load_queue:
            installed.wait_before_loading(controller, self.scheduler.forward_stream)


def _is_kv_memory(tags: Sequence[str] | None) -> bool:
    """Return whether a request to release or resume memory, by its tags, is about that of the KV cache."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

    return not tags or GPU_MEMORY_TYPE_KV_CACHE in tags


class Process:
    """Parts that SGLang has made in this process for the session, and the session once it is there."""

    scheduler: Scheduler | None = None
    options: HybridMLAOptions | None = None
    budget_bytes: int | None = None
    session: Session | None = None


process = Process()

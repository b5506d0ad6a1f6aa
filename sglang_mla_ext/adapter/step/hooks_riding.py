"""The hooks behind new tokens that ride in decode steps, and behind what ranks of DP attention agree on before a pass;
install() is in hooks.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.launch import riding
from sglang_mla_ext.adapter.step import budget
from sglang_mla_ext.adapter.step.passes import passes
from sglang_mla_ext.adapter.step.riding import is_extend, select_last_rows
from sglang_mla_ext.adapter.step.worker import guarded, worker
from sglang_mla_ext.options import HybridMLAOptions

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner


def rides(batch: ScheduleBatch) -> bool:
    if worker.riding is None or not batch.forward_mode.is_extend():
        return False
    if batch.forward_mode.is_mixed():
        return True  # that it rides was found before it was mixed
    if worker.voting is not None:
        return worker.voting.rides(batch)
    return is_extend(batch) and worker.riding.can_ride(batch)


def around_sync(original: Callable[..., Any], batch: ScheduleBatch | None, *args: Any, **kwargs: Any) -> Any:
    if worker.steps is not None and worker.steps.spreading is not None:
        worker.steps.spreading.comes(batch)
    if worker.voting is None:
        return original(batch, *args, **kwargs)
    return worker.voting.agree(original, _would_ride(batch) or False, batch, *args, **kwargs)


@guarded("deciding what rides")
def _would_ride(batch: ScheduleBatch | None) -> bool:
    return worker.voting.would_ride(batch)


@guarded("saying that new tokens ride")
def before_sync_info(info: Any, *args: Any, **kwargs: Any) -> None:
    if worker.voting is not None:
        worker.voting.cast(info)


@guarded("agreeing on what is spread")
def after_sync_gather(result: None, info: Any, *args: Any, **kwargs: Any) -> None:
    if worker.steps is not None and worker.steps.spreading is not None:
        worker.steps.spreading.agree(info)


@guarded("taking last rows")
def after_logits_metadata(metadata: Any, cls: type, forward_batch: Any) -> None:
    select_last_rows(metadata)


def around_forward_raw(original: Callable[..., Any], runner: ModelRunner, forward_batch: Any, *args: Any) -> Any:
    if worker.riding is None or runner.is_draft_worker or not passes.now.rides:
        return original(runner, forward_batch, *args)
    return worker.riding.forward_ridden(original, runner, forward_batch, worker.steps.fail, *args)


def around_new_batch(original: Callable[..., Any], scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
    if worker.mixing is None:
        return original(scheduler, *args, **kwargs)
    tokens = _tokens_to_mix(scheduler, kwargs["running_batch"]) or 0
    return worker.mixing.new_batch(original, tokens, scheduler, *args, **kwargs)


@guarded("deciding how much is mixed")
def _tokens_to_mix(scheduler: Scheduler, running: ScheduleBatch) -> int:
    return worker.mixing.new_tokens(scheduler, running)


def around_add_request(original: Callable[..., Any], adder: PrefillAdder, req: Req, *args: Any, **kwargs: Any) -> Any:
    if worker.mixing is not None and _waits(adder, req):
        from sglang.srt.managers.schedule_policy import AddReqResult

        return AddReqResult.OTHER
    return original(adder, req, *args, **kwargs)


@guarded("deciding who is mixed")
def _waits(adder: PrefillAdder, req: Req) -> bool:
    return worker.mixing.waits(adder, req)


@guarded("deciding what is mixed")
def after_prepare_for_extend(result: None, batch: ScheduleBatch) -> None:
    if worker.mixing is not None and worker.scheduler is not None:
        worker.scheduler.is_mixed_chunk = False  # unless it is decided
        worker.mixing.prepared(batch, worker.scheduler)


@guarded("counting decoded tokens", only_shows=True)
def after_prefill_result(result: None, processor: Any, batch: ScheduleBatch, of_batch: Any) -> None:
    if worker.mixing is not None:
        worker.mixing.count_decoded(batch, processor.metrics_reporter, of_batch.can_run_cuda_graph)


def after_graph_sizes(
    sizes: tuple[list[int], list[int]], runner: ModelRunner, *args: Any, **kwargs: Any
) -> tuple[list[int], list[int]] | None:
    """SGLang captures no decode graph of more rows than it has places for requests."""
    if runner.is_draft_worker:
        return None
    options = HybridMLAOptions.from_env()
    tokens = riding.tokens(installed.resolved(runner.server_args), options, on_gpu=runner.device == "cuda")
    most = budget.max_rows(sizes[0][-1], 1, tokens)
    return riding.graph_sizes(sizes[0], most), sizes[1]


def around_eager_registry(original: Callable[..., Any], **kwargs: Any) -> Any:
    """Without a GPU rows ride in passes without a graph, whose buffers hold as many as there are requests."""
    tokens = worker.riding.tokens if worker.riding is not None else 0
    return original(**{**kwargs, "max_bs": kwargs["max_bs"] + tokens})

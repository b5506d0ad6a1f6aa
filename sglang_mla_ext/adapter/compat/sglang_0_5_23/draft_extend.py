"""The drafting layer over new tokens of a verify step, in SGLang's CUDA graph for it.

Behind a prefill pass SGLang runs its drafting layer over the new tokens kernel by kernel. That took 17 % of the host's
time of short answers over 7,069 tokens (TP 8, H200, SGLang 0.5.23), where the host sets the pace. Behind a verify step
it replays a graph whose requests have W tokens each. New tokens of a verify step lie in such units already (paired.py),
so they take that graph: as many units at a time as it holds, a request's later ones behind its earlier ones.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_mla_ext.adapter.compat.draft_units import Units

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner


def extend_draft(units: Units, runner: ModelRunner, batch: ForwardBatch, draft_worker: Any) -> ModelRunnerOutput | None:
    """See Release0517. A CPU has no graphs: the same rows run without one."""
    graph, hidden = _graph_of(draft_worker), batch.spec_info.hidden_states
    if graph is None and batch.input_ids.is_cuda:
        return None
    if hidden is None or batch.mm_input_embeds is not None or batch.spec_info.dsa_seed_topk_capture is not None:
        return None
    run: Callable[[ForwardBatch, Tensor], Any] = _without_graph(runner) if graph is None else graph.execute
    most = len(units.lens) if graph is None else graph.max_bs
    rows_of_last = torch.arange(units.width - 1, len(units.source), units.width, device=units.source.device)
    last_units = units.last // units.width
    ends = list(accumulate(rows // units.width for rows in units.rows.lens))
    rows_of_last[last_units] = units.last
    found: list[tuple[Tensor, Tensor]] = []
    for first in range(0, len(units.lens), most):
        stop = min(first + most, len(units.lens))
        part = _batch_of(units, runner, batch, first, stop)
        if graph is not None and not graph.can_run_graph(part):
            return None
        output = run(part, rows_of_last[first:stop] - first * units.width)
        ending = slice(bisect_right(ends, first), bisect_right(ends, stop))
        chosen = last_units[ending] - first
        found.append((output.next_token_logits[chosen], output.hidden_states[chosen]))  # copies: the graph reuses them
    return _output(found, graphs=graph is not None)


def _graph_of(draft_worker: Any) -> EAGLEDraftExtendCudaGraphRunner | None:
    """Return SGLang's graph of one drafting layer behind verify steps; None where there is none."""
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

    graph = getattr(draft_worker, "cuda_graph_runner_for_draft_extend", None)
    return graph if isinstance(graph, EAGLEDraftExtendCudaGraphRunner) else None


def _batch_of(units: Units, runner: ModelRunner, batch: ForwardBatch, first: int, stop: int) -> ForwardBatch:
    """Return units `[first, stop)` as requests of a drafting layer's extend, as `prepare_for_draft_extend` does."""
    from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

    width, count, device = units.width, stop - first, batch.input_ids.device
    rows = slice(first * width, stop * width)
    source, lens, host_lens = units.source[rows], units.lens[first:stop], units.host_lens[first:stop]
    found = copy.copy(batch)
    mode, capture = type(batch.forward_mode), type(batch.capture_hidden_mode)
    found.forward_mode, found.capture_hidden_mode, found.batch_size = mode.DRAFT_EXTEND_V2, capture.FULL, count
    found.input_ids, found.positions = batch.input_ids[source], units.positions[rows]
    found.req_pool_indices = batch.req_pool_indices[units.requests[first:stop]].long()
    found.out_cache_loc = units.slots[rows]
    found.seq_lens, found.seq_lens_cpu = lens.to(batch.seq_lens.dtype), host_lens.to(torch.int64)
    widths = torch.full((count,), width, dtype=torch.int32, device=device)
    found.spec_info = EagleDraftExtendInput(
        hidden_states=batch.spec_info.hidden_states[source],
        num_correct_drafts=widths - 1,
        num_accept_tokens=widths,
        num_tokens_per_req=width,
        num_tokens_for_logprob_per_req=width,
    )
    translator = runner.kv_index_translator
    translator.own_plan(found).bind(found, translator)
    # Behind its tokens; the plan is of the lengths before.
    found.seq_lens, found.seq_lens_cpu = found.seq_lens + width, found.seq_lens_cpu + width
    found.seq_lens_sum = int(found.seq_lens_cpu.sum())
    found.extend_num_tokens, found.extend_seq_lens, found.extend_seq_lens_cpu = count * width, widths, [width] * count
    found.extend_prefix_lens, found.extend_prefix_lens_cpu = lens.to(torch.int32), host_lens.tolist()
    found.extend_start_loc = torch.arange(0, count * width, width, dtype=torch.int32, device=device)
    return found


def _without_graph(runner: ModelRunner) -> Callable[[ForwardBatch, Tensor], Any]:
    def run(batch: ForwardBatch, rows: Tensor) -> Any:
        output = copy.copy(runner.forward(batch).logits_output)
        output.next_token_logits, output.hidden_states = output.next_token_logits[rows], output.hidden_states[rows]
        return output

    return run


def _output(found: list[tuple[Tensor, Tensor]], *, graphs: bool) -> ModelRunnerOutput:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.model_runner import ModelRunnerOutput

    logits, hidden = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*found, strict=True))
    return ModelRunnerOutput(LogitsProcessorOutput(next_token_logits=logits, hidden_states=hidden), graphs)

"""New prompt tokens in a step that verifies drafts.

Such a step has W query tokens of each request, at positions that follow each other. So T new tokens of a request are
ceil(T / W) *units* of it: with the same row in the table of slots, and lengths that grow by W. The last unit is padded
behind the prompt; the padding is written to the slots in which the request's next tokens come, or, behind its last
page, to the page that SGLang pads batches with.

A draft model needs both batches as SGLang has them: running requests draft, verify and extend the draft; new tokens are
computed, and extend the draft. So one iteration of the scheduler runs both, one after the other, but the model once:

    run_batch(running): draft ── verify ─────────────────── accept ── extend the draft
                                   │ with the new tokens
    run_batch(new):                └─────── results ─────── sample ── extend the draft, in units
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.compat.draft_units import Units
from sglang_mla_ext.adapter.step.mixed import is_extend
from sglang_mla_ext.rows import Rows

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


def lay_out(tokens: torch.Tensor, prefix_lens: list[int], new_tokens: list[int], width: int, page: int) -> Units:
    """Lay new tokens out in units of `width` rows.

    Args:
        tokens: `[sum of new_tokens]` int64 ids, of one request after the other, on the host.
        prefix_lens: `[requests]` cached tokens; new_tokens: `[requests]`, each at least 1.
        page: tokens of a page of slots. A request owns all slots of its last one.
    """
    prefixes, counts = torch.tensor(prefix_lens), torch.tensor(new_tokens)
    units = (counts + width - 1) // width
    rows = units * width
    of_row = torch.repeat_interleave(torch.arange(len(counts)), rows)
    offsets = torch.arange(len(of_row)) - (rows.cumsum(0) - rows)[of_row]
    last = counts[of_row] - 1
    beyond = (offsets - last).clamp(min=0)
    source = (counts.cumsum(0) - counts)[of_row] + torch.minimum(offsets, last)
    positions = prefixes[of_row] + offsets
    own = (prefixes[of_row] + last) % page + beyond < page
    of_unit = torch.repeat_interleave(torch.arange(len(counts)), units)
    before = torch.arange(len(of_unit)) - (units.cumsum(0) - units)[of_unit]
    lens = prefixes[of_unit] + width * before
    return Units(
        width,
        Rows.of(rows.tolist()),
        lens,
        tokens[source],
        positions,
        source,
        beyond,
        torch.where(own, -1, positions % page),
        of_unit,
        lens,
        beyond.nonzero().squeeze(1),
        (beyond == 0).nonzero().squeeze(1),
        rows.cumsum(0) - rows + counts - 1,
    )


class PairedSteps:
    """Pairs of a verify step and a batch of new tokens, of one scheduler.

    Attributes:
        possible: whether there are any: drafts are verified here, and new tokens are mixed.
        chosen: the batch whose tokens are to join the next verify step; None for none.
        layout: of new tokens in the pass that runs; None where there are none.
    """

    def __init__(self, width: int, *, possible: bool) -> None:
        """
        Args:
            width: query tokens of a request in a verify step.
        """
        self.possible, self._width = possible and width > 1, width
        self.chosen: ScheduleBatch | None = None
        self._new: ScheduleBatch | None = None  # the same while the iteration runs
        self._joins = False  # whether its tokens are still to join the verify step
        self.layout: Units | None = None
        self._units: Units | None = None  # the same, until the draft is extended over them
        self._result: Any = None  # of these tokens
        self._decoded: list[tuple[Any, ScheduleBatch, Any]] = []  # by results of new tokens: those to process with them
        self._processed: Any = None  # a result that SGLang is still to hand over
        # SGLang keeps what two passes read; an iteration has two, and what the one before read must outlive it, too.
        self._kept: list[Any] = []

    def begin(self, table: torch.Tensor, page: int, draft_worker: Any) -> None:
        """Set what an iteration needs, once SGLang has made its pools and captured its graphs.

        Args:
            table: `[requests, tokens]` of slots; page: slots of a page.
            draft_worker: SGLang's, of the drafting model.
        """
        self._table, self._page, self._draft_worker = table, page, draft_worker

    # ---- an iteration of the scheduler

    def run(self, original: Callable[..., Any], scheduler: Scheduler, batch: ScheduleBatch, *args: Any) -> Any:
        """`Scheduler.run_batch`: with a batch that was chosen, the running requests' next step comes first."""
        chosen, self.chosen = self.chosen, None
        if chosen is None or chosen is not batch:
            return original(scheduler, batch, *args)
        running, decoding = scheduler.running_batch, None
        if not running.is_empty() and running.check_decode_mem():
            decoding = scheduler.update_running_batch(running)
        if decoding is None or decoding.is_empty():
            return original(scheduler, batch, *args)
        if scheduler.enable_overlap:
            self._kept = list(scheduler.batch_record_buf)
        self._new, self._joins = batch, True
        try:
            decoded = original(scheduler, decoding)
            if scheduler.enable_overlap:
                scheduler._apply_war_barrier()
                self._process_waiting(scheduler)
            of_new = original(scheduler, batch, *args)
        finally:
            self._joins, self._new, self.layout, self._result, self._units = False, None, None, None, None
        self._decoded.append((of_new, decoding.copy(), decoded))
        return of_new

    def _process_waiting(self, scheduler: Scheduler) -> None:
        """Process the result of the iteration before while the model runs. SGLang does so when all of this iteration is
        launched, and tokens would come later by the launches of the new tokens' own part."""
        for batch, result in scheduler.result_queue:  # one at most
            scheduler.process_batch_result(batch, result)
            self._processed = result

    def process(self, original: Callable[..., Any], scheduler: Scheduler, batch: ScheduleBatch, result: Any) -> None:
        """`Scheduler.process_batch_result`: of a pair, the new requests' first, which wait for their first tokens."""
        if self._processed is not None and result is self._processed:
            self._processed = None
            return
        original(scheduler, batch, result)
        for of_new, decoding, decoded in self._decoded:
            if of_new is result:
                self._decoded = [pair for pair in self._decoded if pair[0] is not result]
                original(scheduler, decoding, decoded)
                break

    # ---- a pass

    def joining(self) -> ScheduleBatch | None:
        """Return the batch whose tokens are to join the verify step that comes."""
        return self._new if self._joins else None

    def join(self, batch: ForwardBatch, new: ScheduleBatch) -> Rows:
        """Put new tokens in front of the rows of a verify step.

        Args:
            batch: of the verify step, which is changed.
            new: prepared.
        Returns:
            rows of each request of `new`.
        """
        self._joins = False
        tokens = new.prefill_input_ids_cpu
        units = lay_out(tokens.to(torch.int64), new.prefix_lens, new.extend_lens, self._width, self._page)
        device, of_unit = batch.seq_lens.device, units.requests.tolist()
        sizes = list(map(len, units[3:]))
        host = torch.cat(units[3:])  # the tensors, in one copy
        if device.type == "cuda":
            host = host.pin_memory()
        units = Units(*units[:3], *host.to(device, non_blocking=True).split(sizes))
        slots = torch.where(units.slots < 0, new.out_cache_loc[units.source] + units.beyond, units.slots)
        units = units._replace(slots=slots)
        table_rows = new.req_pool_indices[units.requests].long()
        of_padding = table_rows[units.padding // self._width], units.positions[units.padding]
        self._table[of_padding] = slots[units.padding].to(self._table.dtype)

        def in_front(of: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return torch.cat([values.to(of.dtype), of])

        both = copy.copy(batch)
        both.batch_size += len(of_unit)
        both.input_ids = in_front(batch.input_ids, units.tokens)
        both.positions = in_front(batch.positions, units.positions)
        both.out_cache_loc = in_front(batch.out_cache_loc, slots)
        both.req_pool_indices = in_front(batch.req_pool_indices, table_rows)
        both.seq_lens = in_front(batch.seq_lens, units.lens)
        if batch.orig_seq_lens is not None:
            both.orig_seq_lens = in_front(batch.orig_seq_lens, units.lens)
        if batch.seq_lens_cpu is not None:
            both.seq_lens_cpu = in_front(batch.seq_lens_cpu, units.host_lens)
            both.seq_lens_sum = int(both.seq_lens_cpu.sum())
        both.lora_ids = [*(new.reqs[request].lora_id for request in of_unit), *batch.lora_ids]
        both.rids = [*(new.reqs[request].rid for request in of_unit), *batch.rids]
        both._init_num_token_non_padded(device=device, is_draft_worker=False)
        self.layout = self._units = units
        vars(batch).update(vars(both))  # all or nothing
        return units.rows

    def keep(self, output: Any) -> None:
        """Keep the results of the tokens that joined. SGLang's next graphs may write where they are: they are copied.

        Args:
            output: ModelRunnerOutput of all rows.
        """
        assert self.layout is not None, "tokens have joined"
        logits = output.logits_output
        of_new = copy.copy(logits)
        of_new.next_token_logits = logits.next_token_logits[self.layout.last]
        if logits.hidden_states is not None:
            of_new.hidden_states = logits.hidden_states[self.layout.real]
        self._result = copy.copy(output)
        self._result.logits_output = of_new

    def of_step(self, output: Any) -> Any:
        """Return the results of the verify step alone; see `keep`."""
        assert self.layout is not None, "tokens have joined"
        logits, new = copy.copy(output.logits_output), self.layout.rows.total
        self.layout = None
        logits.next_token_logits = logits.next_token_logits[new:]
        if logits.hidden_states is not None:
            logits.hidden_states = logits.hidden_states[new:]
        output = copy.copy(output)
        output.logits_output = logits
        return output

    def result(self, batch: ScheduleBatch) -> Any:
        """Return what a verify step has computed of a batch, once; None where that is still to be computed."""
        if self._result is None or batch is not self._new:
            return None
        found, self._result = self._result, None
        return found

    def extend_draft(self, runner: ModelRunner, batch: ForwardBatch) -> Any:
        """Return the drafting layer's results over new tokens that were in a verify step, once; None where SGLang
        computes them.

        Args:
            runner: the draft's; batch: of any of its passes.
        """
        if self._units is None or not is_extend(batch):
            return None
        units, self._units = self._units, None
        return installed.extend_draft(units, runner, batch, self._draft_worker)

"""Running requests and new tokens in one step, through SGLang's own MIXED batches.

SGLang mixes by a flag of the server, and then in every prefill pass. Here the flag is set for each batch: only what
rides (riding.py) may be mixed, because an eager mixed pass would expand the whole prefix for every running request. The
flag is read twice in `Scheduler._get_new_batch_prefill_raw`: when tokens are allotted, which is where they are bounded,
and behind `ScheduleBatch.prepare_for_extend`, which is where the batch is known and it is decided.

In between, requests are let in one by one, and a prompt that is longer than the bound is cut. A request that cannot be
mixed, or whose prompt must not be cut, is known by then: it is the first of a batch without running requests, which is
as large as SGLang makes them, or it waits for one (`waits`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_mla_ext.adapter.step.riding import LATER, Riding, refusal_of
from sglang_mla_ext.predict.mixed import MOST_STEPS  # plain Python

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler

PASSES_IN_A_ROW = 16
"""Batches that are made for passes of their own after one that was made to ride and does not, because a pass is sooner
or SGLang does not mix it: cut to what may ride, it is a pass that serves few of those who wait."""
FIRST_GUESS = 128.0
"""New tokens of a request, before there was one."""


class Mixing:
    """Of one scheduler. All ranks have the same requests and decide alike."""

    def __init__(self, riding: Riding) -> None:
        self._riding = riding
        self._running: ScheduleBatch | None = None  # of the batch that is being made, if it may be mixed
        self._chunk = 0  # new tokens of that batch if it is not mixed
        self._tokens_each = FIRST_GUESS  # new tokens of a request, on average of the last ones
        self._left = 0  # new tokens of the prompt that is being computed in pieces
        self._passes = 0  # batches that are to come before another one is made to ride

    def new_batch(self, make: Callable[..., Any], tokens: int, scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
        """`Scheduler._get_new_batch_prefill_raw`: the next prefill batch, perhaps with running requests in it.

        Args:
            make: the original; kwargs: its `running_batch` among them.
            tokens: see `new_tokens`.
        """
        running, size = kwargs["running_batch"], scheduler.chunked_prefill_size
        scheduler.is_mixed_chunk = False
        if not tokens:
            batch, left = make(scheduler, *args, **kwargs)
            if batch is not None:
                self._passes = max(self._passes - 1, 0)
            return batch, left
        count = len(running.reqs)
        scheduler.is_mixed_chunk, self._running, self._chunk = True, running, size
        scheduler.chunked_prefill_size = min(tokens, size) + count  # SGLang takes the running ones off
        try:
            batch, left = make(scheduler, *args, **kwargs)
        finally:
            was_to_mix = scheduler.is_mixed_chunk
            scheduler.is_mixed_chunk, self._running = False, None
            scheduler.chunked_prefill_size = size
        if batch is not None and was_to_mix and left.reqs:
            self._passes = PASSES_IN_A_ROW  # SGLang did not: beams are running, or memory is short
        if batch is not None and batch.forward_mode.is_mixed():
            # SGLang 0.5.17 takes it that running requests were in the pass before, whose tokens are still to come.
            lens = zip(batch.seq_lens_cpu.tolist(), batch.extend_lens, strict=True)
            batch.prefix_lens = [total - new for total, new in lens]
            if len(batch.decoding_reqs) < count:
                left.batch_is_full = False  # those that ended in the step before have left their places
        return batch, left

    def new_tokens(self, scheduler: Scheduler, running: ScheduleBatch) -> int:
        """New tokens that a mixed step may have now; 0 where what waits had better have a pass of its own."""
        size, chunked = scheduler.chunked_prefill_size, scheduler.chunked_req
        if self._passes or size is None or running.is_empty():
            return 0
        if running.return_logprob or running.return_hidden_states or (chunked is not None and stays_apart(chunked)):
            return 0
        tokens = min(self._riding.tokens, self._riding.most_rows - len(running.reqs), size)
        tokens = tokens // scheduler.page_size * scheduler.page_size  # a prompt is cut into whole pages
        places = scheduler.get_num_allocatable_reqs(len(running.reqs))
        waiting = max(min(len(scheduler.waiting_queue), places), 0) * self._tokens_each
        if chunked is not None:
            waiting += self._left
            # SGLang let the prompt in with all of its tokens, and ends where a piece finds no place: running requests,
            # which take slots in each mixed step, must leave as many as it needs.
            free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
            if self._left + len(running.reqs) * scheduler.page_size > free:
                return 0
        return tokens if 0 < waiting <= MOST_STEPS * tokens else 0

    def waits(self, adder: PrefillAdder, req: Req) -> bool:
        """Return whether a request, whose turn it is to be let in, has to wait for the next batch. A batch that it is
        the first of is not mixed.

        Args:
            adder: SGLang's, of the batch that is being made.
        """
        if self._running is None or not stays_apart(req):
            return False
        if adder.can_run_list:
            return True
        adder.rem_chunk_tokens, self._running = self._chunk, None
        return False

    def prepared(self, batch: ScheduleBatch, scheduler: Scheduler) -> None:
        """`ScheduleBatch.prepare_for_extend` is through: is the batch mixed? The flag says no so far."""
        if (chunked := scheduler.chunked_req) is not None and chunked in batch.reqs:
            place = batch.reqs.index(chunked)
            self._left = _length(chunked) - batch.prefix_lens[place] - batch.extend_lens[place]
        if self._running is None:
            return
        self._tokens_each = 0.9 * self._tokens_each + 0.1 * batch.extend_num_tokens / len(batch.reqs)
        reason = self._riding.why_not(batch, len(self._running.reqs))
        if reason == LATER:
            self._passes = PASSES_IN_A_ROW
        # SGLang 0.5.17 does not look whether the running ones find a place behind those that were let in.
        scheduler.is_mixed_chunk = reason is None and self._running.check_decode_mem()

    @staticmethod
    def count_decoded(batch: ScheduleBatch, reporter: Any, can_run_graph: bool) -> None:
        """A mixed batch has been processed, which SGLang does as prefill: count its running requests as it counts those
        of a decode batch.

        Args:
            reporter: SGLang's metrics of the scheduler.
        """
        if not batch.decoding_reqs:
            return
        decoded = copy.copy(batch)
        decoded.reqs = batch.decoding_reqs
        reporter.num_generated_tokens += len(decoded.reqs)
        for req in decoded.reqs:
            if not req.is_retracted:
                req.time_stats.set_last_decode_finish_time()
        reporter.forward_ct_decode = (reporter.forward_ct_decode + 1) % (1 << 30)
        reporter.report_decode_stats(can_run_graph, running_batch=decoded)


def stays_apart(req: Req) -> bool:
    """Return whether a request's prompt is neither mixed nor cut to be mixed.

    What SGLang returns of each token of a decode step is of one row a request, in a mixed step of as many as it has: so
    there are no hidden states there (`refusal_of`), nor log-probabilities, which SGLang leaves out itself. Of the other
    things that it returns, see `riding.take_last_rows`.

    A cut prompt goes on where SGLang keeps what is computed in its tree: up to 0.5.17 at least, it computes the first
    piece of a request that it keeps out of the tree again and again (sgl-project/sglang#36855). One with rows on the
    host cannot ride while these are loaded.
    """
    kept_out, on_host = req.skip_radix_cache_insert, req.host_hit_length > 0
    return req.return_logprob or kept_out or on_host or refusal_of(req) is not None


def _length(req: Req) -> int:
    return len(req.origin_input_ids) + len(req.output_ids)

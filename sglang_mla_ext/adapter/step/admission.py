"""Choice of a batch's pass, and whether its new tokens are computed in the decode graph.

New tokens of a request can be rows of the decode graph (mixed.py). A batch of them is one of these:

- plain prefill: a pass of its own;
- mixed: rows of the decode graph beside running requests, through SGLang's own MIXED batches;
- alone: rows of the decode graph, nobody running beside them;
- by vote: either of them, with DP attention, if no other rank prefills (voting.py);
- paired: rows of a step of running requests that verifies drafts (paired.py).

What the ranks of sharded prefixes agreed on for the pass is part of the choice.

A mixed batch that another rank refuses, because it prefills, cannot go back: its running requests are in it. It runs as
the MIXED batch that it is, by absorb (docs/design.md, Mixed steps). So nothing is mixed with DP attention where prefill
has no CUDA graphs.

SGLang mixes by a flag of the server, and then in every prefill pass. Here the flag is set for each batch, because an
eager mixed pass would expand the whole prefix for every running request. The flag is read twice in
`Scheduler._get_new_batch_prefill_raw`: when tokens are allotted, which is where they are bounded, and behind
`ScheduleBatch.prepare_for_extend`, which is where the batch is known and it is decided. In between, requests are let in
one by one, and a prompt that is longer than the bound is cut. A request that cannot be mixed, or whose prompt must not
be cut, is known by then: it is the first of a batch without running requests, which is as large as SGLang makes them,
or it waits for one (`_waits`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.failure import guarded, our_part
from sglang_mla_ext.adapter.ranks.voting import Voting
from sglang_mla_ext.adapter.step.mixed import MixedRule, is_extend, refusal_of
from sglang_mla_ext.adapter.step.paired import PairedSteps
from sglang_mla_ext.adapter.step.passes import Kind, Pass
from sglang_mla_ext.predict.mixed import NEWEST, evened, most_waiting  # plain Python
from sglang_mla_ext.reasons import Fallback, NotMixed
from sglang_mla_ext.rows import Rows

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_mla_ext.adapter.step.steps import Steps

MOST_WAITED = 2
"""Mixed batches in a row for which a request that is not mixed waits, and with it those behind it. Where SGLang sorts
those that come in front of it, it would wait as long as one does in each step; the next batch is not mixed."""
PASSES_IN_A_ROW = 16
"""Batches that are made for passes of their own after one that was made to be mixed and is not, because a pass is
sooner, SGLang does not mix it, or another rank prefills: cut to the bound, it is a pass that serves few of those who
wait."""
FIRST_GUESS = 128.0
"""New tokens of a request, before there was one."""


class Admission:
    """Admission of new tokens to the steps of one scheduler. All ranks that divide the heads have the same requests and
    decide alike.

    Attributes:
        rule: when new tokens are rows of the decode graph.
        mixes: whether running requests and new tokens may be in one batch.
        votes: whether ranks with batches of their own agree on each pass (DP attention).
        paired: where running requests verify drafts, what is mixed in place of SGLang's own batches.
    """

    def __init__(self, rule: MixedRule, steps: Steps, scheduler: Scheduler) -> None:
        self.rule, self.steps, self._scheduler = rule, steps, scheduler
        self.votes, self.mixes = False, rule.tokens > 0
        self._voting = Voting()
        self.paired = PairedSteps(rule.query_tokens, possible=self.mixes)
        self._running: ScheduleBatch | None = None  # of the batch that is being made, if it may be mixed
        self._chunk = 0  # new tokens of that batch if it is not mixed
        self._tokens_each = FIRST_GUESS  # new tokens of a request, on average of the last ones
        self._left = 0  # new tokens of the prompt that is being computed in pieces
        self._new, self._coming = 0, 0.0  # new tokens of the batch that is being made, and of the last ones in the mean
        self._waited = 0  # mixed batches behind which a request waited
        self._passes = 0  # batches that are to come before another one is made to be mixed

    def begin(self, runner: ModelRunner, *, votes: bool) -> None:
        """Set what may be mixed, once SGLang has captured its graphs."""
        self.votes = votes
        self.rule.begin(runner, votes=votes)
        self.mixes = self.mixes and self.rule.mixed_rows > 0
        if self.paired.possible:
            drafting = getattr(self._scheduler.draft_worker, "draft_worker", None)
            self.paired.begin(runner.req_to_token_pool.req_to_token, self._scheduler.page_size, drafting)

    def choose(self, batch: ScheduleBatch, forward_batch: ForwardBatch) -> Pass:
        """Return the pass of a batch that SGLang has chosen.

        Args:
            forward_batch: made of it.
        """
        new_tokens = forward_batch.extend_seq_lens_cpu or ()
        if (chosen := self._paired_pass(batch, forward_batch)) is not None:
            return chosen
        decoding = len(batch.decoding_reqs or ())
        if self._in_decode_graph(batch, votes=self.votes):
            chosen = Pass(Kind.DECODE, Rows.of(new_tokens), mixed=True, decoding=decoding)
        elif (kind := Kind.of(forward_batch.forward_mode)) is Kind.PREFILL:
            # With keys per head the whole history of each running request would be expanded for its one row.
            chosen = Pass(kind, Rows.of(new_tokens), decoding=decoding, absorbs=decoding > 0)
        else:
            chosen = Pass(kind, Rows(len(batch.reqs), self.steps.query_tokens if kind is Kind.VERIFY else 1))
        sharded = self.steps.sharded
        if sharded is not None and (agreed := sharded.shared_plan()) is not None:
            chosen.sharded, chosen.plan = agreed, agreed.mine
        return chosen

    def _paired_pass(self, batch: ScheduleBatch, forward_batch: ForwardBatch) -> Pass | None:
        kind = Kind.of(forward_batch.forward_mode)
        if kind is Kind.VERIFY and (new := self.paired.joining()) is not None:
            with our_part(Fallback.BEGIN_PASS):
                rows, running = self.paired.join(forward_batch, new), len(batch.reqs)
            of_all = Rows.of([*rows.lens, *[self.rule.query_tokens] * running])
            return Pass(kind, of_all, mixed=True, decoding=running, joined=new)
        done = self.paired.result(batch)
        return None if done is None else Pass(Kind.OTHER, done=done)

    def _in_decode_graph(self, batch: ScheduleBatch, *, votes: bool) -> bool:
        """Return whether new tokens of a batch are computed in the decode graph. Of a mixed batch that was decided
        before it was mixed.

        Args:
            votes: ranks have voted on it.
        """
        if not self.rule.tokens or self.paired.possible or not batch.forward_mode.is_extend():
            return False
        if votes:
            return self._voting.agreed_on(batch)
        return batch.forward_mode.is_mixed() or (is_extend(batch) and self.rule.allows(batch))

    # ---- ranks with batches of their own

    def sync(self, original: Callable[..., Any], batch: ScheduleBatch | None, *args: Any, **kwargs: Any) -> Any:
        """`prepare_mlp_sync_batch_raw`: all ranks tell each other what they would run next."""
        if self.steps.sharded is not None:
            self.steps.sharded.comes(batch)
        if not (self.rule.tokens and self.votes):
            return original(batch, *args, **kwargs)
        self._offer(batch, graphs=not kwargs["disable_cuda_graph"])
        found = original(batch, *args, **kwargs)
        # Not guarded: a rank that kept a prefill pass while the others replay a decode graph would hang them all.
        if self._voting.close(found):
            self.rule.count_refused(NotMixed.RANK_PREFILLING)
            cut = self._scheduler.waiting_queue or self._scheduler.chunked_req is not None
            if found.forward_mode.is_mixed() and cut:
                self._passes = PASSES_IN_A_ROW
        return found

    @guarded(Fallback.OPEN_VOTE)
    def _offer(self, batch: ScheduleBatch | None, *, graphs: bool) -> None:
        self._voting.open(None, graphs=graphs)
        if batch is not None and self._in_decode_graph(batch, votes=False):
            self._voting.open(batch, graphs=graphs)

    @guarded(Fallback.CAST_VOTE)
    def cast(self, info: Any, *args: Any, **kwargs: Any) -> None:
        """`MLPSyncBatchInfo._get_local_tensor`: what this rank is about to say of itself."""
        if self.votes:
            self._voting.cast(info)

    @guarded(Fallback.AGREE_SHARED)
    def gathered(self, result: None, info: Any, *args: Any, **kwargs: Any) -> None:
        """`MLPSyncBatchInfo.all_gather` is through: ranks agree on what a pass shares, too."""
        if self.steps.sharded is not None:
            self.steps.sharded.agree(info)

    # ---- the batch that SGLang makes

    def new_batch(self, make: Callable[..., Any], scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
        """`Scheduler._get_new_batch_prefill_raw`: the next prefill batch, perhaps with running requests in it.

        Args:
            make: the original; kwargs: its `running_batch` among them.
        """
        if not self.mixes:
            return make(scheduler, *args, **kwargs)
        self._coming += NEWEST * (self._new - self._coming)
        self._new = 0
        running, size, most = kwargs["running_batch"], scheduler.chunked_prefill_size, scheduler.max_prefill_tokens
        tokens = self.new_tokens(scheduler, running) or 0
        scheduler.is_mixed_chunk = False
        self.paired.chosen = None
        if not tokens:
            batch, left = make(scheduler, *args, **kwargs)
            if batch is not None:
                self._passes = max(self._passes - 1, 0)
            return batch, left
        count = 0 if self.paired.possible else len(running.reqs)
        scheduler.is_mixed_chunk, self._running, self._chunk = not self.paired.possible, running, size
        # SGLang takes the running ones off both.
        scheduler.chunked_prefill_size, scheduler.max_prefill_tokens = min(tokens, size) + count, most + count
        try:
            batch, left = make(scheduler, *args, **kwargs)
        finally:
            was_to_mix = scheduler.is_mixed_chunk
            scheduler.is_mixed_chunk, self._running = False, None
            scheduler.chunked_prefill_size, scheduler.max_prefill_tokens = size, most
        if batch is not None and was_to_mix and left.reqs:
            self._passes = PASSES_IN_A_ROW  # SGLang did not: beams are running, or memory is short
        if batch is not None and batch.forward_mode.is_mixed():
            # SGLang 0.5.17 takes it that running requests were in the pass before, whose tokens are still to come.
            lens = zip(batch.seq_lens_cpu.tolist(), batch.extend_lens, strict=True)
            batch.prefix_lens = [total - new for total, new in lens]
            if len(batch.decoding_reqs) < count:
                left.batch_is_full = False  # those that ended in the step before have left their places
        return batch, left

    @guarded(Fallback.SIZE_MIXED)
    def new_tokens(self, scheduler: Scheduler, running: ScheduleBatch) -> int:
        """Return how many new tokens a mixed step may have; 0 where what waits had better have a pass of its own."""
        size, chunked = scheduler.chunked_prefill_size, scheduler.chunked_req
        if self._passes or size is None or running.is_empty():
            return 0
        if running.return_logprob or running.return_hidden_states or (chunked is not None and stays_apart(chunked)):
            return 0
        if self.paired.possible and running.has_grammar:
            return 0  # SGLang advances grammars by results that are in its queue, not by those of a pair
        padding = (self.rule.query_tokens - 1) * (len(scheduler.waiting_queue) + 1)
        page: int = scheduler.page_size  # a prompt is cut into whole ones
        tokens: int = min(self.rule.tokens, self.rule.room(len(running.reqs)) - padding, size) // page * page
        places = scheduler.get_num_allocatable_reqs(len(running.reqs))
        waiting = max(min(len(scheduler.waiting_queue), places), 0) * self._tokens_each
        if chunked is not None:
            waiting += self._left
            # SGLang let the prompt in with all of its tokens, and ends where a piece finds no place: running requests,
            # which take slots in each mixed step, must leave as many as it needs.
            free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
            if self._left + len(running.reqs) * page > free:
                return 0
        if not 0 < waiting <= most_waiting(tokens, drafts=self.paired.possible):
            return 0
        if self.votes:
            tokens = evened(tokens, self._coming, waiting) // page * page
        return tokens

    def add_request(
        self, original: Callable[..., AddReqResult], adder: PrefillAdder, req: Req, *args: Any, **kwargs: Any
    ) -> AddReqResult:
        """`PrefillAdder.add_one_req`: the next request is let into the batch that is being made, or waits."""
        from sglang.srt.managers.schedule_policy import AddReqResult

        if self.mixes and self.waits(adder, req):
            return AddReqResult.OTHER
        left = adder.rem_chunk_tokens
        result = original(adder, req, *args, **kwargs)
        self._return_rounding(adder, req, left)
        is_full = left is not None and 0 < adder.rem_chunk_tokens < self._scheduler.page_size
        # SGLang would try the next one in vain, and load its rows from the host or preempt others for it.
        return AddReqResult.OTHER if is_full and result is AddReqResult.CONTINUE else result

    @guarded(Fallback.COUNT_NEW_TOKENS)
    def _return_rounding(self, adder: PrefillAdder, req: Req, left: int | None) -> None:
        """Charge a batch for the new tokens of a request, where SGLang charges whole pages. These have 32 tokens more
        on average: with questions of 180 tokens a pass would compute 15 % fewer than its CUDA graph has rows.

        Args:
            left: tokens that the batch had room for before the request was let in.
        """
        charged = 0 if left is None else left - adder.rem_chunk_tokens
        if charged <= 0 or adder.can_run_list[-1] is not req:
            return
        rounding = charged - installed.extend_tokens(req)
        if 0 < rounding < self._scheduler.page_size:
            adder.rem_chunk_tokens += rounding
            adder.rem_input_tokens += rounding

    @guarded(Fallback.ADMIT_MIXED)
    def waits(self, adder: PrefillAdder, req: Req) -> bool:
        """Return whether a request, whose turn it is to be let in, has to wait for the next batch. A batch that it is
        the first of is not mixed.

        Args:
            adder: SGLang's, of the batch that is being made.
        """
        if self._running is None or not stays_apart(req):
            return False
        if adder.can_run_list:
            self._waited += 1
            if self._waited == MOST_WAITED:
                self._passes, self._waited = max(self._passes, 1), 0
            return True
        adder.rem_chunk_tokens, self._running, self._waited = self._chunk, None, 0
        return False

    @guarded(Fallback.CHOOSE_MIXED)
    def prepared(self, result: None, batch: ScheduleBatch) -> None:
        """`ScheduleBatch.prepare_for_extend` is through: is the batch mixed?"""
        if not self.mixes:
            return
        scheduler, self._new = self._scheduler, batch.extend_num_tokens
        scheduler.is_mixed_chunk = False  # unless it is decided
        if (chunked := scheduler.chunked_req) is not None and chunked in batch.reqs:
            place = batch.reqs.index(chunked)
            length = len(chunked.origin_input_ids) + len(chunked.output_ids)
            self._left = length - batch.prefix_lens[place] - batch.extend_lens[place]
        # At most what a step takes: a prompt that was not cached says nothing of those that are.
        each = min(batch.extend_num_tokens / len(batch.reqs), self.rule.tokens)
        self._tokens_each = 0.9 * self._tokens_each + 0.1 * each
        if self._running is None:
            return
        reason = self.rule.why_not(batch, len(self._running.reqs))
        if reason is NotMixed.PASS_IS_FASTER:
            self._passes = PASSES_IN_A_ROW
        # SGLang 0.5.17 does not look whether the running ones find a place behind those that were let in.
        mixed = reason is None and self._running.check_decode_mem()
        if self.paired.possible:
            self.paired.chosen = batch if mixed else None
        else:
            scheduler.is_mixed_chunk = mixed

    @guarded(Fallback.COUNT_DECODED, only_shows=True)
    def count_decoded(self, result: None, processor: Any, batch: ScheduleBatch, of_batch: Any) -> None:
        """`process_batch_result_prefill` of a mixed batch: count its running requests as SGLang counts those of a
        decode batch."""
        if not (self.mixes and batch.decoding_reqs):
            return
        reporter = processor.metrics_reporter
        decoded = copy.copy(batch)
        decoded.reqs = batch.decoding_reqs
        reporter.num_generated_tokens += len(decoded.reqs)
        for req in decoded.reqs:
            if not req.is_retracted:
                req.time_stats.set_last_decode_finish_time()
        reporter.forward_ct_decode = (reporter.forward_ct_decode + 1) % (1 << 30)
        installed.report_decoded(reporter, decoded, of_batch.can_run_cuda_graph)


def stays_apart(req: Req) -> bool:
    """Return whether a request's prompt is neither mixed nor cut to be mixed.

    What SGLang returns of each token of a decode step is of one row a request, in a mixed step of as many as it has: so
    there are no hidden states there (`refusal_of`), nor log-probabilities, which SGLang leaves out itself. Of the other
    things that it returns, see `mixed.take_last_rows`.

    A cut prompt goes on where SGLang keeps what is computed in its tree: up to 0.5.17 at least, it computes the first
    piece of a request that it keeps out of the tree again and again (sgl-project/sglang#36855). One with rows on the
    host cannot be mixed while these are loaded.
    """
    kept_out, on_host = req.skip_radix_cache_insert, req.host_hit_length > 0
    return req.return_logprob or kept_out or on_host or refusal_of(req) is not None

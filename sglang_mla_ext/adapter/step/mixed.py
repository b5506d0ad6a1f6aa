"""A mixed pass: new tokens as rows of the CUDA graph that is captured for decode anyway.

Each layer writes the keys of all rows before it attends. So T new tokens of a request are T rows with one place in the
table of slots and lengths that grow by one: each sees what came before it, and over an expanded prefix it costs what a
decode row costs. `MixedRule` says when that can be and when it is sooner; admission.py decides.

To SGLang's scheduler such a pass is the extend that it planned; with running requests in it, a MIXED one. Only while
the model runs is it a decode step, and its logits are then those of each request's last row.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from sglang_mla_ext.adapter.failure import OurPartFailedError, Running, guarded, our_part, several_ranks
from sglang_mla_ext.adapter.step.passes import Kind, Pass, passes
from sglang_mla_ext.kernels.sizes import MAX_ROWS
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.pass_costs import PassCosts
from sglang_mla_ext.prefix.sharing import Sharing
from sglang_mla_ext.reasons import Fallback, NotMixed
from sglang_mla_ext.rows import Rows
from sglang_mla_ext.segment import Mode

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class MixedRule:
    """Rule of when new tokens are rows of the decode graph.

    Attributes:
        most_rows: that a pass may have.
        tokens: new tokens that a step with running requests may have; 0 where none are rows of the decode graph.
        query_tokens: of a running request, and of a unit that new tokens are padded to.
    """

    def __init__(
        self,
        *,
        tokens: int,
        most_rows: int,
        prefixes: Sharing,
        cost: CostModel,
        counters: Counters,
        grouped: bool,
        expands_once: bool = False,
        graphs: PassCosts | None = None,
        prefill_rows: int = 0,
        agree: Callable[[bool], bool] = bool,
        query_tokens: int = 1,
    ) -> None:
        """
        Args:
            grouped: whether rows of one request can read its own history together.
            expands_once: whether a pass makes keys and values that are not expanded once for all its requests.
            graphs: of passes in prefill graphs; None where there are none.
            prefill_rows: of the largest such pass, also where it runs without its graph; 0 where there is none.
            agree: whether all ranks that compute together say yes; each of them asks.
        """
        self.tokens, self.most_rows, self.query_tokens = tokens, most_rows, query_tokens
        self._prefixes, self._cost, self._counters = prefixes, cost, counters
        self._modes = [Mode.ABSORB, *([Mode.GROUPED_ABSORB] if grouped else [])]
        self._expands_once, self._agree = expands_once, agree
        self._graphs, self._prefill_rows, self._votes = graphs, prefill_rows, False

    @property
    def mixed_rows(self) -> int:
        """Rows that a pass with running requests may have; 0 where new tokens have passes of their own. One that other
        ranks refuse is a pass as in a prefill graph."""
        return min(self.most_rows, self._prefill_rows) if self._votes else self.most_rows

    def begin(self, runner: ModelRunner, *, votes: bool = False) -> None:
        """Log how far the graphs reach, once SGLang has captured them.

        Args:
            votes: ranks may refuse what others would mix.
        """
        self._votes = votes
        if self.tokens and (graphs := runner.decode_cuda_graph_runner) is not None:
            self.most_rows = min(self.most_rows, graphs.max_bs * self.query_tokens)
            logits_gib = graphs.max_bs * self.query_tokens * runner.model_config.vocab_size * 4 / (1 << 30)
            logger.info(
                "hybrid_mla: up to %d new tokens are mixed into a decode step; for that graphs have up to %d rows, "
                "whose logits take %.2f GiB",
                self.tokens,
                self.most_rows,
                logits_gib,
            )

    def allows(self, batch: ScheduleBatch, running: int = 0) -> bool:
        """Return whether new tokens of an extend batch are rows of the decode graph; see `why_not`."""
        return self.why_not(batch, running) is None

    def why_not(self, batch: ScheduleBatch, running: int = 0) -> NotMixed | None:
        """Return why the new tokens of an extend batch have a pass of their own; None if they are rows of the decode
        graph. That is counted, but not of a batch with running requests: it is asked again without them.

        Args:
            batch: prepared, without those that are decoding.
            running: requests that are to decode in the same pass.
        """
        reason = refusal(batch)
        each = self.query_tokens
        rows = each * sum(-(-new // each) for new in batch.extend_lens)
        if reason is None and rows > self.room(running):
            reason = NotMixed.MORE_ROWS
        if reason is None and not self._agree(self._is_sooner(batch)):
            reason = NotMixed.PASS_IS_FASTER
        if reason is not None and not running:
            self.count_refused(reason)
        return reason

    def room(self, running: int) -> int:
        """Return the rows that new tokens may have beside so many running requests."""
        taken = self.query_tokens * running
        most = self.mixed_rows if running else self.most_rows
        return most - taken if taken <= MAX_ROWS else 0

    def count_refused(self, reason: NotMixed) -> None:
        self._counters.not_mixed[reason.code] += 1

    def _is_sooner(self, batch: ScheduleBatch) -> bool:
        """Return whether that is predicted to be sooner than a pass of its own, with what is expanded now."""
        try:
            expanded_lens = self._prefixes.source.expanded_lens(batch.reqs, batch.prefix_lens)
            seconds = self.seconds(batch.prefix_lens, expanded_lens, batch.extend_lens)
            return seconds <= self.pass_seconds(batch.prefix_lens, expanded_lens, batch.extend_lens)
        except Exception as error:  # the other ranks wait for an answer
            self._counters.fall_back(Fallback.PREDICT_MIXED, error)
            return False

    def seconds(self, prefix_lens: Sequence[int], expanded_lens: Sequence[int], new_tokens: Sequence[int]) -> float:
        """Attention of new rows, a layer.

        Args:
            prefix_lens: `[requests]` tokens that are cached; expanded_lens: `[requests]` so many of them are expanded.
            new_tokens: `[requests]` rows.
        """
        cost, total = self._cost, 0.0
        for rows, prefix, expanded in zip(new_tokens, prefix_lens, expanded_lens, strict=True):
            total += cost.work_seconds(Mode.NAIVE, rows, expanded)
            total += min(cost.work_seconds(mode, rows, prefix - expanded) for mode in self._modes)
            total += cost.work_seconds(Mode.ABSORB, rows, (rows + 1) // 2)
        return total

    def pass_seconds(
        self, prefix_lens: Sequence[int], expanded_lens: Sequence[int], new_tokens: Sequence[int]
    ) -> float:
        """A layer of a pass of its own: the host's launches, and attention with keys and values that are made of what
        is cached but not expanded. The sum is 5.7 ms for two requests of 128 heads with 19,264 such tokens each,
        where 5.1 to 6.5 were measured on an H200. Arguments are those of `seconds`."""
        missing = [prefix - expanded for prefix, expanded in zip(prefix_lens, expanded_lens, strict=True)]
        made = max(missing, default=0) if self._expands_once else sum(missing)
        attention = (
            self._cost.work_seconds(Mode.NAIVE, rows, prefix)
            for rows, prefix in zip(new_tokens, prefix_lens, strict=True)
        )
        eager = self._cost.rates.passes.eager_layer_s + self._cost.making_seconds(made) + sum(attention)
        if self._graphs is None:
            return eager
        return min(eager, self._graphs.in_graph(prefix_lens, expanded_lens, new_tokens))


def is_extend(batch: Any) -> bool:
    """Return whether a batch computes new tokens alone, and no drafts."""
    mode = batch.forward_mode
    return mode is type(mode).EXTEND


def refusal_of(req: Req) -> NotMixed | None:
    """Return why no new tokens of this request are rows of the decode graph; None if they may be. Known before any of
    them is computed, and the same for all pieces of a prompt."""
    reasons = {
        NotMixed.INPUT_EMBEDS: req.input_embeds is not None or req.positional_embed_overrides is not None,
        NotMixed.MULTIMODAL: req.multimodal_inputs is not None,
        NotMixed.HIDDEN_STATES: bool(req.return_hidden_states),
        NotMixed.PREFILL_ONLY: req.is_prefill_only,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def refusal(batch: ScheduleBatch) -> NotMixed | None:
    """Return why new tokens of a batch cannot be rows of the decode graph, whatever it costs; None where they can."""
    inputs = zip(batch.extend_lens, batch.extend_logprob_start_lens, strict=True)
    reasons = {
        NotMixed.ENCODER: batch.encoder_lens is not None,
        NotMixed.INPUT_LOGPROBS: batch.return_logprob and any(length > start for length, start in inputs),
        NotMixed.LOADING_FROM_HOST: batch.hicache_consumer_index >= 0,
    }
    of_batch = (reason for reason, applies in reasons.items() if applies)
    return next(chain(filter(None, map(refusal_of, batch.reqs)), of_batch), None)


def around_forward_raw(
    session: Running, original: Callable[..., Any], runner: ModelRunner, forward_batch: ForwardBatch, *args: Any
) -> Any:
    """`ModelRunner._forward_raw`, in which a mixed pass is a decode step, whose logits are those of each request's last
    row. Where our part of that fails, it is the pass that SGLang asked for, which writes the same rows; but not where
    several ranks compute together, of which the others compute rows."""
    now = passes.now
    if runner.is_draft_worker or not now.mixed or now.joined is not None:
        return original(runner, forward_batch, *args)
    try:
        with our_part(Fallback.MAKE_ROWS):
            now.as_rows = as_rows(forward_batch, now.rows)
            now.last_rows = torch.cumsum(forward_batch.extend_seq_lens, dim=0) - 1
        output = original(runner, now.as_rows, *args)
        with our_part(Fallback.TAKE_LAST_LOGITS):
            take_last_rows(output.logits_output, now)
        return output
    except OurPartFailedError as failure:
        if several_ranks():
            raise
        session.steps.fail(failure.what, failure.cause)
    # Not inside of `except`: the error's frames hold tensors.
    now.become(Kind.PREFILL, now.rows)
    return original(runner, forward_batch, *args)


@guarded(Fallback.SELECT_LAST_ROWS)
def select_last_rows(session: Running, metadata: Any, cls: type, forward_batch: Any) -> None:
    """`LogitsMetadata.from_forward_batch`: without a graph the head has those rows alone that logits are wanted of, as
    in the extend that was asked for. So many SGLang expects where ranks gather them."""
    now = passes.now
    if now.last_rows is not None:
        metadata.draft_extend_select_index, now.only_last_rows = now.last_rows, True


def take_last_rows(output: Any, now: Pass) -> None:
    """Keep what SGLang returns for each request: of each one's last row.

    Nothing else that it returns per token comes here: hidden states and log-probabilities are not asked for
    (`refusal_of`), the sampling mask is made of these logits, and experts and indices of sparse attention are recorded
    by slots of the cache.

    Args:
        output: SGLang's LogitsProcessorOutput of the pass `now`.
    """
    if not now.only_last_rows:
        output.next_token_logits = output.next_token_logits[now.last_rows]
    if output.customized_info is not None:  # of models outside of SGLang; the dictionary may be the graph's own
        last = [now.rows.of_request(request)[-1] for request in range(now.rows.requests)]
        output.customized_info = {
            name: values if len(values) == len(last) else [values[row] for row in last]
            for name, values in output.customized_info.items()
        }


def as_rows(batch: ForwardBatch, rows: Rows) -> ForwardBatch:
    """An extend batch as a decode batch of its tokens.

    Args:
        batch: stays as it is: SGLang samples with it.
        rows: as many of each request as it has new tokens.
    """
    mode = type(batch.forward_mode)
    found = copy.copy(batch)
    for field in fields(batch):
        if field.name.startswith("extend_"):
            setattr(found, field.name, None)
    found.forward_mode = mode.DECODE
    if found.global_forward_mode is not None:
        found.global_forward_mode = mode.DECODE
    found.batch_size = rows.total
    found.req_pool_indices = _repeat(batch.req_pool_indices, batch.extend_seq_lens, rows.total)
    found.seq_lens = (batch.positions + 1).to(batch.seq_lens.dtype)
    found.orig_seq_lens = found.seq_lens.to(batch.orig_seq_lens.dtype)
    counts = torch.tensor(batch.extend_seq_lens_cpu)
    first_lens = torch.tensor(batch.extend_prefix_lens_cpu) + 1 - (counts.cumsum(0) - counts)
    found.seq_lens_cpu = (_repeat(first_lens, counts, rows.total) + torch.arange(rows.total)).to(torch.int64)
    found.seq_lens_sum = int(found.seq_lens_cpu.sum())
    found.lora_ids, found.rids = (list(rows.repeat(each)) for each in (batch.lora_ids, batch.rids))
    found.return_logprob = found.is_extend_in_batch = found.is_prefill_only = False
    found.top_logprobs_nums = found.token_ids_logprobs = found.mm_inputs = None
    return found


def _repeat(values: torch.Tensor, counts: torch.Tensor, total: int) -> torch.Tensor:
    return torch.repeat_interleave(values, counts, output_size=total)

"""A joint pass: running requests decode one token each in a prefill pass.

A prefill pass of its own makes all running requests wait. SGLang can take them along as requests with one new token
each (its MIXED batches, --enable-mixed-chunk), in every such pass; without CUDA graphs each of them would then expand
its whole prompt. Here it is decided for each batch: where the pass replays a prefill graph, in which running requests
share prefixes like all others (prefill_graph.py), and where that is predicted to pay.

For running requests the pass replaces a step. Without drafts that always pays: attention costs the same in both, and
the weights are read once instead of twice. A step that verifies W drafted tokens yields up to W tokens, so there the
added attention, times W - 1, must stay below the time that reading the weights takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.step.mixed import refusal
from sglang_mla_ext.adapter.step.passes import Kind, Pass
from sglang_mla_ext.prefix.planner.pass_costs import MOST_FETCHED, PassCosts
from sglang_mla_ext.prefix.sharing import Sharing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

PASSES_APART = 16
"""Prefill passes without running requests after one in which they cost too much."""


class JointRule:
    """Rule of when running requests decode in a prefill pass.

    Attributes:
        possible: whether they ever do.
    """

    def __init__(self, costs: PassCosts | None, prefixes: Sharing, query_tokens: int, *, always: bool = False) -> None:
        """
        Args:
            costs: of passes in prefill graphs; None where no pass is joint.
            prefixes: what is shared.
            query_tokens: of a request in a step, more than one where drafts are verified.
            always: whatever it costs.
        """
        self.possible = costs is not None
        self._costs, self._prefixes, self._query_tokens = costs, prefixes, query_tokens
        self._always = always
        self._replays: Callable[..., bool] | None = None
        self._apart = 0  # prefill passes to go until another one is joint

    def begin(self, runner: ModelRunner, *, votes: bool) -> None:
        """SGLang has captured its graphs.

        Args:
            votes: ranks with requests of their own agree on each pass. SGLang converts their batches itself.
        """
        self._replays = installed.prefill_replays(runner)
        self.possible = self.possible and not votes and self._replays is not None

    def allows(self, batch: ScheduleBatch, running: ScheduleBatch) -> bool:
        """Return whether running requests decode in the pass of a batch of new tokens. Ranks that divide the heads have
        the same batches, and decide alike.

        Args:
            batch: prepared, without running requests.
        """
        costs = self._costs
        if not self.possible or costs is None or self._replays is None or running.is_empty():
            return False
        if self._apart:
            self._apart -= 1
            return False
        if refusal(batch) is not None or batch.return_logprob or running.return_logprob:
            return False
        if running.return_hidden_states or (self._query_tokens > 1 and running.has_grammar):
            return False  # a step that verifies drafts waits for the grammar's state, a prefill pass does not
        requests = len(running.reqs)
        if not self._replays(batch, len(batch.reqs) + requests, batch.extend_num_tokens + requests):
            return False
        expanded = self._prefixes.expanded_lens(batch.reqs, batch.prefix_lens)
        if self._leaves_graph(costs, batch.prefix_lens, expanded, batch.extend_lens):
            return False
        return not costs.fetches or self._tails(batch, running, expanded) <= MOST_FETCHED

    @staticmethod
    def _leaves_graph(
        costs: PassCosts, prefix_lens: Sequence[int], expanded: Sequence[int], new_tokens: Sequence[int]
    ) -> bool:
        """Return whether the pass without running requests is predicted to be sooner outside of its graph."""
        each = zip(prefix_lens, expanded, new_tokens, strict=True)
        ends = [prefix if costs.pays_alone(new, prefix - end) else end for prefix, end, new in each]
        made = sum(ends) - sum(expanded)
        return costs.eager(prefix_lens, ends, new_tokens, made) < costs.in_graph(prefix_lens, ends, new_tokens, made)

    def _tails(self, batch: ScheduleBatch, running: ScheduleBatch, expanded: Sequence[int]) -> int:
        """Return the tokens that are not expanded, of all requests: a layer fetches so many rows of an FP8 cache."""
        lens = [req.seqlen for req in running.reqs]
        of_running = sum(lens) - sum(self._prefixes.expanded_lens(running.reqs, lens))
        return of_running + sum(batch.prefix_lens) - sum(expanded) + batch.extend_num_tokens

    def judge(self, step: Pass, prefix_lens: Sequence[int]) -> None:
        """Learn from the plan of a pass what its running requests cost; it knows what they share.

        Args:
            prefix_lens: `[requests]` tokens that are cached.
        """
        costs, running = self._costs, step.decoding
        if costs is None or self._always or step.kind is not Kind.PREFILL or not running or self._query_tokens == 1:
            return
        covered = (0,) * running if step.prefill is None else step.prefill.covered[-running:]
        tails = sum(costs.absorb(1, cached - end) for cached, end in zip(prefix_lens[-running:], covered, strict=True))
        added = costs.naive(running, max(covered)) + tails
        if added * (self._query_tokens - 1) > costs.graph_layer_s:
            self._apart = PASSES_APART

"""Prepare a step: select which of the backend's parts it uses, and write what they need to the device.

Which of the parts are in a step's CUDA graph depends on its number of requests and its variant (graph_variants.py)
alone, so that a captured graph and its replays agree; a graph with shared attention costs little more where its plan is
empty.

A server with speculative decoding has verify steps in place of decode steps: each request has several query tokens,
each of which is a row of its own, and SGLang does not count them in the request's length yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.step.graph_variants import PLAIN
from sglang_mla_ext.adapter.step.passes import NOTHING_SHARED, Kind, Pass, Way, passes
from sglang_mla_ext.adapter.step.steps import Steps
from sglang_mla_ext.prefix.planner.plan import Plan
from sglang_mla_ext.reasons import Fallback
from sglang_mla_ext.rows import Rows
from sglang_mla_ext.segment import Mode

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_mla_ext.adapter.latent.protocol import LatentAttention
    from sglang_mla_ext.adapter.stock.protocol import Stock
    from sglang_mla_ext.kernels.naive.attention import SharedAttention
    from sglang_mla_ext.prefix.sharded.plan import ShardedPlan


class Preparation:
    """See the module."""

    def __init__(
        self,
        stock: Stock,
        latent: LatentAttention,
        shared: SharedAttention | None,
        steps: Steps,
        *,
        requests: range,
        query_tokens: int,
    ) -> None:
        """See HybridMLABackend."""
        self._stock, self._latent, self._shared, self._steps = stock, latent, shared, steps
        self._requests, self._query_tokens = requests, query_tokens
        # On the device: a plan and the rows that it is for; None where the parts may hold different plans.
        self._written: tuple[Plan | ShardedPlan, Rows] | None = None

    def begin(self, forward_batch: ForwardBatch, *, in_graph: bool, in_capture: bool = False) -> Pass:
        """Make ready for the pass that a batch is of, and say in it whose its attention is: SGLang's backend's, where
        it is no decode or verify step.

        A decode step has one query token of each request, which its length counts.
        """
        step, kind = passes.now, Kind.of(forward_batch.forward_mode)
        ranks = self._steps.sharded
        if ranks is not None and ranks.agreed and step.sharded is None and not in_capture:
            raise RuntimeError("ranks agreed on what this pass shares, and it began without that")
        if in_capture or step.kind is not kind or (kind.is_step and step.rows.requests > forward_batch.batch_size):
            sharded = None if in_capture else step.sharded  # a rank without requests attends for the others
            if sharded is not None and sharded.mine.segments:
                raise RuntimeError("ranks agreed on what another batch shares")
            no_rows = Rows(0, self.tokens_each(kind))
            if in_capture:  # of no batch
                step = passes.begin(Pass(kind, no_rows, graph=installed.captured_graph()))
            else:
                step.become(kind, no_rows)
        step.way = self._way_without_sharing(step)
        can_share = step.kind is (Kind.VERIFY if self._query_tokens > 1 else Kind.DECODE)
        if in_graph and step.graph == PLAIN:
            can_share = False
            if step.way is Way.STOCK and self._stock.plain is not None:
                step.way = Way.PLAIN
        shares = False
        if can_share and (step.sharded is not None or forward_batch.batch_size in self._requests):
            shares = self._write_plan(step, forward_batch, needed=in_graph)
            if in_graph or shares:
                step.way = Way.SHARED
        if step.way in (Way.LATENT, Way.SHARED):
            try:
                self._begin_latent(step, forward_batch)
            except Exception as error:
                if in_capture:
                    raise
                self._begin_again(step, forward_batch, error, in_graph=in_graph)
                shares = False
        if can_share and not in_capture and self._steps.shadow is not None:
            try:
                self._steps.shadow.begin_step(step, shares)
            except Exception as error:
                self._steps.fail(Fallback.SHADOW_CHECK, error)
        step.takes_query = step.way is Way.SHARED and self._shared is not None
        return step

    def tokens_each(self, kind: Kind) -> int:
        """Query tokens of each of SGLang's requests in a step."""
        return self._query_tokens if kind is Kind.VERIFY else 1

    def _way_without_sharing(self, step: Pass) -> Way:
        if not step.kind.is_step or self._stock.decodes:
            return Way.STOCK
        if step.kind is Kind.DECODE and self._query_tokens > 1:
            raise RuntimeError(
                "hybrid_mla: a decode step of a server that verifies drafts, which SGLang never asks for"
            )
        return Way.LATENT

    def _begin_latent(self, step: Pass, forward_batch: ForwardBatch) -> None:
        if self._steps.has_lost_memory:
            raise RuntimeError("hybrid_mla: its memory came back from sleep, and could not be cleared")
        uncounted = self._query_tokens if step.kind is Kind.VERIFY else 0
        self._latent.begin_step(forward_batch, sharing=step.way is Way.SHARED, uncounted=uncounted)

    def _begin_again(self, step: Pass, forward_batch: ForwardBatch, error: Exception, *, in_graph: bool) -> None:
        """Make ready for a step for which that has failed, with nothing shared: where there is no graph, and the stock
        backend can read the pool, for one of its own. What fails here is plain absorb."""
        self._steps.fail(Fallback.PREPARE_STEP, error)
        if step.sharded is not None and not in_graph:
            raise error  # the other ranks count on this one
        if in_graph and step.way is Way.SHARED:
            self._write_plan(step, forward_batch, needed=True)
        else:
            step.way = self._way_without_sharing(step)
        if step.way is not Way.STOCK:
            self._begin_latent(step, forward_batch)

    def end_step(self, forward_batch: ForwardBatch) -> bool:
        """The step has been launched: check it, if its turn has come.

        Returns:
            whether a check was launched, which reads the requests' slots.
        """
        if self._steps.shadow is None:
            return False
        checked = True
        try:
            checked = self._steps.shadow.end_step(forward_batch)
        except Exception as error:
            self._steps.fail(Fallback.SHADOW_CHECK, error)
        if checked:
            self._written = None  # what was planned for attention to latents
        return checked

    def count_rows_as_prefill(self, forward_batch: ForwardBatch) -> None:
        """Count the rows of a decode or verify step that SGLang runs as prefill, and of requests that decode in one."""
        planned_as = forward_batch._original_forward_mode  # None where it is still that
        if planned_as is not None and Kind.of(planned_as).is_step:
            self._steps.counters.rows_as_prefill += forward_batch.batch_size * self._query_tokens
        elif passes.now.kind is Kind.PREFILL and passes.now.decoding:
            self._steps.counters.rows_as_prefill += passes.now.decoding

    def _write_plan(self, step: Pass, forward_batch: ForwardBatch, *, needed: bool) -> bool:
        """Bring a step's plan to the device, if it is not there; whether it shares anything.

        A change of the number of rows alone can change the kernels' tiles.

        Args:
            needed: the step has shared attention in it, whether or not anything is shared.
        """
        planned = step.plan if step.sharded is None else step.sharded
        if not planned.segments and not needed:
            return False
        each = self.tokens_each(step.kind)
        rows = step.rows.padded(forward_batch.batch_size * each, each)
        if needed and step.sharded is not None and step.sharded.each != rows.total:
            raise RuntimeError(f"ranks agreed on {step.sharded.each} rows of each, and the graph has {rows.total}")
        if self._written is None or planned is not self._written[0] or rows != self._written[1]:
            self._written = None
            try:
                self._write(step.plan, rows, step)
                if planned.segments:
                    self._steps.succeed()
            except Exception as error:
                if step.sharded is not None:
                    raise  # the other ranks count on this one
                self._steps.fail(Fallback.WRITE_PLAN, error)
                step.share_nothing()
                if not needed:
                    return False
                self._write(NOTHING_SHARED, rows, step)
                planned = NOTHING_SHARED
            self._written = planned, rows
        return bool(planned.segments)

    def _write(self, plan: Plan, rows: Rows, step: Pass) -> None:
        if step.sharded is not None:
            assert self._shared is not None, "ranks that shard prefixes expand them"
            self._shared.plan(step.sharded.segments, step.sharded.each)
        elif self._shared is not None:
            self._shared.plan(rows.by_row(plan.of_mode(Mode.NAIVE)), rows.total)
        units = rows.units(self._query_tokens)
        grouped, tail_tokens = units.by_row(plan.of_mode(Mode.GROUPED_ABSORB)), 0
        if grouped:
            requests = zip(step.reqs, plan.prefix_lens, units.lens, strict=False)  # units has padding, too
            tail_tokens = sum(count * max(req.seqlen - start, 0) for req, start, count in requests)
        self._latent.plan(grouped, units.repeat(plan.prefix_lens), units.total, tail_tokens)

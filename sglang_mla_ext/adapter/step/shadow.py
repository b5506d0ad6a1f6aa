"""Shadow check: now and then, compute a layer's shared attention again by plain absorb, and compare.

A step that is checked is the step that is served. Its merge copies queries and result of one layer and some rows, told
to by a number in device memory (kernels/watch.py). So a captured graph is checked as it is: the same launches with the
same addresses, and the copy is what the layer handed on. Behind the step, on its stream and before anything else comes
there, plain absorb attends to the same latent rows: nobody has written to the slots yet, not even of requests that end
with this step. The result is judged when it has arrived, a step or two later; nothing waits for it.

Every rank checks its own heads, and turns sharing off for itself: ranks need not share the same.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sglang_mla_ext.adapter.latent.protocol import LatentAttention
from sglang_mla_ext.adapter.prefill.expander import weights_of
from sglang_mla_ext.adapter.step.passes import Pass
from sglang_mla_ext.kernels.memory import Memory
from sglang_mla_ext.kernels.watch import Watch, Watched
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.planner.planner import Held
from sglang_mla_ext.prefix.sharing import Sharing
from sglang_mla_ext.rows import Rows

if TYPE_CHECKING:
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

logger = logging.getLogger(__name__)

KEPT_ERRORS = 4096
"""Most errors that wait for the metrics."""

ROWS = 64
"""Query tokens that are checked at a time: 11 MiB at 128 heads in BF16."""

BOUND, WIDE_BOUND = 0.03, 0.15
"""Relative errors of a row above which it is wrong, less than the error by a prefix that is left out, taken twice or
another one. The first is several times the rounding error in BF16, 0.4 % to 0.6 %. The second is for FP8, whose
rounding error is 3 %, and for sharded prefixes: heads of the other ranks attend to what those have expanded from latent
rows that they computed in other batches, which differ more with each layer (3.1 % seen in the fourth one of a random
model)."""


class Requests(NamedTuple):
    """Requests of a batch, with the fields of SGLang's ForwardBatch that attention to latents reads."""

    batch_size: int
    req_pool_indices: Tensor
    seq_lens: Tensor


@dataclass(frozen=True)
class CheckedRows:
    """The rows of a step that are checked.

    Attributes:
        layer: index of the layer.
        first: the first of them; count: how many.
        rows: of the step's requests.
        held: what the step shared.
    """

    layer: int
    first: int
    count: int
    rows: Rows
    held: Sequence[Held]


@dataclass(frozen=True)
class Finding:
    """Result of a shadow check.

    Attributes:
        layer: SGLang's id.
        errors: `[rows]` error relative to the L2 norm of each row, all heads together.
        wrong: requests of the batch with a row above the bound; nan counts as that.
        suspects: segments that these requests share, and no request whose rows are right; if there are none, all
            segments that these share.
    """

    layer: int
    errors: list[float]
    wrong: frozenset[int]
    suspects: list[Held]


class ShadowCheck:
    """See the module.

    shadow.begin_step(step, shares)   # before every decode or verify step
    shadow.watched(...)               # in its layers: what their merge is to be given
    shadow.end_step(batch)            # behind it
    shadow.judge()                    # on any later occasion
    """

    def __init__(
        self,
        interval: int,
        layers: Sequence[DeepseekV2AttentionMLA],
        latent: LatentAttention,
        prefixes: Sharing,
        counters: Counters,
        *,
        in_latent_space: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        bound: float,
        query_tokens: int,
        memory: Memory | None = None,
    ) -> None:
        """
        Args:
            interval: steps from one check to the next; a step that shares nothing is not checked, the next one is.
            layers: of the model on this rank; they take turns.
            latent: attention in the latent space, allocated.
            prefixes: says what the coming step shares, and is told what was wrong.
            in_latent_space: what is merged is, because nothing is expanded; otherwise it is behind `w_vc`.
            dtype: of queries and results.
            bound: of a row's relative error.
            query_tokens: of a request in a step.
            memory: where the copies are allocated.
        """
        self._interval, self._layers, self._latent = interval, layers, latent
        self._prefixes, self._counters = prefixes, counters
        self._in_latent_space, self._query_tokens, self._bound = in_latent_space, query_tokens, bound
        self._watch = Watch(
            **self._sizes(layers[0], dtype, query_tokens, in_latent_space), device=device, memory=memory
        )
        self._since = self._checks = 0
        self._checked: CheckedRows | None = None
        self._arriving: tuple[CheckedRows, Tensor, torch.cuda.Event | None] | None = None
        self._errors: deque[float] = deque(maxlen=KEPT_ERRORS)

    @staticmethod
    def _sizes(
        layer: DeepseekV2AttentionMLA, dtype: torch.dtype, query_tokens: int, in_latent_space: bool
    ) -> dict[str, Any]:
        rank = layer.kv_lora_rank
        return dict(
            max_rows=ROWS // query_tokens * query_tokens,
            heads=layer.num_local_heads,
            columns=rank + layer.qk_rope_head_dim,
            dv=rank if in_latent_space else layer.v_head_dim,
            dtype=dtype,
        )

    @classmethod
    def workspace_bytes_for(cls, layer: DeepseekV2AttentionMLA, dtype: torch.dtype, query_tokens: int) -> int:
        """The most device memory that an object keeps, before it exists."""
        sizes = (cls._sizes(layer, dtype, query_tokens, in_latent_space) for in_latent_space in (False, True))
        return max(Watch.workspace_bytes_for(**each) for each in sizes)

    def try_out(self) -> None:
        """Check a request with one token, whatever that is, so that everything is compiled."""
        one = torch.ones(1, dtype=torch.int64, device=self._watch.target.device)
        self._checked = CheckedRows(0, 0, self._query_tokens, Rows(1, self._query_tokens), ())
        self.end_step(Requests(1, one - 1, one))
        self._arriving = None

    # ---- a step

    def begin_step(self, step: Pass, shares: bool) -> None:
        """
        Args:
            step: the coming one.
            shares: whether it shares anything.
        """
        self._since += 1
        self._checked = None
        if not shares or self._since < self._interval or self._arriving is not None:
            return
        held, at_once = self._prefixes.held(), self._watch.max_rows
        firsts: list[int] = []  # of the windows that all who share begin in
        for request in sorted({request for segment, _ in held for request in segment.rows}):
            rows = step.rows.of_request(request)
            if rows and (not firsts or rows.start > firsts[-1] + at_once - self._query_tokens):
                firsts.append(rows.start)
        if not firsts:
            return
        self._since = 0
        layer, first = self._checks % len(self._layers), firsts[self._checks // len(self._layers) % len(firsts)]
        self._checks += 1
        self._watch.set_target(self._layers[layer].attn_mqa.layer_id, first)
        count = min(at_once, step.rows.total - first)
        self._checked = CheckedRows(layer, first, count, step.rows, held)  # only if that has not failed

    def watched(self, layer_id: int, q_absorbed: Tensor, q_rope: Tensor) -> Watched:
        """Return what a layer's merge needs to be checked. It is passed in every step: a graph may be captured now and
        checked later."""
        return Watched(self._watch, layer_id, q_absorbed, q_rope)

    @torch.no_grad()
    def end_step(self, batch: Any) -> bool:
        """Compute again what is checked, if anything is.

        Args:
            batch: SGLang's ForwardBatch of the step that has just been launched.
        Returns:
            whether it did; what was planned for attention to latents is lost then.
        """
        checked, self._checked = self._checked, None
        if checked is None:
            return False
        self._watch.clear_target()
        rows, query_tokens = checked.count, self._query_tokens
        units = rows // query_tokens  # of a batch: its requests, or where these have any number of rows, its rows
        some = slice(checked.first // query_tokens, checked.first // query_tokens + units)
        requests = Requests(units, batch.req_pool_indices[some], batch.seq_lens[some])
        self._latent.plan((), (), units)
        self._latent.begin_step(requests, sharing=False, uncounted=query_tokens if query_tokens > 1 else 0)
        layer = self._layers[checked.layer]
        attention = layer.attn_mqa
        content, rope = self._watch.query[:rows].split([layer.kv_lora_rank, layer.qk_rope_head_dim], dim=-1)
        expected, _ = self._latent.run(attention.layer_id, content, rope, attention.scaling)
        if not self._in_latent_space:
            weights = weights_of(layer, expected.dtype)
            assert weights is not None, "tried as the check was made"
            expected = torch.einsum("thr,hvr->thv", expected, weights[1])
        errors = row_errors(self._watch.out[:rows], expected)
        on_gpu = errors.is_cuda
        host = torch.empty(rows, dtype=torch.float32, pin_memory=on_gpu)
        host.copy_(errors, non_blocking=True)
        self._arriving = checked, host, torch.cuda.current_stream().record_event() if on_gpu else None
        return True

    def finding(self) -> Finding | None:
        """Return the finding of the last check, once, when its result has arrived; None otherwise."""
        if self._arriving is None:
            return None
        checked, host, event = self._arriving
        if event is not None and not event.query():
            return None
        self._arriving = None
        errors: list[float] = host.tolist()
        of_requests: dict[int, list[float]] = {}
        for row, error in enumerate(errors, start=checked.first):
            of_requests.setdefault(checked.rows.request_of(row), []).append(error)
        right: set[int] = set()
        wrong: set[int] = set()
        for request, of_request in of_requests.items():
            (right if all(error <= self._bound for error in of_request) else wrong).add(request)
        held = [each for each in checked.held if wrong.intersection(each[0].rows)]
        suspects = [each for each in held if right.isdisjoint(each[0].rows)]
        layer_id = self._layers[checked.layer].attn_mqa.layer_id
        return Finding(layer_id, errors, frozenset(wrong), suspects or held)

    def judge(self) -> None:
        """Count what the last check has found, when that is known, and stop sharing what is wrong."""
        finding = self.finding()
        if finding is None:
            return
        self._counters.shadow_checks += 1
        self._errors.extend(finding.errors)
        if not finding.wrong:
            return
        self._counters.shadow_failures += 1
        logger.warning(
            "hybrid_mla: the shadow check found layer %d wrong for %d requests: relative errors up to %.3g, %g is the "
            "bound. No longer shared: %s",
            finding.layer,
            len(finding.wrong),
            max(finding.errors, key=lambda error: (error != error, error)),  # nan is the worst
            self._bound,
            "; ".join(
                f"tokens [{each.start}, {each.end}) of {len(each.rows)} requests ({each.mode.value})"
                for each, _ in finding.suspects
            )
            or "nothing, the wrong ones shared nothing",
        )
        self._prefixes.distrust({node for _, nodes in finding.suspects for node in nodes})

    def pop_errors(self) -> list[float]:
        """Return the errors of rows that were found since the last call."""
        errors = list(self._errors)
        self._errors.clear()
        return errors

    def forget(self) -> None:
        """Drop the check under way: what was expanded or planned is gone, so its result no longer means anything."""
        self._arriving = None


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the relative errors, `[T]` float32: L2 norm of the difference over that of `expected`, both `[T, H, dv]`;
    0 where both are 0."""
    actual, expected = actual.flatten(1).float(), expected.flatten(1).float()
    difference, size = (actual - expected).norm(dim=1), expected.norm(dim=1)
    return torch.where(difference == 0, 0.0, difference / size)

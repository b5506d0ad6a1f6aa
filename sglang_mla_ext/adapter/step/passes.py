"""State of the current forward pass, for all of our code that runs in it.

SGLang copies a `ForwardBatch` field by field before it runs it, so nothing of ours can travel on one; and it runs one
pass at a time in a process. So the pass that runs stands here. It is made when SGLang has chosen a batch, and ends with
SGLang's forward pass, whatever becomes of that. Where there was no batch, for a CUDA graph that is captured, the
backend makes it.

A pass also holds what SGLang's layer does not hand on, because it gives an attention backend the absorbed query alone
and takes the latent output back: the hook after the query's split leaves the query here, the backend takes it and
leaves the tail's lse, and the hook before the output projection merges where it finds that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from sglang_mla_ext.prefix.planner.plan import Plan
from sglang_mla_ext.rows import Rows

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from torch import Tensor

    from sglang_mla_ext.adapter.prefill.prefill import PrefillPlan
    from sglang_mla_ext.kernels.watch import Watched
    from sglang_mla_ext.prefix.sharded.plan import ShardedPlan

NOTHING_SHARED = Plan(0)
NO_ROWS = Rows(0)


class Kind(Enum):
    """Kind of a forward pass. A server that drafts has verify steps in place of decode steps."""

    DECODE = "decode"
    VERIFY = "verify"
    PREFILL = "prefill"
    OTHER = "other"

    @classmethod
    def of(cls, mode: ForwardMode) -> Kind:
        """Return the kind for SGLang's own mode, which counts a verify step as prefill, too."""
        if mode.is_decode():
            return cls.DECODE
        if mode.is_target_verify():
            return cls.VERIFY
        return cls.PREFILL if mode.is_extend() else cls.OTHER

    @property
    def is_step(self) -> bool:
        """Return whether the pass is a decode or verify step."""
        return self in (Kind.DECODE, Kind.VERIFY)


class Way(Enum):
    """Attention that a step uses: SGLang's, SGLang's of a plain graph (graph_variants.py), ours to all keys of a
    request, or ours to what is shared and to tails."""

    STOCK = "stock"
    PLAIN = "plain"
    LATENT = "latent"
    SHARED = "shared"


@dataclass
class Pass:
    """A forward pass of the model.

    Attributes:
        rows: of each of its requests.
        plan: of a decode or verify step, what its requests share.
        reqs: its requests, once a plan is made for them.
        prefill: of prefill, what is attended to in expanded form; None where nothing is.
        absorbs: a prefill by absorb that may share, with or without a CUDA graph (prefill_graph.py).
        leaves_graph: a prefill that is sooner without its CUDA graph.
        way: of a decode or verify step; set when it begins.
        graph: label of the CUDA graph that it replays, where there are several of a size (graph_variants.py).
        takes_query: whether it attends to expanded segments, so that its layers' queries are needed before absorption.
        mixed: whether it computes new tokens as rows of the decode graph (mixed.py). decoding: in such a pass, and in
            a prefill, so many of its requests, the last ones, decode.
        joined: the batch whose new tokens are in a verify step (paired.py). done: results of a pass whose tokens were.
        as_rows: SGLang's batch of these rows, once it runs. last_rows: `[requests]` the last row of each.
        only_last_rows: whether its logits are of these alone.
        sharded: plan that the ranks of sharded prefixes agreed on for it; None where they agreed on nothing.
        watched: what is to be copied in the merge of the layer that runs now, if anything ever is.
        q_nope: `[rows, heads, qk_nope_head_dim]`, the query of the layer that runs now, before absorption.
        tail_lse: `[rows, heads]` float32, natural log, of the layer whose shared part is still to be merged.
        query_scaling: `[rows, 1, 1]`; None unless the model scales its queries by their positions.
    """

    kind: Kind
    rows: Rows = NO_ROWS
    plan: Plan = NOTHING_SHARED
    reqs: Sequence[Req] = ()
    prefill: PrefillPlan | None = None
    absorbs: bool = False
    leaves_graph: bool = False
    way: Way = Way.STOCK
    graph: str | None = None
    takes_query: bool = False
    mixed: bool = False
    decoding: int = 0
    joined: ScheduleBatch | None = None
    done: Any = None
    as_rows: Any = None
    last_rows: Any = None
    only_last_rows: bool = False
    sharded: ShardedPlan | None = None
    watched: Watched | None = None
    q_nope: Tensor | None = None
    tail_lse: Tensor | None = None
    query_scaling: Tensor | None = None

    def share_nothing(self) -> None:
        """Forget what was planned, and what a layer has left. What ranks agreed on stands, as on the others."""
        self.q_nope = self.tail_lse = None
        if self.sharded is None:
            self.plan, self.prefill = NOTHING_SHARED, None

    def become(self, kind: Kind, rows: Rows) -> None:
        """Turn the pass into one of another kind, as which SGLang computes it. Nothing was planned for that kind but
        what ranks agreed on."""
        self.kind, self.rows, self.reqs = kind, rows, ()
        self.absorbs = self.leaves_graph = self.mixed = self.only_last_rows = False
        self.decoding, self.joined, self.as_rows, self.last_rows = 0, None, None, None
        self.share_nothing()
        self.plan = NOTHING_SHARED


class Passes:
    """Attributes:
    now: the pass that runs, or is about to; between passes one that shares nothing.
    """

    def __init__(self) -> None:
        self.now = Pass(Kind.OTHER)

    def begin(self, chosen: Pass) -> Pass:
        """Make the chosen pass the next one."""
        self.now = chosen
        return chosen

    def end(self) -> None:
        """End the pass: it is over, or what comes is a pass of the draft model."""
        self.now = Pass(Kind.OTHER)


passes = Passes()

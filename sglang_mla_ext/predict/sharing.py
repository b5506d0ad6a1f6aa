"""Predict a server's plan for requests that share one prompt, with its own planner and a tree of that prompt alone."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from sglang_mla_ext.kernels.absorb.stacking import rows_per_tile  # plain Python, as sizes
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS, MAX_ROWS, MAX_SEGMENTS, PAGE_TOKENS, SEGMENTS_PER_ROW
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.prefix.planner.branches import Branches
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.gains import Gains
from sglang_mla_ext.prefix.planner.plan import Plan
from sglang_mla_ext.prefix.planner.planner import Planner
from sglang_mla_ext.prefix.planner.room import Capacity
from sglang_mla_ext.prefix.tree import SharedTree
from sglang_mla_ext.segment import Mode


class Cover(NamedTuple):
    """Tokens of a prompt that a step's requests share, by the way that it attends to them.

    Attributes:
        naive: first tokens, which are expanded; grouped: those behind them, by grouped absorb. The others are attended
            to as tails are, by plain absorb.
    """

    naive: int = 0
    grouped: int = 0

    @property
    def mode(self) -> Mode:
        """Mode of the first tokens."""
        return Mode.NAIVE if self.naive else Mode.GROUPED_ABSORB if self.grouped else Mode.ABSORB


PLAIN = Cover()


def may_group(cost: CostModel) -> bool:
    """Return whether `auto` uses grouped absorb with these heads on this GPU."""
    if cost.ranks > 1:  # what is sharded is shared among the requests of all ranks, in one way
        return False
    return cost.rates.modes[Mode.GROUPED_ABSORB].measured and rows_per_tile(cost.local_heads) is not None


def plan(cost: CostModel, requests: int, prompt: int, chunks: int) -> Plan:
    """Plan a decode step of requests of one rank that share a prompt, as a server with default options does once
    everything is expanded that memory allows.

    With sharded prefixes, the plan covers the requests of all ranks, each of which has this many.

    Args:
        prompt: tokens, shared in whole pages, or in whole chunks where ranks shard them; chunks: of expanded tokens
            that fit in memory.
    """
    unit = PAGE_TOKENS if cost.ranks == 1 else CHUNK_TOKENS
    tokens = prompt // unit * unit
    if requests * cost.query_tokens > MAX_ROWS or not tokens:
        return Plan(requests)
    tree = SharedTree(["prompt"], [-1], [tokens], [0] * requests * cost.ranks)
    expanded = min(chunks * CHUNK_TOKENS, tokens)
    chunk_ids = list(range(-(-expanded // CHUNK_TOKENS)))
    planner = Planner(
        HybridMLAOptions(),
        cost,
        Capacity(MAX_SEGMENTS, SEGMENTS_PER_ROW * cost.ranks * (MAX_ROWS // cost.query_tokens)),
        CHUNK_TOKENS,
        Counters(),
        naive=chunks > 0,
        grouped_page=PAGE_TOKENS if may_group(cost) else None,
    )
    candidates = planner.candidates(Branches(tree))
    return planner.plan(candidates, planner.best(candidates), lambda nodes, ends, start: (expanded, chunk_ids)).plan


def cover(planned: Plan) -> Cover:
    """Return how the plan's requests, which all share the same prompt, attend to it."""
    naive, grouped = (
        sum(segment.tokens for segment in planned.of_mode(mode)) for mode in (Mode.NAIVE, Mode.GROUPED_ABSORB)
    )
    return Cover(naive, grouped)


def saved_seconds(cost: CostModel, planned: Plan) -> float:
    """Seconds that a plan saves over plain absorb in a layer, by the planner's own count."""
    tokens = sum(segment.tokens for segment in planned.segments)
    gains = Gains.of(HybridMLAOptions(), cost, naive=True, grouped=True, step_tokens=tokens)
    saved, launched = 0.0, set()
    for segment in planned.segments:
        gain = gains.naive if segment.mode is Mode.NAIVE else gains.grouped
        assert gain is not None
        saved += gain(len(segment.rows), segment.start, segment.end)
        launched.add(segment.mode)
    return saved - sum(gains.launch(mode, planned.requests) for mode in launched)


def pays_from(cost: CostModel, prompt: int, chunks: int) -> int | None:
    """The fewest requests of a rank that a server has share a prompt; None where it never has them. By
    bisection: a few fewer may share, too, where they fill the tiles of their kernel."""

    def shares(requests: int) -> bool:
        return bool(plan(cost, requests, prompt, chunks).segments)

    most = MAX_ROWS // cost.query_tokens
    found = bisect_left(range(most + 1), True, lo=2 if cost.ranks == 1 else 1, key=shares)
    return found if found <= most else None

"""Trees of shared prompts, the ways to attend to them, and which one the planner chooses. Nothing is timed here.

In a case each node of a tree is attended to by plain absorb, grouped absorb or naive attention; a node is shared only
where the one above it is. step_plans.py times every such assignment; from its records, of `bench` `plans`, follows what
the planner's choice loses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tabulate import tabulate

from bench.cases import PAGE_TOKENS
from bench.planner_verdicts import DIMS, ELEMENT_BYTES
from sglang_mla_ext.kernels.absorb.stacking import STACKED_HEADS
from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.prefix.planner.branches import Branches
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.covers import Ways, whole
from sglang_mla_ext.prefix.planner.gains import Gains
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates
from sglang_mla_ext.prefix.planner.plan import plan_step
from sglang_mla_ext.prefix.planner.room import Capacity
from sglang_mla_ext.prefix.tree import SharedTree
from sglang_mla_ext.segment import Mode

CHUNK = 256  # tokens of a chunk of expanded tokens


@dataclass(frozen=True)
class Tree:
    """Shared prompts.

    Attributes:
        parents: `[nodes]` the node above each, -1 at the top; parents come first.
        tokens: `[nodes]`, whole chunks; rows: `[nodes]` requests whose shared prompt ends there.
    """

    name: str
    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def batch(self) -> int:
        """Rows of the step."""
        return sum(self.rows)

    @property
    def ends(self) -> list[int]:
        """`[nodes]` tokens from the top to the end of each."""
        ends: list[int] = []
        for parent, tokens in zip(self.parents, self.tokens, strict=True):
            ends.append(tokens + (ends[parent] if parent >= 0 else 0))
        return ends

    @property
    def node_of_row(self) -> list[int]:
        """`[batch]`"""
        return [node for node, rows in enumerate(self.rows) for _ in range(rows)]

    def path(self, node: int) -> list[int]:
        """Nodes from the top to this one."""
        return [] if node < 0 else [*self.path(self.parents[node]), node]

    def rows_of(self, node: int) -> tuple[int, ...]:
        """Rows whose path has this node."""
        return tuple(row for row, end in enumerate(self.node_of_row) if node in self.path(end))


NESTED = Tree("nested", (-1, 0, 1), (8192, 4096, 4096), (64, 32, 32))
NESTED_SHORT = Tree("nested short", (-1, 0, 1), (2048, 1024, 1024), (64, 32, 32))
MIXED = Tree("mixed", (-1, 0, -1, -1), (11008, 2048, 19456, 3328), (30, 60, 40, 30))
SMALL = Tree("small groups", (-1, -1, -1, -1), (8192, 8192, 4096, 4096), (8, 16, 24, 48))
DEEP = Tree("deep", (-1, 0, 1, 2), (6144, 6144, 6144, 6144), (64, 32, 16, 16))
TREES = (NESTED, NESTED_SHORT, MIXED, SMALL, DEEP)
HEADS = (128, 16)

SEGMENTS_S = (0.0, 1e-6, 2e-6, 3e-6, 4e-6, 5e-6)
"""Candidates of `with_fitted_segments`."""

Modes = tuple[Mode, ...]
"""`[nodes]`: how each is attended to."""


def assignments(tree: Tree, heads: int) -> Iterator[Modes]:
    """All that a server could plan."""
    ways = [Mode.ABSORB, Mode.NAIVE, *([Mode.GROUPED_ABSORB] if heads in STACKED_HEADS else [])]
    for modes in itertools.product(ways, repeat=len(tree.parents)):
        shared = [mode is not Mode.ABSORB for mode in modes]
        if all(
            parent < 0 or shared[parent] or not of_node for parent, of_node in zip(tree.parents, shared, strict=True)
        ):
            yield modes


def name_of(modes: Modes) -> str:
    """Return the name of an assignment in a record."""
    return " ".join(mode.value for mode in modes)


def chosen(tree: Tree, heads: int, dtype: str, rates: GpuRates) -> str:
    """The planner's choice with these rates, by name."""
    cost = CostModel(DIMS, heads, rates, expanded_element_bytes=ELEMENT_BYTES[dtype])
    grouped = heads in STACKED_HEADS
    gains = Gains.of(HybridMLAOptions(), cost, naive=True, grouped=grouped, step_tokens=sum(tree.tokens))
    branches = Branches(SharedTree(range(len(tree.parents)), tree.parents, tree.ends, tree.node_of_row))
    ways = Ways(gains.naive, gains.grouped, CHUNK, PAGE_TOKENS)
    modes = [Mode.ABSORB] * len(tree.parents)
    room = Capacity(len(branches), tree.batch * len(branches))
    for part in plan_step(branches, ways, whole(branches), gains.launch, room)[0]:
        modes[branches[part.branch].nodes[-1]] = part.mode
    return name_of(tuple(modes))


def with_fitted_segments(records: Sequence[Mapping[str, Any]], rates: GpuRates) -> GpuRates:
    """The same rates with the `segment_s` of both modes for which the planner's choices lose least on average; of equal
    ones the smallest. What is measured of one more segment (calibration.one_more_segment) is within its noise."""

    def with_segments(naive_s: float, grouped_s: float) -> GpuRates:
        more = {Mode.NAIVE: naive_s, Mode.GROUPED_ABSORB: grouped_s}
        return replace(rates, modes=rates.modes | {m: replace(rates.modes[m], segment_s=s) for m, s in more.items()})

    def mean_loss(candidate: GpuRates) -> float:
        return sum(judged(record, candidate).loss for record in records) / len(records)

    candidates = sorted(itertools.product(SEGMENTS_S, repeat=2), key=sum)
    return min(itertools.starmap(with_segments, candidates), key=mean_loss)


class Judged(NamedTuple):
    """The planner's choice in a case and the fastest assignment, by name; `loss`: how much longer the choice takes."""

    chosen: str
    fastest: str
    loss: float


def judged(record: Mapping[str, Any], rates: GpuRates) -> Judged:
    """Return what the planner chooses in a record's case with these rates."""
    case, ms = record["case"], record["ms"]
    tree = Tree(case["tree"], *(tuple(case[name]) for name in ("parents", "tokens", "rows")))
    choice, fastest = chosen(tree, case["heads"], case["dtype"], rates), min(ms, key=lambda name: ms[name])
    return Judged(choice, fastest, ms[choice] / ms[fastest] - 1)


COLUMNS = ("tree", "heads", "prefix in", "absorb us", "chosen us", "fastest us", "loss", "chosen", "fastest")


def plans_rows(records: Iterable[Mapping[str, Any]], rates: GpuRates) -> list[tuple[Any, ...]]:
    """Return for each case what plain absorb, the planner's choice with these rates and the fastest assignment take."""
    rows = []
    for record in records:
        case, ms = record["case"], record["ms"]
        choice, fastest, loss = judged(record, rates)
        absorb = name_of((Mode.ABSORB,) * len(case["parents"]))
        times = (f"{ms[name] * 1e3:.0f}" for name in (absorb, choice, fastest))
        rows.append((case["tree"], case["heads"], case["dtype"].upper(), *times, f"{loss:.0%}", choice, fastest))
    return rows


def plans_table(records: Iterable[Mapping[str, Any]], rates: GpuRates) -> str:
    """`plans_rows` for the console."""
    return tabulate(plans_rows(records, rates), COLUMNS)

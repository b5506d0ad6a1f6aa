"""Times of whole plans on trees of shared prompts, and of one more segment: nested and mixed cases for
`calibrate.py --check`, and `segment_s` for its rates.

In a case each node of a tree is attended to by plain absorb, grouped absorb or naive attention; a node is shared only
where the one above it is. Every such assignment is timed as a server runs it: one launch for all expanded segments, one
for all that is read in the latent space, the merges. The planner's choice is compared with the fastest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from bench.cases import DN, DR, DV, PAGE_TOKENS, SCALE
from bench.grouped import GROUPED_HEADS, grouped_over
from bench.planner_verdicts import DIMS, ELEMENT_BYTES
from bench.records import write_record
from bench.rivals import flashmla_over
from bench.shared import DTYPES, STORAGE
from bench.timing import attempt, free_memory, measure
from sglang_mla_ext.kernels.absorb.schedule import LatentSegment
from sglang_mla_ext.kernels.dispatch import make_shared_attention
from sglang_mla_ext.kernels.naive.schedule import ExpandedSegment
from sglang_mla_ext.kernels.storage.expanded import CHUNK_TOKENS, ExpandedBuffers
from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.prefix.cost_model import CostModel, GpuRates, Mode
from sglang_mla_ext.prefix.gains import Gains
from sglang_mla_ext.prefix.planner import Runs, Ways, plan_step, whole
from sglang_mla_ext.prefix.tree import SharedTree

TAIL = 512  # tokens that each row has alone


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

Modes = tuple[Mode, ...]
"""`[nodes]`: how each is attended to."""


def assignments(tree: Tree, heads: int) -> Iterator[Modes]:
    """All that a server could plan."""
    ways = [Mode.ABSORB, Mode.NAIVE, *([Mode.GROUPED_ABSORB] if heads in GROUPED_HEADS else [])]
    for modes in itertools.product(ways, repeat=len(tree.parents)):
        shared = [mode is not Mode.ABSORB for mode in modes]
        if all(
            parent < 0 or shared[parent] or not of_node for parent, of_node in zip(tree.parents, shared, strict=True)
        ):
            yield modes


def name_of(modes: Modes) -> str:
    """Of an assignment in a record."""
    return " ".join(mode.value for mode in modes)


def chosen(tree: Tree, heads: int, dtype: str, rates: GpuRates) -> str:
    """The planner's choice with these rates, by name."""
    cost = CostModel(DIMS, heads, rates, expanded_element_bytes=ELEMENT_BYTES[dtype])
    grouped = heads in GROUPED_HEADS
    gains = Gains.of(HybridMLAOptions(), cost, naive=True, grouped=grouped, step_tokens=sum(tree.tokens))
    runs = Runs(SharedTree(range(len(tree.parents)), tree.parents, tree.ends, tree.node_of_row))
    ways = Ways(gains.naive, gains.grouped, CHUNK_TOKENS, PAGE_TOKENS)
    modes = [Mode.ABSORB] * len(tree.parents)
    for group in plan_step(runs, ways, whole(runs), gains.launch):
        modes[group.node] = group.mode
    return name_of(tuple(modes))


class Step:
    """Random data of a case, and calls that attend to it."""

    def __init__(self, tree: Tree, heads: int, dtype: str, rates: GpuRates) -> None:
        self.tree, self.heads = tree, heads
        chunks = [tokens // CHUNK_TOKENS for tokens in tree.tokens]
        self._first_chunk = [0, *itertools.accumulate(chunks)]
        sizes = dict(qk_nope_head_dim=DN, v_head_dim=DV, qk_rope_head_dim=DR, dtype=DTYPES[dtype])
        self._buffers = ExpandedBuffers.allocate(layers=1, chunks=sum(chunks), heads=heads, **sizes)
        for tensor in (self._buffers.k_nope, self._buffers.v_t, self._buffers.k_rope):
            tensor.copy_(torch.randn(tensor.shape, device="cuda", dtype=torch.bfloat16))
        self._tiles = rates.naive_tiles.get(STORAGE[dtype], ())
        first = [0, *itertools.accumulate(tokens // PAGE_TOKENS for tokens in tree.tokens)]
        pages, used = [], first[-1]
        for node in tree.node_of_row:
            own = range(used, used := used + TAIL // PAGE_TOKENS)
            pages.append([page for above in tree.path(node) for page in range(first[above], first[above + 1])] + [*own])
        self._pages, self._n_pages = pages, used
        self._query = torch.randn(tree.batch, heads, DN + DR, device="cuda", dtype=torch.bfloat16)
        self._out = torch.randn(tree.batch, heads, DV, device="cuda", dtype=torch.bfloat16)

    def call(self, modes: Modes) -> Callable[[], Any]:
        """All of decode attention with this assignment."""
        tree, rows = self.tree, self.tree.batch
        ends = tree.ends
        shared = [max([ends[above] for above in tree.path(node) if modes[above] is not Mode.ABSORB], default=0)
                  for node in range(len(ends))]  # fmt: skip
        starts = [shared[node] for node in tree.node_of_row]
        lengths = [len(pages) * PAGE_TOKENS for pages in self._pages]
        nodes = range(len(modes))
        expanded = [node for node in nodes if modes[node] is Mode.NAIVE]
        grouped = [node for node in nodes if modes[node] is Mode.GROUPED_ABSORB]
        if (expanded or grouped) and self.heads in GROUPED_HEADS:  # as a server: tails go with the groups
            segments = [
                LatentSegment(tree.rows_of(node), ends[node] - tree.tokens[node], ends[node]) for node in grouped
            ]
            latent = grouped_over(self._pages, self._n_pages, lengths, starts, segments, self.heads)
        else:
            tails = [pages[start // PAGE_TOKENS :] for pages, start in zip(self._pages, starts, strict=True)]
            lens = [length - start for length, start in zip(lengths, starts, strict=True)]
            latent = flashmla_over(self.heads, lens, tails, self._n_pages)
        if not expanded:
            return latent
        attention = make_shared_attention(
            self._buffers,
            max_rows=rows,
            heads=self.heads,
            device="cuda",
            tiles=self._tiles,
            segments_per_row=len(modes),
        )
        chunks = {node: tuple(range(*self._first_chunk[node : node + 2])) for node in expanded}
        attention.plan([ExpandedSegment(tree.rows_of(n), tree.tokens[n], chunks[n]) for n in expanded], rows)

        def run() -> None:
            _, lse = latent()
            attention.run(0, self._query[..., :DN], self._query[..., DN:], SCALE)
            attention.merge(self._out, lse.view(rows, self.heads), self._out)

        return run


def check_plans(rates: GpuRates, rep_ms: int, path: Path | None) -> tuple[list[dict[str, Any]], bool]:
    """Time every assignment of every tree, and append a record for each case to the file.

    Returns:
        `case`, `ms` by assignment, and whether everything could be measured.
    """
    records, complete = [], True
    for tree, heads, dtype in itertools.product(TREES, HEADS, DTYPES):
        case = dict(tree=tree.name, heads=heads, batch=tree.batch, tail=TAIL, dtype=dtype)
        ms = timed(Step(tree, heads, dtype, rates), rep_ms)
        complete &= len(ms) == len(list(assignments(tree, heads)))
        if ms:
            shape = dict(parents=tree.parents, tokens=tree.tokens, rows=tree.rows)
            records.append({"case": case | shape, "ms": ms})
            if path:
                write_record(path, bench="plans", impl="hybrid_mla", **records[-1])
        free_memory()
    return records, complete


def timed(step: Step, rep_ms: int) -> dict[str, float]:
    """ms of every assignment that could be measured."""
    ms = {}
    for modes in assignments(step.tree, step.heads):

        def one(modes: Modes = modes) -> dict[str, float]:
            return measure(step.call(modes), rep_ms, work=None)

        if metrics := attempt(f"{step.tree.name}, {step.heads} heads, {name_of(modes)}", one):
            ms[name_of(modes)] = metrics["ms"]
    return ms


def plans_table(records: Sequence[dict[str, Any]], rates: GpuRates) -> str:
    """For each case what the planner chooses with these rates, the fastest, and what the choice loses."""
    rows = []
    for record in records:
        case, ms = record["case"], record["ms"]
        tree = Tree(case["tree"], *(tuple(case[name]) for name in ("parents", "tokens", "rows")))
        choice, best = chosen(tree, case["heads"], case["dtype"], rates), min(ms, key=lambda name: ms[name])
        absorb = ms[name_of((Mode.ABSORB,) * len(tree.parents))]
        times = (f"{of * 1e3:.0f}" for of in (absorb, ms[choice], ms[best]))
        rows.append((tree.name, case["heads"], case["dtype"], *times, f"{ms[choice] / ms[best] - 1:.0%}", choice, best))
    columns = ("tree", "heads", "dtype", "absorb us", "chosen us", "fastest us", "loss", "chosen", "fastest")
    return tabulate(rows, columns)

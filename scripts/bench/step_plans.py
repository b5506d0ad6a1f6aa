"""Times of whole plans on trees of shared prompts: nested and mixed cases for `calibrate.py --check`.

Every assignment (plan_trees.py) is timed as a server runs it: one launch for all expanded segments, one for all that is
read in the latent space, the merges.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.cases import DN, DR, DV, PAGE_TOKENS, SCALE
from bench.grouped import grouped_over
from bench.plan_trees import HEADS, TREES, Modes, Tree, assignments, name_of
from bench.records import write_record
from bench.rivals import flashmla_over
from bench.shared import DTYPES, STORAGE, random_prefixes
from bench.timing import attempt, free_memory, measure
from sglang_mla_ext.kernels.absorb.stacking import STACKED_HEADS
from sglang_mla_ext.kernels.dispatch import make_shared_attention
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates
from sglang_mla_ext.segment import Mode, Segment

TAIL = 512  # tokens that each row has alone


class Step:
    """Random data of a case, and calls that attend to it."""

    def __init__(self, tree: Tree, heads: int, dtype: str, rates: GpuRates) -> None:
        self.tree, self.heads = tree, heads
        chunks = [tokens // CHUNK_TOKENS for tokens in tree.tokens]
        self._first_chunk = [0, *itertools.accumulate(chunks)]
        self._buffers = random_prefixes(sum(chunks), heads, dtype)
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
        """Return a call of all of decode attention with this assignment."""
        tree, rows = self.tree, self.tree.batch
        ends = tree.ends
        shared = [max([ends[above] for above in tree.path(node) if modes[above] is not Mode.ABSORB], default=0)
                  for node in range(len(ends))]  # fmt: skip
        starts = [shared[node] for node in tree.node_of_row]
        lengths = [len(pages) * PAGE_TOKENS for pages in self._pages]
        nodes = range(len(modes))
        expanded = [node for node in nodes if modes[node] is Mode.NAIVE]
        grouped = [node for node in nodes if modes[node] is Mode.GROUPED_ABSORB]
        if (expanded or grouped) and self.heads in STACKED_HEADS:  # as a server: tails go with the groups
            segments = [
                Segment(tree.rows_of(node), ends[node] - tree.tokens[node], ends[node], Mode.GROUPED_ABSORB)
                for node in grouped
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
        attention.plan([Segment(tree.rows_of(n), 0, tree.tokens[n], Mode.NAIVE, chunks[n]) for n in expanded], rows)

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
    """Time every assignment; return the ms of those that could be measured."""
    ms = {}
    for modes in assignments(step.tree, step.heads):

        def one(modes: Modes = modes) -> dict[str, float]:
            return measure(step.call(modes), rep_ms, work=None)

        if metrics := attempt(f"{step.tree.name}, {step.heads} heads, {name_of(modes)}", one):
            ms[name_of(modes)] = metrics["ms"]
    return ms

"""Times that the planner's choices are judged by (`calibrate.py --check`): every mode on a grid, every plan on trees.

On the grid a mode's time is all of decode attention: absorb in one call of FlashMLA over prefix and tail; naive over
the prefix, FlashMLA over the tail, and the merge; grouped absorb with its merge, where a server takes it. Latent rows
are BF16, expanded prefixes BF16 or FP8. On trees of shared prompts every assignment (planner_verdicts.py) is timed as a
server runs it: one launch for all expanded segments, one for all that is read in the latent space, the merges.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.cases import DN, DR, DV, PAGE_TOKENS, SCALE, Case
from bench.ours import DTYPES, STORAGE, grouped_absorb, grouped_over, our_part, random_prefixes
from bench.planner_verdicts import TREE_HEADS, TREES, Modes, Tree, assignments, name_of
from bench.records import Report
from bench.rivals import flashmla_bf16, flashmla_over
from bench.timing import attempt, free_memory, measure
from sglang_mla_ext.kernels.absorb.stacking import STACKED_HEADS
from sglang_mla_ext.kernels.dispatch import make_shared_attention
from sglang_mla_ext.kernels.naive.tiles import Tile, best_tile, launched_tiles
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates
from sglang_mla_ext.segment import Mode, Segment

TAIL = 512
HEADS = (128, 64, 16)
PREFIXES = (1024, 4759, 7069, 26472)
BATCHES = (2, 4, 8, 16, 32, 64, 128, 256, 512)

Tiles = Mapping[str, Sequence[Tile]]
"""The naive kernel's tiles by dtype, that for the fewest rows first; without an entry the kernel's default is used."""

CHECKED: dict[Mode, Callable[[Case, str, Tile | None], Callable[[], Any]]] = {
    Mode.ABSORB: lambda case, dtype, tile: flashmla_bf16(case),
    Mode.GROUPED_ABSORB: lambda case, dtype, tile: grouped_absorb(case),
    Mode.NAIVE: lambda case, dtype, tile: our_part(case, dtype, "all", tile),
}
"""Makes the call that is timed, for a case, the dtype of the expanded prefix and the naive kernel's tile."""


def tiles_of(rates: GpuRates) -> Tiles:
    """The tiles of a configuration."""
    return {dtype: [Tile(**tile) for tile in rates.naive_tiles.get(name, ())] for dtype, name in STORAGE.items()}


def tile_of(tiles: Tiles, dtype: str, rows: int) -> Tile | None:
    """The tile for a batch of this many rows in one segment; None for the kernel's default."""
    if not tiles.get(dtype):
        return None
    return best_tile([Segment(tuple(range(rows)), 0, 1, Mode.NAIVE, (0,))], launched_tiles(rows, tiles[dtype]))


def time_each(what: str, makers: Mapping[str, Callable[[], Callable[[], Any]]], rep_ms: int) -> dict[str, float]:
    """Time the call that each maker returns, and return the ms of those that could be measured, by name."""
    found = {
        name: attempt(f"{name} {what}", lambda make=make: measure(make(), rep_ms, work=None)["ms"])
        for name, make in makers.items()
    }
    return {name: ms for name, ms in found.items() if ms is not None}


def check(rates: GpuRates, rep_ms: int, path: Path | None) -> tuple[list[dict[str, Any]], bool]:
    """Time the grid with the tiles of these rates, and append a record for each case to the file.

    Returns:
        `case` and `ms` of each case, and whether everything could be measured.
    """
    tiles, complete = tiles_of(rates), True
    report = Report("planner", path)
    for heads, prefix, batch in itertools.product(HEADS, PREFIXES, BATCHES):
        case = Case(prefix, TAIL, heads, (batch,))
        print(case, flush=True)
        modes = [mode for mode in CHECKED if mode is not Mode.GROUPED_ABSORB or heads in STACKED_HEADS]

        def times(dtype: str, some: Iterable[Mode], case: Case = case) -> dict[str, float]:
            tile = tile_of(tiles, dtype, case.batch)
            makers = {mode.value: partial(CHECKED[mode], case, dtype, tile) for mode in some}
            return time_each(f"{dtype} {case}", makers, rep_ms)

        # Modes that do not read expanded prefixes are timed once for both dtypes.
        latent = times("bf16", [mode for mode in modes if mode is not Mode.NAIVE])
        for dtype in DTYPES:
            ms = latent | times(dtype, [Mode.NAIVE])
            complete &= len(ms) == len(modes)
            fields = dict(prefix=prefix, tail=TAIL, heads=heads, batch=batch, dtype=dtype)
            report.add("hybrid_mla", fields, {"ms": ms} if ms else None)
        free_memory()
    return report.measured, complete


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
    report, complete = Report("plans", path), True
    for tree, heads, dtype in itertools.product(TREES, TREE_HEADS, DTYPES):
        step = Step(tree, heads, dtype, rates)
        makers = {name_of(modes): partial(step.call, modes) for modes in assignments(tree, heads)}
        ms = time_each(f"{tree.name}, {heads} heads", makers, rep_ms)
        complete &= len(ms) == len(makers)
        case = dict(tree=tree.name, heads=heads, batch=tree.batch, tail=TAIL, dtype=dtype)
        shape = dict(parents=tree.parents, tokens=tree.tokens, rows=tree.rows)
        report.add("hybrid_mla", case | shape, {"ms": ms} if ms else None)
        free_memory()
    return report.measured, complete

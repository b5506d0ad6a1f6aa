"""Choose which of the naive kernel's tiles is the fastest, back to back: the GPU reaches its power limit then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import truediv
from statistics import geometric_mean, median
from typing import Any

import torch

from bench.cases import DV, Case
from bench.planner_grid import TAIL
from bench.shared import shared_attention
from bench.timing import attempt, back_to_back, captured, free_memory, settled
from sglang_mla_ext.kernels.naive.tiles import Tile

LONG, SHORTER, SHORT = 26472, 7069, 1024  # tokens
# By dtype: for up to 64 rows, for more, and for 192 where a kernel can; the first of each is the default, which the
# others must agree with. None has more rows in flight than tiles.LARGEST_TILE, as the servers' memory estimate expects.
CANDIDATES = {
    dtype: tuple(
        tuple(Tile(rows, keys, num_stages=stages, ctas_per_sm=ctas) for rows, keys, stages, ctas in of_rows)
        for of_rows in buckets
    )
    for dtype, buckets in {
        "bf16": (
            [(64, 128, 2, 1), (64, 64, 2, 2), (64, 32, 4, 2), (64, 64, 4, 1)],
            [(128, 128, 2, 1), (128, 64, 4, 1), (64, 64, 2, 2)],
            [(192, 64, 3, 1), (128, 128, 2, 1)],
        ),
        "fp8": (
            [(64, 128, 2, 2), (64, 64, 4, 2), (64, 64, 3, 2), (64, 128, 4, 1)],
            [(128, 128, 4, 1), (128, 128, 3, 1), (128, 64, 6, 1), (64, 128, 2, 2)],
        ),
    }.items()
}
# Where the candidates for each are timed. No prefix fits into the L2 cache.
TILE_CASES = (
    (Case(LONG, TAIL, 128, (64,)), Case(LONG, TAIL, 16, (64,))),
    (Case(LONG, TAIL, 128, (128,)), Case(LONG, TAIL, 128, (512,)), Case(LONG, TAIL, 16, (256,))),
    (Case(LONG, TAIL, 128, (192,)),),
)
ROUNDS, TURN_S = 3, 0.25  # for every candidate in every case; less than half a minute in all
TILE_MARGIN = 0.01  # times closer than this count as equal
LARGEST_DIFFERENCE = {"bf16": 0.02, "fp8": 0.1}  # relative, of two tiles' results: they round weights differently


def pick_tile(times: Mapping[Tile, Sequence[float]]) -> Tile:
    """The tile that is fastest on average over the same cases; the first one of those within `TILE_MARGIN`."""
    fastest = [min(of_case) for of_case in zip(*times.values(), strict=True)]
    score = {tile: geometric_mean(map(truediv, of_tile, fastest)) for tile, of_tile in times.items()}
    limit = min(score.values()) * (1 + TILE_MARGIN)
    return next(tile for tile in times if score[tile] <= limit)


def shared_part(case: Case, dtype: str, tile: Tile | None) -> Callable[[], None]:
    """A call of the shared part."""
    return shared_attention(case, dtype, tile)[1]


def shared_part_and_merge(case: Case, dtype: str, tile: Tile | None, cuts: int = 1) -> Callable[[], torch.Tensor]:
    """A call of the shared part, in so many segments, and of its merge with tails of zeros; it returns the output."""
    attention, run = shared_attention(case, dtype, tile, cuts)
    out = torch.zeros(case.batch, case.heads, DV, device="cuda", dtype=torch.bfloat16)  # [B, H, dv], merged in place
    lse = torch.zeros(case.batch, case.heads, device="cuda")  # [B, H]

    def both() -> torch.Tensor:
        run()
        return attention.merge(out, lse, out)

    return both


def checked(tile: Tile, dtype: str, case: Case, expected: list[torch.Tensor]) -> Callable[[], Any]:
    """A CUDA graph of the shared part and its merge.

    Args:
        expected: the result of an earlier tile; filled in if empty.
    Raises:
        ValueError: the results differ.
    """
    torch.manual_seed(0)  # the same prefixes and queries for every tile
    function = shared_part_and_merge(case, dtype, tile)
    out = function().float()  # [B, H, dv]
    if not expected:
        expected.append(out)
    (right,) = expected
    difference = ((out - right).norm() / right.norm()).item()
    if not difference <= LARGEST_DIFFERENCE[dtype]:  # so that NaN fails too
        raise ValueError(f"differs by {difference:.2g} from the first tile in {case}")
    return captured(function)


def sustained_ms(function: Callable[[], Any], seconds: float) -> float:
    """Return the ms of a call, back to back for this long, without the first third, at the previous tile's clock."""
    times, end = [], time.perf_counter() + seconds
    for ms in back_to_back(function):
        times.append(ms)
        if time.perf_counter() >= end:
            break
    return settled(times)


def time_tiles(tiles: Iterable[Tile], dtype: str, case: Case) -> dict[Tile, float]:
    """Return the ms of each tile that works: medians over rounds in which the tiles take turns on a warm GPU."""
    expected: list[torch.Tensor] = []
    made = {tile: attempt(f"{dtype} {tile}", checked, tile, dtype, case, expected) for tile in tiles}
    calls = {tile: call for tile, call in made.items() if call}
    rounds = [{tile: sustained_ms(call, TURN_S) for tile, call in calls.items()} for _ in range(ROUNDS)]
    return {tile: median(times[tile] for times in rounds) for tile in calls}


def choose_tiles(dtype: str) -> list[Tile]:
    """The fastest tiles, smallest first (fewer where they agree); none if all candidates fail."""
    chosen = []
    for candidates, cases in zip(CANDIDATES[dtype], TILE_CASES, strict=False):
        times: dict[Tile, list[float]] = {tile: [] for tile in candidates}
        for case in cases:
            measured = time_tiles(times, dtype, case)
            times = {tile: [*times[tile], ms] for tile, ms in measured.items()}  # without failed ones
            free_memory()
        for tile, of_tile in times.items():
            print(f"{dtype} {tile}:", ", ".join(f"{ms * 1e3:.1f}" for ms in of_tile), "us", flush=True)
        if not times:
            return []
        chosen.append(pick_tile(times))
    return sorted(dict.fromkeys(chosen), key=lambda tile: tile.block_rows)

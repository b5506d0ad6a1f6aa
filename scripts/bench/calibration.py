"""The rates of each mode for the cost model: samples that memory or the matrix units bound, and their median; and which
of the naive kernel's tiles is the fastest, back to back, as the GPU reaches its power limit then.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

from bench.cases import DV, PAGE_TOKENS, Case
from bench.ours import DTYPES, STORAGE, grouped_absorb, shared_attention
from bench.planner_checks import TAIL, Tiles, tile_of, time_each
from bench.planner_verdicts import DIMS, significant
from bench.rates_file import source_text, write_rates
from bench.rivals import flashmla_bf16, flashmla_fp8, flashmla_tail
from bench.timing import attempt, captured, free_memory, sustained_ms
from sglang_mla_ext.kernels.naive.tiles import Tile
from sglang_mla_ext.prefix.planner import break_even
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates, ModeRates
from sglang_mla_ext.segment import Mode

LONG, SHORTER = 26472, 7069  # tokens
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
# Cases on which the candidates for each tile are timed. No prefix fits into the L2 cache.
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


def shared_part_and_merge(case: Case, dtype: str, tile: Tile | None) -> Callable[[], torch.Tensor]:
    """A call of the shared part and of its merge with tails of zeros; it returns the output."""
    attention, run = shared_attention(case, dtype, tile)
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


@dataclass(frozen=True)
class Sample:
    """A measured time: attention in one mode of `rows` requests to `tokens` tokens each.

    Attributes:
        bound: what limits it: `memory` or `matrix`.
    """

    bound: str
    heads: int
    rows: int
    tokens: int
    dtype: str
    seconds: float


def predicted(sample: Sample, mode: Mode, values: Mapping[str, Any]) -> float:
    """Seconds that the cost model predicts with these rates."""
    return _model(sample, mode, values).seconds(mode, sample.rows, sample.tokens)


def _model(sample: Sample, mode: Mode, values: Mapping[str, Any]) -> CostModel:
    """The cost model of a sample, without an L2 cache: where memory is the bound, no two requests share rows."""
    rates = ModeRates(**{name: values[name] for name in ModeRates.__dataclass_fields__ if name in values})
    size = DTYPES[sample.dtype].itemsize
    return CostModel(DIMS, sample.heads, GpuRates("", 0, {Mode.ABSORB: rates, mode: rates}, ""), size, size)


def fit(mode: Mode, samples: Sequence[Sample], before: Mapping[str, Any]) -> dict[str, Any]:
    """Rates of a mode: the median rate of the cases bound by memory or by the matrix units.

    Args:
        before: the mode's values so far; a value without samples stays. Overheads and the cost of a segment do: they
            are fitted to the choices of `--check`.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        model, of = _model(sample, mode, before), (mode, sample.rows, sample.tokens)
        if sample.bound == "memory":
            found["bytes_per_s"].append(break_even.bytes_read(model, *of) / sample.seconds)
        else:
            name = "fp8_macs_per_s" if sample.dtype == "fp8" else "macs_per_s"
            found[name].append(break_even.macs(model, *of) / sample.seconds)
    values = dict(before) | {name: significant(median(rates)) for name, rates in found.items()}
    if samples:
        values.pop("measured", None)  # which marks rates that are not measured
    return values


def time_sample(bound: str, case: Case, tokens: int, dtype: str, make: Callable[[], Any], rep_ms: int) -> list[Sample]:
    """Time the call that `make` returns: one sample, none if it fails."""
    ms = time_each(f"{dtype} {case}", {bound: make}, rep_ms).values()
    return [Sample(bound, case.heads, case.batch, tokens, dtype, each / 1e3) for each in ms]


def absorb_samples(tiles: Tiles, rep_ms: int) -> list[Sample]:
    """FlashMLA: few heads and many requests with pages of their own; many heads over shared pages, which L2 holds."""
    kernels = {"bf16": flashmla_bf16, "fp8": flashmla_fp8}
    cases = [("memory", Case(8192 - TAIL, TAIL, 16, (), alone=rows), "bf16") for rows in (128, 256)]
    cases += [("matrix", Case(prefix, TAIL, 128, (512,)), dtype) for prefix in (SHORTER, LONG) for dtype in kernels]
    samples = []
    for bound, case, dtype in cases:
        samples += time_sample(bound, case, case.prefix + case.tail, dtype, partial(kernels[dtype], case), rep_ms)
    return samples


def naive_samples(tiles: Tiles, rep_ms: int) -> list[Sample]:
    """The shared part over long prefixes, of one row tile and of many."""
    cases = [("memory", Case(LONG, TAIL, 128, (rows,))) for rows in (32, 64)]
    cases += [("matrix", Case(prefix, TAIL, 128, (512,))) for prefix in (SHORTER, LONG)]
    samples = []
    for dtype, (bound, case) in itertools.product(DTYPES, cases):
        make = partial(shared_attention, case, dtype, tile_of(tiles, dtype, case.batch))
        samples += time_sample(bound, case, case.prefix, dtype, lambda make=make: make()[1], rep_ms)
    return samples


def grouped_samples(tiles: Tiles, rep_ms: int) -> list[Sample]:
    """Sample how much longer grouped absorb takes than FlashMLA over the tails alone: many groups of four requests,
    each with its own prefix; one group of many tiles."""
    cases = [("memory", Case(prefix, TAIL, 16, (4,) * groups)) for prefix, groups in ((SHORTER, 32), (LONG, 16))]
    cases += [("matrix", Case(prefix, TAIL, 16, (512,))) for prefix in (SHORTER, LONG)]
    samples = []
    for bound, case in cases:
        whole = case.prefix // PAGE_TOKENS * PAGE_TOKENS
        both = time_sample(bound, case, whole, "bf16", partial(grouped_absorb, case), rep_ms)
        tails = time_sample(bound, case, whole, "bf16", partial(flashmla_tail, case), rep_ms)
        if both and tails:
            seconds = (both[0].seconds - tails[0].seconds) / len(case.sizes)
            samples.append(replace(both[0], rows=case.sizes[0], seconds=seconds))  # of one group
    return samples


class Calibration(NamedTuple):
    """Samples that the rates of a mode are fitted to."""

    samples: Callable[[Tiles, int], list[Sample]]  # tiles of the naive kernel, ms for each measurement
    source: str


CALIBRATED = {
    Mode.ABSORB: Calibration(
        absorb_samples,
        "FlashMLA, dense decode; memory: 16 heads, 128 and 256 requests with 8,192 tokens of their own; matrix units: "
        f"128 heads, 512 requests that share {SHORTER:,} or {LONG:,} tokens",
    ),
    Mode.GROUPED_ABSORB: Calibration(
        grouped_samples,
        "kernels/absorb/sm90_bf16_absorb.py over prefixes and tails, merges included, less FlashMLA over the tails; "
        f"memory: groups of 4 with 16 heads; matrix units: 512 requests, 16 heads, {SHORTER:,} and {LONG:,} tokens",
    ),
    Mode.NAIVE: Calibration(
        naive_samples,
        "kernels/naive/sm90_naive.py with the tiles that are the fastest back to back, 128 heads; memory: "
        f"32 and 64 rows, {LONG:,} tokens; matrix units: 512 rows, {SHORTER:,} and {LONG:,} tokens",
    ),
}
"""The modes that are measured; the others keep what the file has."""


def calibrate(out: Path, config: Mapping[str, Any], origin: str, rep_ms: int) -> bool:
    """Measure, print the samples beside the fitted prediction, and write the file.

    Args:
        config: rates to start from; origin: whose they are.
    Returns:
        whether every mode of `CALIBRATED` and the tiles could be measured.
    """
    device = torch.cuda.get_device_properties(0)
    modes = {mode: dict(config["modes"][mode.value]) for mode in CALIBRATED}
    tiles = {dtype: chosen for dtype in DTYPES if (chosen := choose_tiles(dtype))}
    stored = {STORAGE[dtype]: [asdict(tile) for tile in chosen] for dtype, chosen in tiles.items()}
    modes[Mode.NAIVE]["tiles"] = modes[Mode.NAIVE].get("tiles", {}) | stored
    rows, sources = [], {}
    for mode, calibration in CALIBRATED.items():
        samples = calibration.samples(tiles, rep_ms)
        free_memory()
        modes[mode] = fit(mode, samples, modes[mode])
        if samples:
            sources[mode] = calibration.source
        for sample in samples:
            says = predicted(sample, mode, modes[mode])
            times = (f"{sample.seconds * 1e6:.1f}", f"{says * 1e6:.1f}", f"{says / sample.seconds - 1:+.0%}")
            rows.append((mode.value, sample.bound, sample.heads, sample.rows, sample.tokens, sample.dtype, *times))
    columns = ("mode", "bound by", "heads", "requests", "tokens", "dtype", "us", "fitted us", "error")
    print(tabulate(rows, columns))
    write_rates(out, config, modes, source_text(device.name, sources, origin), l2_bytes=device.L2_cache_size)
    return len(sources) == len(CALIBRATED) and len(tiles) == len(DTYPES)

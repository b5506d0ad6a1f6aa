"""The rates of each mode for the cost model: samples that memory, the matrix units or launches bound, and their fit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

from bench.cases import PAGE_TOKENS, Case
from bench.grouped import grouped_absorb
from bench.planner_grid import TAIL, Tiles, tile_of
from bench.planner_verdicts import DIMS, significant
from bench.rates_file import source_text, updated, write_config
from bench.rivals import flashmla_bf16, flashmla_fp8, flashmla_tail
from bench.shared import DTYPES, STORAGE
from bench.tile_choice import LONG, SHORT, SHORTER, choose_tiles, shared_part, shared_part_and_merge
from bench.timing import attempt, free_memory, measure
from sglang_mla_ext.kernels.naive.tiles import Tile
from sglang_mla_ext.prefix.planner import break_even
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates, ModeRates
from sglang_mla_ext.segment import Mode

CUTS = 8
"""Segments that `one_more_segment` cuts a prefix into."""


@dataclass(frozen=True)
class Sample:
    """A measured time: attention in one mode of `rows` requests to `tokens` tokens each.

    Attributes:
        bound: what limits it: `memory`, `matrix`, or `launches` where the work itself is short. `segments` is no
            attention but what one more segment of the same rows and tokens costs.
    """

    bound: str
    heads: int
    rows: int
    tokens: int
    dtype: str
    seconds: float


def predicted(sample: Sample, mode: Mode, values: Mapping[str, Any]) -> float:
    """Seconds that the cost model predicts with these rates."""
    if sample.bound == "segments":
        return _model(sample, mode, values).segment_seconds(mode, sample.rows)
    return _model(sample, mode, values).seconds(mode, sample.rows, sample.tokens)


def _model(sample: Sample, mode: Mode, values: Mapping[str, Any]) -> CostModel:
    """The cost model of a sample, without an L2 cache: where memory is the bound, no two requests share rows."""
    rates = ModeRates(**{name: values[name] for name in ModeRates.__dataclass_fields__ if name in values})
    size = DTYPES[sample.dtype].itemsize
    return CostModel(DIMS, sample.heads, GpuRates("", 0, {Mode.ABSORB: rates, mode: rates}, ""), size, size)


def fit(mode: Mode, samples: Sequence[Sample], before: Mapping[str, Any]) -> dict[str, Any]:
    """Rates of a mode: the median rate of the cases bound by memory or by the matrix units; as overhead the median of
    the time that short cases take beyond their work; for a segment, the median beyond its partials.

    Args:
        before: the mode's values so far; a value without samples stays.
    """
    values = dict(before)
    amounts: dict[str, list[float]] = {}
    for sample in samples:
        model = _model(sample, mode, values)
        if sample.bound == "memory":
            amount = break_even.bytes_read(model, mode, sample.rows, sample.tokens)
            amounts.setdefault("bytes_per_s", []).append(amount / sample.seconds)
        elif sample.bound == "matrix":
            amount = break_even.macs(model, mode, sample.rows, sample.tokens)
            name = "fp8_macs_per_s" if sample.dtype == "fp8" else "macs_per_s"
            amounts.setdefault(name, []).append(amount / sample.seconds)
    values |= {name: significant(median(found)) for name, found in amounts.items()}
    partials = values | {"segment_s": 0.0}
    more = [sample.seconds - predicted(sample, mode, partials) for sample in samples if sample.bound == "segments"]
    if more:
        values["segment_s"] = significant(max(0.0, median(more)))
    work = values | {"overhead_s": 0.0, "overhead_per_root_row_s": 0.0}
    left = [sample.seconds - predicted(sample, mode, work) for sample in samples if sample.bound == "launches"]
    if left:
        values = work | {"overhead_s": significant(max(0.0, median(left)))}
    if samples:
        values.pop("measured", None)  # which marks rates that are not measured
    return values


def time_sample(bound: str, case: Case, tokens: int, dtype: str, make: Callable[[], Any], rep_ms: int) -> list[Sample]:
    """Time the call that `make` returns: one sample, none if it fails."""
    metrics = attempt(f"{bound} {dtype} {case}", lambda: measure(make(), rep_ms, work=None))
    return [Sample(bound, case.heads, case.batch, tokens, dtype, metrics["ms"] / 1e3)] if metrics else []


def one_more_segment(
    heads: int, rows: int, dtype: str, make: Callable[[Case, int], Callable[[], Any]], rep_ms: int
) -> list[Sample]:
    """Sample what each segment more costs where the same rows attend to the same tokens in `CUTS` segments instead of
    one.

    Args:
        make: `(case, segments) -> call`.
    """
    case = Case(LONG, TAIL, heads, (rows,))
    one, many = (time_sample("segments", case, LONG, dtype, partial(make, case, cuts), rep_ms) for cuts in (1, CUTS))
    if not (one and many):
        return []
    return [replace(one[0], seconds=(many[0].seconds - one[0].seconds) / (CUTS - 1))]


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
    """The shared part over a long prefix, of one row tile and of many; with the merge over a short one."""
    cases = [("memory", Case(LONG, TAIL, 128, (rows,)), shared_part) for rows in (32, 64)]
    cases += [("matrix", Case(prefix, TAIL, 128, (512,)), shared_part) for prefix in (SHORTER, LONG)]
    for heads, rows in itertools.product((128, 16), (16, 64, 128)):
        cases.append(("launches", Case(SHORT, TAIL, heads, (rows,)), shared_part_and_merge))
    samples = []
    for dtype, (bound, case, make) in itertools.product(DTYPES, cases):
        tile = tile_of(tiles, dtype, case.batch)
        samples += time_sample(bound, case, case.prefix, dtype, partial(make, case, dtype, tile), rep_ms)
    for dtype, heads, rows in itertools.product(DTYPES, (128, 16), (32, 128)):
        tile = tile_of(tiles, dtype, rows)

        def segments(case: Case, cuts: int, dtype: str = dtype, tile: Tile | None = tile) -> Callable[[], Any]:
            return shared_part_and_merge(case, dtype, tile, cuts)

        samples += one_more_segment(heads, rows, dtype, segments, rep_ms)
    return samples


def grouped_samples(tiles: Tiles, rep_ms: int) -> list[Sample]:
    """Sample how much longer grouped absorb takes than FlashMLA over the tails alone: many groups of four requests,
    each with its own prefix; one group of many tiles; short prefixes."""
    cases = [("memory", Case(prefix, TAIL, 16, (4,) * groups)) for prefix, groups in ((SHORTER, 32), (LONG, 16))]
    cases += [("matrix", Case(prefix, TAIL, 16, (512,))) for prefix in (SHORTER, LONG)]
    cases += [("launches", Case(SHORT, TAIL, heads, (rows,))) for heads in (16, 8) for rows in (16, 64, 128)]
    samples = []
    for bound, case in cases:
        whole = case.prefix // PAGE_TOKENS * PAGE_TOKENS
        both = time_sample(bound, case, whole, "bf16", partial(grouped_absorb, case), rep_ms)
        tails = time_sample(bound, case, whole, "bf16", partial(flashmla_tail, case), rep_ms)
        if both and tails:
            seconds = (both[0].seconds - tails[0].seconds) / len(case.sizes)
            samples.append(replace(both[0], rows=case.sizes[0], seconds=seconds))  # of one group
    for heads, rows in itertools.product((16, 8), (16, 64)):
        samples += one_more_segment(heads, rows, "bf16", grouped_absorb, rep_ms)
    return samples


class Calibration(NamedTuple):
    """Samples that the rates of a mode are fitted to."""

    samples: Callable[[Tiles, int], list[Sample]]  # tiles of the naive kernel, ms for each measurement
    source: str


CALIBRATED = {
    Mode.ABSORB: Calibration(
        absorb_samples,
        "FlashMLA, dense decode; memory: 16 heads, 128 and 256 requests with 8,192 tokens of their own; matrix units: "
        f"128 heads, 512 requests that share {SHORTER:,} or {LONG:,} tokens; its launch is the tails' too",
    ),
    Mode.GROUPED_ABSORB: Calibration(
        grouped_samples,
        "kernels/absorb/sm90_bf16_absorb.py over prefixes and tails, merges included, less FlashMLA over the tails; "
        f"memory: groups of 4 with 16 heads; matrix units: 512 requests, 16 heads, {SHORTER:,} and {LONG:,} tokens; "
        f"overhead: what 16 to 128 rows over {SHORT:,} tokens take beyond the work; segments: 16 and 64 rows in {CUTS} "
        "instead of one",
    ),
    Mode.NAIVE: Calibration(
        naive_samples,
        "kernels/naive/sm90_naive.py with the tiles that are the fastest back to back, 128 heads; memory: "
        f"32 and 64 rows, {LONG:,} tokens; matrix units: 512 rows, {SHORTER:,} and {LONG:,} tokens; overhead: what 16 "
        f"to 128 rows over {SHORT:,} tokens, 16 and 128 heads, take beyond the work, merge included; segments: 32 and "
        f"128 rows in {CUTS} instead of one",
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
    write_config(out, updated(config, modes, device.L2_cache_size, source_text(device.name, sources, origin)))
    return len(sources) == len(CALIBRATED) and len(tiles) == len(DTYPES)

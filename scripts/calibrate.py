"""Measure the rates of a GPU for the cost model (configs/gpus), and check what the cost model chooses with them.

    python scripts/calibrate.py --out configs/gpus/h200.json --check --out-records benchmarks/results/planner.jsonl
    python scripts/calibrate.py --out configs/gpus/h200.json --refit benchmarks/results/planner.jsonl    # without a GPU

A rate is the median over a few cases that it bounds, each the median time of a CUDA graph of one call, L2 flushed
before each. The naive kernel's tiles are the fastest of a few, back to back: the GPU gets to its power limit then,
where another tile may be the fastest than in a short run. `--check` times every mode on a grid of cases and compares
the one that the cost model takes with the fastest (check_planner.py). With `--out` the modes' overheads are then
replaced by those with which these choices lose least (planner_verdicts.py); `--refit` does that alone, from records.
DeepSeek-V3's dimensions.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import geometric_mean, median
from typing import Annotated, Any, NamedTuple

import torch
import typer
from bench_attention import (
    DTYPES,
    STORAGE,
    attempt,
    back_to_back,
    captured,
    free_memory,
    measure,
    settled,
    shared_attention,
)
from check_planner import TAIL, Tiles, check, tile_of
from grouped_attention import grouped_absorb
from planner_verdicts import DIMS, report, significant, verdicts
from rates_file import is_of, refit, source_text, starting_config, updated, write_config
from rival_attention import DV, PAGE_TOKENS, Case, flashmla_bf16, flashmla_fp8, flashmla_tail
from tabulate import tabulate

from sglang_mla_ext.kernels.naive.triton_naive import Tile
from sglang_mla_ext.prefix.cost_model import CostModel, GpuRates, Mode, ModeRates, rates_for
from sglang_mla_ext.results import read_records

LONG, SHORTER, SHORT = 26472, 7069, 1024  # tokens

# By dtype: for up to 64 rows, then for more; the first of each is the default, which the others must agree with. Only
# tiles of which a multiprocessor runs 128 rows at once, as the servers' memory estimate expects, or fewer.
CANDIDATES = {
    "bf16": (
        (
            Tile(block_rows=64, block_keys=128, num_stages=2),
            Tile(block_rows=64, block_keys=64, num_stages=2, ctas_per_sm=2),
            Tile(block_rows=64, block_keys=32, num_stages=4, ctas_per_sm=2),
            Tile(block_rows=64, block_keys=64, num_stages=4),
        ),
        (
            Tile(block_rows=128, block_keys=128, num_stages=2),
            Tile(block_rows=128, block_keys=64, num_stages=4),
            Tile(block_rows=64, block_keys=64, num_stages=2, ctas_per_sm=2),
        ),
    ),
    "fp8": (
        (
            Tile(block_rows=64, block_keys=128, num_stages=2, ctas_per_sm=2),
            Tile(block_rows=64, block_keys=64, num_stages=4, ctas_per_sm=2),
            Tile(block_rows=64, block_keys=64, num_stages=3, ctas_per_sm=2),
            Tile(block_rows=64, block_keys=128, num_stages=4),
        ),
        (
            Tile(block_rows=128, block_keys=128, num_stages=4),
            Tile(block_rows=128, block_keys=128, num_stages=3),
            Tile(block_rows=128, block_keys=64, num_stages=6),
            Tile(block_rows=64, block_keys=128, num_stages=2, ctas_per_sm=2),
        ),
    ),
}
# Where the candidates for up to 64 rows are timed, and those for more. No prefix fits into the L2 cache.
TILE_CASES = (
    (Case(LONG, TAIL, 128, (64,)), Case(LONG, TAIL, 16, (64,))),
    (Case(LONG, TAIL, 128, (128,)), Case(LONG, TAIL, 128, (512,)), Case(LONG, TAIL, 16, (256,))),
)
ROUNDS, TURN_S = 3, 0.25  # of every candidate in every case: together less than half a minute
TILE_MARGIN = 0.01  # times closer than this are the same
LARGEST_DIFFERENCE = {"bf16": 0.02, "fp8": 0.1}  # relative, of two tiles' results: they round weights differently


@dataclass(frozen=True)
class Sample:
    """A measured time: attention in one mode of `rows` requests to `tokens` tokens each.

    Attributes:
        bound: what takes the time: `memory`, `matrix`, or `launches` where the work itself is short.
    """

    bound: str
    heads: int
    rows: int
    tokens: int
    dtype: str
    seconds: float


def predicted(sample: Sample, mode: Mode, values: Mapping[str, Any]) -> float:
    """Seconds that the cost model says with these rates."""
    return _model(sample, mode, values).seconds(mode, sample.rows, sample.tokens)


def _model(sample: Sample, mode: Mode, values: Mapping[str, Any]) -> CostModel:
    """The cost model of a sample. Without an L2 cache: where memory is the bound, no two requests share rows."""
    rates = ModeRates(**{name: values[name] for name in ModeRates.__dataclass_fields__ if name in values})
    size = DTYPES[sample.dtype].itemsize
    return CostModel(DIMS, sample.heads, GpuRates("", 0, {Mode.ABSORB: rates, mode: rates}, ""), size, size)


def fit(mode: Mode, samples: Sequence[Sample], before: Mapping[str, Any]) -> dict[str, Any]:
    """Rates of a mode: of the cases that memory or the matrix units bound, the median of what they did per second; of
    the short ones, the median of what they took longer than the work.

    Args:
        before: the mode's values so far; a value without samples stays.
    """
    values = dict(before)
    amounts: dict[str, list[float]] = {}
    for sample in samples:
        model = _model(sample, mode, values)
        if sample.bound == "memory":
            amount = model.bytes_read(mode, sample.rows, sample.tokens)
            amounts.setdefault("bytes_per_s", []).append(amount / sample.seconds)
        elif sample.bound == "matrix":
            amount = model.macs(mode, sample.rows, sample.tokens)
            name = "fp8_macs_per_s" if sample.dtype == "fp8" else "macs_per_s"
            amounts.setdefault(name, []).append(amount / sample.seconds)
    values |= {name: significant(median(found)) for name, found in amounts.items()}
    work = values | {"overhead_s": 0.0, "overhead_per_root_row_s": 0.0}
    left = [sample.seconds - predicted(sample, mode, work) for sample in samples if sample.bound == "launches"]
    if left:
        values = work | {"overhead_s": significant(max(0.0, median(left)))}
    if samples:
        values.pop("measured", None)  # which says that they were not
    return values


def pick_tile(times: Mapping[Tile, Sequence[float]]) -> Tile:
    """Of tiles and their times in the same cases the one that is fastest on average, the earliest of equally fast."""
    fastest = [min(of_case) for of_case in zip(*times.values(), strict=True)]
    score = {tile: geometric_mean(map(truediv, of_tile, fastest)) for tile, of_tile in times.items()}
    limit = min(score.values()) * (1 + TILE_MARGIN)
    return next(tile for tile in times if score[tile] <= limit)


def shared_part(case: Case, dtype: str, tile: Tile | None) -> Callable[[], None]:
    """A call of the shared part."""
    return shared_attention(case, dtype, tile)[1]


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


def sustained_ms(function: Callable[[], Any], seconds: float) -> float:
    """ms of a call, back to back for so long; the first third, with another tile's clock, does not count."""
    times, end = [], time.perf_counter() + seconds
    for ms in back_to_back(function):
        times.append(ms)
        if time.perf_counter() >= end:
            break
    return settled(times)


def time_tiles(tiles: Iterable[Tile], dtype: str, case: Case) -> dict[Tile, float]:
    """ms of each tile that works. They take turns on a GPU that stays warm, in a few rounds, whose median counts."""
    expected: list[torch.Tensor] = []
    made = {tile: attempt(f"{dtype} {tile}", checked, tile, dtype, case, expected) for tile in tiles}
    calls = {tile: call for tile, call in made.items() if call}
    rounds = [{tile: sustained_ms(call, TURN_S) for tile, call in calls.items()} for _ in range(ROUNDS)]
    return {tile: median(times[tile] for times in rounds) for tile in calls}


def choose_tiles(dtype: str) -> list[Tile]:
    """The fastest tile for up to 64 rows and that for more, one if it is the same; none if every candidate failed."""
    chosen = []
    for candidates, cases in zip(CANDIDATES[dtype], TILE_CASES, strict=True):
        times: dict[Tile, list[float]] = {tile: [] for tile in candidates}
        for case in cases:
            measured = time_tiles(times, dtype, case)
            times = {tile: [*times[tile], ms] for tile, ms in measured.items()}  # who failed in a case is out
            free_memory()
        for tile, of_tile in times.items():
            print(f"{dtype} {tile}:", ", ".join(f"{ms * 1e3:.1f}" for ms in of_tile), "us", flush=True)
        if not times:
            return []
        chosen.append(pick_tile(times))
    return list(dict.fromkeys(chosen))


def take(bound: str, case: Case, tokens: int, dtype: str, make: Callable[[], Any], rep_ms: int) -> list[Sample]:
    """Time the call that `make` returns: one sample, none if it fails."""
    metrics = attempt(f"{bound} {dtype} {case}", lambda: measure(make(), rep_ms, work=None))
    return [Sample(bound, case.heads, case.batch, tokens, dtype, metrics["ms"] / 1e3)] if metrics else []


def absorb_samples(tiles: Tiles, rep_ms: int) -> list[Sample]:
    """FlashMLA: few heads and many requests with pages of their own; many heads over shared pages, which L2 holds."""
    kernels = {"bf16": flashmla_bf16, "fp8": flashmla_fp8}
    cases = [("memory", Case(8192 - TAIL, TAIL, 16, (), alone=rows), "bf16") for rows in (128, 256)]
    cases += [("matrix", Case(prefix, TAIL, 128, (512,)), dtype) for prefix in (SHORTER, LONG) for dtype in kernels]
    samples = []
    for bound, case, dtype in cases:
        samples += take(bound, case, case.prefix + case.tail, dtype, partial(kernels[dtype], case), rep_ms)
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
        samples += take(bound, case, case.prefix, dtype, partial(make, case, dtype, tile), rep_ms)
    return samples


def grouped_samples(tiles: Tiles, rep_ms: int) -> list[Sample]:
    """What grouped absorb takes longer than FlashMLA over the tails alone: many tiles of four requests, each with a
    prefix of its own; a group of many tiles; short prefixes."""
    cases = [("memory", Case(prefix, TAIL, 16, (4,) * groups)) for prefix, groups in ((SHORTER, 32), (LONG, 16))]
    cases += [("matrix", Case(prefix, TAIL, 16, (512,))) for prefix in (SHORTER, LONG)]
    cases += [("launches", Case(SHORT, TAIL, heads, (rows,))) for heads in (16, 8) for rows in (16, 64, 128)]
    samples = []
    for bound, case in cases:
        whole = case.prefix // PAGE_TOKENS * PAGE_TOKENS
        both = take(bound, case, whole, "bf16", partial(grouped_absorb, case), rep_ms)
        tails = take(bound, case, whole, "bf16", partial(flashmla_tail, case), rep_ms)
        if both and tails:
            seconds = (both[0].seconds - tails[0].seconds) / len(case.sizes)
            samples.append(replace(both[0], rows=case.sizes[0], seconds=seconds))  # of one group
    return samples


class Calibration(NamedTuple):
    """How the rates of a mode are measured."""

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
        "kernels/absorb_hopper.py over prefixes and tails, merges included, less FlashMLA over the tails; memory: "
        f"groups of 4 with 16 heads; matrix units: 512 requests, 16 heads, {SHORTER:,} and {LONG:,} tokens; overhead: "
        f"what 16 to 128 rows over {SHORT:,} tokens take beyond the work",
    ),
    Mode.NAIVE: Calibration(
        naive_samples,
        "kernels/naive_prefix_hopper.py with those of its tiles that are the fastest back to back, 128 heads; memory: "
        f"32 and 64 rows, {LONG:,} tokens; matrix units: 512 rows, {SHORTER:,} and {LONG:,} tokens; overhead: what 16 "
        f"to 128 rows over {SHORT:,} tokens, 16 and 128 heads, take beyond the work, merge included",
    ),
}
"""The modes that are measured; the others keep what the file has."""


def calibrate(out: Path, config: Mapping[str, Any], origin: str, rep_ms: int) -> bool:
    """Measure, print the samples beside what the fitted rates say, and write the file.

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


def main(
    out: Annotated[Path | None, typer.Option(help="Measure, and write the rates to this file; it may exist.")] = None,
    check_choices: Annotated[bool, typer.Option("--check", help="Time what the cost model chooses from.")] = False,
    out_records: Annotated[Path | None, typer.Option(help="Append the check's JSON lines to this file.")] = None,
    refit_from: Annotated[
        Path | None, typer.Option("--refit", help="Only fit the overheads in --out to a check's records.", exists=True)
    ] = None,
    rep_ms: Annotated[int, typer.Option(min=1, help="ms spent on each measurement, but for those of tiles.")] = 20,
) -> None:
    """Measure this GPU's rates (--out), or check the choices made with them (--check), or both.

    The check takes the rates just written, else those shipped for this GPU. With both, and with --refit, the overheads
    are those with which the choices lose least.
    """
    if refit_from:
        if not out or not out.exists() or check_choices:
            raise typer.BadParameter("--refit is for --out with a file that exists, without --check")
        config = json.loads(out.read_text(encoding="utf-8"))
        try:
            refit(out, [record for record in read_records(refit_from) if is_of(record["gpu"], config)])
        except ValueError as error:
            raise typer.BadParameter(f"{refit_from}: {error} on {config['name']}") from error
        return
    if not out and not check_choices:
        raise typer.BadParameter("give --out, --check or both")
    if out_records and not check_choices:
        raise typer.BadParameter("--out-records is for --check")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise typer.BadParameter("needs a Hopper GPU")
    device, complete = torch.cuda.get_device_name(), True
    if out:
        try:
            start = starting_config(out, device)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        complete = calibrate(out, *start, rep_ms)
    if check_choices:
        rates = GpuRates.from_json(out) if out else rates_for(device)
        records, all_measured = check(rates, rep_ms, out_records)
        complete &= all_measured
        if out and any(Mode.ABSORB.value in record["ms"] and len(record["ms"]) > 1 for record in records):
            refit(out, records)
        else:
            print(report(verdicts(records, rates)))
    if not complete:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

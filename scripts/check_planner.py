"""What the cost model chooses, against the times of every mode on a grid of cases (`calibrate.py --check`).

A mode's time is all of decode attention: over prefix and tail, absorb in one call of FlashMLA; naive over the prefix,
FlashMLA over the tail, and the merge. Latent rows are BF16, expanded prefixes BF16 or FP8.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_attention import DTYPES, attempt, free_memory, measure, our_parts
from rival_attention import Case, flashmla_bf16
from tabulate import tabulate
from update_tables import LARGEST_LOSS

from sglang_mla_ext.kernels.naive_prefix import Tile, tile_for
from sglang_mla_ext.prefix.cost_model import CostModel, GpuRates, Mode, ModelDims
from sglang_mla_ext.results import write_record

DIMS = ModelDims.from_json("deepseek-v3")
STORAGE = {"bf16": "bf16", "fp8": "fp8_e4m3"}  # a dtype's name in configs/gpus
TAIL = 512
HEADS = (128, 64, 16)
PREFIXES = (1024, 4759, 7069, 26472)
BATCHES = (2, 4, 8, 16, 32, 64, 128, 256, 512)

Tiles = Mapping[str, Sequence[Tile]]
"""The naive kernel's tiles by dtype, that for the fewest rows first; without an entry the kernel takes its own."""

CHECKED: dict[Mode, Callable[[Case, str, Tile | None], Callable[[], Any]]] = {
    Mode.ABSORB: lambda case, dtype, tile: flashmla_bf16(case),
    Mode.NAIVE: lambda case, dtype, tile: our_parts(case, dtype, tile)["all"],
}
"""Makes the call that is timed, for a case, the dtype of the expanded prefix and the naive kernel's tile."""


@dataclass(frozen=True)
class Verdict:
    """The measured ms of each mode in a case, and the mode that the cost model takes."""

    case: Case
    dtype: str
    ms: Mapping[Mode, float]
    chosen: Mode

    @property
    def best(self) -> Mode:
        """The fastest mode."""
        return min(self.ms, key=lambda mode: self.ms[mode])

    @property
    def loss(self) -> float:
        """How much longer the chosen mode takes, as a part of the fastest mode's time."""
        return self.ms[self.chosen] / self.ms[self.best] - 1


def tiles_of(rates: GpuRates) -> Tiles:
    """The tiles of a configuration."""
    return {dtype: [Tile(**tile) for tile in rates.naive_tiles.get(name, ())] for dtype, name in STORAGE.items()}


def tile_of(tiles: Tiles, dtype: str, rows: int) -> Tile | None:
    """The tile for a batch of this many rows; None for the kernel's own."""
    return tile_for(rows, tuple(tiles[dtype])) if tiles.get(dtype) else None


def judge(rates: GpuRates, case: Case, dtype: str, ms: Mapping[Mode, float]) -> Verdict:
    """Ask the cost model which of the measured modes it takes."""
    size = DTYPES[dtype].itemsize
    cost = CostModel(DIMS, case.heads, rates, expanded_element_bytes=size, latent_element_bytes=2)
    return Verdict(case, dtype, ms, cost.best_mode(case.batch, case.prefix, list(ms)))


def check(rates: GpuRates, rep_ms: int, records: Path | None) -> bool:
    """Time the grid, print where the choice loses, append a record for each case.

    Returns:
        whether everything could be measured.
    """
    tiles, verdicts, complete = tiles_of(rates), [], True

    def timed(mode: Mode, case: Case, dtype: str) -> dict[Mode, float]:
        tile = tile_of(tiles, dtype, case.batch)
        metrics = attempt(
            f"{mode.value} {dtype} {case}", lambda: measure(CHECKED[mode](case, dtype, tile), rep_ms, work=None)
        )
        return {mode: metrics["ms"]} if metrics else {}

    for heads, prefix in itertools.product(HEADS, PREFIXES):
        print(f"{heads} heads, {prefix:,} tokens", flush=True)
        for batch in BATCHES:
            case = Case(prefix, TAIL, heads, (batch,))
            latent: dict[Mode, float] = {}  # modes that do not read expanded prefixes: timed once for both dtypes
            for mode in CHECKED:
                latent |= timed(mode, case, "bf16") if mode is not Mode.NAIVE else {}
            for dtype in DTYPES:
                ms = latent | timed(Mode.NAIVE, case, dtype)
                complete &= len(ms) == len(CHECKED)
                if ms:
                    verdicts.append(judge(rates, case, dtype, ms))
                    if records:
                        write_record(records, bench="planner", impl="hybrid_mla", **fields(verdicts[-1]))
        free_memory()
    print(failures(verdicts))
    print(summary(verdicts))
    return complete


def fields(verdict: Verdict) -> dict[str, Any]:
    """Case and metrics of a record."""
    case = verdict.case
    return {
        "case": dict(prefix=case.prefix, tail=case.tail, heads=case.heads, batch=case.batch, dtype=verdict.dtype),
        "ms": {mode.value: ms for mode, ms in verdict.ms.items()},
        "chosen": verdict.chosen.value,
        "best": verdict.best.value,
        "loss": verdict.loss,
    }


def failures(verdicts: Sequence[Verdict]) -> str:
    """A table of the cases in which the choice loses more than `LARGEST_LOSS`, the worst first."""
    modes = list(dict.fromkeys(mode for verdict in verdicts for mode in verdict.ms))
    rows = []
    for verdict in sorted(verdicts, key=lambda verdict: -verdict.loss):
        if verdict.loss > LARGEST_LOSS:
            case = verdict.case
            times = (f"{verdict.ms[mode] * 1e3:.1f}" if mode in verdict.ms else "-" for mode in modes)
            chosen = (verdict.chosen.value, f"{verdict.loss:.0%}")
            rows.append((case.heads, case.prefix, case.batch, verdict.dtype, *times, *chosen))
    columns = ("heads", "prefix", "requests", "dtype", *(f"{mode.value} us" for mode in modes), "chosen", "loss")
    return tabulate(rows, columns) if rows else ""


def summary(verdicts: Sequence[Verdict]) -> str:
    """How many cases, how many of them within `LARGEST_LOSS`, and the worst."""
    if not verdicts:
        return "nothing was measured"
    within = sum(verdict.loss <= LARGEST_LOSS for verdict in verdicts)
    worst = max(verdicts, key=lambda verdict: verdict.loss)
    case = f"{worst.case.heads} heads, {worst.case.prefix:,} tokens, {worst.case.batch} requests, {worst.dtype}"
    return f"{within} of {len(verdicts)} cases within {LARGEST_LOSS:.0%}; the worst loses {worst.loss:.1%}: {case}"

"""Judge what the cost model would choose in measured cases, and what each choice costs. From records; nothing is timed
here.

A record of `bench` `planner` (planner_grid.py) has the measured ms of each mode in one case. The choice
follows from the rates and is not stored, so the same records can judge any rates, and fit the overheads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import differential_evolution
from tabulate import tabulate

from bench.records import newest_by
from sglang_mla_ext.prefix.planner import break_even
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates, rates_for
from sglang_mla_ext.prefix.planner.model_dims import ModelDims
from sglang_mla_ext.segment import Mode

DIMS = ModelDims.from_json("deepseek-v3")
ELEMENT_BYTES = {"bf16": 2, "fp8": 1}  # of the expanded prefix; latent rows are BF16
LARGEST_LOSS = 0.05  # the largest loss that a choice may cost, relative
CONSTANTS_MS, PER_ROOT_ROW_MS = (-0.02, 0.06), (0.0, 0.001)  # where `with_fitted_overheads` looks
SAME = 0.02  # modes predicted within this fraction of the chosen one must not lose much either


@dataclass(frozen=True)
class Verdict:
    """The measured ms of each mode in a case, and the mode that the cost model chooses."""

    heads: int
    prefix: int
    batch: int
    dtype: str
    ms: Mapping[Mode, float]
    chosen: Mode

    @property
    def best(self) -> Mode:
        """The fastest mode."""
        return min(self.ms, key=lambda mode: self.ms[mode])

    @property
    def loss(self) -> float:
        """Return how much longer the chosen mode takes, relative to the fastest mode's time."""
        return self.ms[self.chosen] / self.ms[self.best] - 1


def newest(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last record of each case."""
    in_order = sorted(records, key=lambda record: record.get("date", ""))
    return list({json.dumps(record["case"], sort_keys=True): record for record in in_order}.values())


def verdicts(records: Iterable[Mapping[str, Any]], rates: GpuRates) -> list[Verdict]:
    """Return which of the measured modes the cost model chooses with these rates, for the newest record of each case.

    Args:
        records: all of the GPU that the rates belong to.
    """
    return [_judge(record, rates) for record in newest(records)]


def _judge(record: Mapping[str, Any], rates: GpuRates) -> Verdict:
    case = record["case"]
    ms = {Mode(name): value for name, value in record["ms"].items()}
    chosen = break_even.best_mode(_cost_model(case, rates), case["batch"], case["prefix"], list(ms))
    return Verdict(case["heads"], case["prefix"], case["batch"], case["dtype"], ms, chosen)


def _cost_model(case: Mapping[str, Any], rates: GpuRates) -> CostModel:
    return CostModel(DIMS, case["heads"], rates, expanded_element_bytes=ELEMENT_BYTES[case["dtype"]])


def by_heads(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield how often the choice with the shipped rates is the fastest mode or nearly, and the worst choice."""
    records = newest_by(records)
    found = []
    for gpu in dict.fromkeys(record["gpu"] for record in records):
        found += verdicts((record for record in records if record["gpu"] == gpu), rates_for(gpu))
    for heads, dtype in sorted({(verdict.heads, verdict.dtype) for verdict in found}):
        of_row = [verdict for verdict in found if (verdict.heads, verdict.dtype) == (heads, dtype)]
        worst = max(of_row, key=lambda verdict: verdict.loss)
        where = {"prefix": worst.prefix, "batch": worst.batch} if worst.loss else {}
        within = sum(verdict.loss <= LARGEST_LOSS for verdict in of_row)
        row = {"heads": heads, "dtype": dtype.upper(), "cases": len(of_row), "within": within, "worst": worst.loss}
        yield row | where | {"records": records}


def with_fitted_overheads(records: Iterable[Mapping[str, Any]], rates: GpuRates) -> GpuRates:
    """The same rates with the overheads for which the choices lose least.

    Fewest cases that lose more than `LARGEST_LOSS` come first; then the smallest sum of the worst loss, the mean loss,
    and the mean error of the predicted difference to plain absorb, relative to plain absorb's time. Deterministic.

    Only differences between modes matter, so plain absorb gets no overhead that grows with rows, and the smallest
    constant overhead is 0. A mode that was not measured keeps its values.

    Raises:
        ValueError: no record compares plain absorb with another mode.
    """
    work = without_overheads(rates)
    compared = [record for record in newest(records) if len(record["ms"]) > 1 and Mode.ABSORB.value in record["ms"]]
    modes = [Mode.ABSORB, *(m for m in Mode if m is not Mode.ABSORB and any(m.value in r["ms"] for r in compared))]
    if len(modes) == 1:
        raise ValueError("no record compares plain absorb with another mode")
    costs = [(_cost_model(r["case"], work), r["case"]["batch"], r["case"]["prefix"]) for r in compared]
    work_ms = np.array([[cost.seconds(mode, *size) * 1e3 for mode in modes] for cost, *size in costs])  # [case, mode]
    root_rows = np.sqrt([cost.tail_rows(batch) for cost, batch, _ in costs])
    ms = np.array([[record["ms"].get(mode.value, np.nan) for mode in modes] for record in compared])
    measured = ~np.isnan(ms)
    loss = ms / np.nanmin(ms, axis=1, keepdims=True) - 1
    longer, scale = (ms - ms[:, :1]).T[measured.T], np.broadcast_to(ms[:, :1], ms.shape).T[measured.T]

    def badness(overheads_ms: np.ndarray) -> np.ndarray:
        """Rate each column of `[2 x modes behind plain absorb, candidate]`: constants, then what grows."""
        zero = np.zeros((1, overheads_ms.shape[1]))
        constant, per_root_row = (np.vstack([zero, part])[:, None] for part in np.split(overheads_ms, 2))
        says = work_ms.T[:, :, None] + per_root_row * root_rows[:, None] + constant  # [mode, case, candidate]
        taken = np.where(measured.T[:, :, None], says, np.inf)
        near = taken <= taken.min(axis=0) * (1 + SAME)
        losses = np.where(near, loss.T[:, :, None], 0).max(axis=0)
        errors = np.abs((says - says[:1])[measured.T] - longer[:, None]) / scale[:, None]
        return (losses > LARGEST_LOSS).sum(axis=0) + losses.max(axis=0) + losses.mean(axis=0) + errors.mean(axis=0)

    others = len(modes) - 1
    bounds = [CONSTANTS_MS] * others + [PER_ROOT_ROW_MS] * others
    search = dict(seed=0, maxiter=300, popsize=40, tol=0, polish=False, updating="deferred", vectorized=True)
    found = differential_evolution(badness, bounds, **search).x
    constant, per_root_row = ([0.0, *part] for part in found.reshape(2, -1))
    least = min(constant)
    fitted = {
        mode: replace(
            rates.modes[mode],
            overhead_s=significant((overhead_ms - least) / 1e3),
            overhead_per_root_row_s=significant(growth_ms / 1e3),
        )
        for mode, overhead_ms, growth_ms in zip(modes, constant, per_root_row, strict=True)
    }
    return replace(rates, modes={**rates.modes, **fitted})


def significant(value: float, digits: int = 3) -> float:
    """Round to this many digits."""
    return float(f"{value:.{digits}g}")


def without_overheads(rates: GpuRates) -> GpuRates:
    """The same rates with zero overheads: the model then predicts the time of the work alone."""
    modes = {m: replace(r, overhead_s=0.0, overhead_per_root_row_s=0.0) for m, r in rates.modes.items()}
    return replace(rates, modes=modes)


def report(found: Sequence[Verdict]) -> str:
    """Return where the choices lose, and a summary."""
    return "\n".join(filter(None, (failures(found), summary(found))))


def failures(found: Sequence[Verdict]) -> str:
    """A table of the cases in which the choice loses more than `LARGEST_LOSS`, the worst first."""
    modes = list(dict.fromkeys(mode for verdict in found for mode in verdict.ms))
    rows = []
    for verdict in sorted(found, key=lambda verdict: -verdict.loss):
        if verdict.loss > LARGEST_LOSS:
            times = (f"{verdict.ms[mode] * 1e3:.1f}" if mode in verdict.ms else "-" for mode in modes)
            chosen = (verdict.chosen.value, f"{verdict.loss:.0%}")
            rows.append((verdict.heads, verdict.prefix, verdict.batch, verdict.dtype, *times, *chosen))
    columns = ("heads", "prefix", "requests", "dtype", *(f"{mode.value} us" for mode in modes), "chosen", "loss")
    return tabulate(rows, columns) if rows else ""


def summary(found: Sequence[Verdict]) -> str:
    """Return how many cases, how many of them within `LARGEST_LOSS`, and the worst."""
    if not found:
        return "nothing was measured"
    within = sum(verdict.loss <= LARGEST_LOSS for verdict in found)
    worst = max(found, key=lambda verdict: verdict.loss)
    case = f"{worst.heads} heads, {worst.prefix:,} tokens, {worst.batch} requests, {worst.dtype}"
    return f"{within} of {len(found)} cases within {LARGEST_LOSS:.0%}; the worst loses {worst.loss:.1%}: {case}"

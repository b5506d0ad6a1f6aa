"""What the cost model would choose in measured cases, and what each choice costs. From records; nothing is timed here.

A record of `bench` `planner` (check_planner.py) has the measured ms of each mode in one case. What is chosen follows
from the rates, so it is not stored: the same records judge any rates, and fit the one that decides the choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tabulate import tabulate

from sglang_mla_ext.prefix.cost_model import CostModel, GpuRates, Mode, ModelDims

DIMS = ModelDims.from_json("deepseek-v3")
ELEMENT_BYTES = {"bf16": 2, "fp8": 1}  # of the expanded prefix; latent rows are BF16
LARGEST_LOSS = 0.05  # what a choice of the cost model may cost
OVERHEADS_US = range(5, 61)  # what `fitted_overhead` tries


@dataclass(frozen=True)
class Verdict:
    """The measured ms of each mode in a case, and the mode that the cost model takes."""

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
        """How much longer the chosen mode takes, as a part of the fastest mode's time."""
        return self.ms[self.chosen] / self.ms[self.best] - 1


def newest(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last record of each case."""
    in_order = sorted(records, key=lambda record: record.get("date", ""))
    return list({tuple(sorted(record["case"].items())): record for record in in_order}.values())


def verdicts(records: Iterable[Mapping[str, Any]], rates: GpuRates) -> list[Verdict]:
    """What the cost model takes with these rates of the modes that were measured, in the newest record of each case.

    Args:
        records: of one GPU, the one that the rates are of.
    """
    return [_judge(record, rates) for record in newest(records)]


def _judge(record: Mapping[str, Any], rates: GpuRates) -> Verdict:
    case = record["case"]
    ms = {Mode(name): value for name, value in record["ms"].items()}
    cost = CostModel(DIMS, case["heads"], rates, expanded_element_bytes=ELEMENT_BYTES[case["dtype"]])
    chosen = cost.best_mode(case["batch"], case["prefix"], list(ms))
    return Verdict(case["heads"], case["prefix"], case["batch"], case["dtype"], ms, chosen)


def fitted_overhead(records: Iterable[Mapping[str, Any]], rates: GpuRates) -> float:
    """The naive mode's `overhead_s` with which the fewest cases lose more than `LARGEST_LOSS`; of those the one whose
    worst case loses least, and of those the smallest.

    Raises:
        ValueError: no record compares naive with another mode.
    """
    compared = [record for record in newest(records) if {Mode.NAIVE.value} < set(record["ms"])]
    if not compared:
        raise ValueError("no record compares naive with another mode")

    def badness(us: int) -> tuple[int, float, int]:
        tried = with_overhead(rates, us / 1e6)
        losses = [_judge(record, tried).loss for record in compared]
        return sum(loss > LARGEST_LOSS for loss in losses), max(losses), us

    return min(OVERHEADS_US, key=badness) / 1e6


def with_overhead(rates: GpuRates, overhead_s: float) -> GpuRates:
    """The same rates, but for this overhead of the naive mode."""
    naive = replace(rates.modes[Mode.NAIVE], overhead_s=overhead_s)
    return replace(rates, modes={**rates.modes, Mode.NAIVE: naive})


def report(found: Sequence[Verdict]) -> str:
    """Where the choices lose, and a summary."""
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
    """How many cases, how many of them within `LARGEST_LOSS`, and the worst."""
    if not found:
        return "nothing was measured"
    within = sum(verdict.loss <= LARGEST_LOSS for verdict in found)
    worst = max(found, key=lambda verdict: verdict.loss)
    case = f"{worst.heads} heads, {worst.prefix:,} tokens, {worst.batch} requests, {worst.dtype}"
    return f"{within} of {len(found)} cases within {LARGEST_LOSS:.0%}; the worst loses {worst.loss:.1%}: {case}"

"""Judge what the cost model and the planner would choose in measured cases, and what each choice costs.

From records; nothing is timed here. A record of `bench` `planner` has the measured ms of each mode in one case, one of
`plans` those of each assignment of modes to the nodes of a tree of shared prompts (planner_checks.py times both). The
choice follows from the rates and is not stored, so the same records can judge any rates, and fit the overheads.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import differential_evolution
from tabulate import tabulate

from bench.cases import PAGE_TOKENS
from bench.records import newest_by
from sglang_mla_ext.kernels.absorb.stacking import STACKED_HEADS
from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.prefix.planner import break_even
from sglang_mla_ext.prefix.planner.branches import Branches
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.covers import Ways, whole
from sglang_mla_ext.prefix.planner.gains import Gains
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates, rates_for
from sglang_mla_ext.prefix.planner.model_dims import ModelDims
from sglang_mla_ext.prefix.planner.plan import plan_step
from sglang_mla_ext.prefix.planner.room import Capacity
from sglang_mla_ext.prefix.tree import SharedTree
from sglang_mla_ext.segment import Mode

DIMS = ModelDims.of("deepseek-v3")
ELEMENT_BYTES = {"bf16": 2, "fp8": 1}  # of the expanded prefix; latent rows are BF16
LARGEST_LOSS = 0.05  # the largest loss that a choice may cost, relative
CONSTANTS_MS, PER_ROOT_ROW_MS = (-0.02, 0.06), (0.0, 0.001)  # where `with_fitted_overheads` looks
COLUMNS = {"heads": "heads", "prefix": "prefix", "requests": "batch", "dtype": "dtype"}
"""Fields of a case in a table, by heading."""
SAME = 0.02  # modes predicted within this fraction of the chosen one must not lose much either


@dataclass(frozen=True)
class Verdict:
    """A choice in a measured case.

    Attributes:
        case: of the record.
        ms: measured, of each mode or, on trees, of each assignment of modes to nodes, by name.
        chosen: name of the one that would be chosen.
    """

    case: Mapping[str, Any]
    ms: Mapping[str, float]
    chosen: str

    @property
    def best(self) -> str:
        """The fastest one."""
        return min(self.ms, key=lambda name: self.ms[name])

    @property
    def loss(self) -> float:
        """Return how much longer the chosen one takes, relative to the fastest one's time."""
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
    found = []
    for record in newest(records):
        case, modes = record["case"], list(map(Mode, record["ms"]))
        chosen = break_even.best_mode(_cost_model(case, rates), case["batch"], case["prefix"], modes)
        found.append(Verdict(case, record["ms"], chosen.value))
    return found


def _cost_model(case: Mapping[str, Any], rates: GpuRates) -> CostModel:
    return CostModel(DIMS, case["heads"], rates, expanded_element_bytes=ELEMENT_BYTES[case["dtype"]])


def by_heads(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield how often the choice with the shipped rates is the fastest mode or nearly, and the worst choice."""
    records = newest_by(records)
    found = []
    for gpu in dict.fromkeys(record["gpu"] for record in records):
        found += verdicts((record for record in records if record["gpu"] == gpu), rates_for(gpu))

    def heads_and_dtype(verdict: Verdict) -> tuple[int, str]:
        return verdict.case["heads"], verdict.case["dtype"]

    for (heads, dtype), group in itertools.groupby(sorted(found, key=heads_and_dtype), heads_and_dtype):
        of_row = list(group)
        worst = max(of_row, key=lambda verdict: verdict.loss)
        where = {name: worst.case[name] for name in ("prefix", "batch")} if worst.loss else {}
        row = {"heads": heads, "dtype": dtype.upper(), "cases": len(of_row), "within": within(of_row)}
        yield row | where | {"worst": worst.loss, "records": records}


def within(found: Iterable[Verdict]) -> int:
    """Return how many choices lose at most `LARGEST_LOSS`."""
    return sum(verdict.loss <= LARGEST_LOSS for verdict in found)


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
    rows = [
        {name: verdict.case[of] for name, of in COLUMNS.items()}
        | {f"{mode} us": f"{ms * 1e3:.1f}" for mode, ms in verdict.ms.items()}
        | {"chosen": verdict.chosen, "loss": f"{verdict.loss:.0%}"}
        for verdict in sorted(found, key=lambda verdict: -verdict.loss)
        if verdict.loss > LARGEST_LOSS
    ]
    return tabulate(rows, "keys", missingval="-")


def summary(found: Sequence[Verdict]) -> str:
    """Return how many cases, how many of them within `LARGEST_LOSS`, and the worst."""
    if not found:
        return "nothing was measured"
    worst = max(found, key=lambda verdict: verdict.loss)
    where = "{heads} heads, {prefix:,} tokens, {batch} requests, {dtype}".format_map(worst.case)
    return f"{within(found)} of {len(found)} cases within {LARGEST_LOSS:.0%}; the worst loses {worst.loss:.1%}: {where}"


CHUNK = 256  # tokens of a chunk of expanded tokens


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
TREE_HEADS = (128, 16)

SEGMENTS_S = (0.0, 1e-6, 2e-6, 3e-6, 4e-6, 5e-6)
"""Candidates of `with_fitted_segments`."""

Modes = tuple[Mode, ...]
"""`[nodes]`: how each is attended to."""


def assignments(tree: Tree, heads: int) -> Iterator[Modes]:
    """All that a server could plan: each node by plain absorb, grouped absorb or naive attention, and shared only where
    the one above it is."""
    ways = [Mode.ABSORB, Mode.NAIVE, *([Mode.GROUPED_ABSORB] if heads in STACKED_HEADS else [])]
    for modes in itertools.product(ways, repeat=len(tree.parents)):
        shared = [mode is not Mode.ABSORB for mode in modes]
        if all(
            parent < 0 or shared[parent] or not of_node for parent, of_node in zip(tree.parents, shared, strict=True)
        ):
            yield modes


def name_of(modes: Modes) -> str:
    """Return the name of an assignment in a record."""
    return " ".join(mode.value for mode in modes)


def chosen(tree: Tree, heads: int, dtype: str, rates: GpuRates) -> str:
    """The planner's choice with these rates, by name."""
    cost = CostModel(DIMS, heads, rates, expanded_element_bytes=ELEMENT_BYTES[dtype])
    grouped = heads in STACKED_HEADS
    gains = Gains.of(HybridMLAOptions(), cost, naive=True, grouped=grouped, step_tokens=sum(tree.tokens))
    branches = Branches(SharedTree(range(len(tree.parents)), tree.parents, tree.ends, tree.node_of_row))
    ways = Ways(gains.naive, gains.grouped, CHUNK, PAGE_TOKENS)
    modes = [Mode.ABSORB] * len(tree.parents)
    room = Capacity(len(branches), tree.batch * len(branches))
    for part in plan_step(branches, ways, whole(branches), gains.launch, room)[0]:
        modes[branches[part.branch].nodes[-1]] = part.mode
    return name_of(tuple(modes))


def with_fitted_segments(records: Sequence[Mapping[str, Any]], rates: GpuRates) -> GpuRates:
    """The same rates with the `segment_s` of both modes for which the planner's choices lose least on average; of equal
    ones the smallest. What one more segment costs by itself was within the noise of its measurement."""

    def with_segments(naive_s: float, grouped_s: float) -> GpuRates:
        more = {Mode.NAIVE: naive_s, Mode.GROUPED_ABSORB: grouped_s}
        return replace(rates, modes=rates.modes | {m: replace(rates.modes[m], segment_s=s) for m, s in more.items()})

    def mean_loss(candidate: GpuRates) -> float:
        return sum(judged(record, candidate).loss for record in records) / len(records)

    candidates = sorted(itertools.product(SEGMENTS_S, repeat=2), key=sum)
    return min(itertools.starmap(with_segments, candidates), key=mean_loss)


def judged(record: Mapping[str, Any], rates: GpuRates) -> Verdict:
    """Return what the planner chooses in a record's case with these rates."""
    case = record["case"]
    tree = Tree(case["tree"], *(tuple(case[name]) for name in ("parents", "tokens", "rows")))
    return Verdict(case, record["ms"], chosen(tree, case["heads"], case["dtype"], rates))


def plans_table(records: Iterable[Mapping[str, Any]], rates: GpuRates) -> str:
    """Return for each case what plain absorb, the planner's choice with these rates and the fastest assignment take."""
    rows = []
    for found in (judged(record, rates) for record in records):
        names = {"absorb": name_of((Mode.ABSORB,) * len(found.case["parents"])), "chosen": found.chosen}
        names["fastest"] = found.best
        rows.append(
            {"tree": found.case["tree"], "heads": found.case["heads"], "prefix in": found.case["dtype"].upper()}
            | {f"{what} us": f"{found.ms[name] * 1e3:.0f}" for what, name in names.items()}
            | {"loss": f"{found.loss:.0%}", "chosen": found.chosen, "fastest": found.best}
        )
    return tabulate(rows, "keys")

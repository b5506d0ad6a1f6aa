"""Time what planning costs the host, in a scheduler's thread between two forward passes.

    python scripts/bench_planner.py --out benchmarks/results/plan.jsonl

SGLang's own radix tree and DeepSeek-V3's dimensions, with the rates of an H200; expanding itself is left out, and all
that is wanted is expanded at once. Needs no GPU. Timed are the first plan of a batch and, as medians, the next ones
after three of its requests were replaced, steps whose batch is unchanged, and prefill steps of three newcomers.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import timeit
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from bench.records import Report
from bench.tables import table
from bench.trees import CASES, PAGE, Request, Tree

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.kernels.absorb.stacking import rows_per_tile
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS, MAX_ROWS, MAX_SEGMENTS, SEGMENTS_PER_ROW
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.prefix.memory.pool import ExpandedPool
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates
from sglang_mla_ext.prefix.planner.model_dims import ModelDims
from sglang_mla_ext.prefix.planner.planner import Planner
from sglang_mla_ext.prefix.planner.room import Capacity
from sglang_mla_ext.prefix.radix import RadixSource
from sglang_mla_ext.prefix.sharing import Sharing

HEADS = (128, 16)
CHUNKS = 256  # room for expanded prefixes
REPLACED = 3  # requests that leave and come between two plans
AFFORDABLE = 8192  # tokens that a prefill step may expand at once
TIMES = ("first_ms", "replan_ms", "unchanged_ms", "prefill_ms")
COLUMNS = {name: f"{{{name}}}" for name in ("tree", "requests", "heads")} | {name: f"{{{name}:.3f}}" for name in TIMES}
COLUMNS |= {name: f"{{{name}}}" for name in ("groups", "shared_rows")}


def shared_prefixes(heads: int, tree: Tree) -> Sharing:
    """Make a server's shared prefixes, which expands nothing; grouped absorb where it stacks this many heads."""
    counters, pool = Counters(), ExpandedPool(CHUNKS, CHUNK_TOKENS)
    planner = Planner(
        HybridMLAOptions(expand_tokens_per_step=1 << 30),
        CostModel(ModelDims.of("deepseek-v3"), heads, GpuRates.from_json("h200")),
        Capacity(MAX_SEGMENTS, SEGMENTS_PER_ROW * MAX_ROWS),
        CHUNK_TOKENS,
        counters,
        grouped_page=None if rows_per_tile(heads) is None else PAGE,
    )
    expander = SimpleNamespace(expand=lambda *args, **kwargs: None)
    return Sharing(RadixSource(pool, counters, installed.TreeView(tree.cache)), pool, planner, expander, counters)


class Batch:
    """The running requests of a case, and the time of what is done with them."""

    def __init__(self, name: str) -> None:
        case = CASES[name]
        self.tree = Tree()
        self.start = case.make(self.tree)
        self.requests = [self.start(kind) for kind in range(case.requests)]

    def replace(self) -> list[Request]:
        """The first requests leave, and others like them come; the newcomers, which are the last."""
        for request in self.requests[:REPLACED]:
            self.tree.finish(request)
        came = [self.start(request.kind) for request in self.requests[:REPLACED]]
        self.requests = self.requests[REPLACED:] + came
        return came


def milliseconds(function: Callable[[], Any], repeats: int = 1, before: Callable[[], Any] = lambda: None) -> float:
    """Return the median time of a call, without `before`."""

    def setup() -> None:
        gc.enable()  # as in a server; timeit disables it
        before()

    return statistics.median(timeit.repeat(function, setup, number=1, repeat=repeats)) * 1e3


def measure_plans(name: str, heads: int, repeats: int) -> dict[str, Any]:
    """Time planning; return the times, and the groups and shared rows that were planned in the end."""
    batch = Batch(name)
    prefixes = shared_prefixes(heads, batch.tree)

    def decode() -> None:
        prefixes.plan_decode(batch.requests)

    def prefill() -> None:
        prefixes.before_prefill(batch.requests[-REPLACED:], batch.requests[:-REPLACED], AFFORDABLE)

    found: dict[str, Any] = dict(first_ms=milliseconds(decode))
    decode()  # the step after an expansion looks whether more is to do
    found["replan_ms"] = milliseconds(decode, repeats, batch.replace)
    decode()
    found["unchanged_ms"] = milliseconds(decode, repeats)
    found["prefill_ms"] = milliseconds(prefill, repeats, batch.replace)
    decode()
    plan = prefixes.plan
    return found | dict(groups=len(plan.segments), shared_rows=sum(length > 0 for length in plan.prefix_lens))


def main(
    case: Annotated[list[str] | None, typer.Option(help=f"{', '.join(CASES)} (repeatable; all)")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="calls of which a time is the median")] = 21,
    out: Annotated[Path | None, typer.Option(help="append JSON lines to this file")] = None,
) -> None:
    """Time the planning of decode and prefill steps on the host."""
    if unknown := set(case or []) - set(CASES):
        raise typer.BadParameter(f"--case must be one of {', '.join(CASES)}, not {', '.join(unknown)}")
    report = Report("plan", out)
    for name, count in itertools.product(case or CASES, HEADS):
        gc.collect()
        conditions = dict(tree=name, requests=CASES[name].requests, heads=count, chunks=CHUNKS)
        report.add("hybrid_mla", conditions, measure_plans(name, count, repeats))
    print(table(COLUMNS, report.rows))


if __name__ == "__main__":
    typer.run(main)

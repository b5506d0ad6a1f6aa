"""Time attention over shared, expanded prefixes on the GPU, and rivals on the same cases.

    python scripts/bench_attention.py --out benchmarks/results/attention.jsonl
    python scripts/bench_attention.py --prefix 7069 --heads 16 --batch 128 --batch 256

Every line of the output is one measurement: the median time of a CUDA graph of one call, L2 flushed before each.
DeepSeek-V3's dimensions. Parts: `naive` is the shared part alone, `all` it, the merge, and FlashMLA over the private
tails, `grouped_absorb` prefixes and tails by grouped absorb; the products with `w_kc` and `w_vc` are left out
everywhere. `floor_ms` is the shared part's, also for `all`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from bench.cases import Case
from bench.measured import Asked, measure_cases
from bench.ours import DTYPES
from bench.rivals import RIVALS

from sglang_mla_ext.kernels.absorb.stacking import STACKED_HEADS

TAIL = 512  # private tokens of each request
DEFAULT_GRID = [  # prefix, heads, batches
    (26472, 128, [64, 128, 256, 512]),
    (7069, 128, [128, 512]),
    (4759, 128, [128, 1024]),
    (26472, 64, [128, 512]),
    (26472, 16, [128, 512]),
]
COLUMNS = {name: f"{{{name}}}" for name in ("heads", "prefix", "batch", "dtype", "impl", "part")}


def cases_of(prefix: list[int] | None, heads: list[int] | None, batch: list[int] | None) -> list[Case]:
    """The cases that the options ask for: the default grid without any, else their product."""
    if not (prefix or heads or batch):
        return [Case(length, TAIL, n, (rows,)) for length, n, batches in DEFAULT_GRID for rows in batches]
    asked_for = itertools.product(prefix or [26472], heads or [128], batch or [128, 512])
    return [Case(length, TAIL, n, (rows,)) for length, n, rows in asked_for]


def asked(case: Case) -> Iterator[Asked]:
    """Yield what is timed in a case."""
    yield from ((name, "all", rival.dtype) for name, rival in RIVALS.items())
    yield from (("hybrid_mla", part, dtype) for dtype in DTYPES for part in ("naive", "all"))
    if case.heads in STACKED_HEADS:
        yield "hybrid_mla", "grouped_absorb", "bf16"


def main(
    prefix: Annotated[list[int] | None, typer.Option(min=1, help="tokens of the shared prefix (repeatable)")] = None,
    heads: Annotated[list[int] | None, typer.Option(min=1, help="local heads (repeatable)")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="requests that share the prefix (repeatable)")] = None,
    rep_ms: Annotated[int, typer.Option(min=1, help="ms spent on each measurement")] = 100,
    out: Annotated[Path | None, typer.Option(help="append JSON lines to this file")] = None,
) -> None:
    """Time attention over shared prefixes: a default grid of cases, or every combination of the options given."""
    title = "attention over shared prefixes"
    measure_cases(cases_of(prefix, heads, batch), asked, title=title, columns=COLUMNS, rep_ms=rep_ms, out=out)


if __name__ == "__main__":
    typer.run(main)

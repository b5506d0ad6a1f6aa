"""What the shadow check costs in a step that is not checked: merges that can be watched beside merges that cannot.

    python scripts/study.py watch --out benchmarks/results/watch.jsonl

A CUDA graph holds the merges of all layers of a decode step over one expanded prefix; in a second one each merge also
reads the number that says which layer is watched, and it is none. Both graphs are timed in turn. The study engine with
`--verify-interval` measures the other part, the check itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from bench.cases import DR, DV, LATENT
from bench.records import write_record
from bench.timing import captured, free_memory, time_ms
from rich.console import Console
from rich.table import Table

from sglang_mla_ext.kernels.merge import merge
from sglang_mla_ext.kernels.partials import PartialTable
from sglang_mla_ext.kernels.watch import Watch, Watched

app = typer.Typer(add_completion=False)

ROWS_WATCHED = 64


def merges(rows: int, heads: int, layers: int) -> Callable[[bool], None]:
    """The merges of a step, in place as in a server: a function of whether they can be watched."""
    of_bf16 = dict(dtype=torch.bfloat16, device="cuda")
    tails = torch.randn(layers, rows, heads, DV, **of_bf16)
    tail_lse = torch.randn(rows, heads, device="cuda")
    partial_out, partial_lse2 = torch.randn(rows, heads, DV, device="cuda"), torch.randn(rows, heads, device="cuda")
    query, rope = torch.randn(rows, heads, LATENT, **of_bf16), torch.randn(rows, heads, DR, **of_bf16)
    watch = Watch(max_rows=ROWS_WATCHED, heads=heads, columns=LATENT + DR, dv=DV, **of_bf16)
    table = PartialTable.from_pairs(range(rows), range(rows), max_rows=rows, max_partials=rows).to("cuda")

    def step(watched: bool) -> None:
        for layer, tail in enumerate(tails):
            look = Watched(watch, layer, query, rope) if watched else None
            merge(tail, tail_lse, partial_out, partial_lse2, table, tail, watched=look)

    return step


@app.command()
def main(
    heads: Annotated[list[int], typer.Option(min=1, help="Heads of a rank; repeatable.")] = [16, 128],  # noqa: B006
    rows: Annotated[list[int], typer.Option(min=1, help="Requests of a step; repeatable.")] = [64, 128, 512],  # noqa: B006
    layers: Annotated[int, typer.Option(min=1, help="Merges in a step.")] = 61,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is timed.")] = 21,
    rep_ms: Annotated[int, typer.Option(min=1, help="ms spent on each measurement")] = 20,
    out: Annotated[Path | None, typer.Option(help="append JSON lines to this file")] = None,
) -> None:
    """Time the merges of a step with and without the shadow check's number."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU")
    table = Table(title=f"merges of {layers} layers, us each, {torch.cuda.get_device_name()}")
    for column in ("heads", "requests", "without", "with", "difference"):
        table.add_column(column, justify="right")
    for head_count in heads:
        for row_count in rows:
            step = merges(row_count, head_count, layers)
            graphs = {watched: captured(partial(step, watched)) for watched in (False, True)}
            times: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(rounds):
                for watched, graph in graphs.items():
                    times[watched].append(time_ms(graph, rep_ms) * 1e3 / layers)
            plain, watched_us = median(times[False]), median(times[True])
            apart = median(with_it - without for without, with_it in zip(*times.values(), strict=True))
            table.add_row(str(head_count), str(row_count), f"{plain:.3f}", f"{watched_us:.3f}", f"{apart:+.3f}")
            if out is not None:
                write_record(
                    out,
                    bench="watch",
                    impl="hybrid_mla",
                    case={"heads": head_count, "requests": row_count, "layers": layers, "rounds": rounds},
                    merge_us=round(plain, 4),
                    merge_watched_us=round(watched_us, 4),
                    difference_us=round(apart, 4),
                )
            del step, graphs
            free_memory()
    Console().print(table)

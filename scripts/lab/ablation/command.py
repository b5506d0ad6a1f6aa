"""Time what each step of the shared part brings: the kernel in Gluon, FP8, the schedule, the fused query quantisation.

    python scripts/study.py ablation --out benchmarks/results/ablation.jsonl

Every line of the output is the median time of a CUDA graph of the shared part and its merge, L2 flushed before each,
with one more of the steps than the line before:

- `triton`: BF16, the portable kernel; every (group, head, row tile) is one item, in the order of the groups
- `gluon`: the kernel for Hopper
- `fp8`: keys and values in FP8, values transposed (Hopper's FP8 products take them no other way)
- `schedule`: keys are split and items ordered as kernels/naive/schedule.py does; this is what a server runs

`quantize` is a launch that only rounds the query to FP8: its cost if the kernel did not do so itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import typer
from bench.cases import DN, DR, DV, SCALE
from bench.records import write_record
from bench.shared import DTYPES
from bench.timing import captured, free_memory, time_ms
from rich.console import Console
from rich.table import Table

from sglang_mla_ext.kernels.absorb.quantize_query import quantize_query
from sglang_mla_ext.kernels.dispatch import make_shared_attention
from sglang_mla_ext.kernels.naive import schedule
from sglang_mla_ext.kernels.storage.expanded import CHUNK_TOKENS, FP8, ExpandedBuffers
from sglang_mla_ext.segment import Mode, Segment

app = typer.Typer(add_completion=False)


class Batch(NamedTuple):
    """Groups of a decode step: rows and prefix length of each."""

    heads: int
    groups: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> int:
        return sum(rows for rows, _ in self.groups)

    def fields(self) -> dict[str, Any]:
        """The `case` of a record."""
        return {
            "heads": self.heads,
            "batch": self.rows,
            "groups": [f"{rows} on {prefix}" for rows, prefix in self.groups],
        }


BATCHES = (
    Batch(128, ((128, 26472),)),
    Batch(128, ((512, 26472),)),
    Batch(16, ((128, 26472),)),
    Batch(16, ((16, 7069),) * 8),
    Batch(16, ((64, 26472), (32, 7069), (16, 2048), (16, 1024))),
    Batch(128, ((64, 26472), (32, 7069), (16, 2048), (16, 1024))),
)
STEPS = {  # dtype, portable kernel, our schedule
    "triton": ("bf16", True, False),
    "gluon": ("bf16", False, False),
    "fp8": ("fp8", False, False),
    "schedule": ("fp8", False, True),
}


@contextmanager
def unscheduled() -> Iterator[None]:
    """Work lists that split no keys and keep the order of the groups."""

    def no_splits(sizes: np.ndarray, *_: Any) -> np.ndarray:
        return np.ones_like(sizes)

    def same_order(keys: np.ndarray, _: int) -> np.ndarray:
        return np.arange(len(keys))

    not_cached = schedule._divide.__wrapped__
    with (
        patch.object(schedule, "_divide", not_cached),
        patch.object(schedule, "choose_splits", no_splits),
        patch.object(schedule, "balanced_order", same_order),
    ):
        yield


def make_buffers(batch: Batch, dtype: str) -> tuple[ExpandedBuffers, list[Segment]]:
    """Random expanded prefixes of all groups."""
    groups, row, chunk = [], 0, 0
    for rows, prefix in batch.groups:
        chunks = -(-prefix // CHUNK_TOKENS)
        groups.append(
            Segment(tuple(range(row, row + rows)), 0, prefix, Mode.NAIVE, tuple(range(chunk, chunk + chunks)))
        )
        row, chunk = row + rows, chunk + chunks
    buffers = ExpandedBuffers.allocate(
        layers=1,
        chunks=chunk,
        heads=batch.heads,
        qk_nope_head_dim=DN,
        v_head_dim=DV,
        qk_rope_head_dim=DR,
        dtype=DTYPES[dtype],
    )
    for tensor in (buffers.k_nope, buffers.v_t, buffers.k_rope):
        tensor.copy_(torch.randn(tensor.shape, device=tensor.device, dtype=torch.bfloat16))
    return buffers, groups


def shared_part(batch: Batch, dtype: str, portable: bool, scheduled: bool) -> Callable[[], None]:
    """The shared part and its merge."""
    buffers, groups = make_buffers(batch, dtype)
    rows, heads = batch.rows, batch.heads
    attention = make_shared_attention(buffers, max_rows=rows, heads=heads, device="cuda", portable=portable)
    if scheduled:
        attention.plan(groups, rows)
    else:
        with unscheduled():
            attention.plan(groups, rows)
    query = torch.randn(rows, heads, DN + DR, device="cuda", dtype=torch.bfloat16)
    tail_out = torch.randn(rows, heads, DV, device="cuda", dtype=torch.bfloat16)
    tail_lse = torch.randn(rows, heads, device="cuda")

    def run() -> None:
        attention.run(0, query[..., :DN], query[..., DN:], SCALE)
        attention.merge(tail_out, tail_lse, tail_out)

    return run


def query_quantisation(batch: Batch) -> Callable[[], None]:
    """A launch that rounds the content part of the query to FP8."""
    shape = (batch.rows, batch.heads)
    query = torch.randn(*shape, DN + DR, device="cuda", dtype=torch.bfloat16)
    content = torch.empty(*shape, DN, device="cuda", dtype=FP8)
    scale = torch.empty(shape, device="cuda")
    rope = torch.empty(*shape, DR, device="cuda", dtype=torch.bfloat16)
    return lambda: quantize_query(query[..., :DN], query[..., DN:], content, scale, rope)


@app.command()
def main(
    rep_ms: Annotated[int, typer.Option(min=1, help="ms spent on each measurement")] = 100,
    out: Annotated[Path | None, typer.Option(help="append JSON lines to this file")] = None,
) -> None:
    """Time the shared part with one step after another."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU")
    table = Table(title=f"shared part and merge, us, {torch.cuda.get_device_name()}")
    for column in ("heads", "groups", *STEPS, "quantize"):
        table.add_column(column, justify="right")
    for batch in BATCHES:
        times = []
        for step, settings in STEPS.items():
            times.append((step, settings[0], time_ms(captured(shared_part(batch, *settings)), rep_ms)))
            free_memory()
        times.append(("quantize", "fp8", time_ms(captured(query_quantisation(batch)), rep_ms)))
        for step, dtype, ms in times:
            if out is not None:
                case = batch.fields() | {"dtype": dtype}
                write_record(out, bench="ablation", impl="hybrid_mla", case=case, step=step, ms=ms)
        table.add_row(str(batch.heads), ", ".join(batch.fields()["groups"]), *(f"{ms * 1e3:.1f}" for *_, ms in times))
    Console(width=140).print(table)

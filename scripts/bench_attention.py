"""Time attention over shared, expanded prefixes on the GPU: the naive kernel, the merge, and both with an empty plan.

    python scripts/bench_attention.py --out benchmarks/results/attention.jsonl

Every line of the output is one measurement. DeepSeek-V3's dimensions, BF16.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from triton.testing import do_bench_cudagraph

from sglang_mla_ext.kernels.dispatch import make_prefix_attention
from sglang_mla_ext.kernels.layout import CHUNK_TOKENS, ExpandedBuffers
from sglang_mla_ext.kernels.schedule import PrefixGroup
from sglang_mla_ext.results import write_record

DN, DR, DV = 128, 64, 128
SCALE = (DN + DR) ** -0.5


def bench_case(buffers: ExpandedBuffers, prefix: int, batch: int, rep_ms: int) -> list[tuple[str, dict, dict]]:
    """Measurements of one case: what (`naive`, `merge`, `empty_plan`), its `case` fields, its metrics."""
    heads = buffers.heads
    query = torch.randn(batch, heads, DN + DR, device="cuda").bfloat16()
    q_nope, q_rope = query[..., :DN], query[..., DN:]  # [B, H, dn], [B, H, dr]
    tail_out = torch.randn(batch, heads, DV, device="cuda").bfloat16()  # [B, H, dv]
    tail_lse = torch.randn(batch, heads, device="cuda")  # [B, H]
    attention = make_prefix_attention(buffers, max_rows=batch, heads=heads, device="cuda")

    def run() -> None:
        attention.run(0, q_nope, q_rope, SCALE)

    def merge() -> None:
        attention.merge(tail_out, tail_lse, tail_out)

    def run_and_merge() -> None:
        run()
        merge()

    def time_ms(function) -> float:
        return do_bench_cudagraph(function, rep=rep_ms, return_mode="median")

    chunks = tuple(range(-(-prefix // CHUNK_TOKENS)))
    attention.plan([PrefixGroup(tuple(range(batch)), prefix, chunks)])
    run_ms, merge_ms = time_ms(run), time_ms(merge)
    attention.plan([])
    empty_ms = time_ms(run_and_merge)

    flops = 2 * batch * heads * prefix * (DN + DR + DV)
    read_bytes = 2 * prefix * (heads * (DN + DV) + DR)
    case = dict(prefix=prefix, heads=heads, batch=batch, groups=1, s_q=1, dtype="bf16")
    naive = dict(ms=run_ms, tflops=flops / run_ms / 1e9, gbps=read_bytes / run_ms / 1e6)
    return [
        ("naive", case, naive),
        ("merge", case, dict(ms=merge_ms)),
        ("empty_plan", dict(heads=heads, batch=batch, groups=0, s_q=1, dtype="bf16"), dict(ms=empty_ms)),
    ]


def main(
    prefix: Annotated[list[int] | None, typer.Option(help="tokens of the shared prefix (repeatable)")] = None,
    heads: Annotated[list[int] | None, typer.Option(help="local heads (repeatable)")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="requests that share the prefix (repeatable)")] = None,
    rep_ms: Annotated[int, typer.Option(help="time spent on each measurement")] = 100,
    out: Annotated[Path | None, typer.Option(help="append JSON lines to this file")] = None,
) -> None:
    """Time attention over a shared prefix for every combination of prefix, heads and batch."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU")
    prefix, heads, batch = prefix or [26472, 7069, 4759], heads or [128, 16], batch or [64, 128, 256]
    table = Table(title=f"attention over a shared prefix, BF16, {torch.cuda.get_device_name()}")
    for column in ("heads", "prefix", "batch", "what", "us", "TFLOPS", "GB/s"):
        table.add_column(column, justify="right")
    for n_heads in heads:
        sizes = dict(qk_nope_head_dim=DN, v_head_dim=DV, qk_rope_head_dim=DR)
        chunks = -(-max(prefix) // CHUNK_TOKENS)
        buffers = ExpandedBuffers.allocate(layers=1, chunks=chunks, heads=n_heads, **sizes)
        for tensor in (buffers.k_nope, buffers.v_t, buffers.k_rope):
            tensor.normal_()
        for length, rows in itertools.product(prefix, batch):
            for what, case, metrics in bench_case(buffers, length, rows, rep_ms):
                if out is not None:
                    write_record(out, bench="attention", impl="hybrid_mla", case=case, part=what, **metrics)
                rate = [f"{metrics[k]:.0f}" if k in metrics else "" for k in ("tflops", "gbps")]
                table.add_row(str(n_heads), str(length), str(rows), what, f"{metrics['ms'] * 1e3:.1f}", *rate)
        del buffers
        torch.cuda.empty_cache()
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)

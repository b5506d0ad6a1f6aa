"""Time what sharded prefixes cost in a layer: the exchange of queries and results, and the launches around it.

    NCCL_GRAPH_REGISTER=0 python scripts/bench_exchange.py --out exchange.jsonl

A process for each GPU, and in each a CUDA graph of the layers of a step: queries to the ranks that have their heads,
naive attention of all rows over one chunk, results back, and the merge with tails. `wire` is the exchange alone, and
`idle` a step that shares nothing. `--via peers` has stores into the other ranks' memory in place of NCCL.
Nothing runs beside it here; in a step, attention to tails does. `calibrate.py --exchange` takes the records. Without
GPUs it runs over Gloo, to be seen working.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from bench.cases import DN, DR, DV
from bench.records import Report
from bench.server import free_port
from bench.tables import table
from bench.timing import captured

from sglang_mla_ext.kernels.dispatch import make_shared_attention
from sglang_mla_ext.kernels.naive.collectives import Collectives
from sglang_mla_ext.kernels.naive.exchange import Exchange, ExchangeSizes
from sglang_mla_ext.kernels.naive.peers import Peers
from sglang_mla_ext.kernels.naive.sharded import ShardedAttention
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS
from sglang_mla_ext.kernels.storage.expanded import ExpandedBuffers
from sglang_mla_ext.segment import Mode, Segment

LAYERS, ROUNDS = 61, 21
"""Layers of a step, and how often it is timed."""
COLUMNS = {
    "via": "{impl}",
    "rows of a rank": "{rows}",
    "bytes out of a rank": "{sent_bytes:,}",
    "all": "{all_us:.1f}",
    "wire": "{wire_us:.1f}",
    "idle": "{idle_us:.1f}",
}


def exchanges(
    rank: int, ranks: int, heads: int, rows: int, device: torch.device, via: str
) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """Return calls of one layer of a rank: all of it, the exchange alone, and a layer of a step that shares nothing."""
    dims = dict(qk_nope_head_dim=DN, v_head_dim=DV, qk_rope_head_dim=DR)
    buffers = ExpandedBuffers.allocate(layers=1, chunks=1, heads=heads // ranks, device=device, **dims)
    of_bf16 = dict(dtype=torch.bfloat16, device=device)
    attention = make_shared_attention(buffers, max_rows=ranks * rows, heads=heads // ranks, device=device)
    sizes = ExchangeSizes(ranks, heads, rows, DN, DR, DV, torch.bfloat16)
    exchange: Exchange = (
        Peers.of_group(dist.group.WORLD, sizes, device)
        if via == "peers"
        else Collectives(dist.all_to_all_single, sizes, device)
    )
    sharded = ShardedAttention(attention, exchange, sizes, device)
    q_nope, q_rope = (torch.randn(rows, heads, dim, **of_bf16) for dim in (DN, DR))
    tails, tail_lse = torch.randn(rows, heads, DV, **of_bf16), torch.randn(rows, heads, device=device)
    shared = [Segment(tuple(range(ranks * rows)), 0, CHUNK_TOKENS, Mode.NAIVE, (0,))]
    active = torch.ones(1, dtype=torch.int32, device=device)

    def everything() -> None:
        sharded.run(0, q_nope, q_rope, 0.1)
        sharded.merge(tails, tail_lse, tails)

    def wire() -> None:
        exchange.queries(q_nope, q_rope, rows, active)
        exchange.results(attention, rows, active)

    return {
        "all": (everything, lambda: sharded.plan(shared, rows)),
        "wire": (wire, lambda: sharded.plan(shared, rows)),
        "idle": (everything, lambda: sharded.plan([], rows)),
    }


def us_a_layer(layer: Callable[[], None], prepare: Callable[[], None]) -> float:
    """Median over rounds; all ranks begin each together. What a layer needs is planned before."""
    prepare()
    on_gpu = torch.cuda.is_available()
    wait = torch.cuda.synchronize if on_gpu else lambda: None

    def step() -> None:
        for _ in range(LAYERS):
            layer()

    run = captured(step) if on_gpu else step
    run()
    found = []
    for _ in range(ROUNDS):
        wait()
        dist.barrier()
        begin = time.perf_counter()
        run()
        wait()
        found.append((time.perf_counter() - begin) / LAYERS * 1e6)
    return median(found)


def run_rank(rank: int, ranks: int, port: int, heads: int, rows: list[int], ways: list[str], out: Path | None) -> None:
    """Run one rank's process; the first one reports."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=address, rank=rank, world_size=ranks)
    report = Report("exchange", out if rank == 0 else None)
    for via, count in itertools.product(ways, rows):
        parts = exchanges(rank, ranks, heads, count, device, via)
        found = {f"{part}_us": us_a_layer(*layer) for part, layer in parts.items()}
        sent_bytes = 2 * count * (heads - heads // ranks) * (DN + DR + DV)
        case = {"ranks": ranks, "heads": heads, "rows": count, "layers": LAYERS, "sent_bytes": sent_bytes}
        report.add(via, case, found)
    if rank == 0:
        print(f"exchange of {ranks} ranks, {heads} heads, us a layer")
        print(table(COLUMNS, report.rows))
    dist.destroy_process_group()


def main(
    heads: Annotated[int, typer.Option(min=1, help="Query heads of a request.")] = 128,
    rows: Annotated[list[int], typer.Option(min=1, help="Requests of a rank; repeatable.")] = [16, 32, 64, 128, 256],  # noqa: B006
    via: Annotated[
        list[str], typer.Option(help="nccl, or peers: stores into each other's memory, on GPUs; repeatable.")
    ] = ["nccl"],  # noqa: B006
    out: Annotated[Path | None, typer.Option(help="append JSON lines to this file")] = None,
) -> None:
    """Time the exchange of ranks that shard prefixes: of all GPUs, or without any of two processes."""
    ranks = max(torch.cuda.device_count(), 2)
    if heads % ranks:
        raise typer.BadParameter(f"{ranks} ranks do not divide {heads} heads", param_hint="--heads")
    if unknown := {*via} - {"nccl", "peers"}:
        raise typer.BadParameter(f"{', '.join(unknown)} is neither nccl nor peers", param_hint="--via")
    torch.multiprocessing.spawn(run_rank, (ranks, free_port(), heads, rows, via, out), nprocs=ranks)


if __name__ == "__main__":
    typer.run(main)

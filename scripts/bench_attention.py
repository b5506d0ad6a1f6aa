"""Time attention over shared, expanded prefixes on the GPU, and rivals on the same cases.

    python scripts/bench_attention.py --out benchmarks/results/attention.jsonl
    python scripts/bench_attention.py --prefix 7069 --groups 8x16 --groups 200+56x1

Every line of the output is one measurement: the median time of a CUDA graph of one call, L2 flushed before each.
DeepSeek-V3's dimensions. Parts: `naive` is the shared part alone, `merge` the merge alone, `all` both and FlashMLA over
the private tails, `all_two_streams` the same with the shared part and FlashMLA side by side, `grouped_absorb` prefixes
and tails by grouped absorb; the products with `w_kc` and `w_vc` are left out everywhere.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import typer
from grouped_attention import GROUPED_HEADS, grouped_absorb
from rich.console import Console
from rich.table import Table
from rival_attention import DN, DR, DV, LATENT, PAGE_TOKENS, RIVALS, SCALE, Case, Rival, flashmla_tail, page_table
from triton.testing import do_bench

from sglang_mla_ext.kernels.dispatch import make_shared_attention
from sglang_mla_ext.kernels.naive.attention import SharedAttention
from sglang_mla_ext.kernels.naive.schedule import ExpandedSegment
from sglang_mla_ext.kernels.naive.triton_naive import Tile
from sglang_mla_ext.kernels.storage.expanded import CHUNK_TOKENS, ExpandedBuffers
from sglang_mla_ext.prefix.cost_model import rates_for
from sglang_mla_ext.results import write_record

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
STORAGE = {"bf16": "bf16", "fp8": "fp8_e4m3"}  # a dtype's name in configs/gpus
PRODUCT_SIDE = 8192  # of the matrices that are multiplied for the ceilings
BATCH_MS = 10  # of calls back to back: the host's wait behind each batch is short beside it
DEFAULT_GRID = [  # prefix, heads, batches
    (26472, 128, [64, 128, 256, 512]),
    (7069, 128, [128, 512]),
    (4759, 128, [128, 1024]),
    (26472, 64, [128, 512]),
    (26472, 16, [128, 512]),
]


class Ceilings(NamedTuple):
    """What the GPU does at best, measured."""

    copy_gbps: float  # bytes read and bytes written
    bf16_tflops: float
    fp8_tflops: float

    def __str__(self) -> str:
        return "copy {:.0f} GB/s, BF16 {:.0f} and FP8 {:.0f} TFLOPS".format(*self)


def parse_groups(spec: str) -> tuple[tuple[int, ...], int]:
    """Read a description of a batch: `8x16` is 8 groups of 16 rows, `200+56x1` a group of 200 and 56 rows alone.

    Returns:
        rows of each group, at least 2 in each, and the number of rows alone.
    Raises:
        ValueError: it is something else, or has no group.
    """
    sizes: list[int] = []
    for term in spec.split("+"):
        count, times, size = term.rpartition("x")
        if not size.isdecimal() or (times and not count.isdecimal()) or int(size) == 0 or (times and int(count) == 0):
            raise ValueError(f"groups must be like 8x16 or 200+56x1, not {spec!r}")
        sizes += [int(size)] * (int(count) if times else 1)
    groups = tuple(size for size in sizes if size > 1)
    if not groups:
        raise ValueError(f"{spec!r} has no group of two rows or more")
    return groups, sizes.count(1)


def shared_bytes(case: Case, dtype: str) -> int:
    """Bytes of the expanded keys and values of all prefixes of a case; rotary keys are never FP8."""
    per_head = (DN + DV) * DTYPES[dtype].itemsize
    return len(case.sizes) * case.prefix * (case.heads * per_head + DR * 2)


def floor_ms(case: Case, dtype: str, ceilings: Ceilings) -> float:
    """The shortest possible time of the shared part, ms: its bytes at the speed of a copy or its products at that of a
    large matrix product, whichever is longer. In FP8 the product with the rotary keys is still BF16."""
    memory = shared_bytes(case, dtype) / ceilings.copy_gbps / 1e6
    bf16_share = 1.0 if dtype == "bf16" else DR / (DN + DR + DV)
    rates = bf16_share / ceilings.bf16_tflops + (1 - bf16_share) / ceilings.fp8_tflops
    return max(memory, case.shared_flops * rates / 1e9)


@dataclass(frozen=True)
class Captured:
    """A CUDA graph, and what was captured: its tensors must live as long."""

    graph: torch.cuda.CUDAGraph
    function: Callable[[], Any]

    def __call__(self) -> None:
        self.graph.replay()


def captured(function: Callable[[], Any]) -> Callable[[], Any]:
    """A CUDA graph of one call, to replay; the function itself if it cannot be captured."""
    for _ in range(3):  # compiles, fills in schedules
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            function()
    except RuntimeError as error:
        print(f"no CUDA graph, timed without: {str(error)[:300]}", flush=True)
        return function
    return Captured(graph, function)


def time_ms(function: Callable[[], Any], rep_ms: int = 100) -> float:
    """Median time of a call in ms, L2 flushed before each, over `rep_ms` ms of calls after 50 ms of warm-up."""
    return do_bench(function, warmup=50, rep=rep_ms, return_mode="median")


def back_to_back(function: Callable[[], Any]) -> Iterator[float]:
    """Call without an end, L2 not flushed: ms of a call, in one batch of calls after another. So the GPU gets to its
    power limit, where `time_ms` is too short for that."""
    calls = 1
    while True:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        ms = start.elapsed_time(end) / calls
        calls = max(1, round(BATCH_MS / ms))
        yield ms


def settled(times: Sequence[float]) -> float:
    """The median of the later two thirds: clock and power change at first."""
    return median(times[len(times) // 3 :])


def matrix_product(dtype: str) -> Callable[[], torch.Tensor]:
    """A product of two matrices of `PRODUCT_SIDE` x `PRODUCT_SIDE`."""
    a, b = (torch.randn(PRODUCT_SIDE, PRODUCT_SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    if dtype == "bf16":
        return lambda: a @ b
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t().contiguous().t()
    one = torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16)


def measure_ceilings(rep_ms: int = 100) -> Ceilings:
    """Copy 1 GiB, and multiply matrices."""
    source = torch.randint(0, 127, (1 << 30,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy_gbps = 2 * source.numel() / time_ms(lambda: target.copy_(source), rep_ms) / 1e6
    bf16_ms, fp8_ms = (time_ms(matrix_product(dtype), rep_ms) for dtype in ("bf16", "fp8"))
    flops = 2 * PRODUCT_SIDE**3
    return Ceilings(copy_gbps, flops / bf16_ms / 1e9, flops / fp8_ms / 1e9)


def shared_attention(case: Case, dtype: str, tile: Tile | None = None) -> tuple[SharedAttention, Callable[[], None]]:
    """Our attention, planned for a case over random prefixes, and a call that runs it.

    Args:
        tile: of the kernel; by default the one that a server takes.
    """
    rows, heads = case.batch, case.heads
    chunks = -(-case.prefix // CHUNK_TOKENS)  # of one group
    sizes = dict(qk_nope_head_dim=DN, v_head_dim=DV, qk_rope_head_dim=DR, dtype=DTYPES[dtype])
    buffers = ExpandedBuffers.allocate(layers=1, chunks=chunks * len(case.sizes), heads=heads, **sizes)
    for tensor in (buffers.k_nope, buffers.v_t, buffers.k_rope):
        tensor.copy_(torch.randn(tensor.shape, device="cuda", dtype=torch.bfloat16))
    query = torch.randn(rows, heads, DN + DR, device="cuda", dtype=torch.bfloat16)
    q_nope, q_rope = query[..., :DN], query[..., DN:]  # [B, H, dn], [B, H, dr]

    if tile is None:
        tiles = rates_for(torch.cuda.get_device_name()).naive_tiles.get(STORAGE[dtype], ())
    else:
        tiles = (dataclasses.asdict(tile),)
    attention = make_shared_attention(buffers, max_rows=rows, heads=heads, device="cuda", tiles=tiles)
    starts = [0, *itertools.accumulate(case.sizes)]
    groups = [
        ExpandedSegment(tuple(range(start, end)), case.prefix, tuple(range(index * chunks, (index + 1) * chunks)))
        for index, (start, end) in enumerate(itertools.pairwise(starts))
    ]
    attention.plan(groups, rows)

    def run() -> None:
        attention.run(0, q_nope, q_rope, SCALE)

    return attention, run


def our_parts(case: Case, dtype: str, tile: Tile | None = None) -> dict[str, Callable[[], Any]]:
    """What to time of our kernels: `naive`, `merge` and, where FlashMLA is there, `all` in two ways."""
    attention, run = shared_attention(case, dtype, tile)
    rows, heads = case.batch, case.heads
    tail_out = torch.randn(rows, heads, DV, device="cuda", dtype=torch.bfloat16)  # [B, H, dv], merged in place
    tail_lse = torch.randn(rows, heads, device="cuda")  # [B, H]

    def merge() -> None:
        attention.merge(tail_out, tail_lse, tail_out)

    run()  # so that the merge, timed alone, reads numbers
    parts: dict[str, Callable[[], Any]] = {"naive": run, "merge": merge}
    if tail := attempt("FlashMLA over the tails", flashmla_tail, case):

        def run_all() -> None:
            _, lse = tail()  # [B, H, 1]
            run()
            attention.merge(tail_out, lse.squeeze(-1), tail_out)

        second = torch.cuda.Stream()

        def run_side_by_side() -> None:
            first = torch.cuda.current_stream()
            second.wait_stream(first)
            run()
            with torch.cuda.stream(second):
                _, lse = tail()
            first.wait_stream(second)
            attention.merge(tail_out, lse.squeeze(-1), tail_out)

        parts |= {"all": run_all, "all_two_streams": run_side_by_side}
    return parts


def attempt(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """The function's result; None, and a line that says why, if it raises."""
    try:
        return function(*args)
    except Exception as error:
        print(f"{what} failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
        return None


def measure(function: Callable[[], Any], rep_ms: int, work: tuple[int, int] | None) -> dict[str, Any]:
    """Metrics of a callable; work: operations, and bytes of keys and values, where they mean something."""
    replay = captured(function)
    metrics: dict[str, Any] = {"ms": time_ms(replay, rep_ms)}
    if replay is function:
        metrics["cuda_graph"] = False
    if work:
        flops, read_bytes = work
        metrics |= dict(tflops=flops / metrics["ms"] / 1e9, gbps=read_bytes / metrics["ms"] / 1e6)
    return metrics


def measure_ours(case: Case, dtype: str, ceilings: Ceilings, rep_ms: int) -> list[tuple[str, dict[str, Any] | None]]:
    """Each part and its metrics, None where it failed. `floor_ms` is the shared part's, also for `all`."""
    name = f"hybrid_mla {dtype}"
    naive = case.shared_flops, shared_bytes(case, dtype)
    tail = case.latent_flops(case.tail_lengths), sum(case.tail_lengths) * (LATENT + DR) * 2
    both = naive[0] + tail[0], naive[1] + tail[1]
    work = {"naive": naive, "merge": None, "all": both, "all_two_streams": both}
    parts = attempt(name, our_parts, case, dtype) or {}
    if dtype == "bf16" and case.heads in GROUPED_HEADS:
        if function := attempt(f"{name} grouped_absorb", grouped_absorb, case):
            parts["grouped_absorb"] = function
        lengths = [case.prefix + case.tail] * case.batch
        pages = page_table(lengths, case.sizes, case.prefix // PAGE_TOKENS)[1]
        work["grouped_absorb"] = case.latent_flops(lengths), pages * PAGE_TOKENS * (LATENT + DR) * 2
    measured = []
    for part, of_part in work.items():
        metrics = None
        if part in parts:
            metrics = attempt(f"{name} {part}", measure, parts[part], rep_ms, of_part)
        if metrics and of_part and part != "grouped_absorb":
            floor = floor_ms(case, dtype, ceilings)
            metrics |= dict(floor_ms=floor, floor_share=floor / metrics["ms"])
        measured.append((part, metrics))
    return measured


def measure_rival(rival: Rival, case: Case, rep_ms: int) -> dict[str, Any]:
    """Metrics of a rival."""
    return measure(rival.make(case), rep_ms, rival.work(case))


CELLS = ("us", "TFLOPS", "GB/s", "of floor")


def cells(metrics: dict[str, Any] | None) -> list[str]:
    """What a table says of a measurement, in the columns `CELLS`; metrics: None if it failed."""
    if not metrics:
        return ["failed", "", "", ""]
    rates = [f"{metrics[key]:.0f}" if key in metrics else "" for key in ("tflops", "gbps")]
    share = f"{metrics['floor_share']:.0%}" if "floor_share" in metrics else ""
    return [f"{metrics['ms'] * 1e3:.1f}", *rates, share]


def free_memory() -> None:
    """Give what nothing refers to any more back to the GPU."""
    gc.collect()
    torch.cuda.empty_cache()


def cases_of(
    prefix: list[int] | None, heads: list[int] | None, batch: list[int] | None, groups: list[str] | None, tail: int
) -> list[Case]:
    """The cases that the options ask for: the default grid without any, else their product."""
    if not (prefix or heads or batch or groups):
        return [Case(length, tail, n, (rows,)) for length, n, batches in DEFAULT_GRID for rows in batches]
    batch = batch or ([] if groups else [128, 512])
    batches = [((rows,), 0, None) for rows in batch] + [(*parse_groups(spec), spec) for spec in groups or []]
    return [Case(*case, *of) for *case, of in itertools.product(prefix or [26472], [tail], heads or [128], batches)]


def main(
    prefix: Annotated[list[int] | None, typer.Option(min=1, help="tokens of the shared prefix (repeatable)")] = None,
    heads: Annotated[list[int] | None, typer.Option(min=1, help="local heads (repeatable)")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="requests that share the prefix (repeatable)")] = None,
    groups: Annotated[list[str] | None, typer.Option(help="several groups: 8x16, 200+56x1 (repeatable)")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp8: our storage (repeatable; both)")] = None,
    tail: Annotated[int, typer.Option(min=1, help="private tokens of each request")] = 512,
    rivals: Annotated[bool, typer.Option(help="time other kernels too")] = True,
    rep_ms: Annotated[int, typer.Option(min=1, help="ms spent on each measurement")] = 100,
    out: Annotated[Path | None, typer.Option(help="append JSON lines to this file")] = None,
) -> None:
    """Time attention over shared prefixes: a default grid of cases, or every combination of the options given."""
    if unknown := set(dtype or []) - set(DTYPES):
        raise typer.BadParameter(f"--dtype must be one of {', '.join(DTYPES)}, not {', '.join(unknown)}")
    try:
        cases = cases_of(prefix, heads, batch, groups, tail)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU")
    ceilings = measure_ceilings(rep_ms)
    free_memory()
    table = Table(title=f"attention over shared prefixes, {torch.cuda.get_device_name()}: {ceilings}")
    for column in ("heads", "prefix", "batch", "dtype", "what", *CELLS):
        table.add_column(column, justify="right")

    def add(case: Case, impl: str, part: str, dtype: str, metrics: dict[str, Any] | None) -> None:
        if metrics and out is not None:
            write_record(out, bench="attention", impl=impl, case=case.fields(dtype), part=part, **metrics)
        what = part if impl == "hybrid_mla" else impl
        table.add_row(str(case.heads), str(case.prefix), case.spec or str(case.batch), dtype, what, *cells(metrics))

    failed = False
    for case in cases:
        print(case, flush=True)
        for name, rival in RIVALS.items() if rivals else ():
            if not (rival.one_group and case.spec):
                add(case, name, rival.part, rival.dtype, attempt(name, measure_rival, rival, case, rep_ms))
                free_memory()
        for stored in dict.fromkeys(dtype or DTYPES):
            for part, metrics in measure_ours(case, stored, ceilings, rep_ms):
                add(case, "hybrid_mla", part, stored, metrics)
                failed |= metrics is None
            free_memory()
        table.add_section()
    Console(width=110).print(table)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

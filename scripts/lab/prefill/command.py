"""Time the attention of a prefill step to the cached prefix that its requests share, one layer: SGLang's way and ours.

    python scripts/study.py prefill --out benchmarks/results/prefill.jsonl

SGLang gathers the prefix's latent rows for every request, expands them with `kv_b_proj`, and attends chunk by chunk
(`_chunked_prefix_attn_mha`, rebuilt here from the same library calls). Ours attends to the expanded prefix, and pays
for the expansion once; both are timed. Errors are against float64 over prefix and new tokens, also of SGLang's merge as
it is in 0.5.17, which takes FlashInfer's base-2 lse for a natural logarithm.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from bench.cases import DN, DR, DV, LATENT, SCALE
from bench.records import write_record
from bench.shared import DTYPES
from bench.timing import free_memory, time_ms
from rich.console import Console
from rich.table import Table

from lab.expansion.implementations import allocate, fused
from sglang_mla_ext.adapter.step.prefill import PrefillPlan
from sglang_mla_ext.kernels.dispatch import make_shared_attention
from sglang_mla_ext.kernels.merge import LN2
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.storage.expanded import ExpandedBuffers
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.planner import Plan
from sglang_mla_ext.rows import Rows
from sglang_mla_ext.segment import Mode, Segment

app = typer.Typer(add_completion=False)

MAX_CHUNK_TOKENS = 128 * 1024  # SGLANG_MAX_KV_CHUNK_CAPACITY
ROWS_PER_RUN = 1024
CHECKED_HEADS = 2


class Step:
    """Inputs of one prefill step: latent rows of the shared prefix, new queries, and the new tokens' own attention."""

    def __init__(self, heads: int, prefix: int, requests: int, new_tokens: int) -> None:
        torch.manual_seed(0)
        self.heads, self.prefix, self.requests, self.new_tokens = heads, prefix, requests, new_tokens
        rows = requests * new_tokens
        content = F.rms_norm(torch.randn(prefix, LATENT, device="cuda"), (LATENT,))
        self.pool = torch.cat([content, torch.randn(prefix, DR, device="cuda")], dim=-1).to(torch.bfloat16)
        weight = torch.randn(heads, DN + DV, LATENT, device="cuda") / LATENT**0.5
        self.weight = weight.view(-1, LATENT).to(torch.bfloat16)
        self.q, self.k = (torch.randn(rows, heads, DN + DR, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.v = torch.randn(rows, heads, DV, device="cuda", dtype=torch.bfloat16)
        self.starts = torch.arange(requests + 1, device="cuda", dtype=torch.int32) * new_tokens
        wrapper = self.wrapper(self.starts, causal=True)
        self.own_out, self.own_lse2 = wrapper.forward_return_lse(self.q, self.k, self.v, causal=True, sm_scale=SCALE)

    def wrapper(self, kv_starts: torch.Tensor, *, causal: bool) -> Any:
        """FlashInfer's attention over keys per head, planned."""
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        workspace = torch.empty(384 << 20, dtype=torch.uint8, device="cuda")
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="auto")
        wrapper.begin_forward(
            qo_indptr=self.starts,
            kv_indptr=kv_starts,
            num_qo_heads=self.heads,
            num_kv_heads=self.heads,
            head_dim_qk=DN + DR,
            head_dim_vo=DV,
            q_data_type=torch.bfloat16,
            causal=causal,
        )
        return wrapper

    def expanded(self, dtype: str) -> tuple[ExpandedBuffers, Callable[[], None]]:
        """Buffers for the prefix, and the call that fills them."""
        weight = self.weight.view(self.heads, DN + DV, LATENT)
        buffers = allocate(self.prefix, weight, DTYPES[dtype])
        return buffers, fused(self.pool, torch.arange(self.prefix, device="cuda"), weight, buffers)

    def truth(self) -> torch.Tensor:
        """Float64 attention of the first and the last request's rows, `[2 * new_tokens, CHECKED_HEADS, DV]`."""
        content, rope = self.pool.double().split([LATENT, DR], dim=-1)
        weight = self.weight.view(self.heads, DN + DV, LATENT)[:CHECKED_HEADS].double()
        k_nope, v = torch.einsum("nr,hdr->nhd", content, weight).split([DN, DV], dim=-1)
        found = []
        for rows in self.checked_rows():
            q, own_k, own_v = (t[rows, :CHECKED_HEADS].double() for t in (self.q, self.k, self.v))
            prefix = reference.naive(q[..., :DN], q[..., DN:], k_nope, rope, v, SCALE)
            found.append(reference.merge(*prefix, *reference.causal(q, own_k, own_v, SCALE))[0])
        return torch.cat(found)

    def checked_rows(self) -> tuple[slice, slice]:
        rows = self.requests * self.new_tokens
        return slice(0, self.new_tokens), slice(rows - self.new_tokens, rows)

    def error(self, out: torch.Tensor) -> float:
        checked = torch.cat([out[rows, :CHECKED_HEADS] for rows in self.checked_rows()])
        return reference.errors(checked, self.truth()).rel_l2


def sglang_way(step: Step) -> Callable[[float], torch.Tensor]:
    """SGLang's loop over chunks of all requests' prefixes; takes the factor that turns its lse into a natural one."""
    from sgl_kernel import merge_state_v2

    chunk = min(MAX_CHUNK_TOKENS // step.requests, step.prefix)
    parts = []
    for start in range(0, step.prefix, chunk):
        count = min(chunk, step.prefix - start)
        slots = torch.arange(start, start + count, device="cuda").repeat(step.requests)
        kv_starts = torch.arange(step.requests + 1, device="cuda", dtype=torch.int32) * count
        parts.append((slots, step.wrapper(kv_starts, causal=False)))

    def run(to_natural: float) -> torch.Tensor:
        out, lse = step.own_out, step.own_lse2 * to_natural
        for slots, wrapper in parts:
            content, rope = step.pool[slots].split([LATENT, DR], dim=-1)
            kv = F.linear(content.contiguous(), step.weight).view(-1, step.heads, DN + DV)
            k = torch.empty(len(slots), step.heads, DN + DR, device="cuda", dtype=torch.bfloat16)
            k[..., :DN], k[..., DN:] = kv[..., :DN], rope[:, None]
            part, part_lse2 = wrapper.forward_return_lse(step.q, k, kv[..., DN:], causal=False, sm_scale=SCALE)
            merged, merged_lse = torch.empty_like(out), torch.empty_like(lse)
            merge_state_v2(part, part_lse2 * to_natural, out, lse, merged, merged_lse)
            out, lse = merged, merged_lse
        return out

    return run


def our_way(step: Step, buffers: ExpandedBuffers) -> Callable[[], torch.Tensor]:
    """Attention to the expanded prefix and the merge, as the server runs it."""
    attention = make_shared_attention(buffers, max_rows=ROWS_PER_RUN, heads=step.heads, device="cuda")
    everyone, chunks = tuple(range(step.requests)), tuple(range(buffers.chunks))
    shared = Plan(step.requests, (Segment(everyone, 0, step.prefix, Mode.NAIVE, chunks),))
    rows = Rows(step.requests, step.new_tokens)
    plan = PrefillPlan.make(shared, rows, attention, {0: 0}, ROWS_PER_RUN, Counters())
    layer = SimpleNamespace(
        attn_mha=SimpleNamespace(layer_id=0, scaling=SCALE), qk_nope_head_dim=DN, qk_rope_head_dim=DR
    )
    out, lse = step.own_out.clone(), step.own_lse2 * LN2

    def run() -> torch.Tensor:
        out.copy_(step.own_out)
        torch.mul(step.own_lse2, LN2, out=lse)
        plan.attend(layer, step.q, out, lse)
        return out

    return run


@app.command()
def main(
    prefix: Annotated[list[int], typer.Option(help="Tokens of the shared prefix.")] = [26472, 7069],  # noqa: B006
    heads: Annotated[list[int], typer.Option(help="Query heads.")] = [128, 16],  # noqa: B006
    requests: Annotated[int, typer.Option(min=1, help="Requests of the step.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each.")] = 128,
    rep_ms: Annotated[int, typer.Option(min=1, help="ms spent on each measurement")] = 400,
    out: Annotated[Path | None, typer.Option(help="JSON lines file to append records to.")] = None,
) -> None:
    """Time SGLang's attention of a prefill step to a shared prefix and ours; print a table; append records."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU")
    flops = 2 * (DN + DR + DV)
    table = Table("heads", "prefix", "impl", "ms", "TFLOPS", "expansion ms", "rel L2", title="prefill, shared prefix")
    for head_count in heads:
        for length in prefix:
            step = Step(head_count, length, requests, new_tokens)
            work = requests * new_tokens * head_count * length * flops / 1e9
            results: list[tuple[str, str, dict[str, Any]]] = []
            run = sglang_way(step)
            errors = {"rel_err": step.error(run(LN2)), "rel_err_as_shipped": step.error(run(1.0))}
            results.append(("sglang_chunks", "bf16", {"ms": time_ms(lambda run=run: run(LN2), rep_ms), **errors}))
            for dtype in DTYPES:
                buffers, expand = step.expanded(dtype)
                expand()
                attend = our_way(step, buffers)
                error = step.error(attend())
                ms, expansion_ms = time_ms(attend, rep_ms), time_ms(expand, 50)
                metrics = {"ms": ms, "tflops": work / ms, "expansion_ms": expansion_ms, "rel_err": error}
                results.append(("hybrid_mla", dtype, metrics))
                del buffers, expand, attend
                free_memory()
            for impl, dtype, metrics in results:
                case = {"prefix": length, "heads": head_count, "batch": requests, "new_tokens": new_tokens}
                tflops, expansion_ms = (metrics.get(name) for name in ("tflops", "expansion_ms"))
                table.add_row(
                    str(head_count), str(length), f"{impl} {dtype}", f"{metrics['ms']:.3f}",
                    f"{tflops:.0f}" if tflops else "", f"{expansion_ms:.3f}" if expansion_ms else "",
                    f"{metrics['rel_err']:.2e}",
                )  # fmt: skip
                if out:
                    write_record(out, bench="prefill", impl=impl, case={**case, "dtype": dtype}, **metrics)
            print({name: f"{value:.2e}" for name, value in errors.items()}, flush=True)
            del step, run
            free_memory()
    Console(width=120).print(table)

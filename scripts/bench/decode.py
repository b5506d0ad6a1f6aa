"""Decode attention over private tokens in the FP8 cache: cases, their floor, and our kernels on a random cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import typer

from bench.cases import DR, LATENT, PAGE_TOKENS, SCALE, Case, page_table
from bench.timing import Ceilings, captured, measure, time_ms
from sglang_mla_ext.kernels.dispatch import append_rows, make_absorb_fp8
from sglang_mla_ext.kernels.storage.latent_rows import LatentRowLayout

ROWS_AT_ONCE = 1 << 16
LAYOUT = LatentRowLayout()
STOCK = ("flashmla_bf16", "flashmla_fp8", "fa3_bf16")


@dataclass(frozen=True)
class DecodeCase(Case):
    """Rows that share nothing."""

    longest: int = 0  # tokens of the longest row, if they are not all as many as `tail`

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, `[batch]`; if they differ, evenly spaced in their logarithm, in a mixed order."""
        if not self.longest:
            return super().lengths
        tokens = np.geomspace(self.tail, self.longest, self.batch).round().astype(int)
        return np.random.default_rng(0).permutation(tokens).tolist()

    def fields(self, dtype: str) -> dict[str, Any]:
        return super().fields(dtype) | ({"longest": self.longest} if self.longest else {})


def parse_case(spec: str) -> DecodeCase:
    """Read `requests x tokens x heads`, or `x query tokens` behind that; tokens may be `shortest - longest`.

    Raises:
        typer.BadParameter: it is something else.
    """
    try:
        requests, tokens, heads, *rest = spec.split("x")
        lengths, s_q = [int(length) for length in tokens.split("-")], *map(int, rest or ["1"])
        case = DecodeCase(0, lengths[0], int(heads), (), int(requests), s_q=s_q, longest=(*lengths, 0)[1])
        if min(case.batch, case.heads, s_q, *lengths) <= 0 or len(lengths) > 2 or lengths != sorted(lengths):
            raise ValueError
    except ValueError as error:
        raise typer.BadParameter(f"a case is REQUESTSxTOKENS[-MOST]xHEADS[xQUERIES], not {spec!r}") from error
    return case


def floor_ms(case: Case, ceilings: Ceilings) -> float:
    """Lower bound of the time, ms: reading the rows, or the products (with content and values in FP8)."""
    tokens = sum(case.lengths)
    memory = tokens * LAYOUT.row_bytes / ceilings.copy_gbps / 1e6
    per_tflops = 2 * case.s_q * tokens * case.heads / 1e9
    return max(memory, per_tflops * (2 * LATENT / ceilings.fp8_tflops + DR / ceilings.bf16_tflops))


def measure_fp8_rows(case: Case, rep_ms: int) -> dict[str, Any]:
    """Metrics of a layer's attention over random rows, in pages in random order, by the implementation that a server
    chooses; and `prepare_ms` of a step's schedule, made once for all layers."""
    pages, n_pages = page_table(case.lengths, (), 0)
    order = 1 + torch.randperm(n_pages, device="cuda", dtype=torch.int32)
    pool = torch.zeros((n_pages + 1) * PAGE_TOKENS, LAYOUT.row_bytes, dtype=torch.uint8, device="cuda")
    for first in range(0, len(pool), ROWS_AT_ONCE):
        slots = torch.arange(first, min(first + ROWS_AT_ONCE, len(pool)), device="cuda")
        latent, rope = (torch.randn(len(slots), dim, device="cuda", dtype=torch.bfloat16) for dim in (LATENT, DR))
        append_rows(latent, rope, slots, pool)
    table = order[torch.tensor(pages, device="cuda")]
    lens = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")

    sizes = dict(max_requests=case.batch, heads=case.heads, query_tokens=case.s_q)
    absorb = make_absorb_fp8(pool, dtype=torch.bfloat16, on_failure=print, **sizes)
    rows = case.batch * case.s_q
    query = torch.randn(rows, case.heads, LATENT + DR, device="cuda", dtype=torch.bfloat16)
    q_absorbed, q_rope = query.split([LATENT, DR], dim=-1)
    out, lse = absorb.output(rows, torch.bfloat16), torch.empty(rows, case.heads, device="cuda")

    def prepare() -> None:
        absorb.begin_step(lens, table)

    def run() -> None:
        absorb.run(q_absorbed, q_rope, pool, table, lens, SCALE, out, lse)

    prepare()
    work = case.latent_flops(case.lengths), sum(case.lengths) * LAYOUT.row_bytes
    return measure(run, rep_ms, work) | dict(prepare_ms=time_ms(captured(prepare), rep_ms))

"""The page-table kernel on a GPU: against its torch version, captured, and compiled once for every stride."""

from __future__ import annotations

import pytest
import torch
import triton
from triton.testing import do_bench_cudagraph

from sglang_mla_ext.kernels.dispatch import fill_page_table
from sglang_mla_ext.kernels.storage.page_table import fill_page_table_torch

pytestmark = pytest.mark.gpu
POISON, PAGE = -77, 64


def inputs(rows: int, tokens: int, extra: int = 0) -> list[torch.Tensor]:
    """Table, slots, requests, lengths (odd, some 0) and starts; rows of both tables are `extra` longer than needed."""
    generator = torch.Generator("cuda").manual_seed(rows + tokens)
    pages = -(-tokens // PAGE)
    order = torch.randperm((rows + 3) * pages, generator=generator, device="cuda").view(rows + 3, pages)
    slots = (order.repeat_interleave(PAGE, 1) * PAGE + torch.arange(PAGE, device="cuda").repeat(pages)).int()
    slots = torch.nn.functional.pad(slots, (0, extra))
    table = torch.full((rows, pages + extra), POISON, dtype=torch.int32, device="cuda")
    starts = torch.randint(pages, (rows,), generator=generator, device="cuda") * PAGE
    lens = (torch.rand(rows, generator=generator, device="cuda") * (tokens - starts + 1)).int()
    lens[::5] = 0
    return [table, slots, torch.randperm(rows + 3, generator=generator, device="cuda")[:rows], lens, starts.int()]


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (3, 700), (256, 8192), (1024, 20000)])
@pytest.mark.parametrize("with_starts", [False, True])
def test_pages_equal_those_of_torch(rows: int, tokens: int, with_starts: bool) -> None:
    table, *arguments = inputs(rows, tokens)
    arguments = arguments if with_starts else arguments[:-1]
    expected = table.clone()
    fill_page_table_torch(expected, *arguments)
    fill_page_table(table, *arguments)
    assert torch.equal(table, expected)
    us = 1e3 * do_bench_cudagraph(lambda: fill_page_table(table, *arguments))
    print(f"\n{rows} x {tokens}: {us:.1f} us")


def test_a_captured_graph_reads_lengths_of_its_own_time() -> None:
    table, slots, requests, lens, starts = inputs(64, 3000)
    fill_page_table(table, slots, requests, lens, starts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill_page_table(table, slots, requests, lens, starts)
    for _ in range(2):
        lens.copy_(lens.flip(0).clamp_max(3000 - starts))
        requests.copy_(requests.roll(1))
        table.fill_(POISON)
        expected = table.clone()
        fill_page_table_torch(expected, slots, requests, lens, starts)
        graph.replay()
        assert torch.equal(table, expected)


def test_other_strides_and_addresses_do_not_compile_again() -> None:
    fill_page_table(*inputs(8, 500))
    compiled = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **details: compiled.append(details["fn"].name)
    try:
        for rows, tokens, extra in ((8, 512, 0), (1, 500, 1), (9, 1000, 7), (16, 1024, 16)):
            table, slots, requests, lens, starts = inputs(rows, tokens, extra)
            for first in (0, 1):
                arguments = table[first:], slots, requests[first:], lens[first:], starts[first:]
                expected = arguments[0].clone()
                fill_page_table_torch(expected, *arguments[1:])
                fill_page_table(*arguments)
                assert torch.equal(arguments[0], expected)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert not compiled

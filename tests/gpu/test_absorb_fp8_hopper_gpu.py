"""Decode over the FP8 cache by its own kernels on a Hopper GPU, against float64 and the rounding steps in torch.

Bounds: the error against float64 is at most 1.1 times that of the steps in torch, plus what content scores lose in
Hopper's FP8 product, which keeps some 13 bits below the largest term of a sum: 2e-3. The lse has that loss alone. What
no kernel may read is NaN: pages of no request, the end of every last page; entries of the page table behind the last
page point nowhere. Run with `pytest tests/gpu -m gpu -s`: each case prints its errors, and the last one times, beside
those of Triton's kernel and of FlashMLA where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench.cases import Case as RivalCase
from bench.rivals import flashmla_bf16, flashmla_fp8
from bench.timing import captured, time_ms
from test_fp8_cache_gpu import DEVICE, LAYOUT, LSE_BOUND, PAGE, RANK, SCALE, Cache, queries

from sglang_mla_ext.kernels.absorb.paged_fp8 import AbsorbFP8, HopperAbsorbFP8, TritonAbsorbFP8
from sglang_mla_ext.kernels.absorb.quantize_query import quantize_query
from sglang_mla_ext.kernels.absorb.sm90_parts.query import for_tma
from sglang_mla_ext.kernels.dispatch import make_absorb_fp8, make_hopper_absorb_fp8
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.storage.expanded import FP8

pytestmark = pytest.mark.gpu

ODD_LENGTHS = (0, 1, 2, 63, 64, 65, 127, 128, 129, 192, 193, 320, 449, 599, 600)
SPARE_ROWS = 7  # that memory is there for, beyond those of the step


def run(
    absorb: AbsorbFP8, cache: Cache, q: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full(q[0].shape, torch.nan, dtype=dtype, device=DEVICE)
    lse = torch.full(q[0].shape[:2], torch.nan, device=DEVICE)
    absorb.begin_step(cache.lens, cache.table)
    absorb.run(*q, cache.pool, cache.table, cache.lens, SCALE, out, lse)
    return out, lse


def assert_as_good_as_the_steps(
    result: tuple[torch.Tensor, torch.Tensor], cache: Cache, q: tuple[torch.Tensor, torch.Tensor]
) -> None:
    exact, (steps, steps_lse) = cache.exact(*q), cache.emulated(*q)
    ours, theirs = (reference.errors(out, exact).rel_l2 for out in (result[0], steps))
    lse_error = (result[1] - steps_lse).nan_to_num(0.0).abs().max().item()
    print(f"  relative L2 error {ours:.5f}, of the steps {theirs:.5f}; lse {lse_error:.1e}")
    assert ours <= 1.1 * theirs + 2e-3
    torch.testing.assert_close(result[1], steps_lse, rtol=0, atol=LSE_BOUND)


@pytest.mark.parametrize("heads", [8, 16, 24, 32, 64, 96, 128])
def test_odd_lengths(heads: int) -> None:
    torch.manual_seed(heads)
    cache, q = Cache(ODD_LENGTHS * 3), queries(3 * len(ODD_LENGTHS), heads)
    absorb = make_hopper_absorb_fp8(max_requests=len(cache.lens) + SPARE_ROWS, heads=heads, device=DEVICE)
    first, again = run(absorb, cache, q), run(absorb, cache, q)
    print(f"\n{heads} heads:")
    assert_as_good_as_the_steps(first, cache, q)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
    in_bf16 = run(absorb, cache, q, torch.bfloat16)
    assert torch.equal(in_bf16[0], first[0].bfloat16()) and torch.equal(in_bf16[1], first[1])


@pytest.mark.parametrize(
    ("lens", "heads"),
    [
        ((26472,), 16),  # keys are cut
        ((26472,), 128),
        ((20001, 4096, 0, 77), 8),
        ((5001, 4096, 77), 64),
        ((130,) * 700, 32),  # several items a program
        ((130, 1, 64) * 150, 128),
        ((26472,) * 3 + (3000,) * 280, 128),
    ],
    ids=str,
)
def test_long_ones_and_many(lens: tuple[int, ...], heads: int) -> None:
    torch.manual_seed(0)
    cache, q = Cache(lens), queries(len(lens), heads)
    absorb = make_hopper_absorb_fp8(max_requests=len(lens), heads=heads, device=DEVICE)
    print(f"\n{len(lens)} requests, {heads} heads:")
    assert_as_good_as_the_steps(run(absorb, cache, q), cache, q)


@pytest.mark.parametrize("heads", [16, 64])
def test_sums_over_many_keys_are_not_biased(heads: int) -> None:
    """Where values have a mean, and one program adds up all of them, cut-off sums would make results too small, which
    rounding alone does not. See test_fp8_gpu.py."""
    torch.manual_seed(0)
    cache, q = Cache((26472,), mean=0.5), queries(1, heads)
    absorb = make_hopper_absorb_fp8(max_requests=1, heads=heads, device=DEVICE, num_sms=1)  # no key range is cut
    out, exact = run(absorb, cache, q)[0].double(), cache.exact(*q)
    share = ((out * exact).sum() / exact.square().sum()).item()
    print(f"\n{heads} heads: {share:.5f} of the exact result, {reference.errors(out, exact).rel_l2:.5f}")
    assert abs(share - 1) < 2e-3


@pytest.mark.parametrize("heads", [16, 64])
def test_a_nan_row_is_seen_by_those_who_attend_to_it_only(heads: int) -> None:
    torch.manual_seed(0)
    cache, q = Cache((300, 300, 300)), queries(3, heads)
    LAYOUT.scale(cache.pool)[cache.table[1, 2].long() * PAGE + 5] = torch.nan
    out, _ = run(make_hopper_absorb_fp8(max_requests=3, heads=heads, device=DEVICE), cache, q)
    assert out[[0, 2]].isfinite().all() and not out[1].isfinite().any()


@pytest.mark.parametrize("heads", [8, 32, 64])
def test_a_nan_row_that_only_the_last_query_token_sees(heads: int) -> None:
    torch.manual_seed(0)
    cache, q = Cache((300, 257)), queries(4, heads)
    for request, length in enumerate((300, 257)):
        page, row = divmod(length - 1, PAGE)
        LAYOUT.scale(cache.pool)[cache.table[request, page].long() * PAGE + row] = torch.nan
        LAYOUT.content(cache.pool)[cache.table[request, page].long() * PAGE + row] = 0.0  # as rows are written
    out, lse = run(make_hopper_absorb_fp8(max_requests=2, heads=heads, query_tokens=2, device=DEVICE), cache, q)
    assert out[::2].isfinite().all() and lse[::2].isfinite().all()
    assert not out[1::2].isfinite().any() and not lse[1::2].isfinite().any()


def rounded_and_back(q_absorbed: torch.Tensor, q_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What quantize_query makes of a query, in BF16: exact, because scales are powers of two."""
    shape = q_absorbed.shape
    content, rope = torch.empty(shape, dtype=FP8, device=DEVICE), torch.empty(q_rope.shape, device=DEVICE).bfloat16()
    scale = torch.empty(shape[:2], device=DEVICE)
    quantize_query(q_absorbed, q_rope, content, scale, rope)
    return tuple((part.float() * scale[..., None]).bfloat16() for part in (content, rope))  # type: ignore[return-value]


@pytest.mark.parametrize("query_tokens", [1, 2, 5])
@pytest.mark.parametrize("heads", [8, 16, 24, 32, 64, 128])
def test_queries_as_callers_have_them(heads: int, query_tokens: int) -> None:
    """To the bit: as SGLang has them, with heads outside and a rotary part out of a wider tensor; contiguous; in a
    layout that is copied first; and rounded before. Heads that are zero or not finite disturb no other."""
    torch.manual_seed(heads)
    cache, tokens = Cache(ODD_LENGTHS), query_tokens * len(ODD_LENGTHS)
    content = torch.randn(heads, tokens, RANK, device=DEVICE).bfloat16()
    content *= 10 ** (4 * torch.rand(heads, tokens, 1, device=DEVICE) - 2)
    wide = torch.randn(tokens, heads, 128 + 64, device=DEVICE).bfloat16()
    q = content.transpose(0, 1), wide[..., 128:]
    q[0][-1, 0], q[1][-1, 0] = 0, 0
    q[0][-1, 1, 300], q[1][-1, 2, 9], q[0][-1, 3, 511] = torch.nan, torch.inf, -torch.inf
    odd = torch.empty(tokens, heads, RANK + 4, dtype=torch.bfloat16, device=DEVICE)[..., :RANK].copy_(q[0])
    assert for_tma(q[0]) is q[0] and for_tma(q[1]) is q[1] and for_tma(odd) is not odd
    absorb = make_hopper_absorb_fp8(
        max_requests=len(ODD_LENGTHS), heads=heads, query_tokens=query_tokens, device=DEVICE
    )
    out, lse = run(absorb, cache, q)
    wrong = torch.zeros_like(lse, dtype=torch.bool)
    wrong[-1, 1:4] = True
    assert torch.equal(out.isnan().all(dim=-1), wrong) and torch.equal(lse.isnan(), wrong)
    assert not out[~wrong].isnan().any()
    for other in ((q[0].contiguous(), q[1].contiguous()), (odd, q[1]), rounded_and_back(*q)):
        for one, theirs in zip((out, lse), run(absorb, cache, other), strict=True):
            torch.testing.assert_close(one, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_a_graph_follows_other_lengths_and_pages(heads: int) -> None:
    """Captured with tails of one token; replayed while they grow, some of them from no token, and with other pages."""
    torch.manual_seed(0)
    longest = (700, 64, 1, 323, 130)
    caches = Cache(longest), Cache(longest[::-1])
    q, rows = queries(len(longest), heads), len(longest)
    pool = torch.cat([cache.pool for cache in caches])
    width = max(cache.table.shape[1] for cache in caches)
    absorb = make_hopper_absorb_fp8(max_requests=rows + SPARE_ROWS, heads=heads, device=DEVICE)
    table = torch.zeros(rows, width, dtype=torch.int32, device=DEVICE)
    lens = torch.ones(rows, dtype=torch.int32, device=DEVICE)
    out, lse = torch.empty(rows, heads, RANK, device=DEVICE), torch.empty(rows, heads, device=DEVICE)

    absorb.begin_step(lens, table)
    absorb.run(*q, pool, table, lens, SCALE, out, lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        absorb.run(*q, pool, table, lens, SCALE, out, lse)
    other = make_hopper_absorb_fp8(max_requests=rows, heads=heads, device=DEVICE)
    for missing in (400, 130, 64, 1, 0):
        for cache, first_page in ((caches[0], 0), (caches[1], len(caches[0].pool) // PAGE)):
            cache_table = cache.table.where(cache.table == 1 << 30, cache.table + first_page)
            table[:, : cache.table.shape[1]] = cache_table
            lens.copy_((cache.lens - missing).clamp(min=0))
            out.fill_(torch.nan)
            absorb.begin_step(lens, table)
            graph.replay()
            expected, expected_lse = torch.empty_like(out), torch.empty_like(lse)
            other.begin_step(lens, table)
            other.run(*q, pool, table, lens, SCALE, expected, expected_lse)
            assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
            if not missing:
                assert_as_good_as_the_steps((out, lse), cache, q)


@pytest.mark.parametrize("heads", [16, 64, 12])
def test_the_way_that_is_taken(heads: int) -> None:
    failures: list[str] = []
    cache, q = Cache((70, 3)), queries(2, heads)
    absorb = make_absorb_fp8(
        cache.pool,
        heads=heads,
        dtype=torch.bfloat16,
        max_requests=2,
        on_failure=lambda error: failures.append(str(error)),
    )
    assert type(absorb) is (TritonAbsorbFP8 if heads == 12 else HopperAbsorbFP8), failures
    assert_as_good_as_the_steps(run(absorb, cache, q), cache, q)


@pytest.mark.parametrize(
    ("heads", "query_tokens"),
    [
        *((8, 2), (8, 7), (8, 8), (16, 2), (16, 4), (16, 5), (16, 8), (24, 3), (32, 4)),
        *((64, 2), (64, 3), (96, 2), (128, 2), (128, 3), (128, 8)),
    ],
)
def test_query_tokens_are_requests_that_read_the_same_pages(heads: int, query_tokens: int) -> None:
    """Where results come about in their place and where they do not, to the bit; and as each for itself, as requests
    with other lengths, for which keys may be cut elsewhere."""
    torch.manual_seed(0)
    cache, q = Cache((*ODD_LENGTHS, 70, 5)), queries(query_tokens * (len(ODD_LENGTHS) + 2), heads)
    absorb = make_hopper_absorb_fp8(max_requests=len(cache.lens), heads=heads, query_tokens=query_tokens, device=DEVICE)
    out, lse = absorb.output(len(q[0]), torch.bfloat16), torch.full(q[0].shape[:2], torch.nan, device=DEVICE)
    absorb.begin_step(cache.lens, cache.table)
    absorb.run(*q, cache.pool, cache.table, cache.lens, SCALE, out, lse)
    out = out.clone()  # the next run of this object writes there
    elsewhere, same_lse = run(absorb, cache, q, torch.bfloat16)
    assert torch.equal(out, elsewhere) and torch.equal(lse, same_lse)

    single = make_hopper_absorb_fp8(max_requests=len(out), heads=heads, device=DEVICE)
    unseen = torch.arange(query_tokens, device=DEVICE, dtype=torch.int32).flip(0)
    rows = [rows for rows in cache.rows for _ in range(query_tokens)]
    cache.lens = (cache.lens[:, None] - unseen).clamp(min=0).flatten()
    cache.table = cache.table.repeat_interleave(query_tokens, 0)
    cache.rows = [rows[:seen] for rows, seen in zip(rows, cache.lens.tolist(), strict=True)]
    expected, expected_lse = run(single, cache, q, torch.bfloat16)
    assert reference.errors(out, expected).rel_l2 < 1e-2  # some weights are rounded the other way
    torch.testing.assert_close(lse, expected_lse, atol=LSE_BOUND, rtol=0)
    print(f"\n{heads} heads, {query_tokens} query tokens:")
    assert_as_good_as_the_steps((out, lse), cache, q)
    nothing = cache.lens == 0
    assert nothing.any() and not out[nothing].any() and torch.equal(lse.isneginf(), nothing[:, None].expand_as(lse))


def captured_us(function: Callable[[], Any]) -> float:
    """Median time of a CUDA graph of one call; L2 is flushed before each."""
    return time_ms(captured(function), rep_ms=150) * 1e3


@pytest.mark.parametrize(
    ("requests", "heads", "length"),
    [
        *((128, heads, 8192) for heads in (128, 64, 32, 16, 8)),
        *((128, heads, 512) for heads in (128, 64, 16)),
        *((32, heads, 8192) for heads in (128, 64, 16)),
        (512, 16, 512),
        (1, 128, 26472),
        (1, 16, 26472),
    ],
)
def test_times(requests: int, heads: int, length: int) -> None:
    """Rounding of the query and merge included; not faster than Triton would be a reason not to have it."""
    torch.manual_seed(0)
    cache, q = Cache((length,) * requests), queries(requests, heads)
    sizes: dict[str, Any] = dict(max_requests=requests, heads=heads, device=DEVICE)
    kinds: dict[str, AbsorbFP8] = {"own": make_hopper_absorb_fp8(**sizes), "Triton": TritonAbsorbFP8(**sizes)}
    out, lse = torch.empty_like(q[0]), torch.empty(q[0].shape[:2], device=DEVICE)
    us = {}
    for name, absorb in kinds.items():
        absorb.begin_step(cache.lens, cache.table)
        us[name] = captured_us(
            lambda: absorb.run(*q, cache.pool, cache.table, cache.lens, SCALE, out, lse)  # noqa: B023
        )
    us["begin_step"] = captured_us(lambda: kinds["own"].begin_step(cache.lens, cache.table))
    try:
        rival = RivalCase(prefix=0, tail=length, heads=heads, sizes=(), alone=requests)
        us["FlashMLA"], us["FlashMLA FP8"] = captured_us(flashmla_bf16(rival)), captured_us(flashmla_fp8(rival))
    except ImportError:
        pass
    flops, read = 2 * requests * heads * length * (2 * RANK + 64), requests * length * LAYOUT.row_bytes
    rates = f"{flops / us['own'] / 1e6:.0f} TFLOPS, {read / us['own'] / 1e3:.0f} GB/s"
    print(
        f"\n{requests} x {length}, {heads} heads: {rates}; us:", {name: round(value, 1) for name, value in us.items()}
    )
    assert us["own"] < us["Triton"]

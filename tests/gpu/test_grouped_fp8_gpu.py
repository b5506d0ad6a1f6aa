"""Grouped absorb over FP8 rows on a Hopper GPU, against float64 and the rounding steps in torch.

Bounds as in test_absorb_fp8_hopper_gpu.py: what partials and results lose in BF16 is within the same margin. Whatever
no kernel may read is NaN. Run with `pytest tests/gpu -m gpu -s`, in a process of its own: each case prints its errors,
and the last one times.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_absorb_fp8_hopper_gpu import captured_us
from test_fp8_cache_gpu import LAYOUT, LSE_BOUND
from test_grouped_gpu import DEVICE, DTYPE, NAN, RANK, ROPE, SCALE, SPARE_ROWS, Case, Problem, cases, parts_of

from sglang_mla_ext.kernels.dispatch import (
    append_rows,
    make_grouped_absorb_fp8,
    make_hopper_absorb_fp8,
    make_hopper_grouped_absorb_fp8,
)
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.reference import fp8 as reference_fp8
from sglang_mla_ext.kernels.sizes import PAGE_TOKENS
from sglang_mla_ext.kernels.storage.latent_rows import dequantize
from sglang_mla_ext.segment import Mode, Segment

pytestmark = pytest.mark.gpu

Result = tuple[torch.Tensor, torch.Tensor]


def poisoned_pool(slots: int) -> torch.Tensor:
    """`[slots, row_bytes]`: NaN in every part."""
    pool = torch.full((slots, LAYOUT.row_bytes), 0x7F, dtype=torch.uint8, device=DEVICE)
    LAYOUT.scale(pool).fill_(NAN)
    LAYOUT.rope(pool).fill_(NAN)
    return pool


def make(heads: int, max_rows: int, max_tokens: int, queries: int = 1) -> Any:
    dims = dict(heads=heads, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, dtype=DTYPE, device=DEVICE)
    grouped = make_hopper_grouped_absorb_fp8(max_rows=max_rows, max_tokens=max_tokens, query_tokens=queries, **dims)
    grouped._partial_out.fill_(NAN)  # what is there before the first step must not matter
    grouped._partial_lse2.fill_(NAN)
    return grouped


class FP8Problem(Problem):
    """The same requests, their rows rounded."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        rows = self.pages.view(-1, RANK + ROPE)
        slots = rows.isfinite().all(dim=1).nonzero().flatten()
        self.pool = poisoned_pool(len(rows))
        append_rows(rows[slots, :RANK], rows[slots, RANK:], slots, self.pool)

    def make(self) -> Any:
        queries = self.case.queries
        return make(self.case.heads, (self.case.rows + SPARE_ROWS) * queries, self.req_to_token.shape[1], queries)

    def run(self, grouped: Any) -> Result:
        """What later runs do not overwrite."""
        out, lse = grouped.run(*parts_of(self.q), self.pool, SCALE)
        return out.clone(), lse

    def check(self, actual: Result) -> None:
        """No more error than that of the steps, in all rows together and in each."""
        exact, steps = self._by_row(exact=True), self._by_row(exact=False)
        ours, theirs = (reference.errors(out, exact[0]).rel_l2 for out in (actual[0], steps[0]))
        lse_error = (actual[1] - steps[1]).nan_to_num(0.0).abs().max().item()
        print(f"  relative L2 error {ours:.5f}, of the steps {theirs:.5f}; lse {lse_error:.1e}")
        assert ours <= 1.1 * theirs + 2e-3
        worst = max(reference.errors(one, truth).rel_l2 for one, truth in zip(actual[0], exact[0], strict=True))
        assert worst <= 0.2, "a row that is wrong, not only rounded"
        torch.testing.assert_close(actual[1], steps[1], rtol=0, atol=LSE_BOUND)

    def _by_row(self, exact: bool) -> Result:
        """Attention in float64 to what is stored, or the rounding steps of FP8."""
        parts = []
        for row, slots in enumerate(self.slots()):
            rows = self.pool[slots]
            q = self.q[row : row + 1].split([RANK, ROPE], dim=-1)
            if exact:
                keys = torch.cat(dequantize(rows), dim=-1)[None].double()
                parts.append(reference.absorb(*q, keys, torch.tensor([len(slots)], device=DEVICE), SCALE))
            else:
                parts.append(reference_fp8.absorb_fp8(*q, reference_fp8.keys_of_rows(rows), SCALE))
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_every_row_equals_absorb_over_its_own_keys(case: Case) -> None:
    problem = FP8Problem(case)
    grouped = problem.make()
    print(f"\n{case}, grouped and not:")
    for chosen in (list(range(len(case.groups))), []):
        problem.plan(grouped, chosen)
        first, again = problem.run(grouped), problem.run(grouped)
        problem.check(first)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize(("heads", "queries"), [(8, 1), (16, 1), (32, 1), (8, 2), (16, 3), (16, 4), (32, 4)])
def test_a_graph_follows_later_plans_and_lengths(heads: int, queries: int) -> None:
    """Captured with nothing grouped; then other groups in turn, while the tails grow, some of them from no token."""
    case = Case((5, 64, 3), (1024, 320, 320), heads=heads, alone=2, queries=queries)
    problem = FP8Problem(case)
    grouped, other = problem.make(), problem.make()
    problem.plan(grouped, [])
    problem.run(grouped)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = grouped.run(*parts_of(problem.q), problem.pool, SCALE)
    shared = torch.zeros(case.rows, dtype=torch.long)
    for group in problem.groups:
        shared[list(group.rows)] = group.end
    longest = problem.seq_lens
    print(f"\n{heads} heads:")
    for missing, chosen in zip((160, 93, 64, 37, 0), ([0, 1, 2], [1], [], [2, 0], [0, 1, 2]), strict=True):
        shorter = torch.maximum(longest - missing, shared.to(DEVICE) + queries - 1)
        problem.seq_lens = torch.minimum(shorter, longest)  # what follows is in no page
        problem.plan(grouped, chosen)
        out.fill_(NAN)
        graph.replay()
        problem.check((out, lse))
        problem.plan(other, chosen)
        expected = problem.run(other)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_steps_of_other_sizes_do_not_disturb_each_other() -> None:
    """One object, batches of several sizes in turn, without waiting for the GPU in between; the last one is empty."""
    small, large = FP8Problem(Case((3,), (128,), 16)), FP8Problem(Case((5, 64, 3), (1024, 320, 320), 16, alone=2))
    grouped = large.make()
    kept = []
    for problem in (large, small, large, small, small, large):
        problem.plan(grouped, list(range(len(problem.groups))))
        kept.append((problem, problem.run(grouped)))
    grouped.plan([], 0)
    grouped.begin_step(large.req_to_token, *(torch.zeros(0, dtype=torch.int32, device=DEVICE),) * 3)
    assert grouped.run(*parts_of(large.q[:0]), large.pool, SCALE)[0].shape == (0, 16, RANK)
    print()
    for problem, actual in kept:
        problem.check(actual)


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_it_runs_on_a_hopper_gpu(heads: int) -> None:
    problem, failures = FP8Problem(Case((3,), (128,), heads)), []
    grouped = make_grouped_absorb_fp8(
        problem.req_to_token,
        problem.pool,
        heads=heads,
        layout=LAYOUT,
        dtype=DTYPE,
        on_failure=lambda error: failures.append(str(error)),
        max_rows=problem.case.rows + SPARE_ROWS,
        max_tokens=problem.req_to_token.shape[1],
    )
    assert grouped is not None, failures
    problem.plan(grouped, [0])
    print()
    problem.check(problem.run(grouped))


@pytest.mark.parametrize("heads", [16, 8, 32])
def test_times(heads: int, requests: int = 128, prefix: int = 26472, tail: int = 512) -> None:
    """Beside every request reading all of its keys. Whole pages are shared; what is left of the prefix is in the tails.
    Rounding of the query and merge included."""
    torch.manual_seed(0)
    shared, length = prefix // PAGE_TOKENS, prefix + tail
    end, own = shared * PAGE_TOKENS, -(-length // PAGE_TOKENS) - shared
    pages = torch.randperm(shared + requests * own, device=DEVICE, dtype=torch.int32)
    table = torch.cat([pages[:shared].expand(requests, -1), pages[shared:].view(requests, own)], dim=1)  # [B, pages]
    req_to_token = (
        table[..., None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, dtype=torch.int32, device=DEVICE)
    ).flatten(1)
    pool = poisoned_pool(len(pages) * PAGE_TOKENS)
    for slots in req_to_token[:, :length].unique().long().split(1 << 14):
        parts = (torch.randn(len(slots), dim, device=DEVICE, dtype=DTYPE) for dim in (RANK, ROPE))
        append_rows(*parts, slots, pool)
    q = torch.randn(requests, heads, RANK + ROPE, device=DEVICE, dtype=DTYPE)
    parts_of_q = q.split([RANK, ROPE], dim=-1)
    lens = torch.full((requests,), length, dtype=torch.int32, device=DEVICE)
    indices = torch.arange(requests, device=DEVICE)

    absorb = make_hopper_absorb_fp8(max_requests=requests, heads=heads, device=DEVICE)
    out = torch.empty(requests, heads, RANK, device=DEVICE, dtype=DTYPE)
    lse = torch.empty(requests, heads, device=DEVICE)
    us = {}
    ways = ("tails alone", lens - end, table[:, shared:].contiguous()), ("each for itself", lens, table)
    for name, some_lens, some_table in ways:
        absorb.begin_step(some_lens, some_table)
        us[name] = captured_us(
            lambda: absorb.run(*parts_of_q, pool, some_table, some_lens, SCALE, out, lse)  # noqa: B023
        )
    grouped = make(heads, requests, req_to_token.shape[1])
    grouped.plan([Segment(tuple(range(requests)), 0, end, Mode.GROUPED_ABSORB)], requests)
    ends = torch.full_like(lens, end)
    for name, some_lens in (("prefix alone", ends), ("grouped", lens)):
        grouped.begin_step(req_to_token, indices, some_lens, ends)
        us[name] = captured_us(lambda: grouped.run(*parts_of_q, pool, SCALE))
    us["begin_step"] = captured_us(lambda: grouped.begin_step(req_to_token, indices, lens, ends))
    print(f"\n{requests} x ({prefix} + {tail}), {heads} heads; us:", {name: round(one, 1) for name, one in us.items()})
    ours = grouped.run(*parts_of_q, pool, SCALE)
    assert reference.errors(ours[0], out).rel_l2 < 0.05
    torch.testing.assert_close(ours[1], lse, rtol=0, atol=LSE_BOUND)
    assert us["grouped"] < us["each for itself"]

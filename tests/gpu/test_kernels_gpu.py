"""The kernels in BF16 on a Hopper GPU against the reference in float64, at DeepSeek-V3's dimensions, Kimi-K3's and
GLM-4.7-Flash's; attention with the kernel for Hopper and with the one for any GPU.

Bound: FlashMLA's, 4e-3 in relative L2 and 5e-6 in cosine distance; what is rounded to BF16 is the inputs (exactly as in
the reference), the softmax weights and the merged result. The lse is rounded nowhere: 2e-5. Whatever no kernel may read
is NaN. Each case prints its time. Run with `pytest tests/gpu -m gpu -s`, in a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import triton
from triton.testing import do_bench_cudagraph

from sglang_mla_ext.kernels.dispatch import make_shared_attention, whole_query
from sglang_mla_ext.kernels.naive import sm90_naive as naive_prefix_hopper
from sglang_mla_ext.kernels.naive import triton_naive as naive_prefix
from sglang_mla_ext.kernels.naive.triton_attention import TritonSharedAttention
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.storage.expanded import CHUNK_TOKENS, ExpandedBuffers
from sglang_mla_ext.segment import Mode, Segment

pytestmark = pytest.mark.gpu

NAN = float("nan")
DN, DR, DV = 128, 64, 128
SCALE = (DN + DR) ** -0.5
LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Case:
    groups: tuple[int, ...]  # rows of each shared prefix
    prefix: tuple[int, ...]  # tokens of each
    heads: int
    alone: int = 0  # rows in no group
    sharpness: float = 1.0  # standard deviation of the scores
    nested: bool = False  # the rows of a group are also in all groups before it
    dn: int = DN  # content of a head's keys
    dv: int = DV

    @property
    def rows(self) -> int:
        return (max if self.nested else sum)(self.groups) + self.alone

    def __str__(self) -> str:
        pairs = list(zip(self.groups, self.prefix, strict=True))
        groups = "+".join(f"{n}x{length}" for n, length in pairs[:4]) + f"+{len(pairs) - 4}more" * (len(pairs) > 4)
        groups += "-nested" * self.nested
        dims = f"of{self.dn}-{self.dv}" if (self.dn, self.dv) != (DN, DV) else ""
        return f"{groups}-alone{self.alone}-h{self.heads}{dims}-sharp{self.sharpness:g}"


def cases():
    yield Case((128,), (7069,), heads=128)
    yield Case((64,), (7069,), heads=16)
    yield Case((64,), (26472,), heads=16)
    yield Case((256,), (4759,), heads=128)
    yield Case((192,), (4759,), heads=128, sharpness=4.0)
    yield Case((2,), (1,), heads=128)
    yield Case((65,), (64,), heads=16, alone=3)
    yield Case((3,), (63,), heads=1, sharpness=8.0)
    yield Case((5, 64, 17, 2), (257, 4759, 1000, 7069), heads=128, alone=7)
    yield Case((5, 64, 17, 2), (257, 4759, 1000, 7069), heads=16, alone=7, sharpness=4.0)
    yield Case((100, *[1] * 40), (7069, *range(1, 1600, 40)), heads=32)
    yield Case((130, 60, 9), (2048, 512, 333), heads=16, alone=3, nested=True)
    yield Case((96, 40, 40, 7), (2048, 256, 768, 1001), heads=128, nested=True)
    for heads in (12, 6):  # Kimi-K3's of 8 and 16 ranks; query tokens of a request are rows
        for queries in (1, 2, 4, 8):
            yield Case((98 * queries,), (26472,), heads=heads)
    yield Case((98, 3), (7069, 300), heads=3, alone=4)
    for heads in (20, 10, 5):  # GLM-4.7-Flash's
        yield Case((64, 9), (7069, 300), heads=heads, alone=3, dn=192, dv=256)


class Problem:
    """Inputs of a case on the GPU, seeded, BF16; NaN wherever no kernel may read."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.generator = torch.Generator("cuda").manual_seed(case.rows * 1000 + case.heads)
        chunks_of = [-(-n // CHUNK_TOKENS) for n in case.prefix]
        cpu_generator = torch.Generator().manual_seed(case.rows)
        chunk_ids = torch.randperm(sum(chunks_of) + 2, generator=cpu_generator).tolist()
        order = torch.randperm(case.rows, generator=cpu_generator).tolist()
        sizes = dict(qk_nope_head_dim=case.dn, v_head_dim=case.dv, qk_rope_head_dim=DR)
        self.buffers = ExpandedBuffers.allocate(layers=LAYERS, chunks=len(chunk_ids), heads=case.heads, **sizes)
        for tensor in (self.buffers.k_nope, self.buffers.v_t, self.buffers.k_rope):
            tensor.fill_(NAN)
        self.groups, self.keys = [], []
        for size, length, n_chunks in zip(case.groups, case.prefix, chunks_of, strict=True):
            rows, order = tuple(order[:size]), order if case.nested else order[size:]
            chunks, chunk_ids = tuple(chunk_ids[:n_chunks]), chunk_ids[n_chunks:]
            k_nope, v, k_rope = (
                self.randn(length, case.heads, case.dn),
                self.randn(length, case.heads, case.dv),
                self.randn(length, DR),
            )
            for i, chunk in enumerate(chunks):
                tokens = slice(i * CHUNK_TOKENS, (i + 1) * CHUNK_TOKENS)
                self.buffers.write(LAYER, chunk, 0, k_nope[tokens], v[tokens], k_rope[tokens])
            self.groups.append(Segment(rows, 0, length, Mode.NAIVE, chunks))
            self.keys.append((k_nope, k_rope, v))
        query = self.randn(case.rows, case.heads, case.dn + DR) * case.sharpness
        self.q_nope, self.q_rope = query[..., : case.dn], query[..., case.dn :]  # [T, H, dn], [T, H, dr]
        self.tail_out = self.randn(case.rows, case.heads, case.dv)  # [T, H, dv]
        self.tail_lse = self.randn(case.rows, case.heads).float() + 7  # [T, H]
        self.tail_out[:1], self.tail_lse[:1] = NAN, torch.inf  # an empty tail

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device="cuda", dtype=torch.float32).to(torch.bfloat16)

    def attention(self, portable: bool = False) -> TritonSharedAttention:
        segments = len(self.case.groups) if self.case.nested else 1
        sizes = dict(max_rows=self.case.rows, heads=self.case.heads, segments_per_row=segments)
        attention = make_shared_attention(self.buffers, device="cuda", portable=portable, **sizes)
        assert attention._kernel is (naive_prefix if portable else naive_prefix_hopper)
        attention._partial_out.fill_(NAN)
        attention._partial_lse2.fill_(NAN)
        return attention

    def expected(self, chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """`out [T, H, dv]` and `lse [T, H]` in float64 with the chosen groups in the plan, one head at a time."""
        out = torch.zeros(self.case.rows, self.case.heads, self.case.dv, dtype=torch.float64, device="cuda")
        lse = torch.full(out.shape[:2], -torch.inf, dtype=torch.float64, device="cuda")
        for i in chosen:
            rows, (k_nope, k_rope, v) = list(self.groups[i].rows), self.keys[i]
            for h in range(self.case.heads):
                one = slice(h, h + 1)
                q_nope, q_rope = self.q_nope[rows, one].double(), self.q_rope[rows, one].double()
                part = reference.naive(q_nope, q_rope, k_nope[:, one], k_rope, v[:, one], SCALE)
                out[rows, one], lse[rows, one] = reference.merge(out[rows, one], lse[rows, one], *part)
        tail_lse = self.tail_lse.masked_fill(self.tail_lse == torch.inf, -torch.inf)
        return reference.merge(out, lse, self.tail_out, tail_lse)


def assert_equal(out: torch.Tensor, lse: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    found = reference.errors(out, expected[0])
    assert found.rel_l2 < 4e-3 and found.cos_dist < 5e-6, f"out: {found}"
    found_lse = reference.errors(lse, expected[1])
    assert found_lse.rel_l2 < 2e-5 and found_lse.cos_dist < 1e-9, f"lse: {found_lse}"


def run_and_merge(attention, problem: Problem, out: torch.Tensor, lse: torch.Tensor) -> None:
    attention.run(LAYER, problem.q_nope, problem.q_rope, SCALE)
    attention.merge(problem.tail_out, problem.tail_lse, out, lse)


def results(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full_like(problem.tail_out, NAN), torch.full_like(problem.tail_lse, NAN)


@pytest.fixture(params=[False, True], ids=["hopper", "portable"])
def portable(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_prefix_and_tail_equal_reference(case: Case, portable: bool) -> None:
    problem = Problem(case)
    attention = problem.attention(portable)
    attention.plan(problem.groups)
    out, lse = results(problem)
    run_and_merge(attention, problem, out, lse)
    expected = problem.expected(list(range(len(case.groups))))
    assert_equal(out, lse, expected)

    ms = do_bench_cudagraph(lambda: attention.run(LAYER, problem.q_nope, problem.q_rope, SCALE), rep=50)
    merge_ms = do_bench_cudagraph(lambda: attention.merge(problem.tail_out, problem.tail_lse, out, lse), rep=20)
    pairs = list(zip(case.groups, case.prefix, strict=True))
    flops = 2 * case.heads * (case.dn + DR + case.dv) * sum(n * length for n, length in pairs)
    read = 2 * (case.heads * (case.dn + case.dv) + DR) * sum(length for _, length in pairs)
    found = reference.errors(out, expected[0])
    print(
        f"\n{case}: naive{' portable' * portable} {ms * 1e3:.1f} us, {flops / ms / 1e9:.0f} TFLOPS, "
        f"{read / ms / 1e6:.0f} GB/s; merge {merge_ms * 1e3:.1f} us; rel_l2 {found.rel_l2:.1e}, "
        f"max_rel {found.max_rel:.1e}, cos {found.cos_dist:.1e}"
    )


def test_merge_in_place_of_the_tail() -> None:
    problem = Problem(Case((9, 4), (700, 300), heads=128, alone=5))
    attention = problem.attention()
    attention.plan(problem.groups)
    expected = problem.expected([0, 1])
    attention.run(LAYER, problem.q_nope, problem.q_rope, SCALE)
    attention.merge(problem.tail_out, problem.tail_lse, problem.tail_out, problem.tail_lse)
    assert_equal(problem.tail_out, problem.tail_lse, expected)


def test_empty_plan_leaves_the_tails_and_takes_no_time(portable: bool) -> None:
    problem = Problem(Case((128,), (300,), heads=128))
    attention = problem.attention(portable)
    attention.plan([])
    out, lse = results(problem)
    run_and_merge(attention, problem, out, lse)
    assert torch.equal(out[1:], problem.tail_out[1:]) and torch.equal(lse[1:], problem.tail_lse[1:])
    assert not out[:1].any() and (lse[:1] == -torch.inf).all()
    ms = do_bench_cudagraph(lambda: attention.run(LAYER, problem.q_nope, problem.q_rope, SCALE), rep=20)
    print(f"\nempty plan: naive {ms * 1e3:.1f} us")
    assert ms < 0.02


def test_captured_graph_follows_later_plans(portable: bool) -> None:
    problem = Problem(Case((40, 3, 9), (3000, 300, 700), heads=32, alone=4))
    attention = problem.attention(portable)
    attention.plan([])
    out, lse = results(problem)
    run_and_merge(attention, problem, out, lse)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_and_merge(attention, problem, out, lse)
    for chosen in ([0, 1, 2], [1], [], [2, 0], [0, 1, 2]):
        attention.plan([problem.groups[i] for i in chosen])
        attention._partial_out.fill_(NAN)
        out.fill_(NAN)
        graph.replay()
        assert_equal(out, lse, problem.expected(chosen))


def test_plans_in_quick_succession_do_not_overwrite_each_other() -> None:
    """Many plans and runs without waiting for the GPU: a staging buffer must not change while it is being copied."""
    problem = Problem(Case((40, 3, 9), (3000, 300, 700), heads=128, alone=4))
    attention = problem.attention()
    plans = [[0, 1, 2], [1], [2, 0], [], [0]] * 4
    kept = []
    for chosen in plans:
        attention.plan([problem.groups[i] for i in chosen])
        out, lse = results(problem)
        run_and_merge(attention, problem, out, lse)
        kept.append((out, lse))
    expected = {tuple(chosen): problem.expected(chosen) for chosen in plans}
    for chosen, (out, lse) in zip(plans, kept, strict=True):
        assert_equal(out, lse, expected[tuple(chosen)])


def test_trying_out_compiles_all_that_serving_needs(portable: bool) -> None:
    """Nothing is compiled in a step of either kind that follows, or while a graph is captured."""
    problem = Problem(Case((40, 30), (300, 700), heads=32))
    attention = problem.attention(portable)
    attention.try_out(torch.bfloat16)
    compiled = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **details: compiled.append(details["fn"].name)
    try:
        for rows in (70, 1, 64):
            attention.plan([], rows)
            q_nope, q_rope = problem.q_nope[:rows], problem.q_rope[:rows]
            out, lse = problem.tail_out[:rows].clone(), problem.tail_lse[:rows].clone()
            attention.run(LAYER, q_nope, q_rope, SCALE)
            attention.merge(out, lse, out)
            plan = attention.make_plan([], rows)
            attention.run(LAYER, q_nope, q_rope, SCALE, plan)
            attention.merge(out, lse, out, lse, plan)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert not compiled


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("rows", [1, 37, 128, 512])
def test_parts_of_queries_are_joined(rows: int, heads: int) -> None:
    """As SGLang hands them over: the content as a product with the heads first, the rotary part inside a query."""
    content = torch.randn(heads, rows, 512, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
    rope = torch.randn(rows, heads, DN + DR, dtype=torch.bfloat16, device="cuda")[..., DN:]
    assert torch.equal(whole_query(content, rope), torch.cat([content, rope], dim=-1))
    us = 1e3 * do_bench_cudagraph(lambda: whole_query(content, rope))
    torch_us = 1e3 * do_bench_cudagraph(lambda: torch.cat([content, rope], dim=-1))
    print(f"\n{rows} x {heads}: joined in {us:.1f} us, by torch.cat in {torch_us:.1f} us")

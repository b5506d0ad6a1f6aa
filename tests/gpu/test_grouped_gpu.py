"""Grouped absorb with FlashMLA on a Hopper GPU, against absorb over each row's own keys in float64.

Bound: FlashMLA's, 4e-3 in relative L2; what is rounded to BF16 is the softmax weights, the outputs over prefix and tail
and the merged one. The lse is FlashMLA's: 1e-3. Whatever no kernel may read is NaN. Each case prints its time, and what
the same step takes when nothing is grouped. Run with `pytest tests/gpu -m gpu -s`, in a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from triton.testing import do_bench_cudagraph

from sglang_mla_ext.kernels import reference
from sglang_mla_ext.limits import PAGE_SIZE
from sglang_mla_ext.prefix.cost_model import Mode
from sglang_mla_ext.prefix.planner import Group

pytestmark = pytest.mark.gpu

NAN = float("nan")
DEVICE, DTYPE = "cuda", torch.bfloat16
RANK, ROPE = 512, 64
SCALE = 192**-0.5
SPARE_ROWS = 7  # that memory is there for, beyond those of the step


@dataclass(frozen=True)
class Case:
    groups: tuple[int, ...]  # rows of each shared prefix
    prefix: tuple[int, ...]  # tokens of each
    heads: int
    alone: int = 0  # rows in no group
    longest_tail: int = 200

    @property
    def rows(self) -> int:
        return sum(self.groups) + self.alone

    def __str__(self) -> str:
        groups = "+".join(f"{n}x{length}" for n, length in zip(self.groups, self.prefix, strict=True))
        return f"{groups}-alone{self.alone}-h{self.heads}-tail{self.longest_tail}"


def cases():
    for heads in (8, 16, 32):
        yield Case((5, 64, 3), (1024, 320, 320), heads=heads, alone=2)
    yield Case((2,), (64,), heads=16, alone=1)
    yield Case((1,) * 9 + (9,), (64,) * 9 + (4736,), heads=16, alone=30, longest_tail=1)
    yield Case((128,), (7040,), heads=16, longest_tail=500)


class Problem:
    """A paged latent cache and the requests of a case, their pages anywhere, seeded, BF16."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.cpu = torch.Generator().manual_seed(case.rows * 100 + case.heads)
        self.generator = torch.Generator(DEVICE).manual_seed(case.rows * 100 + case.heads)
        order = torch.randperm(case.rows, generator=self.cpu).tolist()
        self.groups, members = [], {}
        for size, end in zip(case.groups, case.prefix, strict=True):
            rows, order = tuple(sorted(order[:size])), order[size:]
            self.groups.append(Group(rows, None, 0, end, Mode.GROUPED_ABSORB))
            members.update(dict.fromkeys(rows, self.groups[-1]))
        tails = torch.randint(0, case.longest_tail + 1, (case.rows,), generator=self.cpu).tolist()
        tails[:2] = [0, case.longest_tail]
        lens = [tail + (members[row].end if row in members else 0) for row, tail in enumerate(tails)]
        needed = sum(-(-length // PAGE_SIZE) for length in lens) + sum(case.prefix) // PAGE_SIZE
        free = (torch.randperm(needed, generator=self.cpu) + 1).tolist()  # page 0 is nobody's
        self.pages = torch.full((needed + 1, PAGE_SIZE, 1, RANK + ROPE), NAN, dtype=DTYPE, device=DEVICE)
        self.req_to_token = torch.zeros(case.rows + 3, max(lens) + 1, dtype=torch.int32, device=DEVICE)
        self.pool_indices = torch.randperm(case.rows + 3, generator=self.cpu)[: case.rows].to(DEVICE)
        prefix_pages = {group: [free.pop() for _ in range(group.end // PAGE_SIZE)] for group in self.groups}
        for row, length in enumerate(lens):
            own = prefix_pages[members[row]] if row in members else []
            own = own + [free.pop() for _ in range(-(-length // PAGE_SIZE) - len(own))]
            slots = (torch.tensor(own, dtype=torch.long)[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()
            self.req_to_token[self.pool_indices[row], :length] = slots[:length].int().to(DEVICE)
            self.pages.view(-1, RANK + ROPE)[slots[:length].to(DEVICE)] = self.randn(length, RANK + ROPE)
        self.seq_lens = torch.tensor(lens, device=DEVICE)
        self.q = self.randn(case.rows, case.heads, RANK + ROPE)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=DEVICE, dtype=torch.float32).to(DTYPE)

    def make(self) -> Any:
        from sglang_mla_ext.grouped_absorb import GroupedAbsorb, stacking_for

        return GroupedAbsorb(
            stacking_for(self.case.heads),
            max_rows=self.case.rows + SPARE_ROWS,
            max_tokens=self.req_to_token.shape[1],
            kv_lora_rank=RANK,
            qk_rope_head_dim=ROPE,
            dtype=DTYPE,
            device=DEVICE,
        )

    def plan(self, grouped: Any, chosen: list[int]) -> None:
        """Bring a step to the device in which these groups are grouped; other rows have all their keys in the tail."""
        groups = [self.groups[index] for index in chosen]
        prefix_lens = torch.zeros(self.case.rows + SPARE_ROWS, dtype=torch.int32)
        for group in groups:
            prefix_lens[list(group.rows)] = group.end
        grouped.plan(groups, self.case.rows)
        grouped.prepare(self.req_to_token, self.pool_indices, self.seq_lens, prefix_lens.to(DEVICE))

    def run(self, grouped: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return grouped.run(self.q, self.pages, SCALE)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`out [rows, heads, RANK]` and `lse [rows, heads]` in float64, one row at a time."""
        parts = []
        for row, length in enumerate(self.seq_lens.tolist()):
            slots = self.req_to_token[self.pool_indices[row], :length].long()
            keys = self.pages.view(-1, RANK + ROPE)[slots][None].double()
            one = self.q[row : row + 1]
            lengths = torch.tensor([length], device=DEVICE)
            parts.append(reference.absorb(one[..., :RANK], one[..., RANK:], keys, lengths, SCALE))
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def assert_equal(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    found = reference.errors(actual[0], expected[0])
    assert found.rel_l2 <= 4e-3 and found.cos_dist < 1e-5, f"out: {found}"
    found_lse = reference.errors(actual[1], expected[1])
    assert found_lse.rel_l2 <= 1e-3, f"lse: {found_lse}"


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_every_row_equals_absorb_over_its_own_keys(case: Case) -> None:
    problem = Problem(case)
    grouped = problem.make()
    expected = problem.expected()
    problem.plan(grouped, list(range(len(case.groups))))
    first, again = problem.run(grouped), problem.run(grouped)
    assert_equal(first, expected)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])

    ms = do_bench_cudagraph(lambda: problem.run(grouped), rep=50)
    problem.plan(grouped, [])
    assert_equal(problem.run(grouped), expected)
    apart_ms = do_bench_cudagraph(lambda: problem.run(grouped), rep=50)
    found = reference.errors(first[0], expected[0])
    print(f"\n{case}: {ms * 1e3:.1f} us, ungrouped {apart_ms * 1e3:.1f} us; rel_l2 {found.rel_l2:.1e}")


def test_captured_graph_follows_later_plans_and_lengths() -> None:
    case = Case((5, 64, 3), (1024, 320, 320), heads=16, alone=2)
    problem = Problem(case)
    grouped = problem.make()
    problem.plan(grouped, [])
    problem.run(grouped)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = problem.run(grouped)
    shared = torch.zeros(case.rows, dtype=torch.long)
    for group in problem.groups:
        shared[list(group.rows)] = group.end
    for chosen in ([0, 1, 2], [1], [], [2, 0], [0, 1, 2]):
        problem.plan(grouped, chosen)
        out.fill_(NAN)
        graph.replay()
        assert_equal((out, lse), problem.expected())
        problem.seq_lens = torch.maximum(problem.seq_lens - 37, shared.to(DEVICE))


def test_steps_of_other_sizes_do_not_disturb_each_other() -> None:
    """One object, batches of several sizes in turn, without waiting for the GPU in between."""
    small, large = Problem(Case((3,), (128,), 16)), Problem(Case((5, 64, 3), (1024, 320, 320), 16, alone=2))
    grouped = large.make()
    kept = []
    for problem in (large, small, large, small, small, large):
        problem.plan(grouped, list(range(len(problem.groups))))
        kept.append((problem, problem.run(grouped)))
    expected = {id(problem): problem.expected() for problem in (small, large)}
    for problem, actual in kept:
        assert_equal(actual, expected[id(problem)])

"""Grouped absorb on a Hopper GPU, against absorb over each row's keys in float64.

Bound: 4e-3 in relative L2: the softmax weights, the outputs over segments and tail and the merged one are rounded to
BF16. The lse is not rounded: 1e-5. Whatever no kernel may read is NaN. Each case prints the time of a step, and what it
takes when nothing is grouped. Run with `pytest tests/gpu -m gpu -s`, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from triton.testing import do_bench_cudagraph

from sglang_mla_ext.kernels.absorb import sm90_bf16_absorb
from sglang_mla_ext.kernels.absorb.grouped import HopperGroupedAbsorb
from sglang_mla_ext.kernels.absorb.schedule import AbsorbCapacity, build_segment_work, empty_tail_table, empty_work
from sglang_mla_ext.kernels.absorb.tail_schedule import schedule_tails
from sglang_mla_ext.kernels.dispatch import make_grouped_absorb
from sglang_mla_ext.kernels.merge import merge
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.sizes import PAGE_TOKENS
from sglang_mla_ext.segment import Mode, Segment

pytestmark = pytest.mark.gpu

NAN = float("nan")
DEVICE, DTYPE = "cuda", torch.bfloat16
RANK, ROPE = 512, 64
SCALE = 192**-0.5
SPARE_ROWS = 7  # that memory is there for, beyond those of the step
LSE_BOUND = 1e-5


@dataclass(frozen=True)
class Case:
    groups: tuple[int, ...]  # requests of each shared prefix
    prefix: tuple[int, ...]  # tokens of each
    heads: int
    alone: int = 0  # requests in no group
    longest_tail: int = 200
    queries: int = 1  # query tokens of a request

    @property
    def rows(self) -> int:
        """Requests."""
        return sum(self.groups) + self.alone

    def __str__(self) -> str:
        groups = "+".join(f"{n}x{length}" for n, length in zip(self.groups, self.prefix, strict=True))
        return f"{groups}-alone{self.alone}-h{self.heads}x{self.queries}-tail{self.longest_tail}"


def cases():
    for heads in (8, 16, 32, 12, 6, 3, 20, 10, 5):  # the last six: Kimi-K3's, GLM-4.7-Flash's
        yield Case((5, 64, 3), (1024, 320, 320), heads=heads, alone=2)
    yield Case((2,), (64,), heads=16, alone=1)
    yield Case((1,) * 9 + (9,), (64,) * 9 + (4736,), heads=16, alone=30, longest_tail=1)
    yield Case((3,), (128,), heads=16, alone=2, longest_tail=5003)  # tails that are cut
    yield Case((128,), (7040,), heads=16, longest_tail=500)
    yield Case((200,) + (2,) * 20, (4736,) + (192,) * 20, heads=16, alone=16, longest_tail=1025)
    for heads, queries in ((8, 2), (8, 7), (8, 8), (16, 2), (16, 4), (16, 7), (16, 8), (32, 2), (32, 3), (32, 4)):
        yield Case((5, 64, 3), (1024, 320, 320), heads=heads, alone=9, queries=queries)
    yield Case((3,), (128,), heads=16, alone=2, longest_tail=5003, queries=4)  # tails that are cut
    yield Case((128,), (7040,), heads=16, longest_tail=500, queries=4)
    for heads in (12, 6):
        for queries in range(2, 9):
            yield Case((5, 64, 3), (1024, 320, 320), heads=heads, alone=9, queries=queries)
        for queries in (1, 8):
            yield Case((98,), (26432,), heads=heads, longest_tail=500, queries=queries)


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
            self.groups.append(Segment(rows, 0, end, Mode.GROUPED_ABSORB))
            members.update(dict.fromkeys(rows, self.groups[-1]))
        tails = torch.randint(0, case.longest_tail + 1, (case.rows,), generator=self.cpu).tolist()
        tails[:2] = [0, case.longest_tail]
        queries, alone = case.queries, [row for row in range(case.rows) if row not in members]
        tails = [max(tail, queries - 1) for tail in tails]  # so that all query tokens see what is shared
        # Keys that not all query tokens see, some of them in the block before the last.
        short = [0, 1, queries - 1, queries, *(PAGE_TOKENS + more for more in (0, 1, queries - 2, queries - 1))]
        for row, tail in zip(alone, short if queries > 1 else [], strict=False):
            tails[row] = tail
        lens = [tail + (members[row].end if row in members else 0) for row, tail in enumerate(tails)]
        needed = sum(-(-length // PAGE_TOKENS) for length in lens) + sum(case.prefix) // PAGE_TOKENS
        free = (torch.randperm(needed, generator=self.cpu) + 1).tolist()  # page 0 belongs to no request
        self.pages = torch.full((needed + 1, PAGE_TOKENS, 1, RANK + ROPE), NAN, dtype=DTYPE, device=DEVICE)
        self.req_to_token = torch.zeros(case.rows + 3, max(lens) + 1, dtype=torch.int32, device=DEVICE)
        self.pool_indices = torch.randperm(case.rows + 3, generator=self.cpu)[: case.rows].to(DEVICE)
        prefix_pages = {group: [free.pop() for _ in range(group.end // PAGE_TOKENS)] for group in self.groups}
        for row, length in enumerate(lens):
            own = prefix_pages[members[row]] if row in members else []
            own = own + [free.pop() for _ in range(-(-length // PAGE_TOKENS) - len(own))]
            slots = (torch.tensor(own, dtype=torch.long)[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()
            self.req_to_token[self.pool_indices[row], :length] = slots[:length].int().to(DEVICE)
            self.pages.view(-1, RANK + ROPE)[slots[:length].to(DEVICE)] = self.randn(length, RANK + ROPE)
        self.seq_lens = torch.tensor(lens, device=DEVICE)
        self.q = self.randn(case.rows * queries, case.heads, RANK + ROPE)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=DEVICE, dtype=torch.float32).to(DTYPE)

    def make(self, **sizes: Any) -> Any:
        grouped = HopperGroupedAbsorb(
            heads=self.case.heads,
            max_rows=(self.case.rows + SPARE_ROWS) * self.case.queries,
            max_tokens=self.req_to_token.shape[1],
            query_tokens=self.case.queries,
            kv_lora_rank=RANK,
            qk_rope_head_dim=ROPE,
            dtype=DTYPE,
            device=DEVICE,
            **sizes,
        )
        grouped._partial_out.fill_(NAN)  # what is there before the first step must not matter
        grouped._partial_lse2.fill_(NAN)
        return grouped

    def plan(self, grouped: Any, chosen: list[int]) -> None:
        """Bring a step to the device in which these groups are grouped; other rows have all their keys in the tail."""
        groups = [self.groups[index] for index in chosen]
        tail_starts = torch.zeros(self.case.rows + SPARE_ROWS, dtype=torch.int32)
        for group in groups:
            tail_starts[list(group.rows)] = group.end
        tail_tokens = self.seq_lens.cpu() - tail_starts[: self.case.rows]
        grouped.plan(groups, self.case.rows, int(tail_tokens.sum()))
        grouped.begin_step(self.req_to_token, self.pool_indices, self.seq_lens, tail_starts.to(DEVICE))

    def run(self, grouped: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """What later runs do not overwrite."""
        out, lse = grouped.run(*parts_of(self.q), self.pages, SCALE)
        return out.clone(), lse

    def slots(self) -> Iterator[torch.Tensor]:
        """Of every row, the slots of the keys that it sees."""
        for request, length in enumerate(self.seq_lens.tolist()):
            for unseen in reversed(range(self.case.queries)):
                yield self.req_to_token[self.pool_indices[request], : max(0, length - unseen)].long()

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`out [rows, heads, RANK]` and `lse [rows, heads]` in float64, one row at a time."""
        parts = []
        for row, slots in enumerate(self.slots()):
            keys = self.pages.view(-1, RANK + ROPE)[slots][None].double()
            one = self.q[row : row + 1]
            lengths = torch.tensor([len(slots)], device=DEVICE)
            parts.append(reference.absorb(one[..., :RANK], one[..., RANK:], keys, lengths, SCALE))
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def parts_of(q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Content and rotary part of queries."""
    return q.split([RANK, ROPE], dim=-1)


def assert_equal(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    found = reference.errors(actual[0], expected[0])
    assert found.rel_l2 <= 4e-3 and found.cos_dist < 1e-5, f"out: {found}"
    found_lse = reference.errors(actual[1], expected[1])
    assert found_lse.rel_l2 <= LSE_BOUND, f"lse: {found_lse}"


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_every_row_equals_absorb_over_its_own_keys(case: Case) -> None:
    problem = Problem(case)
    expected = problem.expected()
    grouped = problem.make()
    problem.plan(grouped, list(range(len(case.groups))))
    first, again = problem.run(grouped), problem.run(grouped)
    assert_equal(first, expected)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])

    us = 1e3 * do_bench_cudagraph(lambda: grouped.run(*parts_of(problem.q), problem.pages, SCALE), rep=50)
    problem.plan(grouped, [])
    assert_equal(problem.run(grouped), expected)
    apart_us = 1e3 * do_bench_cudagraph(lambda: grouped.run(*parts_of(problem.q), problem.pages, SCALE), rep=50)
    found = reference.errors(first[0], expected[0])
    print(f"\n{case}: {us:6.1f} us, ungrouped {apart_us:6.1f} us; rel_l2 {found.rel_l2:.1e}")


def test_a_row_in_several_segments() -> None:
    """The segments of a prefix one behind the other, of which fewer and fewer rows have the later ones: each begins
    where the one before ends, in the pages of its leader. The parts of the query lie apart."""
    case = Case((40, 8), (1024, 320), heads=16, alone=2)
    problem = Problem(case)
    whole, other = problem.groups
    segments = [
        Segment(whole.rows, 0, 512, Mode.GROUPED_ABSORB),
        Segment(whole.rows[3:30], 512, 832, Mode.GROUPED_ABSORB),
        Segment(whole.rows[9:12], 832, 1024, Mode.GROUPED_ABSORB),
        other,
    ]
    tail_starts = torch.zeros(case.rows, dtype=torch.int32)
    for segment in segments:
        tail_starts[list(segment.rows)] = segment.end
    grouped = problem.make(max_segment_rows=2 * case.rows)
    grouped.plan(segments, case.rows)
    grouped.begin_step(problem.req_to_token, problem.pool_indices, problem.seq_lens, tail_starts.to(DEVICE))
    content, rope = parts_of(problem.q)
    heads_outside = content.transpose(0, 1).contiguous().transpose(0, 1)
    assert_equal(grouped.run(heads_outside, rope.clone(), problem.pages, SCALE), problem.expected())


@pytest.mark.parametrize("queries", [1, 3, 4])
def test_captured_graph_follows_later_plans_and_lengths(queries: int) -> None:
    """Captured with nothing grouped; then other groups in turn, while the tails grow, some of them from no token."""
    case = Case((5, 64, 3), (1024, 320, 320), heads=16, alone=2, queries=queries)
    problem = Problem(case)
    grouped = problem.make()
    problem.plan(grouped, [])
    problem.run(grouped)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = grouped.run(*parts_of(problem.q), problem.pages, SCALE)
    shared = torch.zeros(case.rows, dtype=torch.long)
    for group in problem.groups:
        shared[list(group.rows)] = group.end
    longest = problem.seq_lens
    for missing, chosen in zip((160, 93, 64, 37, 0), ([0, 1, 2], [1], [], [2, 0], [0, 1, 2]), strict=True):
        shorter = torch.maximum(longest - missing, shared.to(DEVICE) + queries - 1)
        problem.seq_lens = torch.minimum(shorter, longest)  # what follows is in no page
        problem.plan(grouped, chosen)
        out.fill_(NAN)
        graph.replay()
        assert_equal((out, lse), problem.expected())


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


def test_it_runs_on_a_hopper_gpu() -> None:
    failures: list[str] = []
    problem = Problem(Case((3,), (128,), 16))
    grouped = make_grouped_absorb(
        problem.req_to_token,
        problem.pages,
        heads=16,
        max_rows=problem.case.rows + SPARE_ROWS,
        max_tokens=problem.req_to_token.shape[1],
        kv_lora_rank=RANK,
        on_failure=lambda error: failures.append(str(error)),
    )
    assert isinstance(grouped, HopperGroupedAbsorb), failures
    problem.plan(grouped, [0])
    assert_equal(problem.run(grouped), problem.expected())


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 96, 128])
def test_the_kernel_takes_any_multiple_of_eight_heads(heads: int) -> None:
    """Tails of odd lengths and a group, without SGLang's tables; what lies behind a tail's last token is NaN."""
    lengths = [0, 1, 63, 64, 65, 127, 128, 129, 192, 193, 600, 1027]
    group = (1, 4, 0, 8, 11)  # rows that share the first pages of the table's last row
    rows, width, shared = len(lengths), 20, 4 * PAGE_TOKENS
    generator = torch.Generator(DEVICE).manual_seed(heads)
    q, latent = (
        torch.randn(*shape, RANK + ROPE, generator=generator, device=DEVICE).to(DTYPE)
        for shape in ((rows, heads), (rows + 1, width * PAGE_TOKENS))
    )
    lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    behind = torch.arange(width * PAGE_TOKENS, device=DEVICE) >= lens[:, None]
    latent[:rows].masked_fill_(behind[..., None], NAN)
    pages = torch.full((rows * width + width + 1, PAGE_TOKENS, 1, RANK + ROPE), NAN, dtype=DTYPE, device=DEVICE)
    table = torch.randperm(len(pages) - 1, generator=generator, device=DEVICE).int().view(rows + 1, width)
    pages[table.long()] = latent.view(rows + 1, width, PAGE_TOKENS, 1, -1)

    sm_count = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    capacity = AbsorbCapacity(rows, heads, sm_count)
    segments = build_segment_work([Segment(group, 0, shared, Mode.GROUPED_ABSORB)], [rows * width], capacity)
    work = torch.from_numpy(empty_work(capacity))
    work[: len(segments.head)] = torch.from_numpy(segments.head)
    work[capacity.segment_strips :][: len(segments.strips)] = torch.from_numpy(segments.strips)
    work, segment_table = work.to(DEVICE), segments.table.to(DEVICE)
    tail_table = empty_tail_table(capacity).to(DEVICE)
    schedule_tails(lens, work, tail_table, capacity, table)
    out = torch.full((capacity.max_partial_rows, heads, RANK), NAN, dtype=DTYPE, device=DEVICE)
    lse2 = torch.full(out.shape[:2], NAN, device=DEVICE)
    parts = q.split([RANK, ROPE], dim=-1)
    sm90_bf16_absorb.run(*parts, pages, work, table, capacity, out, lse2, softmax_scale=SCALE)
    actual, lse = torch.empty(rows, heads, RANK, dtype=DTYPE, device=DEVICE), torch.empty(rows, heads, device=DEVICE)
    nothing = torch.full_like(lse, -torch.inf)
    merge(actual, nothing, out, lse2, tail_table, actual, lse)
    merge(actual, lse, out, lse2, segment_table, actual, lse)

    for row, length in enumerate(lengths):
        keys = torch.cat([latent[rows, : shared if row in group else 0], latent[row, :length]])[None].double()
        queries = q[row : row + 1].double().split([RANK, ROPE], dim=-1)
        want = reference.absorb(*queries, keys, torch.tensor([keys.shape[1]], device=DEVICE), SCALE)
        assert_equal((actual[row : row + 1], lse[row : row + 1]), want)

"""Grouped absorb over FP8 rows without a GPU: both kernels' own source run in torch (gluon_in_torch.py); page tables,
the schedule of the tails and the merges in Triton's interpreter.

Expected is what the kernels round, in torch: reference.fp8.absorb_fp8 over all keys of a row, because segments end with
a block; and attention in float64 to the rows as they are read back. Rows that must not be read, partials of earlier
launches and entries of the page table that were not written are NaN or point nowhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_absorb_fp8 import LAYOUT, NAN, SOFTMAX_SCALE, assert_close
from test_absorb_fp8_hopper import BOUND, InTorch, merge_many_heads_at_once
from test_grouped_absorb import tensors_of
from test_latent_rows import poisoned_pool

from sglang_mla_ext.kernels import dispatch
from sglang_mla_ext.kernels.absorb import sm90_fp8_absorb, sm90_fp8_few_heads
from sglang_mla_ext.kernels.absorb.grouped_fp8 import HopperGroupedAbsorbFP8
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.reference import fp8 as reference_fp8
from sglang_mla_ext.kernels.storage.latent_rows import dequantize, quantize
from sglang_mla_ext.segment import Mode, Segment

RANK, ROPE, PAGE = 512, 64, 64
MAX_ROWS, MAX_TOKENS = 20, 800
ODD_TAILS = (0, 1, 63, 64, 65, 130)
# Rounding of weights to e4m3.
EXACT_BOUND = 0.02
NOWHERE = 1 << 30

Result = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = InTorch(seed=0, faults={})
    monkeypatch.setattr(sm90_fp8_absorb, "run", stand_in.hopper)
    monkeypatch.setattr(sm90_fp8_few_heads, "run", stand_in.few)
    merge_many_heads_at_once(monkeypatch)


class Problem:
    """An FP8 cache in pages, and requests of which some begin with the same pages; seeded."""

    def __init__(
        self,
        heads: int,
        groups: Sequence[tuple[int, int]],
        tails: Sequence[int],
        seed: int = 0,
        deeper: int = 0,
        queries: int = 1,
    ) -> None:
        """
        Args:
            groups: requests and tokens of the prefix of each; whose requests those are is drawn.
            tails: tokens of each request of the step.
            deeper: so many requests of the first group also share a second segment of two pages behind its prefix.
            queries: query tokens of each request.
        """
        self.queries = queries
        generator = torch.Generator().manual_seed(seed + len(tails))
        rows, order = len(tails), torch.randperm(len(tails), generator=generator).tolist()
        self.segments: list[Segment] = []
        shared: dict[int, torch.Tensor] = {}  # slots of the prefix of each row that has one
        needed = sum(end for _, end in groups) // PAGE + sum(-(-tail // PAGE) for tail in tails) + 2
        self.free = torch.randperm(needed + 2, generator=generator).tolist()  # two pages belong to no request
        self.pool = poisoned_pool((needed + 2) * PAGE, LAYOUT)
        self.req_to_token = torch.full((MAX_ROWS + 5, MAX_TOKENS), NOWHERE, dtype=torch.int32)
        self.pool_indices = torch.randperm(MAX_ROWS + 5, generator=generator)[:rows]
        self.tail_starts = torch.zeros(MAX_ROWS, dtype=torch.int32)
        for size, end in groups:
            members, order = tuple(sorted(order[:size])), order[size:]
            self.segments.append(Segment(members, 0, end, Mode.GROUPED_ABSORB))
            shared |= dict.fromkeys(members, self._write(end, generator))
        if deeper:
            members, start = self.segments[0].rows[-deeper:], self.segments[0].end
            self.segments.append(Segment(members, start, start + 2 * PAGE, Mode.GROUPED_ABSORB))
            below = self._write(2 * PAGE, generator)
            shared |= {row: torch.cat([shared[row], below]) for row in members}
        for row, slots in shared.items():
            self.tail_starts[row] = len(slots)
        for row, tail in enumerate(tails):
            slots = torch.cat([shared.get(row, torch.zeros(0, dtype=torch.long)), self._write(tail, generator)])
            self.req_to_token[self.pool_indices[row], : len(slots)] = slots.int()
        self.seq_lens = torch.tensor(tails, dtype=torch.long) + self.tail_starts[:rows]
        q = torch.randn(rows * queries, heads, RANK + ROPE, generator=generator)
        self.q = q.bfloat16().float()  # what the kernels read

    def _write(self, tokens: int, generator: torch.Generator) -> torch.Tensor:
        """Give so many tokens pages and rows; their slots."""
        pages = torch.tensor([self.free.pop() for _ in range(-(-tokens // PAGE))], dtype=torch.long)
        slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:tokens]
        sizes = 10 ** (2 * torch.rand(tokens, 1, generator=generator) - 1)
        latent = sizes * torch.randn(tokens, RANK, generator=generator)
        rows = quantize(latent, torch.randn(tokens, ROPE, generator=generator))
        for part in (slice(0, LAYOUT.rope_offset - 12), slice(LAYOUT.rope_offset, None)):  # all but the padding
            self.pool[slots, part] = rows[:, part]
        return slots

    def shorten(self) -> None:
        """Take the last token of each tail away: it must not be read any more."""
        longer = self.seq_lens > self.tail_starts[: len(self.seq_lens)]
        self.seq_lens = self.seq_lens - longer.long()
        gone = self.req_to_token[self.pool_indices[longer], self.seq_lens[longer]].long()
        self.pool[gone] = 0x7F
        LAYOUT.scale(self.pool)[gone], LAYOUT.rope(self.pool)[gone] = NAN, NAN

    def run(self, grouped: Any) -> Result:
        grouped.begin_step(self.req_to_token, self.pool_indices, self.seq_lens, self.tail_starts)
        grouped._partial_out.fill_(NAN)
        grouped._partial_lse2.fill_(NAN)
        return grouped.run(*parts_of(self.q), self.pool, SOFTMAX_SCALE)

    def expected(self, exact: bool) -> Result:
        """Attention to the rows as they are read back, in float64; or where not exact, in FP8's steps."""
        parts = []
        for row in range(len(self.q)):
            request, token = divmod(row, self.queries)
            start, end = int(self.tail_starts[request]), int(self.seq_lens[request])
            length = max(start, end - (self.queries - 1 - token))
            rows = self.pool[self.req_to_token[self.pool_indices[request], :length].long()]
            q = self.q[row : row + 1]
            if exact:
                parts.append(self._attend(q, rows))
            else:
                keys = reference_fp8.keys_of_rows(rows)
                parts.append(reference_fp8.absorb_fp8(q[..., :RANK], q[..., RANK:], keys, SOFTMAX_SCALE))
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs), torch.cat(lses)

    def _attend(self, q: torch.Tensor, rows: torch.Tensor) -> Result:
        """Of the rounded query `[1, H, RANK + ROPE]`: rounding that is not the kernels'."""
        rounded = torch.cat(dequantize(quantize(q[0, :, :RANK], q[0, :, RANK:])), dim=-1)[None].double()
        keys = torch.cat(dequantize(rows), dim=-1)[None].double()
        return reference.absorb(
            rounded[..., :RANK], rounded[..., RANK:], keys, torch.tensor([len(rows)]), SOFTMAX_SCALE
        )

    def check(self, actual: Result) -> None:
        steps, exact = self.expected(exact=False), self.expected(exact=True)
        for row in range(len(self.q)):  # each for itself: outputs over few keys are larger
            ours = tuple(part[row : row + 1] for part in actual)
            assert_close(ours, tuple(part[row : row + 1] for part in steps), BOUND)
            assert_close(ours, tuple(part[row : row + 1] for part in exact), EXACT_BOUND)


def parts_of(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Content and rotary part of queries."""
    return q[..., :RANK], q[..., RANK:]


def make(heads: int, programs: int = 4, queries: int = 1) -> HopperGroupedAbsorbFP8:
    grouped = dispatch.make_hopper_grouped_absorb_fp8(
        heads=heads,
        query_tokens=queries,
        max_rows=MAX_ROWS * queries,
        max_tokens=MAX_TOKENS,
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE,
        dtype=torch.float32,  # so that rounding of partials hides nothing
        device="cpu",
        programs=programs,
    )
    grouped._table.fill_(NOWHERE)
    return grouped


@pytest.mark.parametrize(
    ("heads", "programs", "groups"),
    [
        (8, 7, ((9, 192), (1, 64), (2, 128))),
        (16, 1, ((5, 192), (1, 64), (3, 128))),
        (32, 7, ((3, 192), (1, 64), (2, 128))),
    ],
    ids=["8-cut", "16-whole", "32-cut"],
)
def test_every_row_attends_to_its_prefix_and_its_tail(heads: int, programs: int, groups: Any) -> None:
    """One group is more than a tile, others are less, and some rows of the first share a second segment; some rows are
    in none, and tails go round the odd lengths."""
    rows = sum(size for size, _ in groups) + 3
    problem = Problem(heads, groups, (ODD_TAILS * 3)[:rows], deeper=2)
    grouped = make(heads, programs)
    grouped.plan(problem.segments, rows)
    problem.check(problem.run(grouped))
    assert (int(grouped._segment_partials.counts.max()) > 2) == (programs > 1), "splits of the segments"


@pytest.mark.parametrize(
    ("heads", "queries", "programs"),
    [
        *((8, 2, 1), (8, 3, 7), (16, 2, 7), (16, 4, 3)),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((16, 5, 3), (32, 3, 7))),
    ],
)
def test_query_tokens_of_a_request(heads: int, queries: int, programs: int) -> None:
    """Rows like others over segments; over the tail they see one key after the other, some of them none."""
    tails = (*ODD_TAILS, 1, 64 + queries - 1, queries)
    problem = Problem(heads, ((3, 128), (2, 64)), tails, deeper=2, queries=queries)
    grouped = make(heads, programs, queries)
    grouped.plan(problem.segments, len(tails))
    out, lse = problem.run(grouped)
    problem.check((out, lse))
    without = torch.arange(queries).flip(0) >= problem.seq_lens[:, None]  # [requests, query tokens]
    assert without.any() and torch.equal(lse.isneginf().all(dim=1), without.flatten())
    assert torch.equal((out == 0).all(dim=2).all(dim=1), without.flatten())


@pytest.mark.parametrize(
    ("groups", "tails"),
    [((), ODD_TAILS), ((), (0, 0)), (((3, 128), (2, 64)), (0,) * 5)],
    ids=["no groups", "no keys", "no tails"],
)
def test_steps_that_lack_a_half(groups: Any, tails: tuple[int, ...]) -> None:
    problem, grouped = Problem(16, groups, tails), make(16)
    grouped.plan(problem.segments, len(tails))
    out, lse = problem.run(grouped)
    problem.check((out, lse))
    without = problem.seq_lens == 0
    assert (out[without] == 0).all() and (lse[without] == -torch.inf).all()


def test_an_empty_batch() -> None:
    grouped = make(16)
    grouped.plan([], 0)
    nothing = torch.zeros(0, dtype=torch.long)
    grouped.begin_step(torch.zeros(1, 1, dtype=torch.int32), nothing, nothing, torch.zeros(0, dtype=torch.int32))
    out, lse = grouped.run(*parts_of(torch.zeros(0, 16, RANK + ROPE)), poisoned_pool(PAGE, LAYOUT), SOFTMAX_SCALE)
    assert out.shape == (0, 16, RANK) and lse.shape == (0, 16)


def test_later_steps_follow_plans_rows_and_lengths() -> None:
    """Other rows, other groups, none at all, and other tails under one plan: nothing of an earlier step is left, and
    what a captured graph would read stays where it is."""
    grouped = make(16)
    places = {name: value.data_ptr() for name, value in tensors_of(grouped).items()}
    for groups, tails in (
        (((5, 128), (2, 64)), (130, 1, 64, 0, 65, 63, 128, 2)),
        (((2, 64),), (70, 3)),
        ((), (65, 0, 130)),
        (((1, 64), (3, 128)), (1, 64, 0, 65)),
    ):
        problem = Problem(16, groups, tails)
        grouped.plan(problem.segments, len(tails))
        for _ in range(2):
            problem.check(problem.run(grouped))
            problem.shorten()
    assert {name: value.data_ptr() for name, value in tensors_of(grouped).items()} == places
    assert grouped.workspace_bytes == sum(value.nbytes for value in tensors_of(grouped).values())


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_partials_of_both_lists_have_room_in_the_same_tensors(heads: int) -> None:
    """As many of either as there can ever be."""
    for programs, queries in itertools.product((8, 132), (1, 3, 8)):
        grouped = make(heads, programs, queries)
        segments, tails = grouped._capacity, grouped._tail_capacity
        assert tails.max_segment_partials == segments.max_segment_partials
        assert len(grouped._partial_out) == segments.max_partial_rows == tails.max_partial_rows
        tiles = -(-heads * queries // 64)
        assert tails.max_tail_partials == segments.max_tail_partials == MAX_ROWS + -(-2 * programs // tiles)
        sizes = dict(max_rows=MAX_ROWS * queries, max_tokens=MAX_TOKENS, programs=programs, dtype=torch.float32)
        dims = dict(heads=heads, query_tokens=queries, kv_lora_rank=RANK, qk_rope_head_dim=ROPE)
        assert dispatch.grouped_absorb_bytes(fp8=True, **sizes, **dims) == grouped.workspace_bytes


def test_a_query_that_was_not_planned_is_refused() -> None:
    grouped = make(16)
    grouped.plan([], 8)
    with pytest.raises(ValueError, match="planned for 8 rows of 16 heads"):
        grouped.run(*parts_of(torch.zeros(4, 16, RANK + ROPE)), poisoned_pool(PAGE, LAYOUT), SOFTMAX_SCALE)


def make_by_dispatch(problem: Problem, failures: list[str]) -> Any:
    table = problem.req_to_token.clone()
    row = problem.seq_lens.tolist().index(PAGE + 1)  # as many tokens as the try-out has
    table[0] = table[problem.pool_indices[row]]
    return dispatch.make_grouped_absorb_fp8(
        table,
        problem.pool,
        heads=16,
        layout=LAYOUT,
        dtype=torch.float32,
        on_failure=lambda error: failures.append(str(error)),
        max_rows=MAX_ROWS,
        max_tokens=MAX_TOKENS,
    )


def test_where_the_kernels_do_not_run_there_is_no_grouped_absorb(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is another one, or a kernel fails; where they run, both have been tried out."""
    problem, failures, tried = Problem(16, ((5, 128), (2, 64)), (65, 1, 1, 0, 1, 63, 2, 1)), [], []
    assert make_by_dispatch(problem, failures) is None and not failures
    properties = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(sm90_fp8_absorb, "supports", lambda *_: True)
    for kernel in (sm90_fp8_absorb, sm90_fp8_few_heads):
        run = kernel.run
        spy = lambda *args, run=run, kernel=kernel, **scale: (tried.append(kernel), run(*args, **scale))  # noqa: E731
        monkeypatch.setattr(kernel, "run", spy)
    grouped = make_by_dispatch(problem, failures)
    assert not failures and tried == [sm90_fp8_absorb, sm90_fp8_few_heads]
    grouped._table.fill_(NOWHERE)
    grouped.plan(problem.segments, 8)
    problem.check(problem.run(grouped))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(sm90_fp8_few_heads, "run", fail)
    assert make_by_dispatch(problem, failures) is None
    assert failures == ["out of shared memory"]

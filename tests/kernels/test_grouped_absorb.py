"""Grouped absorb without its kernel: which query rows attend to which keys, merged into which row.

A stand-in in torch takes the arguments of the BF16 kernel as it does, and checks what that asks of them; page tables,
the schedule of the tails and the merge run in Triton's interpreter. Float32; whatever must not be read is NaN. Bound:
1e-5 in relative L2, float32 over 300 keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_mla_ext.kernels import dispatch
from sglang_mla_ext.kernels.absorb import sm90_bf16_absorb
from sglang_mla_ext.kernels.absorb.grouped import HopperGroupedAbsorb
from sglang_mla_ext.kernels.absorb.items import ITEM_FIELDS
from sglang_mla_ext.kernels.absorb.schedule import AbsorbCapacity
from sglang_mla_ext.kernels.absorb.stacking import rows_per_tile
from sglang_mla_ext.kernels.memory import Memory
from sglang_mla_ext.kernels.merge import LN2
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.segment import Mode, Segment

NAN = float("nan")
RANK, ROPE, PAGE, SCALE = 32, 16, 64, 0.25
MAX_ROWS, MAX_TOKENS = 40, 600
PROGRAMS = 9  # few, so that tails stay whole, and enough that segments are cut
NOWHERE = 1 << 30

Result = tuple[torch.Tensor, torch.Tensor]
Segments = Sequence[tuple[tuple[int, ...], int, int]]


def run_absorb_kernel(
    q_absorbed: torch.Tensor,
    q_rope: torch.Tensor,
    latent_pages: torch.Tensor,
    work: torch.Tensor,
    page_table: torch.Tensor,
    capacity: AbsorbCapacity,
    partial_out: torch.Tensor,
    partial_lse2: torch.Tensor,
    *,
    softmax_scale: float,
) -> None:
    """What sm90_bf16_absorb.run does: every item of the list, one after the other."""
    q = torch.cat([q_absorbed, q_rope], dim=-1)
    assert page_table.is_contiguous() and work.shape == (capacity.size,)
    assert latent_pages.shape[1:] == (PAGE, 1, RANK + ROPE)
    assert partial_out.shape == (capacity.max_partial_rows, capacity.heads, RANK)
    assert q.shape[1] * capacity.query_tokens == capacity.heads and not q.isnan().any()  # also where a head is nobody's
    out, lse2 = partial_out.view(-1, RANK), partial_lse2.view(-1)
    out.fill_(NAN)  # no layer may use what the one before left
    lse2.fill_(NAN)
    fields = ITEM_FIELDS.value
    items = work[capacity.first_item :][: fields * int(work[0])].view(-1, fields)
    for strips, n_rows, begin, end, first_page, partial, last, first_row in items.tolist():
        runs = work[strips : strips + -(-n_rows // capacity.strip_rows)]
        rows = (runs[:, None] + torch.arange(capacity.strip_rows)).flatten()[:n_rows].long()
        pages = page_table.flatten()[first_page:][begin // PAGE : -(-end // PAGE)].long()
        keys = latent_pages[pages].flatten(0, 2).expand(n_rows, -1, -1)
        queries = q.view(-1, 1, RANK + ROPE)[rows].split([RANK, ROPE], dim=-1)
        unseen = last * (capacity.query_tokens - 1 - (first_row + torch.arange(n_rows)) // q.shape[1])
        one, one_lse = reference.absorb(*queries, keys, (end - begin - unseen).clamp(min=0), softmax_scale)
        out[partial : partial + n_rows], lse2[partial : partial + n_rows] = one[:, 0], one_lse[:, 0] / LN2


@pytest.fixture(autouse=True)
def kernel_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90_bf16_absorb, "run", run_absorb_kernel)


class Problem:
    """A paged latent cache, and requests that begin with the same pages where they share segments."""

    def __init__(self, heads: int, segments: Segments, rows: int, queries: int = 1) -> None:
        """
        Args:
            segments: requests, first and last token of each, parents before their children, whose requests hold them.
            rows: requests of the step; queries: query tokens of each.
        """
        self.generator, self.queries = torch.Generator().manual_seed(rows + heads), queries
        self.segments = [Segment(*segment, mode=Mode.GROUPED_ABSORB) for segment in segments]
        paths: dict[int, list[int]] = {row: [] for row in range(rows)}  # pages of each row's segments
        # Requests stand anywhere in the table of slots. Page 0 belongs to none of them.
        free = (torch.randperm(6 * rows + 40, generator=self.generator) + 1).tolist()
        for segment in self.segments:
            pages = [free.pop() for _ in range((segment.end - segment.start) // PAGE)]
            for row in segment.rows:
                assert len(paths[row]) * PAGE == segment.start
                paths[row] += pages
        self.tail_starts = torch.zeros(MAX_ROWS, dtype=torch.int32)
        self.tail_starts[:rows] = torch.tensor([len(paths[row]) * PAGE for row in range(rows)])
        tails = torch.randint(0, 150, (rows,), generator=self.generator)
        if queries > 1:  # tails that not all query tokens see, and such that end with a page somewhere among them
            short = [0, 1, queries - 1, queries, *(PAGE + more for more in range(queries)), 2 * PAGE][:rows]
            tails[: len(short)] = torch.tensor(short)
        self.seq_lens = tails + self.tail_starts[:rows]
        self.pool_indices = torch.randperm(MAX_ROWS + 5, generator=self.generator)[:rows]
        self.req_to_token = torch.full((MAX_ROWS + 5, MAX_TOKENS), -1, dtype=torch.int32)
        self.cache = torch.full((len(free) + 1 + sum(map(len, paths.values())), PAGE, 1, RANK + ROPE), NAN)
        for row, length in enumerate(self.seq_lens.tolist()):
            pages = paths[row] + [free.pop() for _ in range(-(-length // PAGE) - len(paths[row]))]
            slots = (torch.tensor(pages, dtype=torch.long)[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
            self.req_to_token[self.pool_indices[row], :length] = slots.int()
            self.cache.view(-1, RANK + ROPE)[slots] = self.randn(length, RANK + ROPE)
        self.q = self.randn(rows * queries, heads, RANK + ROPE)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def expected(self) -> Result:
        longest = int(self.seq_lens.max())
        slots = self.req_to_token[self.pool_indices, :longest].long()
        keys = self.cache.view(-1, RANK + ROPE).double()[slots].repeat_interleave(self.queries, 0)
        unseen = torch.arange(self.queries).flip(0)
        seen = (self.seq_lens[:, None] - unseen).maximum(self.tail_starts[: len(slots), None])  # the last ones of tails
        return reference.absorb(self.q[..., :RANK], self.q[..., RANK:], keys, seen.flatten(), SCALE)

    def run(self, grouped: Any) -> Result:
        grouped.begin_step(self.req_to_token, self.pool_indices, self.seq_lens, self.tail_starts)
        return grouped.run(self.q[..., :RANK], self.q[..., RANK:], self.cache, SCALE)


def assert_equal(actual: Result, expected: Result) -> None:
    for name, a, b in zip(("out", "lse"), actual, expected, strict=True):
        assert reference.errors(a, b).rel_l2 < 1e-5, name


def make(heads: int, **sizes: Any) -> HopperGroupedAbsorb:
    defaults: dict[str, Any] = dict(max_rows=MAX_ROWS, max_tokens=MAX_TOKENS, programs=PROGRAMS)
    dims = dict(kv_lora_rank=RANK, qk_rope_head_dim=ROPE)
    grouped = HopperGroupedAbsorb(heads=heads, dtype=torch.float32, device="cpu", **dims, **{**defaults, **sizes})
    grouped._table.fill_(NOWHERE)
    return grouped


SCATTERED = tuple(torch.randperm(30, generator=torch.Generator().manual_seed(1)).tolist())


def odd_segments(sizes: tuple[int, ...] = (5, 20, 3)) -> Segments:
    """Segments of so many rows, which are all over the batch; two rows are in none."""
    segments, first = [], 0
    for size, end in zip(sizes, (256, 320, 64), strict=True):
        segments.append((tuple(sorted(SCATTERED[first : first + size])), 0, end))
        first += size
    return segments


def nested_segments() -> Segments:
    """A tree: rows in one, two and three segments, of which none begins where its page table does but the first."""
    rows = SCATTERED
    return [
        (tuple(rows[:14]), 0, 128),
        (tuple(rows[3:9]), 128, 320),
        (tuple(rows[10:13]), 128, 192),
        (tuple(sorted(rows[5:8])), 320, 384),
        (tuple(rows[20:25]), 0, 64),
        ((rows[23], rows[21]), 64, 192),
    ]


@pytest.mark.parametrize("tail_tokens", [0, 1 << 20], ids=["not known", "too many"])
@pytest.mark.parametrize("heads", [3, 12, 32])
def test_every_row_attends_to_its_prefix_and_its_tail(heads: int, tail_tokens: int) -> None:
    """The lengths of tails that a plan assumes change nothing."""
    problem = Problem(heads, odd_segments(), rows=30)
    grouped = make(heads)
    grouped.plan(problem.segments, 30, tail_tokens)
    assert_equal(problem.run(grouped), problem.expected())


@pytest.mark.parametrize(
    ("heads", "queries", "programs"),
    [(8, 7, 9), (16, 5, 40), (6, 5, 9), (32, 3, 9)],
)
def test_query_tokens_of_a_request(heads: int, queries: int, programs: int) -> None:
    """Over segments they are rows like others; over the tail they see one key after the other. Requests and query
    tokens that do not fill their last tile, and rows that see no key at all."""
    segments = [((7, 3, 2, 6), 0, 128), ((2, 3), 128, 192), ((5, 8), 0, 64)]
    problem = Problem(heads, segments, 9, queries)
    sizes = dict(max_rows=12 * queries + 1, max_segment_rows=8 * queries)
    grouped = make(heads, query_tokens=queries, programs=programs, **sizes)
    grouped.plan(problem.segments, 9)
    for _ in range(2):
        actual, expected = problem.run(grouped), problem.expected()
        assert_equal(actual, expected)
        assert torch.equal(actual[1].isneginf(), expected[1].isneginf())
        problem.seq_lens = (problem.seq_lens - 3).clamp(min=problem.tail_starts[:9])
    assert expected[1].isneginf().any()
    grouped.plan([], 9)
    problem.tail_starts.zero_()
    assert_equal(problem.run(grouped), problem.expected())


def test_few_query_tokens_of_long_tails_are_cut() -> None:
    """Two requests of three tiles each on twelve programs: their query tokens see different ends of a piece."""
    problem = Problem(16, [], rows=2, queries=9)
    problem.seq_lens = torch.tensor([550, 515])  # the last keys are in two blocks
    slots = (torch.randperm(18)[:, None] * PAGE + torch.arange(PAGE)).view(2, -1).int()
    problem.req_to_token[problem.pool_indices, : slots.shape[1]] = slots
    problem.cache = problem.randn(18, PAGE, 1, RANK + ROPE)
    grouped = make(16, query_tokens=9, programs=12)
    grouped.plan([], 2)
    assert_equal(problem.run(grouped), problem.expected())
    assert grouped._tail_partials.counts[:2].tolist() == [2, 2]


@pytest.mark.parametrize("programs", [3, 30], ids=["whole", "cut"])
def test_a_row_may_be_in_several_segments(programs: int) -> None:
    """Segments of a tree start behind their parents; the leader's pages are read from there on."""
    problem = Problem(16, nested_segments(), rows=30)
    grouped = make(16, programs=programs, max_segment_rows=2 * MAX_ROWS)
    grouped.plan(problem.segments, 30)
    assert_equal(problem.run(grouped), problem.expected())
    counts = grouped._segment_partials.counts[list(SCATTERED[:14])]
    assert counts[0] >= 1 and counts[3] >= 2 and counts[5] >= 3 and (programs == 30) == (counts[5] > 3)
    # In any subset of them, as long as tails begin behind what is left out: other depths of the same tree.
    grouped.plan(problem.segments[:1] + problem.segments[4:], 30)
    problem.tail_starts[list(SCATTERED[:14])] = 128
    assert_equal(problem.run(grouped), problem.expected())


def test_later_steps_follow_plans_rows_and_lengths() -> None:
    """Other rows, other segments, none at all, and other tails under one plan: nothing of an earlier step is left."""
    grouped = make(8)
    for segments, rows in (
        (odd_segments(), 30),
        ([((0, 1), 0, 128)], 2),
        ([((0, 2, 3, 5, 7), 0, 64), ((1, 4), 0, 256)], 8),
        ([], 8),
        (nested_segments(), 30),
        ([((1, 2, 3), 0, 384)], 6),
    ):
        problem = Problem(8, segments, rows)
        grouped.plan(problem.segments, rows)
        for _ in range(2):
            assert_equal(problem.run(grouped), problem.expected())
            problem.seq_lens = (problem.seq_lens - 1).clamp(min=problem.tail_starts[:rows])


def tensors_of(grouped: Any) -> dict[str, torch.Tensor]:
    """What an object has allocated, by name; tables by their memory."""
    found = {name: getattr(value, "buffer", value) for name, value in vars(grouped).items()}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("queries", [1, 4])
def test_memory_is_static_and_known_beforehand(queries: int) -> None:
    """What a captured graph would read stays where it is."""
    limits: dict[str, Any] = dict(max_rows=MAX_ROWS * queries, max_tokens=MAX_TOKENS, query_tokens=queries)
    grouped = make(16, **limits)
    before = {name: value.data_ptr() for name, value in tensors_of(grouped).items()}
    for segments, rows in (([((0, 1), 0, 128)], 2), ([((1, 2, 3), 0, 256), ((4, 5), 0, 64)], 8)):
        problem = Problem(16, segments, rows, queries)
        grouped.plan(problem.segments, rows)
        problem.run(grouped)
    assert before == {name: value.data_ptr() for name, value in tensors_of(grouped).items()}
    sizes = {value.data_ptr(): value.nbytes for value in tensors_of(grouped).values()}
    assert grouped.workspace_bytes == sum(sizes.values())
    limits |= dict(heads=16, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, dtype=torch.float32, programs=PROGRAMS)
    assert dispatch.grouped_absorb_bytes(fp8=False, **limits) == grouped.workspace_bytes


def test_partials_and_page_tables_may_be_lost_between_two_steps() -> None:
    """As when a server sleeps: the plan, whose lists hold constants, lies elsewhere."""
    memory = Memory()
    grouped = make(16, memory=memory)
    problem = Problem(16, [((7, 3, 2, 6), 0, 128), ((5, 8), 0, 64)], rows=9)
    grouped.plan(problem.segments, 9)
    problem.run(grouped)
    lost = grouped._table, grouped._partial_out, grouped._partial_lse2
    assert memory.bytes == sum(tensor.nbytes for tensor in lost) > 0.9 * grouped.workspace_bytes
    for tensor in lost:
        tensor.view(torch.uint8).fill_(0xFF)
    memory.clear()
    assert not any(tensor.any() for tensor in lost)
    assert_equal(problem.run(grouped), problem.expected())


def test_which_numbers_of_heads_are_stacked() -> None:
    found = {heads: rows_per_tile(heads) for heads in (3, 6, 8, 12, 16, 20, 24, 32, 48, 64, 128)}
    assert found == {3: 8, 6: 8, 8: 8, 12: 4, 16: 4, 20: 2, 24: 2, 32: 2, 48: None, 64: None, 128: None}


def test_few_long_tails_are_cut() -> None:
    """Also that of a request in a segment: three tails for nine programs, two of several pages and one empty."""
    problem = Problem(16, [((0, 1), 0, 64)], rows=3)
    problem.seq_lens = torch.tensor([64, 64 + 290, 280])
    problem.req_to_token[problem.pool_indices, : problem.req_to_token.shape[1]] = -1
    slots = torch.randperm(12, generator=problem.generator)[:, None] * PAGE + torch.arange(PAGE)
    prefix, first, second = slots[:1], slots[1:6], slots[6:11]
    for row, own in enumerate((prefix, torch.cat([prefix, first]), second)):
        length = int(problem.seq_lens[row])
        problem.req_to_token[problem.pool_indices[row], :length] = own.flatten()[:length].int()
    problem.cache = problem.randn(12, PAGE, 1, RANK + ROPE)
    grouped = make(16)
    grouped.plan(problem.segments, 3)
    assert_equal(problem.run(grouped), problem.expected())
    assert grouped._tail_partials.counts[:3].tolist() == [0, 2, 2]


def test_the_parts_of_a_query_may_be_apart() -> None:
    problem, grouped = Problem(16, [((0, 2), 0, 64)], rows=4), make(16)
    grouped.plan(problem.segments, 4)
    content, rope = problem.q.split([RANK, ROPE], dim=-1)
    with_heads_outside = content.transpose(0, 1).contiguous().transpose(0, 1)  # as SGLang's batched product leaves it
    for apart in ((content.clone(), rope), (with_heads_outside, rope.clone()), (content, rope.clone())):
        grouped.begin_step(problem.req_to_token, problem.pool_indices, problem.seq_lens, problem.tail_starts)
        assert_equal(grouped.run(*apart, problem.cache, SCALE), problem.expected())


def test_where_the_kernel_does_not_run_there_is_no_grouped_absorb(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is another one, or the kernel fails; where it runs, it has been tried out."""
    failures, launches = [], []
    problem = Problem(16, [], rows=1)

    def make_one() -> Any:
        table = torch.zeros_like(problem.req_to_token)
        sizes: dict[str, Any] = dict(max_rows=4, max_tokens=MAX_TOKENS, kv_lora_rank=RANK, heads=16)
        on_failure = lambda error: failures.append(str(error))  # noqa: E731
        return dispatch.make_grouped_absorb(table, torch.zeros(1, PAGE, 1, RANK + ROPE), on_failure=on_failure, **sizes)

    assert make_one() is None and not failures
    monkeypatch.setattr(sm90_bf16_absorb, "supports", lambda *args, **dims: True)
    properties = SimpleNamespace(multi_processor_count=PROGRAMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def count(*args: Any, **options: Any) -> None:
        launches.append(int(args[3][0]))
        run_absorb_kernel(*args, **options)

    monkeypatch.setattr(sm90_bf16_absorb, "run", count)
    assert isinstance(make_one(), HopperGroupedAbsorb) and not failures
    assert launches == [2], "an item of a segment and one of a tail"

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(sm90_bf16_absorb, "run", fail)
    assert make_one() is None
    assert failures == ["no such instruction"]


def test_what_does_not_fit_is_refused() -> None:
    grouped = make(16)
    for segments, rows, message in (
        ([((0, 1), 0, 100)], 2, "does not begin and end with a page"),
        ([((0, 1), 100, 192)], 2, "does not begin and end with a page"),
        ([((0, 1), 128, 128)], 2, "needs rows and keys"),
        ([((), 0, 128)], 2, "needs rows and keys"),
        ([((0, MAX_ROWS), 0, 64)], 8, "requests beyond the 8 of"),
        ([((0, 8), 0, 64)], 8, "requests beyond the 8 of"),
        ([((0, -1), 0, 64)], 8, "every row must be in"),
        ([((0, 3, 0), 0, 64)], 8, "once in a segment"),
        ([((0, 1), 0, 64 * 13)], 8, "832 tokens; there is room for 768"),
        ([((row,), 0, 64) for row in range(19)], 40, "19 segments; there is room for 18"),
        ([(tuple(range(30)), 0, 64), (tuple(range(11)), 64, 128)], 30, "41 rows, but there is room for 40"),
        ([], MAX_ROWS + 1, "41 requests; there is room for 40"),
    ):
        with pytest.raises(ValueError, match=message):
            grouped.plan([Segment(*segment, mode=Mode.GROUPED_ABSORB) for segment in segments], rows)
    three = make(16, query_tokens=3)
    with pytest.raises(ValueError, match="14 requests; there is room for 13"):
        three.plan([], 14)
    grouped.plan([], 8)
    with pytest.raises(ValueError, match="planned for 8 rows of 16 heads"):
        q = torch.zeros(4, 16, RANK + ROPE)
        grouped.run(q[..., :RANK], q[..., RANK:], torch.zeros(1, PAGE, 1, RANK + ROPE), SCALE)

"""Grouped absorb without its kernels: which query rows attend to which keys, merged into which row.

Stand-ins in torch take the arguments of FlashMLA and of the absorb kernel as these do, and check what they ask of them;
the merge and the tails' schedule run in Triton's interpreter. Float32; whatever nobody may read is NaN. Bound: 1e-5 in
relative L2, float32 over 300 keys.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from sglang_mla_ext.kernels.merge import LN2
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.prefix.cost_model import Mode
from sglang_mla_ext.prefix.planner import SPARE_ENTRIES, Group, Stacking

# Like conftest.py: the kernel is bound to the interpreter when it is imported.
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")
    from sglang_mla_ext.kernels.absorb.schedule import AbsorbCapacity
    from sglang_mla_ext.kernels.absorb.tail_schedule import schedule_tails_kernel
assert isinstance(schedule_tails_kernel, interpreter.InterpretedFunction), "run `pytest tests/kernels` on its own"

NAN = float("nan")
RANK, ROPE, PAGE, SCALE = 32, 16, 64, 0.25
MAX_ROWS, MAX_TOKENS = 40, 600
PROGRAMS = 9  # of the absorb kernel: few, so that tails stay whole, and enough that prefixes are cut
KINDS = ("HopperGroupedAbsorb", "FlashMLAGroupedAbsorb")


def get_mla_metadata(lens: torch.Tensor, query_rows: int, key_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    assert lens.dtype == torch.int32 and lens.is_contiguous() and (query_rows, key_heads) == (64, 1)
    return torch.full((3, 8), len(lens), dtype=torch.int32), torch.arange(len(lens) + 1, dtype=torch.int32)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    entries, _, query_rows, _ = q.shape
    assert q.shape == (entries, 1, 64, RANK + ROPE) and q.is_contiguous()
    assert k_cache.shape[1:] == (PAGE, 1, RANK + ROPE)
    assert block_table.dtype == cache_seqlens.dtype == torch.int32 and cache_seqlens.is_contiguous()
    assert len(block_table) == len(cache_seqlens) == len(num_splits) - 1 == entries
    assert (tile_scheduler_metadata == entries).all(), "the schedule of another step"
    out = torch.full((entries, 1, query_rows, head_dim_v), NAN)
    lse = torch.full((entries, query_rows, 1), torch.inf)
    for entry, length in enumerate(cache_seqlens.tolist()):
        pages = block_table[entry, : -(-length // PAGE) or 1].long()  # FlashMLA loads one page at least
        assert pages.min() >= 0 and pages.max() < len(k_cache)
        if length:
            keys = k_cache[pages].flatten(0, 2)[None]  # [1, tokens, RANK + ROPE]
            queries = q[entry].split([RANK, ROPE], dim=-1)
            out[entry], one = reference.absorb(*queries, keys, torch.tensor([length]), softmax_scale)
            lse[entry] = one.T
    return out, lse


def run_absorb_kernel(
    q: torch.Tensor,
    latent_pages: torch.Tensor,
    work: torch.Tensor,
    page_table: torch.Tensor,
    capacity: AbsorbCapacity,
    partial_out: torch.Tensor,
    partial_lse2: torch.Tensor,
    *,
    softmax_scale: float,
) -> None:
    """What absorb_hopper.run does: every item of the list, one after the other."""
    assert q.is_contiguous() and page_table.is_contiguous() and work.shape == (capacity.size,)
    assert latent_pages.shape[1:] == (PAGE, 1, RANK + ROPE)
    assert partial_out.shape == (capacity.max_partial_rows, q.shape[1], RANK) and q.shape[1] == capacity.heads
    out, lse2 = partial_out.view(-1, RANK), partial_lse2.view(-1)
    out.fill_(NAN)  # no layer may use what the one before left
    lse2.fill_(NAN)
    items = work[capacity.first_item :][: 8 * int(work[0])].view(-1, 8)
    for segments, n_rows, begin, end, first_page, partial, *_ in items.tolist():
        runs = work[segments : segments + -(-n_rows // capacity.segment)]
        rows = (runs[:, None] + torch.arange(capacity.segment)).flatten()[:n_rows].long()
        pages = page_table.flatten()[first_page:][begin // PAGE : -(-end // PAGE)].long()
        keys = latent_pages[pages].flatten(0, 2)[None]
        queries = q.view(1, -1, RANK + ROPE)[:, rows].split([RANK, ROPE], dim=-1)
        one, one_lse = reference.absorb(*queries, keys, torch.tensor([end - begin]), softmax_scale)
        out[partial : partial + n_rows], lse2[partial : partial + n_rows] = one[0], one_lse[0] / LN2


def fill_page_table(
    table: torch.Tensor,
    req_to_token: torch.Tensor,
    pool_indices: torch.Tensor,
    lens: torch.Tensor,
    starts: torch.Tensor | None,
) -> None:
    """SGLang's Triton kernel in torch."""
    for row, (request, length) in enumerate(zip(pool_indices.tolist(), lens.tolist(), strict=True)):
        start = 0 if starts is None else int(starts[row])
        pages = req_to_token[request, start : start + length : PAGE] // PAGE
        table[row, : len(pages)] = pages


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    """`kernels.absorb.grouped`, bound to the stand-ins."""
    stand_in = ModuleType("sgl_kernel.flash_mla")
    stand_in.get_mla_metadata, stand_in.flash_mla_with_kvcache = get_mla_metadata, flash_mla_with_kvcache
    with pytest.MonkeyPatch.context() as patch:
        if "sgl_kernel" not in sys.modules:
            patch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
        patch.setitem(sys.modules, "sgl_kernel.flash_mla", stand_in)
        names = "sglang_mla_ext.kernels.absorb.grouped", "sglang_mla_ext.adapter.grouped_absorb_flashmla"
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        module, of_flashmla = map(importlib.import_module, names)
        module.FlashMLAGroupedAbsorb = of_flashmla.FlashMLAGroupedAbsorb
        patch.setattr(module, "fill_page_table", fill_page_table)
        patch.setattr(module.absorb_hopper, "run", run_absorb_kernel)
        yield module
        for name in names:
            del sys.modules[name]


class Problem:
    """A paged latent cache, and requests of which some begin with the same pages."""

    def __init__(self, heads: int, groups: list[tuple[tuple[int, ...], int]], rows: int) -> None:
        """
        Args:
            groups: rows and tokens of the prefix of each.
            rows: of the step.
        """
        self.generator = torch.Generator().manual_seed(rows + heads)
        self.groups = [Group(members, None, 0, end, Mode.GROUPED_ABSORB) for members, end in groups]
        prefix_of = {row: group for group in self.groups for row in group.rows}
        self.prefix_lens = torch.zeros(MAX_ROWS, dtype=torch.int32)
        for row, group in prefix_of.items():
            self.prefix_lens[row] = group.end
        tails = torch.randint(0, 150, (rows,), generator=self.generator)
        self.seq_lens = tails + self.prefix_lens[:rows]
        # Requests stand anywhere in SGLang's table. Page 0 is nobody's.
        self.pool_indices = torch.randperm(MAX_ROWS + 5, generator=self.generator)[:rows]
        free = (torch.randperm(6 * rows + 40, generator=self.generator) + 1).tolist()
        self.req_to_token = torch.full((MAX_ROWS + 5, MAX_TOKENS), -1, dtype=torch.int32)
        self.cache = torch.full((len(free) + 1, PAGE, 1, RANK + ROPE), NAN)
        prefix_pages = {group: [free.pop() for _ in range(group.end // PAGE)] for group in self.groups}
        for row, length in enumerate(self.seq_lens.tolist()):
            pages = prefix_pages[prefix_of[row]] if row in prefix_of else []
            pages = pages + [free.pop() for _ in range(-(-length // PAGE) - len(pages))]
            slots = (torch.tensor(pages, dtype=torch.long)[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
            self.req_to_token[self.pool_indices[row], :length] = slots.int()
            self.cache.view(-1, RANK + ROPE)[slots] = self.randn(length, RANK + ROPE)
        self.q = self.randn(rows, heads, RANK + ROPE)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        longest = int(self.seq_lens.max())
        slots = self.req_to_token[self.pool_indices, :longest].long()
        keys = self.cache.view(-1, RANK + ROPE).double()[slots]
        return reference.absorb(self.q[..., :RANK], self.q[..., RANK:], keys, self.seq_lens, SCALE)

    def run(self, grouped: Any) -> tuple[torch.Tensor, torch.Tensor]:
        grouped.prepare(self.req_to_token, self.pool_indices, self.seq_lens, self.prefix_lens)
        return grouped.run(self.q, self.cache, SCALE)


def assert_equal(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for name, a, b in zip(("out", "lse"), actual, expected, strict=True):
        assert reference.errors(a, b).rel_l2 < 1e-5, name


def make(module: Any, heads: int, kind: str) -> Any:
    return getattr(module, kind)(
        module.stacking_for(heads),
        max_rows=MAX_ROWS,
        max_tokens=MAX_TOKENS,
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE,
        dtype=torch.float32,
        device="cpu",
        **({"programs": PROGRAMS} if kind == "HopperGroupedAbsorb" else {}),
    )


SCATTERED = tuple(torch.randperm(30, generator=torch.Generator().manual_seed(1)).tolist())


def odd_groups(sizes: tuple[int, ...] = (5, 20, 3)) -> list[tuple[tuple[int, ...], int]]:
    """Groups of these sizes, their rows all over the batch, two rows left alone."""
    groups, first = [], 0
    for size, end in zip(sizes, (256, 320, 64), strict=True):
        groups.append((tuple(sorted(SCATTERED[first : first + size])), end))
        first += size
    return groups


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [8, 16, 32])
def test_every_row_attends_to_its_prefix_and_its_tail(module: Any, heads: int, kind: str) -> None:
    problem = Problem(heads, odd_groups(), rows=30)
    grouped = make(module, heads, kind)
    grouped.plan(problem.groups, 30)
    assert_equal(problem.run(grouped), problem.expected())


@pytest.mark.parametrize("kind", KINDS)
def test_later_steps_follow_plans_rows_and_lengths(module: Any, kind: str) -> None:
    """Other rows, other groups, none at all, and other tails under one plan: nothing of an earlier step is left."""
    grouped = make(module, 8, kind)
    for groups, rows in (
        (odd_groups(), 40),
        ([((0, 1), 128)], 2),
        ([((0, 2, 3, 5, 7), 64), ((1, 4), 256)], 8),
        ([], 8),
        (odd_groups(), 30),
        ([((1, 2, 3), 384)], 6),
    ):
        problem = Problem(8, groups, rows)
        grouped.plan(problem.groups, rows)
        for _ in range(2):
            assert_equal(problem.run(grouped), problem.expected())
            problem.seq_lens = (problem.seq_lens - 1).clamp(min=problem.prefix_lens[:rows])


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_static(module: Any, kind: str) -> None:
    """What a captured graph would read stays where it is."""
    grouped = make(module, 16, kind)
    before = {name: value.data_ptr() for name, value in vars(grouped).items() if isinstance(value, torch.Tensor)}
    for groups, rows in (([((0, 1), 128)], 2), (odd_groups(), 30)):
        problem = Problem(16, groups, rows)
        grouped.plan(problem.groups, rows)
        problem.run(grouped)
    assert before == {
        name: value.data_ptr() for name, value in vars(grouped).items() if isinstance(value, torch.Tensor)
    }
    sizes = [value.nbytes for value in vars(grouped).values() if isinstance(value, torch.Tensor)]
    assert grouped.workspace_bytes == sum(sizes)


def test_which_numbers_of_heads(module: Any) -> None:
    stackings = {heads: module.stacking_for(heads) for heads in (1, 4, 8, 16, 20, 32, 64, 128)}
    assert {heads: s.rows_per_entry for heads, s in stackings.items() if s} == {8: 8, 16: 4, 32: 2}
    assert stackings[16] == Stacking(PAGE, 4)


def test_few_long_tails_are_cut(module: Any) -> None:
    """Also that of a request in a group: three tails for nine programs, two of several pages and one empty."""
    problem = Problem(16, [((0, 1), 64)], rows=3)
    problem.seq_lens = torch.tensor([64, 64 + 290, 280])
    problem.req_to_token[problem.pool_indices, : problem.req_to_token.shape[1]] = -1
    slots = torch.randperm(12, generator=problem.generator)[:, None] * PAGE + torch.arange(PAGE)
    prefix, first, second = slots[:1], slots[1:6], slots[6:11]
    for row, own in enumerate((prefix, torch.cat([prefix, first]), second)):
        length = int(problem.seq_lens[row])
        problem.req_to_token[problem.pool_indices[row], :length] = own.flatten()[:length].int()
    problem.cache = problem.randn(12, PAGE, 1, RANK + ROPE)
    grouped = make(module, 16, "HopperGroupedAbsorb")
    grouped.plan(problem.groups, 3)
    assert_equal(problem.run(grouped), problem.expected())
    splits = grouped._tail_partials[8 + 3 * MAX_ROWS :][:3]
    assert splits.tolist() == [0, 2, 2]


def test_which_way_is_taken(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The absorb kernel where it runs, FlashMLA where the GPU is another one or the kernel fails."""
    failures = []
    problem = Problem(16, [], rows=1)

    def make_one() -> str:
        table = torch.zeros_like(problem.req_to_token)
        sizes = {"max_rows": 4, "max_tokens": MAX_TOKENS, "kv_lora_rank": RANK}
        on_failure = lambda reason, error: failures.append(reason)  # noqa: E731
        cache = torch.zeros(1, PAGE, 1, RANK + ROPE)
        return type(
            module.make_grouped_absorb(table, cache, module.stacking_for(16), on_failure=on_failure, **sizes)
        ).__name__

    assert make_one() == "FlashMLAGroupedAbsorb" and not failures
    monkeypatch.setattr(module.absorb_hopper, "supports", lambda *args, **dims: True)
    properties = SimpleNamespace(multi_processor_count=PROGRAMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert make_one() == "HopperGroupedAbsorb" and not failures

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(module.absorb_hopper, "run", fail)
    assert make_one() == "FlashMLAGroupedAbsorb"
    assert failures == ["grouped absorb's own kernel does not run here, FlashMLA takes its place: RuntimeError"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_refused(module: Any, kind: str) -> None:
    grouped = make(module, 16, kind)
    with pytest.raises(ValueError, match="does not end with a page"):
        grouped.plan([Group((0, 1), None, 0, 100, Mode.GROUPED_ABSORB)], 2)
    with pytest.raises(ValueError, match="row"):
        grouped.plan([Group((0, MAX_ROWS), None, 0, 64, Mode.GROUPED_ABSORB)], 8)
    grouped.plan([], 8)
    with pytest.raises(ValueError, match="planned for 8 rows of 16 heads"):
        grouped.run(torch.zeros(4, 16, RANK + ROPE), torch.zeros(1, PAGE, 1, RANK + ROPE), SCALE)


def test_flashmla_has_so_many_entries(module: Any) -> None:
    grouped = make(module, 16, "FlashMLAGroupedAbsorb")
    entries = 2 + SPARE_ENTRIES  # of 8 rows
    one_row_each = [Group((row,), None, 0, 64, Mode.GROUPED_ABSORB) for row in range(entries + 1)]
    grouped.plan(one_row_each[:-1], 8)
    with pytest.raises(ValueError, match=f"more than the {entries} entries"):
        grouped.plan(one_row_each, 8)

"""Grouped absorb around FlashMLA, without FlashMLA: who stands in which entry, with which keys, merged into which row.

A stand-in in torch takes FlashMLA's arguments as FlashMLA does and checks what it asks of them; the merge runs in
Triton's interpreter. Float32; whatever nobody may read is NaN. Bound: 1e-5 in relative L2, float32 over 300 keys.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from sglang_mla_ext.kernels import reference
from sglang_mla_ext.prefix.cost_model import Mode
from sglang_mla_ext.prefix.planner import SPARE_ENTRIES, Group, Stacking

NAN = float("nan")
RANK, ROPE, PAGE, SCALE = 32, 16, 64, 0.25
MAX_ROWS, MAX_TOKENS = 40, 600


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
    """`sglang_mla_ext.grouped_absorb`, bound to the stand-ins."""
    stand_in = ModuleType("sgl_kernel.flash_mla")
    stand_in.get_mla_metadata, stand_in.flash_mla_with_kvcache = get_mla_metadata, flash_mla_with_kvcache
    with pytest.MonkeyPatch.context() as patch:
        if "sgl_kernel" not in sys.modules:
            patch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
        patch.setitem(sys.modules, "sgl_kernel.flash_mla", stand_in)
        patch.delitem(sys.modules, "sglang_mla_ext.grouped_absorb", raising=False)
        module = importlib.import_module("sglang_mla_ext.grouped_absorb")
        patch.setattr(module, "fill_page_table", fill_page_table)
        yield module
        del sys.modules["sglang_mla_ext.grouped_absorb"]


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


def make(module: Any, heads: int) -> Any:
    return module.GroupedAbsorb(
        module.stacking_for(heads),
        max_rows=MAX_ROWS,
        max_tokens=MAX_TOKENS,
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE,
        dtype=torch.float32,
        device="cpu",
    )


SCATTERED = tuple(torch.randperm(30, generator=torch.Generator().manual_seed(1)).tolist())


def odd_groups(sizes: tuple[int, ...] = (5, 20, 3)) -> list[tuple[tuple[int, ...], int]]:
    """Groups of these sizes, their rows all over the batch, two rows left alone."""
    groups, first = [], 0
    for size, end in zip(sizes, (256, 320, 64), strict=True):
        groups.append((tuple(sorted(SCATTERED[first : first + size])), end))
        first += size
    return groups


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_every_row_attends_to_its_prefix_and_its_tail(module: Any, heads: int) -> None:
    problem = Problem(heads, odd_groups(), rows=30)
    grouped = make(module, heads)
    grouped.plan(problem.groups, 30)
    assert_equal(problem.run(grouped), problem.expected())


def test_later_steps_follow_plans_rows_and_lengths(module: Any) -> None:
    """Other rows, other groups, none at all, and longer tails under one plan: nothing of an earlier step is left."""
    grouped = make(module, 16)
    for groups, rows in (
        (odd_groups(), 40),
        ([((0, 1), 128)], 2),
        ([((0, 2, 3, 5, 7), 64), ((1, 4), 256)], 8),
        ([], 8),
        (odd_groups(), 30),
        ([((1, 2, 3), 384)], 6),
    ):
        problem = Problem(16, groups, rows)
        grouped.plan(problem.groups, rows)
        for _ in range(2):
            assert_equal(problem.run(grouped), problem.expected())
            problem.seq_lens = (problem.seq_lens - 1).clamp(min=problem.prefix_lens[:rows])


def test_memory_is_static(module: Any) -> None:
    """What a captured graph would read stays where it is."""
    grouped = make(module, 16)
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


def test_what_does_not_fit_is_refused(module: Any) -> None:
    grouped = make(module, 16)
    with pytest.raises(ValueError, match="does not end with a page"):
        grouped.plan([Group((0, 1), None, 0, 100, Mode.GROUPED_ABSORB)], 2)
    entries = 2 + SPARE_ENTRIES  # of 8 rows
    one_row_each = [Group((row,), None, 0, 64, Mode.GROUPED_ABSORB) for row in range(entries + 1)]
    grouped.plan(one_row_each[:-1], 8)
    with pytest.raises(ValueError, match=f"more than the {entries} entries"):
        grouped.plan(one_row_each, 8)
    grouped.plan([], 8)
    with pytest.raises(ValueError, match="planned for 8 rows of 16 heads"):
        grouped.run(torch.zeros(4, 16, RANK + ROPE), torch.zeros(1, PAGE, 1, RANK + ROPE), SCALE)

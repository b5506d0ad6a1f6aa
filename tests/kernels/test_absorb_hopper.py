"""The absorb kernel for Hopper without a GPU: its work list, and its own source run in torch (gluon_in_torch.py).

Bound of the latter: 4e-3 in relative L2, from rounding weights and outputs to BF16; the lse is not rounded: 1e-5. What
no item may read is NaN.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gluon_in_torch import Descriptor, Pointer, Program
from torch import Tensor
from triton.runtime import interpreter

from sglang_mla_ext.kernels.merge import LN2
from sglang_mla_ext.kernels.naive.schedule import ITEM_FIELDS, WorkList
from sglang_mla_ext.kernels.reference import attention as reference

# Like conftest.py: the kernel is bound to the interpreter when it is imported.
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")
    from sglang_mla_ext.kernels.absorb.tail_schedule import MIN_BLOCKS, schedule_tails, schedule_tails_kernel
assert isinstance(schedule_tails_kernel, interpreter.InterpretedFunction), "run tests/kernels alone"
from sglang_mla_ext.kernels.absorb import sm90_bf16_absorb as absorb_hopper  # noqa: E402
from sglang_mla_ext.kernels.absorb.schedule import (  # noqa: E402
    BLOCK_KEYS,
    HEADER_FIELDS,
    ITEM_BLOCKS,
    TILE_ROWS,
    AbsorbCapacity,
    SharedKeys,
    build_group_work,
)
from sglang_mla_ext.kernels.absorb.sm90_parts import bf16_consumers as absorb_consumers_hopper  # noqa: E402

NAN = float("nan")
LATENT, ROPE = 512, 64
SCALE = 192**-0.5
ODD_LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 192, 193, 320, 599)


@dataclass(frozen=True)
class Case:
    heads: int
    groups: tuple[tuple[int, int], ...]  # rows and keys of each
    tails: tuple[int, ...]  # tokens, by row
    programs: int = 132
    spare_rows: int = 3  # that there is room for, beyond those of the step
    tile_rows: int = TILE_ROWS

    @property
    def rows(self) -> int:
        return len(self.tails)

    def __str__(self) -> str:
        return f"h{self.heads}-groups{len(self.groups)}-rows{self.rows}-programs{self.programs}-tile{self.tile_rows}"


def cases() -> Any:
    for heads in (8, 16, 32, 64, 96, 128):
        yield Case(heads, ((7, 1000), (3, 65), (1, 1)), ODD_LENGTHS * 2)
    for heads, tile_rows in ((8, 8), (16, 16), (32, 32), (8, 32), (24, 8), (128, 16)):
        yield Case(heads, ((7, 1000), (3, 65), (1, 1)), ODD_LENGTHS * 2, tile_rows=tile_rows)
        yield Case(heads, (), ODD_LENGTHS * 2, tile_rows=tile_rows)
    yield Case(16, (), (5001,))
    yield Case(16, (), (0, 0, 0))
    yield Case(16, ((200, 26472), *(((1, 300),) * 56)), tuple(range(256)))
    yield Case(16, ((16, 7069),) * 8, (512,) * 128)
    yield Case(16, ((512, 26472),), (77,) * 512)
    yield Case(16, ((128, 4759),), (100_000, *([1] * 127)))  # one long tail among short ones
    yield Case(32, ((2, 64),), (0, 3), programs=1)


def items_of(work: Tensor, capacity: AbsorbCapacity) -> np.ndarray:
    n_items = int(work[0])
    return work[capacity.first_item :][: n_items * ITEM_FIELDS].view(n_items, ITEM_FIELDS).numpy()


class Work:
    """The work list of a case, complete, and where the keys of its items are."""

    def __init__(self, case: Case) -> None:
        self.capacity = AbsorbCapacity(
            case.rows + case.spare_rows,
            case.heads,
            case.programs,
            case.tile_rows,
            group_partials=None if case.groups else 0,
        )
        rows = list(range(case.rows))
        random.Random(case.rows).shuffle(rows)
        self.width = max(1, -(-max(case.tails) // BLOCK_KEYS))  # pages of a row of the page table
        self.groups, first_page = [], self.capacity.max_rows * self.width
        for size, length in case.groups:
            self.groups.append(SharedKeys(tuple(rows[:size]), length, first_page))
            rows, first_page = rows[size:], first_page + -(-length // BLOCK_KEYS)
        self.pages = first_page
        self.group_work = build_group_work(self.groups, self.capacity)
        self.array = torch.from_numpy(self.capacity.empty_work())
        # What an earlier step left must not matter.
        self.array[self.capacity.first_item : self.capacity.tail_segments] = -1
        self.array[: len(self.group_work.head)] = torch.from_numpy(self.group_work.head)
        tiles = self.capacity.row_tiles
        with_tails = case.programs // tiles * tiles
        for ranges in (HEADER_FIELDS, HEADER_FIELDS + case.programs):
            self.array[ranges : ranges + with_tails] = 1 << 30
        segments = torch.from_numpy(self.group_work.segments)
        self.array[self.capacity.group_segments :][: len(segments)] = segments
        table = torch.full((self.capacity.table.size,), -1, dtype=torch.int32)
        page_table = torch.empty(self.capacity.max_rows, self.width, dtype=torch.int32)
        lens = torch.tensor(case.tails, dtype=torch.int32)
        schedule_tails(lens, self.array, table, self.capacity, page_table)
        self.tail_table = WorkList(table.numpy(), self.capacity.table, 0, len(table))

    @property
    def items(self) -> np.ndarray:
        return items_of(self.array, self.capacity)

    @property
    def tails_of_programs(self) -> list[np.ndarray]:
        """The items of each program's range."""
        begin, end = self.array[HEADER_FIELDS:][: 2 * self.capacity.programs].view(2, -1).tolist()
        return [self.items[first:last] for first, last in zip(begin, end, strict=True)]

    def blocks(self, items: np.ndarray) -> np.ndarray:
        return -(-(items[:, 3] - items[:, 2]) // BLOCK_KEYS)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_every_key_of_every_query_row_is_in_one_item(case: Case) -> None:
    work = Work(case)
    capacity, array = work.capacity, work.array.numpy()
    assert len(work.items) <= capacity.max_items
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)  # (query row, first page): ranges
    for first, n_rows, begin, end, first_page, partial, *_ in work.items.tolist():
        assert capacity.tail_segments <= first < capacity.size and 0 < n_rows <= case.tile_rows
        assert begin % BLOCK_KEYS == 0 and begin < end
        for at in range(n_rows):
            segment, inside = divmod(at, capacity.segment)
            found[array[first + segment] + inside, first_page].append((begin, end, partial + at))
    expected = {}  # (query row, first page): keys, and where the partials are
    for group in work.groups:
        for row in group.rows:
            expected[row, group.first_page] = group.length, work.group_work.table
    for row, length in enumerate(case.tails):
        if length:
            expected[row, row * work.width] = length, work.tail_table
        else:
            assert work.tail_table.row_splits[row] == 0
        if work.tail_table.row_splits[row] == 1:
            assert work.tail_table.row_partial_start[row] == capacity.max_group_partials + row, "not in its place"
    partials = []
    for (row, first_page), (length, table) in expected.items():
        start, stride, splits = (
            int(values[row]) for values in (table.row_partial_start, table.row_partial_stride, table.row_splits)
        )
        for head in range(case.heads):
            ranges = sorted(found.pop((row * case.heads + head, first_page)))
            assert [begin for begin, _, _ in ranges] + [length] == [0] + [end for _, end, _ in ranges]
            assert [at for _, _, at in ranges] == [(start + s * stride) * case.heads + head for s in range(splits)]
            partials += [at for _, _, at in ranges]
    assert not found, "items for rows that have no such keys"
    assert len(set(partials)) == len(partials) and all(at < capacity.max_partial_rows * case.heads for at in partials)
    ungrouped = sorted(set(range(case.rows)) - {row for group in work.groups for row in group.rows})
    assert not work.group_work.table.row_splits[ungrouped].any()


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_programs_have_even_shares(case: Case) -> None:
    """Of the groups' items: to within one item. With tails: to within what it costs to cut them, and 1/16."""
    work = Work(case)
    n_groups = len(work.group_work.items)
    cost = work.blocks(work.items) + ITEM_BLOCKS
    of_groups = [cost[program : n_groups : case.programs].sum() for program in range(case.programs)]
    assert work.array[HEADER_FIELDS + 2 * case.programs :][: case.programs].tolist() == of_groups
    if n_groups:
        assert max(of_groups) - min(of_groups) <= cost[:n_groups].max() + -(-n_groups // case.programs)
    tails = work.tails_of_programs
    assert sorted(item for own in tails for item in own.tolist()) == sorted(work.items[n_groups:].tolist())
    load = np.add(of_groups, [(work.blocks(own) + ITEM_BLOCKS).sum() for own in tails])
    share = load.sum() / (case.programs // work.capacity.row_tiles * work.capacity.row_tiles)
    most = max(share, max(of_groups)) + 2 * ITEM_BLOCKS + MIN_BLOCKS
    assert load.max() <= max(most * 17 / 16, MIN_BLOCKS + ITEM_BLOCKS)


@pytest.mark.parametrize(
    ("tails", "heads", "tile_rows", "most"),
    [
        ((8192,) * 128, 16, 16, 1.04),  # one piece each: two would only be merged again
        ((65536,) * 16, 16, 16, 1.04),
        ((8192,) * 32, 128, 64, 1.04),
        ((8192,) * 32, 64, 64, 1.04),
        ((8192,) * 133, 16, 16, 1.05),  # one more than programs: cut
        ((262144, *((512,) * 100)), 16, 16, 1.15),
        (tuple(range(512, 65536, 1032)), 16, 16, 1.03),
        (tuple(range(512, 65536, 1032)), 128, 64, 1.03),
    ],
    ids=str,
)
def test_tails_end_together(tails: tuple[int, ...], heads: int, tile_rows: int, most: float) -> None:
    """The program that has the most, beside an even share."""
    work = Work(Case(heads, (), tails, tile_rows=tile_rows))
    load = [work.blocks(own).sum() for own in work.tails_of_programs]
    assert max(load) <= most * sum(load) / 132


@pytest.mark.parametrize(("heads", "tile_rows"), [(16, 16), (128, 64), (24, 64)])
def test_query_tokens_of_a_request_see_one_key_after_the_other(heads: int, tile_rows: int) -> None:
    """Three of them: they read the same pages, and the last one sees all keys."""
    lens, width = (0, 1, 2, 64, 65, 66, 900), 15
    capacity = AbsorbCapacity(3 * len(lens) + 6, heads, 9, tile_rows, queries=3, group_partials=0)
    work, table = torch.from_numpy(capacity.empty_work()), torch.full((capacity.table.size,), -1, dtype=torch.int32)
    page_table = torch.empty(len(lens), width, dtype=torch.int32)
    schedule_tails(torch.tensor(lens, dtype=torch.int32), work, table, capacity, page_table)
    found: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # of a query row
    for first, n_rows, begin, end, first_page, *_ in items_of(work, capacity).tolist():
        for at in range(n_rows):
            segment, inside = divmod(at, capacity.segment)
            found[int(work[first + segment]) + inside].append((begin, end, first_page))
    for row in range(3 * len(lens)):
        length = max(0, lens[row // 3] - (2 - row % 3))
        for head in range(heads):
            ranges = sorted(found.pop(row * heads + head, []))
            assert [begin for begin, _, _ in ranges] + [length] == [0] + [end for _, end, _ in ranges]
            assert {page for *_, page in ranges} <= {row // 3 * width}
    assert not found
    with pytest.raises(ValueError, match="10 requests, 30 rows"):
        schedule_tails(torch.zeros(10, dtype=torch.int32), work, table, capacity, torch.empty(10, width).int())


def test_groups_are_cut_where_there_are_too_few_tiles() -> None:
    """128 rows of 16 heads are 32 tiles: four splits fill 132 programs, and 512 rows need none."""
    for rows, splits in ((128, 4), (512, 1)):
        work = build_group_work([SharedKeys(tuple(range(rows)), 26472, 0)], AbsorbCapacity(rows, 16, 132))
        assert set(work.table.row_splits.tolist()) == {splits}
        tiles = rows * 16 // TILE_ROWS
        assert (work.items[:tiles, 2:4] == work.items[0, 2:4]).all(), "tiles of the same keys stand side by side"


def test_what_does_not_fit_is_refused() -> None:
    capacity = AbsorbCapacity(8, 16, 4)
    for groups, message in (
        ([SharedKeys((), 64, 0)], "needs rows and keys"),
        ([SharedKeys((1,), 0, 0)], "needs rows and keys"),
        ([SharedKeys((1, 8), 64, 0)], "must be in"),
        ([SharedKeys((1, 2), 64, 0), SharedKeys((2,), 64, 0)], "one group only"),
    ):
        with pytest.raises(ValueError, match=message):
            build_group_work(groups, capacity)
    with pytest.raises(ValueError, match="2 programs"):
        AbsorbCapacity(8, 128, 1)
    with pytest.raises(ValueError, match="multiple of 8"):
        AbsorbCapacity(8, 20, 4).size  # noqa: B018
    work, table = (torch.zeros(size, dtype=torch.int32) for size in (capacity.size, capacity.table.size))
    with pytest.raises(ValueError, match="9 rows"):
        schedule_tails(torch.zeros(9, dtype=torch.int32), work, table, capacity, torch.zeros(20, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match="lens must be int32"):
        schedule_tails(torch.zeros(8), work, table, capacity, torch.zeros(20, 4, dtype=torch.int32))


class Problem:
    """A paged latent cache and queries for a case; BF16 numbers in float32."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.work, generator = case, Work(case), torch.Generator().manual_seed(seed)
        self.q = torch.randn(case.rows, case.heads, LATENT + ROPE, generator=generator).bfloat16().float()
        self.page_table = torch.randperm(self.work.pages, generator=generator)
        self.pages = torch.full((self.work.pages, BLOCK_KEYS, LATENT + ROPE), NAN)
        tails = [(row * self.work.width, length) for row, length in enumerate(case.tails)]
        self.keys = {}  # by first page
        for first_page, length in [*tails, *((group.first_page, group.length) for group in self.work.groups)]:
            keys = torch.randn(length, LATENT + ROPE, generator=generator).bfloat16().float()
            for at in range(0, length, BLOCK_KEYS):
                page = self.page_table[first_page + at // BLOCK_KEYS]
                self.pages[page, : min(BLOCK_KEYS, length - at)] = keys[at : at + BLOCK_KEYS]
            self.keys[first_page] = keys

    def run(self, seed: int, faults: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
        """The kernel's partials, `[P * H, 512]` and `[P * H]`; NaN where nothing was written."""
        capacity = self.work.capacity
        out = torch.full((capacity.max_partial_rows * capacity.heads, LATENT), NAN)
        lse2 = torch.full(out.shape[:1], NAN)
        q, keys = self.q.flatten(0, 1), self.pages.flatten(0, 1)
        for index in range(capacity.programs):
            program = Program([absorb_consumers_hopper, absorb_hopper], index, capacity.programs, seed, faults or {})
            program.run(
                "absorb_hopper_kernel",
                Descriptor(q[:, :LATENT], [capacity.segment, 64]),
                Descriptor(q[:, LATENT:], [capacity.segment, 64]),
                Descriptor(keys, [BLOCK_KEYS, 128]),
                Descriptor(keys, [BLOCK_KEYS, 64]),
                Pointer(self.work.array),
                Pointer(self.page_table),
                Pointer(out.view(-1)),
                Pointer(lse2),
                SCALE * absorb_hopper.LOG2E,
            )
        return out, lse2

    def check(self, out: Tensor, lse2: Tensor) -> None:
        """Every partial that an item names equals the reference, and nothing else was written."""
        array, written = self.work.array, torch.zeros(len(out), dtype=torch.bool)
        for first, n_rows, begin, end, first_page, partial, *_ in self.work.items.tolist():
            segments = array[first : first + -(-n_rows // self.work.capacity.segment)]
            query_rows = (segments[:, None] + torch.arange(self.work.capacity.segment)).flatten()[:n_rows].long()
            keys = self.keys[first_page][begin:end]
            q = self.q.view(1, -1, LATENT + ROPE)[:, query_rows].double()
            want, want_lse = reference.absorb(
                q[..., :LATENT], q[..., LATENT:], keys[None].double(), torch.tensor([len(keys)]), SCALE
            )
            place = slice(partial, partial + n_rows)
            assert reference.errors(out[place], want[0]).rel_l2 < 4e-3
            assert reference.errors(lse2[place] * LN2, want_lse[0]).max_rel < 1e-5
            written[place] = True
        assert lse2[~written].isnan().all() and out[~written].isnan().all()


def kernel_cases() -> Any:
    for heads in (8, 16, 32, 128):
        yield Case(heads, ((9, 200), (2, 64)), ODD_LENGTHS if heads < 128 else ODD_LENGTHS[:11:2] * 2, programs=3)
    yield Case(96, ((2, 500),), (1, 130), programs=2)
    yield Case(16, (), (0, 0), programs=1)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", list(kernel_cases()), ids=str)
def test_the_kernels_source_in_torch_equals_the_reference(case: Case, seed: int) -> None:
    problem = Problem(case, seed)
    problem.check(*problem.run(seed))


def _changed(**changes: Any) -> Any:
    """A stand-in for mbarrier with some of its operations replaced."""
    return lambda program, barriers: SimpleNamespace(**vars(barriers) | changes)


FAULTS = {
    "nobody waits": {"mbarrier": lambda program, b: _changed(wait=lambda barrier, parity: program.pause())(program, b)},
    "one reader of the weights is not counted": {"mbarrier": _changed(init=lambda barrier, count: barrier.init(1))},
    "values behind the last key stay": {"_clear_behind": lambda program, stand_in: lambda values, valid: None},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_would_be_found_out(fault: str) -> None:
    problem = Problem(Case(16, ((2, 500),), (130, 0), programs=1), seed=0)
    problem.check(*problem.run(0))
    with pytest.raises(AssertionError):
        problem.check(*problem.run(0, FAULTS[fault]))

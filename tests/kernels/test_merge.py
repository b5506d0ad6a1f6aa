"""The merge kernel against the reference in float64: any number of partials per row, strides, empty tails, two tables.

Float32 in Triton's interpreter. Bound: 1e-6 in relative L2 (a weighted mean of a few numbers), 1e-5 for an element.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from sglang_mla_ext.kernels import merge as merge_kernel
from sglang_mla_ext.kernels.constants import LOG2E
from sglang_mla_ext.kernels.kept_part import KeptPart, TorchKeptPart
from sglang_mla_ext.kernels.merge import merge
from sglang_mla_ext.kernels.partials import FIRSTS, PartialTable
from sglang_mla_ext.kernels.reference import attention as reference

NAN, INF = float("nan"), float("inf")
EMPTY_LSE = torch.tensor([-INF, INF]).repeat(65)


@pytest.fixture(params=["small", "large"], autouse=True)
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both shapes of a program, whatever the size of the output."""
    monkeypatch.setattr(merge_kernel, "LARGE", 0 if request.param == "large" else 1 << 62)


@dataclass(frozen=True)
class Case:
    splits: tuple[int, ...]  # partials of each row, 0 for a row without a shared prefix
    heads: int
    v_dim: int = 32
    spread: float = 3.0  # standard deviation of the lse
    empty_tails: tuple[int, ...] = ()  # rows without a tail
    more: tuple[int, ...] = ()  # partials of each row in a second table
    in_place: bool = False
    write_lse: bool = True

    def __str__(self) -> str:
        place = "-inplace" * self.in_place + "-nolse" * (not self.write_lse)
        splits = "+".join(map(str, self.splits)) if len(self.splits) < 10 else f"{len(self.splits)}rows"
        splits += "-more" + "+".join(map(str, self.more)) if self.more else ""
        return f"{splits}-h{self.heads}-d{self.v_dim}-spread{self.spread:g}-empty{len(self.empty_tails)}{place}"


def cases():
    yield Case((1,), heads=1)
    yield Case((0, 1, 2, 3), heads=4, v_dim=128)
    yield Case((4, 5, 8, 9, 33), heads=5, empty_tails=(1, 4))
    yield Case((0, 0, 3), heads=16, empty_tails=(0, 2), in_place=True)
    yield Case((2, 0), heads=128, v_dim=16)
    yield Case((2, 0, 1), heads=64, v_dim=16, in_place=True, write_lse=False)
    yield Case((6, 0, 2), heads=4, spread=200.0)
    yield Case((7, 2), heads=4, spread=1e4, empty_tails=(0,))
    yield Case(tuple(i % 6 for i in range(30)), heads=5, empty_tails=tuple(range(0, 30, 5)))
    yield Case((1, 7, 8, 9, 36), heads=5, v_dim=128, empty_tails=(0, 3))
    yield Case((1, 7, 8, 9, 36, 0), heads=3, v_dim=512, empty_tails=(0, 2, 4, 5), in_place=True)
    yield Case((36, 17, 3, 2), heads=7, v_dim=128, spread=200.0, in_place=True, write_lse=False)
    # Tiles with partials of both tables, of either alone, and rows with a tail alone and with no key at all.
    yield Case((1, 5, 8, 0, 0, 0, 30), heads=5, v_dim=128, more=(1, 4, 9, 36, 0, 0, 1), empty_tails=(0, 1, 2, 3, 4))
    yield Case((0, 1, 7, 36, 0), heads=2, v_dim=512, more=(2, 0, 1, 3, 0), empty_tails=(1, 3), in_place=True)
    yield Case((2, 0, 40), heads=6, more=(0, 1, 0), in_place=True, write_lse=False)


@dataclass
class Partials:
    """Partials anywhere in their tensors, and the table or the two that name them; all that no row names is NaN."""

    case: Case
    generator: torch.Generator

    def __post_init__(self) -> None:
        case, splits_of = self.case, [self.case.splits, self.case.more]
        heads, dv = case.heads, case.v_dim
        used = sum(map(sum, splits_of))
        partials = used * 2 + 5
        self.out = torch.full((partials, heads, dv), NAN)
        self.lse2 = torch.full((partials, heads), NAN)
        places = iter((torch.randperm(partials - 2, generator=self.generator)[:used] + 2).tolist())
        self.of_row: list[list[int]] = [[] for _ in case.splits]
        self.tables = []
        for spare_rows, splits in enumerate(splits_of, start=3):  # the second table is for other sizes
            table = PartialTable.empty(len(case.splits) + spare_rows, sum(splits) + len(splits) + 2, "cpu")
            table.buffer.fill_(-(10**6))
            at = 1
            for row in torch.randperm(len(splits), generator=self.generator).tolist():  # lists in any order, with gaps
                mine = [next(places) for _ in range(splits[row])]
                table.begins[row], table.counts[row] = at, len(mine)
                table.partials[at : at + len(mine)] = torch.tensor(mine, dtype=torch.int32)
                table.firsts[row, : len(mine)] = torch.tensor(mine[:FIRSTS], dtype=torch.int32)
                self.of_row[row] += mine
                at += len(mine) + row % 2
            self.tables.append(table)
        for at in itertools.chain(*self.of_row):
            self.out[at] = torch.randn(heads, dv, generator=self.generator)
            self.lse2[at] = torch.randn(heads, generator=self.generator) * case.spread * LOG2E

    def merge(self, tail_out: torch.Tensor, tail_lse: torch.Tensor, *outputs: torch.Tensor | None) -> torch.Tensor:
        more = self.tables[1] if self.case.more else None
        return merge(tail_out, tail_lse, self.out, self.lse2, self.tables[0], *outputs, more=more)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_merge_equals_reference(case: Case) -> None:
    generator = torch.Generator().manual_seed(len(case.splits) * 1000 + case.heads)
    rows, heads, dv = len(case.splits), case.heads, case.v_dim
    partials = Partials(case, generator)
    max_rows = rows + 3

    # A padded, transposed tail: strides as a batched product over heads leaves them.
    tail_store = torch.full((heads, max_rows, dv + 4), NAN)
    tail_out = tail_store[:, :rows, :dv].transpose(0, 1)  # [T, H, dv]
    tail_out.copy_(torch.randn(rows, heads, dv, generator=generator))
    tail_lse = torch.full((heads, rows), NAN).t()  # [T, H]
    tail_lse.copy_(torch.randn(rows, heads, generator=generator) * case.spread)
    for row in case.empty_tails:
        tail_out[row], tail_lse[row] = NAN, EMPTY_LSE[row % 2 : row % 2 + heads]  # both in every row

    expected_out = tail_out.double().clone()
    expected_lse = torch.where(tail_lse == INF, -INF, tail_lse.double())
    for row, places in enumerate(partials.of_row):
        for at in places:
            part = partials.out[at].double()[None], partials.lse2[at].double()[None] / LOG2E
            merged = reference.merge(expected_out[row][None], expected_lse[row][None], *part)
            expected_out[row], expected_lse[row] = merged[0][0], merged[1][0]
    no_key = expected_lse == -INF
    expected_out[no_key] = 0.0

    out = tail_out if case.in_place else torch.full((rows, heads + 1, dv), NAN)[:, :heads]
    lse = torch.full((rows, heads), NAN) if case.write_lse else None
    before = tail_out.clone()
    assert partials.merge(tail_out, tail_lse, out, lse) is out

    # float32 holds an lse of 1e4 to 5e-4 only, which is then the error of a weight.
    slack = max(1.0, case.spread / 3)
    checks = [("out", out, expected_out)] + ([("lse", lse, expected_lse)] if case.write_lse else [])
    for what, actual, expected in checks:
        found = reference.errors(actual, expected)
        bound = slack if what == "out" else 1.0
        assert found.rel_l2 < 1e-6 * bound and found.max_rel < 1e-5 * bound, f"{what}: {found}"
        assert found.cos_dist < 1e-11 * bound**2, f"{what}: {found}"
    alone = [r for r, places in enumerate(partials.of_row) if not places and r not in case.empty_tails]
    assert torch.equal(out[alone], before[alone])
    if case.write_lse:
        assert torch.equal(lse[alone], tail_lse[alone])


def test_bits_do_not_depend_on_the_run_or_on_what_is_written_in_place() -> None:
    """With two tables; the lse in place, too, and BF16 partials as well."""
    case = Case((20, 9, 0, 0, 3), heads=6, v_dim=64, more=(5, 0, 2, 0, 8), empty_tails=(1, 3))
    for dtype in (torch.float32, torch.bfloat16):
        partials = Partials(case, torch.Generator().manual_seed(0))
        partials.out = partials.out.to(dtype)
        tail_out, tail_lse = torch.randn(5, 6, 64, generator=partials.generator), torch.zeros(5, 6)
        tail_out[[1, 3]], tail_lse[[1, 3]] = NAN, -INF
        lses = torch.empty(2, 5, 6)
        first, second = (partials.merge(tail_out, tail_lse, torch.empty_like(tail_out), lse) for lse in lses)
        partials.merge(tail_out, tail_lse, tail_out, tail_lse)
        assert not first.isnan().any() and not lses.isnan().any()
        assert torch.equal(first, second) and torch.equal(first, tail_out)
        assert torch.equal(lses[0], lses[1]) and torch.equal(lses[0], tail_lse)


@pytest.mark.parametrize("write_lse", [True, False])
@pytest.mark.parametrize("more", [(), (0, 2, 1, 0, 0, 3)], ids=["one table", "two tables"])
def test_what_stands_in_its_place_already_is_left_there(more: tuple[int, ...], write_lse: bool) -> None:
    """Outputs among the partials, without tails: the result is that of outputs elsewhere, to the bit, and a row's only
    partial is neither read nor written."""
    case = Case((1, 1, 0, 0, 3, 1), heads=6, v_dim=128, more=more)
    partials = Partials(case, torch.Generator().manual_seed(0))
    table, rows, first = partials.tables[0], len(case.splits), len(partials.out)
    partials.out = torch.cat([partials.out, torch.full((rows, 6, 128), NAN)])  # the outputs
    partials.lse2 = torch.cat([partials.lse2, torch.full((rows, 6), NAN)])
    for row in (row for row, splits in enumerate(case.splits) if splits == 1):
        (at,) = table.of_row(row)
        partials.out[first + row], partials.lse2[first + row] = partials.out[at], partials.lse2[at]
        table.partials[table.begins[row]] = table.firsts[row, 0] = first + row
    no_lse, expected = torch.full((rows, 6), -INF), torch.full((rows, 6, 128), NAN)
    expected_lse, lse = torch.full((2, rows, 6), NAN)
    partials.merge(expected, no_lse, expected, expected_lse)
    alone = [row for row, splits in enumerate(case.splits) if splits == 1 and not (more and more[row])]
    partials.out[[first + row for row in alone]] = NAN
    out = partials.out[first:]
    second = partials.tables[1] if more else None
    merge(
        out, no_lse, partials.out, partials.lse2, table, out, lse if write_lse else None, second, out_in_partials=True
    )
    assert out[alone].isnan().all()
    others = [row for row in range(rows) if row not in alone]
    assert torch.equal(out[others], expected[others]) and not out[others].isnan().any()
    if write_lse:
        torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)


def test_tails_and_partials_in_one_padded_tensor() -> None:
    """Latent outputs in BF16, one tensor for both: tails in the first heads of a tile, partials of four rows in one.

    Bound: the float32 result has no other error than the reference with the same BF16 inputs.
    """
    generator = torch.Generator().manual_seed(0)
    rows, heads, dim, tiles = 5, 16, 512, 3
    out = torch.randn(rows + tiles, 1, 64, dim, generator=generator).to(torch.bfloat16)
    lse = torch.randn(rows + tiles, 64, 1, generator=generator) * 3
    out[:rows, :, heads:], lse[:rows, heads:] = NAN, NAN  # padding
    out[1, :, :heads], lse[1, :heads, 0] = NAN, EMPTY_LSE[:heads]
    places = {0: 2, 1: 5, 4: 4}  # of the 12 places in tiles; the others are not read
    partial_out, partial_lse2 = out[rows:].view(-1, heads, dim), lse[rows:].view(-1, heads) * LOG2E
    unused = [place for place in range(12) if place not in places.values()]
    partial_out[unused], partial_lse2[unused] = NAN, INF
    tail_out, tail_lse = out[:rows, 0, :heads], lse[:rows, :heads, 0]

    part_out = torch.zeros(rows, heads, dim, dtype=torch.float64)
    part_lse = torch.full((rows, heads), -INF, dtype=torch.float64)
    for row, place in places.items():
        part_out[row], part_lse[row] = partial_out[place].double(), partial_lse2[place].double() / LOG2E
    expected = reference.merge(
        tail_out.double(), tail_lse.double().masked_fill(tail_lse == INF, -INF), part_out, part_lse
    )

    table = PartialTable.from_pairs(list(places), list(places.values()), max_rows=8, max_partials=12).to("cpu")
    merged, merged_lse = torch.full(expected[0].shape, NAN), torch.full((5, 16), NAN)
    merge(tail_out, tail_lse, partial_out, partial_lse2, table, merged, merged_lse)
    assert reference.errors(merged, expected[0]).rel_l2 < 1e-6
    assert reference.errors(merged_lse, expected[1]).rel_l2 < 1e-6
    rounded = torch.full(expected[0].shape, NAN, dtype=torch.bfloat16)
    merge(tail_out, tail_lse, partial_out, partial_lse2, table, rounded, merged_lse)
    assert reference.errors(rounded, expected[0]).rel_l2 < 4e-3


def test_wrong_arguments_are_refused_with_a_reason() -> None:
    good = dict(
        table=PartialTable.empty(2, 2, "cpu"),
        tail_out=torch.zeros(2, 4, 16),
        tail_lse=torch.zeros(2, 4),
        partial_out=torch.zeros(2, 4, 16),
        partial_lse2=torch.zeros(2, 4),
        out=torch.zeros(2, 4, 16),
    )
    for change, message in (
        (dict(tail_out=torch.zeros(3, 4, 16)), "at most 2"),
        (dict(more=PartialTable.empty(1, 2, "cpu")), "at most 1"),
        (dict(table=PartialTable.empty(2, 2)), "device"),
        (dict(out_in_partials=True), "rows of partial_out"),
        (dict(tail_out=torch.zeros(2, 4, 24)), "power of two"),
        (dict(partial_out=torch.zeros(2, 3, 16)), "do not fit"),
        (dict(partial_lse2=torch.zeros(4, 2).t()), "contiguous"),
        (dict(out=torch.zeros(2, 4, 8)), "out must be"),
        (dict(out=torch.zeros(2, 16, 4).transpose(1, 2)), "last axis of out"),
        (dict(tail_lse=torch.zeros(2, 4, dtype=torch.float64)), "tail_lse must be float32"),
        (dict(lse=torch.zeros(4, 2)), "lse must be float32"),
    ):
        with pytest.raises(ValueError, match=message):
            merge(**(good | change))


@pytest.mark.parametrize("kind", [KeptPart, TorchKeptPart])
def test_what_an_earlier_pass_left_does_not_reach_rows_without_the_part(kind: type[KeptPart]) -> None:
    """A row without keys in the part is merged with a weight of 0, and 0 times NaN or infinity is NaN."""
    kept = kind(8, 2, 16, dtype=torch.float32, device="cpu")
    kept.out[:] = float("nan")
    kept.out[2] = float("inf")
    kept.clear(4)
    kept.select(4)
    assert kept.out[4:].isnan().all(), "not of this pass"
    out, lse = torch.randn(4, 2, 16), torch.randn(4, 2)
    kept.out[0], kept.lse[0] = 1.0, lse[0]
    expected = out.clone()
    expected[0] = (out[0] + 1.0) / 2
    kept.merge(out, lse)
    torch.testing.assert_close(out, expected)
    assert (kept.lse == -torch.inf).all()

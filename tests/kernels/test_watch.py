"""What a merge copies of the layer that is watched, in Triton's interpreter: exact, and nothing else is written."""

from __future__ import annotations

import pytest
import torch

from sglang_mla_ext.kernels.merge import merge
from sglang_mla_ext.kernels.partials import FIRSTS, PartialTable
from sglang_mla_ext.kernels.watch import Watch, Watched

NAN = float("nan")
LAYER, RANK, ROPE = 3, 32, 8


def table_of(lists: list[list[int]]) -> PartialTable:
    table = PartialTable.empty(len(lists) + 2, sum(map(len, lists)) + 1, "cpu")
    at = 0
    for row, partials in enumerate(lists):
        table.begins[row], table.counts[row] = at, len(partials)
        table.partials[at : at + len(partials)] = torch.tensor(partials, dtype=torch.int32)
        table.firsts[row, : len(partials)] = torch.tensor(partials[:FIRSTS], dtype=torch.int32)
        at += len(partials)
    return table


class Case:
    """A merge in place of tails and of partials that some rows have: `rows` of `queries` tokens with `heads` each."""

    def __init__(self, rows: int, heads: int, dv: int, queries: int = 1, max_rows: int = 4) -> None:
        self.generator = torch.Generator().manual_seed(rows)
        self.heads, self.queries, self.dv = heads, queries, dv
        self.lists = [[row] if row % 3 == 1 else [row, rows + row] if row % 3 else [] for row in range(rows)]
        self.tail_out = self.random(rows, heads * queries, dv)
        self.tail_lse = self.random(rows, heads * queries)
        self.partial_out, self.partial_lse2 = (
            self.random(2 * rows, heads * queries, dv),
            self.random(2 * rows, heads * queries),
        )
        tokens = rows * queries
        # As a product over heads leaves them, and as parts of longer rows.
        self.q = self.random(heads, tokens, RANK).transpose(0, 1)
        self.rope = self.random(tokens, heads, RANK + ROPE)[..., RANK:]
        sizes = dict(heads=heads, columns=RANK + ROPE, dv=dv, dtype=torch.float32)
        self.watch = Watch(max_rows=max_rows, device="cpu", **sizes)
        self.watch.query.fill_(NAN)
        self.watch.out.fill_(NAN)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def run(self, layer: int = LAYER, watched: bool = True) -> torch.Tensor:
        """The merged output, `[tokens, heads, dv]`."""
        out = self.tail_out.clone()
        look = Watched(self.watch, layer, self.q, self.rope) if watched else None
        table = table_of(self.lists)
        merge(out, self.tail_lse, self.partial_out, self.partial_lse2, table, out, watched=look)
        return out.view(-1, self.heads, self.dv)


CASES = [(5, 4, 16, 1, 4), (5, 3, 32, 1, 8), (3, 2, 16, 4, 8), (6, 5, 32, 2, 4)]


@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_queries_and_results_of_the_watched_rows(sizes: tuple[int, ...]) -> None:
    case = Case(*sizes)
    tokens, max_rows = len(case.q), case.watch.max_rows
    plain = case.run(watched=False)
    for first in range(0, tokens, case.queries):
        case.watch.query.fill_(NAN)
        case.watch.out.fill_(NAN)
        case.watch.set_target(LAYER, first)
        out = case.run()
        assert torch.equal(out, plain), "the result is the same bits"
        count = min(max_rows, tokens - first)
        assert torch.equal(case.watch.out[:count], out[first : first + count])
        expected = torch.cat([case.q, case.rope], dim=-1)[first : first + count]
        assert torch.equal(case.watch.query[:count], expected)
        assert case.watch.query[count:].isnan().all() and case.watch.out[count:].isnan().all()


def test_nothing_is_copied_of_other_layers_or_when_nobody_looks() -> None:
    case = Case(4, 2, 16)
    case.run()
    case.watch.set_target(LAYER, 0)
    case.run(LAYER + 1)
    case.run(LAYER - 1)
    case.watch.clear_target()
    case.run()
    case.run(0)
    assert case.watch.query.isnan().all() and case.watch.out.isnan().all()
    case.watch.set_target(0, 2)
    out = case.run(0)
    assert torch.equal(case.watch.out[:2], out[2:])


def test_a_result_that_stands_among_the_partials() -> None:
    """Grouped absorb's merge: a row with one partial has its result in place, and keeps it to the bit."""
    case = Case(3, 2, 32)
    case.watch.set_target(LAYER, 0)
    no_tail = torch.full_like(case.tail_lse, -torch.inf)
    out = case.partial_out[:3]
    table = table_of([[0], [1, 4], [2]])
    look = Watched(case.watch, LAYER, case.q, case.rope)
    first, last = out[0].clone(), out[2].clone()
    merge(out, no_tail, case.partial_out, case.partial_lse2, table, out, out_in_partials=True, watched=look)
    assert torch.equal(case.watch.out[:3], out) and torch.equal(out[0], first) and torch.equal(out[2], last)


def test_a_merge_of_more_heads_than_the_queries_have() -> None:
    """Grouped absorb's, whose rows fill up strips: the last head of each query token is nobody's."""
    case = Case(3, 3, 16, queries=2)
    case.q, case.rope = case.q[:, :2], case.rope[:, :2]
    sizes = dict(heads=2, columns=RANK + ROPE, dv=16, dtype=torch.float32)
    watch = Watch(max_rows=2, device="cpu", **sizes)
    watch.set_target(LAYER, 2)
    out = case.tail_out.clone()
    look = Watched(watch, LAYER, case.q, case.rope, merged_heads=3)
    merge(out, case.tail_lse, case.partial_out, case.partial_lse2, table_of(case.lists), out, watched=look)
    assert torch.equal(watch.out, out.view(-1, 3, 16)[2:4, :2])
    assert torch.equal(watch.query, torch.cat([case.q, case.rope], dim=-1)[2:4])


def test_in_torch_the_same() -> None:
    for first in (0, 3):
        case, other = Case(6, 2, 16), Case(6, 2, 16)
        for each in (case, other):
            each.watch.set_target(LAYER, first)
        out = case.run()
        Watched(other.watch, LAYER, other.q, other.rope).copy(out)
        Watched(other.watch, LAYER + 1, other.q * 2, other.rope).copy(out * 2)
        assert torch.equal(case.watch.query.nan_to_num(7), other.watch.query.nan_to_num(7))
        assert torch.equal(case.watch.out.nan_to_num(7), other.watch.out.nan_to_num(7))


@pytest.mark.parametrize("wrong", ["tokens", "rope", "stride", "columns", "dv"])
def test_shapes_that_do_not_fit(wrong: str) -> None:
    case = Case(4, 2, 16)
    if wrong == "tokens":
        case.q = case.q[:3]
    elif wrong == "rope":
        case.rope = case.rope[:3]
    elif wrong == "stride":
        case.q = case.random(4, 2, 2 * RANK)[..., ::2]
    elif wrong == "columns":
        case.rope = case.rope[..., :4]
    else:
        case.watch.out = case.watch.out[..., :8]
    with pytest.raises(ValueError, match="fit"):
        case.run()

"""Page tables against a loop over tokens: the Triton kernel in the interpreter, and its torch version."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang_mla_ext.kernels.dispatch import fill_page_table as dispatched
from sglang_mla_ext.kernels.storage import page_table

POISON = -77
IMPLEMENTATIONS = [page_table.fill_page_table, page_table.fill_page_table_torch]


def make_slots(requests: int, tokens: int, page_size: int, seed: int) -> torch.Tensor:
    """`[requests, tokens]` int32: whole pages of consecutive slots, pages in random order; a slice of a wider table."""
    generator = torch.Generator().manual_seed(seed)
    pages = -(-tokens // page_size)
    order = torch.randperm(requests * pages + 3, generator=generator)[: requests * pages].view(requests, pages)
    slots = order.repeat_interleave(page_size, 1) * page_size + torch.arange(page_size).repeat(pages)
    wide = torch.full((requests, tokens + 9), 1 << 30, dtype=torch.int32)
    wide[:, :tokens] = slots[:, :tokens]
    return wide[:, :tokens]


def expected(table, req_to_token, pool_indices, lens, starts, page_size) -> torch.Tensor:
    table = table.clone()
    for row, (request, length) in enumerate(zip(pool_indices.tolist(), lens.tolist(), strict=True)):
        start = 0 if starts is None else int(starts[row])
        for token in range(length):
            if token // page_size < table.shape[1]:
                table[row, token // page_size] = req_to_token[request, start + token] // page_size
    return table


@pytest.mark.parametrize("fill", IMPLEMENTATIONS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("lens", "starts", "page_size"),
    [
        ([1, 63, 64, 65, 0, 700], None, 64),
        ([0, 0, 1], [0, 64, 640], 64),
        ([100, 64, 1, 0, 9000], [0, 64, 8960, 128, 192], 64),  # two programs in a row, and most rows need one
        ([1000, 17, 16, 0], [16, 32, 0, 48], 16),
        ([3, 5], None, 1),
    ],
    ids=str,
)
def test_pages_are_those_of_the_tokens(fill: Callable[..., None], index_dtype, lens, starts, page_size) -> None:
    """Entries behind a row's last page, and rows around the table, keep their poison; lengths may be int64 as well."""
    tokens = max(n + (starts[i] if starts else 0) for i, n in enumerate(lens))
    req_to_token = make_slots(len(lens) + 2, tokens, page_size, seed=len(lens))
    pool_indices = torch.randperm(len(lens) + 2, generator=torch.Generator().manual_seed(1))[: len(lens)]
    pool_indices, lens = pool_indices.to(index_dtype), torch.tensor(lens, dtype=index_dtype)
    starts = None if starts is None else torch.tensor(starts, dtype=index_dtype)
    around = torch.full((len(lens) + 2, -(-tokens // page_size) + 5), POISON, dtype=torch.int32)
    table = around[1:-1, 1:-2]
    before = around.clone()
    fill(table, req_to_token, pool_indices, lens, starts, page_size)
    before[1:-1, 1:-2] = expected(before[1:-1, 1:-2], req_to_token, pool_indices, lens, starts, page_size)
    assert torch.equal(around, before)
    assert (table != POISON).sum() == sum(-(-int(n) // page_size) for n in lens)


@pytest.mark.parametrize("fill", IMPLEMENTATIONS)
def test_a_row_for_all_it_can_hold_and_no_further(fill: Callable[..., None]) -> None:
    """A length beyond the table's width, as padded rows of a captured graph may have it, writes nothing outside."""
    req_to_token = make_slots(2, 640, 64, seed=0)
    around = torch.full((2, 7), POISON, dtype=torch.int32)
    lens, rows = torch.tensor([640, 100]), torch.tensor([1, 0])
    fill(around[:, :3], req_to_token, rows, lens)
    assert torch.equal(around[0, :3], req_to_token[1, :192:64] // 64) and (around[:, 3:] == POISON).all()
    assert torch.equal(around[1, :2], req_to_token[0, :128:64] // 64) and around[1, 2] == POISON


@pytest.mark.parametrize("fill", [*IMPLEMENTATIONS, dispatched])
def test_an_empty_batch_and_an_empty_table_are_fine(fill: Callable[..., None]) -> None:
    slots = torch.zeros(1, 64, dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.int64)
    fill(torch.zeros(0, 4, dtype=torch.int32), slots, none, none)
    fill(torch.zeros(1, 0, dtype=torch.int32), slots, torch.zeros(1, dtype=torch.int64), torch.ones(1).long())


def test_cpu_tensors_take_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_table, "fill_page_table", None)
    req_to_token, table = make_slots(3, 200, 64, seed=0), torch.full((2, 4), POISON, dtype=torch.int32)
    dispatched(table, req_to_token, torch.tensor([2, 0]), torch.tensor([130, 64]), torch.tensor([64, 0]))
    assert table[0, :3].tolist() == (req_to_token[2, 64:200:64] // 64).tolist()
    assert table[1, 0] == req_to_token[0, 0] // 64 and (table[1, 1:] == POISON).all() and table[0, 3] == POISON


@pytest.mark.parametrize("fill", IMPLEMENTATIONS)
def test_wrong_arguments_are_refused_with_a_reason(fill: Callable[..., None]) -> None:
    good = dict(
        table=torch.zeros(2, 4, dtype=torch.int32),
        req_to_token=torch.zeros(3, 256, dtype=torch.int32),
        pool_indices=torch.zeros(2, dtype=torch.int64),
        lens=torch.zeros(2, dtype=torch.int32),
    )
    for change, message in (
        (dict(table=torch.zeros(2, 4, dtype=torch.int64)), "table must be int32"),
        (dict(req_to_token=torch.zeros(256, 3, dtype=torch.int32).t()), "req_to_token must be int32"),
        (dict(pool_indices=torch.zeros(3, dtype=torch.int64)), "pool_indices must be contiguous"),
        (dict(lens=torch.zeros(2)), "lens must be contiguous"),
        (dict(starts=torch.zeros(4, dtype=torch.int32)[::2]), "starts must be contiguous"),
        (dict(page_size=48), "power of two"),
        (dict(lens=torch.zeros(2, dtype=torch.int32, device="meta")), "lens is on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            fill(**(good | change))

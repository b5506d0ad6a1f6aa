"""Page tables of requests, from SGLang's table of slots."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK_PAGES = 128


@triton.jit(do_not_specialize=["req_row", "table_row"])
def fill_page_table_kernel(
    table_ptr,  # int32 [rows, pages], strides table_row, 1
    req_to_token_ptr,  # int32 [requests, tokens], strides req_row, 1
    pool_indices_ptr,  # [rows]
    lens_ptr,  # [rows]
    starts_ptr,  # [rows]; not read unless STARTS
    table_row,
    req_row,
    PAGE: tl.constexpr,
    STARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = page * PAGE < tl.load(lens_ptr + row)
    request = tl.load(pool_indices_ptr + row).to(tl.int64)
    first = tl.load(starts_ptr + row).to(tl.int64) if STARTS else 0
    slot = tl.load(req_to_token_ptr + request * req_row + first + page * PAGE, mask=there, other=0)
    tl.store(table_ptr + row * table_row + page, slot // PAGE, mask=there)


def fill_page_table(
    table: Tensor,
    req_to_token: Tensor,
    pool_indices: Tensor,
    lens: Tensor,
    starts: Tensor | None = None,
    page_size: int = 64,
) -> None:
    """Write the pages of tokens `[start, start + len)` of each request into its row of the table, from the left.

    Args:
        table: `[rows, pages]` int32, written; req_to_token: `[requests, tokens]` int32, slots.
        pool_indices, lens, starts: `[rows]` integers; starts are multiples of the page size, None for 0.
    """
    rows, pages = table.shape
    if rows == 0:
        return
    fill_page_table_kernel[(rows, triton.cdiv(pages, BLOCK_PAGES))](
        table,
        req_to_token,
        pool_indices,
        lens,
        lens if starts is None else starts,
        table.stride(0),
        req_to_token.stride(0),
        PAGE=page_size,
        STARTS=starts is not None,
        BLOCK=BLOCK_PAGES,
    )

"""Page tables of a batch, from the table that says in which slot of the latent pool each token of a request is.

    table[row, p] = req_to_token[pool_indices[row], starts[row] + p · page_size] // page_size

for every page p with p · page_size < lens[row].

Memory per page: reads one slot (of a 32-byte sector of its own, because slots of neighbouring pages are 256 bytes
apart), writes 4 bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sizes import PAGE_TOKENS

BLOCK_PAGES = 128
"""Pages of a program: one for each thread."""
NUM_WARPS = 4


# Tables may be slices that start anywhere, and a server's table of slots grows: no variant is compiled for either.
@triton.jit(
    do_not_specialize=["pages", "table_row", "slots_row"],
    do_not_specialize_on_alignment=["table_ptr", "req_to_token_ptr", "pool_indices_ptr", "lens_ptr", "starts_ptr"],
)
def fill_page_table_kernel(
    table_ptr,  # int32 [rows, pages], strides table_row, 1
    req_to_token_ptr,  # int32 [requests, tokens], strides slots_row, 1
    pool_indices_ptr,  # int32 or int64 [rows]
    lens_ptr,  # int32 or int64 [rows]
    starts_ptr,  # int32 or int64 [rows]; not read unless STARTS
    pages,
    table_row,
    slots_row,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    STARTS: tl.constexpr,
):
    """One program: BLOCK pages of one row."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    length = tl.load(lens_ptr + row).to(tl.int32)
    if first * PAGE < length:
        request = tl.load(pool_indices_ptr + row).to(tl.int64)
        page = first + tl.arange(0, BLOCK)
        there = (page * PAGE < length) & (page < pages)
        slots_ptr = req_to_token_ptr + request * slots_row
        if STARTS:
            slots_ptr += tl.load(starts_ptr + row)
        slot = tl.load(slots_ptr + page * PAGE, mask=there)
        tl.store(table_ptr + row * table_row + page, slot // PAGE, mask=there)


def fill_page_table(
    table: Tensor,
    req_to_token: Tensor,
    pool_indices: Tensor,
    lens: Tensor,
    starts: Tensor | None = None,
    page_size: int = PAGE_TOKENS,
) -> None:
    """Write the pages of tokens `[start, start + len)` of each request into its row of the table, from the left.

    Entries behind the last page of a row are left as they are, and so are rows of length 0. Capturable in a CUDA graph;
    nothing is read on the host.

    Args:
        table: `[rows, pages]` int32, written; pages beyond its width are left out.
        req_to_token: `[requests, tokens]` int32: slots, whole pages of consecutive slots. Both tables: any row stride,
            last axis contiguous.
        pool_indices: `[rows]`, each row's request in `req_to_token`; lens: `[rows]`; starts: `[rows]`, multiples of
            `page_size`, or None for 0. int32 or int64, contiguous; their values are not checked.
        page_size: a power of two.
    Raises:
        ValueError: a shape, dtype, stride or device is not as above.
    """
    check_tables(table, req_to_token, pool_indices, lens, starts, page_size)
    rows, pages = table.shape
    if rows == 0 or pages == 0:
        return
    fill_page_table_kernel[(rows, triton.cdiv(pages, BLOCK_PAGES))](
        table,
        req_to_token,
        pool_indices,
        lens,
        lens if starts is None else starts,
        pages,
        table.stride(0),
        req_to_token.stride(0),
        PAGE=page_size,
        BLOCK=BLOCK_PAGES,
        STARTS=starts is not None,
        num_warps=NUM_WARPS,
    )


def fill_page_table_torch(
    table: Tensor,
    req_to_token: Tensor,
    pool_indices: Tensor,
    lens: Tensor,
    starts: Tensor | None = None,
    page_size: int = PAGE_TOKENS,
) -> None:
    """`fill_page_table` in plain torch, for any device; arguments and errors are the same."""
    check_tables(table, req_to_token, pool_indices, lens, starts, page_size)
    if table.numel() == 0:
        return
    first = torch.arange(0, table.shape[1] * page_size, page_size, device=table.device)  # [pages], token in its row
    token = first if starts is None else first + starts[:, None]
    slots = req_to_token[pool_indices.long()[:, None], token.clamp_max(req_to_token.shape[1] - 1)]  # [rows, pages]
    table.copy_(torch.where(first < lens[:, None], slots // page_size, table))


def check_tables(
    table: Tensor, req_to_token: Tensor, pool_indices: Tensor, lens: Tensor, starts: Tensor | None, page_size: int
) -> None:
    """Raise the ValueErrors of `fill_page_table`."""
    if page_size <= 0 or page_size & (page_size - 1):
        raise ValueError(f"page_size must be a power of two, not {page_size}")
    for name, tensor in (("table", table), ("req_to_token", req_to_token)):
        if tensor.dtype != torch.int32 or tensor.ndim != 2 or tensor.stride(1) != 1:
            raise ValueError(
                f"{name} must be int32 [rows, ..] with a contiguous last axis, not {tensor.dtype} "
                f"{list(tensor.shape)} with strides {tensor.stride()}"
            )
    vectors = dict(pool_indices=pool_indices, lens=lens) | ({} if starts is None else dict(starts=starts))
    for name, tensor in vectors.items():
        if tensor.shape != table.shape[:1] or tensor.dtype not in (torch.int32, torch.int64) or tensor.stride(0) != 1:
            raise ValueError(
                f"{name} must be contiguous int32 or int64 [{table.shape[0]}], not {tensor.dtype} {list(tensor.shape)} "
                f"with strides {tensor.stride()}"
            )
    for name, tensor in (vectors | dict(req_to_token=req_to_token)).items():
        if tensor.device != table.device:
            raise ValueError(f"{name} is on {tensor.device}, but the table is on {table.device}")

"""SGLang's cache on the host (HiCache) on a machine without a GPU: plain memory in place of pinned memory, and copies
in torch in place of compiled functions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def before_host_pool(*args: Any, **kwargs: Any) -> None:
    """Give the pools on the host memory, and copies for `--hicache-io-backend direct`."""
    from sglang.srt.mem_cache.pool_host import mla

    mla.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    # Of states of linear layers, where the release has it: imported with the pools.
    mamba: Any = sys.modules.get("sglang.srt.mem_cache.pool_host.mamba")
    for module in (mla, mamba) if mamba else (mla,):
        module.transfer_kv_direct = copy_rows
        module.transfer_kv_all_layer_direct_lf_pf = copy_to_pages
        module.transfer_kv_per_layer_direct_pf_lf = copy_from_pages


def after_host_pool(result: None, host_pool: Any, *args: Any, **kwargs: Any) -> None:
    """Pin no memory that pages from storage are read into."""
    host_pool.pin_memory = False


def _allocate(dims: Sequence[int], dtype: torch.dtype, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty(*dims, dtype=dtype)


def copy_rows(
    src_layers: Sequence[Tensor], dst_layers: Sequence[Tensor], src_indices: Tensor, dst_indices: Tensor, page_size: int
) -> None:
    """Copy rows between pools whose layers are tensors of their own, `[rows, ..]` each."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def copy_to_pages(
    src_ptrs: Sequence[Tensor], dst_ptrs: Sequence[Tensor], src_indices: Tensor, dst_indices: Tensor, page_size: int
) -> None:
    """Copy rows to a pool of pages with all layers.

    Args:
        src_ptrs: of each layer, `[rows, ..]`; dst_ptrs: one, `[pages, layers, page_size, ..]`.
        src_indices, dst_indices: rows.
    """
    for layer, source in enumerate(src_ptrs):
        dst_ptrs[0][dst_indices // page_size, layer, dst_indices % page_size] = source[src_indices]


def copy_from_pages(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy rows of one layer from such a pool.

    Args:
        src_ptrs: one, `[pages, layers, page_size, ..]`; dst_ptrs: the layer's, `[rows, ..]`.
    """
    dst_ptrs[0][dst_indices] = src_ptrs[0][src_indices // page_size, layer_id, src_indices % page_size]

"""The one place that picks between implementations of an operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .constants import PAGE_TOKENS
from .naive import sm90_naive, triton_naive
from .naive.attention import SharedAttention, TorchSharedAttention, TritonSharedAttention
from .naive.triton_naive import Tile
from .storage import page_table
from .storage.append_latent import append_latent
from .storage.expanded import ExpandedBuffers
from .storage.fetch_latent import fetch_latent
from .storage.join_parts import join_parts
from .storage.latent_rows import LatentRowLayout, dequantize, quantize


def make_shared_attention(
    buffers: ExpandedBuffers,
    *,
    max_rows: int,
    heads: int,
    device: torch.device | str,
    tiles: Sequence[Mapping[str, int]] = (),
    portable: bool = False,
) -> SharedAttention:
    """Attention over the expanded segments in `buffers`: the kernel for this GPU, or torch where there is none.

    Args:
        tiles: fields of `triton_naive.Tile`, smallest first, for the Hopper kernel: as calibrated for this GPU and the
            dtype of `buffers`. By default those that are best on an H200.
        portable: use the kernel for any GPU also where there is one for this GPU.
    Raises:
        ValueError: the buffers are on another device, or hold another number of heads.
    """
    device = torch.device(device)
    if buffers.device.type != device.type:
        raise ValueError(f"the expanded prefixes are on {buffers.device}, not on {device}")
    if device.type != "cuda":
        return TorchSharedAttention(buffers, max_rows=max_rows, heads=heads)
    if portable or not sm90_naive.supports(buffers):
        return TritonSharedAttention(buffers, max_rows=max_rows, heads=heads, kernel=triton_naive)
    hopper_tiles = [Tile(**fields) for fields in tiles]
    return TritonSharedAttention(buffers, max_rows=max_rows, heads=heads, kernel=sm90_naive, tiles=hopper_tiles)


def workspace_bytes(*, max_rows: int, heads: int, v_head_dim: int, chunks: int, device: torch.device | str) -> int:
    """What `make_shared_attention` allocates beside the buffers, known before they exist."""
    sizes = {"max_rows": max_rows, "heads": heads, "v_head_dim": v_head_dim}
    device = torch.device(device)
    if device.type == "cuda":
        sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        return TritonSharedAttention.workspace_bytes_for(**sizes, chunks=chunks, sm_count=sm_count)
    return TorchSharedAttention.workspace_bytes_for(**sizes)


def whole_query(q_absorbed: Tensor, q_rope: Tensor) -> Tensor:
    """`[T, H, r + dr]`, contiguous, of `q_absorbed [T, H, r]` and `q_rope [T, H, dr]`; errors are those of
    `join_parts`."""
    if not q_absorbed.is_cuda:
        return torch.cat([q_absorbed, q_rope], dim=-1)
    out = q_absorbed.new_empty(*q_absorbed.shape[:-1], q_absorbed.shape[-1] + q_rope.shape[-1])
    join_parts(q_absorbed, q_rope, out)
    return out


def append_rows(latent: Tensor, rope: Tensor, slots: Tensor, pool: Tensor) -> None:
    """Write latent rows to slots of an FP8 pool; arguments and errors are those of `append_latent`."""
    if pool.is_cuda:
        append_latent(latent, rope, slots, pool)
        return
    kept = slots >= 0
    pool[slots[kept].long()] = quantize(latent[kept], rope[kept])


def fetch_rows(pool: Tensor, slots: Tensor, latent: Tensor, rope: Tensor) -> None:
    """Read rows of an FP8 pool as numbers; arguments and errors are those of `fetch_latent`."""
    if pool.is_cuda:
        fetch_latent(pool, slots, latent, rope)
        return
    kept = slots >= 0
    layout = LatentRowLayout(latent.shape[-1], rope.shape[-1])
    latent_read, rope_read = dequantize(pool[slots[kept].long()], layout)
    latent[kept], rope[kept] = latent_read.to(latent.dtype), rope_read.to(rope.dtype)


def fill_page_table(
    table: Tensor,
    req_to_token: Tensor,
    pool_indices: Tensor,
    lens: Tensor,
    starts: Tensor | None = None,
    page_size: int = PAGE_TOKENS,
) -> None:
    """Pages of each row's tokens; arguments and errors are those of `page_table.fill_page_table`."""
    fill = page_table.fill_page_table if table.is_cuda else page_table.fill_page_table_torch
    fill(table, req_to_token, pool_indices, lens, starts, page_size)

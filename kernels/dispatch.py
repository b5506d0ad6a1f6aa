"""The one place that picks between implementations of an operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .absorb import sm90_bf16_absorb, sm90_fp8_absorb, sm90_fp8_few_heads
from .absorb.grouped import GroupedAbsorb, HopperGroupedAbsorb
from .absorb.grouped_fp8 import HopperGroupedAbsorbFP8
from .absorb.paged_fp8 import AbsorbFP8, HopperAbsorbFP8, HopperKernel, TritonAbsorbFP8
from .absorb.stacking import TILE_ROWS, padded_heads
from .kept_part import KeptPart, TorchKeptPart
from .memory import Memory
from .naive import sm90_naive, triton_naive
from .naive.attention import SharedAttention, TorchSharedAttention
from .naive.tiles import Tile
from .naive.triton_attention import TritonSharedAttention
from .sizes import PAGE_TOKENS
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
    plan_rows: int = 0,
    segments_per_row: int = 1,
    memory: Memory | None = None,
) -> SharedAttention:
    """Attention over the expanded segments in `buffers`: the kernel for this GPU, or torch where there is none.

    Args:
        tiles: fields of `naive.tiles.Tile`, smallest first, for the Hopper kernel: as calibrated for this GPU and the
            dtype of `buffers`. By default those that are best on an H200, and always for heads wider than 128.
        portable: use the kernel for any GPU also where there is one for this GPU.
        plan_rows: rows of plans that `make_plan` makes, if that is more than `max_rows`.
        segments_per_row: segments that a row is in on average, at most: each one more costs `max_rows` partials.
        memory: where the large buffers are allocated.
    Raises:
        ValueError: the buffers are on another device, or hold another number of heads.
    """
    device = torch.device(device)
    if buffers.device.type != device.type:
        raise ValueError(f"the expanded prefixes are on {buffers.device}, not on {device}")
    sizes: dict[str, Any] = dict(
        max_rows=max_rows, heads=heads, plan_rows=plan_rows, segments_per_row=segments_per_row, memory=memory
    )
    if device.type != "cuda":
        return TorchSharedAttention(buffers, **sizes)
    if portable or not sm90_naive.supports(buffers):
        return TritonSharedAttention(buffers, kernel=triton_naive, **sizes)
    calibrated = () if buffers.is_wide else tiles
    return TritonSharedAttention(buffers, kernel=sm90_naive, tiles=[Tile(**fields) for fields in calibrated], **sizes)


def workspace_bytes(
    *,
    max_rows: int,
    heads: int,
    v_head_dim: int,
    chunks: int,
    device: torch.device | str,
    tiles: Sequence[Mapping[str, int]] = (),
    plan_rows: int = 0,
    segments_per_row: int = 1,
) -> int:
    """The most that `make_shared_attention` allocates beside the buffers, known before they exist."""
    sizes = dict(max_rows=max_rows, heads=heads, v_head_dim=v_head_dim, plan_rows=plan_rows)
    device = torch.device(device)
    if device.type == "cuda":
        return TritonSharedAttention.workspace_bytes_for(
            **sizes,
            chunks=chunks,
            sm_count=multiprocessors(device),
            segments_per_row=segments_per_row,
            tiles=[Tile(**fields) for fields in tiles],
        )
    return TorchSharedAttention.workspace_bytes_for(**sizes)


def make_kept_part(
    max_rows: int, heads: int, v_head_dim: int, *, device: torch.device | str, **options: Any
) -> KeptPart:
    """Memory for one part of a pass's attention and its merge; see KeptPart."""
    kind = KeptPart if torch.device(device).type == "cuda" else TorchKeptPart
    return kind(max_rows, heads, v_head_dim, device=device, **options)


def multiprocessors(device: torch.device | str) -> int:
    """Number of multiprocessors of a GPU."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


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


# ---- absorb

OnFailure = Callable[[BaseException], object]
"""Is told of the error of an implementation that should run here."""


def kernel_for(heads: int, query_tokens: int = 1) -> HopperKernel:
    """Hopper's kernel over FP8 rows for tails of so many heads and query tokens."""
    if heads * query_tokens in sm90_fp8_few_heads.ROWS:
        return HopperKernel(sm90_fp8_few_heads, heads * query_tokens)
    return HopperKernel(sm90_fp8_absorb, TILE_ROWS)


def make_hopper_absorb_fp8(*, heads: int, query_tokens: int = 1, **sizes: Any) -> HopperAbsorbFP8:
    """The Hopper implementation with its kernel for these sizes, whatever the device; arguments as of `AbsorbFP8`."""
    return HopperAbsorbFP8(kernel=kernel_for(heads, query_tokens), heads=heads, query_tokens=query_tokens, **sizes)


def make_hopper_grouped_absorb_fp8(*, heads: int, query_tokens: int = 1, **sizes: Any) -> HopperGroupedAbsorbFP8:
    """The Hopper implementation with its kernels for these sizes, whatever the device; arguments as of
    `GroupedAbsorb`."""
    tail_kernel = kernel_for(padded_heads(heads), query_tokens)
    return HopperGroupedAbsorbFP8(tail_kernel=tail_kernel, heads=heads, query_tokens=query_tokens, **sizes)


def make_absorb_fp8(
    pool: Tensor,
    *,
    heads: int,
    dtype: torch.dtype,
    on_failure: OnFailure,
    layout: LatentRowLayout | None = None,
    query_tokens: int = 1,
    page_size: int = PAGE_TOKENS,
    **sizes: Any,
) -> AbsorbFP8:
    """Attention over FP8 rows by the Hopper kernels, or by Triton's where those do not run. It has been tried out.

    Args:
        pool: as for `AbsorbFP8.run`, of any layer; dtype: of queries and results.
        sizes: others of `AbsorbFP8`.
    """
    layout, device = layout or LatentRowLayout(), pool.device
    sizes |= dict(heads=heads, device=device, layout=layout, query_tokens=query_tokens, page_size=page_size)

    def tried(make: Callable[..., AbsorbFP8]) -> AbsorbFP8:
        absorb = make(**sizes)
        absorb.try_out(pool, dtype)
        return absorb

    if sm90_fp8_absorb.supports(device, layout, heads, page_size):
        try:
            return tried(make_hopper_absorb_fp8)
        except Exception as error:
            on_failure(error)
    return tried(TritonAbsorbFP8)


def absorb_fp8_bytes(*, heads: int, num_sms: int, layout: LatentRowLayout, **sizes: Any) -> int:
    """The most that `make_absorb_fp8` allocates, whichever implementation runs; sizes as of `AbsorbFP8`."""
    sizes |= dict(heads=heads, num_sms=num_sms, layout=layout, device="meta")
    made: list[AbsorbFP8] = [TritonAbsorbFP8(**sizes)]
    if (layout.kv_lora_rank, layout.qk_rope_head_dim) == (512, 64) and heads % 8 == 0:
        made.append(make_hopper_absorb_fp8(**sizes))
    return max(absorb.workspace_bytes for absorb in made)


def grouped_absorb_bytes(*, heads: int, fp8: bool, **sizes: Any) -> int:
    """The most that `make_grouped_absorb` allocates, or `make_grouped_absorb_fp8`; sizes as of `GroupedAbsorb`, with
    `programs`."""
    make = make_hopper_grouped_absorb_fp8 if fp8 else HopperGroupedAbsorb
    return make(heads=heads, device="meta", **sizes).workspace_bytes


def make_grouped_absorb(
    req_to_token: Tensor,
    latent_pages: Tensor,
    *,
    heads: int,
    kv_lora_rank: int,
    on_failure: OnFailure,
    **sizes: Any,
) -> GroupedAbsorb | None:
    """Grouped absorb over BF16 latent pages, tried out; None where its kernel is not for this device, dtype or size, or
    does not run: then plain absorb is all there is.

    Args:
        req_to_token: as for `GroupedAbsorb.begin_step`; latent_pages: as for `HopperGroupedAbsorb.run`, of any layer.
        sizes: `max_rows`, `max_tokens` and others of `GroupedAbsorb`.
    """
    device, dtype = latent_pages.device, latent_pages.dtype
    dims = dict(kv_lora_rank=kv_lora_rank, qk_rope_head_dim=latent_pages.shape[-1] - kv_lora_rank)
    if not sm90_bf16_absorb.supports(device, dtype, **dims, heads=padded_heads(heads)):
        return None
    sizes |= dict(heads=heads, dtype=dtype, device=device, **dims)
    return _grouped_or_none(lambda: HopperGroupedAbsorb(**sizes), req_to_token, latent_pages, on_failure)


def make_grouped_absorb_fp8(
    req_to_token: Tensor,
    pool: Tensor,
    *,
    heads: int,
    layout: LatentRowLayout,
    dtype: torch.dtype,
    on_failure: OnFailure,
    **sizes: Any,
) -> GroupedAbsorb | None:
    """Grouped absorb over FP8 rows, tried out; None as for `make_grouped_absorb`.

    Args:
        req_to_token: as for `GroupedAbsorb.begin_step`; pool: as for `HopperGroupedAbsorbFP8.run`, of any layer, its
            rows as `layout` has them.
        dtype: of queries and results.
        sizes: `max_rows`, `max_tokens` and others of `GroupedAbsorb`.
    """
    if not sm90_fp8_absorb.supports(pool.device, layout, padded_heads(heads), PAGE_TOKENS):
        return None
    dims = dict(kv_lora_rank=layout.kv_lora_rank, qk_rope_head_dim=layout.qk_rope_head_dim)
    sizes |= dict(heads=heads, dtype=dtype, device=pool.device, **dims)
    return _grouped_or_none(lambda: make_hopper_grouped_absorb_fp8(**sizes), req_to_token, pool, on_failure)


def _grouped_or_none(
    make: Callable[[], GroupedAbsorb], req_to_token: Tensor, cache: Tensor, on_failure: OnFailure
) -> GroupedAbsorb | None:
    try:
        grouped = make()
        grouped.try_out(req_to_token, cache)
        return grouped
    except Exception as error:
        on_failure(error)
        return None

"""The byte layout of FP8 latent rows, and what their bytes mean, in plain torch.

    row = r bytes e4m3 content | float32 scale | 12 bytes of padding | dr BF16 rotary, divided by the scale

656 bytes for r = kv_lora_rank = 512 and dr = qk_rope_head_dim = 64, where BF16 takes 1,152. One scale serves the whole
row: content = e4m3 · scale, and because the rotary part is stored divided by it (SnapMLA, equation 6), the whole
product of a query and a row needs one factor, once. The padding puts every part on 16 bytes; it is never read.

The scale brings the largest content element between 224 and 448, e4m3's largest value:

    scale = the power of two at or above max(|content|max / 448, max(1, |rotary|max) · 2^-60), at most 2^119

A power of two, because dividing and multiplying by it are exact: the division does not round the rotary part a second
time, and a row that is read and written again keeps its values. SnapMLA's own scale, |content|max / 448, rounds the
rotary part once more, and gives the largest element without error (docs/accuracy.md compares them).

The second term is a floor that no model reaches. It bounds the stored rotary part by 2^60, so that neither BF16 nor
the float32 sum over 64 products of two such numbers can overflow, and it keeps every scale at 2^-60 or more, so that
the sums that attention keeps in units of the scale stay finite as well. Consequences:

- A row of zeros has the scale 2^-60 and is read back as zeros.
- Content below 2^-70 in a row of nothing larger (and beside a rotary part of up to 1) is read back as zero.
- One huge element is read back within e4m3's precision, and saturates at 448 · 2^119 = 2.98e38. Elements more than 2^14
  times smaller lose bits, and those more than 2^19 times smaller become zero. Nothing becomes infinite.
- A row with a NaN or an infinity in any place is stored as zeros with a NaN scale: it is NaN as a whole when it is
  read, and other rows do not change.

Source: SnapMLA, section 3.1.2 and equation 6.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..constants import FP8, FP8_MAX
from .expanded import to_fp8

SCALE_FLOOR = 2.0**-60
"""The smallest scale, and the largest rotary element times it is the smallest of its row."""

SCALE_LIMIT = 2.0**119
"""The largest scale: 448 times it is finite."""

SCALE_BYTES = 16
"""The scale and its padding."""


@dataclass(frozen=True)
class LatentRowLayout:
    """Layout of a latent row: offsets of its parts, and views of them in a pool of rows.

    Raises:
        ValueError: a part would not start at a multiple of 16 bytes.
    """

    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64

    def __post_init__(self) -> None:
        if self.kv_lora_rank <= 0 or self.kv_lora_rank % 16:
            raise ValueError(f"kv_lora_rank must be a positive multiple of 16, not {self.kv_lora_rank}")
        if self.qk_rope_head_dim <= 0 or self.qk_rope_head_dim % 8:
            raise ValueError(f"qk_rope_head_dim must be a positive multiple of 8, not {self.qk_rope_head_dim}")

    @property
    def scale_offset(self) -> int:
        """Byte of a row where its scale starts."""
        return self.kv_lora_rank

    @property
    def rope_offset(self) -> int:
        """Byte of a row where its rotary part starts."""
        return self.kv_lora_rank + SCALE_BYTES

    @property
    def row_bytes(self) -> int:
        return self.rope_offset + 2 * self.qk_rope_head_dim

    def check(self, pool: Tensor) -> None:
        """Raises:
        ValueError: pool is not uint8 `[.., row_bytes]` with contiguous rows at multiples of 16 bytes.
        """
        if pool.dtype != torch.uint8 or pool.ndim < 2 or pool.shape[-1] != self.row_bytes:
            raise ValueError(f"the pool must be uint8 [slots, {self.row_bytes}], not {pool.dtype} {list(pool.shape)}")
        if pool.stride(-1) != 1 or any(stride % 16 for stride in pool.stride()[:-1]) or pool.data_ptr() % 16:
            raise ValueError(
                f"rows must be contiguous and start at multiples of 16 bytes; the strides are {pool.stride()}, the "
                f"address is {pool.data_ptr():#x}"
            )

    def content(self, pool: Tensor) -> Tensor:
        """Content, e4m3 `[.., r]`, a view of a pool uint8 `[.., row_bytes]`."""
        return pool[..., : self.kv_lora_rank].view(FP8)

    def scale(self, pool: Tensor) -> Tensor:
        """Scale, float32 `[..]`, a view."""
        return pool[..., self.scale_offset : self.scale_offset + 4].view(torch.float32)[..., 0]

    def rope(self, pool: Tensor) -> Tensor:
        """Rotary part divided by the scale, BF16 `[.., dr]`, a view."""
        return pool[..., self.rope_offset :].view(torch.bfloat16)


def row_scale(content: Tensor, rope: Tensor, power_of_two: bool = True) -> Tensor:
    """The scale of rows of latents, or of queries: the formula at the top of this file.

    Args:
        content: `[.., r]`; rope: `[.., dr]`.
        power_of_two: False leaves out that step, as SnapMLA does.
    Returns:
        `[..]` float32; NaN where the row has a NaN or an infinity.
    """
    largest = content.float().abs().amax(dim=-1)  # [..]
    largest_rope = rope.float().abs().amax(dim=-1)  # [..]
    scale = torch.maximum(largest / FP8_MAX, largest_rope.clamp_min(1.0) * SCALE_FLOOR)
    finite = largest.isfinite() & largest_rope.isfinite()
    if power_of_two:
        bits = scale.masked_fill(~finite, 1.0).view(torch.int32)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)  # a mantissa above 0 carries into the exponent
    return scale.clamp_max(SCALE_LIMIT).masked_fill(~finite, torch.nan)


def divide(content: Tensor, rope: Tensor, power_of_two: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Content in e4m3 `[.., r]`, scale float32 `[..]`, rotary part divided by it in BF16 `[.., dr]`.

    Args:
        content: `[.., r]`; rope: `[.., dr]`; computed in float32.
        power_of_two: see row_scale.
    """
    scale = row_scale(content, rope, power_of_two)
    divisor, wrong = scale[..., None], scale.isnan()[..., None]  # [.., 1]
    content = to_fp8((content.float() / divisor).masked_fill(wrong, 0.0))
    return content, scale, (rope.float() / divisor).masked_fill(wrong, 0.0).to(torch.bfloat16)


def quantize(latent: Tensor, rope: Tensor) -> Tensor:
    """Rows of bytes from latent rows; the reference of append_latent.

    Args:
        latent: `[n, r]`, the content after its norm; rope: `[n, dr]`; computed in float32.
    Returns:
        `[n, row_bytes]` uint8, padding zero.
    """
    layout = LatentRowLayout(latent.shape[-1], rope.shape[-1])
    rows = torch.zeros(len(latent), layout.row_bytes, dtype=torch.uint8, device=latent.device)
    content, scale, rope = divide(latent, rope)
    layout.content(rows).copy_(content)
    layout.scale(rows).copy_(scale)
    layout.rope(rows).copy_(rope)
    return rows


def dequantize(rows: Tensor, layout: LatentRowLayout | None = None) -> tuple[Tensor, Tensor]:
    """Convert rows of bytes to numbers; the reference of fetch_latent.

    Args:
        rows: `[.., row_bytes]` uint8; layout: DeepSeek-V3's if None.
    Returns:
        `latent [.., r]` and `rope [.., dr]`, float32.
    """
    layout = layout or LatentRowLayout()
    scale = layout.scale(rows)[..., None]  # [.., 1]
    return layout.content(rows).float() * scale, layout.rope(rows).float() * scale

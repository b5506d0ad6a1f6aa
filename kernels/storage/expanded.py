"""The byte layout of expanded prefixes.

An expanded prefix is what the latent rows of a shared prefix become after multiplication with `w_kc` and `w_vc`:
keys and values per head. They live in chunks of a fixed number of tokens, so that the pool of chunks cannot fragment,
and every layer uses the same chunk ids. Size per token, layer and head: dn + dv bytes in FP8 and twice that in BF16,
plus 2·dr bytes per token and layer for the rotary keys, which all heads share and which are never FP8.

FP8 is e4m3, with one scale per layer and head for keys and one for values (see `scale_bounds`): a key scale is folded
into the rotary query, a value scale into the output, so neither costs anything per key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from ..constants import FP8, FP8_MAX
from ..memory import Memory, tensor_bytes
from ..sizes import CHUNK_TOKENS

FP8_TOKEN_ORDER = tuple(8 * (i >> 1 & 1) + 4 * (i >> 3 & 1) + 2 * (i >> 2 & 1) + (i & 1) for i in range(16))
"""Position i of every 16 in an FP8 `v_t` holds token `FP8_TOKEN_ORDER[i]` of these 16.

After the first matrix product a thread of a Hopper warp group holds weights of certain columns; as an operand of the
second product it must hold those of other columns. With the values stored in this order the weights that a thread has
are the ones it needs, and none has to move between threads."""


def scale_bounds(weight_rows: Tensor) -> Tensor:
    """The smallest scale of each head with which no token can leave the range of e4m3, from weights alone.

    A latent row is the norm's weight times x with |x|_2 <= sqrt(r) (RMS norm), so an element of a key or value is at
    most |its row of the product's weight times the norm's weight|_2 * sqrt(r) (Cauchy-Schwarz). A typical element is
    some sqrt(r) = 23 times smaller, which costs no precision, because e4m3 keeps it over a range of 2^15. So a scale
    never has to follow the data.

    Args:
        weight_rows: `[H, d, r]`, the rows of the product's weight times the norm's weight.
    Returns:
        `[H]` float32.
    """
    rank = weight_rows.shape[-1]
    norms = weight_rows.float().norm(dim=-1)  # [H, d]
    rounding = 1.02  # the latent row and the product are rounded to BF16
    # Not below: kernels divide the rotary query by it, which would overflow for a head whose weights are all zero.
    return (norms.amax(dim=-1) * rank**0.5 * rounding / FP8_MAX).clamp_min(2.0**-60)


def to_fp8(values: Tensor) -> Tensor:
    """Round to e4m3; what is out of its range becomes the largest value (a plain cast makes it NaN)."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(FP8)


@dataclass
class ExpandedBuffers:
    """The memory of all expanded prefixes of a server: `chunks` chunks of `CHUNK_TOKENS` tokens in every layer.

    Values are stored transposed, token axis contiguous: the second matrix product sums over tokens, and the matrix unit
    of Hopper reads FP8 operands only along the axis it sums over. BF16 keeps the same layout, FP8 permutes the tokens
    (see FP8_TOKEN_ORDER). True keys and values are the stored ones times their scale; the scales are 1 unless FP8.
    """

    k_nope: Tensor  # [layers, chunks, heads, CHUNK_TOKENS, dn]
    v_t: Tensor  # [layers, chunks, heads, dv, CHUNK_TOKENS]
    k_rope: Tensor  # [layers, chunks, CHUNK_TOKENS, dr], BF16 beside FP8
    k_scale: Tensor  # [layers, heads] float32
    v_scale: Tensor  # [layers, heads] float32

    @classmethod
    def allocate(
        cls,
        *,
        layers: int,
        chunks: int,
        heads: int,
        qk_nope_head_dim: int,
        v_head_dim: int,
        qk_rope_head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
        memory: Memory | None = None,
    ) -> ExpandedBuffers:
        """Allocate zero-filled buffers.

        Args:
            heads: of this rank.
            memory: where keys and values are allocated; scales are not.
        Raises:
            ValueError: dtype is none of float8_e4m3fn, bfloat16 and float32, or a size is not positive.
        """
        if dtype not in (FP8, torch.bfloat16, torch.float32):
            raise ValueError(f"expanded prefixes are stored in float8_e4m3fn, bfloat16 or float32, not {dtype}")
        sizes = dict(layers=layers, chunks=chunks, heads=heads)
        sizes |= dict(dn=qk_nope_head_dim, dv=v_head_dim, dr=qk_rope_head_dim)
        for name, size in sizes.items():
            if size <= 0:
                raise ValueError(f"{name} must be positive, not {size}")
        rope_dtype, zeros = _rope_dtype(dtype), partial((memory or Memory()).zeros, device=device)
        return cls(
            k_nope=zeros(layers, chunks, heads, CHUNK_TOKENS, qk_nope_head_dim, dtype=dtype),
            v_t=zeros(layers, chunks, heads, v_head_dim, CHUNK_TOKENS, dtype=dtype),
            k_rope=zeros(layers, chunks, CHUNK_TOKENS, qk_rope_head_dim, dtype=rope_dtype),
            k_scale=torch.ones(layers, heads, dtype=torch.float32, device=device),
            v_scale=torch.ones(layers, heads, dtype=torch.float32, device=device),
        )

    @staticmethod
    def bytes_per_chunk(
        *,
        layers: int,
        heads: int,
        qk_nope_head_dim: int,
        v_head_dim: int,
        qk_rope_head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> int:
        """Bytes that one chunk takes in all layers together."""
        per_head = (qk_nope_head_dim + v_head_dim) * dtype.itemsize
        return layers * CHUNK_TOKENS * (heads * per_head + qk_rope_head_dim * _rope_dtype(dtype).itemsize)

    @property
    def layers(self) -> int:
        return self.k_nope.shape[0]

    @property
    def chunks(self) -> int:
        return self.k_nope.shape[1]

    @property
    def heads(self) -> int:
        return self.k_nope.shape[2]

    @property
    def qk_nope_head_dim(self) -> int:
        return self.k_nope.shape[4]

    @property
    def v_head_dim(self) -> int:
        return self.v_t.shape[3]

    @property
    def qk_rope_head_dim(self) -> int:
        return self.k_rope.shape[3]

    @property
    def is_wide(self) -> bool:
        """Return whether a head is wider than DeepSeek's, so that kernels have to process fewer tokens at once."""
        return max(self.qk_nope_head_dim, self.v_head_dim) > 128

    @property
    def dtype(self) -> torch.dtype:
        return self.k_nope.dtype

    @property
    def device(self) -> torch.device:
        return self.k_nope.device

    @staticmethod
    def scale_bytes(*, layers: int, heads: int) -> int:
        """Bytes that the scales take, beside the chunks."""
        return 2 * 4 * layers * heads

    @property
    def bytes(self) -> int:
        """Bytes of all chunks."""
        return tensor_bytes(self.k_nope, self.v_t, self.k_rope)

    def write(self, layer: int, chunk: int, offset: int, k_nope: Tensor, v: Tensor, k_rope: Tensor) -> None:
        """Write n tokens at token `offset` of one chunk of one layer; they are divided by the scales and rounded.

        Args:
            k_nope: `[n, heads, dn]`; v: `[n, heads, dv]`; k_rope: `[n, dr]`.
        Raises:
            ValueError: the tokens do not fit into the chunk, the layer or chunk does not exist, or a shape is wrong.
        """
        n = k_rope.shape[0]
        if not (0 <= layer < self.layers and 0 <= chunk < self.chunks):
            raise ValueError(f"layer {layer}, chunk {chunk}: there are {self.layers} layers and {self.chunks} chunks")
        if offset < 0 or offset + n > CHUNK_TOKENS:
            raise ValueError(f"tokens [{offset}, {offset + n}) do not fit into a chunk of {CHUNK_TOKENS} tokens")
        expected = {
            "k_nope": (k_nope, (n, self.heads, self.qk_nope_head_dim)),
            "v": (v, (n, self.heads, self.v_head_dim)),
            "k_rope": (k_rope, (n, self.qk_rope_head_dim)),
        }
        for name, (tensor, shape) in expected.items():
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must be {list(shape)}, not {list(tensor.shape)}")
        position = torch.arange(offset, offset + n, device=self.device)
        if self.dtype == FP8:
            k_nope = to_fp8(k_nope.float() / self.k_scale[layer, :, None])
            v = to_fp8(v.float() / self.v_scale[layer, :, None])
            position = _token_to_position(self.device)[position]
        tokens = slice(offset, offset + n)
        self.k_nope[layer, chunk, :, tokens].copy_(k_nope.transpose(0, 1))  # [heads, n, dn]
        # FP8 is viewed as bytes: torch cannot index FP8 tensors on every device.
        v_t = self.v_t[layer, chunk]  # [heads, dv, CHUNK_TOKENS]
        v_t, v = (v_t.view(torch.uint8), v.view(torch.uint8)) if self.dtype == FP8 else (v_t, v.to(self.dtype))
        v_t[:, :, position] = v.permute(1, 2, 0)  # [heads, dv, n]
        self.k_rope[layer, chunk, tokens].copy_(k_rope)  # [n, dr]

    def read(self, layer: int, chunks: Sequence[int], n: int) -> tuple[Tensor, Tensor, Tensor]:
        """The first n tokens of a prefix, true values.

        Args:
            chunks: ids of the chunks that hold them, in order.
        Returns:
            `k_nope [n, heads, dn]`, `v [n, heads, dv]` and `k_rope [n, dr]`, float32 where stored as FP8.
        """
        ids = torch.tensor(chunks[: -(-n // CHUNK_TOKENS)], device=self.device)
        if self.dtype == FP8:
            k_nope = self.k_nope[layer].view(torch.uint8)[ids].view(FP8).float() * self.k_scale[layer, :, None, None]
            v_t = self.v_t[layer].view(torch.uint8)[ids][..., _token_to_position(self.device)].view(FP8)
            v_t = v_t.float() * self.v_scale[layer, :, None, None]
        else:
            k_nope, v_t = self.k_nope[layer, ids], self.v_t[layer, ids]
        return (
            k_nope.transpose(1, 2).flatten(0, 1)[:n],  # [n, heads, dn]
            v_t.permute(0, 3, 1, 2).flatten(0, 1)[:n],  # [n, heads, dv]
            self.k_rope[layer, ids].flatten(0, 1)[:n],  # [n, dr]
        )


def _rope_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == FP8 else dtype


@cache
def _token_to_position(device: torch.device) -> Tensor:
    """`[CHUNK_TOKENS]`: where each token of a chunk stands in an FP8 `v_t`. Cached, because the host
    waits for the copy."""
    position = torch.tensor(FP8_TOKEN_ORDER, device=device).argsort()  # the inverse permutation, of 16
    start = torch.arange(0, CHUNK_TOKENS, len(FP8_TOKEN_ORDER), device=device)
    return (start[:, None] + position).flatten()

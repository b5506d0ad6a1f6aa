"""The byte layout of expanded prefixes.

An expanded prefix is what the latent rows of a shared prefix become after multiplication with `w_kc` and `w_vc`:
keys and values per head. They live in chunks of a fixed number of tokens, so that the pool of chunks cannot fragment,
and every layer uses the same chunk ids. Size per token, layer and head: 2·(dn + dv) bytes in BF16, plus 2·dr bytes per
token and layer for the rotary keys, which all heads share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_TOKENS = 256
"""Tokens in a chunk: a multiple of every key tile, so that a tile never crosses a chunk."""


@dataclass
class ExpandedBuffers:
    """The memory of all expanded prefixes of a server: `chunks` chunks of `CHUNK_TOKENS` tokens in every layer.

    Values are stored transposed, token axis contiguous: the second matrix product sums over tokens, and the matrix unit
    of Hopper reads FP8 operands only along the axis it sums over. BF16 keeps the same layout.
    """

    k_nope: Tensor  # [layers, chunks, heads, CHUNK_TOKENS, dn]
    v_t: Tensor  # [layers, chunks, heads, dv, CHUNK_TOKENS]
    k_rope: Tensor  # [layers, chunks, CHUNK_TOKENS, dr]

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
    ) -> ExpandedBuffers:
        """Allocate zero-filled buffers; `heads` are the heads of this rank.

        Raises:
            ValueError: dtype is neither bfloat16 nor float32, or a size is not positive.
        """
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"expanded prefixes are stored in bfloat16 or float32, not {dtype}")
        sizes = dict(layers=layers, chunks=chunks, heads=heads)
        sizes |= dict(dn=qk_nope_head_dim, dv=v_head_dim, dr=qk_rope_head_dim)
        for name, size in sizes.items():
            if size <= 0:
                raise ValueError(f"{name} must be positive, not {size}")
        return cls(
            k_nope=torch.zeros(layers, chunks, heads, CHUNK_TOKENS, qk_nope_head_dim, dtype=dtype, device=device),
            v_t=torch.zeros(layers, chunks, heads, v_head_dim, CHUNK_TOKENS, dtype=dtype, device=device),
            k_rope=torch.zeros(layers, chunks, CHUNK_TOKENS, qk_rope_head_dim, dtype=dtype, device=device),
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
        per_token = heads * (qk_nope_head_dim + v_head_dim) + qk_rope_head_dim
        return layers * CHUNK_TOKENS * per_token * dtype.itemsize

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
    def dtype(self) -> torch.dtype:
        return self.k_nope.dtype

    @property
    def device(self) -> torch.device:
        return self.k_nope.device

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.k_nope, self.v_t, self.k_rope))

    def write(self, layer: int, chunk: int, offset: int, k_nope: Tensor, v: Tensor, k_rope: Tensor) -> None:
        """Write n tokens at token `offset` of one chunk of one layer; other dtypes are converted.

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
        tokens = slice(offset, offset + n)
        self.k_nope[layer, chunk, :, tokens].copy_(k_nope.transpose(0, 1))  # [heads, n, dn]
        self.v_t[layer, chunk, :, :, tokens].copy_(v.permute(1, 2, 0))  # [heads, dv, n]
        self.k_rope[layer, chunk, tokens].copy_(k_rope)  # [n, dr]

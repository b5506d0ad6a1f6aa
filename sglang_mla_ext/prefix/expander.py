"""Latent rows to expanded keys and values, through the model's own `kv_b_proj`, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang_mla_ext.kernels.layout import CHUNK_TOKENS, ExpandedBuffers

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA


class Expander:
    """Writes expanded prefixes of one model into the buffers.

    Its work is enqueued on the current stream, behind the forward passes that wrote the latent rows and before those
    that read the result; nothing waits on the host.
    """

    def __init__(
        self, layers: Sequence[DeepseekV2AttentionMLA], pool: MLATokenToKVPool, buffers: ExpandedBuffers
    ) -> None:
        """
        Args:
            layers: the model's attention layers on this rank, in order.
            pool: SGLang's pool of latent rows.
            buffers: where the result goes; layer i of the buffers belongs to `layers[i]`.
        """
        self._layers = layers
        self._pool = pool
        self._buffers = buffers

    @torch.no_grad()
    def expand(self, slots: torch.Tensor, chunks: Sequence[int], start: int) -> None:
        """Expand `n` consecutive tokens of a prefix in all layers.

        Args:
            slots: `[n]` pool slots of tokens `[start, start + n)`.
            chunks: the expansion's chunk ids, from its first token on.
            start: position of the first of them in the prefix.
        """
        pieces = _chunk_pieces(start, slots.numel())
        for index, attention in enumerate(self._layers):
            rank = attention.kv_lora_rank
            rows = self._pool.get_key_buffer(attention.attn_mqa.layer_id)[slots].squeeze(1)  # [n, rank + rope]
            latent = rows[:, :rank].contiguous()
            expanded = attention.kv_b_proj(latent)[0]  # [n, heads * (nope + v)]
            expanded = expanded.view(slots.numel(), attention.num_local_heads, -1)
            k_nope, v = expanded.split([attention.qk_nope_head_dim, attention.v_head_dim], dim=-1)
            for first, last in pieces:
                chunk, offset = divmod(start + first, CHUNK_TOKENS)
                piece = slice(first, last)
                self._buffers.write(index, chunks[chunk], offset, k_nope[piece], v[piece], rows[piece, rank:])


def _chunk_pieces(start: int, count: int) -> list[tuple[int, int]]:
    """Cut tokens `[start, start + count)` where chunks meet; ranges are relative to `start`."""
    cuts = list(range(-(start % CHUNK_TOKENS), count, CHUNK_TOKENS))
    return [(max(cut, 0), min(cut + CHUNK_TOKENS, count)) for cut in cuts]

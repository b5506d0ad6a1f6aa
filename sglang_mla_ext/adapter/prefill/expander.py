"""Latent rows to expanded keys and values, with the model's own `kv_b_proj`, layer by layer."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sglang_mla_ext.kernels.constants import FP8
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS
from sglang_mla_ext.kernels.storage.expand_prefix import expand_prefix
from sglang_mla_ext.kernels.storage.expanded import ExpandedBuffers, scale_bounds

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

PRODUCT_TOKENS = 4 * CHUNK_TOKENS
"""Tokens of one product where expansion is not fused: bounds the temporary result, 64 MiB at 128 heads in BF16."""

FETCHED_TOKENS = 32 * CHUNK_TOKENS
"""Rows of an FP8 pool that are fetched at once: 9 MiB in BF16."""


class HasSlots(Protocol):
    """Lookup of the slots of tokens."""

    def slots(self, node: Any, node_end: int, start: int, end: int, /) -> torch.Tensor:
        """Return the slots `[end - start]` of tokens of the path that ends in a node."""
        ...


class Expander:
    """Writes expanded prefixes of one model into the buffers.

    Its work is enqueued on the current stream, behind the forward passes that wrote the latent rows and before those
    that read the result; nothing waits on the host. On a GPU it is one fused kernel a layer (over an FP8 pool one for
    each FETCHED_TOKENS, which are fetched first), or, where `weights_of` has nothing for it, the layer's own product
    and a write.
    """

    def __init__(
        self,
        layers: Sequence[DeepseekV2AttentionMLA],
        pool: MLATokenToKVPool,
        buffers: ExpandedBuffers,
        first_head: int = 0,
    ) -> None:
        """
        Args:
            layers: the model's attention layers on this rank, in order.
            pool: SGLang's pool of latent rows, or ours in FP8.
            buffers: where the result goes; layer i of the buffers belongs to `layers[i]`.
            first_head: of a layer's heads, that which the buffers begin with; they may hold fewer.
        """
        self._layers = layers
        self._pool = pool
        self._buffers = buffers
        self._heads = slice(first_head, first_head + buffers.heads)
        self._tree: HasSlots | None = None
        self._scales_valid = False
        self._on_gpu = buffers.device.type == "cuda"

    def attach(self, tree: HasSlots) -> None:
        """Give it what knows the slots of tokens: the tree, which SGLang builds after the attention backend, or with
        sharded prefixes the requests of a pass."""
        self._tree = tree

    def try_out(self) -> None:
        """Expand one token of no prefix, where kernels are compiled for that, so that they show that they run."""
        if self._on_gpu:
            self.expand_slots(torch.zeros(1, dtype=torch.int64, device=self._buffers.device), [0])

    def weights_changed(self) -> None:
        """The scales of an FP8 buffer follow the weights: they are computed anew before the next expansion."""
        self._scales_valid = False

    def expand(self, node: Hashable, node_end: int, start: int, end: int, chunks: Sequence[int]) -> None:
        """See prefix.memory.expansion.Expander."""
        assert self._tree is not None, "attached before anything is expanded"
        self.expand_slots(self._tree.slots(node, node_end, start, end), chunks)

    @torch.no_grad()
    def expand_slots(self, slots: torch.Tensor, chunks: Sequence[int]) -> None:
        """Expand consecutive tokens of a prefix, which begin with a chunk, in all layers.

        Args:
            slots: `[n]` pool slots of the tokens.
            chunks: ids of the chunks that they are expanded to, from the first one on.
        """
        if self._buffers.dtype == FP8 and not self._scales_valid:
            self._set_scales()
        table = self.table(chunks)
        for index, attention in enumerate(self._layers):
            self.expand_layer(attention, index, slots, chunks, table)

    def table(self, chunks: Sequence[int]) -> torch.Tensor:
        """Chunk ids on the device, `[chunks]` int32; nothing waits for it."""
        table = torch.tensor(chunks, dtype=torch.int32, pin_memory=self._on_gpu)
        return table.to(self._buffers.device, non_blocking=True)

    @torch.no_grad()
    def expand_layer(
        self,
        attention: DeepseekV2AttentionMLA,
        index: int,
        slots: torch.Tensor,
        chunks: Sequence[int],
        table: torch.Tensor,
    ) -> None:
        """The same in one layer.

        Args:
            index: of the buffers' layers.
            table: of the chunks.
        """
        weights = self._weights_of(attention, self._dtype_of_rows(attention)) if self._on_gpu else None
        for rows, indices, first in self._pieces(attention, slots):
            if weights:
                w_k, w_v = weights
                expand_prefix(rows, indices, w_k, w_v, self._buffers, index, table, first)
                continue
            for piece in range(0, len(indices), PRODUCT_TOKENS):
                latent_rows = rows[indices[piece : piece + PRODUCT_TOKENS]]
                self._expand_unfused(attention, index, latent_rows, chunks, first + piece)

    def _weights_of(self, layer: DeepseekV2AttentionMLA, dtype: torch.dtype) -> Sequence[torch.Tensor] | None:
        weights = weights_of(layer, dtype)
        return weights and [weight[self._heads] for weight in weights]

    def _dtype_of_rows(self, layer: DeepseekV2AttentionMLA) -> torch.dtype:
        fetches = hasattr(self._pool, "fetch")  # latent_pool.LatentPool
        rows = layer.kv_a_layernorm.weight if fetches else self._pool.get_key_buffer(layer.attn_mqa.layer_id)
        dtype: torch.dtype = rows.dtype
        return dtype

    def _pieces(
        self, layer: DeepseekV2AttentionMLA, slots: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """A layer's latent rows `[.., rank + rope]`, where in them those of `slots [n]` are, and the first one's place
        among these. SGLang's pool is read where it lies; rows in FP8 are fetched first, some at a time."""
        layer_id = layer.attn_mqa.layer_id
        if not hasattr(self._pool, "fetch"):
            yield self._pool.get_key_buffer(layer_id).squeeze(1), slots, 0
            return
        dims = layer.kv_lora_rank + self._buffers.qk_rope_head_dim
        for first in range(0, len(slots), FETCHED_TOKENS):
            piece = slots[first : first + FETCHED_TOKENS]
            rows = torch.empty(len(piece), dims, dtype=self._dtype_of_rows(layer), device=slots.device)
            self._pool.fetch(layer_id, piece, rows)
            yield rows, torch.arange(len(piece), device=slots.device), first

    def _expand_unfused(
        self,
        attention: DeepseekV2AttentionMLA,
        index: int,
        rows: torch.Tensor,  # [n, rank + rope]
        chunks: Sequence[int],
        start: int,
    ) -> None:
        latent = rows[:, : attention.kv_lora_rank].to(attention.kv_a_layernorm.weight.dtype)  # not always the cache's
        k_nope, v = self._project(attention, latent.contiguous())
        for first, last in _chunk_pieces(start, len(rows)):
            chunk, offset = divmod(start + first, CHUNK_TOKENS)
            piece = slice(first, last)
            k_rope = rows[piece, attention.kv_lora_rank :]
            self._buffers.write(index, chunks[chunk], offset, k_nope[piece], v[piece], k_rope)

    def _project(self, attention: DeepseekV2AttentionMLA, latent: torch.Tensor) -> Sequence[torch.Tensor]:
        """`k_nope [n, heads, nope]` and `v [n, heads, v]` of `latent [n, rank]`."""
        expanded = attention.kv_b_proj(latent)[0].view(len(latent), attention.num_local_heads, -1)[:, self._heads]
        k_nope, v = expanded.split([attention.qk_nope_head_dim, attention.v_head_dim], dim=-1)
        return k_nope, v

    def _set_scales(self) -> None:
        for index, attention in enumerate(self._layers):
            norm = attention.kv_a_layernorm.weight  # [rank]
            if weights := self._weights_of(attention, norm.dtype):
                k_columns, v_columns = (weight * norm for weight in weights)
            else:  # the projection of the unit vectors, whatever form the weight is stored in
                projected = self._project(attention, torch.diag(norm))
                k_columns, v_columns = (part.permute(1, 2, 0) for part in projected)
            self._buffers.k_scale[index] = scale_bounds(k_columns)
            self._buffers.v_scale[index] = scale_bounds(v_columns)
        self._scales_valid = True


def buffer_sizes(layer: DeepseekV2AttentionMLA, dtype: torch.dtype, *, layers: int, heads: int) -> dict[str, Any]:
    """Return the sizes of ExpandedBuffers for so many layers like this one, with so many heads of each."""
    return dict(
        layers=layers,
        heads=heads,
        qk_nope_head_dim=layer.qk_nope_head_dim,
        v_head_dim=layer.v_head_dim,
        qk_rope_head_dim=layer.qk_rope_head_dim,
        dtype=dtype,
    )


def weights_of(attention: DeepseekV2AttentionMLA, dtype: torch.dtype) -> Sequence[torch.Tensor] | None:
    """A layer's `w_k [heads, nope, rank]` and `w_v [heads, v, rank]` in `dtype`, last axis contiguous.

    They are those of `kv_b_proj`, or, where that is quantised, what SGLang has made of it for absorb. (Its quantised
    product would round the latent rows, too, which absorb does not do: DeepSeek-V3's own checkpoint is such a case.)

    Returns:
        None where both are of another dtype, or DeepGEMM's.
    """
    weight = getattr(attention.kv_b_proj, "weight", None)  # AWQ has none
    if weight is not None and weight.dtype == dtype:
        per_head = weight.view(attention.num_local_heads, -1, attention.kv_lora_rank)
        w_k, w_v = per_head.split([attention.qk_nope_head_dim, attention.v_head_dim], dim=1)
        return w_k, w_v
    w_kc, w_vc = attention.w_kc, attention.w_vc  # [heads, nope, rank] and [heads, rank, v], any strides
    if w_kc is not None and w_kc.dtype == FP8 and not attention.use_deep_gemm_bmm:  # one scale for both
        w_kc, w_vc = ((weight.float() * attention.w_scale).to(dtype) for weight in (w_kc, w_vc))
    if w_kc is None or w_kc.dtype != dtype:
        return None
    return w_kc.contiguous(), w_vc.transpose(1, 2).contiguous()


def temporary_bytes(attention: DeepseekV2AttentionMLA, dtype: torch.dtype, *, fetches: bool, to_fp8: bool) -> int:
    """The most device memory that an expansion takes beside the buffers while it runs, with a layer like this one.

    Args:
        dtype: of latent rows as they are multiplied.
        fetches: rows of the pool are FP8, and are fetched first; to_fp8: the buffers are FP8.
    """
    rank, rope, item = attention.kv_lora_rank, attention.qk_rope_head_dim, dtype.itemsize
    widest = max(attention.qk_nope_head_dim, attention.v_head_dim) * attention.num_local_heads
    per_token = attention.num_local_heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    weight = getattr(attention.kv_b_proj, "weight", None)
    whole = weight is not None and weight.dtype == dtype
    # Of quantised weights both halves, as numbers and contiguous, and one of them in float32, twice, before that.
    weights = 0 if whole else 2 * per_token * rank * item + 2 * 4 * widest * rank
    fetched = FETCHED_TOKENS * ((rank + rope) * item + 8) if fetches else 0  # and where the rows are in it
    taken = weights + fetched
    if weight is None or not (whole and weight.is_cuda):  # the product, of rows that are gathered and converted
        product = PRODUCT_TOKENS * ((3 * rank + rope) * item + per_token * item)
        written = CHUNK_TOKENS * widest * 3 * 4  # divided, clamped and rounded, or in another order
        taken = max(taken, fetched + product + written)
    if to_fp8:  # all columns, one half in float32, and their norms; or the product of the unit vectors
        taken = max(taken, weights + rank * rank * item + per_token * (rank * item + 4) + 2 * 4 * widest * rank)
    return taken


def _chunk_pieces(start: int, count: int) -> list[tuple[int, int]]:
    """Cut tokens `[start, start + count)` where chunks meet; ranges are relative to `start`."""
    cuts = list(range(-(start % CHUNK_TOKENS), count, CHUNK_TOKENS))
    return [(max(cut, 0), min(cut + CHUNK_TOKENS, count)) for cut in cuts]

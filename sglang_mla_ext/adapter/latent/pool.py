"""SGLang's pool of latent rows with the rows in FP8, 656 bytes a token and layer instead of 1,152.

The layout is `kernels.latent_rows`: content in e4m3, one scale per token, the rotary part in BF16 divided by it. Rows
are rounded as they are written and read back only where somebody names their slots; nobody gets the pool as numbers.
SGLang's own FP8 pool rounds content and rotary part to e4m3 with a scale of 1, and its scales from a checkpoint
(k_scale) have no part in this one.

What moves whole rows (`move_kv_cache`, `get_cpu_copy`, `load_cpu_copy`, sizes, buffer addresses) is SGLang's: the rows
are bytes to it, one tensor a layer, as its FP8 pools are. So is its pool on the host (HiCache), which is told how long
they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, unwrap_write_loc
from torch import Tensor

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.latent.host_cache import wait_for_layer
from sglang_mla_ext.kernels.constants import FP8
from sglang_mla_ext.kernels.dispatch import append_rows, fetch_rows
from sglang_mla_ext.kernels.storage.latent_rows import LatentRowLayout

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, KVCache


class LatentPool(MLATokenToKVPool):  # type: ignore[misc] # SGLang is not typed
    """See the module. Constructed as SGLang's pool is, with dtype float8_e4m3fn.

    Attributes:
        kv_buffer: per layer, uint8 `[size + page_size, 1, row_bytes]`; the first page takes what padded tokens write.
        kv_cache_dim: row_bytes, 656 with DeepSeek-V3's dimensions.
    """

    def _create_buffers(self) -> None:
        """
        Raises:
            ValueError: the dtype is another, or a dimension has no place in the layout.
        """
        if self.dtype != FP8:
            raise ValueError(f"rows of {BACKEND_NAME}'s FP8 pool are {FP8}, not {self.dtype}")
        self.layout = LatentRowLayout(self.kv_lora_rank, self.qk_rope_head_dim)
        self.kv_cache_dim = self.layout.row_bytes
        super()._create_buffers()
        for buffer in self.kv_buffer:
            self.layout.check(buffer)

    def rows(self, layer_id: int) -> Tensor:
        """The rows of a layer as they are stored, uint8 `[size + page_size, row_bytes]`, to be read on the current
        stream: it waits for those that come back from the host."""
        wait_for_layer(self, layer_id)
        return self._stored(layer_id)

    def _stored(self, layer_id: int) -> Tensor:
        """The same without waiting, to write to."""
        rows: Tensor = self.kv_buffer[layer_id - self.start_layer][:, 0]
        return rows

    def fetch(self, layer_id: int, slots: Tensor, out: Tensor) -> None:
        """Read the rows of these slots, and no other.

        Args:
            slots: `[n]` int32 or int64.
            out: `[n, kv_lora_rank + qk_rope_head_dim]`, BF16 or float32, written; last axis contiguous.
        """
        parts = out.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        fetch_rows(self.rows(layer_id), slots.contiguous(), *parts)

    # ---- what SGLang calls

    def set_kv_buffer(self, layer: RadixAttention, loc_info: Any, cache_k: Tensor, cache_v: Any = None) -> None:
        """Write rows.

        Args:
            loc_info: their slots `[n]`, or SGLang's KVWriteLoc with them.
            cache_k: `[n, .., kv_lora_rank + qk_rope_head_dim]`, BF16 or float32; cache_v is a part of it.
        """
        parts = cache_k.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        self.set_mla_kv_buffer(layer, loc_info, *parts)

    def set_mla_kv_buffer(
        self, layer: RadixAttention, loc_info: Any, cache_k_nope: Tensor, cache_k_rope: Tensor
    ) -> None:
        """Write rows.

        Args:
            loc_info: as above.
            cache_k_nope: `[n, .., kv_lora_rank]`; cache_k_rope: `[n, .., qk_rope_head_dim]`; BF16 or float32.
        """
        latent, rope = cache_k_nope.flatten(0, -2), cache_k_rope.flatten(0, -2)
        slots, _, _ = unwrap_write_loc(loc_info)
        append_rows(latent, rope, slots.contiguous(), self._stored(layer.layer_id))

    def get_mla_kv_buffer(
        self, layer: RadixAttention, loc: Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """The rows of these slots as numbers; no other row is read.

        Args:
            loc: `[n]` slots; dst_dtype: BF16, which is also the default, or float32.
        Returns:
            content `[n, 1, kv_lora_rank]` and rotary part `[n, 1, qk_rope_head_dim]`, contiguous.
        """
        rows = self.rows(layer.layer_id)
        sizes = (self.kv_lora_rank, self.qk_rope_head_dim)
        parts = [torch.empty(len(loc), n, dtype=dst_dtype or torch.bfloat16, device=rows.device) for n in sizes]
        fetch_rows(rows, loc.contiguous(), *parts)
        return parts[0][:, None], parts[1][:, None]

    def get_key_buffer(self, layer_id: int) -> NoReturn:
        """
        Raises:
            NotImplementedError: always. Whoever asks takes the pool for a tensor of numbers; its bytes as such would be
                wrong ones, and the whole pool in BF16 has no room.
        """
        raise NotImplementedError(
            "the FP8 pool of hybrid_mla has no keys and values as tensors of numbers: read rows by their slots "
            "(get_mla_kv_buffer), or serve with --kv-cache-dtype bf16."
        )

    get_value_buffer = get_key_buffer


class RowsBesideLinear:
    """The FP8 rows of a model with layers with linear attention, by its layers' numbers. Its pool has a LatentPool for
    the layers with MLA alone, and itself waits for rows that come back from the host."""

    def __init__(self, pool: HybridLinearKVPool) -> None:
        self._pool, self._rows, self._index = pool, pool.full_kv_pool, pool.full_attention_layer_id_mapping
        self.layout: LatentRowLayout = self._rows.layout

    def rows(self, layer_id: int) -> Tensor:
        """See LatentPool."""
        wait_for_layer(self._pool, layer_id)
        rows: Tensor = self._rows.rows(self._index[layer_id])
        return rows

    def fetch(self, layer_id: int, slots: Tensor, out: Tensor) -> None:
        """See LatentPool."""
        wait_for_layer(self._pool, layer_id)
        self._rows.fetch(self._index[layer_id], slots, out)


def fp8_rows(pool: KVCache | None) -> LatentPool | RowsBesideLinear | None:
    """Return the FP8 rows of a pool by the model's layers; None where its rows are SGLang's."""
    if isinstance(pool, LatentPool):
        return pool
    return RowsBesideLinear(pool) if isinstance(getattr(pool, "full_kv_pool", None), LatentPool) else None


def latent_rows(pool: KVCache) -> KVCache | LatentPool | RowsBesideLinear:
    """Return the pool of latent rows: SGLang's, or the FP8 rows by the model's layers."""
    return fp8_rows(pool) or pool


def dtype_for_peers(dtype: str, pool: KVCache | None) -> str:
    """Return the cache dtype that a prefill or decode server (--disaggregation-mode) reports to a peer. Before rows are
    sent as bytes, SGLang compares nothing but this and the tokens of a page.

    Args:
        dtype: SGLang's name for it, which SGLang also uses for rows of its own layout.
    """
    rows = fp8_rows(pool)
    return dtype if rows is None else f"{dtype} ({BACKEND_NAME}: {rows.layout.row_bytes} bytes a row)"


def is_built_for(configurator: KVCacheConfigurator) -> bool:
    """Return whether the pool of this configurator is ours: an FP8 pool of an MLA model that our backend decodes. A
    draft model's pool is SGLang's, as its attention is."""
    decode = installed.attention_backends(configurator.server_args)[1]
    is_ours = decode == BACKEND_NAME and not configurator.is_draft_worker
    return is_ours and configurator.use_mla_backend and configurator.kv_cache_dtype == FP8


def around_build_mla_pool(
    original: Callable[..., KVCache], configurator: KVCacheConfigurator, *, max_total_num_tokens: int, **others: Any
) -> KVCache:
    """`KVCacheConfigurator._build_mla_kv_pool`, with our class in FP8.

    Args:
        others: which class SGLang would take, in releases that say so.
    """
    if not is_built_for(configurator):
        return original(configurator, max_total_num_tokens=max_total_num_tokens, **others)
    from sglang.srt.runtime_context import get_exec

    return LatentPool(
        max_total_num_tokens,
        page_size=configurator.pool_page_size,
        dtype=configurator.kv_cache_dtype,
        kv_lora_rank=configurator.model_config.kv_lora_rank,
        qk_rope_head_dim=configurator.model_config.qk_rope_head_dim,
        layer_num=configurator.layer_info.num_effective_layers,
        device=configurator.device,
        enable_memory_saver=get_exec().features.enable_memory_saver,
        start_layer=configurator.layer_info.start_layer,
        end_layer=configurator.layer_info.end_layer,
    )


def around_build_hybrid_pool(
    original: Callable[..., KVCache], configurator: KVCacheConfigurator, **given: Any
) -> KVCache:
    """`KVCacheConfigurator._build_hybrid_linear_kv_pool`, with our class in FP8 for the layers with MLA."""
    if is_built_for(configurator):
        given["mla_pool_class"] = LatentPool
    return original(configurator, **given)


def after_cell_size(result: int, pool_configurator: Any, configurator: KVCacheConfigurator, num_layers: int) -> int:
    """`DefaultPoolConfigurator._compute_cell_size`: bytes of a token in all layers. From them SGLang computes how many
    tokens its memory holds. It takes as much for each layer of a draft model, whose rows are no longer than ours."""
    if not is_built_for(configurator):
        return result
    config = configurator.model_config
    return LatentRowLayout(config.kv_lora_rank, config.qk_rope_head_dim).row_bytes * num_layers


def around_host_pool(original: Callable[..., None], host_pool: Any, pool: Any, *args: Any, **others: Any) -> None:
    """`MLATokenToKVPoolHost.__init__`: rows on the host are as long as on the device, where SGLang by itself takes them
    for `kv_lora_rank + qk_rope_head_dim` elements.

    Args:
        pool: on the device, ours or another, as a draft model's.
    """
    if isinstance(pool, LatentPool):
        others["override_kv_cache_dim"] = pool.kv_cache_dim
    original(host_pool, pool, *args, **others)

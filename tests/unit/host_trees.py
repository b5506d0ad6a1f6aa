"""SGLang's tree of the installed release with a cache on the host, over a pool of latent rows."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import torch
from release import OLDEST

from sglang_mla_ext.adapter.compat import installed

TOKENS = 64
"""What the device holds; the host holds four times as many."""
HICACHE = dict(
    hicache_ratio=4.0,
    hicache_size=0,
    hicache_mem_layout="layer_first",
    hicache_io_backend="direct",
    hicache_write_policy="write_through",
    hicache_storage_prefetch_policy="best_effort",
    hicache_storage_backend=None,
    hicache_storage_backend_extra_config=None,
)
"""SGLang's arguments."""


class HostTreeOfNodes:
    """SGLang's tree, whose rows say by their first element, or byte, whose they are.

    Args:
        fp8: whether it is our pool.
    """

    CORES: tuple[str | None, ...] = (None,)

    def __init__(self, fp8: bool = False, core: str | None = None) -> None:
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        from sglang_mla_ext.adapter.latent.pool import LatentPool

        kind, dtype = (LatentPool, torch.float8_e4m3fn) if fp8 else (MLATokenToKVPool, torch.bfloat16)
        self.pool: Any = kind(TOKENS, 1, dtype, 512, 64, 2, "cpu", enable_memory_saver=False)
        self.allocator = TokenToKVPoolAllocator(TOKENS, dtype, "cpu", self.pool, need_sort=False)
        self.core = core
        self.cache = self._new_cache(
            dict(disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self.allocator, page_size=1)
        )
        self.view = installed.TreeView(self.cache)

    def _new_cache(self, params: dict[str, Any]) -> Any:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.hiradix_cache import HiRadixCache

        args = SimpleNamespace(**HICACHE, served_model_name="model", extra_metric_labels=None)
        return HiRadixCache(CacheInitParams(**params), args)

    def run(self, text: str) -> Any:
        """Start a request whose prompt has one token for each letter; what is on the host is loaded back."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tokens = array("q", map(ord, text))
        found = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, None)))
        cached = self._cached(found)
        if self.allocator.available_size() < len(tokens):
            self.cache.evict(EvictParams(num_tokens=len(tokens)))
        fresh = self.allocator.alloc(len(tokens) - len(cached))
        for layer in range(2):
            self.pool.kv_buffer[layer][fresh] = self.rows(text[len(cached) :], layer)
        slots = torch.cat([cached, fresh])
        self.cache.insert(InsertParams(key=RadixKey(tokens, None), value=slots))
        self.cache.check_hicache_events()
        node = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, None))).last_device_node
        return SimpleNamespace(rid=text, last_node=node, slots=slots, lock=self.cache.inc_lock_ref(node))

    def _cached(self, found: Any) -> torch.Tensor:
        """Slots of what a prompt is known of, loaded back from the host if they are there."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        cached: torch.Tensor = found.device_indices
        if found.host_hit_length:
            load = InitLoadBackParams(best_match_node=found.best_match_node, host_hit_length=found.host_hit_length)
            cached = torch.cat([cached, self.cache.init_load_back(load)[0]])
            self.cache.ready_to_load_host_cache()
        return cached

    def finish(self, *requests: Any) -> None:
        for request in requests:
            self.cache.dec_lock_ref(request.last_node)

    def handle(self, request: Any) -> Any:
        """The view's handle of the node in which the cached prefix of this request ends."""
        return self.view._handle(request.last_node)

    def is_on_host_alone(self, handle: Any) -> bool:
        return bool(handle.node.evicted and handle.node.backuped)

    @property
    def host(self) -> Any:
        """The pool on the host."""
        return self.cache.token_to_kv_pool_host

    def rows(self, text: str, layer: int) -> torch.Tensor:
        """Of these letters, as they are stored: `[letters, 1, elements or bytes]`, no two places of a row alike."""
        first = torch.tensor([ord(letter) for letter in text])[:, None, None]
        behind = torch.arange(self.pool.kv_cache_dim) * (layer + 1)
        return ((first + behind) % 256).to(self.pool.store_dtype)

    def text(self, slots: torch.Tensor) -> str:
        """The letters whose rows are in these slots, whole and in all layers."""
        text = "".join(chr(int(number)) for number in self.pool.kv_buffer[1][slots][:, 0, 0])
        assert all(torch.equal(self.pool.kv_buffer[layer][slots], self.rows(text, layer)) for layer in range(2))
        return text


class HostTreeOfNumbers(HostTreeOfNodes):
    """The same of 0.5.23: the tree that all servers have, with a pool on the host beside it."""

    CORES = ("rust", "python")

    def _new_cache(self, params: dict[str, Any]) -> Any:
        from sglang.srt.environ import envs
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
        from sglang.srt.runtime_context import get_server_args

        given = CacheInitParams(**params, tree_components=(ComponentType.FULL,))
        with envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.override(self.core or "rust"):
            cache = UnifiedRadixCache(given)
        cache.init_hicache(get_server_args(), given)
        return cache

    def _cached(self, found: Any) -> torch.Tensor:
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        node, core = found.last_device_node, self.cache.tree_core
        if found.host_hit_length:
            req = SimpleNamespace(rid="", last_node=node, swa_host_hit_length=0, mamba_host_hit_length=0)
            req.kv = SimpleNamespace(mamba_pool_idx=None)
            load = dict(best_match_node=found.best_match_node, host_hit_length=found.host_hit_length, req=req)
            _, node = self.cache.init_load_back(InitLoadBackParams(**load))
            self.cache.ready_to_load_host_cache()
        slots: torch.Tensor = core.collect_full_device_indices(node, core.root_node_handle())
        return slots

    def finish(self, *requests: Any) -> None:
        for request in requests:
            self.cache.dec_lock_ref(request.last_node, request.lock.to_dec_params())

    def handle(self, request: Any) -> Any:
        return self.view._mirror.follow([request.last_node], count=False)[0][0]

    def is_on_host_alone(self, handle: Any) -> bool:
        core = self.cache.tree_core
        return bool(core.is_full_device_evicted(handle.id) and core.is_backuped(handle.id))

    @property
    def host(self) -> Any:
        return self.cache.cache_controller.mem_pool_host.anchor_entry.host_pool


HostTree = HostTreeOfNodes if OLDEST else HostTreeOfNumbers
"""The installed SGLang's."""

"""Paths, slots, rows and what is attached, read from SGLang's own tree with a cache on the host, over its pool in BF16
and ours in FP8."""

from __future__ import annotations

import functools
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import NODES_ARE_NUMBERS

from sglang_mla_ext.adapter.compat.installed import TreeView

pytestmark = pytest.mark.skipif(NODES_ARE_NUMBERS, reason="of trees of nodes, which SGLang 0.5.17 keeps on the host")

TOKENS = 64
"""What the device holds; the host holds four times as many."""


class HostTree:
    """SGLang's HiRadixCache over a pool of latent rows, which say by their first element, or byte, whose they are.

    Args:
        fp8: whether it is our pool.
    """

    def __init__(self, fp8: bool = False) -> None:
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        from sglang_mla_ext.adapter.latent.pool import LatentPool

        kind, dtype = (LatentPool, torch.float8_e4m3fn) if fp8 else (MLATokenToKVPool, torch.bfloat16)
        self.pool: Any = kind(TOKENS, 1, dtype, 512, 64, 2, "cpu", enable_memory_saver=False)
        allocator = TokenToKVPoolAllocator(TOKENS, dtype, "cpu", self.pool, need_sort=False)
        storage = {"hicache_storage_backend": None, "hicache_storage_backend_extra_config": None}
        args = SimpleNamespace(
            hicache_ratio=4.0,
            hicache_size=0,
            hicache_mem_layout="layer_first",
            hicache_io_backend="direct",
            hicache_write_policy="write_through",
            hicache_storage_prefetch_policy="best_effort",
            served_model_name="model",
            extra_metric_labels=None,
            **storage,
        )
        params = CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=allocator, page_size=1
        )
        self.cache: Any = HiRadixCache(params, args)
        self.allocator, self.view = allocator, TreeView(self.cache)

    def run(self, text: str) -> Any:
        """Start a request whose prompt has one token for each letter; what is on the host is loaded back."""
        from sglang.srt.mem_cache.base_prefix_cache import (
            EvictParams,
            InitLoadBackParams,
            InsertParams,
            MatchPrefixParams,
        )
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tokens = array("q", map(ord, text))
        found = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, None)))
        cached = found.device_indices
        if found.host_hit_length:
            load = InitLoadBackParams(best_match_node=found.best_match_node, host_hit_length=found.host_hit_length)
            cached = torch.cat([cached, self.cache.init_load_back(load)[0]])
            self.cache.ready_to_load_host_cache()
        if self.allocator.available_size() < len(tokens):
            self.cache.evict(EvictParams(num_tokens=len(tokens)))
        fresh = self.allocator.alloc(len(tokens) - len(cached))
        for layer in range(2):
            self.pool.kv_buffer[layer][fresh] = self.rows(text[len(cached) :], layer)
        slots = torch.cat([cached, fresh])
        self.cache.insert(InsertParams(key=RadixKey(tokens, None), value=slots))
        self.cache.check_hicache_events()
        node = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, None))).last_device_node
        self.cache.inc_lock_ref(node)
        return SimpleNamespace(rid=text, last_node=node, slots=slots)

    def finish(self, *requests: Any) -> None:
        for request in requests:
            self.cache.dec_lock_ref(request.last_node)

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


@pytest.fixture(params=[False, True], ids=["bf16", "fp8"])
def host_tree(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> HostTree:
    if torch.cuda.is_available():
        pytest.skip("without a GPU's pinned memory")
    from sglang.srt.mem_cache.pool_host import base
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    from sglang_mla_ext.adapter.cpu import host_cache
    from sglang_mla_ext.adapter.latent.pool import around_host_pool

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 1)
    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)  # whoever else runs here
    host_cache.before_host_pool()
    original = MLATokenToKVPoolHost.__init__
    hooked = functools.partialmethod(lambda self, *args, **given: around_host_pool(original, self, *args, **given))
    monkeypatch.setattr(MLATokenToKVPoolHost, "__init__", hooked)
    return HostTree(fp8=request.param)


def test_a_node_that_comes_back_is_the_one_that_went(host_tree: HostTree) -> None:
    """The node object is the same, the tokens are, and the slots are others: so what was expanded of it stays right."""
    first, second = host_tree.run("the system prompt; one"), host_tree.run("the system prompt; two")
    shared = host_tree.view.shared([first, second])
    (node,), (end,) = shared.nodes, shared.ends
    assert end == len("the system prompt; ") and host_tree.view.holders(node) >= 2
    before = host_tree.view.slots(node, end, 0, end)
    host_tree.finish(first, second)
    for filler in ("A" * 40, "B" * 40, "C" * 30):
        host_tree.finish(host_tree.run(filler))
    assert node.node.evicted and node.node.backuped
    assert host_tree.view.is_attached(node)

    third, fourth = host_tree.run("the system prompt; three"), host_tree.run("the system prompt; four")
    again = host_tree.view.shared([third, fourth])
    assert node in again.nodes and again.ends[again.nodes.index(node)] == end
    after = host_tree.view.slots(node, end, 0, end)
    assert not torch.equal(before, after)
    assert host_tree.text(after) == "the system prompt; "


def test_a_node_that_the_host_drops_is_detached(host_tree: HostTree) -> None:
    request = host_tree.run("the system prompt")
    node = host_tree.view._handle(request.last_node)
    host_tree.finish(request)
    host_tree.finish(host_tree.run("A" * 60))
    assert node.node.evicted and host_tree.view.is_attached(node)
    host_tree.cache.evict_host(10**6)
    assert not host_tree.view.is_attached(node)


def test_a_node_that_is_written_to_the_host_is_no_group(host_tree: HostTree) -> None:
    """Until that is done the tree holds it, as if a second request did."""
    request = host_tree.run("the system prompt")
    shared = host_tree.view.shared([request])
    assert len(shared.deepest) == 1 and all(end <= len("the system prompt") for end in shared.ends)

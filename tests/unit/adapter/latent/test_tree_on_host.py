"""Paths, slots, rows and what is attached, read from SGLang's own tree with a cache on the host, over its pool in BF16
and ours in FP8."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from host_trees import HICACHE, HostTree
from release import OLDEST, published_arguments


@pytest.fixture(params=product([False, True], HostTree.CORES), ids=str)
def host_tree(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostTree]:
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
    with nullcontext() if OLDEST else published_arguments(**HICACHE):
        yield HostTree(*request.param)


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
    assert host_tree.is_on_host_alone(node)
    assert host_tree.view.is_attached(node)

    third, fourth = host_tree.run("the system prompt; three"), host_tree.run("the system prompt; four")
    again = host_tree.view.shared([third, fourth])
    assert node in again.nodes and again.ends[again.nodes.index(node)] == end
    after = host_tree.view.slots(node, end, 0, end)
    assert not torch.equal(before, after)
    assert host_tree.text(after) == "the system prompt; "


def test_a_node_that_the_host_drops_is_detached(host_tree: HostTree) -> None:
    request = host_tree.run("the system prompt")
    node = host_tree.handle(request)
    host_tree.finish(request)
    host_tree.finish(host_tree.run("A" * 60))
    assert host_tree.is_on_host_alone(node) and host_tree.view.is_attached(node)
    host_tree.cache.evict_host(10**6)
    assert not host_tree.view.is_attached(node)


def test_a_node_that_is_written_to_the_host_is_no_group(host_tree: HostTree) -> None:
    """Until that is done the tree holds it, as if a second request did."""
    request = host_tree.run("the system prompt")
    shared = host_tree.view.shared([request])
    assert len(shared.deepest) == 1 and all(end <= len("the system prompt") for end in shared.ends)

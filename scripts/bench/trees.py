"""Radix trees as servers have them, and the requests that run on them: the cases of bench_planner.py.

The tree is SGLang's, of 0.5.23 and newer, over a pool that does not exist.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from sglang_mla_ext.adapter.cpu import stubs

PAGE = 64  # tokens


@dataclass(eq=False)
class Request:
    """Request as the planner reads it. `kind` says which of a case's requests it is like, `lock` is SGLang's."""

    rid: str
    last_node: Any
    kind: int
    lock: Any

    def finished(self) -> bool:
        return False


class Tree:
    """SGLang's radix cache, and requests that hold nodes of it. A node is the text down to its end.

    Attributes:
        root: below which `chain` begins.
    """

    def __init__(self) -> None:
        if stubs.needed():
            stubs.install()
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        nothing = lambda slots, start_pos=0: None  # noqa: E731
        allocator = SimpleNamespace(device="cpu", page_size=PAGE, free=nothing, free_segment=nothing)
        params = dict(disable=False, req_to_token_pool=SimpleNamespace(), page_size=PAGE)
        self.cache: Any = UnifiedRadixCache(
            CacheInitParams(**params, token_to_kv_pool_allocator=allocator, tree_components=(ComponentType.FULL,))
        )
        self.root = array("q")
        self._numbers = itertools.count()

    def chain(self, node: array, *pages: int) -> array:
        """Nodes of so many pages, each below the one before, with text that nothing else has; the last of them."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        text, ends = array("q", node), []
        for count in pages:
            ends.append(len(text))
            text.extend(array("q", [next(self._numbers)]) * (count * PAGE))
        slots = torch.zeros(len(text), dtype=torch.int64)
        self.cache.insert(InsertParams(key=RadixKey(text), value=slots, prev_prefix_len=ends[0]))
        # A question for a shorter text cuts the node that it ends in. In the middle first: fewer are walked through.
        for cut in sorted(range(1, len(pages)), key=lambda cut: cut & -cut, reverse=True):
            self._match(text[: ends[cut]])
        return text

    def start(self, end: array, kind: int) -> Request:
        """A request whose cached prefix ends in this node."""
        node = self._match(end)
        return Request(f"request {next(self._numbers)}", node, kind, self.cache.inc_lock_ref(node))

    def finish(self, request: Request) -> None:
        self.cache.dec_lock_ref(request.last_node, request.lock.to_dec_params())

    def _match(self, text: array) -> Any:
        """The tree's node that a text ends in."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(text))).last_device_node


Start = Callable[[int], Request]
"""Starts a request like the one of this number, with a private end of its own."""


@dataclass(frozen=True)
class Case:
    """A batch.

    Attributes:
        requests: how many run.
        make: builds what they share, and returns what starts one of them.
    """

    requests: int
    make: Callable[[Tree], Start]


def one_prompt(tree: Tree) -> Start:
    """One prompt of 26,624 tokens, and an end of 512."""
    prompt = tree.chain(tree.root, 416)
    return lambda kind: tree.start(tree.chain(prompt, 8), kind)


def agents(tree: Tree) -> Start:
    """Sessions of 20 turns of 512 tokens each, below a system prompt of 8,192."""
    prompt = tree.chain(tree.root, 128)
    return lambda kind: tree.start(tree.chain(prompt, *[8] * 20), kind)


def shared_chain(tree: Tree) -> Start:
    """One chain of 500 nodes of 64 tokens, and an end of 512."""
    last = tree.chain(tree.root, *[1] * 500)
    return lambda kind: tree.start(tree.chain(last, 8), kind)


def pairs(tree: Tree) -> Start:
    """Two requests for each prompt of 2,048 tokens, each with an end of 512."""
    prompts = [tree.chain(tree.root, 32) for _ in range(512)]
    return lambda kind: tree.start(tree.chain(prompts[kind // 2], 8), kind)


def private_chains(tree: Tree) -> Start:
    """Nothing shared, and 1,000 nodes of 64 tokens each."""
    return lambda kind: tree.start(tree.chain(tree.root, *[1] * 1000), kind)


CASES = {
    "one prompt": Case(1024, one_prompt),
    "agent sessions": Case(256, agents),
    "shared chain": Case(256, shared_chain),
    "pairs": Case(1024, pairs),
    "private chains": Case(64, private_chains),
}

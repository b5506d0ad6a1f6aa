"""Radix trees as servers have them, and the requests that run on them: the cases of bench_planner.py.

The tree is SGLang's own, over a pool that does not exist. Nodes are put in by SGLang below a given one, so that a chain
of a thousand costs no thousand walks from the root.
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
    """Request as the planner reads it. `kind` says which of a case's requests it is like."""

    rid: str
    last_node: Any
    kind: int

    def finished(self) -> bool:
        return False


class Tree:
    """SGLang's radix cache, and requests that hold nodes of it."""

    def __init__(self) -> None:
        if stubs.needed():
            stubs.install()
        from sglang.srt.mem_cache.radix_cache import RadixCache

        allocator = SimpleNamespace(device="cpu", free_segment=lambda slots, start_pos: None)
        self.cache = RadixCache.create_simulated(page_size=PAGE, mock_allocator=allocator)
        self._numbers = itertools.count()

    def chain(self, node: Any, *pages: int) -> Any:
        """Nodes of so many pages, each below the one before, with text that nothing else has; the last of them."""
        from sglang.srt.mem_cache.radix_cache import RadixKey

        for count in pages:
            tokens = array("q", [next(self._numbers)]) * (count * PAGE)
            _, node = self.cache._insert_helper(node, RadixKey(tokens), torch.zeros(len(tokens), dtype=torch.int64))
        return node

    def start(self, end: Any, kind: int) -> Request:
        """A request whose cached prefix ends in this node."""
        self.cache.inc_lock_ref(end)
        return Request(f"request {next(self._numbers)}", end, kind)

    def finish(self, request: Request) -> None:
        self.cache.dec_lock_ref(request.last_node)


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
    prompt = tree.chain(tree.cache.root_node, 416)
    return lambda kind: tree.start(tree.chain(prompt, 8), kind)


def agents(tree: Tree) -> Start:
    """Sessions of 20 turns of 512 tokens each, below a system prompt of 8,192."""
    prompt = tree.chain(tree.cache.root_node, 128)
    return lambda kind: tree.start(tree.chain(prompt, *[8] * 20), kind)


def shared_chain(tree: Tree) -> Start:
    """One chain of 500 nodes of 64 tokens, and an end of 512."""
    last = tree.chain(tree.cache.root_node, *[1] * 500)
    return lambda kind: tree.start(tree.chain(last, 8), kind)


def pairs(tree: Tree) -> Start:
    """Two requests for each prompt of 2,048 tokens, each with an end of 512."""
    prompts = [tree.chain(tree.cache.root_node, 32) for _ in range(512)]
    return lambda kind: tree.start(tree.chain(prompts[kind // 2], 8), kind)


def private_chains(tree: Tree) -> Start:
    """Nothing shared, and 1,000 nodes of 64 tokens each."""
    return lambda kind: tree.start(tree.chain(tree.cache.root_node, *[1] * 1000), kind)


CASES = {
    "one prompt": Case(1024, one_prompt),
    "agent sessions": Case(256, agents),
    "shared chain": Case(256, shared_chain),
    "pairs": Case(1024, pairs),
    "private chains": Case(64, private_chains),
}

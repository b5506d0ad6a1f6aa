"""SGLang's prefix tree of the installed release, and what requests hold of it: one builder for tests on any release.

0.5.17's nodes are Python objects, which count their holders. From 0.5.23 on the tree is a core beside the cache, in
Rust or in Python, and gives out numbers of its nodes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from release import OLDEST

from sglang_mla_ext.adapter.compat import installed


@dataclass(eq=False)
class Request:
    """What this package reads of a request, and its slots `[tokens]`, for comparison."""

    rid: str
    last_node: Any
    extra_key: str | None
    slots: torch.Tensor
    lock: Any = None

    def finished(self) -> bool:
        return False


class Step(NamedTuple):
    """A node on a path, and the tokens from the root to its end."""

    node: Any
    end: int


PAGE_SIZES = (1, 64)


def whole_path(view: Any, request: Any) -> list[tuple[Any, int]]:
    """Identity and end of each node on a request's path, as the tree of a view itself has it now."""
    if not OLDEST:
        if request.last_node in (None, view._core.root_node_handle()):
            return []
        (numbered,) = view._paths([request.last_node])
        return [(node.node_id, node.path_end) for node in numbered]
    path, node = [], request.last_node
    while node is not None and node.parent is not None:
        path.append(node)
        node = node.parent
    return list(zip(path[::-1], accumulate(len(node.key) for node in path[::-1]), strict=True))


class TreeOfNodes:
    """SGLang's radix cache over slots that nothing is stored in. `rows` says what would be: a fresh number for each."""

    KINDS: tuple[tuple[int, str | None], ...] = tuple((size, None) for size in PAGE_SIZES)
    """Page sizes and cores."""
    NODES_COUNT = True
    """Whether nodes count their holders: also those that a call does not name, and of each split at once. Otherwise the
    view counts those that it is asked about, and nodes that were cut for another count as one."""

    def __init__(self, page_size: int, core: str | None = None, pairs: bool = False) -> None:
        """
        Args:
            core: which one of the tree; None for SGLang's default.
            pairs: a slot is known by its token and the next one, as in a server with EAGLE.
        """
        self.page_size, self.core = page_size, core
        self.free_slots: list[int] = []
        self.rows: dict[int, int] = {}
        self.cache = self._new_cache(pairs)
        self.view = installed.TreeView(self.cache)
        self._pairs = pairs
        self._numbers = count()

    def _new_cache(self, pairs: bool) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixCache

        cache = RadixCache.create_simulated(page_size=self.page_size, mock_allocator=self._allocator())
        cache.is_eagle = pairs
        return cache

    def _allocator(self) -> Any:
        def free(slots: torch.Tensor, start_pos: int = 0) -> None:
            self.free_slots.extend(slots.tolist())

        return SimpleNamespace(device="cpu", page_size=self.page_size, free=free, free_segment=free)

    def run(self, text: str, extra_key: str | None = None) -> Request:
        """Start a request: its prompt, one page for each letter, is prefilled, in the tree as far as whole pages are
        known, and held."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tokens = array("q", (ord(letter) for letter in text for _ in range(self.page_size)))
        while len(self.free_slots) < len(tokens):
            self.free_slots.append(len(self.rows))
            self.rows[len(self.rows)] = -1
        cached = len(self._match(tokens, extra_key)[1])
        slots = [0] * cached + [self.free_slots.pop() for _ in range(len(tokens) - cached)]
        self.rows.update((slot, next(self._numbers)) for slot in slots[cached:])
        key = RadixKey(tokens, extra_key)
        self.cache.insert(InsertParams(key=key, value=torch.tensor(slots), prev_prefix_len=cached))
        node, found = self._match(tokens, extra_key)
        known = len(tokens) - self._pairs
        assert len(found) == known - known % self.page_size
        return Request(text, node, extra_key, found, self.cache.inc_lock_ref(node))

    def _match(self, tokens: array, extra_key: str | None) -> tuple[Any, torch.Tensor]:
        """The node that a prompt is known up to, and its slots."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        found = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, extra_key)))
        return found.last_device_node, found.device_indices

    @property
    def root(self) -> Any:
        """What a request ends in that nothing is cached of."""
        return self.cache.root_node

    def handle(self, request: Request) -> Any:
        """The view's handle of the node in which the cached prefix of this request ends."""
        return self.view._handle(request.last_node)

    def look(self) -> None:
        """Ask the view for all that run, as a pass does, where it learns of splits by that."""

    def identity(self, handle: Any) -> Any:
        """Return what the tree itself knows a node by."""
        return handle.node

    def whole(self, request: Request) -> list[tuple[Any, int]]:
        """Identity and end of each node on a request's path, as the tree itself has it now."""
        return whole_path(self.view, request)

    def is_there(self, node: Any, end: int) -> bool:
        """Return whether the tree has a node, which ends there."""
        below = [(self.root, 0)]
        while below:
            found, found_end = below.pop()
            if found is node:
                return found_end == end
            below += [(child, found_end + len(child.key)) for child in found.children.values()]
        return False

    def path(self, node: Any) -> tuple[Step, ...]:
        """The nodes from the root to the one that a handle stands for."""
        nodes = [node]
        while (above := self.view.parent(nodes[-1])) is not None:
            nodes.append(above)
        return tuple(map(Step, nodes[::-1], accumulate(self.view.length(each) for each in nodes[::-1])))

    def paths(self, requests: Sequence[Request]) -> list[tuple[Step, ...]]:
        """Of the nodes in which cached prefixes end; empty where nothing is cached."""
        nothing = (None, self.root)
        return [() if each.last_node in nothing else self.path(self.handle(each)) for each in requests]

    def slots(self, node: Any, start: int, end: int) -> torch.Tensor:
        """What the view says of tokens `[start, end)` of the path that ends in a node."""
        return self.view.slots(node, self.path(node)[-1].end, start, end)

    def finish(self, *requests: Request) -> None:
        for request in requests:
            self.cache.dec_lock_ref(request.last_node)

    def flush(self) -> None:
        self.cache.reset()

    def evict(self, tokens: int) -> None:
        """Let SGLang take back slots that no request holds, to write them again."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=tokens))


class TreeOfNumbers(TreeOfNodes):
    """The same of 0.5.23."""

    KINDS = tuple((size, core) for core in ("rust", "python") for size in PAGE_SIZES)
    NODES_COUNT = False

    def _new_cache(self, pairs: bool) -> Any:
        from sglang.srt.environ import envs
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        params = CacheInitParams(
            disable=False,
            req_to_token_pool=SimpleNamespace(),
            token_to_kv_pool_allocator=self._allocator(),
            page_size=self.page_size,
            is_eagle=pairs,
            tree_components=(ComponentType.FULL,),
        )
        with envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.override(self.core or "rust"):
            return UnifiedRadixCache(params)

    def _match(self, tokens: array, extra_key: str | None) -> tuple[Any, torch.Tensor]:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        found = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, extra_key)))
        node = found.last_device_node
        return node, self.cache.tree_core.collect_full_device_indices(node, self.root)

    @property
    def root(self) -> int:
        return self.cache.tree_core.root_node_handle()

    def handle(self, request: Request) -> Any:
        return self.view._mirror.follow([request.last_node], count=False)[0][0]

    def __init__(self, page_size: int, core: str | None = None, pairs: bool = False) -> None:
        self._running: list[Request] = []
        super().__init__(page_size, core, pairs)

    def run(self, text: str, extra_key: str | None = None) -> Request:
        request = super().run(text, extra_key)
        self._running.append(request)
        return request

    def look(self) -> None:
        self.view.shared(self._running)

    def identity(self, handle: Any) -> int:
        return int(handle.id)

    def is_there(self, node: int, end: int | None = None) -> bool:
        try:
            (path,) = self.view._paths([node])
        except KeyError:
            return False
        return end is None or path[-1].path_end == end

    def finish(self, *requests: Request) -> None:
        for request in requests:
            self.cache.dec_lock_ref(request.last_node, request.lock.to_dec_params())
            if request in self._running:
                self._running.remove(request)

    def flush(self) -> None:
        super().flush()
        self._running.clear()


Tree: type[TreeOfNodes] = TreeOfNodes if OLDEST else TreeOfNumbers
"""The installed SGLang's."""

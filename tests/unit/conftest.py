"""SGLang's prefix tree is what some tests here run on, without a GPU: its stand-ins go in before SGLang is imported.

Test files import SGLang inside fixtures and tests, not at their top: importing it imports Triton, and the tests of
tests/kernels, when they run in the same process, must do that first.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from fork_server import ForkServer, environment_without_sglangs
from release import published_arguments

from sglang_mla_ext.adapter.compat import contract
from sglang_mla_ext.adapter.compat.installed import TreeView
from sglang_mla_ext.adapter.cpu import stubs

if stubs.needed():
    stubs.install()


NODES_ARE_NUMBERS = contract.line() != "0.5.17"
"""Whether the installed SGLang's tree gives out numbers of its nodes, and not the nodes themselves."""


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


class TreeOfNodes:
    """SGLang's radix cache over slots that nothing is stored in. `rows` says what would be: a fresh number for each."""

    def __init__(self, page_size: int, pairs: bool = False) -> None:
        """
        Args:
            pairs: a slot is known by its token and the next one, as in a server with EAGLE.
        """
        self.page_size = page_size
        self.free_slots: list[int] = []
        self.rows: dict[int, int] = {}
        self.cache = self._new_cache(pairs)
        self.view = TreeView(self.cache)
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

    def evict(self, tokens: int) -> None:
        """Let SGLang take back slots that no request holds, to write them again."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=tokens))


class TreeOfNumbers(TreeOfNodes):
    """The same of 0.5.23: the tree is a core beside the cache, and gives out numbers of its nodes.

    Attributes:
        core: which one; None for SGLang's default.
    """

    core: str | None = None

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

    def finish(self, *requests: Request) -> None:
        for request in requests:
            self.cache.dec_lock_ref(request.last_node, request.lock.to_dec_params())


Tree = TreeOfNumbers if NODES_ARE_NUMBERS else TreeOfNodes
"""The installed SGLang's."""


@pytest.fixture(scope="session")
def new_tree(published: None) -> Callable[[int], TreeOfNodes]:
    """Makes a tree with a page size."""
    return Tree


@pytest.fixture
def any_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one release refuses beside the others is let through: test_limits.py has a test of its own for that."""
    from sglang_mla_ext.adapter.launch import limits

    monkeypatch.setattr(limits.installed, "further_findings", lambda args: [])


@pytest.fixture(scope="session")
def published() -> Iterator[None]:
    """See release.published_arguments."""
    with published_arguments():
        yield


@pytest.fixture
def make_world(monkeypatch: pytest.MonkeyPatch, new_tree: Any) -> Any:
    """`make_world(**options)`: a `decode_world.World`, with no pass that runs, before and after."""
    from decode_world import World

    from sglang_mla_ext.adapter.step.passes import passes

    passes.end()
    yield lambda **options: World(monkeypatch, new_tree, **options)
    passes.end()


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Runs programs of this folder in a process that has imported SGLang, and this file before it."""
    environment = environment_without_sglangs([os.path.dirname(__file__), *sys.path])
    environment |= {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    modules = ("conftest", "sglang.srt.managers.scheduler", "sglang.srt.models.deepseek_v2")
    server = ForkServer(tmp_path_factory.mktemp("forks") / "log", environment, modules)
    yield server
    server.close()

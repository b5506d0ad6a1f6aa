"""SGLang's prefix tree is what some tests here run on, without a GPU: its stand-ins go in before SGLang is imported.

Test files import SGLang inside fixtures and tests, not at their top: importing it imports Triton, and the tests of
tests/kernels, when they run in the same process, must do that first.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from sglang_mla_ext.adapter.cpu import standins
from sglang_mla_ext.adapter.versions import TreeView

if standins.needed():
    standins.install()


@dataclass(eq=False)
class Request:
    """What this package reads of a request, and its slots `[tokens]`, for comparison."""

    rid: str
    last_node: Any
    extra_key: str | None
    slots: torch.Tensor

    def finished(self) -> bool:
        return False


class Step(NamedTuple):
    """A node on a path, and the tokens from the root to its end."""

    node: Any
    end: int


class Tree:
    """SGLang's radix cache over slots that nothing is stored in. `rows` says what would be: a fresh number for each."""

    def __init__(self, page_size: int, pairs: bool = False) -> None:
        """
        Args:
            pairs: a slot is known by its token and the next one, as in a server with EAGLE.
        """
        from sglang.srt.mem_cache.radix_cache import RadixCache

        self.page_size = page_size
        self.free_slots: list[int] = []
        self.rows: dict[int, int] = {}
        allocator = SimpleNamespace(
            device="cpu", free_segment=lambda slots, start_pos: self.free_slots.extend(slots.tolist())
        )
        self.cache = RadixCache.create_simulated(page_size=page_size, mock_allocator=allocator)
        self.cache.is_eagle = pairs
        self.view = TreeView(self.cache)
        self._numbers = count()

    def run(self, text: str, extra_key: str | None = None) -> Request:
        """Start a request: its prompt, one page for each letter, is prefilled, in the tree as far as whole pages are
        known, and held."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tokens = array("q", (ord(letter) for letter in text for _ in range(self.page_size)))
        while len(self.free_slots) < len(tokens):
            self.free_slots.append(len(self.rows))
            self.rows[len(self.rows)] = -1
        cached = len(self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, extra_key))).device_indices)
        slots = [0] * cached + [self.free_slots.pop() for _ in range(len(tokens) - cached)]
        self.rows.update((slot, next(self._numbers)) for slot in slots[cached:])
        self.cache.insert(InsertParams(key=RadixKey(tokens, extra_key), value=torch.tensor(slots)))
        found = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, extra_key)))
        known = len(tokens) - self.cache.is_eagle
        assert len(found.device_indices) == known - known % self.page_size
        self.cache.inc_lock_ref(found.last_device_node)
        return Request(text, found.last_device_node, extra_key, found.device_indices)

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
        nothing = (None, self.cache.root_node)
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


@pytest.fixture(scope="session")
def new_tree() -> Callable[[int], Tree]:
    """Makes a tree with a page size."""
    return Tree


@pytest.fixture
def make_world(monkeypatch: pytest.MonkeyPatch, new_tree: Any) -> Any:
    """`make_world(**options)`: a `decode_world.World`, with nothing left in the relay, before and after."""
    from decode_world import World

    from sglang_mla_ext.adapter.relay import relay

    relay.clear()
    yield lambda **options: World(monkeypatch, new_tree, **options)
    relay.clear()

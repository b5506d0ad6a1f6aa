"""SGLang 0.5.17: a radix tree of Python objects, server arguments as a dataclass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from sglang_mla_ext.prefix.planner import Path, PathNode

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.radix_cache import TreeNode
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs


class UnsupportedTree(RuntimeError):
    """SGLang runs with a prefix cache that this package cannot read."""


class NodeHandle:
    """Stands for one node of SGLang's tree. There is one for each node, as long as anybody keeps it."""

    __slots__ = ("__weakref__", "node")

    def __init__(self, node: TreeNode) -> None:
        self.node = node

    def __repr__(self) -> str:
        return f"NodeHandle({self.node.id})"


class TreeView:
    """Reads paths out of SGLang's tree; changes nothing in it.

    A running request holds `last_node`, the tree node where its cached prefix ends, and locks it and all its ancestors,
    so their slots neither move nor get a new owner while it runs. When a later request diverges inside a node, SGLang
    cuts the node in two: a new node takes the front part, and the old object keeps the rest with its end unchanged. So
    "the node object, and the token where it ends" names the same slots before and after a split, for as long as
    somebody holds the node; a handle stands for the object, and expansions are identified by that pair.
    """

    def __init__(self, tree_cache: BasePrefixCache) -> None:
        """
        Raises:
            UnsupportedTree: not a Python radix tree.
        """
        from sglang.srt.mem_cache.radix_cache import RadixCache

        if not isinstance(tree_cache, RadixCache) or tree_cache.disable:
            raise UnsupportedTree(
                f"hybrid_mla finds shared prefixes in SGLang's Python radix tree, and this server has "
                f"{type(tree_cache).__name__}. Remove --disable-radix-cache and --radix-cache-backend, and unset "
                f"SGLANG_ENABLE_UNIFIED_RADIX_TREE and SGLANG_EXPERIMENTAL_CPP_RADIX_TREE."
            )
        # By the id of the node, which its handle keeps from being given to another object.
        self._handles: WeakValueDictionary[int, NodeHandle] = WeakValueDictionary()

    def state(self, requests: Sequence[Req]) -> Hashable:
        """See prefix.shared_prefixes.Tree."""
        return tuple((req.rid, id(req.last_node)) for req in requests)

    def hold(self, requests: Sequence[Req]) -> object:
        """See prefix.shared_prefixes.Tree."""
        # As handles, so that the next plan finds those of requests that are still there.
        return [self._handle(req.last_node) for req in requests if req.last_node is not None]

    def paths(self, requests: Sequence[Req]) -> list[Path]:
        """See prefix.shared_prefixes.Tree."""
        known: dict[int, Path] = {}
        return [self._path(req.last_node, known) for req in requests]

    def path(self, node: NodeHandle) -> Path:
        """See prefix.shared_prefixes.Tree."""
        return self._path(node.node, {})

    def is_held(self, node: NodeHandle) -> bool:
        """See prefix.shared_prefixes.Tree."""
        return node.node.lock_ref > 0

    def slots(self, node: NodeHandle, start: int, end: int) -> torch.Tensor:
        """The pool slots `[end - start]` (int64) of tokens `[start, end)` of the path that ends in this node."""
        pieces = []
        for step in self.path(node):
            tree_node = step.node.node
            first = step.end - len(tree_node.key)
            if first < end and step.end > start:
                pieces.append(tree_node.value[max(start - first, 0) : end - first])
        return torch.cat(pieces)

    def _path(self, node: TreeNode | None, known: dict[int, Path]) -> Path:
        # `known` saves the walk for nodes that many requests share; it lives for one call, so ids are unambiguous.
        below: list[TreeNode] = []
        path: Path = ()
        while node is not None and node.parent is not None:  # up to the root, which is left out
            if (found := known.get(id(node))) is not None:
                path = found
                break
            below.append(node)
            node = node.parent
        end = path[-1].end if path else 0
        for ancestor in reversed(below):
            end += len(ancestor.key)
            path = (*path, PathNode(self._handle(ancestor), end))
            known[id(ancestor)] = path
        return path

    def _handle(self, node: TreeNode) -> NodeHandle:
        handle = self._handles.get(id(node))
        if handle is None:
            handle = self._handles[id(node)] = NodeHandle(node)
        return handle


def latent_pool_arguments(configurator: KVCacheConfigurator) -> dict[str, Any]:
    """Keyword arguments of SGLang's pool of latent rows, but for its size, as its own configurator gives them."""
    from sglang.srt.runtime_context import get_exec

    return dict(
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


def most_requests(configurator: KVCacheConfigurator) -> int:
    """The most requests that SGLang's pool of requests can have, however many tokens there is room for."""
    any_number = 1 << 40
    return int(configurator.resolve_max_num_reqs(any_number))


def memory_region(runner: ModelRunner) -> Callable[[], AbstractContextManager[object]]:
    """Makes contexts; what is allocated inside is given back while SGLang sleeps, as its KV cache is, and comes again
    at the same addresses with other contents. Without --enable-memory-saver they do nothing."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

    return functools.partial(runner.memory_saver_adapter.region, GPU_MEMORY_TYPE_KV_CACHE)


def gives_kv_memory(tags: Sequence[str] | None) -> bool:
    """Whether a request to release or resume memory, by its tags, is about that of the KV cache."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

    return not tags or GPU_MEMORY_TYPE_KV_CACHE in tags


def model_config(args: ServerArgs) -> Any:
    """The Hugging Face configuration of the model that a server is launched with."""
    return args.get_model_config().hf_config


def prefill_graph_backend(args: ServerArgs) -> str:
    """How prefill is captured in CUDA graphs; "disabled" where it is not. `args` are resolved."""
    return str(args.cuda_graph_config.prefill.backend)


def disable_prefill_graph(args: ServerArgs) -> None:
    """Run prefill without CUDA graphs, unless --cuda-graph-backend-prefill says otherwise; `args` are not resolved."""
    args.disable_prefill_cuda_graph = True

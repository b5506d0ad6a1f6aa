"""SGLang 0.5.17: a radix tree of Python objects, server arguments as a dataclass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.compat.findings import Finding
from sglang_mla_ext.adapter.compat.sglang_0_5_17.read_of_backend import READ_OF_BACKEND
from sglang_mla_ext.adapter.compat.sglang_0_5_17.used_at_start import USED_AT_START
from sglang_mla_ext.adapter.compat.sglang_0_5_17.used_by_features import USED_BY_FEATURES
from sglang_mla_ext.adapter.compat.sglang_0_5_17.used_in_a_pass import USED_IN_A_PASS
from sglang_mla_ext.adapter.compat.shared_nodes import Forks, all_above, find_with, with_marked, with_whole_paths
from sglang_mla_ext.adapter.compat.table import Changes
from sglang_mla_ext.prefix.tree import SharedTree

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.radix_cache import TreeNode
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

CHANGES = Changes(uses=(*USED_AT_START, *USED_IN_A_PASS, *USED_BY_FEATURES), reads=READ_OF_BACKEND)

_RID, _LAST_NODE = attrgetter("rid"), attrgetter("last_node")


class UnsupportedTree(RuntimeError):
    """SGLang runs with a prefix cache that this package cannot read."""


class NodeHandle:
    """Stands for one node of SGLang's tree. There is one for each node, as long as anybody keeps it.

    Attributes:
        root: of the tree that the node was in; a flush begins another.
    """

    __slots__ = ("__weakref__", "node", "root")

    def __init__(self, node: TreeNode, root: TreeNode) -> None:
        self.node = node
        self.root = root

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
        self._cache = tree_cache
        # By the id of the node, which its handle keeps from being given to another object.
        self._handles: WeakValueDictionary[int, NodeHandle] = WeakValueDictionary()
        self._forks = Forks()
        self._listed: dict[TreeNode, tuple[NodeHandle, int]] = {}  # the shared nodes of the last call, and their ends

    def state(self, requests: Sequence[Req]) -> Hashable:
        """See prefix.tree.Tree."""
        return tuple(map(_RID, requests)), tuple(map(id, map(_LAST_NODE, requests)))

    def hold(self, requests: Sequence[Req]) -> object:
        """See prefix.tree.Tree."""
        return list(map(_LAST_NODE, requests))

    def ends(self, held: Sequence[TreeNode | None]) -> Sequence[NodeHandle]:
        """See prefix.tree.Tree."""
        return [self._handle(node) for node in held if node is not None and node.parent is not None]

    def shared(
        self,
        requests: Sequence[Req],
        also: Collection[NodeHandle] = (),
        whole: Collection[int] = (),
        of: Collection[int] | None = None,
    ) -> SharedTree:
        """See prefix.tree.Tree. A node that somebody else holds, or that is being copied to the host, is listed too.

        A call with `also` walks up all that the requests in `of` hold alone; others do so once for each request. What
        they find is kept until two calls later, and with it the nodes: `forget` when no request is left.
        """
        ends, marked = list(map(_LAST_NODE, requests)), {handle.node for handle in also}
        beside, all_marked = bool(marked) and of is None, True
        if beside:
            forks, all_found = find_with(ends, marked)
        else:
            forks, all_found = self._forks.find(ends)
            forks, all_marked = with_marked(forks, ends, marked, of or ())
        nodes, parents, deepest, complete = all_above(with_whole_paths(forks, ends, whole))
        listed = self._listed
        known, handles, node_ends = {}, [], []
        for node, parent in zip(nodes, parents, strict=True):
            found = listed.get(node)
            if found is None:
                start = node_ends[parent] if parent >= 0 else 0
                found = self._handle(node), start + len(node.key)
            known[node] = found
            handles.append(found[0])
            node_ends.append(found[1])  # no split changes it
        if not beside:
            self._listed = known
        return SharedTree(handles, parents, node_ends, deepest, complete and all_found and all_marked)

    def forget(self) -> None:
        """Lets go of the nodes of earlier calls: no request is left, or the tree was flushed."""
        self._forks.forget()
        self._listed = {}

    def length(self, node: NodeHandle) -> int:
        """See prefix.tree.Tree."""
        return len(node.node.key)

    def parent(self, node: NodeHandle) -> NodeHandle | None:
        """See prefix.tree.Tree."""
        return None if (parent := node.node.parent) is None or parent.parent is None else self._handle(parent)

    def holders(self, node: NodeHandle) -> int:
        """See prefix.tree.Tree."""
        return node.node.lock_ref

    def is_attached(self, node: NodeHandle) -> bool:
        """See prefix.tree.Tree.

        SGLang evicts leaves, so a node is in the tree as long as its parent has it as a child. With a cache on the host
        (HiCache) an evicted node stays there without slots, and gets others when a request needs its tokens again: it
        counts as attached, because what was expanded from it is right for them. Where that cache has to drop nodes with
        all below, they lose their slots on both sides.
        """
        tree_node, parent = node.node, node.node.parent
        if node.root is not self._cache.root_node or (tree_node.value is None and tree_node.host_value is None):
            return False
        return parent.children.get(tree_node.key.child_key(self._cache.page_size)) is tree_node

    def slots(self, node: NodeHandle, node_end: int, start: int, end: int) -> torch.Tensor:
        """The pool slots `[end - start]` (int64) of tokens `[start, end)` of the path that ends in this node, which
        ends `node_end` tokens behind the root. A request holds the node."""
        import torch

        pieces = []
        tree_node, last = node.node, node_end
        while last > start:
            first = last - len(tree_node.key)
            if first < end:
                pieces.append(tree_node.value[max(start - first, 0) : end - first])
            tree_node, last = tree_node.parent, first
        return torch.cat(pieces[::-1])

    def _handle(self, node: TreeNode) -> NodeHandle:
        handle = self._handles.get(id(node))
        if handle is None:
            handle = self._handles[id(node)] = NodeHandle(node, self._cache.root_node)
        return handle


def flash_mla() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """FlashMLA: attention over pages, and what makes its schedule."""
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

    return flash_mla_with_kvcache, get_mla_metadata


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


RESOLVED_BY = "__post_init__"
"""The method of SGLang's server arguments that turns what the user gave into what the server does."""


def is_resolved(args: ServerArgs) -> bool:
    """Whether that method has run before on these arguments, in the process that they come from."""
    return False  # there is no calling it again


def resolve(args: ServerArgs) -> None:
    """Have that method run, where making the arguments has not."""


def resolved(args: ServerArgs) -> Any:
    """The arguments as they were decided on, with the same names; where they are not resolved, as they were given."""
    return args


def attention_backends(args: ServerArgs) -> tuple[str | None, str | None]:
    """Names of the attention backends for prefill and decode."""
    prefill, decode = args.get_attention_backends()
    return prefill, decode


def dp_attention_ranks(args: ServerArgs) -> int:
    """Ranks of DP attention, 1 without it. `args` are resolved."""
    return int(args.dp_size) if args.enable_dp_attention else 1


def uses_mla(args: ServerArgs) -> bool:
    """Whether the model has Multi-head Latent Attention."""
    return bool(args.use_mla_backend())


def model_config(args: ServerArgs) -> Any:
    """The Hugging Face configuration of the model that a server is launched with."""
    return args.get_model_config().hf_config


def linear_layers(args: ServerArgs) -> Any:
    """The configuration of a model's layers with linear attention, whose states SGLang keeps in a pool of their own;
    None where it has none."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(args.get_model_config())


def tree_of_linear_layers() -> str | None:
    """The prefix cache that SGLang keeps a model with such layers in, where TreeView cannot read it."""
    return "MambaRadixCache"


def prefill_graph_backend(args: ServerArgs) -> str:
    """How prefill is captured in CUDA graphs; "disabled" where it is not. `args` are resolved."""
    return str(args.cuda_graph_config.prefill.backend)


def decode_graph_backend(args: ServerArgs) -> str:
    """How decode is captured in CUDA graphs; "disabled" where it is not. `args` are resolved."""
    return str(args.cuda_graph_config.decode.backend)


def further_findings(args: ServerArgs) -> list[Finding]:
    """What this release has besides, is asked for, and `hybrid_mla` does not support. `args` are resolved."""
    return []


def disable_prefill_graph(args: ServerArgs) -> None:
    """Run prefill without CUDA graphs, unless --cuda-graph-backend-prefill says otherwise; `args` are not resolved."""
    args.disable_prefill_cuda_graph = True


def row_of_request(req: Any) -> int:
    """Return a running request's row in the table of slots."""
    return int(req.req_pool_idx)


def polls_nixl() -> bool:
    """Return whether a decode server asks NIXL for messages, which moves data along without a thread of NIXL's own."""
    return True


def shares_in_prefill_graphs() -> bool:
    """Return whether prefill graphs of this release call the backend between their segments (prefill_graph.py)."""
    return False


def prefill_graph_rows(args: ServerArgs) -> int:
    """New tokens of the largest prefill pass in a CUDA graph, at most; 0 where there are no such graphs. Without a GPU,
    those of the largest pass that runs as one. `args` are resolved."""
    return 0


def write_slots(batch: ForwardBatch, translator: Any, out: torch.Tensor, **ranges: torch.Tensor) -> None:
    """Write the slots of a part of each request's tokens, one request after the other; for prefill graphs.

    Args:
        translator: SGLang's KVIndexTranslator.
        out: `[tokens]` int32.
        ranges: int32 on the device: `kv_start_idx [requests]`, the first token of each request's part; `seq_lens
            [requests]`, its tokens; `indptr [requests + 1]`, where they begin in `out`.
    """
    raise NotImplementedError("this release has no prefill graphs that prefixes are shared in")


def other_trees() -> list[str]:
    """Variables of the environment that have SGLang keep its prefixes in a tree that TreeView cannot read."""
    from sglang.srt.environ import envs

    trees = {
        "SGLANG_ENABLE_UNIFIED_RADIX_TREE": envs.SGLANG_ENABLE_UNIFIED_RADIX_TREE,
        "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE": envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE,
    }
    return [name for name, variable in trees.items() if variable.get()]


def wait_before_loading(controller: HiCacheController, stream: torch.Stream) -> None:
    """Have the next copy from the host to the device wait for what was put on this stream; see host_cache.py."""
    controller.load_stream.wait_stream(stream)


# ---- speculative decoding


def draft_tokens(args: ServerArgs) -> int:
    """Query tokens of a request in a verify step, the last accepted one among them; 1 without speculative decoding.
    `args` are resolved."""
    if args.speculative_algorithm is None:
        return 1
    return int(args.speculative_num_draft_tokens or 1)


def draft_has_mla(args: ServerArgs) -> bool:
    """Whether the draft model of a server has Multi-head Latent Attention; `args` are resolved."""
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig

    draft = ModelConfig.from_server_args(
        args,
        model_path=args.speculative_draft_model_path,
        model_revision=args.speculative_draft_model_revision,
        is_draft_model=True,
    )
    return bool(draft.attention_arch == AttentionArch.MLA)


def mla_draft_backend(fp8: bool) -> str:
    """Return SGLang's attention backend for a draft with Multi-head Latent Attention on a GPU.

    Args:
        fp8: whether the cache is in FP8.
    """
    return "flashmla"


def set_draft_backend(args: ServerArgs, name: str) -> None:
    """Give the draft model another attention backend; `args` are resolved, and from then on SGLang changes them in this
    way alone."""
    args.override(BACKEND_NAME, speculative_draft_attention_backend=name)


def plans_on_a_stream() -> bool:
    """Whether the environment has SGLang prepare verify steps on a stream beside the forward pass."""
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get())


def prefill_chunk_tokens() -> int:
    """Of cached prompts, that a prefill pass makes keys and values of at a time."""
    from sglang.srt.environ import envs

    return int(envs.SGLANG_MAX_KV_CHUNK_CAPACITY.get())


def name_draft_backend(backend: Any, factory: Any) -> None:
    """Tell a draft's attention backend its name, as SGLang does for those that a model runner builds. A layer takes its
    forward method by it, and by the server's own backend, which is ours, where there is none.

    Args:
        backend: what a DraftBackendFactory made: a backend, one that owns some for each draft step, or None.
    """
    if backend is None or not factory.draft_attn_backend:
        return
    for each in (backend, *getattr(backend, "attn_backends", ())):
        each.prefill_attention_backend_str = each.decode_attention_backend_str = factory.draft_attn_backend

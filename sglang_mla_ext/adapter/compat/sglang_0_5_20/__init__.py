"""SGLang 0.5.20: a tree whose nodes are known by numbers, with a core in Python; server arguments keep what the user
gave and, beside it, what was decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.compat import sglang_0_5_17, sglang_0_5_18
from sglang_mla_ext.adapter.compat.findings import Finding, unsupported
from sglang_mla_ext.adapter.compat.numbered_tree import NumberedTree, UnsupportedTree
from sglang_mla_ext.adapter.compat.sglang_0_5_20.used import CHANGES as CHANGES

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
    from sglang.srt.server_args import ServerArgs


class PathNode(NamedTuple):
    """As TreePathNodeInfo, which newer releases have for it."""

    node_id: int
    path_end: int
    num_children: int


class TreeView(NumberedTree):
    """See NumberedTree."""

    def __init__(self, tree_cache: BasePrefixCache) -> None:
        """
        Raises:
            UnsupportedTree: not a tree whose core is in Python.
        """
        from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        if not isinstance(tree_cache, UnifiedRadixCache) or tree_cache.disable:
            raise UnsupportedTree(type(tree_cache).__name__)
        if not isinstance(tree_cache.tree_core, UnifiedTreeCore):
            raise UnsupportedTree(type(tree_cache.tree_core).__name__)
        super().__init__(tree_cache.tree_core)
        self._core: UnifiedTreeCore

    def _paths(self, ids: Sequence[int]) -> list[Sequence[PathNode]]:
        return [self._path(number) for number in ids]

    def _path(self, number: int) -> list[PathNode]:
        node, above = self._core.node_by_id(number), []
        while node.parent is not None:
            above.append(node)
            node = node.parent
        end, path = 0, []
        for node in reversed(above):
            end += len(node.key)
            path.append(PathNode(node.id, end, len(node.children)))
        return path


RESOLVED_BY = "resolve_once"


def is_resolved(args: ServerArgs) -> bool:
    """See sglang_0_5_17. Whoever publishes the arguments calls the method, in every process."""
    return bool(getattr(args, "_resolution_finished", False))


def resolve(args: ServerArgs) -> None:
    """See sglang_0_5_17."""
    args.resolve_once()


def resolved(args: ServerArgs) -> Any:
    """See sglang_0_5_17; `args` may be what this returns."""
    from sglang.srt.arg_groups.overrides import ResolvedView, resolved_view

    return args if isinstance(args, ResolvedView) else resolved_view(args)


def attention_backends(args: ServerArgs) -> tuple[str | None, str | None]:
    """See sglang_0_5_17."""
    from sglang.srt.arg_groups.overrides import attention_backends_of

    prefill, decode = attention_backends_of(resolved(args))
    return prefill, decode


def uses_mla(args: ServerArgs) -> bool:
    """See sglang_0_5_17."""
    from sglang.srt.arg_groups.overrides import use_mla_backend

    return bool(use_mla_backend(args))


def model_config(args: ServerArgs) -> Any:
    """See sglang_0_5_17."""
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(args).hf_config


def linear_layers(args: ServerArgs) -> Any:
    """See sglang_0_5_17."""
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model_config_of(args))


def tree_of_linear_layers() -> str | None:
    """See sglang_0_5_17. One tree is for all models."""
    return None


def other_trees() -> list[str]:
    """See sglang_0_5_17. The tree that TreeView reads is the default here."""
    from sglang.srt.environ import envs

    name = "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"
    return [name] if envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.get() else []


def further_findings(args: ServerArgs) -> list[Finding]:
    """See sglang_0_5_17. The tree's part on the host was not tried here, nor prefill and decode servers."""
    return [
        *sglang_0_5_18.roles_of_disaggregation(args),
        *unsupported("--enable-hierarchical-cache", args.enable_hierarchical_cache),
        *new_flags(args),
    ]


def new_flags(args: ServerArgs) -> list[Finding]:
    """What is unsupported of the flags that are new in this release."""
    return [
        *unsupported("--enable-unified-cache-external-linker", args.enable_unified_cache_external_linker),
        *unsupported("--enable-layernorm-sp", args.enable_layernorm_sp),
    ]


def wait_before_loading(controller: Any, stream: Any) -> None:
    """SGLang has it wait."""


def draft_tokens(args: ServerArgs) -> int:
    """See sglang_0_5_17."""
    return sglang_0_5_17.draft_tokens(resolved(args))


def set_draft_backend(args: ServerArgs, name: str) -> None:
    """Give the draft model another attention backend; `args` are resolved, and not what `resolved` returns."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(args, BACKEND_NAME, speculative_draft_attention_backend=name)

"""What differs between releases of SGLang: one module for each line of them, with what it does otherwise than the one
before; the oldest has every name.

`adapter.contract` says which releases are known; here are the names as they are for the one that is installed. A new
line of releases is a new module here and a column there.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from sglang_mla_ext.adapter.contract import SUPPORTED, line

if TYPE_CHECKING:
    from sglang_mla_ext.adapter.versions.sglang_0_5_17 import (
        RESOLVED_BY,
        TreeView,
        UnsupportedTree,
        attention_backends,
        disable_prefill_graph,
        draft_has_mla,
        draft_tokens,
        flash_mla,
        further_findings,
        gives_kv_memory,
        is_resolved,
        latent_pool_arguments,
        memory_region,
        model_config,
        most_requests,
        name_draft_backend,
        other_trees,
        plans_on_a_stream,
        prefill_graph_backend,
        resolve,
        resolved,
        set_draft_backend,
        uses_mla,
        wait_before_loading,
    )

__all__ = [
    "RESOLVED_BY",
    "TreeView",
    "UnsupportedTree",
    "attention_backends",
    "disable_prefill_graph",
    "draft_has_mla",
    "draft_tokens",
    "flash_mla",
    "further_findings",
    "gives_kv_memory",
    "is_resolved",
    "latent_pool_arguments",
    "memory_region",
    "model_config",
    "most_requests",
    "name_draft_backend",
    "other_trees",
    "plans_on_a_stream",
    "prefill_graph_backend",
    "resolve",
    "resolved",
    "set_draft_backend",
    "uses_mla",
    "wait_before_loading",
]

for _release in SUPPORTED:
    _module = import_module(f"{__name__}.sglang_{_release.replace('.', '_')}")
    globals().update({name: getattr(_module, name) for name in __all__ if hasattr(_module, name)})
    if _release == line():
        break

"""What differs between releases of SGLang: one module for each line of them, all with the same names.

`adapter.contract` says which releases are known; this picks the module for the one that is installed. A new line of
releases is a new module here and a column there.
"""

from sglang_mla_ext.adapter.versions.sglang_0_5_17 import (
    TreeView,
    UnsupportedTree,
    disable_prefill_graph,
    draft_has_mla,
    draft_tokens,
    gives_kv_memory,
    latent_pool_arguments,
    memory_region,
    model_config,
    most_requests,
    name_draft_backend,
    other_trees,
    plans_on_a_stream,
    prefill_graph_backend,
    set_draft_backend,
)

__all__ = [
    "TreeView",
    "UnsupportedTree",
    "disable_prefill_graph",
    "draft_has_mla",
    "draft_tokens",
    "gives_kv_memory",
    "latent_pool_arguments",
    "memory_region",
    "model_config",
    "most_requests",
    "name_draft_backend",
    "other_trees",
    "plans_on_a_stream",
    "prefill_graph_backend",
    "set_draft_backend",
]

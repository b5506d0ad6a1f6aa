"""Decide at launch whether prefill passes expand prefixes for themselves, by default: see prefill/transient.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.launch.resolved import ResolvedArgs

if TYPE_CHECKING:
    from sglang_mla_ext.options import HybridMLAOptions


def by_default(args: ResolvedArgs, options: HybridMLAOptions, on_gpu: bool) -> bool:
    """With DP attention, where a rank has all heads and seldom the memory to keep a long prefix expanded, and with
    prefill in CUDA graphs, where SGLang's own attention is by absorb; not where it was never run."""
    in_graphs = installed.prefill_graph_rows(args) > 0
    dp_attention = installed.dp_attention_ranks(args) > 1 and args.speculative_algorithm is None
    return (
        on_gpu
        and options.mode_expands
        and options.prefill_expand_tokens is None
        and (in_graphs or dp_attention)
        and installed.attention_backends(args)[0] == BACKEND_NAME
        and args.disaggregation_mode == "null"
        and not args.enable_hierarchical_cache
    )

"""Decide at launch whether ranks of DP attention shard expanded prefixes: see ranks/sharded.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.launch.resolved import ResolvedArgs

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from sglang_mla_ext.options import HybridMLAOptions

FLAG = "--hybrid-mla-prefix-sharding"


def obstacle(args: ResolvedArgs, options: HybridMLAOptions, on_gpu: bool) -> str | None:
    """Return what keeps ranks from sharding prefixes; None where nothing does."""
    ranks = installed.dp_attention_ranks(args)
    if ranks == 1:
        return "a server without DP attention (--enable-dp-attention)"
    heads = installed.model_config(args).get_text_config().num_attention_heads
    reasons = {
        # Ranks that share the heads of a request would have to exchange in groups of their own.
        f"--dp-size {ranks} that is not --tp-size {args.tp_size}": ranks != args.tp_size,
        f"{heads} heads, which {ranks} ranks do not divide": heads % ranks > 0,
        "a mode or a budget that never expands": not options.may_expand,
        "--disaggregation-mode": args.disaggregation_mode != "null",
        "--elastic-ep-backend": args.elastic_ep_backend is not None,
        # Each rank picks a graph of its own size (sgl-project/sglang#30242).
        "--moe-dense-tp-size with --enable-dp-lm-head and --moe-a2a-backend": args.moe_dense_tp_size is not None
        and bool(args.enable_dp_lm_head)
        and args.moe_a2a_backend not in (None, "none"),
        "decode without CUDA graphs": on_gpu and args.cuda_graph_config.decode.backend == "disabled",
        "a CPU, whose ranks have no memory in common (peers)": options.prefix_sharding == "peers" and not on_gpu,
        "ranks on several nodes (peers)": options.prefix_sharding == "peers" and args.nnodes > 1,
        "--disable-cuda-graph-padding": on_gpu and bool(args.disable_cuda_graph_padding),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def may_store(args: ResolvedArgs, options: HybridMLAOptions) -> bool:
    """Whether ranks that hold prefixes together exchange by stores into each other's memory, if their GPUs reach it."""
    return options.prefix_sharding == "peers" or (options.prefix_sharding == "auto" and args.nnodes == 1)


def set_environment(environment: MutableMapping[str, str]) -> None:
    """Before NCCL starts: keep it from registering the buffers of exchanges that CUDA graphs hold, with which they hang
    (SGLang does so from 0.5.23 on). What the user set stands."""
    environment.setdefault("NCCL_GRAPH_REGISTER", "0")

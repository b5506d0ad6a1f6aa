"""Whether new tokens ride in the decode steps of a server, and how many: see step/riding.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_mla_ext.adapter.compat import installed

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from sglang_mla_ext.options import HybridMLAOptions

DEFAULT_TOKENS = 256
"""New tokens of a step, where the user names no number."""

STEP = 64
"""Rows from one size of graph to the next, beyond SGLang's own."""


def in_the_way(args: ServerArgs, on_gpu: bool) -> str | None:
    """What of a server keeps new tokens from riding; None where they can. `args` are resolved."""
    reasons = {
        "drafts (--speculative-algorithm)": args.speculative_algorithm is not None,
        "DP attention (--enable-dp-attention)": args.enable_dp_attention,
        "--disaggregation-mode": args.disaggregation_mode != "null",
        "DeepEP (--moe-a2a-backend)": args.moe_a2a_backend not in (None, "none"),
        "decode without CUDA graphs": on_gpu and installed.decode_graph_backend(args) == "disabled",
        "--disable-cuda-graph-padding": on_gpu and bool(args.disable_cuda_graph_padding),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def tokens(args: ServerArgs, options: HybridMLAOptions, on_gpu: bool) -> int:
    """New tokens that a step with running requests may have; 0 where nothing rides. `args` are resolved.

    Without a GPU there are no graphs to ride in, so nothing does unless it is asked for.
    """
    wanted = options.mixed_tokens
    if wanted is None:
        wanted = DEFAULT_TOKENS if on_gpu or args.enable_mixed_chunk else 0
    return wanted if wanted and in_the_way(args, on_gpu) is None else 0


def graph_sizes(sizes: Sequence[int], most: int) -> list[int]:
    """Sizes of decode graphs, up to one for the most rows. Padding costs little where there are many rows, and each
    size costs memory and time at start.

    Args:
        sizes: ascending, SGLang's own, of one row for each request.
    """
    largest = sizes[-1]
    return [*sizes, *range(largest + STEP, most, STEP), most] if most > largest else list(sizes)

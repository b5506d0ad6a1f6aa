"""Decide at launch how many new tokens may be mixed into a decode step: see step/admission.py."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.launch.resolved import ResolvedArgs, on_gpu
from sglang_mla_ext.configs import gpu_config_of
from sglang_mla_ext.kernels.sizes import MAX_ROWS
from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.predict.mixed import GRAPH_STEP, LEAST_NEW, MOST_NEW_ALONE, allowed  # plain Python
from sglang_mla_ext.predict.rates import Gpu
from sglang_mla_ext.predict.step import Deployment

logger = logging.getLogger(__name__)

COARSE_STEP, COARSE_ROWS = 128, 1024
"""Rows from one size of graph to the next in place of `GRAPH_STEP`, from so many rows on."""


@dataclass(frozen=True)
class Mixing:
    """Number of new tokens that may be mixed into a decode step, and what keeps them out."""

    args: ResolvedArgs
    options: HybridMLAOptions

    @cached_property
    def obstacle(self) -> str | None:
        """Return what keeps new tokens out of decode steps; None where they can be mixed in."""
        args, gpu = self.args, on_gpu(self.args)
        reasons = {
            "drafts (--speculative-algorithm)": not installed.mixes_with_drafts(args),
            "--disaggregation-mode": args.disaggregation_mode != "null",
            "--moe-a2a-backend": args.moe_a2a_backend not in (None, "none"),
            "--enable-return-routed-experts": args.enable_return_routed_experts,
            # In a decode step their state takes one token of a request.
            "layers with linear attention": installed.linear_layers(args) is not None,
            # SGLang fills their table of tokens for prefill passes alone (LongCat-Flash-Lite).
            "n-gram embeddings": bool(getattr(installed.model_config(args), "use_ngram_embedding", False)),
            "decode without CUDA graphs": gpu and args.cuda_graph_config.decode.backend == "disabled",
            "--disable-cuda-graph-padding": gpu and bool(args.disable_cuda_graph_padding),
            "--chunked-prefill-size -1": args.chunked_prefill_size is not None and args.chunked_prefill_size <= 0,
            # From 0.5.23 on. Each piece of a prompt would wait for so many steps, where one pass would compute it.
            "--prefill-decode-interval": bool(getattr(args, "prefill_decode_interval", None)),
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    @cached_property
    def tokens(self) -> int:
        """New tokens that a step with running requests may have; 0 where nothing is mixed.

        Without a GPU there are no decode graphs, so nothing is mixed unless it is asked for.
        """
        asked = self.options.mixed_tokens
        if asked == 0 or self.obstacle is not None:
            return 0
        if asked is not None:
            return min(asked, MAX_ROWS) // GRAPH_STEP * GRAPH_STEP  # no step has more, and buffers are sized by it
        if not on_gpu(self.args):
            return LEAST_NEW if self.args.enable_mixed_chunk else 0
        return _predicted(self.args)


def _predicted(args: ResolvedArgs) -> int:
    """Return the new tokens that `allowed` predicts for the deployment, or the minimum where that is not known; with DP
    attention always `MOST_NEW_ALONE`."""
    if installed.dp_attention_ranks(args) > 1:
        return MOST_NEW_ALONE
    name = gpu_config_of(torch.cuda.get_device_name())
    if name is None:
        return LEAST_NEW
    try:
        config, query_tokens = installed.model_config(args).to_dict(), int(installed.draft_tokens(args))
        return allowed(Deployment(config, Gpu.from_json(name), args.tp_size, query_tokens=query_tokens))
    except (ValueError, KeyError, TypeError) as error:
        logger.info("hybrid_mla: no default for --hybrid-mla-mixed-tokens can be predicted for this model: %s", error)
        return LEAST_NEW


def graph_sizes(sizes: Sequence[int], most: int, query_tokens: int = 1) -> list[int]:
    """Return the sizes of decode graphs, in requests, up to the largest. Padding costs little where there are many
    rows, and each size costs memory and time at start.

    Args:
        sizes: ascending, SGLang's own.
        query_tokens: rows of each request.
    """
    found = list(sizes)
    while found[-1] < most:
        step = GRAPH_STEP if found[-1] * query_tokens < COARSE_ROWS else COARSE_STEP
        found.append(min(found[-1] + step // query_tokens, most))
    return found

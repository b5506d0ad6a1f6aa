"""Decide at launch whether ranks of DP attention shard expanded prefixes: see ranks/sharded.py."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import cached_property

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.launch.resolved import ResolvedArgs, on_gpu
from sglang_mla_ext.kernels.absorb.stacking import STACKED_HEADS
from sglang_mla_ext.options import HybridMLAOptions

FLAG = "--hybrid-mla-prefix-sharding"


@dataclass(frozen=True)
class Ranks:
    """A server's ranks, and which of them shard expanded prefixes."""

    args: ResolvedArgs
    options: HybridMLAOptions

    @cached_property
    def dp(self) -> int:
        """Ranks of DP attention with requests of their own; 1 without it."""
        return int(installed.dp_attention_ranks(self.args))

    @cached_property
    def sharding_obstacle(self) -> str | None:
        """Return what keeps ranks from sharding expanded prefixes; None where nothing does."""
        if self.dp == 1:
            return "a server without DP attention (--enable-dp-attention)"
        args, gpu = self.args, on_gpu(self.args)
        reasons = {
            # Ranks that share the heads of a request would have to exchange in groups of their own.
            f"--dp-size {self.dp} that is not --tp-size {args.tp_size}": self.dp != args.tp_size,
            f"{self.heads} heads, which {self.dp} ranks do not divide": self.heads % self.dp > 0,
            "a mode or a budget that never expands": not self.options.may_expand,
            "--disaggregation-mode": args.disaggregation_mode != "null",
            "--elastic-ep-backend": args.elastic_ep_backend is not None,
            # Each rank picks a graph of its own size (sgl-project/sglang#30242).
            "--moe-dense-tp-size with --enable-dp-lm-head and --moe-a2a-backend": args.moe_dense_tp_size is not None
            and bool(args.enable_dp_lm_head)
            and args.moe_a2a_backend not in (None, "none"),
            "decode without CUDA graphs": gpu and args.cuda_graph_config.decode.backend == "disabled",
            "a CPU, whose ranks have no memory in common (nccl works)": self.by_stores and not gpu,
            "ranks on several nodes, which have no memory in common (nccl works)": self.by_stores and args.nnodes > 1,
            "--disable-cuda-graph-padding": gpu and bool(args.disable_cuda_graph_padding),
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    @property
    def sharding(self) -> int:
        """Ranks that shard expanded prefixes; 1 where each holds its own."""
        how = self.options.prefix_sharding
        if how == "off" or self.sharding_obstacle is not None or (how == "auto" and self._better_apart):
            return 1
        return self.dp

    @property
    def sharding_warning(self) -> str | None:
        """Return a warning with the reason why ranks do not shard prefixes. None where they do, where the user turned
        it off and, unless the user asked for sharding, on a CPU or with options that exclude it."""
        how, obstacle = self.options.prefix_sharding, self.sharding_obstacle
        if how == "off" or obstacle is None:
            return None
        if how != "auto":
            return f"{FLAG} {how} has no effect here, because of {obstacle}."
        if self.dp == 1 or self._better_apart or not self.options.may_expand or not on_gpu(self.args):
            return None
        return f"Each rank expands prefixes for itself, because of {obstacle}."

    @property
    def sharding_turned_off(self) -> bool:
        """Return whether ranks would shard prefixes by default, but the user turned it off."""
        asked = HybridMLAOptions.from_env().prefix_sharding  # `options` have "off" also where ranks are out of reach
        return asked == "off" and self.sharding_obstacle is None and not self._better_apart

    @property
    def _better_apart(self) -> bool:
        """Return whether each rank had better hold its own prefixes: with few heads it shares by grouped absorb,
        without memory or exchange, and routing by prefix keeps a prompt on one rank."""
        return self.heads in STACKED_HEADS or self.options.dp_routing == "prefix"

    @property
    def heads(self) -> int:
        """Query heads of the model; 0 where that is not known."""
        return int(getattr(installed.model_config(self.args).get_text_config(), "num_attention_heads", 0))

    @property
    def by_stores(self) -> bool:
        """Return whether ranks that shard prefixes exchange by stores into each other's memory, and not by NCCL."""
        return self.options.prefix_sharding != "nccl"


def set_environment(environment: MutableMapping[str, str]) -> None:
    """Keep NCCL, before it starts, from registering the buffers of exchanges that CUDA graphs hold, with which they
    hang (SGLang does so from 0.5.23 on). What the user set stands."""
    environment.setdefault("NCCL_GRAPH_REGISTER", "0")

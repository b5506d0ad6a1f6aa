"""One description of a server: what follows from its resolved arguments, its options and its device.

Each fact is derived here, once. Whatever is decided at launch or made at start reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.launch.mixed_steps import Mixing
from sglang_mla_ext.adapter.launch.resolved import ResolvedArgs, on_gpu, resolved
from sglang_mla_ext.adapter.launch.sharded_prefixes import Ranks
from sglang_mla_ext.configs import gpu_config_of
from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.predict.mixed import pass_layer_seconds
from sglang_mla_ext.predict.rates import Gpu
from sglang_mla_ext.predict.step import Deployment
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates, rates_for
from sglang_mla_ext.segment import Mode

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

MAX_RANKS = 64
"""A multiple of every number of attention ranks that SGLang pads batches for."""


class HeadSizes(NamedTuple):
    """Sizes of a model's attention: dimensions of a head's content, rotary part and values, of a latent row without
    its rotary part, and heads on a GPU."""

    nope: int
    rope: int
    v: int
    rank: int
    heads: int


@dataclass(frozen=True)
class Device:
    """The device that attention runs on."""

    on_gpu: bool

    @cached_property
    def name(self) -> str:
        """Name of the GPU; "cpu" without one."""
        return torch.cuda.get_device_name() if self.on_gpu else "cpu"

    @cached_property
    def rates(self) -> GpuRates:
        """Measured rates of this device."""
        return rates_for(self.name)

    @cached_property
    def memory_bytes(self) -> int | None:
        """Memory of one GPU; None on a CPU."""
        return int(torch.cuda.get_device_properties(0).total_memory) if self.on_gpu else None

    @cached_property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of the GPU; None on a CPU."""
        return torch.cuda.get_device_capability() if self.on_gpu else None


@dataclass(frozen=True)
class Prefill:
    """The backend of prefill, and its passes."""

    args: ResolvedArgs

    @cached_property
    def backend(self) -> str | None:
        """Name of the attention backend."""
        return installed.attention_backends(self.args)[0]

    @property
    def is_ours(self) -> bool:
        """Return whether prefill is this backend's. Another one's lse may be in another base."""
        return self.backend == BACKEND_NAME

    @cached_property
    def graphs(self) -> str:
        """Return how prefill is captured in CUDA graphs; "disabled" where it is not."""
        backend: str = self.args.cuda_graph_config.prefill.backend
        return backend

    @cached_property
    def graph_rows(self) -> int:
        """Rows of our buffers for prefill graphs: SGLang pads passes to a multiple of the attention ranks. 0 where
        prefill is another backend's, or runs without graphs."""
        rows = installed.prefill_graph_rows(self.args) if self.is_ours else 0
        return -(-rows // MAX_RANKS) * MAX_RANKS

    @property
    def tokens(self) -> int:
        """New tokens of a full pass."""
        chunk = self.args.chunked_prefill_size or 0
        return int(chunk if chunk > 0 else self.args.max_prefill_tokens)


@dataclass(frozen=True)
class Server:
    """See the module. Facts are computed when they are first read: some cost a look at the model's configuration."""

    args: ResolvedArgs
    options: HybridMLAOptions
    device: Device
    ranks: Ranks
    prefill: Prefill
    mixing: Mixing

    @classmethod
    def of(cls, args: ServerArgs | ResolvedArgs, options: HybridMLAOptions) -> Server:
        """Describe the server with these arguments, which SGLang has decided on."""
        args = resolved(args)
        parts = Ranks(args, options), Prefill(args), Mixing(args, options)
        return cls(args, options, Device(on_gpu(args)), *parts)

    @property
    def fp8_cache(self) -> bool:
        """Return whether the arguments ask for an FP8 cache. The checkpoint may, too; SGLang finds out later."""
        return bool(self.args.kv_cache_dtype == "fp8_e4m3")

    @cached_property
    def query_tokens(self) -> int:
        """Query tokens of a request in a step: 1, or those of a verify step."""
        return int(installed.draft_tokens(self.args))

    @cached_property
    def uses_grouped(self) -> bool:
        """Return whether grouped absorb is used where it runs.

        `auto` takes it only where it was timed, and where this rank's requests share for themselves.
        """
        if self.ranks.sharding > 1 or not self.options.may_group:
            return False
        return self.options.mode == "grouped_absorb" or self.device.rates.modes[Mode.GROUPED_ABSORB].measured

    @property
    def expands_transiently(self) -> bool:
        """Return whether prefill passes expand prefixes for themselves by default (prefill/transient.py): with DP
        attention, where a rank has all heads and seldom the memory to keep a long prefix expanded, and with prefill in
        CUDA graphs, where SGLang's own attention is by absorb; not where it was never run."""
        args, options, prefill = self.args, self.options, self.prefill
        return (
            self.device.on_gpu
            and options.mode_expands
            and options.prefill_expand_tokens is None
            and (prefill.graph_rows > 0 or (self.ranks.dp > 1 and args.speculative_algorithm is None))
            and prefill.is_ours
            and args.disaggregation_mode == "null"
            and not args.enable_hierarchical_cache
        )

    @cached_property
    def model_config(self) -> Any:
        """The model's configuration from Hugging Face."""
        return installed.model_config(self.args)

    @cached_property
    def head_sizes(self) -> HeadSizes | None:
        """Sizes of a head, and heads on a GPU; None where the configuration lacks one."""
        config = getattr(self.model_config, "text_config", None) or self.model_config
        names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "num_attention_heads")
        found: list[Any] = [getattr(config, name, None) for name in names]
        if None in found:
            return None
        nope, rope, v, rank, heads = found
        return HeadSizes(nope, rope, v, rank, heads // (self.args.tp_size // self.ranks.dp))

    @cached_property
    def graph_layer_s(self) -> float:
        """Seconds of a layer of a pass in a prefill graph beside attention: predicted, or DeepSeek-V3's of TP 8 where
        the GPU or the model is not known so well."""
        try:
            return pass_layer_seconds(self.deployment())
        except (ValueError, KeyError, TypeError):
            return self.device.rates.passes.graph_layer_s

    def deployment(self) -> Deployment:
        """Describe the server to `predict`.

        Raises:
            ValueError, KeyError or TypeError: the GPU or the model is not known so well.
        """
        if (name := gpu_config_of(self.device.name)) is None:
            raise ValueError(f"no rates of {self.device.name}")
        options = self.options
        fp8 = options.prefix_dtype == "fp8_e4m3" or (options.prefix_dtype == "auto" and self.fp8_cache)
        return Deployment(
            self.model_config.to_dict(),
            Gpu.from_json(name),
            self.args.tp_size,
            self.ranks.dp,
            expanded_element_bytes=1 if fp8 else 2,
            prefix_sharding=self.ranks.sharding > 1,
        )

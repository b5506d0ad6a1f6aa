"""One description of a server: what follows from its resolved arguments, its options and its device.

Each fact is derived here, once. Whatever is decided at launch or made at start reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.launch import mixed_steps, models, sharded_prefixes, transient_expansion
from sglang_mla_ext.adapter.launch.models import HeadSizes
from sglang_mla_ext.adapter.launch.resolved import ResolvedArgs, resolved
from sglang_mla_ext.configs import gpu_config_of
from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates, rates_for
from sglang_mla_ext.segment import Mode

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from sglang_mla_ext.predict.step import Deployment

MAX_RANKS = 64
"""A multiple of every number of attention ranks that SGLang pads batches for."""


@dataclass(frozen=True)
class Server:
    """See the module. Facts are computed when they are first read: some cost a look at the model's configuration.

    Attributes:
        on_gpu: whether attention runs on a GPU.
        memory_bytes: device memory of one GPU; None on a CPU, and where nobody needs it.
    """

    args: ResolvedArgs
    options: HybridMLAOptions
    on_gpu: bool
    memory_bytes: int | None = None

    @classmethod
    def of(cls, args: ServerArgs, options: HybridMLAOptions, on_gpu: bool, memory_bytes: int | None = None) -> Server:
        """Describe the server with these arguments, which SGLang has decided on."""
        return cls(resolved(args), options, on_gpu, memory_bytes)

    def with_options(self, options: HybridMLAOptions) -> Server:
        """Describe the same server with other options, as with defaults that follow the memory."""
        return replace(self, options=options)

    # ---- device

    @cached_property
    def gpu(self) -> str:
        """Name of the GPU; "cpu" without one."""
        return torch.cuda.get_device_name() if self.on_gpu else "cpu"

    @cached_property
    def rates(self) -> GpuRates:
        """Measured rates of this device."""
        return rates_for(self.gpu)

    # ---- attention backends, phases and graphs

    @cached_property
    def backends(self) -> tuple[str | None, str | None]:
        """Names of the attention backends for prefill and decode."""
        prefill, decode = installed.attention_backends(self.args)
        return prefill, decode

    @property
    def owns_prefill(self) -> bool:
        """Return whether prefill is this backend's. Another one's lse may be in another base."""
        return self.backends[0] == BACKEND_NAME

    @property
    def owns_decode(self) -> bool:
        """Return whether decode is this backend's."""
        return self.backends[1] == BACKEND_NAME

    @cached_property
    def query_tokens(self) -> int:
        """Query tokens of a request in a step: 1, or those of a verify step."""
        return int(installed.draft_tokens(self.args))

    @cached_property
    def prefill_graphs(self) -> str:
        """Return how prefill is captured in CUDA graphs; "disabled" where it is not."""
        backend: str = self.args.cuda_graph_config.prefill.backend
        return backend

    @property
    def prefill_tokens(self) -> int:
        """New tokens of a full prefill pass."""
        chunk = self.args.chunked_prefill_size or 0
        return int(chunk if chunk > 0 else self.args.max_prefill_tokens)

    @cached_property
    def prefill_graph_rows(self) -> int:
        """Rows of our buffers for prefill graphs: SGLang pads passes to a multiple of the attention ranks. 0 where
        prefill is another backend's, or runs without graphs."""
        rows = installed.prefill_graph_rows(self.args) if self.owns_prefill else 0
        return -(-rows // MAX_RANKS) * MAX_RANKS

    # ---- the model, as its configuration has it

    @cached_property
    def model_config(self) -> Any:
        """The model's configuration from Hugging Face."""
        return installed.model_config(self.args)

    @cached_property
    def head_sizes(self) -> HeadSizes | None:
        """Sizes of a head, and heads on a GPU; None where the configuration lacks one."""
        return models.head_sizes(self.args, self.model_config)

    @property
    def fp8_cache(self) -> bool:
        """Return whether the arguments ask for an FP8 cache. The checkpoint may, too; SGLang finds out later."""
        return bool(self.args.kv_cache_dtype == "fp8_e4m3")

    # ---- ranks

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return int(self.args.tp_size)

    @cached_property
    def dp_ranks(self) -> int:
        """Ranks of DP attention with requests of their own; 1 without it."""
        return int(installed.dp_attention_ranks(self.args))

    @cached_property
    def sharding_obstacle(self) -> str | None:
        """Return what keeps ranks from sharding expanded prefixes; None where nothing does."""
        return sharded_prefixes.obstacle(self.args, self.options, self.on_gpu)

    @property
    def prefix_ranks(self) -> int:
        """Ranks that shard expanded prefixes; 1 where each holds its own."""
        return 1 if self.options.prefix_sharding == "off" or self.sharding_obstacle is not None else self.dp_ranks

    @property
    def sharding_warning(self) -> str | None:
        """Why sharding is asked for in vain."""
        if self.options.prefix_sharding == "off" or self.sharding_obstacle is None:
            return None
        asked = f"{sharded_prefixes.FLAG} {self.options.prefix_sharding}"
        return f"{asked} has no effect here, because of {self.sharding_obstacle}."

    @property
    def may_store(self) -> bool:
        """Return whether ranks that shard prefixes may exchange by stores, if their GPUs reach each other."""
        return sharded_prefixes.may_store(self.args, self.options)

    # ---- mixed steps and prefill

    @cached_property
    def mixing_obstacle(self) -> str | None:
        """Return what keeps new tokens out of decode steps; None where they can be mixed in."""
        return mixed_steps.obstacle(self.args, self.on_gpu)

    @property
    def mixed_chunk_obstacle(self) -> str | None:
        """Return what keeps new tokens out of steps with running requests (--enable-mixed-chunk)."""
        return "DP attention (--enable-dp-attention)" if self.dp_ranks > 1 else self.mixing_obstacle

    @cached_property
    def mixed_tokens(self) -> int:
        """New tokens that a decode step may have; 0 where there are none."""
        return mixed_steps.tokens(self.args, self.options, self.on_gpu)

    @property
    def expands_transiently(self) -> bool:
        """Return whether prefill passes use transient expansion by default."""
        return transient_expansion.by_default(self.args, self.options, self.on_gpu)

    @cached_property
    def uses_grouped(self) -> bool:
        """Return whether grouped absorb is used where it runs.

        `auto` takes it only where it was timed, and where this rank's requests share for themselves.
        """
        if self.prefix_ranks > 1 or not (self.options.mode == "grouped_absorb" or self.options.may_group):
            return False
        return self.options.mode == "grouped_absorb" or self.rates.modes[Mode.GROUPED_ABSORB].measured

    # ---- predictions

    @cached_property
    def graph_layer_s(self) -> float:
        """Seconds of a layer of a pass in a prefill graph beside attention: predicted, or DeepSeek-V3's of TP 8 where
        the GPU or the model is not known so well."""
        from sglang_mla_ext.predict.mixed import pass_layer_seconds

        try:
            return pass_layer_seconds(self.deployment())
        except (ValueError, KeyError, TypeError):
            return self.rates.passes.graph_layer_s

    def deployment(self) -> Deployment:
        """Describe the server to `predict`.

        Raises:
            ValueError, KeyError or TypeError: the GPU or the model is not known so well.
        """
        from sglang_mla_ext.predict.rates import Gpu
        from sglang_mla_ext.predict.step import Deployment

        if (name := gpu_config_of(self.gpu)) is None:
            raise ValueError(f"no rates of {self.gpu}")
        options = self.options
        fp8 = options.prefix_dtype == "fp8_e4m3" or (options.prefix_dtype == "auto" and self.fp8_cache)
        return Deployment(
            self.model_config.to_dict(),
            Gpu.from_json(name),
            self.ranks,
            self.dp_ranks,
            expanded_element_bytes=1 if fp8 else 2,
            prefix_sharding=self.prefix_ranks > 1,
        )

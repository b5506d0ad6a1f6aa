"""How far the parts of a deployment were run with each release of SGLang: what `sglang-mla doctor` says beside *works*.

docs/support.md shows the table. What is not in the table was never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.launch import passing, riding, spread
from sglang_mla_ext.options import HybridMLAOptions

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

GPU, CPU, RESOLVED = PLACES = ("gpu", "cpu", "resolved")
IN_WORDS = {GPU: "run on a GPU", CPU: "run on the CPU", RESOLVED: "resolved only"}

SERVER, TENSOR, DP_ATTENTION = "a server", "tensor parallelism", "DP attention"
GROUPS = "DP attention in groups whose ranks divide the heads"
REPLICAS, NODES = "--dp-size without DP attention", "several nodes"
SPREAD, PEERS = "prefixes spread over ranks", "their exchange by stores"
DRAFTS, FP8_CACHE, HOST_CACHE = "drafts", "an FP8 cache", "a host cache"
DRAFTS_OVER_SPREAD = "drafts over prefixes spread over ranks"
MIXED, RIDING = "mixed steps", "new tokens that ride under DP attention"
COMPILED, PASSING = "--enable-torch-compile", "prefill that expands for itself"
PREFILL_GRAPHS = "prefill in CUDA graphs"
STORAGE, PREFILL_BY = "storage {}", "prefill by {}"
ROLE_BY, EXPERTS_BY = "prefill and decode servers by {}", "experts by {}"
FILES, FLASHINFER, NIXL = STORAGE.format("file"), PREFILL_BY.format("flashinfer"), ROLE_BY.format("nixl")
V2, V3, LONGCAT = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "LongcatFlashForCausalLM"
KIMI_LINEAR, KIMI_K3_TEXT = "KimiLinearForCausalLM", "KimiK3LinearForCausalLM"
KIMI_K3 = "KimiK3ForConditionalGeneration"
GLM_FLASH = "Glm4MoeLiteForCausalLM"

MOST_RANKS: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "0.5.17": {
        GPU: {
            **{SERVER: 1, V2: 1, V3: 1, LONGCAT: 1, GLM_FLASH: 1, TENSOR: 2, DP_ATTENTION: 4, GROUPS: 4},
            **{SPREAD: 4, PEERS: 4, PASSING: 4, MIXED: 2, RIDING: 4, DRAFTS_OVER_SPREAD: 2},
            **{DRAFTS: 2, FP8_CACHE: 2, HOST_CACHE: 1, FLASHINFER: 1, COMPILED: 1, NIXL: 1},
        },
        CPU: {
            **{SERVER: 1, V2: 1, V3: 1, LONGCAT: 1, TENSOR: 2, DP_ATTENTION: 4, GROUPS: 4, REPLICAS: 2, NODES: 2},
            **{SPREAD: 4, PASSING: 2, MIXED: 2, RIDING: 2, FP8_CACHE: 1, HOST_CACHE: 1, FILES: 1, NIXL: 1},
            **{GLM_FLASH: 1, DRAFTS: 2, DRAFTS_OVER_SPREAD: 2},
        },
    },
    "0.5.18": {CPU: {SERVER: 1, V3: 1, HOST_CACHE: 1, FILES: 1}},
    "0.5.20": {CPU: {SERVER: 1, V3: 1}},
    "0.5.23": {
        GPU: {
            **{SERVER: 1, V3: 1, MIXED: 1, DP_ATTENTION: 2, SPREAD: 2, PEERS: 2, PASSING: 1, DRAFTS: 1},
            **{FP8_CACHE: 2, PREFILL_GRAPHS: 1, KIMI_LINEAR: 1, KIMI_K3: 1},
        },
        CPU: {
            **{SERVER: 1, V2: 1, V3: 1, LONGCAT: 1, TENSOR: 2, DP_ATTENTION: 2, GROUPS: 4, REPLICAS: 2, NODES: 2},
            **{SPREAD: 2, PASSING: 2, MIXED: 2, RIDING: 2, HOST_CACHE: 1, FILES: 1},
            **{KIMI_LINEAR: 1, KIMI_K3: 1, KIMI_K3_TEXT: 1, GLM_FLASH: 1, DRAFTS: 2, DRAFTS_OVER_SPREAD: 2},
        },
    },
}
"""The most ranks of one server that a part was run with, by release and place."""


class Part(NamedTuple):
    """A part of a deployment.

    Attributes:
        place: the best of PLACES that it was run in.
        ranks: how many it had there, at most, and `of` how many are asked for.
    """

    name: str
    place: str
    ranks: int
    of: int


class HowFar(NamedTuple):
    """How far a deployment was run: as far as each of its parts was. Few were run together.

    Attributes:
        place: the worst of its parts'.
        version: of SGLang.
    """

    place: str
    version: str
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        """`run on the CPU: several nodes with 2 of 16 ranks`. Named are the parts that others were run further than,
        and those that had fewer ranks."""
        further = any(part.place != self.place for part in self.parts)
        named = []
        for part in self.parts:
            fewer = 0 < part.ranks < part.of
            if part.place == self.place and (further or fewer):
                named.append(f"{part.name} with {part.ranks} of {part.of} ranks" if fewer else part.name)
        place = IN_WORDS[self.place]
        return f"{place}: {', '.join(named)}" if named else place


def how_far(parts: Mapping[str, int], version: str) -> HowFar:
    """
    Args:
        parts: of a deployment, with the ranks that each has.
        version: of SGLang.
    """
    places = MOST_RANKS.get(version, {})
    found = []
    for name, of in parts.items():
        place = next((place for place in PLACES if name in places.get(place, {})), RESOLVED)
        found.append(Part(name, place, places.get(place, {}).get(name, 0), of))
    worst = max((part.place for part in found), key=PLACES.index)
    return HowFar(worst, version, tuple(found))


def parts_of(args: ServerArgs, options: HybridMLAOptions) -> dict[str, int]:
    """The parts of a server on GPUs, with the ranks that each has. `args` are resolved."""
    args = installed.resolved(args)
    ranks, experts = args.tp_size, args.moe_a2a_backend
    dp_attention = installed.dp_attention_ranks(args) > 1
    spreads = spread.ranks(args, options, on_gpu=True) > 1
    rides = options.mixed_tokens != 0 and riding.in_the_way(args, on_gpu=True) is None
    prefill, _ = installed.attention_backends(args)
    asked: dict[str, Any] = {
        SERVER: 1,
        installed.model_config(args).architectures[0]: 1,
        DP_ATTENTION: dp_attention and ranks,
        GROUPS: dp_attention and installed.dp_attention_ranks(args) < ranks and ranks,
        SPREAD: spreads and ranks,
        PEERS: spreads and spread.may_store(args, options) and ranks,
        TENSOR: ranks > 1 and not dp_attention and ranks,
        REPLICAS: args.dp_size > 1 and not dp_attention and args.dp_size,
        NODES: args.nnodes > 1 and ranks,
        MIXED: rides and not dp_attention and ranks,
        RIDING: rides and dp_attention and ranks,
        DRAFTS: args.speculative_algorithm and ranks,
        DRAFTS_OVER_SPREAD: args.speculative_algorithm and spreads and ranks,
        FP8_CACHE: args.kv_cache_dtype == "fp8_e4m3" and ranks,
        HOST_CACHE: args.enable_hierarchical_cache and ranks,
        STORAGE.format(args.hicache_storage_backend): args.hicache_storage_backend and ranks,
        PREFILL_BY.format(prefill): prefill != BACKEND_NAME and ranks,
        ROLE_BY.format(args.disaggregation_transfer_backend): args.disaggregation_mode != "null" and ranks,
        EXPERTS_BY.format(experts): experts not in (None, "none") and ranks,
        "expert parallelism": args.ep_size > 1 and ranks,
        COMPILED: args.enable_torch_compile and ranks,
        PREFILL_GRAPHS: installed.prefill_graph_backend(args) != "disabled" and ranks,
        PASSING: (options.passing_tokens or passing.by_default(args, options, on_gpu=True)) and ranks,
    }
    return {name: int(ranks) for name, ranks in asked.items() if ranks}

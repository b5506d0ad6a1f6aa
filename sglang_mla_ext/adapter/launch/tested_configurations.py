"""The parts of a deployment that were run with each release of SGLang, for `sglang-mla doctor`.

docs/support.md shows the table. What is not in the table was never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sglang_mla_ext.adapter.server import Server

GPU, CPU, RESOLVED = PLACES = ("gpu", "cpu", "resolved")
IN_WORDS = {GPU: "tested on a GPU", CPU: "tested on the CPU only", RESOLVED: "not tested"}

SERVER, TENSOR, DP_ATTENTION = "a server", "tensor parallelism", "DP attention"
GROUPS = "DP attention in groups whose ranks divide the heads"
REPLICAS, NODES = "--dp-size without DP attention", "several nodes"
SHARDED, PEERS = "sharded prefixes", "exchange of sharded prefixes by stores"
DRAFTS, FP8_CACHE, HOST_CACHE = "drafts", "an FP8 cache", "a host cache"
DRAFTS_OVER_SHARDED = "drafts over sharded prefixes"
MIXED, MIXED_DP = "mixed steps", "mixed steps under DP attention"
COMPILED, TRANSIENT = "--enable-torch-compile", "transient expansion in prefill"
PREFILL_GRAPHS = "prefill in CUDA graphs"
STORAGE, PREFILL_BY = "storage {}", "prefill by {}"
ROLE_BY, EXPERTS_BY = "prefill and decode servers by {}", "experts by {}"
FILES, FLASHINFER, NIXL = STORAGE.format("file"), PREFILL_BY.format("flashinfer"), ROLE_BY.format("nixl")
V2, V3, LONGCAT = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "LongcatFlashForCausalLM"
KIMI_LINEAR, KIMI_K3_TEXT = "KimiLinearForCausalLM", "KimiK3LinearForCausalLM"
KIMI_K3 = "KimiK3ForConditionalGeneration"
GLM_FLASH = "Glm4MoeLiteForCausalLM"
MISTRAL = "MistralLarge3ForCausalLM"

MOST_RANKS: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "0.5.17": {
        GPU: {
            **{SERVER: 1, V2: 1, V3: 1, LONGCAT: 1, GLM_FLASH: 1, TENSOR: 2, DP_ATTENTION: 4, GROUPS: 4},
            **{SHARDED: 4, PEERS: 4, TRANSIENT: 4, MIXED: 2, MIXED_DP: 4, DRAFTS_OVER_SHARDED: 2},
            **{DRAFTS: 2, FP8_CACHE: 2, HOST_CACHE: 1, FLASHINFER: 1, COMPILED: 1, NIXL: 1},
        },
        CPU: {
            **{SERVER: 1, V2: 1, V3: 1, LONGCAT: 1, TENSOR: 2, DP_ATTENTION: 4, GROUPS: 4, REPLICAS: 2, NODES: 2},
            **{SHARDED: 4, TRANSIENT: 2, MIXED: 2, MIXED_DP: 2, FP8_CACHE: 1, HOST_CACHE: 1, FILES: 1, NIXL: 1},
            **{GLM_FLASH: 1, DRAFTS: 2, DRAFTS_OVER_SHARDED: 2},
        },
    },
    "0.5.23": {
        GPU: {
            **{SERVER: 1, V3: 1, TENSOR: 2, MIXED: 2, DP_ATTENTION: 4, SHARDED: 4, PEERS: 4, TRANSIENT: 4, MIXED_DP: 4},
            **{DRAFTS: 1, FP8_CACHE: 2, PREFILL_GRAPHS: 2, KIMI_LINEAR: 1, KIMI_K3: 1},
        },
        CPU: {
            **{SERVER: 1, V2: 1, V3: 1, LONGCAT: 1, TENSOR: 2, DP_ATTENTION: 2, GROUPS: 4, REPLICAS: 2, NODES: 2},
            **{SHARDED: 2, TRANSIENT: 2, MIXED: 2, MIXED_DP: 2, HOST_CACHE: 1, FILES: 1, NIXL: 1, FP8_CACHE: 1},
            **{KIMI_LINEAR: 1, KIMI_K3: 1, KIMI_K3_TEXT: 1, GLM_FLASH: 1, MISTRAL: 1},
            **{DRAFTS: 2, DRAFTS_OVER_SHARDED: 2},
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


class Tested(NamedTuple):
    """Extent to which a deployment was tested: that of its least tested part. Few parts were run together.

    Attributes:
        place: the worst place of its parts.
        version: of SGLang.
    """

    place: str
    version: str
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        """Describe in words: `tested on the CPU only: several nodes; never run on 16 ranks: several nodes (on 2)`.

        Named are the parts that others were tested further than, and those tested on fewer ranks.
        """
        worst = [part for part in self.parts if part.place == self.place]
        said = IN_WORDS[self.place]
        if len(worst) < len(self.parts):
            said += f": {', '.join(part.name for part in worst)}"
        if fewer := [part for part in worst if 0 < part.ranks < part.of]:
            named = ", ".join(f"{part.name} (on {part.ranks})" for part in fewer)
            said += f"; never run on {max(part.of for part in fewer)} ranks: {named}"
        return said


def tested(parts: Mapping[str, int], version: str) -> Tested:
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
    return Tested(worst, version, tuple(found))


def parts_of(server: Server) -> dict[str, int]:
    """The parts of a server on GPUs, with the ranks that each has."""
    args, ranks, experts = server.args, server.args.tp_size, server.args.moe_a2a_backend
    dp_attention, sharded = server.ranks.dp > 1, server.ranks.sharding > 1
    mixed = server.options.mixed_tokens != 0 and server.mixing.obstacle is None
    asked: dict[str, Any] = {
        SERVER: 1,
        server.model_config.architectures[0]: 1,
        DP_ATTENTION: dp_attention and ranks,
        GROUPS: dp_attention and server.ranks.dp < ranks and ranks,
        SHARDED: sharded and ranks,
        PEERS: sharded and server.ranks.by_stores and ranks,
        TENSOR: ranks > 1 and not dp_attention and ranks,
        REPLICAS: args.dp_size > 1 and not dp_attention and args.dp_size,
        NODES: args.nnodes > 1 and ranks,
        MIXED: mixed and not dp_attention and ranks,
        MIXED_DP: mixed and dp_attention and ranks,
        DRAFTS: args.speculative_algorithm and ranks,
        DRAFTS_OVER_SHARDED: args.speculative_algorithm and sharded and ranks,
        FP8_CACHE: server.fp8_cache and ranks,
        HOST_CACHE: args.enable_hierarchical_cache and ranks,
        STORAGE.format(args.hicache_storage_backend): args.hicache_storage_backend and ranks,
        PREFILL_BY.format(server.prefill.backend): not server.prefill.is_ours and ranks,
        ROLE_BY.format(args.disaggregation_transfer_backend): args.disaggregation_mode != "null" and ranks,
        EXPERTS_BY.format(experts): experts not in (None, "none") and ranks,
        "expert parallelism": args.ep_size > 1 and ranks,
        COMPILED: args.enable_torch_compile and ranks,
        PREFILL_GRAPHS: server.prefill.graphs != "disabled" and ranks,
        TRANSIENT: (server.options.transient_tokens or server.expands_transiently) and ranks,
    }
    return {name: int(ranks) for name, ranks in asked.items() if ranks}

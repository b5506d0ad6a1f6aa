"""Models that `hybrid_mla` does not know, or has no kernels for, found at launch by their configurations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.compat.attention_classes import strange_layers
from sglang_mla_ext.adapter.compat.findings import Finding
from sglang_mla_ext.adapter.launch.resolved import ResolvedArgs
from sglang_mla_ext.adapter.server import Server
from sglang_mla_ext.kernels.absorb.stacking import STACKED_HEADS
from sglang_mla_ext.kernels.constants import supports_heads
from sglang_mla_ext.kernels.sizes import LATENT_DIMS


def unknown_parts(server: Server) -> list[Finding]:
    """Refuse models with parts that are not computed here."""
    from sglang.srt.configs.model_config import is_deepseek_dsa

    if not installed.uses_mla(server.args):
        text = "the model does not use Multi-head Latent Attention: choose another --attention-backend."
        return [Finding("no MLA", text)]
    config = server.model_config
    if is_deepseek_dsa(config):
        return [Finding("sparse", "the model uses DeepSeek Sparse Attention: use --attention-backend dsa.")]
    if _has_no_rotation(config):
        text = (
            "SGLang cannot build LongCat-Flash from a config.json without rope_parameters: add "
            """--json-model-override-args '{"rope_parameters": {"factor": 1.0}}'."""
        )
        return [Finding("no rotation", text)]
    architecture = config.architectures[0]
    if (tree := installed.tree_of_linear_layers) and installed.linear_layers(server.args) is not None:
        text = (
            f"{architecture} has layers with linear attention beside Multi-head Latent Attention, and this SGLang "
            f"keeps its prefixes in a tree of another kind ({tree}): use SGLang 0.5.23 or newer, or choose another "
            "--attention-backend."
        )
        return [Finding("linear layers", text)]
    if names := strange_layers(architecture):
        text = (
            f"{architecture} has attention layers of its own ({', '.join(names)}), and those that share are DeepSeek's "
            "(DeepseekV2AttentionMLA), also with a gate at the output projection: choose another --attention-backend."
        )
        return [Finding("attention layers", text)]
    return _sizes(server) if server.device.on_gpu else []


def beside_linear_layers(args: ResolvedArgs) -> Iterator[Finding]:
    """Refuse what does not go with layers with linear attention, where the model has them."""
    if installed.linear_layers(args) is None:
        return
    not_run = {
        "--speculative-algorithm": args.speculative_algorithm,
        "--hicache-storage-backend": args.hicache_storage_backend,
    }
    for flag, given in not_run.items():
        if given is not None:
            text = f"{flag} does not go with layers with linear attention yet, which this model has: remove it."
            yield Finding(f"{flag} with linear layers", text)
    if args.disaggregation_mode == "decode":
        # A prompt is inserted with a state at its end, and None says that there is none to insert
        # (MambaComponent.prepare_for_caching_req, mem_cache/unified_cache/components/mamba.py:649).
        yield Finding(
            "--disaggregation-mode with linear layers",
            "--disaggregation-mode decode shares nothing with layers with linear attention, which this model has: "
            "SGLang's decode servers put no prompt into their radix tree that came without states to keep. Choose "
            "another --attention-backend for them.",
        )
    if args.enable_hierarchical_cache and args.hicache_mem_layout == "layer_first":
        # SGLang only asserts that (MambaPoolHost.__init__, mem_cache/pool_host/mamba.py:119).
        yield Finding(
            "--hicache-mem-layout with linear layers",
            "--hicache-mem-layout layer_first does not go with layers with linear attention, which this model has: "
            "SGLang keeps their states on the host in page_first and page_first_direct alone. Use one of these.",
        )


def _sizes(server: Server) -> list[Finding]:
    """Sizes that FlashMLA does not take, or no kernel of ours for Hopper, so that every step would be SGLang's."""
    if (sizes := server.head_sizes) is None:
        return []
    nope, rope, v, rank, heads = sizes
    if (rank, rope) != LATENT_DIMS:
        text = (
            f"FlashMLA reads latent rows of {' + '.join(map(str, LATENT_DIMS))}, which are {rank} + {rope} here: "
            "choose another --attention-backend."
        )
        return [Finding("latent rows", text)]
    if heads in STACKED_HEADS or supports_heads(nope, v, rope):
        return []
    text = (
        f"nothing would be shared: expanded prefixes need heads of multiples of 16 (content) and powers of two (values "
        f"and rotary part) up to 256, which {nope}, {v} and {rope} are not, and grouped absorb at most "
        f"{STACKED_HEADS[-1]} heads on a GPU, which has {heads}: choose another --attention-backend."
    )
    return [Finding("sizes", text)]


def scales_queries(args: ResolvedArgs) -> bool:
    """Return whether the model scales its queries by their positions, as Mistral Large 3 does. SGLang does it where a
    backend reads whole queries, between absorption and attention."""
    config = installed.model_config(args)
    return bool(getattr(getattr(config, "text_config", None) or config, "llama_4_scaling", None))


def _has_no_rotation(config: Any) -> bool:
    """Return whether this is LongCat-Flash's own configuration, in which transformers 5 finds no scaling of rotary
    embeddings: SGLang looks for a field in None. A factor of 1 means what the model does."""
    return "LongcatFlashForCausalLM" in config.architectures and getattr(config, "rope_parameters", {}) is None

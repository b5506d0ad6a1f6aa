"""Whether prefill has the memory that a pass takes while it runs: said at launch and by `sglang-mla doctor`."""

from __future__ import annotations

from sglang_mla_ext.adapter.server import Server

VARIABLE = "SGLANG_MAX_KV_CHUNK_CAPACITY"
"""Sets how many tokens of cached prompts SGLang makes keys and values of at a time."""

SHARE = 0.75
"""Of the memory that is not for weights and cache; the rest is for CUDA graphs and activations."""


def warning(server: Server) -> str | None:
    """Return a warning if a pass over long cached prompts would take more memory than SGLang leaves."""
    args, memory_bytes = server.args, server.memory_bytes
    if memory_bytes is None or not args.mem_fraction_static:
        return None
    if args.disable_chunked_prefix_cache or args.disaggregation_mode == "decode":
        return None
    if (sizes := server.head_sizes) is None:
        return None
    # Content and values come of one product, and whole keys are a copy, in BF16.
    token_bytes = 2 * sizes.heads * (sizes.nope + sizes.v + sizes.nope + sizes.rope)
    from sglang.srt.environ import envs

    tokens = int(envs.SGLANG_MAX_KV_CHUNK_CAPACITY.get())
    left = memory_bytes * (1 - args.mem_fraction_static)
    if tokens * token_bytes <= SHARE * left:
        return None
    fitting = max(int(SHARE * left / token_bytes), 1)
    return (
        f"prefill makes keys and values of {tokens:,} tokens of cached prompts at a time, "
        f"{tokens * token_bytes / (1 << 30):.1f} GiB with {sizes.heads} heads on a GPU, and --mem-fraction-static "
        f"{args.mem_fraction_static:g} leaves {left / (1 << 30):.1f} GiB for that, CUDA graphs and activations: lower "
        f"the fraction, or set {VARIABLE}={1 << (fitting.bit_length() - 1)}."
    )

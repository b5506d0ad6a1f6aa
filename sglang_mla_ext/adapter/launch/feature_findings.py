"""Findings by feature: drafts, host cache, FP8 cache, prefill and decode servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.compat.findings import Finding, unsupported
from sglang_mla_ext.adapter.launch.resolved import ResolvedArgs
from sglang_mla_ext.adapter.server import Server

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN")
"""Supported algorithms of speculative decoding; the last one is another name for the first, which SGLang's resolved
arguments contain."""

DRAFT_TOKENS = range(2, 9)
"""Query tokens of a request in a verify step."""

HOST_COPIES = ("kernel", "direct")
"""SGLang's ways of copying rows to the host and back on a GPU. Rows of an FP8 cache are multiples of 16 bytes; of
SGLang's kernels the compiled ones require multiples of 8, the one that stages pages 16, and the one that requires 128
is not used then."""

HOST_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
"""Layouts of latent rows on the host."""

TRANSFERS = ("mooncake", "nixl")
"""SGLang's names of what moves a KV cache from a prefill to a decode server."""


def way_of_drafting(algorithm: str | None) -> list[Finding]:
    """Return the finding against a way of drafting that is not supported with any models; none if it is supported."""
    if algorithm is None or algorithm.upper() in ALGORITHMS:
        return []
    if algorithm.upper() == "DSPARK":
        text = (
            "--speculative-algorithm DSPARK is not supported: it was never run here, and but for "
            "SGLANG_RAGGED_VERIFY_MODE=static it verifies another number of drafts for each request "
            "(ragged_verify_layout). Remove it."
        )
    else:
        text = (
            f"--speculative-algorithm {algorithm} is not supported: use {', '.join(ALGORITHMS[:-1])} or "
            f"{ALGORITHMS[-1]}, with --speculative-eagle-topk 1."
        )
    return [Finding("--speculative-algorithm", text)]


def draft_tree(args: ServerArgs | ResolvedArgs) -> list[Finding]:
    """Return the finding against drafts that do not come in one chain; none if they do."""
    if found := way_of_drafting(args.speculative_algorithm):
        return found
    flag, branches = "--speculative-eagle-topk", args.speculative_eagle_topk
    if args.speculative_algorithm is None or branches in (None, 1):
        return []
    return [Finding(flag, f"{flag} {branches} is not supported: use 1.")]


def drafts(server: Server) -> Iterator[Finding]:
    """Refuse drafts other than one chain of a length that never changes."""
    from sglang.srt.environ import envs

    args = server.args
    if args.speculative_algorithm is None:
        return
    if found := draft_tree(args):
        yield from found
        return
    if args.speculative_num_draft_tokens not in DRAFT_TOKENS:
        few, many = DRAFT_TOKENS[0], DRAFT_TOKENS[-1]
        yield Finding(
            "--speculative-num-draft-tokens",
            f"--speculative-num-draft-tokens {args.speculative_num_draft_tokens} is not supported: use {few} to "
            f"{many}, and --speculative-num-steps {few - 1} to {many - 1}, one less.",
        )
    if args.speculative_draft_attention_backend == BACKEND_NAME:
        flag = "--speculative-draft-attention-backend"
        yield Finding(flag, f"{flag} {BACKEND_NAME} is not supported, drafts share nothing: remove it.")
    if envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get():
        name = "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"
        yield Finding(name, f"{name} is not supported, as it is not by flashmla: unset it.")
    flags = {
        "--speculative-adaptive": args.speculative_adaptive,
        "--enable-multi-layer-eagle": args.enable_multi_layer_eagle,
        "--decoupled-spec-role": args.decoupled_spec_role != "null",
    }
    yield from unsupported(flags)


def host_cache(server: Server) -> Iterator[Finding]:
    """Refuse what SGLang would find out when the first rows go to the host."""
    args, gpu = server.args, server.device.on_gpu
    if not args.enable_hierarchical_cache:
        return
    copies, layouts = (HOST_COPIES, HOST_LAYOUTS) if gpu else (("direct",), ("layer_first", "page_first_direct"))
    for flag, value, allowed in (
        ("--hicache-io-backend", args.hicache_io_backend, copies),
        ("--hicache-mem-layout", args.hicache_mem_layout, layouts),
    ):
        if value not in allowed:
            where = "here" if gpu else "on a CPU"
            yield Finding(flag, f"{flag} {value} is not supported {where}: use {' or '.join(allowed)}.")


def disaggregation(server: Server) -> Iterator[Finding]:
    """Refuse what keeps a prefill or decode server from sharing prefixes, and what was not tested there."""
    args = server.args
    if args.disaggregation_mode == "null":
        return
    flag, backend = "--disaggregation-transfer-backend", args.disaggregation_transfer_backend
    if backend not in TRANSFERS:
        yield Finding(flag, f"{flag} {backend} is not supported yet: use {' or '.join(TRANSFERS)}.")
    if args.disaggregation_mode == "prefill":
        if not server.prefill.is_ours:
            yield Finding(
                "prefill backend",
                f"prefill runs {server.prefill.backend}, and this server does nothing else (--disaggregation-mode "
                f"prefill): use {BACKEND_NAME} for prefill too.",
            )
        return
    if args.speculative_algorithm is not None:
        # With 0.5.17 decode servers have no radix tree beside drafts. From 0.5.23 on they may have one
        # (handle_speculative_decoding, arg_groups/speculative_hook.py:164), which was not run with this backend.
        yield Finding(
            "drafts on a decode server",
            "--disaggregation-mode decode does not go with --speculative-algorithm yet: choose another "
            "--attention-backend for these servers.",
        )
    elif not args.disaggregation_decode_enable_radix_cache:
        yield Finding(
            "no radix tree",
            "--disaggregation-mode decode has no radix tree to find shared prefixes in: add "
            "--disaggregation-decode-enable-radix-cache.",
        )
    if args.enable_hierarchical_cache:
        text = "--enable-hierarchical-cache does not go with --disaggregation-mode decode yet: remove it."
        yield Finding("host cache on a decode server", text)


def deterministic(args: ServerArgs) -> list[Finding]:
    """Answers that do not depend on the batch: SGLang would only name the backends that it has for this."""
    flags = {
        "--enable-deterministic-inference": args.enable_deterministic_inference,
        "--rl-on-policy-target": args.rl_on_policy_target is not None,
    }
    why = "how a prefix is attended to depends on the batch: choose another --attention-backend."
    return [Finding(flag, f"{flag} is not supported, {why}") for flag, given in flags.items() if given]


def prefill_by_keys(server: Server) -> Iterator[Finding]:
    """Refuse flags with which SGLang's prefill attends to the pool itself on a GPU, by absorb, where otherwise it asks
    for rows by their slots. It cannot read an FP8 pool. Passes over expanded prefixes leave their CUDA graph above the
    largest one, say, or with DP attention while a rank is idle, and have keys per head then."""
    args, fp8 = server.args, server.fp8_cache
    leaves_graphs = server.prefill.is_ours and server.prefill.graphs != "disabled"
    flags = {
        "--flashinfer-mla-disable-ragged": args.flashinfer_mla_disable_ragged,
        "--disable-chunked-prefix-cache": args.disable_chunked_prefix_cache,
    }
    for flag in (flag for flag, given in flags.items() if given and server.device.on_gpu):
        if fp8:
            yield Finding(f"{flag} with FP8", f"{flag} does not go with --kv-cache-dtype fp8_e4m3: remove one of them.")
        elif leaves_graphs:
            yield Finding(
                flag,
                f"{flag} does not go with prefill in CUDA graphs, whose larger passes leave them: remove it, or add "
                "--disable-prefill-cuda-graph.",
            )


def fp8_cache(server: Server) -> Iterator[Finding]:
    """Refuse what would read the FP8 pool as if it were SGLang's, or has no part in it."""
    args, gpu = server.args, server.device.on_gpu
    if not server.prefill.is_ours:
        yield Finding(
            "prefill backend",
            f"prefill runs {server.prefill.backend}, which cannot read --kv-cache-dtype fp8_e4m3 as {BACKEND_NAME} "
            f"stores it: use {BACKEND_NAME} for prefill too, or remove --kv-cache-dtype.",
        )
    captured = gpu and server.prefill.graphs != "disabled"
    if captured and not (installed.shares_in_prefill_graphs and server.prefill.is_ours):
        yield Finding(
            "prefill graphs with FP8",
            "--kv-cache-dtype fp8_e4m3 needs prefill without CUDA graphs: remove what sets "
            "--cuda-graph-backend-prefill.",
        )
    flags = {
        # Each token has a scale of its own.
        "--quantization-param-path": args.quantization_param_path is not None,
        # What is stored has the names that SGLang's own rows have, which are of another length.
        "--hicache-storage-backend": args.hicache_storage_backend is not None,
        # Only decode servers with our rows take it, and these have no drafts.
        "--speculative-algorithm of a prefill server": args.disaggregation_mode == "prefill"
        and args.speculative_algorithm is not None,
        # And no layers with linear attention (models.beside_linear_layers).
        "--disaggregation-mode of a model with linear attention": args.disaggregation_mode != "null"
        and installed.linear_layers(args) is not None,
    }
    for flag, given in flags.items():
        if given:
            text = f"{flag} does not go with --kv-cache-dtype fp8_e4m3: remove one of them."
            yield Finding(f"{flag} with FP8", text)

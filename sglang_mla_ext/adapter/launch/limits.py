"""Check a launch for what `hybrid_mla` does not support yet, and set defaults. Each finding tells what to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.compat.findings import Finding, unsupported
from sglang_mla_ext.adapter.launch import feature_findings, models
from sglang_mla_ext.adapter.launch.remedies import with_remedies
from sglang_mla_ext.adapter.launch.resolved import ResolvedArgs, on_gpu, resolved
from sglang_mla_ext.adapter.server import Server
from sglang_mla_ext.kernels.sizes import PAGE_TOKENS
from sglang_mla_ext.options import HybridMLAOptions, OptionError

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

PREFILL = ("fa3", "fa4", "flashinfer", "flashmla", "triton")
"""SGLang's backends that prefill MLA on a Hopper GPU, in pages as long as FlashMLA's."""

FLOAT16 = Finding(
    "float16", "the model runs in float16, which hybrid_mla's kernels do not support: use --dtype bfloat16."
)

PREFILL_VARIABLE = "SGLANG_MAX_KV_CHUNK_CAPACITY"
"""Variable that sets of how many tokens of cached prompts SGLang makes keys and values at a time."""

PREFILL_SHARE = 0.75
"""Share of the memory left by weights and cache that these keys and values may take; the rest is for CUDA graphs and
activations."""


class Refusal(OptionError):
    """A launch that cannot work, with what was found."""

    def __init__(self, text: str, findings: list[Finding]) -> None:
        super().__init__(text)
        self.findings = with_remedies(findings)


def is_asked_for(server_args: ServerArgs) -> bool:
    """Return whether the arguments name our backend, for any phase."""
    return BACKEND_NAME in installed.attention_backends(server_args)


def set_defaults(server_args: ServerArgs) -> None:
    """Set what a GPU server needs, where the user did not: FlashMLA's page size, prefill without CUDA graphs, and
    drafts verified by the decode backend. SGLang has not decided on the arguments yet.

    Raises:
        Refusal: the user chose another, or what SGLang would refuse without saying what to change.
    """
    _refuse([*feature_findings.draft_tree(server_args), *feature_findings.deterministic(server_args)])
    if not on_gpu(server_args):
        return
    if server_args.page_size not in (None, PAGE_TOKENS):
        text = f"{BACKEND_NAME} needs --page-size {PAGE_TOKENS}, not {server_args.page_size}; remove the flag."
        raise Refusal(text, [Finding("--page-size", text)])
    server_args.page_size = PAGE_TOKENS
    # What other releases capture, and other backends, does not share, and cannot read an FP8 cache.
    if not installed.shares_in_prefill_graphs or installed.attention_backends(server_args)[0] != BACKEND_NAME:
        server_args.disable_prefill_cuda_graph = True
    if server_args.speculative_algorithm is not None and installed.attention_backends(server_args)[0] != BACKEND_NAME:
        server_args.speculative_attention_mode = "decode"


def set_draft_backend(server_args: ServerArgs) -> None:
    """Set the draft model's attention backend, where the user did not: a draft has nothing to share, and SGLang has no
    backend of our name for drafts. SGLang has decided on the arguments."""
    args = resolved(server_args)
    if args.speculative_algorithm in feature_findings.ALGORITHMS and not args.speculative_draft_attention_backend:
        mla, fp8 = installed.draft_has_mla(server_args), args.kv_cache_dtype == "fp8_e4m3"
        installed.set_draft_backend(server_args, draft_backend(args, mla=mla, fp8=fp8))


def draft_backend(args: ServerArgs | ResolvedArgs, *, mla: bool, fp8: bool) -> str:
    """SGLang's attention backend for a draft model with or without Multi-head Latent Attention.

    Args:
        fp8: whether the cache is in FP8.
    """
    if not on_gpu(args):
        return "torch_native"
    return installed.mla_draft_backend(fp8) if mla else "flashinfer"


def check(server: Server) -> None:
    """Stop a launch that could not work.

    Raises:
        Refusal: with every reason.
    """
    _refuse([*_findings(server), *_budget_findings(server)])


def check_dp_routing(server_args: ServerArgs) -> None:
    """Stop a launch whose requests do not all pass through the process that chooses their rank, or whose ranks follow
    from something else.

    Raises:
        Refusal: it is such a launch.
    """
    args, code = resolved(server_args), "--hybrid-mla-dp-routing"
    found = []
    if args.tokenizer_worker_num > 1:
        found.append(Finding(code, f"{code} prefix needs --tokenizer-worker-num 1: remove one."))
    if names_ranks_by_rooms(args):
        # CommonKVSender, sglang/srt/disaggregation/common/conn.py, ends requests that come to another rank.
        text = f"{code} prefix on a prefill server needs --load-balance-method round_robin: add it, or remove the flag."
        found.append(Finding(code, text))
    _refuse(found)


def names_ranks_by_rooms(args: ServerArgs | ResolvedArgs) -> bool:
    """Return whether the rank of a request follows from its bootstrap room, as by default on a prefill server."""
    method = args.load_balance_method
    return args.disaggregation_mode == "prefill" and method in ("auto", "follow_bootstrap_room")


def check_dtypes(server_args: ServerArgs, dtype: torch.dtype, *, fp8_cache: bool) -> None:
    """Stop a launch that could not work in float16 or with an FP8 cache: for where `--dtype auto` or `--kv-cache-dtype
    auto` has become that, which SGLang finds out only when it reads the checkpoint.

    Raises:
        Refusal: with every reason.
    """
    server = Server.of(server_args, HybridMLAOptions.from_env())
    found = feature_findings.fp8_cache(server) if fp8_cache else ()
    _refuse([*([FLOAT16] if dtype == torch.float16 else []), *found])


def _refuse(found: list[Finding]) -> None:
    if found:
        reasons = "\n  ".join(each.text for each in found)
        raise Refusal(f"--attention-backend {BACKEND_NAME} cannot run like this:\n  {reasons}", found)


def _findings(server: Server) -> Iterator[Finding]:
    args, gpu, prefill = server.args, server.device.on_gpu, server.prefill.backend
    decode = installed.attention_backends(args)[1]
    if decode != BACKEND_NAME:
        text = f"it is for decode, and decode runs {decode}: set --decode-attention-backend {BACKEND_NAME}."
        yield Finding("decode backend", text)
    if server.device.capability is not None and server.device.capability[0] != 9:
        yield Finding("GPU", "decode uses FlashMLA, which needs a Hopper GPU: choose another --attention-backend here.")
    if gpu and prefill not in (BACKEND_NAME, *PREFILL):
        text = f"prefill runs {prefill}, which is not for MLA on Hopper GPUs: use {BACKEND_NAME} for prefill too."
        yield Finding("prefill backend", text)
    if gpu and server.prefill.graphs == "full":
        yield Finding(
            "full prefill graphs",
            "full CUDA graphs of prefill leave cached prefixes out of attention, with SGLang's own backends as well: "
            'take the prefill backend "full" out of --cuda-graph-config or --cuda-graph-backend-prefill.',
        )
    if gpu and args.cuda_graph_config.decode.backend not in ("full", "disabled"):
        text = f"{args.cuda_graph_config.decode.backend} CUDA graphs of decode are not supported: use full ones"
        yield Finding("decode graphs", f"{text} (--cuda-graph-backend-decode, --cuda-graph-config).")
    yield from models.unknown_parts(server)
    heads, gpus = server.ranks.heads, args.tp_size // server.ranks.dp
    if heads % gpus:
        text = f"the model's {heads} heads do not divide among {gpus} GPUs: choose another --tp-size or --dp-size."
        yield Finding("--tp-size", text)
    yield from models.beside_linear_layers(args)
    if args.dtype in ("half", "float16"):
        yield FLOAT16
    if server.fp8_cache:
        yield from feature_findings.fp8_cache(server)
    elif args.kv_cache_dtype not in ("auto", "bf16", "bfloat16"):
        text = f"--kv-cache-dtype {args.kv_cache_dtype} is not supported: remove it, or use fp8_e4m3."
        yield Finding("--kv-cache-dtype", text)
    yield from feature_findings.prefill_by_keys(server)
    yield from feature_findings.drafts(server)
    yield from feature_findings.host_cache(server)
    further: list[Finding] = installed.further_findings(args)
    if "--disaggregation-mode" not in [each.code for each in further]:
        yield from feature_findings.disaggregation(server)
    reason = "DP attention (--enable-dp-attention)" if server.ranks.dp > 1 else server.mixing.obstacle
    if server.options.mixed_tokens == 0:
        reason = "--hybrid-mla-mixed-tokens 0"
    if args.enable_mixed_chunk and reason is not None:
        text = f"--enable-mixed-chunk does not go with {reason}: remove it."
        yield Finding("--enable-mixed-chunk", text)
    for name in installed.other_trees():
        text = f"{name} is not supported, prefixes are found in SGLang's default radix tree: unset it."
        yield Finding(name, text)
    if args.enable_streaming_session:
        yield Finding(
            "--enable-streaming-session",
            "--enable-streaming-session is not supported: from its second turn on a request of such a session holds no "
            "node of the radix tree, in which shared prefixes are found, but a stand-in (last_device_node in "
            "StreamingSession.try_match_prefix, sglang/srt/session/streaming_session.py): remove it.",
        )
    flags = {
        # A LoRA on kv_b_proj would need expansions of its own, and one on o_proj replaces the module that we merge at.
        "--enable-lora": args.enable_lora,
        "--lora-paths": args.enable_lora is None and bool(args.lora_paths),  # turns it on, later
        "--enable-two-batch-overlap": args.enable_two_batch_overlap,
        "--enable-pdmux": args.enable_pdmux,
        "--dcp-size above 1": args.dcp_size > 1,
        "--pp-size above 1": args.pp_size > 1,
        "--attn-cp-size above 1": args.attn_cp_size > 1,
        # On a decode server SGLang does it by itself.
        "--disable-radix-cache": args.disable_radix_cache and args.disaggregation_mode != "decode",
        "--radix-cache-backend": args.radix_cache_backend is not None,
        "--enable-lmcache": args.enable_lmcache,
        "--enable-flexkv": args.enable_flexkv,
        "--enable-unified-memory": args.enable_unified_memory,
        "--enable-page-major-kv-layout": args.enable_page_major_kv_layout,
        "--dllm-algorithm": args.dllm_algorithm is not None,
        # A Ray actor makes its scheduler without loading plug-ins (SchedulerActor, sglang/srt/ray/scheduler_actor.py).
        "--use-ray": args.use_ray,
        # Its model has no DeepseekV2AttentionMLA.
        "--model-impl transformers": args.model_impl == "transformers",
    }
    yield from unsupported(flags)
    yield from further


def _budget_findings(server: Server) -> Iterator[Finding]:
    """A budget that no model leaves room for."""
    asked, memory_bytes = server.options.prefix_memory_gb, server.device.memory_bytes
    if memory_bytes is None or not asked or not server.args.mem_fraction_static:
        return
    there = memory_bytes * server.args.mem_fraction_static / (1 << 30)
    if asked >= there:
        flag = "--hybrid-mla-prefix-memory-gb"
        yield Finding(
            flag,
            f"{flag} {asked:g} is more than SGLang takes of a GPU for weights and cache together, {there:.0f} GiB of "
            f"{memory_bytes / (1 << 30):.0f} (--mem-fraction-static): lower it, or remove it.",
        )


def warnings(server: Server) -> list[str]:
    """Return warnings of a server that works: what it does without, and what may end it."""
    found = []
    if not server.prefill.is_ours and server.options.may_expand:
        found.append(
            f"prefill runs {server.prefill.backend}, which reads no expanded prefix: prompts are computed over the "
            f"latent cache, as without {BACKEND_NAME}; without --prefill-attention-backend they are computed over what "
            "is expanded."
        )
    said = server.ranks.sharding_warning, _prefill_memory_warning(server)
    return [*found, *filter(None, said)]


def _prefill_memory_warning(server: Server) -> str | None:
    """Return a warning if a prefill pass over long cached prompts would take more memory than SGLang leaves."""
    from sglang.srt.environ import envs

    args, memory_bytes = server.args, server.device.memory_bytes
    if memory_bytes is None or not args.mem_fraction_static:
        return None
    if args.disable_chunked_prefix_cache or args.disaggregation_mode == "decode":
        return None
    if (sizes := server.head_sizes) is None:
        return None
    # Content and values come of one product, and whole keys are a copy, in BF16.
    token_bytes = 2 * sizes.heads * (sizes.nope + sizes.v + sizes.nope + sizes.rope)
    tokens = int(envs.SGLANG_MAX_KV_CHUNK_CAPACITY.get())
    left = memory_bytes * (1 - args.mem_fraction_static)
    if tokens * token_bytes <= PREFILL_SHARE * left:
        return None
    fitting = max(int(PREFILL_SHARE * left / token_bytes), 1)
    return (
        f"prefill makes keys and values of {tokens:,} tokens of cached prompts at a time, "
        f"{tokens * token_bytes / (1 << 30):.1f} GiB with {sizes.heads} heads on a GPU, and --mem-fraction-static "
        f"{args.mem_fraction_static:g} leaves {left / (1 << 30):.1f} GiB for that, CUDA graphs and activations: lower "
        f"the fraction, or set {PREFILL_VARIABLE}={1 << (fitting.bit_length() - 1)}."
    )

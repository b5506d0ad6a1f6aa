"""What `hybrid_mla` cannot do yet, found at launch: each finding says what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.compat.findings import Finding, unsupported
from sglang_mla_ext.adapter.launch import models, passing, prefill_memory, riding, spread
from sglang_mla_ext.adapter.launch.remedies import with_remedies
from sglang_mla_ext.kernels.sizes import PAGE_TOKENS
from sglang_mla_ext.options import HybridMLAOptions, OptionError

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN")
"""Of speculative decoding; the last one is another name for the first, which SGLang's resolved arguments have."""

DRAFT_TOKENS = range(2, 9)
"""Query tokens of a request in a verify step."""

HOST_COPIES = ("kernel", "direct")
"""How SGLang copies rows to the host and back on a GPU. An FP8 cache's rows are whole 16 bytes; of its kernels the
compiled ones want 8, the one that stages pages 16, and the one that wants 128 is not used then."""

HOST_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
"""Of latent rows on the host."""

PREFILL = ("fa3", "fa4", "flashinfer", "flashmla", "triton")
"""SGLang's backends that prefill MLA on a Hopper GPU, in pages as long as FlashMLA's."""

TRANSFERS = ("mooncake", "nixl")
"""SGLang's names of what moves a KV cache from a prefill to a decode server."""

FLOAT16 = Finding(
    "float16", "the model runs in float16, which hybrid_mla's kernels do not support: use --dtype bfloat16."
)


class Refusal(OptionError):
    """A launch that cannot work, with what was found."""

    def __init__(self, text: str, findings: list[Finding]) -> None:
        super().__init__(text)
        self.findings = with_remedies(findings)


def is_asked_for(server_args: ServerArgs) -> bool:
    """Whether the arguments name our backend, for whichever phase."""
    return BACKEND_NAME in installed.attention_backends(server_args)


def set_defaults(server_args: ServerArgs, on_gpu: bool) -> None:
    """Set what a GPU server needs, where the user did not: FlashMLA's page size, prefill without CUDA graphs, and
    drafts verified by the decode backend. `server_args` are not resolved.

    Raises:
        Refusal: the user chose another, or what SGLang would refuse without saying what to change.
    """
    _refuse(_draft_findings(server_args) + _deterministic_findings(server_args))
    if not on_gpu:
        return
    if server_args.page_size not in (None, PAGE_TOKENS):
        text = f"{BACKEND_NAME} needs --page-size {PAGE_TOKENS}, not {server_args.page_size}; remove the flag."
        raise Refusal(text, [Finding("--page-size", text)])
    server_args.page_size = PAGE_TOKENS
    # What other releases capture, and other backends, does not share, and cannot read an FP8 cache.
    if not installed.shares_in_prefill_graphs() or installed.attention_backends(server_args)[0] != BACKEND_NAME:
        installed.disable_prefill_graph(server_args)
    if server_args.speculative_algorithm is not None and installed.attention_backends(server_args)[0] != BACKEND_NAME:
        server_args.speculative_attention_mode = "decode"


def set_draft_backend(server_args: ServerArgs, on_gpu: bool) -> None:
    """Set the draft model's attention backend, where the user did not: a draft has nothing to share, and SGLang has no
    backend of our name for drafts. `server_args` are resolved."""
    args = installed.resolved(server_args)
    if args.speculative_algorithm in ALGORITHMS and not args.speculative_draft_attention_backend:
        fp8 = args.kv_cache_dtype == "fp8_e4m3"
        installed.set_draft_backend(server_args, draft_backend(installed.draft_has_mla(server_args), on_gpu, fp8))


def draft_backend(mla: bool, on_gpu: bool, fp8: bool) -> str:
    """SGLang's attention backend for a draft model with or without Multi-head Latent Attention.

    Args:
        fp8: whether the cache is in FP8.
    """
    if not on_gpu:
        return "torch_native"
    return installed.mla_draft_backend(fp8) if mla else "flashinfer"


def check(server_args: ServerArgs, compute_capability: tuple[int, int] | None, memory_bytes: int | None = None) -> None:
    """Stop a launch that could not work.

    Args:
        server_args: resolved.
        compute_capability: of the GPU; None on a machine without one.
        memory_bytes: that the GPU has.
    Raises:
        Refusal: with every reason.
    """
    args = installed.resolved(server_args)
    _refuse(_findings(args, compute_capability) + _budget_findings(args, memory_bytes))


def check_dtype(dtype: torch.dtype) -> None:
    """Stop a launch in float16: for where `--dtype auto` has become that, which SGLang finds out from the checkpoint.

    Raises:
        Refusal: it is.
    """
    _refuse([FLOAT16] if dtype == torch.float16 else [])


def check_dp_routing(server_args: ServerArgs) -> None:
    """Stop a launch whose requests do not all pass through the process that chooses their rank.

    Raises:
        Refusal: they do not.
    """
    workers = server_args.tokenizer_worker_num
    text = "--hybrid-mla-dp-routing prefix needs --tokenizer-worker-num 1: remove one."
    _refuse([Finding("--hybrid-mla-dp-routing", text)] if workers > 1 else [])


def check_fp8_cache(server_args: ServerArgs, on_gpu: bool) -> None:
    """Stop a launch that could not work with an FP8 cache: for where `--kv-cache-dtype auto` has become one, which
    SGLang finds out only when it reads the checkpoint.

    Raises:
        Refusal: with every reason.
    """
    _refuse(_fp8_cache_findings(installed.resolved(server_args), on_gpu))


def _refuse(found: list[Finding]) -> None:
    if found:
        reasons = "\n  ".join(each.text for each in found)
        raise Refusal(f"--attention-backend {BACKEND_NAME} cannot run like this:\n  {reasons}", found)


def _findings(args: ServerArgs, compute_capability: tuple[int, int] | None) -> list[Finding]:
    found = []
    on_gpu = compute_capability is not None
    prefill, decode = installed.attention_backends(args)
    if decode != BACKEND_NAME:
        text = f"it is for decode, and decode runs {decode}: set --decode-attention-backend {BACKEND_NAME}."
        found.append(Finding("decode backend", text))
    if compute_capability is not None and compute_capability[0] != 9:
        text = "decode uses FlashMLA, which needs a Hopper GPU: choose another --attention-backend here."
        found.append(Finding("GPU", text))
    if on_gpu and prefill not in (BACKEND_NAME, *PREFILL):
        text = f"prefill runs {prefill}, which is not for MLA on Hopper GPUs: use {BACKEND_NAME} for prefill too."
        found.append(Finding("prefill backend", text))
    if on_gpu and installed.prefill_graph_backend(args) == "full":
        text = (
            "full CUDA graphs of prefill leave cached prefixes out of attention, with SGLang's own backends as well: "
            'take the prefill backend "full" out of --cuda-graph-config or --cuda-graph-backend-prefill.'
        )
        found.append(Finding("full prefill graphs", text))
    found += models.findings(args, on_gpu) + models.beside_linear_layers(args)
    if args.dtype in ("half", "float16"):
        found.append(FLOAT16)
    if args.kv_cache_dtype == "fp8_e4m3":
        found += _fp8_cache_findings(args, on_gpu)
    elif args.kv_cache_dtype not in ("auto", "bf16", "bfloat16"):
        text = f"--kv-cache-dtype {args.kv_cache_dtype} is not supported: remove it, or use fp8_e4m3."
        found.append(Finding("--kv-cache-dtype", text))
    if args.speculative_algorithm is not None:
        found += _speculative_findings(args, on_gpu)
    if args.enable_hierarchical_cache:
        found += _host_cache_findings(args, on_gpu)
    further: list[Finding] = installed.further_findings(args)
    if "--disaggregation-mode" not in [each.code for each in further]:
        found += _disaggregation_findings(args)
    reason = riding.mixing_in_the_way(args, on_gpu)
    if HybridMLAOptions.from_env().mixed_tokens == 0:
        reason = "--hybrid-mla-mixed-tokens 0"
    if args.enable_mixed_chunk and reason is not None:
        text = f"--enable-mixed-chunk does not go with {reason}: remove it."
        found.append(Finding("--enable-mixed-chunk", text))
    for name in installed.other_trees():
        found.append(
            Finding(name, f"{name} is not supported, prefixes are found in SGLang's default radix tree: unset it.")
        )
    if args.enable_streaming_session:
        text = (
            "--enable-streaming-session is not supported: from its second turn on a request of such a session holds no "
            "node of the radix tree, in which shared prefixes are found, but a stand-in (last_device_node in "
            "StreamingSession.try_match_prefix, sglang/srt/session/streaming_session.py): remove it."
        )
        found.append(Finding("--enable-streaming-session", text))
    flags = {
        # A LoRA on kv_b_proj would need expansions of its own, and one on o_proj replaces the module that we merge at.
        "--enable-lora": args.enable_lora,
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
    }
    return [*found, *_unsupported(flags), *further]


def _budget_findings(args: ServerArgs, memory_bytes: int | None) -> list[Finding]:
    """A budget that no model leaves room for."""
    flag, asked = "--hybrid-mla-prefix-memory-gb", HybridMLAOptions.from_env().prefix_memory_gb
    if memory_bytes is None or not asked or not args.mem_fraction_static:
        return []
    there = memory_bytes * args.mem_fraction_static / (1 << 30)
    if asked < there:
        return []
    text = (
        f"{flag} {asked:g} is more than SGLang takes of a GPU for weights and cache together, {there:.0f} GiB of "
        f"{memory_bytes / (1 << 30):.0f} (--mem-fraction-static): lower it, or remove it."
    )
    return [Finding(flag, text)]


def warnings(args: ServerArgs, on_gpu: bool, memory_bytes: int | None = None) -> list[str]:
    """What a server does without, though it runs, and what may end it. `args` are resolved, of a launch that works;
    `memory_bytes` are the GPU's."""
    found = []
    prefill, _ = installed.attention_backends(args)
    if prefill != BACKEND_NAME and HybridMLAOptions.from_env().may_expand:
        found.append(
            f"prefill runs {prefill}, which reads no expanded prefix: prompts are computed over the latent cache, as "
            f"without {BACKEND_NAME}; without --prefill-attention-backend they are computed over what is expanded."
        )
    if (vain := spread.warning(args, HybridMLAOptions.from_env(), on_gpu)) is not None:
        found.append(vain)
    if (short := prefill_memory.warning(args, memory_bytes)) is not None:
        found.append(short)
    return found


def _unsupported(flags: dict[str, bool]) -> list[Finding]:
    return [each for flag, given in flags.items() for each in unsupported(flag, given)]


def _host_cache_findings(args: ServerArgs, on_gpu: bool) -> list[Finding]:
    """What SGLang would find out when the first rows go to the host. `args` are resolved."""
    copies, layouts = (HOST_COPIES, HOST_LAYOUTS) if on_gpu else (("direct",), ("layer_first", "page_first_direct"))
    given = {
        "--hicache-io-backend": (args.hicache_io_backend, copies),
        "--hicache-mem-layout": (args.hicache_mem_layout, layouts),
    }
    where = "here" if on_gpu else "on a CPU"
    return [
        Finding(flag, f"{flag} {value} is not supported {where}: use {' or '.join(allowed)}.")
        for flag, (value, allowed) in given.items()
        if value not in allowed
    ]


def _speculative_findings(args: ServerArgs, on_gpu: bool) -> list[Finding]:
    """What would verify something else than one chain of drafts of a length that never changes. `args` are resolved."""
    if found := _draft_findings(args):
        return found
    if args.speculative_num_draft_tokens not in DRAFT_TOKENS:
        few, many = DRAFT_TOKENS[0], DRAFT_TOKENS[-1]
        text = (
            f"--speculative-num-draft-tokens {args.speculative_num_draft_tokens} is not supported: use {few} to "
            f"{many}, and --speculative-num-steps {few - 1} to {many - 1}, one less."
        )
        found.append(Finding("--speculative-num-draft-tokens", text))
    if args.speculative_draft_attention_backend == BACKEND_NAME:
        flag = "--speculative-draft-attention-backend"
        text = f"{flag} {BACKEND_NAME} is not supported, drafts share nothing: remove it."
        found.append(Finding(flag, text))
    if installed.plans_on_a_stream():
        name = "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"
        found.append(Finding(name, f"{name} is not supported, as it is not by flashmla: unset it."))
    flags = {
        "--speculative-adaptive": args.speculative_adaptive,
        "--enable-multi-layer-eagle": args.enable_multi_layer_eagle,
        "--decoupled-spec-role": args.decoupled_spec_role != "null",
    }
    return found + _unsupported(flags)


def _disaggregation_findings(args: ServerArgs) -> list[Finding]:
    """What a prefill or a decode server lacks to share prefixes, or was not tried with. `args` are resolved."""
    if args.disaggregation_mode == "null":
        return []
    found, flag, backend = [], "--disaggregation-transfer-backend", args.disaggregation_transfer_backend
    if backend not in TRANSFERS:
        found.append(Finding(flag, f"{flag} {backend} is not supported yet: use {' or '.join(TRANSFERS)}."))
    prefill, _ = installed.attention_backends(args)
    if args.disaggregation_mode == "prefill":
        if prefill != BACKEND_NAME:
            text = (
                f"prefill runs {prefill}, and this server does nothing else (--disaggregation-mode prefill): use "
                f"{BACKEND_NAME} for prefill too."
            )
            found.append(Finding("prefill backend", text))
        return found
    if args.speculative_algorithm is not None:
        text = (
            "--disaggregation-mode decode does not go with --speculative-algorithm: SGLang's decode servers have no "
            "radix tree beside drafts, and shared prefixes are found there. Choose another --attention-backend for "
            "them."
        )
        found.append(Finding("drafts on a decode server", text))
    elif not args.disaggregation_decode_enable_radix_cache:
        text = (
            "--disaggregation-mode decode has no radix tree to find shared prefixes in: add "
            "--disaggregation-decode-enable-radix-cache."
        )
        found.append(Finding("no radix tree", text))
    if args.enable_hierarchical_cache:
        text = "--enable-hierarchical-cache does not go with --disaggregation-mode decode yet: remove it."
        found.append(Finding("host cache on a decode server", text))
    return found


def _draft_findings(args: ServerArgs) -> list[Finding]:
    """Whether drafts come in one chain. `args` may be resolved or not."""
    if found := way_of_drafting(args.speculative_algorithm):
        return found
    flag, branches = "--speculative-eagle-topk", args.speculative_eagle_topk
    if args.speculative_algorithm is None or branches in (None, 1):
        return []
    return [Finding(flag, f"{flag} {branches} is not supported: use 1.")]


def way_of_drafting(algorithm: str | None) -> list[Finding]:
    """Why a server does not draft in this way, whatever its models are."""
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


def _deterministic_findings(args: ServerArgs) -> list[Finding]:
    """`args` are not resolved. SGLang would only name the backends that it has for this."""
    flags = {
        "--enable-deterministic-inference": args.enable_deterministic_inference,
        "--rl-on-policy-target": args.rl_on_policy_target is not None,
    }
    why = "how a prefix is attended to depends on the batch: choose another --attention-backend."
    return [Finding(flag, f"{flag} is not supported, {why}") for flag, given in flags.items() if given]


def _fp8_cache_findings(args: ServerArgs, on_gpu: bool) -> list[Finding]:
    """What would read the FP8 pool as if it were SGLang's, or has no part in it."""
    prefill, _ = installed.attention_backends(args)
    found = []
    if prefill != BACKEND_NAME:
        text = (
            f"prefill runs {prefill}, which cannot read --kv-cache-dtype fp8_e4m3 as {BACKEND_NAME} stores it: use "
            f"{BACKEND_NAME} for prefill too, or remove --kv-cache-dtype."
        )
        found.append(Finding("prefill backend", text))
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
    if on_gpu:
        # These make SGLang's prefill attend to the pool itself, by absorb, where otherwise it asks for rows by their
        # slots.
        flags |= {
            "--flashinfer-mla-disable-ragged": args.flashinfer_mla_disable_ragged,
            "--disable-chunked-prefix-cache": args.disable_chunked_prefix_cache,
        }
        graphs = installed.prefill_graph_backend(args) != "disabled"
        if graphs and not (installed.shares_in_prefill_graphs() and passing.is_ours(args)):
            text = (
                "--kv-cache-dtype fp8_e4m3 needs prefill without CUDA graphs: remove what sets "
                "--cuda-graph-backend-prefill."
            )
            found.append(Finding("prefill graphs with FP8", text))
    return found + [
        Finding(f"{flag} with FP8", f"{flag} does not go with --kv-cache-dtype fp8_e4m3: remove one of them.")
        for flag, given in flags.items()
        if given
    ]

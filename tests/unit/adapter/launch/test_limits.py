"""What is not supported stops the launch, and its message says what to change."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_mla_ext.adapter.compat import contract, sglang_0_5_23
from sglang_mla_ext.adapter.launch import limits
from sglang_mla_ext.adapter.server import Server
from sglang_mla_ext.options import HybridMLAOptions, OptionError

HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (10, 0)


def graphs(prefill: str, decode: str = "full") -> Any:
    """SGLang's settings of CUDA graphs, as far as they are looked at."""
    return SimpleNamespace(prefill=SimpleNamespace(backend=prefill, bs=None), decode=SimpleNamespace(backend=decode))


DEEPSEEK = {
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
EAGLE: dict[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "speculative_draft_attention_backend": "flashmla",
}
DECODE_ROLE: dict[str, Any] = {"disaggregation_mode": "decode", "disaggregation_decode_enable_radix_cache": True}
FP8_CACHE: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "cuda_graph_config": graphs("disabled")}
ABSORB = {"SGLANG_HYBRID_MLA_MODE": "absorb"}
HOST_CACHE: dict[str, Any] = {
    "enable_hierarchical_cache": True,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
}
"""On any device."""
NEW_FLAGS = [
    f"enable_{flag}"
    for flag in (
        "unified_cache_external_linker",
        "layernorm_sp",
        "kv_cache_sharding",
        "nvidia_megakernel",
        "pd_role_switch",
    )
]


def server_args(
    backends: tuple[str, str] = ("hybrid_mla", "hybrid_mla"),
    mla: bool = True,
    architecture: str = "DeepseekV3ForCausalLM",
    index_topk: int | None = None,
    rotation: bool = True,
    dims: Mapping[str, int] = DEEPSEEK,
    linear: Any = None,
    **changes: Any,
) -> Any:
    """Resolved arguments of a launch that works, with changes."""
    from sglang.srt.configs.model_config import AttentionArch

    config = SimpleNamespace(
        architectures=[architecture],
        index_topk=index_topk,
        rope_parameters={"rope_theta": 1e4} if rotation else None,
        **dims,
    )
    config.get_text_config = lambda: config
    arch = AttentionArch.MLA if mla else AttentionArch.MHA
    model = SimpleNamespace(hf_config=config, linear_attn_registry_result=linear, attention_arch=arch)
    values = {
        # By a method in older releases, by fields in newer ones.
        "get_attention_backends": lambda: backends,
        **{
            "prefill_attention_backend": backends[0],
            "decode_attention_backend": backends[1],
            "attention_backend": None,
        },
        "use_mla_backend": lambda: mla,
        **{"get_model_config": lambda: model, "_model_config": model},
        "device": "cuda",
        "page_size": None,
        "dtype": "auto",
        "kv_cache_dtype": "auto",
        "quantization_param_path": None,
        "flashinfer_mla_disable_ragged": False,
        "disable_chunked_prefix_cache": False,
        "cuda_graph_config": graphs("breakable"),
        "disable_prefill_cuda_graph": False,
        "tp_size": 8,
        "nnodes": 1,
        "elastic_ep_backend": None,
        "moe_dense_tp_size": None,
        "enable_dp_lm_head": False,
        "dp_size": 1,
        "enable_dp_attention": False,
        "attn_dp_size": 1,
        "enable_lora": False,
        "lora_paths": None,
        "load_balance_method": "auto",
        "tokenizer_worker_num": 1,
        "chunked_prefill_size": 8192,
        "prefill_decode_interval": None,
        "speculative_algorithm": None,
        "speculative_eagle_topk": None,
        "speculative_num_draft_tokens": None,
        "speculative_draft_attention_backend": None,
        "speculative_attention_mode": "prefill",
        "speculative_adaptive": False,
        "enable_multi_layer_eagle": False,
        "decoupled_spec_role": "null",
        "enable_two_batch_overlap": False,
        "enable_pdmux": False,
        "use_ray": False,
        "model_impl": "auto",
        "enable_mixed_chunk": False,
        "disable_cuda_graph_padding": False,
        "moe_a2a_backend": "none",
        "enable_return_routed_experts": False,
        "dcp_size": 1,
        "pp_size": 1,
        "attn_cp_size": 1,
        "disable_radix_cache": False,
        "radix_cache_backend": None,
        "enable_hierarchical_cache": False,
        "hicache_io_backend": "kernel",
        "hicache_mem_layout": "page_first",
        "hicache_storage_backend": None,
        "enable_lmcache": False,
        "enable_flexkv": False,
        "enable_streaming_session": False,
        "enable_unified_memory": False,
        "enable_page_major_kv_layout": False,
        "disaggregation_mode": "null",
        "disaggregation_transfer_backend": "mooncake",
        "disaggregation_decode_enable_radix_cache": False,
        "dllm_algorithm": None,
        "mem_fraction_static": None,
        "enable_memory_saver": False,
        "enable_deterministic_inference": False,
        "rl_on_policy_target": None,
        # New in newer releases.
        **dict.fromkeys(NEW_FLAGS, False),
        "disaggregation_decode_retraction_backup": None,
    }
    assert set(changes) <= set(values)
    return SimpleNamespace(**{**values, **changes})


def on(gpu: bool, args: Any) -> Any:
    """The same arguments on a device."""
    return SimpleNamespace(**{**vars(args), "device": "cuda" if gpu else "cpu"})


def server(args: Any, on_gpu: bool = True, memory_bytes: int | None = None, **options: Any) -> Server:
    """With the options of the environment, or these, and a GPU of this size."""
    made = Server.of(on(on_gpu, args), HybridMLAOptions(**options) if options else HybridMLAOptions.from_env())
    vars(made.device).update(memory_bytes=memory_bytes, capability=HOPPER if on_gpu else None)
    return made


def check(args: Any, compute_capability: tuple[int, int] | None) -> None:
    made = server(args, compute_capability is not None)
    vars(made.device)["capability"] = compute_capability
    limits.check(made)


def message(args: Any, compute_capability: tuple[int, int] | None = HOPPER) -> str:
    with pytest.raises(OptionError) as error:
        check(args, compute_capability)
    return str(error.value)


@pytest.mark.usefixtures("any_release")
@pytest.mark.parametrize("compute_capability", [HOPPER, None], ids=["hopper", "cpu"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"backends": ("flashmla", "hybrid_mla")},
        {"kv_cache_dtype": "bf16"},
        {"kv_cache_dtype": "bfloat16"},
        {"dtype": "bfloat16"},
        {"architecture": "LongcatFlashForCausalLM"},
        {"rotation": False},
        HOST_CACHE,
        HOST_CACHE | FP8_CACHE,
        HOST_CACHE | {"hicache_storage_backend": "hf3fs"},
        {"disaggregation_mode": "prefill"},
        HOST_CACHE | {"disaggregation_mode": "prefill"},
        {**FP8_CACHE, "disaggregation_mode": "prefill", "disaggregation_transfer_backend": "nixl"},
        DECODE_ROLE,
        {**FP8_CACHE, **DECODE_ROLE},
        {
            "flashinfer_mla_disable_ragged": True,
            "disable_chunked_prefix_cache": True,
            "cuda_graph_config": graphs("disabled"),
        },
        FP8_CACHE,
        {"enable_mixed_chunk": True},
    ],
    ids=str,
)
def test_what_works_is_let_through(changes: dict[str, Any], compute_capability: tuple[int, int] | None) -> None:
    check(server_args(**changes), compute_capability)


def test_mixing_that_is_turned_off_and_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_MLA_MIXED_TOKENS", "0")
    with pytest.raises(limits.Refusal, match="--enable-mixed-chunk does not go with --hybrid-mla-mixed-tokens 0"):
        check(server_args(enable_mixed_chunk=True), HOPPER)
    check(server_args(), HOPPER)


@pytest.mark.usefixtures("any_release")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"speculative_algorithm": "EAGLE3", "speculative_draft_attention_backend": "flashinfer"},
        {"speculative_num_draft_tokens": 2},
        {"speculative_num_draft_tokens": 8},
        {"disaggregation_mode": "prefill"},
        {"backends": ("flashinfer", "hybrid_mla"), "speculative_attention_mode": "decode"},
        FP8_CACHE,
        HOST_CACHE,
        HOST_CACHE | FP8_CACHE,
    ],
    ids=str,
)
def test_chains_of_drafts_are_let_through(changes: dict[str, Any]) -> None:
    check(server_args(**{**EAGLE, **changes}), HOPPER)


@pytest.mark.usefixtures("any_release")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"dtype": "float16"},
            "the model runs in float16, which hybrid_mla's kernels do not support: use --dtype bfloat16.",
        ),
        (
            {"dtype": "half"},
            "the model runs in float16, which hybrid_mla's kernels do not support: use --dtype bfloat16.",
        ),
        (
            {"speculative_algorithm": "NGRAM", "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 12},
            "--speculative-algorithm NGRAM is not supported: use EAGLE, EAGLE3 or NEXTN, with --speculative-eagle-topk",
        ),
        ({"speculative_algorithm": "STANDALONE"}, "--speculative-algorithm STANDALONE is not supported: use EAGLE, EA"),
        ({"speculative_algorithm": "DSPARK"}, "DSPARK is not supported: it was never run here, and but for SGLANG_RAG"),
        ({"speculative_algorithm": "DFLASH"}, "--speculative-algorithm DFLASH is not supported: use EAGLE, EAGLE3 or"),
        ({"speculative_algorithm": "FROZEN_KV_MTP"}, "--speculative-algorithm FROZEN_KV_MTP is not supported: use EAG"),
        ({**EAGLE, "speculative_eagle_topk": 4}, "--speculative-eagle-topk 4 is not supported: use 1."),
        (
            {**EAGLE, "speculative_num_draft_tokens": 9},
            "--speculative-num-draft-tokens 9 is not supported: use 2 to 8, and --speculative-num-steps 1 to 7, one le",
        ),
        ({**EAGLE, "speculative_num_draft_tokens": 1}, "--speculative-num-draft-tokens 1 is not supported: use 2 to 8"),
        ({**EAGLE, "speculative_adaptive": True}, "--speculative-adaptive is not supported yet: remove it."),
        ({**EAGLE, "enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle is not supported yet: remove it."),
        ({**EAGLE, "decoupled_spec_role": "verifier"}, "--decoupled-spec-role is not supported yet: remove it."),
        (
            {**EAGLE, "speculative_draft_attention_backend": "hybrid_mla"},
            "--speculative-draft-attention-backend hybrid_mla is not supported, drafts share nothing: remove it.",
        ),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap is not supported yet: remove it."),
        ({"enable_pdmux": True}, "--enable-pdmux is not supported yet: remove it."),
        *(
            ({"enable_mixed_chunk": True, **given}, f"--enable-mixed-chunk does not go with {what}: remove it.")
            for given, what in (
                *([(EAGLE, "drafts (--speculative-algorithm)")] if contract.line() == "0.5.17" else []),
                ({"enable_dp_attention": True, "dp_size": 8}, "DP attention (--enable-dp-attention)"),
                ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
                ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend"),
                ({"cuda_graph_config": graphs("breakable", decode="disabled")}, "decode without CUDA graphs"),
                ({"disable_cuda_graph_padding": True}, "--disable-cuda-graph-padding"),
            )
        ),
        ({"dcp_size": 2}, "--dcp-size above 1 is not supported yet: remove it."),
        ({"pp_size": 2}, "--pp-size above 1 is not supported yet: remove it."),
        ({"attn_cp_size": 2}, "--attn-cp-size above 1 is not supported yet: remove it."),
        ({"disable_radix_cache": True}, "--disable-radix-cache is not supported yet: remove it."),
        ({"radix_cache_backend": "x"}, "--radix-cache-backend is not supported yet: remove it."),
        (
            {"enable_hierarchical_cache": True, "hicache_mem_layout": "page_head"},
            "--hicache-mem-layout page_head is not supported here: use layer_first or page_first or page_first_direct.",
        ),
        (
            {"enable_hierarchical_cache": True, "hicache_io_backend": "kernel_ascend"},
            "--hicache-io-backend kernel_ascend is not supported here: use kernel or direct.",
        ),
        ({"enable_lmcache": True}, "--enable-lmcache is not supported yet: remove it."),
        ({"enable_flexkv": True}, "--enable-flexkv is not supported yet: remove it."),
        (
            {"enable_streaming_session": True},
            "--enable-streaming-session is not supported: from its second turn on a request of such a session holds no",
        ),
        ({"enable_unified_memory": True}, "--enable-unified-memory is not supported yet: remove it."),
        ({"enable_page_major_kv_layout": True}, "--enable-page-major-kv-layout is not supported yet: remove it."),
        (
            {"disaggregation_mode": "decode", "disable_radix_cache": True},
            "--disaggregation-mode decode has no radix tree to find shared prefixes in: add --disaggregation-decode-en",
        ),
        (
            {**EAGLE, "disaggregation_mode": "decode", "disable_radix_cache": True},
            "--disaggregation-mode decode does not go with --speculative-algorithm yet: choose another ",
        ),
        (
            {**DECODE_ROLE, "enable_hierarchical_cache": True},
            "--enable-hierarchical-cache does not go with --disaggregation-mode decode yet: remove it.",
        ),
        (
            {**DECODE_ROLE, "disaggregation_transfer_backend": "mori"},
            "--disaggregation-transfer-backend mori is not supported yet: use mooncake or nixl.",
        ),
        (
            {"disaggregation_mode": "prefill", "backends": ("fa3", "hybrid_mla")},
            "prefill runs fa3, and this server does nothing else (--disaggregation-mode prefill): use hybrid_mla for p",
        ),
        (
            {**FP8_CACHE, **EAGLE, "disaggregation_mode": "prefill"},
            "--speculative-algorithm of a prefill server does not go with --kv-cache-dtype fp8_e4m3: remove one of the",
        ),
        (
            {"disaggregation_mode": "prefill", "disable_radix_cache": True},
            "--disable-radix-cache is not supported yet: remove it.",
        ),
        ({"dllm_algorithm": "x"}, "--dllm-algorithm is not supported yet: remove it."),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2 is not supported: remove it, or use fp8_e4m3."),
        ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4 is not supported: remove it, or use fp8_e4m3."),
        (
            {**FP8_CACHE, "backends": ("flashmla", "hybrid_mla")},
            "prefill runs flashmla, which cannot read --kv-cache-dtype fp8_e4m3 as hybrid_mla stores it: use hybrid",
        ),
        ({**FP8_CACHE, "quantization_param_path": "x"}, "--quantization-param-path does not go with --kv-cache-dtype"),
        ({**FP8_CACHE, "flashinfer_mla_disable_ragged": True}, "--flashinfer-mla-disable-ragged does not go with"),
        ({"cuda_graph_config": graphs("full")}, "full CUDA graphs of prefill leave cached prefixes out of attention"),
        (
            {"cuda_graph_config": graphs("breakable", decode="breakable")},
            "breakable CUDA graphs of decode are not supported: use full ones",
        ),
        ({"disable_chunked_prefix_cache": True}, "--disable-chunked-prefix-cache does not go with prefill in CUDA gra"),
        ({"flashinfer_mla_disable_ragged": True}, "--flashinfer-mla-disable-ragged does not go with prefill in CUDA g"),
        ({**FP8_CACHE, "disable_chunked_prefix_cache": True}, "--disable-chunked-prefix-cache does not go with"),
        (
            {**FP8_CACHE, **HOST_CACHE, "hicache_storage_backend": "file"},
            "--hicache-storage-backend does not go with --kv-cache-dtype fp8_e4m3: remove one of them.",
        ),
        ({"enable_lora": True}, "--enable-lora is not supported yet: remove it."),
        ({"enable_lora": None, "lora_paths": ["a=b"]}, "--lora-paths is not supported yet: remove it."),
        ({"use_ray": True}, "--use-ray is not supported yet: remove it."),
        ({"model_impl": "transformers"}, "--model-impl transformers is not supported yet: remove it."),
        ({"tp_size": 3}, "the model's 128 heads do not divide among 3 GPUs: choose another --tp-size or --dp-size."),
        ({"backends": ("hybrid_mla", "flashmla")}, "decode runs flashmla: set --decode-attention-backend hybrid_mla"),
        ({"mla": False}, "Multi-head Latent Attention: choose another --attention-backend"),
        ({"index_topk": 2048}, "Sparse Attention: use --attention-backend dsa"),
        (
            {"architecture": "LongcatFlashForCausalLM", "rotation": False},
            """add --json-model-override-args '{"rope_parameters": {"factor": 1.0}}'.""",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_is_named(changes: dict[str, Any], expected: str) -> None:
    text = message(server_args(**changes))
    assert expected in text
    assert len(text.splitlines()) == 2, "one line to introduce, one for the one reason"


def test_an_fp8_cache_where_prefill_graphs_are_not_shared_in() -> None:
    args = server_args(kv_cache_dtype="fp8_e4m3")
    if limits.installed.shares_in_prefill_graphs:
        check(args, HOPPER)
    else:
        assert "--kv-cache-dtype fp8_e4m3 needs prefill without CUDA graphs: remove what" in message(args)


def test_a_streaming_session_has_no_node_of_the_tree() -> None:
    """As the refusal says of SGLang."""
    from sglang.srt.session.streaming_session import StreamingSession

    assert "last_device_node=slot.virtual_node" in inspect.getsource(StreamingSession.try_match_prefix)


def test_speculation_that_is_planned_on_a_stream_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1")
    assert "SGLANG_ENABLE_OVERLAP_PLAN_STREAM is not supported, as it is" in message(server_args(**EAGLE))
    check(server_args(), HOPPER)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("copies", ["kernel", "direct"])
def test_ways_to_the_host(copies: str, layout: str) -> None:
    """On a GPU all but those of other accelerators; on a CPU those that there is a stand-in for."""
    args = server_args(**HOST_CACHE | {"hicache_io_backend": copies, "hicache_mem_layout": layout})
    check(args, HOPPER)
    if copies == "direct" and layout != "page_first":
        check(args, None)
    else:
        assert "is not supported on a CPU: use " in message(args, None)


@pytest.mark.parametrize("variable", ["SGLANG_ENABLE_UNIFIED_RADIX_TREE", "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"])
def test_a_tree_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    if contract.line() != "0.5.17":  # has neither of these trees
        return check(server_args(), HOPPER)
    assert f"{variable} is not supported, prefixes are found in SGLang's default radix tree: unset it." in message(
        server_args()
    )


@pytest.mark.parametrize(
    ("algorithm", "given", "mla", "becomes", "on_a_cpu"),
    [
        ("EAGLE", None, True, "flashmla", "torch_native"),
        ("EAGLE3", None, True, "flashmla", "torch_native"),
        ("EAGLE3", None, False, "flashinfer", "torch_native"),
        ("EAGLE3", "fa3", False, "fa3", "fa3"),
        ("NGRAM", None, True, None, None),
        (None, None, True, None, None),
    ],
)
def test_the_draft_models_backend(
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str | None,
    given: str | None,
    mla: bool,
    becomes: str | None,
    on_a_cpu: str | None,
) -> None:
    monkeypatch.setattr(limits.installed, "draft_has_mla", lambda args: mla)
    if becomes == "flashmla":
        becomes = limits.installed.mla_draft_backend(fp8=False)
    for on_gpu, expected in ((True, becomes), (False, on_a_cpu)):
        args = on(on_gpu, server_args(speculative_algorithm=algorithm, speculative_draft_attention_backend=given))
        args.override = lambda source, args=args, **fields: vars(args).update(fields)
        limits.set_draft_backend(args)
        assert limits.installed.resolved(args).speculative_draft_attention_backend == expected


@pytest.mark.parametrize(
    ("prefill", "algorithm", "mode"),
    [("flashinfer", "EAGLE", "decode"), ("hybrid_mla", "EAGLE", "prefill"), ("flashinfer", None, "prefill")],
)
def test_drafts_are_verified_by_the_decode_backend(prefill: str, algorithm: str | None, mode: str) -> None:
    args = server_args((prefill, "hybrid_mla"), speculative_algorithm=algorithm)
    limits.set_defaults(args)
    assert args.speculative_attention_mode == mode


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"speculative_algorithm": "ngram"}, "--speculative-algorithm ngram is not supported: use EAGLE, EAGLE3 or NE"),
        ({"speculative_algorithm": "nextn", "speculative_eagle_topk": 4}, "--speculative-eagle-topk 4 is not supporte"),
    ],
    ids=str,
)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_drafts_that_sglang_would_refuse_without_advice(changes: dict[str, Any], expected: str, on_gpu: bool) -> None:
    """As it refuses trees of drafts over pages of 64."""
    with pytest.raises(OptionError) as error:
        limits.set_defaults(on(on_gpu, server_args(**changes)))
    assert expected in str(error.value)
    limits.set_defaults(on(on_gpu, server_args(speculative_algorithm="nextn")))


def test_an_fp8_cache_that_the_checkpoint_asks_for_is_checked_too() -> None:
    """`auto` passes at launch: SGLang has not read the checkpoint then."""
    args = server_args(backends=("flashmla", "hybrid_mla"), cuda_graph_config=graphs("disabled"))
    check(args, HOPPER)
    with pytest.raises(OptionError, match="prefill runs flashmla"):
        limits.check_dtypes(args, torch.bfloat16, fp8_cache=True)
    limits.check_dtypes(server_args(cuda_graph_config=graphs("disabled")), torch.bfloat16, fp8_cache=True)


def test_a_checkpoint_in_float16_is_refused_when_its_dtype_is_known() -> None:
    """`--dtype auto` passes at launch, and SGLang finds the dtype in the checkpoint."""
    with pytest.raises(OptionError, match=r"cannot run like this:\n  the model runs in float16.*: use --dtype bf"):
        limits.check_dtypes(server_args(), torch.float16, fp8_cache=False)
    for dtype in (torch.bfloat16, torch.float32):
        limits.check_dtypes(server_args(), dtype, fp8_cache=False)


def test_an_fp8_cache_on_a_cpu_server_has_no_graphs_to_look_at() -> None:
    check(server_args(kv_cache_dtype="fp8_e4m3", disable_chunked_prefix_cache=True), None)


@pytest.mark.parametrize("compute_capability", [AMPERE, BLACKWELL], ids=str)
def test_another_gpu_is_named(compute_capability: tuple[int, int]) -> None:
    assert "needs a Hopper GPU" in message(server_args(), compute_capability)


def test_every_reason_is_given_at_once() -> None:
    text = message(server_args(mla=False, pp_size=2, disable_radix_cache=True), AMPERE)
    assert text.startswith("--attention-backend hybrid_mla cannot run like this:\n")
    assert len(text.splitlines()) == 5


GLUE = "SGLANG_ENABLE_METADATA_GLUE_GRAPH"


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        (HOST_CACHE, []),
        (HOST_CACHE | {"hicache_storage_backend": "file"}, []),
        (HOST_CACHE | FP8_CACHE, []),
        (HOST_CACHE | FP8_CACHE | EAGLE, ["--enable-hierarchical-cache beside drafts over an FP8 cache"]),
        (HOST_CACHE | EAGLE, []),
        (FP8_CACHE | EAGLE, []),
        ({"disaggregation_mode": "prefill"}, []),
        (DECODE_ROLE, []),
    ],
)
def test_what_the_newest_sglang_cannot_do_yet(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], refused: list[str]
) -> None:
    args = server_args(**changes)
    flags = ("unified_cache_external_linker", "layernorm_sp", "kv_cache_sharding", "nvidia_megakernel")
    vars(args).update({f"enable_{flag}": False for flag in (*flags, "pd_role_switch")})
    args.disaggregation_decode_retraction_backup = None
    from sglang.srt.environ import Envs

    for given in (False, True):
        monkeypatch.setattr(Envs, GLUE, SimpleNamespace(get=lambda given=given: given), raising=False)
        found = sglang_0_5_23.Release0523().further_findings(args)
        expected = [*refused, *([GLUE] if given else [])]
        assert [each.text for each in found] == [f"{what} is not supported yet: remove it." for what in expected]


@pytest.mark.parametrize(
    ("backends", "asked"),
    [
        (("hybrid_mla", "hybrid_mla"), True),
        (("flashmla", "hybrid_mla"), True),
        (("hybrid_mla", "flashmla"), True),
        (("flashmla", "flashmla"), False),
        ((None, None), False),
    ],
)
def test_is_asked_for(backends: tuple[str, str], asked: bool) -> None:
    assert limits.is_asked_for(server_args(backends)) is asked


@pytest.mark.parametrize(
    ("given", "on_gpu", "becomes"),
    [(None, True, 64), (64, True, 64), (None, False, None), (1, False, 1)],
)
def test_page_size(given: int | None, on_gpu: bool, becomes: int | None) -> None:
    args = on(on_gpu, server_args(page_size=given))
    limits.set_defaults(args)
    assert args.page_size == becomes


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "auto"])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_prefill_graphs_are_off_where_they_are_not_shared_in(dtype: str, on_gpu: bool) -> None:
    args = on(on_gpu, server_args(kv_cache_dtype=dtype, page_size=None))
    limits.set_defaults(args)
    assert args.disable_prefill_cuda_graph is (on_gpu and not limits.installed.shares_in_prefill_graphs)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"enable_deterministic_inference": True}, "--enable-deterministic-inference"),
        ({"rl_on_policy_target": "fsdp"}, "--rl-on-policy-target"),
    ],
    ids=str,
)
def test_what_sglang_would_refuse_without_our_name(changes: dict[str, Any], flag: str, on_gpu: bool) -> None:
    with pytest.raises(OptionError) as error:
        limits.set_defaults(on(on_gpu, server_args(**changes)))
    assert f"{flag} is not supported, how a prefix is attended to depends on the batch: choose an" in str(error.value)


def test_another_page_size_is_refused_on_a_gpu() -> None:
    with pytest.raises(OptionError, match="needs --page-size 64, not 16; remove the flag"):
        limits.set_defaults(server_args(page_size=16))


@pytest.mark.parametrize(("asked", "found"), [("119", []), ("120", ["--hybrid-mla-prefix-memory-gb"])])
def test_a_budget_larger_than_the_gpu(monkeypatch: pytest.MonkeyPatch, asked: str, found: list[str]) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_MLA_PREFIX_MEMORY_GB", asked)
    args = server_args(mem_fraction_static=0.85)
    assert [each.code for each in limits._budget_findings(server(args, memory_bytes=141 << 30))] == found
    assert list(limits._budget_findings(server(args))) == []


@pytest.mark.parametrize(("prefill", "options", "count"), [("fa3", {}, 1), ("hybrid_mla", {}, 0), ("fa3", ABSORB, 0)])
def test_what_another_prefill_backend_does_without(
    monkeypatch: pytest.MonkeyPatch, prefill: str, options: dict[str, str], count: int
) -> None:
    for name, value in options.items():
        monkeypatch.setenv(name, value)
    assert len(limits.warnings(server(server_args((prefill, "hybrid_mla"))))) == count


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, ""),
        ({"tokenizer_worker_num": 2}, "needs --tokenizer-worker-num 1"),
        ({"disaggregation_mode": "prefill"}, "needs --load-balance-method round_robin"),
        ({"disaggregation_mode": "prefill", "load_balance_method": "follow_bootstrap_room"}, "round_robin"),
        ({"disaggregation_mode": "prefill", "load_balance_method": "round_robin"}, ""),
        ({"disaggregation_mode": "decode"}, ""),
    ],
    ids=str,
)
def test_routing_by_prefix(changes: dict[str, Any], refused: str) -> None:
    """A prefill server of SGLang ends requests that come to another rank than their bootstrap room's."""
    args = server_args(**changes)
    if not refused:
        limits.check_dp_routing(args)
        return
    with pytest.raises(OptionError, match=refused):
        limits.check_dp_routing(args)

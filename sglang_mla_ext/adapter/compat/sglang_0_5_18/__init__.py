"""SGLang 0.5.18: as 0.5.17, but resolved arguments are changed in another way, and drafts' backends have names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.compat.findings import Finding, unsupported
from sglang_mla_ext.adapter.compat.table import Changes, Feature, Read, needed_for, use

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.server_args import ServerArgs

_ARGS = "server_args.ServerArgs"
_HOST_CACHE = "managers.cache_controller.HiCacheController"

CHANGES = Changes(
    uses=(
        *needed_for(
            Feature.DRAFTS, use(f"{_ARGS}._late_resolution", "function", "the draft model's backend", "self source")
        ),
        *needed_for(
            Feature.HOST_CACHE,
            use(f"{_HOST_CACHE}.l2_transfer_engine", "attribute", "copies from the host after the step before"),
            use("mem_cache.l2_transfer.L2TransferEngine.host_to_device_stream", "attribute", "the same"),
        ),
    ),
    gone=(
        f"{_HOST_CACHE}.load_stream",
        f"{_ARGS}.override",
        "speculative.draft_utils.DraftBackendFactory.draft_attn_backend",
        "layers.attention.flashmla_backend.FlashMLAMultiStepDraftBackend",
    ),
    reads=(
        Read(
            "extend_dummy_seqs_capped_by_req_pool",
            "model_executor/runner/flashinfer_autotune.py",
            "how many requests a step to try kernels out may have",
        ),
    ),
)


def further_findings(args: ServerArgs) -> list[Finding]:
    """See sglang_0_5_17. Rows of NEXTN's drafts are meant to be in one pool on the host with the model's, which may be
    of another length, and the tree of 0.5.18 makes a pool without them. Prefill and decode servers were run with 0.5.17
    only."""
    return [*host_cache_with_drafts(args), *roles_of_disaggregation(args)]


def host_cache_with_drafts(args: ServerArgs) -> list[Finding]:
    """That both are asked for."""
    given = args.enable_hierarchical_cache and args.speculative_algorithm is not None
    return unsupported("--enable-hierarchical-cache beside --speculative-algorithm", given)


def roles_of_disaggregation(args: ServerArgs) -> list[Finding]:
    """That this is a prefill or a decode server, which no release after 0.5.17 was tried as."""
    mode = args.disaggregation_mode
    text = f"--disaggregation-mode {mode} is not supported yet: remove it."
    return [Finding("--disaggregation-mode", text)] if mode != "null" else []


def wait_before_loading(controller: HiCacheController, stream: torch.Stream) -> None:
    """See sglang_0_5_17."""
    controller.l2_transfer_engine.host_to_device_stream.wait_stream(stream)


def set_draft_backend(args: ServerArgs, name: str) -> None:
    """Give the draft model another attention backend; `args` are resolved."""
    args._late_resolution(BACKEND_NAME, speculative_draft_attention_backend=name)


def name_draft_backend(backend: Any, factory: Any) -> None:
    """A DraftBackendFactory names what it makes."""

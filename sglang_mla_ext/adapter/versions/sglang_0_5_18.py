"""SGLang 0.5.18: as 0.5.17, but resolved arguments are changed in another way, and drafts' backends have names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_mla_ext import BACKEND_NAME

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def further_findings(args: ServerArgs) -> dict[str, bool]:
    """See sglang_0_5_17. The tree's part on the host was read of that release only, and prefill and decode servers were
    run with that one only."""
    mode = args.disaggregation_mode
    return {
        "--enable-hierarchical-cache": args.enable_hierarchical_cache,
        f"--disaggregation-mode {mode}": mode != "null",
    }


def set_draft_backend(args: ServerArgs, name: str) -> None:
    """Give the draft model another attention backend; `args` are resolved."""
    args._late_resolution(BACKEND_NAME, speculative_draft_attention_backend=name)


def name_draft_backend(backend: Any, factory: Any) -> None:
    """A DraftBackendFactory names what it makes."""

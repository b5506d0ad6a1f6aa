"""Which features a server is asked for, and so what it uses of SGLang: see compat/contract.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_mla_ext.adapter.compat.table import Feature
from sglang_mla_ext.adapter.launch.resolved import ResolvedArgs

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def asked_for(args: ServerArgs | ResolvedArgs, on_gpu: bool) -> frozenset[Feature]:
    """
    Args:
        args: what they lack in another release is told by the contract, which has not been looked at.
    """

    def given(name: str) -> Any:
        return getattr(args, name, None)

    wanted = {
        Feature.BASE: True,
        Feature.GPU: on_gpu,
        Feature.CPU: not on_gpu,
        Feature.DRAFTS: given("speculative_algorithm") is not None,
        Feature.HOST_CACHE: given("enable_hierarchical_cache"),
        Feature.DISAGGREGATION: given("disaggregation_mode") not in (None, "null"),
        Feature.FP8: given("kv_cache_dtype") == "fp8_e4m3",
        Feature.MEMORY_SAVER: given("enable_memory_saver"),
    }
    return frozenset(feature for feature, asked in wanted.items() if asked)

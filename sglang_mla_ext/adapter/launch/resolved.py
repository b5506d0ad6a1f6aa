"""SGLang's arguments: their type after SGLang has decided on them, and the device and features that they ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.compat.table import Feature

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


class ResolvedArgs:
    """`ServerArgs` as SGLang decided on them, with the same names. Only `resolved` makes one: a function that takes it
    reads no value that the user left open."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def resolved(args: ServerArgs | ResolvedArgs) -> ResolvedArgs:
    """Return the resolved arguments of a server whose arguments SGLang has decided on."""
    return cast(ResolvedArgs, installed.resolved(args))


def on_gpu(args: ServerArgs | ResolvedArgs) -> bool:
    """Return whether attention runs on a GPU: on the device that is asked for, or on what is there."""
    return torch.cuda.is_available() if args.device is None else args.device == "cuda"


def asked_for(args: ServerArgs | ResolvedArgs) -> frozenset[Feature]:
    """Return the features that a server is asked for, and so what it uses of SGLang: see compat/contract.py.

    Args:
        args: what they lack in another release is told by the contract, which has not been looked at.
    """

    def given(name: str) -> Any:
        return getattr(args, name, None)

    wanted = {
        Feature.BASE: True,
        Feature.GPU: on_gpu(args),
        Feature.CPU: not on_gpu(args),
        Feature.DRAFTS: given("speculative_algorithm") is not None,
        Feature.HOST_CACHE: given("enable_hierarchical_cache"),
        Feature.DISAGGREGATION: given("disaggregation_mode") not in (None, "null"),
        Feature.FP8: given("kv_cache_dtype") == "fp8_e4m3",
        Feature.MEMORY_SAVER: given("enable_memory_saver"),
    }
    return frozenset(feature for feature, asked in wanted.items() if asked)

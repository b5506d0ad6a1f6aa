"""Stubs for two compiled packages that SGLang imports at start and that have no CPU build on PyPI.

They must be in place before the first `import sglang`, in the launcher and in every process that it spawns.
`torchvision`: its C library does not load beside a CPU torch, so two operator schemas that its Python code
refers to are declared. `sgl_kernel`: one function is what a plain CPU run calls, some are for drafts (drafts.py); any
other raises when called.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types

import torch

from sglang_mla_ext.adapter.compat.contract import installed_version
from sglang_mla_ext.adapter.cpu import drafts

INSTALLED_VARIABLE = "SGLANG_MLA_EXT_CPU"
"""Set to 1 where the stubs are in place, for the processes that are spawned from there."""


def needed() -> bool:
    """Whether this machine has no CUDA device, so that SGLang can only run on the CPU."""
    return not torch.cuda.is_available()


def install() -> None:
    """Put the stubs in place; safe to call twice."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ[INSTALLED_VARIABLE] = "1"
    declare_torchvision_operators()
    if "sgl_kernel" not in sys.modules and importlib.util.find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = _sgl_kernel()


def let_torch_native_run_mla() -> None:
    """Let SGLang's `torch_native` backend serve MLA models: it has no other forward method than absorb for them.

    For a backend that it has no rule for, SGLang takes the Triton backend's, which needs keys per head in prefill.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, forward_batch: AttnForwardMethod.MLA)


def declare_torchvision_operators() -> None:
    """Declare what torchvision's Python code refers to; safe to call twice."""
    global _library
    # A build of torchvision for the CPU brings its own.
    if _library is not None or "+cpu" in (installed_version("torchvision") or ""):
        return
    _library = torch.library.Library("torchvision", "FRAGMENT")
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_library: torch.library.Library | None = None


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new slots into its row of the request table.

    Args:
        req_pool_indices: `[requests]` rows of the table.
        req_to_token: `[rows, pool_len]` int32, written.
        start_offset, end_offset: `[requests]` the token positions to write, `[start, end)`.
        out_cache_loc: `[sum(end - start)]` the slots, one request after the other.
        pool_len: the table's row length (unused: the table knows it).
    """
    parts = drafts.by_request(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc)
    for in_table, slots in parts:
        in_table.copy_(slots)


def _sgl_kernel() -> types.ModuleType:
    module = absent_module("sgl_kernel")
    module.assign_req_to_token_pool_cpu = assign_req_to_token_pool_cpu  # type: ignore[attr-defined]
    drafts.give(module)
    return module


def absent_module(name: str) -> types.ModuleType:
    """A module that has every name; what is imported from it raises when it is called."""
    module = types.ModuleType(name, "Stub of sglang-mla-ext for a machine without a GPU.")
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    module.__version__ = "0"  # type: ignore[attr-defined]

    def absent(member: str) -> object:
        if member.startswith("__"):
            raise AttributeError(member)

        def call(*args: object, **kwargs: object) -> None:
            raise NotImplementedError(f"{name}.{member} has no CPU version")

        call.__name__ = member
        return call

    module.__getattr__ = absent  # type: ignore[method-assign]
    return module

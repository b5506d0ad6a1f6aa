"""Stubs for two compiled packages that SGLang imports at start and that have no CPU build on PyPI.

They must be in place before the first `import sglang`, in the launcher and in every process that it spawns.
`torchvision`: its C library does not load beside a CPU torch, so two operator schemas that its Python code
refers to are declared. `sgl_kernel`: drafts.py has what a CPU run calls, with drafts or without; any other function
raises when called.
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
    """Return whether this machine has no CUDA device, so that SGLang can only run on the CPU."""
    return not torch.cuda.is_available()


def install() -> None:
    """Put the stubs in place; safe to call twice."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ[INSTALLED_VARIABLE] = "1"
    declare_torchvision_operators()
    if "sgl_kernel" not in sys.modules and importlib.util.find_spec("sgl_kernel") is None:
        module = sys.modules["sgl_kernel"] = absent_module("sgl_kernel")
        for function in drafts.KERNELS:
            setattr(module, function.__name__, function)


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

"""A fake Hopper GPU, for resolving a server's arguments on a machine without one, and nothing else."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.cpu import stubs

GPUS, MEMORY = 8, 141 << 30
"""GPUs of a node with H200s, and bytes of memory of each. SGLang derives sizes of batches and chunks from the memory,
which no answer here depends on."""


@contextmanager
def hopper() -> Iterator[None]:
    """Make SGLang see GPUs of compute capability 9.0, and whatever InfiniBand devices it is told of."""
    stubs.install()
    for name in (stubs.INSTALLED_VARIABLE, "SGLANG_USE_CPU_ENGINE"):
        os.environ.pop(name, None)
    # These import what a GPU needs where they see one, and must not see it.
    import sglang.srt.layers.quantization.compressed_tensors.compressed_tensors
    import sglang.srt.layers.quantization.fp8_utils  # noqa: F401

    device = SimpleNamespace(multi_processor_count=132, total_memory=MEMORY, major=9, minor=0, name="NVIDIA H200")
    cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: GPUS,
        "get_device_capability": lambda *args: (9, 0),
        "get_device_name": lambda *args: device.name,
        "get_device_properties": lambda *args: device,
        "mem_get_info": lambda *args: (MEMORY, MEMORY),
    }
    with ExitStack() as stack:
        stack.callback(forget_cached, "sglang.srt.utils")  # what SGLang asked about the device it asks again
        stack.enter_context(patch.multiple(torch.cuda, **cuda))
        stack.enter_context(patch.object(torch.version, "cuda", torch.version.cuda or "12.9"))
        stack.enter_context(patch.object(*installed.infiniband_check(), lambda *given: given[-1]))
        forget_cached("sglang.srt.utils")
        yield


def forget_cached(modules: str) -> None:
    """Let functions compute again what they cache, in all modules whose names begin so."""
    for name, module in list(sys.modules.items()):
        if name.startswith(modules):
            for function in list(vars(module).values()):
                if isinstance(function, functools._lru_cache_wrapper):
                    function.cache_clear()

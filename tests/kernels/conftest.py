"""The tests of this folder run the Triton kernels in Triton's interpreter: no GPU, float32, NumPy underneath.

Triton's own functions and the kernels are bound to the interpreter when they are imported, so TRITON_INTERPRET=1 must
be set at that time. This file sets it, imports them and takes it back, so that processes started later (a server, the
compiler) do not inherit it. Where something imported Triton before, the tests here cannot run: run
`pytest tests/kernels` in a process of its own (tests/gpu, which needs the compiled kernels, also does).
"""

from __future__ import annotations

import os

import torch
from interpreter import adapt

torch.set_num_threads(1)  # tensors are small here, and pytest's workers already fill the cores


def _bind_to_interpreter() -> None:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton.experimental.gluon  # noqa: F401 - the interpreter imports it at the first launch
        import triton.language as tl
        from triton.runtime import interpreter

        from sglang_mla_ext.kernels import dispatch, merge  # noqa: F401 - nearly all of them
        from sglang_mla_ext.kernels.absorb import tail_schedule, triton_fp8_absorb
        from sglang_mla_ext.kernels.naive import merge_ranks, merge_to_ranks, push_to_ranks, signals  # noqa: F401
        from sglang_mla_ext.kernels.naive import triton_naive as naive_prefix
        from sglang_mla_ext.kernels.storage import append_latent, expand_prefix
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    ours = (
        *(naive_prefix.naive_prefix_kernel, merge.merge_kernel, tail_schedule.schedule_tails_kernel),
        *(triton_fp8_absorb.absorb_fp8_kernel, append_latent.append_latent_kernel, expand_prefix.expand_prefix_kernel),
    )
    for function in (tl.max, *ours):
        if not isinstance(function, interpreter.InterpretedFunction):
            raise RuntimeError(
                "Triton was imported before tests/kernels/conftest.py could set TRITON_INTERPRET=1; "
                "run `pytest tests/kernels` in a process of its own"
            )
    adapt(interpreter)


_bind_to_interpreter()

"""The tests of this folder run the Triton kernels in Triton's interpreter: no GPU, float32, NumPy underneath.

Triton's own functions and the kernels are bound to the interpreter when they are imported, so TRITON_INTERPRET=1 must
be set at that time. This file sets it, imports them and takes it back, so that processes started later (a server, the
compiler) do not inherit it. Where something imported Triton before, the tests here cannot run: run
`pytest tests/kernels` in a process of its own (tests/gpu, which needs the compiled kernels, also does).
"""

from __future__ import annotations

import os

import torch

torch.set_num_threads(1)  # tensors are small here, and pytest's workers already fill the cores


def _bind_to_interpreter() -> None:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton.experimental.gluon  # noqa: F401 - the interpreter imports it at the first launch
        import triton.language as tl
        from triton.runtime import interpreter

        from sglang_mla_ext.kernels import merge
        from sglang_mla_ext.kernels.naive import merge_ranks  # noqa: F401
        from sglang_mla_ext.kernels.naive import triton_naive as naive_prefix
        from sglang_mla_ext.kernels.storage import (
            append_latent,  # noqa: F401
            expand_prefix,  # noqa: F401
            fetch_latent,  # noqa: F401
            join_parts,  # noqa: F401
            page_table,  # noqa: F401
        )
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    for function in (tl.max, naive_prefix.naive_prefix_kernel, merge.merge_kernel):
        if not isinstance(function, interpreter.InterpretedFunction):
            raise RuntimeError(
                "Triton was imported before tests/kernels/conftest.py could set TRITON_INTERPRET=1; "
                "run `pytest tests/kernels` in a process of its own"
            )
    _accept_current_numpy(interpreter)
    _prepare_once(interpreter)


def _accept_current_numpy(interpreter) -> None:
    """Let run-time loop bounds work: Triton 3.6 converts them by int(one-element array), an error since NumPy 2.4."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


def _prepare_once(interpreter) -> None:
    """Have a call inside of a kernel prepare Triton's language for its module once, and not each time: a launch has
    prepared what kernels use, and what Triton's own functions use stays prepared."""
    prepared: set[int] = set()
    call = interpreter.InterpretedFunction.__call__

    def call_prepared(self, *args, **kwargs):
        if id(self.fn.__globals__) not in prepared:
            prepared.add(id(self.fn.__globals__))
            return call(self, *args, **kwargs)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call_prepared


_bind_to_interpreter()

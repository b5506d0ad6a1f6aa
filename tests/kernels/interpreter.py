"""What the tests change of Triton's interpreter: it must run with the NumPy of today, and not prepare and describe the
same things again for each operation, which took most of its time."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch


def adapt(interpreter: ModuleType) -> None:
    """
    Args:
        interpreter: triton.runtime.interpreter
    """
    _accept_current_numpy(interpreter)
    _prepare_once(interpreter)
    _describe_blocks_once()
    _compare_by_identity_first()
    _find_dtypes_by_name(interpreter)
    _convert_like_a_gpu(interpreter)


def _accept_current_numpy(interpreter: Any) -> None:
    """Let run-time loop bounds work: Triton 3.6 converts them by int(one-element array), an error since NumPy 2.4."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


def _prepare_once(interpreter: Any) -> None:
    """Have a call inside of a kernel prepare Triton's language for its module once, and not each time: a launch has
    prepared what kernels use, and what Triton's own functions use stays prepared."""
    prepared: set[int] = set()
    call = interpreter.InterpretedFunction.__call__

    def call_prepared(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self.fn.__globals__) not in prepared:
            prepared.add(id(self.fn.__globals__))
            return call(self, *args, **kwargs)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call_prepared


def _describe_blocks_once() -> None:
    """Types of blocks, and the shapes of tensors of them, are made once for each element type and shape: they are made
    several times in each operation, and nobody changes them."""
    from triton.language import core

    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}  # what a tensor has as `numel` and `shape`
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (id(element_ty), *[one.value if isinstance(one, core.constexpr) else one for one in shape])
        if key not in known:  # which keeps the element type, and with it the id
            make_type(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[key]

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor


def _find_dtypes_by_name(interpreter: Any) -> None:
    """NumPy's dtype of Triton's: the interpreter makes a table of all of them, in each operation."""
    find, known = interpreter._get_np_dtype, {}

    def found(dtype: Any) -> np.dtype:
        scalar = dtype.element_ty if dtype.is_block() else dtype
        name = scalar.name
        if name not in known:
            known[name] = find(scalar)
        return known[name]

    interpreter._get_np_dtype = found


def _convert_like_a_gpu(interpreter: Any) -> None:
    """Triton 3.6's interpreter truncates to BF16, and gets the subnormals of e4m3 and its NaN wrong: torch converts."""
    import triton.language as tl

    convert = interpreter._convert_float
    known = {tl.bfloat16: (torch.bfloat16, torch.uint16), tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8)}

    def converted(data: Any, from_dtype: Any, to_dtype: Any, rounding_mode: Any) -> Any:
        if from_dtype == tl.float32 and to_dtype in known:
            dtype, bits = known[to_dtype]
            return torch.tensor(data).to(dtype).view(bits).numpy()
        if (from_dtype, to_dtype) == (tl.float8e4nv, tl.float32):
            return torch.tensor(data).view(torch.float8_e4m3fn).float().numpy()
        return convert(data, from_dtype, to_dtype, rounding_mode)

    interpreter._convert_float = converted


def _compare_by_identity_first() -> None:
    """Operands of one shape need no broadcast, and a type is equal to itself: what Triton finds out by comparing."""
    from triton.language import core, semantic

    broadcast, equal = semantic.TritonSemantic.broadcast_impl_value, core.dtype.__eq__

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        a, b = (one.type.shape.values if one.type.is_block() else None for one in (lhs, rhs))
        return (lhs, rhs) if a == b else broadcast(self, lhs, rhs)

    semantic.TritonSemantic.broadcast_impl_value = broadcast_others
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)

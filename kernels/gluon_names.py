"""Names in Gluon that differ between Triton's releases."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
"""Waits for all threads of a role. Triton 3.8 has it as `barrier`, with clusters of CTAs as an option; 3.6 does not."""


def aggregate(cls):
    """Make a class a Gluon aggregate whose constructor takes its annotated members in order. Triton 3.8 writes such a
    constructor itself; 3.6 does not."""
    names = tuple(cls.__annotations__)

    @gluon.constexpr_function
    def initialise(self, *members):
        for name, member in zip(names, members, strict=True):
            setattr(self, name, member)

    cls.__init__ = initialise
    return _aggregate(cls)

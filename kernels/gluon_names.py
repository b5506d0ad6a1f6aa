"""Names in Gluon that differ between Triton's releases."""

from triton.experimental.gluon import language as gl

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
"""Waits for all threads of a role. Triton 3.8 has it as `barrier`, with clusters of CTAs as an option; 3.6 does not."""

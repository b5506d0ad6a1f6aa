"""Operands that the roles of sm90_naive.py hand to each other: shared memory, queries, scales, work list, results."""

from triton.experimental.gluon import language as gl

from ...gluon_names import aggregate

ROWS = gl.constexpr(64)
"""Query rows of a consumer."""


# No `from __future__ import annotations` here: an aggregate needs its annotations as types.
@aggregate
class Ring:
    """The ring of key tiles in shared memory, and the barriers of its stages."""

    k_nope: gl.shared_memory_descriptor  # BF16 or e4m3 [STAGES, BLOCK_KEYS, DN]
    k_rope: gl.shared_memory_descriptor  # BF16 [STAGES, BLOCK_KEYS, DR]
    v_t: gl.shared_memory_descriptor  # as k_nope, [STAGES, DV, BLOCK_KEYS]
    k_full: gl.shared_memory_descriptor  # [STAGES], of both parts of K
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor


@aggregate
class Query:
    """The query in global memory: pointers, and strides of rows and heads in elements."""

    nope_ptr: gl.tensor  # BF16 [T, H, DN], strides nope_row, nope_head, 1
    rope_ptr: gl.tensor  # BF16 [T, H, DR], strides rope_row, rope_head, 1
    nope_row: gl.tensor
    nope_head: gl.tensor
    rope_row: gl.tensor
    rope_head: gl.tensor
    nope_dim: gl.tensor  # DN; read where the block is wider than most heads


@aggregate
class Scales:
    """Scales of keys and values, which only FP8 has, and the softmax scale."""

    k_ptr: gl.tensor  # float32 [H]
    v_ptr: gl.tensor  # float32 [H]
    softmax_log2e: gl.tensor  # softmax_scale * log2(e)


@aggregate
class Work:
    """The work list. All roles of a program go through its items in the same order."""

    ptr: gl.tensor  # int32, see schedule.WorkList
    items_offset: gl.tensor  # position of the first item
    n_items_ptr: gl.tensor  # the number of items
    heads: gl.tensor  # H


@aggregate
class Partials:
    """The kernel's results: normalised outputs of the items, and their base-2 log-sum-exp."""

    out_ptr: gl.tensor  # float32 [P, H, DV]
    lse2_ptr: gl.tensor  # float32 [P, H]

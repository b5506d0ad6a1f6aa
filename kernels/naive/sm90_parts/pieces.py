"""What the consumers of sm90_naive.py are given, and the steps that BF16 and FP8 have in common."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from ..items import ITEM_HEAD, ITEM_PARTIAL, ITEM_ROWS

ROWS = gl.constexpr(64)
NO_SCORE = gl.constexpr(-1e30)
NO_MAX2 = gl.constexpr(-1e9)
"""A narrow item's row maximum before its first key: far above masked scores and below all others, so that half a tile
of masked keys weighs nothing. With a maximum of its own, the rounding of numbers like 1e29 would become a weight. In a
wide item the first tile has a key that counts."""


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

    @gluon.constexpr_function
    def __init__(self, k_nope, k_rope, v_t, k_full, k_empty, v_full, v_empty):
        self.k_nope, self.k_rope, self.v_t = k_nope, k_rope, v_t
        self.k_full, self.k_empty, self.v_full, self.v_empty = k_full, k_empty, v_full, v_empty


@aggregate
class Handover:
    """Barriers between the consumers of a narrow item: the second half's result is written, and has been noticed."""

    full: gl.shared_memory_descriptor  # [1]
    empty: gl.shared_memory_descriptor  # [1]

    @gluon.constexpr_function
    def __init__(self, full, empty):
        self.full, self.empty = full, empty


@aggregate
class Query:
    """The query in global memory: pointers, and strides of rows and heads in elements."""

    nope_ptr: gl.tensor  # BF16 [T, H, DN], strides nope_row, nope_head, 1
    rope_ptr: gl.tensor  # BF16 [T, H, DR], strides rope_row, rope_head, 1
    nope_row: gl.tensor
    nope_head: gl.tensor
    rope_row: gl.tensor
    rope_head: gl.tensor

    @gluon.constexpr_function
    def __init__(self, nope_ptr, rope_ptr, nope_row, nope_head, rope_row, rope_head):
        self.nope_ptr, self.nope_row, self.nope_head = nope_ptr, nope_row, nope_head
        self.rope_ptr, self.rope_row, self.rope_head = rope_ptr, rope_row, rope_head


@aggregate
class Scales:
    """Scales of keys and values, which only FP8 has, and the softmax scale."""

    k_ptr: gl.tensor  # float32 [H]
    v_ptr: gl.tensor  # float32 [H]
    softmax_log2e: gl.tensor  # softmax_scale * log2(e)

    @gluon.constexpr_function
    def __init__(self, k_ptr, v_ptr, softmax_log2e):
        self.k_ptr, self.v_ptr, self.softmax_log2e = k_ptr, v_ptr, softmax_log2e


@aggregate
class Work:
    """The work list. All roles of a program go through its items in the same order."""

    ptr: gl.tensor  # int32, see schedule.WorkList
    items_offset: gl.tensor  # position of the first item
    heads: gl.tensor  # H

    @gluon.constexpr_function
    def __init__(self, ptr, items_offset, heads):
        self.ptr, self.items_offset, self.heads = ptr, items_offset, heads


@aggregate
class Partials:
    """The kernel's results: normalised outputs of the items, and their base-2 log-sum-exp."""

    out_ptr: gl.tensor  # float32 [P, H, DV]
    lse2_ptr: gl.tensor  # float32 [P, H]

    @gluon.constexpr_function
    def __init__(self, out_ptr, lse2_ptr):
        self.out_ptr, self.lse2_ptr = out_ptr, lse2_ptr


@gluon.jit
def _load_rows(ptr, row, head, row_stride, head_stride, in_tile, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """`[ROWS, DIM]` of a query in BF16; 0 where the tile has no row."""
    dim = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
    pointers = ptr + (row * row_stride + head * head_stride)[:, None] + dim[None, :]
    return gl.load(pointers, mask=in_tile[:, None], other=0.0)


@gluon.jit
def _softmax_step(scores, row_max2, row_sum, row_scale, headroom: gl.constexpr):
    """Running softmax in base 2: weights times 2**headroom, new maximum and sum, and the factor for what was summed."""
    new_max2 = gl.maximum(row_max2, gl.max(scores, 1) * row_scale)
    rescale = gl.exp2(row_max2 - new_max2)
    weights = gl.exp2(scores * row_scale[:, None] - (new_max2 - headroom)[:, None])
    return weights, new_max2, row_sum * rescale + gl.sum(weights, 1), rescale


@gluon.jit
def _keys_of(tile, FIRST: gl.constexpr, KEYS: gl.constexpr):
    """`[D, KEYS]`: keys from `FIRST` on of a tile `[BLOCK_KEYS, D]`."""
    if tile.shape[0] == KEYS:
        return tile.permute((1, 0))
    else:
        return tile.slice(FIRST, KEYS, 0).permute((1, 0))


@gluon.jit
def _values_of(v_t, FIRST: gl.constexpr, KEYS: gl.constexpr):
    """`[KEYS, DV]`: values from key `FIRST` on of a tile `[DV, BLOCK_KEYS]`."""
    if v_t.shape[1] == KEYS:
        return v_t.permute((1, 0))
    else:
        return v_t.slice(FIRST, KEYS, 1).permute((1, 0))


@gluon.jit
def _bits_of(values):
    """FP8 numbers as bytes, which can be selected; FP8 numbers cannot."""
    return values.to(gl.uint8, bitcast=True)


@gluon.jit
def _fp8_of(bits):
    return bits.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _clear_values_behind(v_t, valid, BLOCK_KEYS: gl.constexpr, DV: gl.constexpr, FP8: gl.constexpr):
    """Zero the values of the keys from `valid` on: a weight of 0 times a NaN would be NaN.

    Each consumer does so before its own product, without waiting for the other: the second one rewrites the same
    numbers.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    position = gl.arange(0, BLOCK_KEYS, gl.SliceLayout(0, LAYOUT))
    values = v_t.load(LAYOUT)  # [DV, BLOCK_KEYS]
    if FP8:
        inside = position % 16
        order = 8 * (inside >> 1 & 1) + 4 * (inside >> 3 & 1) + 2 * (inside >> 2 & 1) + (inside & 1)
        keep = position - inside + order < valid
        bits = _bits_of(values)
        values = _fp8_of(gl.where(keep[None, :], bits, gl.zeros_like(bits)))
    else:
        values = gl.where((position < valid)[None, :], values, gl.zeros_like(values))
    gl.thread_barrier()
    v_t.store(values)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _finish(
    half: gl.constexpr, WIDE: gl.constexpr, given, item, handed_over, acc, row_max2, row_sum, out_scale,
    DV: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write an item's partial. Of a narrow item each consumer has the result over half of the keys: the second leaves
    its own where the partial belongs, and the first adds it."""
    _, handover, _, _, work, partials = given
    rows = (half * ROWS if WIDE else 0) + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, DV, gl.SliceLayout(0, LAYOUT))
    # Numbers of the item are read again: over the loop, registers are short.
    in_tile = rows < gl.load(item + ITEM_ROWS)
    partial = (gl.load(item + ITEM_PARTIAL) + rows).to(gl.int64) * work.heads + gl.load(item + ITEM_HEAD)
    out_ptrs, lse2_ptrs = partials.out_ptr + partial[:, None] * DV + dim[None, :], partials.lse2_ptr + partial
    if not WIDE:
        row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)  # the second half of the keys may be none at all
    out = acc * (out_scale / row_sum)[:, None]
    lse2 = row_max2 + gl.log2(row_sum)
    if not WIDE and half == 0:
        mbarrier.wait(handover.full.index(0), handed_over & 1)
        gl.thread_barrier()  # all warps have seen this phase before the next one may begin
        mbarrier.arrive(handover.empty.index(0))
        other_lse2 = gl.load(lse2_ptrs, mask=in_tile, other=0.0)
        most2 = gl.maximum(lse2, other_lse2)
        weight, other_weight = gl.exp2(lse2 - most2), gl.exp2(other_lse2 - most2)
        total = weight + other_weight
        other_out = gl.load(out_ptrs, mask=in_tile[:, None], other=0.0)
        out = out * (weight / total)[:, None] + other_out * (other_weight / total)[:, None]
        lse2 = most2 + gl.log2(total)
    gl.store(out_ptrs, out, mask=in_tile[:, None])
    gl.store(lse2_ptrs, lse2, mask=in_tile)
    if not WIDE and half == 1:
        mbarrier.wait(handover.empty.index(0), (handed_over & 1) ^ 1)
        gl.thread_barrier()  # the partials of all warps are written
        mbarrier.arrive(handover.full.index(0))

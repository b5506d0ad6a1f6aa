"""Common parts of sm90_fp8_absorb.py and sm90_fp8_few_heads.py: the ring, scales of keys, values as the first operand
of a product, and the store of its result.

The output is summed transposed, `[64 dims, N rows]` at a time, with the values as the first operand, in registers. A
transposing load of 16-bit elements takes two neighbouring dims of a key as one element; two byte permutes turn two such
registers into four keys of the even dim and four of the odd one, as the product needs them (`values_tile`). So the rows
of its result are not in the order of dims; `_by_dim` restores it. The order of keys in the sum is free as long as
values and weights agree: every kernel takes the order in which a thread holds its scores, so that no weight moves to
another thread.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ... import constants
from ...gluon_names import aggregate
from .work_items import BLOCK, LATENT, NO_SCORE

PANEL = gl.constexpr(128)  # bytes of a row that lie side by side in swizzled shared memory
SCALE_WIDTH = gl.constexpr(4)  # floats: TMA copies no less than 16 bytes
LOG2_FP8_MAX = gl.constexpr(constants.LOG2_FP8_MAX)
SCALE_RANGE = gl.constexpr(24.0)  # reference.fp8.WEIGHT_SCALE_RANGE, in powers of two


# No `from __future__ import annotations` here: an aggregate needs its annotations as types.
@aggregate
class Ring:
    """The ring of blocks in shared memory, and the barriers of its slots."""

    content: gl.shared_memory_descriptor  # e4m3 [SLOTS, BLOCK, LATENT]
    rope: gl.shared_memory_descriptor  # BF16 [SLOTS, BLOCK, ROPE]
    scale: gl.shared_memory_descriptor  # float32 [SLOTS, BLOCK, SCALE_WIDTH], of which the first column counts
    full: gl.shared_memory_descriptor  # [SLOTS]
    empty: gl.shared_memory_descriptor  # [SLOTS]


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """The next slot of the ring and the parity of its use."""
    slot += 1
    phase = gl.where(slot == SLOTS, phase ^ 1, phase)
    return gl.where(slot == SLOTS, 0, slot), phase


@gluon.jit
def copy_block(content_desc, rope_desc, scale_desc, ring, slot, row):
    """Start copying 64 keys from pool row `row` on to a slot."""
    BYTES: gl.constexpr = content_desc.block_type.nbytes + rope_desc.block_type.nbytes + scale_desc.block_type.nbytes
    barrier = ring.full.index(slot)
    mbarrier.expect(barrier, BYTES)
    tma.async_copy_global_to_shared(rope_desc, [row, 0], barrier, ring.rope.index(slot))
    tma.async_copy_global_to_shared(content_desc, [row, 0], barrier, ring.content.index(slot))
    tma.async_copy_global_to_shared(scale_desc, [row, 0], barrier, ring.scale.index(slot))


@gluon.jit
def scales_of_keys(scale_s, slot, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """Scales of a block's keys, `[64]` in LAYOUT; KEYS is the same layout for `[1, 64]`."""
    SLOTS: gl.constexpr = scale_s.shape[0]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows = scale_s._reinterpret(gl.float32, [SLOTS, BLOCK, SCALE_WIDTH], PLAIN).index(slot)
    scales = rows.permute((1, 0)).slice(0, 1, 0).load(KEYS).reshape([BLOCK])
    return gl.convert_layout(scales, LAYOUT, assert_trivial=True)


@gluon.jit
def log2_of_power(value):
    """Exact for powers of two: the exponent's bits, read as a number."""
    exponent = value.to(gl.uint32, bitcast=True) >> 23
    biased = (exponent | 0x4B000000).to(gl.float32, bitcast=True)  # 2^23 + exponent
    return biased - (8388608.0 + 127.0)


@gluon.jit
def inverse_of_power(value):
    """Exact for powers of two from 2^-126 to 2^126."""
    return (0x7F000000 - value.to(gl.uint32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def finish(total, level, QUERY_TOKENS: gl.constexpr):
    """The factor for the sums, and the lse2, of rows whose weights sum up to `total` in units of `level`. With several
    query tokens a row may have seen no key: 0 and -inf. (Maxima ignore NaN, so the level of a NaN row is as low.)"""
    norm = 1.0 / total
    lse2 = level - LOG2_FP8_MAX + gl.log2(total)
    if QUERY_TOKENS > 1:
        seen = (level > 0.5 * NO_SCORE) | (total != total)
        norm = gl.where(seen, norm, 0.0)
        lse2 = gl.where(seen, lse2, float("-inf"))
    return norm, lse2


@gluon.jit
def clear_behind(pairs_s, first: gl.constexpr, valid):
    """Zero dims [first, first + 256) of the keys from `valid` on: a weight of 0 times a NaN would be NaN. Other
    roles may still read these keys for scores, which are masked."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    columns = pairs_s.slice(first // 2, 128, 1)
    pairs = columns.load(LAYOUT)
    key = gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))
    columns.store(gl.where((key < valid)[:, None], pairs, gl.zeros_like(pairs)))


@gluon.jit
def values_tile(pairs_s, first: gl.constexpr, PERMUTE: gl.constexpr, OPERAND: gl.constexpr):
    """Values of 64 dims from `first` on, as first operand in registers: `[64 dims, 64 keys]` e4m3.

    pairs_s: `[64 keys, 256]` int16, two neighbouring dims each. Row 16·w + 8·h + g of the result is dim
    first + 16·w + 2·g + h. PERMUTE picks the order of keys; the labels that the reshapes give them are KEYS_OF_DIMS'.
    """
    PAIRS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16], [0, 32]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]],
        [],
        [32, BLOCK],
    )
    pairs = pairs_s.permute((1, 0)).slice(first // 2, 32, 0).load(PAIRS)  # [32 pairs, 64 keys]
    even, odd = gl.inline_asm_elementwise(PERMUTE, "=r,=r,r,r", [pairs], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)
    values = gl.join(even, odd).reshape([4, 8, BLOCK // 16, 2, 4, 2, 2])  # w, g, key (of 16, 8, 2, 1), h
    values = values.permute([0, 6, 1, 2, 4, 3, 5]).reshape([64, BLOCK])
    return gl.convert_layout(values, OPERAND, assert_trivial=True).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _by_dim(acc, N: gl.constexpr):
    """`[N rows, 64 dims]` of a result `[64, N]` whose rows are in the order of `values_tile`."""
    return acc.reshape([4, 2, 8, N]).permute([3, 0, 2, 1]).reshape([N, 64])


@gluon.constexpr_function
def _out_layout(n):
    """Layout for `_by_dim`: a thread has two neighbouring dims side by side, so that they are stored together."""
    more_rows = [[8 << i, 0] for i in range((n // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [1, 0], *more_rows],
        [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]],
        [[0, 16], [0, 32]],
        [],
        [n, 64],
    )


@gluon.jit
def write_out(partial_out_ptr, acc, n_rows, N: gl.constexpr):
    """Write `[n_rows, 64]` of the output: eight threads store two dims each, side by side: a whole sector."""
    LAYOUT: gl.constexpr = _out_layout(N)
    out = gl.convert_layout(_by_dim(acc, N).to(partial_out_ptr.dtype.element_ty), LAYOUT)
    rows = gl.arange(0, N, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    gl.store(partial_out_ptr + rows[:, None] * LATENT + dims[None, :], out, mask=(rows < n_rows)[:, None])

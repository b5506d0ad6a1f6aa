"""Time of each way of attending to a shared prefix, per layer.

The time of a mode is the larger of its memory time and its matrix time, plus the overhead of its launches. What it
reads and multiplies is in break_even.py; rates are data, see gpu_rates.py.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates
from sglang_mla_ext.prefix.planner.model_dims import ModelDims
from sglang_mla_ext.segment import Mode

# Query rows that grouped absorb stacks at once, at least: kernels/absorb/stacking.py.
_STRIP_ROWS = 8

# Bytes of an FP8 latent row for its scale: a float32, padded to 16 bytes.
_FP8_LATENT_SCALE_BYTES = 16


@dataclass(frozen=True)
class CostModel:
    """Costs of one layer's attention to a shared prefix.

    Attributes:
        local_heads: query heads on this GPU.
        expanded_element_bytes: bytes per element of the expanded prefix: 4, 2 or 1.
        latent_element_bytes: bytes per element of a latent row: 4, 2 or 1. Rotary elements take at least 2 in both.
        query_tokens: of a request in a step. Groups are counted in requests; each has so many rows.
        ranks: that hold expanded prefixes together, each with its part of the heads, and attend to them for the
            requests of all. Groups are of all ranks then, which are taken to have as many requests each; and what
            absorb costs is that of one rank's.
    """

    dims: ModelDims
    local_heads: int
    rates: GpuRates
    expanded_element_bytes: int = 2
    latent_element_bytes: int = 2
    query_tokens: int = 1
    ranks: int = 1

    @property
    def expanded_heads(self) -> int:
        """Heads of expanded prefixes on this GPU."""
        return self.local_heads // self.ranks

    def own(self, group_size: int) -> int:
        """Requests of a group that belong to one rank, rounded up."""
        return -(-group_size // self.ranks)

    @functools.cached_property
    def latent_row_bytes(self) -> int:
        """Bytes of a token's latent row: 1152 in BF16 with DeepSeek-V3's dimensions, 656 in FP8."""
        size = self.latent_element_bytes
        scale = _FP8_LATENT_SCALE_BYTES if size == 1 else 0
        return self.dims.kv_lora_rank * size + scale + self.dims.qk_rope_head_dim * max(size, 2)

    @functools.cached_property
    def expanded_token_bytes(self) -> int:
        """Bytes of a token of the expanded prefix: K and V for each of its heads here, K's rotary part once."""
        size = self.expanded_element_bytes
        per_head = (self.dims.qk_nope_head_dim + self.dims.v_head_dim) * size
        return self.expanded_heads * per_head + self.dims.qk_rope_head_dim * max(size, 2)

    def seconds(self, mode: Mode, group_size: int, tokens: int) -> float:
        """Predicted time of one layer's attention to the prefix.

        Counts (break_even.py) are corrected in two ways, both observed in FlashMLA's times over shared pages:
        - Matrix units work on tiles of `row_tile` rows, and plain absorb's rows are one request's heads: 16 heads take
          as long as 64, and as four query tokens of 16. Grouped absorb stacks the heads of several requests, naive the
          query tokens of all requests, of one head.
        - Requests that share rows run at the same time, so the rows are read from memory once if all of them fit in
          the L2 cache, and otherwise once per request. Reading from L2 was never the limit.
        """
        if tokens == 0 or group_size == 0:
            return 0.0
        return self.work_seconds(mode, group_size, tokens) + self.overhead_seconds(mode, group_size)

    def overhead_seconds(self, mode: Mode, group_size: int) -> float:
        """Return the part of `seconds` that does not depend on the tokens."""
        rates = self.rates.modes[mode]
        launches = rates.overhead_s + rates.overhead_per_root_row_s * math.sqrt(self.tail_rows(self.own(group_size)))
        return launches + (self.exchange_seconds(group_size) if mode is Mode.NAIVE else 0.0)

    def exchange_seconds(self, group_size: int) -> float:
        """Seconds of a layer's exchange between ranks, in BF16; 0 if prefixes are not sharded or no rate is given."""
        rates = self.rates.exchange
        if self.ranks == 1 or rates is None:
            return 0.0
        heads = self.own(group_size) * self.query_tokens * (self.local_heads - self.expanded_heads)
        return rates.overhead_s + 2 * heads * self.dims.naive_macs / rates.bytes_per_s  # as many values as products

    def making_seconds(self, tokens: int) -> float:
        """Seconds that a prefill pass spends in a layer to make keys and values of all heads here from latent rows: the
        product with `kv_b_proj` at absorb's rate, then one write in BF16 and one read."""
        rates, dims = self.rates.modes[Mode.ABSORB], self.dims
        macs = dims.kv_lora_rank * (dims.qk_nope_head_dim + dims.v_head_dim)
        per_head = macs / rates.macs_per_s + 2 * 2 * dims.naive_macs / rates.bytes_per_s  # as many values as products
        return tokens * self.local_heads * per_head

    def work_seconds(self, mode: Mode, group_size: int, tokens: int) -> float:
        """Return the part of `seconds` that grows with the tokens."""
        return tokens * self.token_seconds(mode, group_size, self.exceeds_l2(tokens))

    def exceeds_l2(self, tokens: int) -> bool:
        """Return whether the latent rows of so many tokens exceed the L2 cache."""
        return tokens * self.latent_row_bytes > self.rates.l2_bytes

    def token_seconds(self, mode: Mode, group_size: int, from_memory: bool) -> float:
        """Seconds that each token adds to `work_seconds`.

        Args:
            from_memory: whether plain absorb reads it once per request from memory.
        """
        work = self._work[mode]
        if mode is Mode.ABSORB:
            group_size = self.own(group_size)
        read_s, matrix_s = work.read_s, -(-group_size * work.rows // work.tile) * work.tile_s
        if mode is Mode.ABSORB and from_memory:
            read_s *= group_size
        return read_s if read_s > matrix_s else matrix_s

    def launch_seconds(self, mode: Mode, rows: int) -> float:
        """Seconds that a mode adds to a step beyond work and segments, if `rows` of its requests attend in it at all:
        its launches, less those of plain absorb. `seconds` of one group is its work, one segment, this, and plain
        absorb's overhead."""
        more = self.overhead_seconds(mode, rows) - self.overhead_seconds(Mode.ABSORB, rows)
        return more - self.segment_seconds(mode, rows)

    def segment_seconds(self, mode: Mode, group_size: int) -> float:
        """Seconds that a segment adds beyond its work, once the launches are paid: its items, and one partial for each
        row and head, written once and read once by the merge."""
        work = self._work[mode]
        return work.segment_s + group_size * work.partials_s

    def tail_rows(self, group_size: int) -> int:
        """Rows that plain absorb computes over the private tails of a group: heads of all query tokens of a request,
        padded to whole tiles."""
        return group_size * _round_up(self.local_heads * self.query_tokens, self.rates.modes[Mode.ABSORB].row_tile)

    @functools.cached_property
    def _work(self) -> dict[Mode, _Work]:
        """Work of each mode, cached: a plan reads it thousands of times."""
        return {mode: _work_of(self, mode) for mode in self.rates.modes}


class _Work(NamedTuple):
    """Components of the time of a mode's work.

    Attributes:
        read_s: seconds to read a token's keys and values once.
        tile_s: seconds of the matrix units, for a token and the rows of a tile.
        rows: of a request; tile: rows that are computed as one, also those of several requests.
        segment_s: seconds of a segment beyond that; partials_s: of the partials of a request in it.
    """

    read_s: float
    tile_s: float
    rows: int
    tile: int
    segment_s: float
    partials_s: float


def _work_of(cost: CostModel, mode: Mode) -> _Work:
    rates, dims, heads = cost.rates.modes[mode], cost.dims, cost.local_heads
    rows, tile, tile_heads, per_key = heads * cost.query_tokens, rates.row_tile, 1, dims.absorb_macs
    read, element_bytes, partial_bytes = cost.latent_row_bytes, cost.latent_element_bytes, dims.kv_lora_rank * 2
    if mode is Mode.NAIVE:
        heads = cost.expanded_heads
        padding = _power_of_two(dims.qk_nope_head_dim) - dims.qk_nope_head_dim  # of the kernels' blocks
        rows, tile_heads, per_key = cost.query_tokens, heads, dims.naive_macs + padding
        read, element_bytes = cost.expanded_token_bytes, cost.expanded_element_bytes
        partial_bytes = dims.v_head_dim * 4
    tile_s = tile * tile_heads * per_key / rates.matrix_rate(element_bytes)
    if mode is Mode.GROUPED_ABSORB:
        heads = _round_up(heads, _STRIP_ROWS)
        rows = heads * cost.query_tokens
    if mode is Mode.ABSORB:  # no tile has rows of two requests
        rows, tile = _round_up(rows, tile) // tile, 1
    return _Work(
        read_s=read / rates.bytes_per_s,
        tile_s=tile_s,
        rows=rows,
        tile=tile,
        segment_s=rates.segment_s,
        partials_s=2 * cost.query_tokens * heads * partial_bytes / rates.bytes_per_s,
    )


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

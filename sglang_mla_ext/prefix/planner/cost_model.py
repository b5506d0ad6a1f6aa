"""What each way of attending to a shared prefix costs, per layer, and which one is cheapest.

For a group of `B` requests of `W` query tokens (1, or more in a step that verifies drafts), `H` local heads and `L`
prefix tokens (DeepSeek-V3's dimensions; the code takes any):

| mode           | MACs         | elements read      |
|----------------|--------------|--------------------|
| absorb         | B·W·H·L·1088 | B·L·576            |
| grouped_absorb | B·W·H·L·1088 | L·576              |
| naive          | B·W·H·L·320  | L·H·256 + L·64     |

The time of a mode is the larger of its memory time and its matrix time, plus the overhead of its launches. Rates are
data, see gpu_rates.py. This module imports neither torch nor SGLang.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates
from sglang_mla_ext.prefix.planner.model_dims import ModelDims
from sglang_mla_ext.segment import Mode

# Query rows that grouped absorb stacks at once, at least: kernels/absorb/stacking.py.
_STRIP_ROWS = 8

# Bytes of an FP8 latent row for its scale: a float32, padded to 16 bytes.
_FP8_LATENT_SCALE_BYTES = 16

# In the order of preparation that they need; ties go to the earlier one.
_PREFERENCE = (Mode.ABSORB, Mode.GROUPED_ABSORB, Mode.NAIVE)


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

    def _own(self, group_size: int) -> int:
        """Of a group, the requests of a rank."""
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

    def macs(self, mode: Mode, group_size: int, tokens: int) -> int:
        """Useful MACs of a group's attention to `tokens` prefix tokens."""
        naive = mode is Mode.NAIVE
        heads = group_size * self.expanded_heads if naive else self._own(group_size) * self.local_heads
        return self.query_tokens * heads * tokens * (self.dims.naive_macs if naive else self.dims.absorb_macs)

    def bytes_read(self, mode: Mode, group_size: int, tokens: int) -> int:
        """Bytes of keys and values that the kernel loads; plain absorb loads the same rows once per request.

        A request's query rows may take several tiles, which run at the same time: the L2 cache serves all but one.
        """
        if mode is Mode.NAIVE:
            return tokens * self.expanded_token_bytes
        readers = self._own(group_size) if mode is Mode.ABSORB else 1
        return readers * tokens * self.latent_row_bytes

    def seconds(self, mode: Mode, group_size: int, tokens: int) -> float:
        """Predicted time of one layer's attention to the prefix.

        The counts above are corrected in two ways, both observed in FlashMLA's times over shared pages:
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
        """The part of `seconds` that does not depend on the tokens."""
        rates = self.rates.modes[mode]
        launches = rates.overhead_s + rates.overhead_per_root_row_s * math.sqrt(self.tail_rows(self._own(group_size)))
        return launches + (self.exchange_seconds(group_size) if mode is Mode.NAIVE else 0.0)

    def exchange_seconds(self, group_size: int) -> float:
        """What a layer's exchange between ranks costs, in BF16; nothing where each holds its own prefixes."""
        rates = self.rates.exchange
        if self.ranks == 1 or rates is None:
            return 0.0
        heads = self._own(group_size) * self.query_tokens * (self.local_heads - self.expanded_heads)
        return rates.overhead_s + 2 * heads * self.dims.naive_macs / rates.bytes_per_s  # as many values as products

    def making_seconds(self, tokens: int) -> float:
        """What a layer's keys and values of all heads here cost a prefill pass that makes them of latent rows: the
        product with `kv_b_proj` at absorb's rate, then they are written in BF16, and read."""
        rates, dims = self.rates.modes[Mode.ABSORB], self.dims
        macs = dims.kv_lora_rank * (dims.qk_nope_head_dim + dims.v_head_dim)
        per_head = macs / rates.macs_per_s + 2 * 2 * dims.naive_macs / rates.bytes_per_s  # as many values as products
        return tokens * self.local_heads * per_head

    def work_seconds(self, mode: Mode, group_size: int, tokens: int, step_tokens: int = 0) -> float:
        """The part of `seconds` that grows with the tokens.

        Args:
            step_tokens: distinct tokens that all groups of a step share, which have to fit in the L2 cache together;
                by default those of this group alone.
        """
        return tokens * self.token_seconds(mode, group_size, self.exceeds_l2(tokens, step_tokens))

    def exceeds_l2(self, tokens: int, step_tokens: int) -> bool:
        """Whether the L2 cache does not hold the latent rows of so many tokens."""
        return max(tokens, step_tokens) > self._l2_tokens

    def token_seconds(self, mode: Mode, group_size: int, from_memory: bool) -> float:
        """What a token costs of `work_seconds`.

        Args:
            from_memory: whether plain absorb reads it once per request from memory.
        """
        work = self._work[mode]
        if mode is Mode.ABSORB:
            group_size = self._own(group_size)
        read_s, matrix_s = work.read_s, -(-group_size * work.rows // work.tile) * work.tile_s
        if mode is Mode.ABSORB and from_memory:
            read_s *= group_size
        return read_s if read_s > matrix_s else matrix_s

    def launch_seconds(self, mode: Mode, rows: int) -> float:
        """What a mode costs a step beyond work and segments, if `rows` of its requests attend in it at all: a launch
        more than plain absorb has. `seconds` of one group is its work, one segment, and this."""
        more = self.overhead_seconds(mode, rows) - self.overhead_seconds(Mode.ABSORB, rows)
        return more - self.segment_seconds(mode, rows)

    def segment_seconds(self, mode: Mode, group_size: int) -> float:
        """What a segment costs its requests beyond its work, where the launches are there: its items, and one partial
        for each row and head, written once and read once by the merge."""
        work = self._work[mode]
        return work.segment_s + group_size * work.partials_s

    def tail_rows(self, group_size: int) -> int:
        """Rows that plain absorb computes over the private tails of a group: heads of all query tokens of a request,
        padded to whole tiles."""
        return group_size * _round_up(self.local_heads * self.query_tokens, self.rates.modes[Mode.ABSORB].row_tile)

    def best_mode(
        self, group_size: int, tokens: int, allowed: Collection[Mode] = (Mode.ABSORB, Mode.GROUPED_ABSORB, Mode.NAIVE)
    ) -> Mode:
        """The cheapest allowed mode; plain absorb for a group of one or an empty prefix, whatever is allowed."""
        if group_size < 2 or tokens == 0:
            return Mode.ABSORB
        candidates = [mode for mode in _PREFERENCE if mode in allowed]
        if not candidates:
            raise ValueError("no mode is allowed")
        return min(candidates, key=lambda mode: self.seconds(mode, group_size, tokens))

    def smallest_profitable_group(
        self, tokens: int, allowed: Collection[Mode] = (Mode.ABSORB, Mode.NAIVE), limit: int = 4096
    ) -> int | None:
        """The smallest group, of at most `limit`, that plain absorb is not cheapest for; None if there is none."""
        for group_size in range(2, limit + 1):
            if self.best_mode(group_size, tokens, allowed) is not Mode.ABSORB:
                return group_size
        return None

    def threshold_batch(self) -> float:
        """TyphoonMLA's equation 1: the batch of a rank from which reading the expanded prefix beats absorb's MACs.

        The paper counts memory in words; here it is bytes, so the size of an element appears. The equation counts the
        rotary part of K once per head and no overhead; decisions are made with `smallest_profitable_group`, which
        counts both correctly. It divides by the query tokens of a request, and by the ranks that read a part each.
        """
        rate = self.rates.modes[Mode.ABSORB].matrix_rate(self.latent_element_bytes)
        bandwidth = self.rates.modes[Mode.NAIVE].bytes_per_s
        bytes_per_key = self.dims.naive_macs * self.expanded_element_bytes
        return bytes_per_key / (self.query_tokens * self.ranks * self.dims.absorb_macs) * rate / bandwidth

    @functools.cached_property
    def _l2_tokens(self) -> int:
        """Latent rows that the L2 cache holds."""
        return self.rates.l2_bytes // self.latent_row_bytes

    @functools.cached_property
    def _work(self) -> dict[Mode, _Work]:
        """Of each mode; a plan asks thousands of times."""
        return {mode: self._work_of(mode) for mode in self.rates.modes}

    def _work_of(self, mode: Mode) -> _Work:
        rates, dims, heads = self.rates.modes[mode], self.dims, self.local_heads
        rows, tile, tile_heads, per_key = heads * self.query_tokens, rates.row_tile, 1, dims.absorb_macs
        element_bytes, partial_bytes = self.latent_element_bytes, dims.kv_lora_rank * 2
        if mode is Mode.NAIVE:
            heads = self.expanded_heads
            padding = _power_of_two(dims.qk_nope_head_dim) - dims.qk_nope_head_dim  # of the kernels' blocks
            rows, tile_heads, per_key = self.query_tokens, heads, dims.naive_macs + padding
            element_bytes, partial_bytes = self.expanded_element_bytes, dims.v_head_dim * 4
        tile_s = tile * tile_heads * per_key / rates.matrix_rate(element_bytes)
        if mode is Mode.GROUPED_ABSORB:
            heads = _round_up(heads, _STRIP_ROWS)
            rows = heads * self.query_tokens
        if mode is Mode.ABSORB:  # no tile has rows of two requests
            rows, tile = _round_up(rows, tile) // tile, 1
        return _Work(
            read_s=self.bytes_read(mode, 1, 1) / rates.bytes_per_s,
            tile_s=tile_s,
            rows=rows,
            tile=tile,
            segment_s=rates.segment_s,
            partials_s=2 * self.query_tokens * heads * partial_bytes / rates.bytes_per_s,
        )


class _Work(NamedTuple):
    """What a mode's work consists of.

    Attributes:
        read_s: to read a token's keys and values once.
        tile_s: of the matrix units, for a token and the rows of a tile.
        rows: of a request; tile: so many of them are computed as one, those of several requests together.
        segment_s: of a segment beyond that; partials_s: of the partials of a request in it.
    """

    read_s: float
    tile_s: float
    rows: int
    tile: int
    segment_s: float
    partials_s: float


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

"""Products and bytes of each way of attending to a shared prefix in a layer, and the requests from which on it pays.

For a group of `B` requests of `W` query tokens (1, or more in a step that verifies drafts), `H` local heads and `L`
prefix tokens (DeepSeek-V3's dimensions; the code takes any):

| mode           | MACs         | elements read      |
|----------------|--------------|--------------------|
| absorb         | B·W·H·L·1088 | B·L·576            |
| grouped_absorb | B·W·H·L·1088 | L·576              |
| naive          | B·W·H·L·320  | L·H·256 + L·64     |
"""

from __future__ import annotations

from collections.abc import Collection

from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.segment import Mode

PREFERENCE = (Mode.ABSORB, Mode.GROUPED_ABSORB, Mode.NAIVE)
"""Modes in the order of the preparation that they need; ties go to the earlier one."""


def macs(cost: CostModel, mode: Mode, group_size: int, tokens: int) -> int:
    """Useful MACs of a group's attention to `tokens` prefix tokens."""
    naive = mode is Mode.NAIVE
    heads = group_size * cost.expanded_heads if naive else cost.own(group_size) * cost.local_heads
    return cost.query_tokens * heads * tokens * (cost.dims.naive_macs if naive else cost.dims.absorb_macs)


def bytes_read(cost: CostModel, mode: Mode, group_size: int, tokens: int) -> int:
    """Bytes of keys and values that the kernel loads; plain absorb loads the same rows once per request.

    A request's query rows may take several tiles, which run at the same time: the L2 cache serves all but one.
    """
    if mode is Mode.NAIVE:
        return tokens * cost.expanded_token_bytes
    readers = cost.own(group_size) if mode is Mode.ABSORB else 1
    return readers * tokens * cost.latent_row_bytes


def best_mode(cost: CostModel, group_size: int, tokens: int, allowed: Collection[Mode] = PREFERENCE) -> Mode:
    """The cheapest allowed mode; plain absorb for a group of one or an empty prefix, whatever is allowed."""
    if group_size < 2 or tokens == 0:
        return Mode.ABSORB
    candidates = [mode for mode in PREFERENCE if mode in allowed]
    if not candidates:
        raise ValueError("no mode is allowed")
    return min(candidates, key=lambda mode: cost.seconds(mode, group_size, tokens))


def smallest_profitable_group(
    cost: CostModel, tokens: int, allowed: Collection[Mode] = (Mode.ABSORB, Mode.NAIVE), limit: int = 4096
) -> int | None:
    """The smallest group, of at most `limit`, that plain absorb is not cheapest for; None if there is none."""
    for group_size in range(2, limit + 1):
        if best_mode(cost, group_size, tokens, allowed) is not Mode.ABSORB:
            return group_size
    return None


def threshold_batch(cost: CostModel) -> float:
    """TyphoonMLA's equation 1: the batch of a rank from which reading the expanded prefix beats absorb's MACs.

    The paper counts memory in words; here it is bytes, so the size of an element appears. The equation counts the
    rotary part of K once per head and no overhead; decisions are made with `smallest_profitable_group`, which
    counts both correctly. It divides by the query tokens of a request, and by the ranks that read a part each.
    """
    rate = cost.rates.modes[Mode.ABSORB].matrix_rate(cost.latent_element_bytes)
    bandwidth = cost.rates.modes[Mode.NAIVE].bytes_per_s
    bytes_per_key = cost.dims.naive_macs * cost.expanded_element_bytes
    return bytes_per_key / (cost.query_tokens * cost.ranks * cost.dims.absorb_macs) * rate / bandwidth

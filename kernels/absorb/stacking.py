"""Number of requests whose query rows share a tile.

Plain Python, so that a command line can ask without loading the kernels.
"""

from __future__ import annotations

TILE_ROWS = 64
"""Query rows of a tile: what Hopper's matrix unit multiplies at once."""

STRIP_ROWS = 8
"""Query rows that are copied at once, at least: as many as the pattern takes in which shared memory is swizzled."""

STACKED_HEADS = range(1, 33)
"""Local heads with which requests are stacked: with more a request fills a tile alone."""


def padded_heads(heads: int) -> int:
    """Rows of a query token among stacked ones: its heads, up to a whole strip."""
    return -(-heads // STRIP_ROWS) * STRIP_ROWS


def rows_per_tile(heads: int) -> int | None:
    """Requests whose rows fit one tile together, for this number of local heads; None where they are not stacked. (A
    request whose rows do not all fit goes on in the next tile.)"""
    return TILE_ROWS // padded_heads(heads) if heads in STACKED_HEADS else None

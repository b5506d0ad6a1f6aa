"""How many requests a tile of query rows takes.

Plain Python, so that a command line can ask without loading the kernels.
"""

from __future__ import annotations

TILE_ROWS = 64
"""Query rows of a tile: what Hopper's matrix unit multiplies at once."""

STACKED_HEADS = (8, 16, 32)
"""Local heads with which requests are stacked: with fewer no kernel exists, with more a request fills a tile alone."""


def rows_per_tile(heads: int) -> int | None:
    """Requests whose heads fill one tile together, for this number of local heads; None where they are not stacked."""
    return TILE_ROWS // heads if heads in STACKED_HEADS else None

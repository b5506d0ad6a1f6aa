"""Tiles of the naive kernels: which of them a graph launches, and which of these a plan is made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_mla_ext.segment import Segment

BUSY_ROWS = 128
"""Rows that keep a multiprocessor busy: while half of them are in their softmax, the other half multiplies."""

OTHERS_COST = 1.03
"""Factor by which whole tiles of another kind take longer, at most, than those of `BUSY_ROWS` in one program. On an
H200, 128 heads: two narrow FP8 programs side by side 0 to 2 %, 192 rows in BF16, with smaller key tiles, 2 %."""


@dataclass(frozen=True)
class Tile:
    """Block sizes and launch parameters of a kernel."""

    block_rows: int = 64
    block_keys: int = 64
    num_warps: int = 4
    num_stages: int = 3
    ctas_per_sm: int = 1

    @property
    def rows_in_flight(self) -> int:
        """Rows that are computed at once on a multiprocessor."""
        return self.block_rows * self.ctas_per_sm


LARGEST_TILE = Tile(block_rows=192)
"""Tile with the most rows in flight: no default tile of a kernel has more."""


def launched_tiles(rows: int, tiles: Sequence[Tile]) -> tuple[Tile, ...]:
    """Tiles of which a plan for so many rows may need one, and so all that a graph launches: one that the plan does not
    use costs about 2 us.

    Args:
        rows: of the batch.
        tiles: of the kernel, smallest first.
    Returns:
        The smallest that holds all rows, else the largest, and those below it that keep a multiprocessor as busy.
    """
    widest = next((tile for tile in tiles if tile.block_rows >= rows), tiles[-1])
    busy = min(BUSY_ROWS, widest.rows_in_flight)
    return tuple(
        tile
        for tile in tiles
        if tile is widest or (tile.block_rows < widest.block_rows and tile.rows_in_flight >= busy)
    )


def best_tile(segments: Sequence[Segment], tiles: Sequence[Tile]) -> Tile:
    """The tile that pads the rows of the segments least, among `launched_tiles`."""
    plain = max(
        (tile for tile in tiles if tile.block_rows <= BUSY_ROWS), key=lambda tile: tile.block_rows, default=None
    )

    def work(tile: Tile) -> float:
        padded = sum(-(-len(segment.rows) // tile.block_rows) * segment.tokens for segment in segments)
        return padded * tile.block_rows * (1.0 if tile is plain else OTHERS_COST)

    return min(reversed(tiles), key=work)

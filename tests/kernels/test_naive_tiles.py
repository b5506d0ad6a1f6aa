"""Which tiles of the naive kernel a graph launches, and which a plan is made for."""

from __future__ import annotations

import torch

from sglang_mla_ext.kernels.naive.sm90_naive import TILES
from sglang_mla_ext.kernels.naive.tiles import LARGEST_TILE, best_tile, launched_tiles
from sglang_mla_ext.segment import Mode, Segment


def test_which_tiles_are_launched_and_planned_for() -> None:
    """In BF16 on Hopper. A batch of up to 128 rows launches one kernel."""
    one, two, three = TILES[torch.bfloat16]
    for rows, launched in ((1, [one]), (65, [two]), (128, [two]), (129, [two, three]), (2048, [two, three])):
        assert list(launched_tiles(rows, TILES[torch.bfloat16])) == launched
    for sizes, best in (([192], three), ([130, 190], three), ([256], two), ([512], two), ([384], two), ([20], two)):
        segments = [Segment(tuple(range(rows)), 0, 100, Mode.NAIVE, (0, 1)) for rows in sizes]
        assert best_tile(segments, (two, three)) == best
    assert all(tile.rows_in_flight <= LARGEST_TILE.rows_in_flight for tiles in TILES.values() for tile in tiles)

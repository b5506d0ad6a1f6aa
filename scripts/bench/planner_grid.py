"""Times of every mode on a grid of cases, against which the cost model's choices are judged (`calibrate.py --check`).

A mode's time is all of decode attention: absorb in one call of FlashMLA over prefix and tail; naive over the prefix,
FlashMLA over the tail, and the merge; grouped absorb with its merge, where a server takes it. Latent rows are BF16,
expanded prefixes BF16 or FP8. planner_verdicts.py judges the choices from these times.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.cases import Case
from bench.grouped import grouped_absorb
from bench.records import write_record
from bench.rivals import flashmla_bf16
from bench.shared import DTYPES, STORAGE, our_part
from bench.timing import attempt, free_memory, measure
from sglang_mla_ext.kernels.absorb.stacking import STACKED_HEADS
from sglang_mla_ext.kernels.naive.tiles import Tile, best_tile, launched_tiles
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates
from sglang_mla_ext.segment import Mode, Segment

TAIL = 512
HEADS = (128, 64, 16)
PREFIXES = (1024, 4759, 7069, 26472)
BATCHES = (2, 4, 8, 16, 32, 64, 128, 256, 512)

Tiles = Mapping[str, Sequence[Tile]]
"""The naive kernel's tiles by dtype, that for the fewest rows first; without an entry the kernel's default is used."""

CHECKED: dict[Mode, Callable[[Case, str, Tile | None], Callable[[], Any]]] = {
    Mode.ABSORB: lambda case, dtype, tile: flashmla_bf16(case),
    Mode.GROUPED_ABSORB: lambda case, dtype, tile: grouped_absorb(case),
    Mode.NAIVE: lambda case, dtype, tile: our_part(case, dtype, "all", tile),
}
"""Makes the call that is timed, for a case, the dtype of the expanded prefix and the naive kernel's tile."""


def tiles_of(rates: GpuRates) -> Tiles:
    """The tiles of a configuration."""
    return {dtype: [Tile(**tile) for tile in rates.naive_tiles.get(name, ())] for dtype, name in STORAGE.items()}


def tile_of(tiles: Tiles, dtype: str, rows: int) -> Tile | None:
    """The tile for a batch of this many rows in one segment; None for the kernel's default."""
    if not tiles.get(dtype):
        return None
    return best_tile([Segment(tuple(range(rows)), 0, 1, Mode.NAIVE, (0,))], launched_tiles(rows, tiles[dtype]))


def check(rates: GpuRates, rep_ms: int, path: Path | None) -> tuple[list[dict[str, Any]], bool]:
    """Time the grid with the tiles of these rates, and append a record for each case to the file.

    Returns:
        `case` and `ms` of each case, and whether everything could be measured.
    """
    tiles, records, complete = tiles_of(rates), [], True

    def timed(mode: Mode, case: Case, dtype: str) -> dict[str, float]:
        tile = tile_of(tiles, dtype, case.batch)
        metrics = attempt(
            f"{mode.value} {dtype} {case}", lambda: measure(CHECKED[mode](case, dtype, tile), rep_ms, work=None)
        )
        return {mode.value: metrics["ms"]} if metrics else {}

    for heads, prefix in itertools.product(HEADS, PREFIXES):
        print(f"{heads} heads, {prefix:,} tokens", flush=True)
        for batch in BATCHES:
            case = Case(prefix, TAIL, heads, (batch,))
            latent: dict[str, float] = {}  # modes that do not read expanded prefixes: timed once for both dtypes
            modes = [mode for mode in CHECKED if mode is not Mode.GROUPED_ABSORB or heads in STACKED_HEADS]
            for mode in modes:
                latent |= timed(mode, case, "bf16") if mode is not Mode.NAIVE else {}
            for dtype in DTYPES:
                ms = latent | timed(Mode.NAIVE, case, dtype)
                complete &= len(ms) == len(modes)
                if ms:
                    fields = dict(prefix=prefix, tail=TAIL, heads=heads, batch=batch, dtype=dtype)
                    records.append({"case": fields, "ms": ms})
                    if path:
                        write_record(path, bench="planner", impl="hybrid_mla", **records[-1])
        free_memory()
    return records, complete

"""Rates that a GPU reaches in each mode: data, `configs/gpus/*.json`, each with a note on what was measured."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_mla_ext.configs import FALLBACK_GPU, gpu_config_of, read_config_or_file
from sglang_mla_ext.segment import Mode

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModeRates:
    """Rates that a mode's kernel reaches on one GPU.

    Attributes:
        bytes_per_s: memory bandwidth when memory bounds the kernel.
        macs_per_s: MAC rate on BF16 data when the matrix units bound it (twice this is the usual FLOPS).
        fp8_macs_per_s: the same on FP8 data; None where it was not measured.
        overhead_s, overhead_per_root_row_s: time beyond the mode's work: the first, plus the second times the square
            root of the tails' rows (requests times heads, padded as plain absorb pads them). It is the time of the
            launches that the mode adds to those for the tails, the merge included. Where the file's source says that
            overheads were fitted to choices, only their differences between modes mean anything.
        row_tile: rows of the matrix units' smallest tile; fewer rows cost as much as this many.
        segment_s: time of one more segment of a step beyond its work and its partials: of the items that it is cut
            into.
        measured: whether the rates were measured with this mode's kernel. Mode `auto` never chooses a mode whose rates
            are assumed.
    """

    bytes_per_s: float
    macs_per_s: float
    fp8_macs_per_s: float | None
    overhead_s: float
    row_tile: int
    overhead_per_root_row_s: float = 0.0
    segment_s: float = 0.0
    measured: bool = True

    def matrix_rate(self, element_bytes: int) -> float:
        """MACs per second on elements of this size."""
        if element_bytes == 1 and self.fp8_macs_per_s is not None:
            return self.fp8_macs_per_s
        return self.macs_per_s


@dataclass(frozen=True)
class ExchangeRates:
    """Cost of the exchange between ranks with sharded prefixes, in a layer: queries go to the ranks that have the
    heads, results come back.

    Attributes:
        overhead_s: of both exchanges and of the launches around them, as far as tails do not hide it.
        bytes_per_s: out of a GPU.
    """

    overhead_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class PassRates:
    """Time of a prefill pass beside attention, a layer.

    Attributes:
        eager_layer_s: without CUDA graphs: the host's launches; infinite without a GPU, where passes never leave a
            graph, because there are none.
        graph_layer_s: in a graph: the weights read; used where it is not predicted.
        range_s: launches for a range that a pass expands for itself.
    """

    eager_layer_s: float = 0.0
    graph_layer_s: float = 0.0
    range_s: float = 0.0

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> PassRates:
        """Read them as they stand in a file of rates."""
        eager = math.inf if values["eager_layer_s"] is None else float(values["eager_layer_s"])
        return cls(eager, float(values["graph_layer_s"]), float(values["range_s"]))


@dataclass(frozen=True)
class GpuRates:
    """Rates of one GPU, by mode.

    Attributes:
        name: for people to read.
        l2_bytes: size of the L2 cache; shared latent rows that fit in it are read from memory once, however many
            requests read them.
        source: what was measured, when and how, or what the numbers are derived from.
        naive_tiles: the naive kernel's fastest tiles by storage of the expanded prefix (`bf16`, `fp8_e4m3`), in
            ascending order of rows; each has the fields of the kernel's `Tile`. Empty where none were measured.
        exchange: between ranks with sharded prefixes, by NCCL; None where it is not known, and counted as free.
        exchange_by_stores: the same by stores into each other's memory; None where it is not known.
        passes: of prefill; of a file without them those of FALLBACK_GPU.
    """

    name: str
    l2_bytes: int
    modes: Mapping[Mode, ModeRates]
    source: str
    naive_tiles: Mapping[str, tuple[Mapping[str, int], ...]] = field(default_factory=dict)
    exchange: ExchangeRates | None = None
    exchange_by_stores: ExchangeRates | None = None
    passes: PassRates = PassRates()

    def by_stores(self) -> GpuRates:
        """The same for ranks that exchange by stores, as by NCCL where that is not known."""
        return replace(self, exchange=self.exchange_by_stores or self.exchange)

    @classmethod
    def from_json(cls, name_or_path: str | Path) -> GpuRates:
        """Read the rates of a shipped GPU by name (`h200`), or of a file of the same form."""
        config = read_config_or_file("gpus", name_or_path)

        def mode_rates(values: Mapping[str, Any]) -> ModeRates:
            fp8 = values.get("fp8_macs_per_s")
            return ModeRates(
                bytes_per_s=float(values["bytes_per_s"]),
                macs_per_s=float(values["macs_per_s"]),
                fp8_macs_per_s=None if fp8 is None else float(fp8),
                overhead_s=float(values["overhead_s"]),
                row_tile=int(values["row_tile"]),
                overhead_per_root_row_s=float(values.get("overhead_per_root_row_s", 0.0)),
                segment_s=float(values.get("segment_s", 0.0)),
                measured=bool(values.get("measured", True)),
            )

        exchanges = {
            name: ExchangeRates(float(values["overhead_s"]), float(values["bytes_per_s"]))
            for name in ("exchange", "exchange_by_stores")
            if (values := config.get(name)) is not None
        }
        return cls(
            name=str(config["name"]),
            l2_bytes=int(config["l2_bytes"]),
            modes={mode: mode_rates(config["modes"][mode.value]) for mode in Mode},
            source=str(config["source"]),
            naive_tiles={
                storage: tuple({name: int(value) for name, value in tile.items()} for tile in tiles)
                for storage, tiles in config["modes"][Mode.NAIVE.value].get("tiles", {}).items()
            },
            passes=PassRates.from_config(config.get("passes") or read_config_or_file("gpus", FALLBACK_GPU)["passes"]),
            **exchanges,
        )


def rates_for(device_name: str) -> GpuRates:
    """Rates of a device, by the name that torch gives it.

    An unknown device gets the H100's rates and a warning: the choice of modes may then be poor, but answers stay the
    same.
    """
    if (name := gpu_config_of(device_name)) is not None:
        return GpuRates.from_json(name)
    logger.warning(
        "hybrid_mla: no measured rates for device %r; modes are chosen with those of %s", device_name, FALLBACK_GPU
    )
    return GpuRates.from_json(FALLBACK_GPU)

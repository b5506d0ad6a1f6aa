"""What each way of attending to a shared prefix costs, per layer, and which one is cheapest.

For a group of `B` requests of `W` query tokens (1, or more in a step that verifies drafts), `H` local heads and `L`
prefix tokens (DeepSeek-V3's dimensions; the code takes any):

| mode           | MACs         | elements read      |
|----------------|--------------|--------------------|
| absorb         | B·W·H·L·1088 | B·L·576            |
| grouped_absorb | B·W·H·L·1088 | L·576              |
| naive          | B·W·H·L·320  | L·H·256 + L·64     |

The time of a mode is the larger of its memory time and its matrix time, plus the overhead of its launches. Rates are
data: `configs/gpus/*.json`, each with a note on what was measured. This module imports neither torch nor SGLang.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sglang_mla_ext.configs import FALLBACK_GPU, gpu_config_of, read_config_or_file
from sglang_mla_ext.segment import Mode

logger = logging.getLogger(__name__)

# Query rows that grouped absorb stacks at once, at least: kernels/absorb/stacking.py.
_STRIP_ROWS = 8

# Bytes of an FP8 latent row for its scale: a float32, padded to 16 bytes.
_FP8_LATENT_SCALE_BYTES = 16


# In the order of preparation that they need; ties go to the earlier one.
_PREFERENCE = (Mode.ABSORB, Mode.GROUPED_ABSORB, Mode.NAIVE)


@dataclass(frozen=True)
class ModelDims:
    """Dimensions of an MLA model that attention depends on.

    Attributes:
        num_layers: attention layers; more than the decoder blocks where a block has two.
        num_heads: query heads of the whole model, before tensor parallelism.
    """

    num_layers: int
    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    hidden_size: int

    @classmethod
    def from_json(cls, name_or_path: str | Path) -> ModelDims:
        """Read a shipped model by name (`deepseek-v3`), or a Hugging Face `config.json`, or the folder with one."""
        path = Path(name_or_path)
        if path.is_dir():
            path = path / "config.json"
        return cls.from_config(read_config_or_file("models", path))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelDims:
        """Take the dimensions from a shipped model configuration or from a Hugging Face one.

        Raises:
            ValueError: the model is not an MLA model.
        """

        def get(*keys: str) -> int:
            for key in keys:
                if config.get(key) is not None:
                    return int(config[key])
            raise ValueError(f"not an MLA model's configuration: it has no {' or '.join(keys)}")

        return cls(
            num_layers=get("num_attention_layers", "num_hidden_layers", "num_layers"),
            num_heads=get("num_attention_heads"),
            kv_lora_rank=get("kv_lora_rank"),
            qk_nope_head_dim=get("qk_nope_head_dim"),
            qk_rope_head_dim=get("qk_rope_head_dim"),
            v_head_dim=get("v_head_dim"),
            hidden_size=get("hidden_size"),
        )

    @property
    def latent_dim(self) -> int:
        """Elements of a latent row: 576 for DeepSeek-V3."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def absorb_macs(self) -> int:
        """MACs of absorb per query row, head and key: 1088 for DeepSeek-V3."""
        return self.latent_dim + self.kv_lora_rank

    @property
    def naive_macs(self) -> int:
        """MACs of naive per query row, head and key: 320 for DeepSeek-V3."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim


@dataclass(frozen=True)
class ModeRates:
    """What a mode's kernel reaches on one GPU.

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
    """What ranks pay to attend for each other, in a layer: queries to those that have the heads, results back.

    Attributes:
        overhead_s: of both exchanges and of the launches around them, as far as tails do not hide it.
        bytes_per_s: out of a GPU.
    """

    overhead_s: float
    bytes_per_s: float


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
        exchange: between ranks that hold prefixes together; None where it is not known, and taken for nothing.
    """

    name: str
    l2_bytes: int
    modes: Mapping[Mode, ModeRates]
    source: str
    naive_tiles: Mapping[str, tuple[Mapping[str, int], ...]] = field(default_factory=dict)
    exchange: ExchangeRates | None = None

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

        exchange = config.get("exchange")
        return cls(
            name=str(config["name"]),
            l2_bytes=int(config["l2_bytes"]),
            modes={mode: mode_rates(config["modes"][mode.value]) for mode in Mode},
            source=str(config["source"]),
            naive_tiles={
                storage: tuple({name: int(value) for name, value in tile.items()} for tile in tiles)
                for storage, tiles in config["modes"][Mode.NAIVE.value].get("tiles", {}).items()
            },
            exchange=None
            if exchange is None
            else ExchangeRates(float(exchange["overhead_s"]), float(exchange["bytes_per_s"])),
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


@dataclass(frozen=True)
class CostModel:
    """Costs of one layer's attention to a shared prefix.

    Attributes:
        local_heads: query heads on this GPU.
        expanded_element_bytes: bytes per element of the expanded prefix: 4, 2 or 1.
        latent_element_bytes: bytes per element of a latent row: 4, 2 or 1. Rotary elements take at least 2 in both.
        queries: query tokens of a request in a step. Groups are counted in requests; each has so many rows.
        ranks: that hold expanded prefixes together, each with its part of the heads, and attend to them for the
            requests of all. Groups are of all ranks then, which are taken to have as many requests each; and what
            absorb costs is that of one rank's.
    """

    dims: ModelDims
    local_heads: int
    rates: GpuRates
    expanded_element_bytes: int = 2
    latent_element_bytes: int = 2
    queries: int = 1
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
        return self.queries * heads * tokens * (self.dims.naive_macs if naive else self.dims.absorb_macs)

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
        heads = self._own(group_size) * self.queries * (self.local_heads - self.expanded_heads)
        return rates.overhead_s + 2 * heads * self.dims.naive_macs / rates.bytes_per_s  # as many values as products

    def work_seconds(self, mode: Mode, group_size: int, tokens: int, step_tokens: int = 0) -> float:
        """The part of `seconds` that grows with the tokens.

        Args:
            step_tokens: distinct tokens that all groups of a step share, which have to fit in the L2 cache together;
                by default those of this group alone.
        """
        work = self._work[mode]
        if mode is Mode.ABSORB:
            group_size = self._own(group_size)
        read_s, matrix_s = work.read_s, -(-group_size * work.rows // work.tile) * work.tile_s
        if mode is Mode.ABSORB and (tokens > self._l2_tokens or step_tokens > self._l2_tokens):
            read_s *= group_size
        return tokens * (read_s if read_s > matrix_s else matrix_s)

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
        return group_size * _round_up(self.local_heads * self.queries, self.rates.modes[Mode.ABSORB].row_tile)

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
        return bytes_per_key / (self.queries * self.ranks * self.dims.absorb_macs) * rate / bandwidth

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
        rows, tile, tile_heads, per_key = heads * self.queries, rates.row_tile, 1, dims.absorb_macs
        element_bytes, partial_bytes = self.latent_element_bytes, dims.kv_lora_rank * 2
        if mode is Mode.NAIVE:
            heads = self.expanded_heads
            padding = _power_of_two(dims.qk_nope_head_dim) - dims.qk_nope_head_dim  # of the kernels' blocks
            rows, tile_heads, per_key = self.queries, heads, dims.naive_macs + padding
            element_bytes, partial_bytes = self.expanded_element_bytes, dims.v_head_dim * 4
        tile_s = tile * tile_heads * per_key / rates.matrix_rate(element_bytes)
        if mode is Mode.GROUPED_ABSORB:
            heads = _round_up(heads, _STRIP_ROWS)
            rows = heads * self.queries
        if mode is Mode.ABSORB:  # no tile has rows of two requests
            rows, tile = _round_up(rows, tile) // tile, 1
        return _Work(
            read_s=self.bytes_read(mode, 1, 1) / rates.bytes_per_s,
            tile_s=tile_s,
            rows=rows,
            tile=tile,
            segment_s=rates.segment_s,
            partials_s=2 * self.queries * heads * partial_bytes / rates.bytes_per_s,
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

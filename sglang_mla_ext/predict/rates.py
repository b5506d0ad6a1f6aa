"""What a GPU's file of rates (`configs/gpus`) says beyond attention's kernels: its data sheet, the rest of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_mla_ext.configs import device_words, gpu_config_of, read_config_or_file
from sglang_mla_ext.prefix.gpu_rates import GpuRates
from sglang_mla_ext.segment import Mode

NOT_HOPPER = frozenset({"a100", "a800", "l40s", "b100", "b200", "b300", "gb200", "gb300"})
"""GPUs that people ask for, and that the extension does not run on."""


@dataclass(frozen=True)
class DataSheet:
    """A GPU's data sheet.

    Attributes:
        bytes_per_s: of its memory.
        bf16_flops, fp8_flops: dense, two operations for each MAC; None where there are no FP8 matrix units.
        memory_bytes: as the driver reports it.
        link_bytes_per_s: to other GPUs of the host, in one direction.
    """

    bytes_per_s: float
    bf16_flops: float
    fp8_flops: float | None
    memory_bytes: int
    link_bytes_per_s: float

    def flops(self, element_bytes: float) -> float:
        """Operations per second on elements of about this size; 4-bit weights are multiplied in BF16."""
        return self.fp8_flops if self.fp8_flops is not None and 1 <= element_bytes < 2 else self.bf16_flops


@dataclass(frozen=True)
class StepRates:
    """The constants of a decode step beyond the work of attention's kernels (`scripts/calibrate_step.py`).

    Attributes:
        bytes_per_s: at which products read their weights.
        macs_per_s: of products on BF16 data; on FP8 data in the data sheet's proportion.
        product_s: of a product, beside the larger of its two times.
        layer_s: of all other launches of a layer: norms, rotary embedding, activation.
        experts_s: of a layer with experts, beside its products: what the router's output takes (top-k, rows sorted by
            expert and summed up again), activations made FP8 before each product, and what products of experts take
            beyond reading their weights.
        step_s: of a step: sampling, schedules, and the GPU's wait for the host's next launch.
        attention_s, attention_row_s: by mode, of attention in one layer beside its work: the launches, merges included;
            and that for each row and head.
        padding: time of a row of zeros that fills FlashMLA's tiles, as a share of a request's row.
        source: from which records.
    """

    bytes_per_s: float
    macs_per_s: float
    product_s: float
    layer_s: float
    experts_s: float
    step_s: float
    attention_s: Mapping[Mode, float]
    attention_row_s: Mapping[Mode, float]
    padding: float
    source: str

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> StepRates:
        """Of a file's entry `step`."""
        of_modes = values["attention"]
        names = ("bytes_per_s", "macs_per_s", "product_s", "layer_s", "experts_s", "step_s")
        return cls(
            **{name: float(values[name]) for name in names},
            attention_s={mode: float(of_modes[mode.value]["launches_s"]) for mode in Mode},
            attention_row_s={mode: float(of_modes[mode.value]["row_s"]) for mode in Mode},
            padding=float(of_modes["padding"]),
            source=str(values["source"]),
        )

    @property
    def derived(self) -> bool:
        """Whether they are another GPU's, in proportion."""
        return self.source.startswith("DERIVED")


@dataclass(frozen=True)
class Gpu:
    """All that is known of a GPU.

    Attributes:
        sheet, step: None where there is none (a CPU): attention alone can be predicted.
    """

    key: str
    rates: GpuRates
    sheet: DataSheet | None
    step: StepRates | None

    @classmethod
    def named(cls, name: str) -> Gpu:
        """A GPU as people name it (`H200`, `NVIDIA H800`), or a file of rates.

        Raises:
            ValueError: it is not known, or the extension does not run on it.
        """
        if Path(name).suffix == ".json":
            return cls.from_json(name)
        if NOT_HOPPER.intersection(device_words(name)):
            raise ValueError(
                f"the extension does not run on {name}: FlashMLA needs a Hopper GPU (H100, H200, H800, H20)"
            )
        return cls.from_json(gpu_config_of(name) or name)

    @classmethod
    def from_json(cls, name_or_path: str | Path) -> Gpu:
        """Read a shipped GPU by name (`h200`), or a file of the same form."""
        config = read_config_or_file("gpus", name_or_path)
        sheet, step = config.get("datasheet"), config.get("step")
        return cls(
            key=Path(name_or_path).stem,
            rates=GpuRates.from_json(name_or_path),
            sheet=None if sheet is None else DataSheet(**sheet),
            step=None if step is None else StepRates.from_config(step),
        )

    @property
    def derived(self) -> bool:
        """Whether nobody measured its rates."""
        return self.rates.source.startswith("DERIVED")

"""Rates of a GPU beyond attention's kernels, from its file (`configs/gpus`): its data sheet, the rest of a step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_mla_ext.configs import (
    FALLBACK_GPU,
    config_names,
    device_words,
    did_you_mean,
    gpu_config_of,
    read_config,
    read_config_or_file,
)
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates
from sglang_mla_ext.segment import Mode

OTHERS = {
    "a Blackwell GPU": r"g?b[123]00a?|gb10|(rtx)?50[0-9]0|blackwell",
    "a GPU before Hopper": r"v100|t4|a10|a16|a30|a40|a100|a800|a6000|l4|l20|l40s?|rtx|(rtx)?[34]090|ada",
    "an AMD GPU": r"mi\d{2,3}[axp]?|amd|instinct|radeon",
    "no NVIDIA GPU": r"gaudi\d?|hl\d+|tpu|v5e|v6e|trainium\d?|ascend|910[bc]|xpu|npu|max\d{4}",
}
"""GPUs that people ask for, and that the extension does not run on: what each is -> words of its names. The first one
that fits counts."""

OTHER_CARDS = frozenset({"nvl", "pcie"})
"""Words that tell a card with other memory and rates from the one that is known under the same name."""

SIZE_APART = 0.08
"""Share of a card's memory by which the size in a name may differ from it, in GB or GiB."""


@dataclass(frozen=True)
class DataSheet:
    """A GPU's data sheet.

    Attributes:
        bytes_per_s: of its memory.
        bf16_flops, fp8_flops: dense, two operations for each MAC; None where there are no FP8 matrix units.
        memory_bytes: as the driver reports it.
        link_bytes_per_s: to other GPUs of the host, in one direction.
        exchange_s: of an exchange with them beside its bytes, which is an assumption.
    """

    bytes_per_s: float
    bf16_flops: float
    fp8_flops: float | None
    memory_bytes: int
    link_bytes_per_s: float
    exchange_s: float

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
        """Read a file's entry `step`."""
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
        """Return whether the rates are scaled from another GPU's."""
        return self.source.startswith("DERIVED")


@dataclass(frozen=True)
class Gpu:
    """Rates, data sheet and constants of a GPU.

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
            ValueError: it is not known, the extension does not run on it, or the file is of another form.
        """
        if Path(name).suffix == ".json":
            try:
                return cls.from_json(name)
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{name} is no file of rates, as scripts/calibrate.py writes: {error}") from None
        if (what := _unsupported(name)) is not None:
            raise ValueError(
                f"the extension does not run on {name}, {what}: FlashMLA needs a Hopper GPU (H100, H200, H800, H20)"
            )
        if (key := gpu_config_of(name)) is None:
            known = [each for each in config_names("gpus") if _unsupported(each) is None]
            meant = did_you_mean(name.lower(), {each: each for each in known}, cutoff=0.6)
            raise ValueError(f"no GPU {name!r}.{meant} Known are {', '.join(known)}; or give a file of rates")
        found = cls.from_json(key)
        if found._is_another_card(device_words(name)):
            size = "" if found.sheet is None else f" ({found.sheet.memory_bytes / (1 << 30):.0f} GiB)"
            raise ValueError(f"{name} is not known, and {found.rates.name}{size} is another card: give a file of rates")
        return found

    def _is_another_card(self, words: Sequence[str]) -> bool:
        """Return whether words of a name mean a card of another size or build than this one."""
        sizes = [float(match[1]) for word in words if (match := re.fullmatch(r"(\d+)gb?", word))]
        have = 0.0 if self.sheet is None else self.sheet.memory_bytes / 1e9
        return not OTHER_CARDS.isdisjoint(words) or any(abs(size - have) > SIZE_APART * have for size in sizes)

    @classmethod
    def from_json(cls, name_or_path: str | Path) -> Gpu:
        """Read a shipped GPU by name (`h200`), or a file of the same form."""
        config = read_config_or_file("gpus", name_or_path)
        sheet, step = config.get("datasheet"), config.get("step")
        shipped = read_config("gpus", FALLBACK_GPU)["datasheet"]  # of a file that was written before it had this
        return cls(
            key=Path(name_or_path).stem,
            rates=GpuRates.from_json(name_or_path),
            sheet=None if sheet is None else DataSheet(**{"exchange_s": shipped["exchange_s"], **sheet}),
            step=None if step is None else StepRates.from_config(step),
        )

    @property
    def derived(self) -> bool:
        """Return whether attention's rates are derived, not measured."""
        return self.rates.source.startswith("DERIVED")


def _unsupported(name: str) -> str | None:
    """Return the kind of GPU, if the extension does not run on it; None for others."""
    words = device_words(name)
    fitting = (what for what, names in OTHERS.items() if any(re.fullmatch(names, word) for word in words))
    return next(fitting, None)

"""The options of the `hybrid_mla` backend: one dataclass, its flags, its environment variables and its checks.

Each option is a command-line flag of SGLang's server and an environment variable of the same name
(`--hybrid-mla-mode` and `SGLANG_HYBRID_MLA_MODE`) for those who build an `Engine` in Python. A flag is written
to its variable, so the processes that SGLang spawns read the same values.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, fields

ENV_PREFIX = "SGLANG_HYBRID_MLA_"
MODES = ("auto", "absorb", "naive", "grouped_absorb")
PREFIX_DTYPES = ("auto", "bf16", "fp8_e4m3")
DP_ROUTINGS = ("sglang", "prefix")
PREFIX_SHARDINGS = ("off", "auto", "nccl", "peers")


class OptionError(ValueError):
    """A bad option or combination of options; the message says what to change."""


def _flag(help: str, choices: tuple[str, ...] | None = None) -> dict[str, object]:
    return {"help": help, "choices": choices}


@dataclass(frozen=True)
class HybridMLAOptions:
    """What a user can set.

    Attributes:
        prefix_memory_gb: GiB of GPU memory for expanded prefixes and our own buffers, taken out of SGLang's KV budget;
            None takes a quarter of that budget where it holds 8,192 expanded tokens, otherwise nothing
            (prefix/memory/default.py), and with 0 nothing is expanded. Buffers that are needed are taken out of it in
            any case.
        prefix_dtype: storage of expanded prefixes; `auto` follows the KV cache: the model's own dtype, so that turning
            the backend on changes answers by rounding alone, or FP8 beside an FP8 cache. `fp8_e4m3` halves memory and
            time at FP8's precision.
        min_prefix_len: prefixes shorter than this many tokens are not shared.
        mode: `auto` lets the cost model choose per group; `naive` expands every shared prefix that fits;
            `grouped_absorb` never expands, and reads the latent rows of every shared prefix once for several
            requests, where heads are few enough for that; `absorb` does neither.
        expand_tokens_per_step: the most tokens expanded before one forward pass, which bounds how long that
            pass waits.
        prefill_expand_tokens: tokens that a prefill pass expands at a time for itself, of what its requests share and
            no memory keeps expanded, and of long histories of single requests; 0 leaves that to SGLang, which expands
            it for each of them, None takes the default of the server (adapter/launch/transient_expansion.py).
        verify_interval: every so many decode or verify steps, one layer's shared attention is computed again by plain
            absorb and compared; 0 never does.
        mixed_tokens: new tokens mixed into a step with running requests, at most; 0 computes all in passes of their
            own, None takes the default of the server (adapter/launch/mixed_steps.py).
        dp_routing: with several data-parallel ranks, `prefix` keeps prompts that begin alike on one rank, until that
            is busier than the others; `sglang` leaves it to SGLang's --load-balance-method, which does not look at
            prompts.
        prefix_sharding: with DP attention, `auto` shards each expanded prefix over the ranks by heads, where that is
            supported (adapter/launch/sharded_prefixes.py): ranks exchange by stores into each other's memory
            (kernels/naive/peers.py) where the GPUs of one host reach it, else by NCCL; `nccl` and `peers` take one of
            the two; with `off` each rank holds its own prefixes with all heads.
    """

    prefix_memory_gb: float | None = field(
        default=None,
        metadata=_flag(
            "GiB for expanded shared prefixes and our own buffers, taken out of the KV cache's budget (default: a "
            "quarter of it where that holds 8,192 tokens, otherwise nothing; 0 never expands)"
        ),
    )
    prefix_dtype: str = field(
        default="auto", metadata=_flag("storage of expanded prefixes (auto: as the KV cache)", PREFIX_DTYPES)
    )
    min_prefix_len: int = field(default=256, metadata=_flag("the shortest prefix that is shared, in tokens"))
    mode: str = field(
        default="auto",
        metadata=_flag(
            "how to attend to a shared prefix: auto (cheapest by the cost model), naive (always expanded), "
            "grouped_absorb (never expanded, read once for several requests), absorb (never expanded)",
            MODES,
        ),
    )
    expand_tokens_per_step: int = field(
        default=4096, metadata=_flag("the most prefix tokens expanded before one forward pass")
    )
    prefill_expand_tokens: int | None = field(
        default=None,
        metadata=_flag(
            "tokens that a prefill pass expands at a time for itself, of what its requests share and no memory keeps "
            "expanded, in whole chunks of 256 (0: SGLang expands that for each request; default: 8192, or up to 32768 "
            "with few heads, with DP attention and where prefill runs in CUDA graphs, else 0)"
        ),
    )
    verify_interval: int = field(
        default=0,
        metadata=_flag(
            "every so many decode steps, one layer's shared attention is computed again by plain absorb and compared "
            "(0: never)"
        ),
    )
    mixed_tokens: int | None = field(
        default=None,
        metadata=_flag(
            "the most new prompt tokens computed in one decode step (mixed steps), in whole pages of 64 (0: prefill "
            "always has passes of its own; default: by the cost model, 256 to 1024 where decode runs in CUDA graphs, "
            "else 0)"
        ),
    )
    dp_routing: str = field(
        default="sglang",
        metadata=_flag(
            "which data-parallel rank a request goes to: sglang (--load-balance-method), prefix (prompts that begin "
            "alike go to one rank until it is full)",
            DP_ROUTINGS,
        ),
    )
    prefix_sharding: str = field(
        default="off",
        metadata=_flag(
            "with DP attention, shard each expanded prefix over the ranks by heads: auto (where supported), nccl or "
            "peers (exchange by NCCL, or by stores into each other's memory), off (each rank holds its own prefixes)",
            PREFIX_SHARDINGS,
        ),
    )

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise OptionError(f"--hybrid-mla-mode is {self.mode!r}; use one of {', '.join(MODES)}.")
        if self.prefix_dtype not in PREFIX_DTYPES:
            raise OptionError(
                f"--hybrid-mla-prefix-dtype is {self.prefix_dtype!r}; use one of {', '.join(PREFIX_DTYPES)}."
            )
        if self.prefix_memory_gb is not None and not 0 <= self.prefix_memory_gb < math.inf:
            raise OptionError("--hybrid-mla-prefix-memory-gb must be 0 (never expand) or more, and finite.")
        if self.min_prefix_len < 1:
            raise OptionError("--hybrid-mla-min-prefix-len must be at least 1.")
        if self.expand_tokens_per_step < 1:
            raise OptionError("--hybrid-mla-expand-tokens-per-step must be at least 1.")
        if (self.prefill_expand_tokens or 256) < 256:
            raise OptionError("--hybrid-mla-prefill-expand-tokens must be 0 (never) or at least 256, a chunk.")
        if self.verify_interval < 0:
            raise OptionError("--hybrid-mla-verify-interval must be 0 (never) or more.")
        if self.mixed_tokens is not None and self.mixed_tokens != 0 and self.mixed_tokens < 64:
            raise OptionError("--hybrid-mla-mixed-tokens must be 0 (never mix) or at least 64, a page.")
        if self.dp_routing not in DP_ROUTINGS:
            raise OptionError(f"--hybrid-mla-dp-routing is {self.dp_routing!r}; use one of {', '.join(DP_ROUTINGS)}.")
        if self.prefix_sharding not in PREFIX_SHARDINGS:
            raise OptionError(
                f"--hybrid-mla-prefix-sharding is {self.prefix_sharding!r}; use one of {', '.join(PREFIX_SHARDINGS)}."
            )

    @property
    def may_expand(self) -> bool:
        """Whether the mode lets prefixes be expanded, and there is to be memory for it."""
        return self.mode_expands and self.prefix_memory_gb != 0

    @property
    def transient_tokens(self) -> int:
        """Tokens that prefill expands at a time for itself: whole chunks of 256, 0 where the mode never expands or no
        number is named."""
        return (self.prefill_expand_tokens or 0) // 256 * 256 if self.mode_expands else 0

    @property
    def mode_expands(self) -> bool:
        """Whether the mode lets prefixes be expanded."""
        return self.mode in ("auto", "naive")

    @property
    def may_group(self) -> bool:
        """Whether the mode lets shared prefixes be attended to by grouped absorb."""
        return self.mode in ("auto", "grouped_absorb")

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> HybridMLAOptions:
        """Read the options from environment variables; those not set keep their defaults.

        Raises:
            OptionError: a value does not parse or is out of range.
        """
        env = os.environ if env is None else env
        values: dict[str, object] = {}
        for option in fields(cls):
            text = env.get(_variable(option.name), "")
            if text == "":
                continue
            try:
                values[option.name] = _PARSERS[option.name](text)
            except ValueError as error:
                raise OptionError(f"{_variable(option.name)}={text!r} does not parse: {error}.") from error
        return cls(**values)  # type: ignore[arg-type]


_PARSERS = {
    "prefix_memory_gb": float,
    "prefix_dtype": str,
    "min_prefix_len": int,
    "mode": str,
    "expand_tokens_per_step": int,
    "prefill_expand_tokens": int,
    "verify_interval": int,
    "mixed_tokens": int,
    "dp_routing": str,
    "prefix_sharding": str,
}


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each option to SGLang's own parser."""
    group = parser.add_argument_group("hybrid_mla", "Options of --attention-backend hybrid_mla (sglang-mla-ext).")
    for option in fields(HybridMLAOptions):
        group.add_argument(
            _flag_of(option.name),
            dest="hybrid_mla_" + option.name,
            type=_PARSERS[option.name],
            choices=option.metadata["choices"],
            default=None,
            help=f"{option.metadata['help']}. Also {_variable(option.name)}.",
        )


def flags_to_env(args: argparse.Namespace, env: MutableMapping[str, str] | None = None) -> None:
    """Write the flags that were given to their environment variables."""
    env = os.environ if env is None else env
    for option in fields(HybridMLAOptions):
        value = getattr(args, "hybrid_mla_" + option.name, None)
        if value is not None:
            env[_variable(option.name)] = str(value)


def given(env: Mapping[str, str]) -> list[str]:
    """Flags whose variables are set, whether by the flags or by the user."""
    return [_flag_of(option.name) for option in fields(HybridMLAOptions) if env.get(_variable(option.name))]


def _flag_of(option: str) -> str:
    return "--hybrid-mla-" + option.replace("_", "-")

"""The options of the `hybrid_mla` backend: one dataclass, its flags, its environment variables and its checks.

Each option is a command-line flag of SGLang's server and an environment variable of the same name
(`--hybrid-mla-mode` and `SGLANG_HYBRID_MLA_MODE`) for those who build an `Engine` in Python. A flag is written
to its variable, so the processes that SGLang spawns read the same values.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import field, fields
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, ValidationError
from pydantic.dataclasses import dataclass

ENV_PREFIX = "SGLANG_HYBRID_MLA_"


class OptionError(ValueError):
    """A bad option or combination of options; the message says what to change."""


def _option(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


def _must(fits: Callable[[Any], bool], words: str) -> AfterValidator:
    """Return a check of a number; words: what it must be."""

    def check(value: Any) -> Any:
        if not fits(value):
            raise ValueError(words)
        return value

    return AfterValidator(check)


Gib = Annotated[float, _must(lambda gib: 0 <= gib < math.inf, "0 (never expand) or more, and finite")]
Chunks = Annotated[int, _must(lambda tokens: tokens == 0 or tokens >= 256, "0 (never) or at least 256, a chunk")]
Pages = Annotated[int, _must(lambda tokens: tokens == 0 or tokens >= 64, "0 (never mix) or at least 64, a page")]
Interval = Annotated[int, _must(lambda steps: steps >= 0, "0 (never) or more")]
Tokens = Annotated[int, _must(lambda tokens: tokens >= 1, "at least 1")]


@dataclass(frozen=True)
class _Options:
    """Each option: its type and range, its default and what it means, as the flag's help and the docs have it."""

    prefix_memory_gb: Gib | None = _option(
        None,
        "GiB for expanded shared prefixes and our own buffers, taken out of the KV cache's budget (default: a "
        "quarter of it where that holds 8,192 of them, otherwise nothing; 0 never expands)",
    )
    prefix_dtype: Literal["auto", "bf16", "fp8_e4m3"] = _option(
        "auto", "storage of expanded prefixes (auto: as the KV cache)"
    )
    min_prefix_len: Tokens = _option(256, "the shortest prefix that is shared, in tokens")
    mode: Literal["auto", "absorb", "naive", "grouped_absorb"] = _option(
        "auto",
        "how to attend to a shared prefix: auto (cheapest by the cost model), naive (always expanded), "
        "grouped_absorb (never expanded, read once for several requests), absorb (never expanded)",
    )
    expand_tokens_per_step: Tokens = _option(4096, "the most prefix tokens expanded before one forward pass")
    prefill_expand_tokens: Chunks | None = _option(
        None,
        "tokens that a prefill pass expands at a time for itself, of what its requests share and no memory keeps "
        "expanded, in whole chunks of 256 (0: SGLang expands that for each request; default: 8192, or up to 32768 "
        "with few heads, with DP attention and where prefill runs in CUDA graphs, else 0)",
    )
    verify_interval: Interval = _option(
        0,
        "every so many decode steps, one layer's shared attention is computed again by plain absorb and compared "
        "(0: never)",
    )
    mixed_tokens: Pages | None = _option(
        None,
        "the most new prompt tokens computed in one decode step (mixed steps), in whole pages of 64 (0: prefill "
        "always has passes of its own; default: by the cost model, 256 to 1024 where decode runs in CUDA graphs, "
        "else 0)",
    )
    dp_routing: Literal["sglang", "prefix"] = _option(
        "sglang",
        "which data-parallel rank a request goes to: sglang (--load-balance-method), prefix (prompts that begin "
        "alike go to one rank until it is full)",
    )
    prefix_sharding: Literal["auto", "off", "nccl", "peers"] = _option(
        "auto",
        "with DP attention, shard each expanded prefix over the ranks by heads: auto (with more than 32 heads, by "
        "stores into each other's memory where GPUs reach it), peers (by stores, unchecked), nccl (by NCCL), off "
        "(each rank holds its own prefixes)",
    )


class HybridMLAOptions(_Options):
    """Options that a user can set."""

    def __init__(self, **given: Any) -> None:
        """
        Raises:
            OptionError: a value is of another type, or out of range.
            TypeError: there is no such option.
        """
        if unknown := given.keys() - OPTIONS.keys():
            raise TypeError(f"no option is named {', '.join(unknown)}")
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise OptionError(" ".join(map(_message, error.errors()))) from None

    @property
    def may_expand(self) -> bool:
        """Return whether the mode lets prefixes be expanded and their memory is not set to 0."""
        return self.mode_expands and self.prefix_memory_gb != 0

    @property
    def transient_tokens(self) -> int:
        """Tokens that prefill expands at a time for itself: whole chunks of 256, 0 where the mode never expands or no
        number is named."""
        return (self.prefill_expand_tokens or 0) // 256 * 256 if self.mode_expands else 0

    @property
    def mode_expands(self) -> bool:
        """Return whether the mode lets prefixes be expanded."""
        return self.mode in ("auto", "naive")

    @property
    def may_group(self) -> bool:
        """Return whether the mode allows grouped absorb over shared prefixes."""
        return self.mode in ("auto", "grouped_absorb")

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> HybridMLAOptions:
        """Read the options from environment variables; those not set keep their defaults.

        Raises:
            OptionError: a value does not parse or is out of range.
        """
        env = os.environ if env is None else env
        return cls(
            **{option.name: env[option.variable] for option in OPTIONS.values() if env.get(option.variable, "") != ""}
        )


class Option(NamedTuple):
    """One option.

    Attributes:
        kind: what its text is parsed to; choices: the values there are, None for any of this kind.
    """

    name: str
    kind: type
    choices: tuple[str, ...] | None
    default: Any
    help: str

    @property
    def flag(self) -> str:
        return "--hybrid-mla-" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()


def _all_options() -> Iterator[Option]:
    hints = get_type_hints(_Options)  # without what Annotated adds
    for each in fields(_Options):
        hint = hints[each.name]
        choices = get_args(hint) if get_origin(hint) is Literal else None
        kind = str if choices else next(iter(get_args(hint)), hint)
        yield Option(each.name, kind, choices, each.default, each.metadata["help"])


OPTIONS = {option.name: option for option in _all_options()}


def _message(error: Any) -> str:
    """Return what pydantic found of one option, as a user reads it."""
    option, found = OPTIONS[error["loc"][0]], error["input"]
    if error["type"] == "value_error":
        return f"{option.flag} must be {error['ctx']['error']}."
    if option.choices:
        return f"{option.flag} is {found!r}; use one of {', '.join(option.choices)}."
    return f"{option.variable}={found!r} does not parse: {error['msg']}."


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each option to SGLang's own parser."""
    group = parser.add_argument_group("hybrid_mla", "Options of --attention-backend hybrid_mla (sglang-mla-ext).")
    for option in OPTIONS.values():
        group.add_argument(
            option.flag,
            dest="hybrid_mla_" + option.name,
            type=option.kind,
            choices=option.choices,
            default=None,
            help=f"{option.help}. Also {option.variable}.",
        )


def flags_to_env(args: argparse.Namespace, env: MutableMapping[str, str] | None = None) -> None:
    """Write the flags that were given to their environment variables."""
    env = os.environ if env is None else env
    for option in OPTIONS.values():
        value = getattr(args, "hybrid_mla_" + option.name, None)
        if value is not None:
            env[option.variable] = str(value)


def given(env: Mapping[str, str]) -> list[str]:
    """Return the flags whose variables are set, whether by the flags or by the user."""
    return [option.flag for option in OPTIONS.values() if env.get(option.variable)]

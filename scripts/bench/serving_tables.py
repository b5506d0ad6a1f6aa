"""Tables of decode throughput in servers and engines, beside SGLang's own backend."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.records import read_records
from bench.tables import latest, made_with, table

RIVAL = "sglang_flashmla"
BF16, FP8_PREFIX, FP8 = "BF16", "BF16, prefix FP8", "FP8"  # what `storage` returns
ELEMENT_BYTES = {BF16: (2, 2), FP8_PREFIX: (2, 1), FP8: (1, 1)}
"""Bytes of an element of the cache and of an expanded prefix."""
HEADLINE_PROMPTS, HEADLINE_REQUESTS = ("A", "B"), 256
HEADLINE_STORAGE = {BF16: "BF16", FP8_PREFIX: "FP8"}  # of expanded prefixes; the cache is BF16
RATES = ("hybrid_mla tok/s", "flashmla tok/s", "ratio")

Case = tuple[Any, ...]
Pair = tuple[dict[str, Any], dict[str, Any]]
"""Our record, and SGLang's own backend's of the same case."""


def headline(path: Path) -> str:
    """The few rows of the README: prompts A and B, a BF16 cache, prefixes in BF16 and FP8; one command for all."""
    shown = {
        (heads, layers, prompt, HEADLINE_STORAGE[stored]): pair
        for (heads, layers, prompt, requests, stored), pair in sorted(
            pairs(read_records(path), ("heads", "layers", "prompt", "concurrency")).items()
        )
        if prompt in HEADLINE_PROMPTS and requests == HEADLINE_REQUESTS and stored in HEADLINE_STORAGE
    }
    rows = [(*case, *rates(*pair)) for case, pair in shown.items()]
    columns = ("heads", "layers", "prompt", "expanded prefix in", *RATES)
    records = list(records_of(shown).values())
    command = template([record["command"] for record in records])
    return f"{table(rows, columns)}\n\n{made_with(records)}:\n\n```bash\n{command}\n```"


def template(commands: Sequence[str]) -> str:
    """One command for several that differ in the values of options: where they do, the option's name in capitals.

    Raises:
        ValueError: the commands do not run the same script with options that all take a value.
    """
    parsed = [shlex.split(command) for command in commands]
    script = parsed[0][:2]
    options: list[dict[str, list[str]]] = []
    for words in parsed:
        names, values = words[2::2], words[3::2]
        if words[:2] != script or len(names) != len(values) or not all(name.startswith("--") for name in names):
            raise ValueError(f"not {' '.join(script)} with options that take a value: {shlex.join(words)}")
        of_command: dict[str, list[str]] = {}
        for name, value in zip(names, values, strict=True):
            of_command.setdefault(name, []).append(value)
        options.append(of_command)
    parts = list(script)
    for name in dict.fromkeys(name for of_command in options for name in of_command):
        same = all(of_command.get(name) == options[0].get(name) for of_command in options)
        values = options[0][name] if same else [name.removeprefix("--").replace("-", "_").upper()]
        parts += [word for value in values for word in (name, value)]
    return shlex.join(parts)


def pairs(records: Iterable[dict[str, Any]], names: tuple[str, ...]) -> dict[Case, Pair]:
    """By the values of these names and the storage: our newest record and SGLang's.

    Both with a cache of the same dtype and the same number of output tokens; if there are several such numbers, the
    one measured last.
    """
    found = [record | {"case": record["case"] | {"storage": storage(record)}} for record in records]
    newest = latest((record for record in found if record["decode_tok_s"] is not None), *names, "output", "storage")
    shown: dict[Case, Pair] = {}
    for (impl, *case, output, stored), ours in newest.items():
        stock = newest.get((RIVAL, *case, output, FP8 if stored == FP8 else BF16))
        earlier = shown.get((*case, stored))
        if impl == "hybrid_mla" and stock is not None and (earlier is None or earlier[0]["date"] <= ours["date"]):
            shown[(*case, stored)] = ours, stock
    return shown


def records_of(shown: dict[Case, Pair]) -> dict[Case, dict[str, Any]]:
    """All records behind a table."""
    return {(*case, index): pair[index] for case, pair in shown.items() for index in range(2)}


def rates(ours: dict[str, Any], stock: dict[str, Any]) -> tuple[str, str, str]:
    """The cells of `RATES`."""
    rate, stock_rate = ours["decode_tok_s"], stock["decode_tok_s"]
    return f"{rate:,.0f}", f"{stock_rate:,.0f}", f"{rate / stock_rate:.2f}x"


def storage(record: dict[str, Any]) -> str:
    """How a server stored its latent cache, and expanded prefixes where they differ from it."""
    case = record["case"]
    if case.get("kv_cache_dtype") == "fp8_e4m3":
        return FP8
    asked = case.get("dtype") == "fp8" or "fp8_e4m3" in case.get("flags", "")
    return FP8_PREFIX if asked else BF16

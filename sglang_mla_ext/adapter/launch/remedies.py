"""Changes to a launch line that cannot run as it is, by the codes of what `limits` finds and SGLang reports.

A remedy gives up something that the server runs without: a way to compute, a format, a switch of a benchmark. What a
deployment is for has none here: its roles, how it is spread over GPUs, a cache in host memory, adapters.
"""

from __future__ import annotations

import difflib
import re

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.compat.findings import Finding, Remedy
from sglang_mla_ext.adapter.launch.launch_line import BACKEND_FLAGS, LaunchLine, value_of, without
from sglang_mla_ext.kernels.sizes import PAGE_TOKENS

CAN_GO = (
    *("--disable-radix-cache", "--enable-mixed-chunk", "--enable-two-batch-overlap", "--enable-pdmux"),
    *("--enable-unified-memory", "--enable-page-major-kv-layout", "--speculative-adaptive"),
    *("--enable-multi-layer-eagle", "--speculative-draft-attention-backend"),
    *("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "SGLANG_ENABLE_UNIFIED_RADIX_TREE", "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"),
    *("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "--flashinfer-mla-disable-ragged", "--disable-chunked-prefix-cache"),
)
"""Flags and variables, which are their own codes."""

UNKNOWN = "unknown {}"
"""The code of a flag that this SGLang does not know."""

OUR_BACKEND = Remedy(BACKEND_FLAGS, ("--attention-backend", BACKEND_NAME))

REMEDIES = {
    **{name: Remedy((name,)) for name in CAN_GO},
    **{
        f"{flag} with FP8": Remedy((flag,))
        for flag in ("--quantization-param-path", "--flashinfer-mla-disable-ragged", "--disable-chunked-prefix-cache")
    },
    "--page-size": Remedy(("--page-size",), ("--page-size", str(PAGE_TOKENS))),
    "--hybrid-mla-prefix-memory-gb": Remedy(
        ("--hybrid-mla-prefix-memory-gb", "SGLANG_HYBRID_MLA_PREFIX_MEMORY_GB"),
    ),
    "float16": Remedy(("--dtype",), ("--dtype", "bfloat16")),
    "--kv-cache-dtype": Remedy(("--kv-cache-dtype",), ("--kv-cache-dtype", "fp8_e4m3")),
    "full prefill graphs": Remedy(("--cuda-graph-backend-prefill",)),
    "decode graphs": Remedy(("--cuda-graph-backend-decode",)),
    "prefill graphs with FP8": Remedy(
        ("--cuda-graph-backend-prefill", "--enforce-piecewise-cuda-graph", "--enable-breakable-cuda-graph")
    ),
    "prefill backend": OUR_BACKEND,
    "decode backend": OUR_BACKEND,
    "no radix tree": Remedy((), ("--disaggregation-decode-enable-radix-cache",)),
    "--speculative-eagle-topk": Remedy(("--speculative-eagle-topk",), ("--speculative-eagle-topk", "1")),
    "--speculative-num-draft-tokens": Remedy(
        ("--speculative-num-steps", "--speculative-num-draft-tokens"),
        ("--speculative-num-steps", "7", "--speculative-num-draft-tokens", "8"),
    ),
    "no rotation": Remedy(
        ("--json-model-override-args",), ("--json-model-override-args", '{{"rope_parameters": {{"factor": 1.0}}}}')
    ),
    # Flags of older releases of SGLang.
    UNKNOWN.format("--enable-ep-moe"): Remedy(("--enable-ep-moe",), ("--ep-size", "{tp}")),
    UNKNOWN.format("--enable-deepep-moe"): Remedy(("--enable-deepep-moe",), ("--moe-a2a-backend", "deepep")),
    UNKNOWN.format("--cuda-graph-max-bs"): Remedy(("--cuda-graph-max-bs",), ("--cuda-graph-max-bs-decode", "{value}")),
    UNKNOWN.format("--speculative-draft"): Remedy(
        ("--speculative-draft",), ("--speculative-draft-model-path", "{value}")
    ),
    **{
        UNKNOWN.format(flag): Remedy((flag,))
        for flag in ("--enable-flashinfer-mla", "--enable-flashmla", "--disable-mla", "--keep-mm-feature-on-device")
    },
}
"""Remedies by code of a finding. A finding without one is refused."""


def with_remedies(found: list[Finding]) -> list[Finding]:
    """Add the remedies of their codes to findings that bring none."""
    return [each._replace(remedy=each.remedy or REMEDIES.get(each.code)) for each in found]


def said_by_sglang(said: str) -> list[Finding]:
    """Return findings from the message with which SGLang's parser of arguments exited."""
    usage, _, reason = said.strip().rpartition("error: ")
    reason = reason.partition("\n")[0]
    if reason.startswith("unrecognized arguments: "):
        flags = [word.partition("=")[0] for word in reason.split() if word.startswith("--")]
        known = re.findall(r"--[\w-]+", usage)
        return with_remedies([Finding(UNKNOWN.format(flag), _does_not_know(flag, known)) for flag in flags])
    if ambiguous := re.match(r"ambiguous option: (--[\w-]+)", reason):
        text = f"SGLang does not know {ambiguous[1]}, it may stand for several flags."
        return with_remedies([Finding(UNKNOWN.format(ambiguous[1]), text)])
    return [Finding("SGLang", f"SGLang itself: {reason}")]


def _does_not_know(flag: str, known: list[str]) -> str:
    close = difflib.get_close_matches(flag, known, n=1, cutoff=0.8)
    return f"SGLang does not know {flag}" + (f": did you mean {close[0]}?" if close else ".")


def apply(remedy: Remedy, line: LaunchLine) -> LaunchLine:
    """A launch line with what a remedy changes."""
    environment = {name: value for name, value in line.environment.items() if name not in remedy.leave_out}
    arguments = [*without(line.arguments, remedy.leave_out), *_put_in(remedy, line)]
    return line._replace(environment=environment, arguments=arguments)


def in_words(remedy: Remedy, line: LaunchLine) -> str:
    """Describe what a remedy changes in a line, in a few words."""
    given = {name: _given(name, line) for name in remedy.leave_out}
    come = " ".join(_put_in(remedy, line))
    gone = " ".join(shown for shown in given.values() if shown and shown != come)
    if come in given.values():
        come = ""  # it is there already
    return f"{come} in place of {gone}" if come and gone else f"with {come}" if come else f"without {gone}"


def _given(name: str, line: LaunchLine) -> str | None:
    """A flag with its value, or a variable's name, as a line has it; None where it has not."""
    if name in line.environment:
        return name
    if name not in {word.partition("=")[0] for word in line.arguments}:
        return None
    value = value_of(line.arguments, name)
    return f"{name} {value}" if value and not value.startswith("--") else name


def _put_in(remedy: Remedy, line: LaunchLine) -> list[str]:
    tp = value_of(line.arguments, "--tp", "--tp-size", "--tensor-parallel-size") or "1"
    value = value_of(line.arguments, *remedy.leave_out) or ""
    return [word.format(tp=tp, value=value) for word in remedy.put_in]

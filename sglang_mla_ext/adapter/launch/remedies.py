"""What to change in a launch line that cannot run as it is, found by what `limits` and SGLang say of it.

A remedy gives up something that the server runs without: a way to compute, a format, a switch of a benchmark. What a
deployment is for has none here: its roles, how it is spread over GPUs, a cache in host memory, adapters.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.launch.launch_line import BACKEND_FLAGS, LaunchLine, value_of, without


class Remedy(NamedTuple):
    """What to leave out and what to put in.

    Attributes:
        finding: how the words begin that it is for.
        leave_out: flags, with their values, and environment variables.
        put_in: arguments; `{tp}` is the line's own number of tensor-parallel ranks, `{value}` that of what is left out.
    """

    finding: str
    leave_out: tuple[str, ...]
    put_in: tuple[str, ...] = ()

    def fits(self, finding: str) -> bool:
        return re.match(self.finding, finding) is not None

    def apply(self, line: LaunchLine) -> LaunchLine:
        environment = {name: value for name, value in line.environment.items() if name not in self.leave_out}
        return LaunchLine(environment, [*without(line.arguments, self.leave_out), *self._put_in(line)])

    def text(self, line: LaunchLine) -> str:
        """What it does to a line, in a few words."""
        given = {word.partition("=")[0] for word in line.arguments} | set(line.environment)
        gone = " ".join(name for name in self.leave_out if name in given)
        come = " ".join(self._put_in(line))
        return f"{come} in place of {gone}" if come and gone else f"with {come}" if come else f"without {gone}"

    def _put_in(self, line: LaunchLine) -> list[str]:
        tp = value_of(line.arguments, "--tp", "--tp-size", "--tensor-parallel-size") or "1"
        value = value_of(line.arguments, *self.leave_out) or ""
        return [word.format(tp=tp, value=value) for word in self.put_in]


def _leave_out(*flags: str, says: str) -> tuple[Remedy, ...]:
    return tuple(Remedy(f"{re.escape(flag)} {says}", (flag,)) for flag in flags)


REMEDIES = (
    *_leave_out(
        *("--disable-radix-cache", "--enable-mixed-chunk", "--enable-two-batch-overlap", "--enable-pdmux"),
        *("--enable-unified-memory", "--enable-page-major-kv-layout", "--speculative-adaptive"),
        *("--enable-multi-layer-eagle", f"--speculative-draft-attention-backend {BACKEND_NAME}"),
        says="is not supported",
    ),
    *_leave_out(
        *("--quantization-param-path", "--flashinfer-mla-disable-ragged", "--disable-chunked-prefix-cache"),
        says="does not go with --kv-cache-dtype",
    ),
    Remedy(f"{BACKEND_NAME} needs --page-size", ("--page-size",)),
    Remedy("the model runs in float16", ("--dtype",), ("--dtype", "bfloat16")),
    Remedy(r"--kv-cache-dtype \S+ is not supported", ("--kv-cache-dtype",), ("--kv-cache-dtype", "fp8_e4m3")),
    Remedy(
        "--kv-cache-dtype fp8_e4m3 needs prefill without CUDA graphs",
        ("--cuda-graph-backend-prefill", "--enforce-piecewise-cuda-graph", "--enable-breakable-cuda-graph"),
    ),
    Remedy(
        r"prefill runs \S+, (which cannot read|and this server)", BACKEND_FLAGS, ("--attention-backend", BACKEND_NAME)
    ),
    Remedy("it is a decode backend, and decode runs", BACKEND_FLAGS, ("--attention-backend", BACKEND_NAME)),
    Remedy("--disaggregation-mode decode has no radix tree", (), ("--disaggregation-decode-enable-radix-cache",)),
    Remedy(r"--speculative-eagle-topk \d+ is not", ("--speculative-eagle-topk",), ("--speculative-eagle-topk", "1")),
    Remedy(
        r"--speculative-num-draft-tokens \d+ is not",
        ("--speculative-num-steps", "--speculative-num-draft-tokens"),
        ("--speculative-num-steps", "7", "--speculative-num-draft-tokens", "8"),
    ),
    Remedy(
        "SGLang cannot build LongCat-Flash",
        ("--json-model-override-args",),
        ("--json-model-override-args", '{{"rope_parameters": {{"factor": 1.0}}}}'),
    ),
    *_leave_out(
        *("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "SGLANG_ENABLE_UNIFIED_RADIX_TREE"),
        "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE",
        says="is not supported",
    ),
    # Flags of older releases of SGLang.
    Remedy("SGLang does not know --enable-ep-moe", ("--enable-ep-moe",), ("--ep-size", "{tp}")),
    Remedy("SGLang does not know --enable-deepep-moe", ("--enable-deepep-moe",), ("--moe-a2a-backend", "deepep")),
    Remedy(
        "SGLang does not know --speculative-draft,",
        ("--speculative-draft",),
        ("--speculative-draft-model-path", "{value}"),
    ),
    *(
        Remedy(f"SGLang does not know {flag}", (flag,))
        for flag in ("--enable-flashinfer-mla", "--enable-flashmla", "--disable-mla")
    ),
)


def remedy_for(finding: str) -> Remedy | None:
    """None where there is none, and the launch is refused."""
    return next((remedy for remedy in REMEDIES if remedy.fits(finding)), None)

"""Find out that a launch command is written for other GPUs than Hopper's: by its flags, variables, model and container.
SGLang resolves such a command on a Hopper GPU, too, once the attention backend is another one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from sglang_mla_ext.adapter.compat.findings import Finding
from sglang_mla_ext.adapter.launch.launch_line import BACKEND_FLAGS, MODEL_FLAGS, LaunchLine, value_of
from sglang_mla_ext.predict.weights import FP4_WEIGHTS, is_fp4

ATTENTION = (*BACKEND_FLAGS, "--speculative-draft-attention-backend", "--mm-attention-backend")


class Family(NamedTuple):
    """A kind of accelerator that is not a Hopper GPU.

    Attributes:
        name: for people; code: for programs.
        values: patterns of the values of flags that only it takes, by flag.
        variables: of names of environment variables that only it reads.
        container: of words of a container's command, its image's name among them.
    """

    name: str
    code: str
    values: dict[str, str]
    variables: str
    container: str


BLACKWELL = Family(
    "Blackwell GPUs",
    "Blackwell",
    {
        **dict.fromkeys(ATTENTION, r"trtllm_m[lh]a|cutlass_mla|cutedsl_mla|tokenspeed_mla"),
        "--moe-runner-backend": r"(flashinfer|experimental_sgl)_trtllm\w*|flashinfer_cutedsl",
        "--fp8-gemm-backend": r"flashinfer_trtllm",
        "--fp4-gemm-backend": r"flashinfer_\w+",
        "--kv-cache-dtype": r"nvfp4|fp4_\w+",
        "--quantization": r"modelopt_fp4|nvfp4\w*|mxfp8",
    },
    r"(?!)",
    r".*[:/_-](g?b[123]00|blackwell)\b.*",
)
ROCM = Family(
    "AMD GPUs (ROCm)",
    "ROCm",
    {
        **dict.fromkeys(ATTENTION, r"aiter\w*|wave"),
        **dict.fromkeys(("--moe-runner-backend", "--fp8-gemm-backend"), r"aiter"),
        "--moe-a2a-backend": r"mori",
        "--quantization": r"quark\w*|petit_nvfp4",
    },
    r"SGLANG_USE_AITER|SGLANG_ROCM_\w+|HIP_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|HSA_\w+",
    r"(--device=)?/dev/kfd\b.*|.*\brocm.*|.*[:/_-]mi\d{2,3}x?\b.*|.*\bsgl-dev\b.*",
)
OTHERS = Family(
    "other accelerators than NVIDIA's",
    "accelerator",
    {
        "--device": r"npu|xpu|hpu|mps|musa|tpu",
        **dict.fromkeys(ATTENTION, r"ascend\w*|intel_\w+"),
        "--moe-a2a-backend": r"ascend\w*",
    },
    r"ASCEND_\w+|ZE_AFFINITY_MASK",
    r".*[:/_-](npu|xpu|ascend|xeon|gaudi)\b.*|(--device=)?/dev/davinci\w*",
)


def findings(line: LaunchLine) -> list[Finding]:
    """List what only other accelerators take of a command; nothing where it is for Hopper GPUs.

    Args:
        line: as the user gave it, with his own backends.
    """
    found = []
    for family in (ROCM, OTHERS, BLACKWELL):
        if signs := list(dict.fromkeys(_signs(family, line))):
            verb = "is" if len(signs) == 1 else "are"
            text = (
                f"{', '.join(signs)} {verb} for {family.name}: hybrid_mla decodes with FlashMLA, which needs a Hopper "
                "GPU (H100, H200, H800, H20)."
            )
            found.append(Finding(family.code, text))
    for flag in MODEL_FLAGS:
        if (model := value_of(line.arguments, flag)) is not None and is_fp4(model):
            found.append(Finding(BLACKWELL.code, f"{model}: {FP4_WEIGHTS}."))
    return found


def _signs(family: Family, line: LaunchLine) -> Iterator[str]:
    for flag, values in family.values.items():
        if (value := value_of(line.arguments, flag)) is not None and re.fullmatch(values, value):
            yield f"{flag} {value}"
    yield from (name for name in line.environment if re.fullmatch(family.variables, name))
    words = {*line.container, *filter(None, [line.image])}
    yield from sorted(word for word in words if re.fullmatch(family.container, word))

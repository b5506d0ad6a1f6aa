"""Launch commands examined with the installed SGLang's own arguments, for a Hopper GPU that is not there.

test_recipes.py does so with many, and what it expects is what SGLang 0.5.17 says; here it is what all releases say.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

EXAMINE = r"""
import json, sys
from sglang_mla_ext.adapter.launch import examine, launch_line

with examine.examiner() as examined:
    found = [examined(launch_line.read(line.split())) for line in sys.argv[1:]]
print(json.dumps([(each.outcome, [f.text for f in each.findings], each.settings) for each in found]))
"""
LINE = "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 "
SET = ["--page-size 64", "--disable-prefill-cuda-graph"]
DRAFTS = "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-num-draft-tokens 4 "

EXPECTED: dict[str, tuple[str, list[str], list[str]]] = {
    "": ("works", [], SET),
    "--page-size 1": ("works with a change", ["hybrid_mla needs --page-size 64, not 1; remove the flag."], SET[1:]),
    "--prefill-attention-backend fa3": ("works", [], SET),
    "--enable-lroa": ("refused", ["SGLang does not know --enable-lroa: did you mean --enable-lora?"], []),
    DRAFTS + "--speculative-eagle-topk 1": (
        "works",
        [],
        [SET[0], "--speculative-draft-attention-backend flashmla", SET[1]],
    ),
    "--enable-lora": ("refused", ["--enable-lora is not supported yet: remove it."], []),
}
"""By what is added to a line: the outcome, what was found, and what is set by itself."""


@pytest.fixture(scope="module")
def examined() -> list[Any]:
    lines = [LINE + more for more in EXPECTED]
    done = subprocess.run([sys.executable, "-c", EXAMINE, *lines], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("at", range(len(EXPECTED)), ids=[more.strip() or "as it is" for more in EXPECTED])
def test_a_launch_command(examined: list[Any], at: int) -> None:
    assert tuple(examined[at]) == list(EXPECTED.values())[at]

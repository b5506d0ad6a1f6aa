"""A soak on a Hopper GPU, CUDA graphs on, all free memory NaN. Ten minutes of it: `scripts/soak.py --minutes 10`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak.py"


def test_a_soak_on_poisoned_memory(tmp_path: Path) -> None:
    out = tmp_path / "soak.jsonl"
    flags = ["--minutes", "2", "--poison", "--out", str(out)]
    subprocess.run([sys.executable, SCRIPT, *flags], check=True)
    record = json.loads(out.read_text())
    assert record["wrong"] == record["leaked_bytes"] == record["deaths"] == 0
    assert record["judged"] > 200 and record["hybrid_mla"]["steps"]["naive"] > 0

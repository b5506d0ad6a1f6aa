"""A launch that cannot work stops with one message that says what to change."""

from __future__ import annotations

import subprocess
import sys

import pytest
from demo import MODEL

LAUNCH = [sys.executable, "-m", "sglang_mla_ext.launch_server", "--device", "cpu", "--attention-backend", "hybrid_mla"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--disable-radix-cache",), "--disable-radix-cache is not supported yet: remove it."),
        (("--kv-cache-dtype", "fp8_e5m2"), "--kv-cache-dtype fp8_e5m2 is not supported: remove it, or use fp8_e4m3."),
        (("--prefill-attention-backend", "hybrid_mla", "--decode-attention-backend", "torch_native"), "decode backend"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_launch_stops(flags: tuple[str, ...], message: str) -> None:
    process = subprocess.run([*LAUNCH, "--model-path", str(MODEL), *flags], capture_output=True, text=True, timeout=120)
    assert process.returncode != 0
    assert message in process.stderr

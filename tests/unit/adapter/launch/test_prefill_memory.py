"""A warning where prefill passes may take more memory than SGLang leaves of a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import test_limits
from test_sharded_prefixes_at_launch import EIGHT

from sglang_mla_ext.adapter.launch import limits
from sglang_mla_ext.adapter.launch.limits import PREFILL_VARIABLE as VARIABLE

H200_BYTES = 150_754_820_096


@pytest.mark.parametrize(
    ("changes", "set_to", "advice"),
    [
        ({"mem_fraction_static": 0.83}, None, None),
        ({"mem_fraction_static": 0.9}, None, 65536),  # 14.0 GiB of 14.0, and this ended a server
        ({"mem_fraction_static": 0.9}, "many", 65536),
        ({"mem_fraction_static": 0.9}, "65536", None),
        ({"mem_fraction_static": 0.97}, "65536", 16384),
        ({"mem_fraction_static": 0.9, "enable_dp_attention": False, "dp_size": 1, "attn_dp_size": 1}, None, None),
        ({"mem_fraction_static": 0.9, "dp_size": 2, "attn_dp_size": 2}, None, None),
        ({"mem_fraction_static": 0.9, "disable_chunked_prefix_cache": True}, None, None),
        ({"mem_fraction_static": 0.9, "disaggregation_mode": "decode"}, None, None),
        ({"mem_fraction_static": 0.9, "dims": {}}, None, None),
        ({"mem_fraction_static": None}, None, None),
    ],
    ids=str,
)
def test_memory_of_a_prefill_pass(
    changes: dict[str, Any], set_to: str | None, advice: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V3's 128 heads, as a rank of DP attention has them."""
    if set_to is not None:
        monkeypatch.setenv(VARIABLE, set_to)
    args = test_limits.server_args(**{**EIGHT, **changes})
    alone = {"prefix_sharding": "off"}
    assert all(limits.warnings(test_limits.server(args, on_gpu, **alone)) == [] for on_gpu in (True, False))
    said = limits.warnings(test_limits.server(args, True, H200_BYTES, **alone))
    if advice is None:
        assert said == []
    else:
        assert len(said) == 1 and f"{VARIABLE}={advice}." in said[0] and "128 heads" in said[0]

"""Where prefill passes expand for themselves without being asked."""

from __future__ import annotations

from typing import Any

import pytest
import test_limits
from test_sharded_prefixes_at_launch import EIGHT


@pytest.mark.parametrize(
    ("changes", "given", "on_gpu", "expands"),
    [
        ({}, {}, True, True),
        ({}, {}, False, False),
        ({}, {"mode": "grouped_absorb"}, True, False),
        ({}, {"prefill_expand_tokens": 0}, True, False),
        ({}, {"prefill_expand_tokens": 4096}, True, False),
        ({"enable_dp_attention": False, "attn_dp_size": 1}, {}, True, False),
        ({"backends": ("fa3", "hybrid_mla")}, {}, True, False),
        (test_limits.EAGLE, {}, True, False),
        ({"disaggregation_mode": "prefill"}, {}, True, False),
        ({"enable_hierarchical_cache": True}, {}, True, False),
    ],
    ids=str,
)
def test_where_it_does(changes: dict[str, Any], given: dict[str, Any], on_gpu: bool, expands: bool) -> None:
    args = test_limits.server_args(**{**EIGHT, **changes})
    assert test_limits.server(args, on_gpu, **given).expands_transiently == expands

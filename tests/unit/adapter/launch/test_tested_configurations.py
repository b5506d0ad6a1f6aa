"""How far a deployment was run, and how far its memory reaches."""

from __future__ import annotations

import pytest

from sglang_mla_ext.adapter.compat import contract
from sglang_mla_ext.adapter.launch import tested_configurations as table
from sglang_mla_ext.adapter.launch.prefix_memory_report import PROMPT_TOKENS, PrefixMemoryReport


def test_every_supported_release_is_in_the_table() -> None:
    assert list(table.MOST_RANKS) == list(contract.SUPPORTED)
    assert {place for places in table.MOST_RANKS.values() for place in places} <= set(table.PLACES)


@pytest.mark.parametrize(
    ("parts", "version", "said"),
    [
        ({table.SERVER: 1, table.TENSOR: 2}, "0.5.17", "tested on a GPU"),
        (
            {table.SERVER: 1, table.TENSOR: 8},
            "0.5.17",
            "tested on a GPU; never run on 8 ranks: tensor parallelism (on 2)",
        ),
        (
            {table.TENSOR: 8, table.NODES: 8},
            "0.5.17",
            "tested on the CPU only: several nodes; never run on 8 ranks: several nodes (on 2)",
        ),
        ({table.SERVER: 1, table.REPLICAS: 2}, "0.5.17", "tested on the CPU only: --dp-size without DP attention"),
        ({table.SERVER: 1, table.GROUPS: 2}, "0.5.23", f"tested on the CPU only: {table.GROUPS}"),
        ({table.SERVER: 1, table.COMPILED: 1}, "0.5.23", "not tested: --enable-torch-compile"),
        (
            {table.SHARDED: 8, table.PEERS: 2},
            "0.5.17",
            "tested on a GPU; never run on 8 ranks: sharded prefixes (on 4)",
        ),
        ({table.SERVER: 1, table.MIXED: 1, table.NODES: 2}, "0.5.23", "tested on the CPU only: several nodes"),
        ({table.SERVER: 1}, "0.5.99", "not tested"),
    ],
)
def test_as_far_as_each_of_its_parts(parts: dict[str, int], version: str, said: str) -> None:
    assert str(table.tested(parts, version)) == said


def test_what_helps_is_what_is_not_done_yet() -> None:
    report = PrefixMemoryReport(3 << 30, token_bytes=4_005_632, heads=128, layers=61, element_bytes=2, routes=False)
    assert report.tokens == 804
    assert "128 heads" in str(report) and "3.82 MiB a token: 128 heads, 61 layers, BF16" in str(report)
    assert (
        "3.0 GiB hold 804 of" in str(report) and "all take 98.8 GiB" in str(report) and "fp8_e4m3 (half" in str(report)
    )
    assert "--hybrid-mla-prefix-sharding" not in str(report)
    assert "--hybrid-mla-prefix-sharding auto (one copy for all ranks)" in str(report._replace(turned_off=True))
    assert "--hybrid-mla-prefix-sharding" not in str(report._replace(turned_off=True, ranks=8, heads=16))
    better = str(report._replace(element_bytes=1, routes=True))
    assert "To hold more: no --enable-dp-attention" in better
    enough = report._replace(budget_bytes=99 << 30)
    assert enough.tokens == PROMPT_TOKENS and "To hold more" not in str(enough)

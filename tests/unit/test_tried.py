"""How far a deployment was run, and how far its memory reaches."""

from __future__ import annotations

import pytest

from sglang_mla_ext.adapter.compat import contract
from sglang_mla_ext.adapter.launch import tried
from sglang_mla_ext.adapter.launch.reach import PROMPT_TOKENS, Reach


def test_every_supported_release_is_in_the_table() -> None:
    assert list(tried.MOST_RANKS) == list(contract.SUPPORTED)
    assert {place for places in tried.MOST_RANKS.values() for place in places} <= set(tried.PLACES)


@pytest.mark.parametrize(
    ("parts", "version", "said"),
    [
        ({tried.SERVER: 1, tried.TENSOR: 2}, "0.5.17", "tested on a GPU"),
        (
            {tried.SERVER: 1, tried.TENSOR: 8},
            "0.5.17",
            "tested on a GPU; never run on 8 ranks: tensor parallelism (on 2)",
        ),
        (
            {tried.TENSOR: 8, tried.NODES: 8},
            "0.5.17",
            "tested on the CPU only: several nodes; never run on 8 ranks: several nodes (on 2)",
        ),
        ({tried.SERVER: 1, tried.REPLICAS: 2}, "0.5.17", "tested on the CPU only: --dp-size without DP attention"),
        ({tried.SERVER: 1, tried.TENSOR: 2}, "0.5.23", "tested on the CPU only: tensor parallelism"),
        ({tried.SERVER: 1, tried.COMPILED: 1}, "0.5.23", "never run: --enable-torch-compile"),
        (
            {tried.SPREAD: 8, tried.PEERS: 2},
            "0.5.17",
            "tested on a GPU; never run on 8 ranks: prefixes spread over ranks (on 4)",
        ),
        ({tried.SERVER: 1, tried.MIXED: 1, tried.NODES: 2}, "0.5.23", "tested on the CPU only: several nodes"),
        ({tried.SERVER: 1}, "0.5.99", "never run"),
    ],
)
def test_as_far_as_each_of_its_parts(parts: dict[str, int], version: str, said: str) -> None:
    assert str(tried.how_far(parts, version)) == said


def test_what_helps_is_what_is_not_done_yet() -> None:
    reach = Reach(3 << 30, token_bytes=4_005_632, heads=128, layers=61, element_bytes=2, routes=False)
    assert reach.tokens == 804
    assert "128 heads" in str(reach) and "3.82 MiB (61 layers, BF16)" in str(reach)
    assert "804 are expanded in 3.0 GiB, all of them in 98.8" in str(reach) and "fp8_e4m3 halves" in str(reach)
    assert "--hybrid-mla-spread" not in str(reach)
    assert "--hybrid-mla-spread auto holds every prefix once" in str(reach._replace(may_spread=True))
    assert "--hybrid-mla-spread" not in str(reach._replace(may_spread=True, ranks=8, heads=16))
    better = str(reach._replace(element_bytes=1, routes=True))
    assert "What helps: tensor parallelism without" in better
    enough = reach._replace(budget_bytes=99 << 30)
    assert enough.tokens == PROMPT_TOKENS and "What helps" not in str(enough)

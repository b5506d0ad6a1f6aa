"""Recipes of real deployments: SGLang's own arguments are made of each (examined.py), and what is found is what its
file says."""

from __future__ import annotations

import operator
import re
from typing import Any

import pytest
from bench.recipes import OUTCOMES, recipes, rows
from examined import IS_NEWEST, examined_once

from sglang_mla_ext.adapter.compat import contract

pytestmark = pytest.mark.skipif(not IS_NEWEST, reason="the newest release resolves recipes")


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    answer = examined_once(tmp_path_factory)
    assert answer["gpu"][0] == answer["gpu"][1], "the GPU is feigned no longer than asked for"
    assert not answer["imported"]
    return answer["found"]


@pytest.mark.parametrize("recipe", recipes(), ids=operator.itemgetter("name"))
def test_a_recipe_comes_to_what_its_file_says(recipe: dict[str, Any], examined: dict[str, Any]) -> None:
    found = examined[recipe["name"]]
    assert found["outcome"] == recipe["expected"]
    if found["outcome"] != "refused":
        assert found["changes"] == recipe.get("change", [])
        assert "--page-size 64" in found["settings"] or "--page-size 64" in recipe["command"]
        assert "hybrid_mla" in found["line"][1]
        assert found["run"] == recipe["run"]
    else:
        assert found["refusals"] == recipe["because"]


def test_the_list() -> None:
    of = recipes()
    names = [recipe["name"] for recipe in of]
    assert len(set(names)) == len(names)
    assert sum(recipe["from"] == "public" for recipe in of) >= 25
    assert sum(recipe["from"] == "adapted" for recipe in of) >= 10
    for recipe in of:
        name = recipe["name"]
        fields = {"name", "command", "gpus", "from", "source", "date", "expected"}
        assert fields <= set(recipe) <= fields | {"environment", "note", "change", "because", "run"}, name
        assert recipe["source"].startswith("https://") and recipe["expected"] in OUTCOMES, name
        assert re.fullmatch(r"(read )?20\d\d-\d\d-\d\d", str(recipe["date"])), name
        assert ("change" in recipe) == (recipe["expected"] == "works with a change"), name
        assert ("run" in recipe) == (recipe["expected"] != "refused"), name
        assert ("because" in recipe) == (recipe["expected"] == "refused"), name
        assert "--model" in recipe["command"] and "hybrid_mla" not in recipe["command"], name
        assert recipe["from"] == "public" or "note" in recipe, f"{name}: what was changed"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (
            "older",
            [
                "--moe-a2a-backend deepep in place of --enable-deepep-moe",
                "--page-size 64 in place of --page-size 1",
                "--speculative-num-steps 7 --speculative-num-draft-tokens 8 in place of --speculative-num-steps 15 "
                "--speculative-num-draft-tokens 16",
            ],
        ),
        ("tree", ["--speculative-eagle-topk 1 in place of --speculative-eagle-topk 4"]),
        ("too much memory", ["without --hybrid-mla-prefix-memory-gb 200"]),
        (
            "formats",
            [
                "--dtype bfloat16 in place of --dtype half",
                "--kv-cache-dtype fp8_e4m3 in place of --kv-cache-dtype fp8_e5m2",
                "without --disable-chunked-prefix-cache",
            ],
        ),
        (
            "prefill",
            [
                "--attention-backend hybrid_mla in place of --prefill-attention-backend fa3 "
                "--decode-attention-backend hybrid_mla",
                "without --cuda-graph-backend-prefill breakable",
            ],
        ),
    ],
)
def test_one_change_after_the_other(name: str, changes: list[str], examined: dict[str, Any]) -> None:
    assert (examined[name]["outcome"], examined[name]["changes"]) == ("works with a change", changes)


def test_what_is_set_by_itself(examined: dict[str, Any]) -> None:
    assert examined["by phase"]["outcome"] == "works"
    assert examined["by phase"]["settings"] == [
        *("--page-size 64", "--speculative-draft-attention-backend fa3", "--speculative-attention-mode decode"),
        "--disable-prefill-cuda-graph",
    ]


def test_a_backend_that_is_named_for_prefill_stays(examined: dict[str, Any]) -> None:
    found = examined["by phase"]
    assert found["line"][1][-6:-4] == ["--prefill-attention-backend", "fa3"] and found["run"].endswith("prefill by fa3")
    assert found["warnings"][0].startswith("prefill runs fa3, which reads no expanded prefix")


def test_the_reach_of_the_memory_with_dp_attention(examined: dict[str, Any]) -> None:
    found = examined["an image"]
    assert (
        "0.0 GiB hold 0 of a prompt's 26,472 tokens" in found["memory_report"]
        and "dp-routing prefix" not in found["memory_report"]
    )
    assert "fp8_e4m3 (half the size)" in found["memory_report"] and examined["by phase"]["memory_report"] is None


def test_another_release_in_an_image(examined: dict[str, Any]) -> None:
    found = examined["an image"]
    assert found["elsewhere"].startswith(
        f"lmsysorg/sglang:v0.5.20-cu129 has SGLang 0.5.20, which was not tested; examined with {contract.line()}"
    )
    assert found["run"] == "not tested" and examined["by phase"]["elsewhere"] is None


def test_a_model_that_nobody_knows(examined: dict[str, Any]) -> None:
    found = examined["not known"]
    assert (found["outcome"], found["codes"]) == ("cannot tell", ["model"]) and "(Offline" in found["findings"][0]


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("nonsense", "SGLang does not know --no-such-flag."),
        ("sglang's", "SGLang itself: "),
        ("option", "--hybrid-mla-min-prefix-len must be at least 1."),
        ("other model", "the model does not use Multi-head Latent Attention: choose another --attention-backend."),
    ],
)
def test_what_is_refused(name: str, finding: str, examined: dict[str, Any]) -> None:
    assert examined[name]["outcome"] == "refused"
    assert len(examined[name]["findings"]) == 1 and examined[name]["findings"][0].startswith(finding)


def test_tables() -> None:
    common = {"source": "https://a.b", "date": "2026-01-02", "gpus": "8 x H200"}
    of = [
        {**common, "name": "one", "from": "public", "expected": "works", "run": "run on a GPU"},
        {**common, "name": "two", "from": "adapted", "expected": "works with a change", "change": ["without --flag"]},
        {**common, "name": "three", "from": "public", "expected": "refused", "because": ["--x is not supported: no."]},
    ]
    shown = [(row["name"], row["run"], row["notes"]) for row in rows(of)]
    refusal = "`--x` is not supported: no."
    assert shown == [("one", "run on a GPU", ""), ("two", "", "without `--flag`"), ("three", "", refusal)]

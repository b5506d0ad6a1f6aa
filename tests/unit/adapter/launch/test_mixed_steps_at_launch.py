"""Choice of whether new tokens are mixed into a server's decode steps, how many, and the graphs for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import test_limits
import torch

from sglang_mla_ext.adapter import server
from sglang_mla_ext.adapter.compat import contract
from sglang_mla_ext.adapter.launch import mixed_steps
from sglang_mla_ext.configs import read_config
from sglang_mla_ext.predict.mixed import MOST_NEW

MIXED = {"enable_mixed_chunk": True}
OLDEST = contract.line() == "0.5.17"
"""There nothing is mixed beside drafts."""


@pytest.fixture(autouse=True)
def model_without_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer releases read the model's own configuration for that."""
    monkeypatch.setattr(mixed_steps.installed, "linear_layers", lambda args: None)
    monkeypatch.setattr(mixed_steps.installed, "model_config", lambda args: SimpleNamespace(), raising=False)


def test_new_tokens_are_not_mixed_beside_ngram_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    for used, tokens in ((False, 64), (True, 0)):
        config = SimpleNamespace(use_ngram_embedding=used)
        monkeypatch.setattr(mixed_steps.installed, "model_config", lambda args, config=config: config, raising=False)
        assert test_limits.server(test_limits.server_args(), mixed_tokens=64).mixing.tokens == tokens


@pytest.mark.parametrize(
    ("changes", "given", "on_gpu", "on_cpu"),
    [
        ({}, None, 256, 0),  # without graphs there is nothing to gain
        (MIXED, None, 256, 256),
        ({}, 100, 64, 64),  # whole pages
        ({}, 1_000_000, 1024, 1024),  # the rows of a step
        (MIXED, 128, 128, 128),
        ({"enable_dp_attention": True, "dp_size": 2}, None, 512, 0),
        ({}, 0, 0, 0),
        (MIXED, 0, 0, 0),
        (test_limits.EAGLE, 100, *([0, 0] if OLDEST else [64, 64])),
        ({**test_limits.EAGLE, "speculative_algorithm": "STANDALONE"}, 100, 0, 0),
        ({**test_limits.EAGLE, "speculative_eagle_topk": 2}, 100, 0, 0),
        ({**test_limits.EAGLE, "enable_dp_attention": True, "dp_size": 2}, 100, 0, 0),
        ({"enable_dp_attention": True, "dp_size": 2}, 64, 64, 64),
        ({"enable_return_routed_experts": True}, 100, 0, 0),
        ({"disaggregation_mode": "prefill"}, 100, 0, 0),
        (test_limits.DECODE_ROLE, 100, 0, 0),
        ({"moe_a2a_backend": "deepep"}, 100, 0, 0),
        ({"moe_a2a_backend": None}, 64, 64, 64),
        ({"cuda_graph_config": test_limits.graphs("disabled", decode="disabled")}, 64, 0, 64),
        ({"disable_cuda_graph_padding": True}, 64, 0, 64),
        ({**test_limits.EAGLE, "moe_dense_tp_size": 1}, 100, 0, 0),
        ({"moe_dense_tp_size": 1}, 64, 64, 64),
        ({"chunked_prefill_size": -1}, 64, 0, 0),
        ({"chunked_prefill_size": 0}, 64, 0, 0),
        ({"prefill_decode_interval": 16}, 64, 0, 0),
    ],
    ids=str,
)
def test_how_many_tokens_are_mixed(
    changes: dict[str, Any], given: int | None, on_gpu: int, on_cpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU without rates")
    args = test_limits.server_args(**changes)
    mixings = [test_limits.server(args, each, mixed_tokens=given).mixing for each in (True, False)]
    assert [each.tokens for each in mixings] == [on_gpu, on_cpu]
    assert (mixings[0].obstacle is None) == (on_gpu > 0 or not given)


@pytest.mark.parametrize(
    ("model", "tp", "least"), [("deepseek-v3", 8, 384), ("deepseek-v3", 1, 256), ("kimi-k2.5", 8, 384)]
)
def test_how_many_is_predicted_for_a_known_gpu(
    model: str, tp: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the model's configuration allows, of images' models, too; never less than where nothing is known."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    config = SimpleNamespace(to_dict=lambda: read_config("checkpoints", model)["config"])
    monkeypatch.setattr(mixed_steps.installed, "model_config", lambda args: config)
    args = test_limits.server_args(tp_size=tp)
    assert least <= test_limits.server(args).mixing.tokens <= MOST_NEW


def test_a_model_that_cannot_be_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(mixed_steps.installed, "model_config", lambda args: SimpleNamespace(to_dict=dict))
    assert test_limits.server(test_limits.server_args()).mixing.tokens == mixed_steps.LEAST_NEW


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [
        ([1, 2, 4, 8], 8, [1, 2, 4, 8]),
        ([1, 2, 4, 8], 4, [1, 2, 4, 8]),  # SGLang's own stay
        ([1, 8], 9, [1, 8, 9]),
        ([1, 8], 72, [1, 8, 72]),
        ([1, 8], 73, [1, 8, 72, 73]),
        ([1, 128], 384, [1, 128, 192, 256, 320, 384]),
        ([1, 960], 1300, [1, 960, 1024, 1152, 1280, 1300]),  # wider apart where there are many
    ],
    ids=str,
)
def test_graphs_reach_up_to_the_most_rows(sizes: list[int], most: int, expected: list[int]) -> None:
    assert mixed_steps.graph_sizes(sizes, most) == expected


def test_graphs_of_verify_steps_are_as_many_rows_apart() -> None:
    assert mixed_steps.graph_sizes([1, 128], 192, query_tokens=4) == [1, 128, 144, 160, 176, 192]
    assert mixed_steps.graph_sizes([1, 240], 320, query_tokens=4) == [1, 240, 256, 288, 320]


def test_what_a_small_pass_takes_is_predicted_where_the_gpu_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    config = SimpleNamespace(to_dict=lambda: read_config("checkpoints", "deepseek-v3")["config"])
    monkeypatch.setattr(server.installed, "model_config", lambda args: config)
    on_h200, on_cpu = (test_limits.server(test_limits.server_args(tp_size=8), on_gpu) for on_gpu in (True, False))
    assert on_h200.graph_layer_s == pytest.approx(0.5e-3, rel=0.2) and on_cpu.graph_layer_s == 0.35e-3

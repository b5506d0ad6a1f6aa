"""The demo model as it is served, on a tiny random network: its attention, its implementations, and their study."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bench.records import read_records
from demo_data import write_toy_data
from demo_model.checkpoint import Settings, model_config
from lab.accuracy import command as accuracy
from lab.accuracy.served import BASELINE, IMPLS, Served
from lab.accuracy.trained import Plan, demo
from lab.training.batches import Data
from lab.training.examination import logits_of
from lab.training.network import init_weights, make_network
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV3ForCausalLM
from typer.testing import CliRunner

from sglang_mla_ext.kernels.reference import attention as reference

PREFIX, OWN, VOCAB = 300, 20, 600


def config(vocab: int = VOCAB) -> dict:
    sizes = dict(layers=2, heads=2, hidden=64, intermediate=96, q_lora_rank=32, vocab=vocab, max_positions=16384)
    return model_config(Settings(**sizes, seed=0, config_only=False))


def network(vocab: int = VOCAB) -> DeepseekV3ForCausalLM:
    """Random weights that BF16 has, large enough for attention to look at some keys more than at others."""
    found = make_network(config(vocab))
    init_weights(found, 0, layers=2)
    for name, weight in found.named_parameters():
        if weight.dim() == 2:
            weight.data *= 4 if "self_attn" in name else 2
        weight.data = weight.data.bfloat16().float()
    return found


def tokens() -> list[int]:
    return torch.randint(VOCAB, (PREFIX + OWN,), generator=torch.Generator().manual_seed(0)).tolist()


def logits(served: Served, name: str) -> Tensor:
    impl = IMPLS[name]
    return served.decode(impl, served.keep(impl, served.prefill(tokens()[:PREFIX])), PREFIX, tokens()[PREFIX:])


@pytest.fixture(scope="module")
def exact() -> dict[str, Tensor]:
    """Logits in float64 with nothing rounded."""
    served = Served(network().double(), rounds=False)
    return {name: logits(served, name) for name in (BASELINE, "hybrid_mla", "wrong_lse_base")}


@pytest.fixture(scope="module")
def rounded() -> dict[str, Tensor]:
    served = Served(network())
    return {name: logits(served, name) for name in IMPLS}


def distance(a: Tensor, b: Tensor) -> float:
    return reference.errors(a, b).rel_l2


def test_without_rounding_it_is_the_network(exact: dict[str, Tensor]) -> None:
    """In float64: what is left is the float32 inside the norms and rotations."""
    whole = network().double()
    expected = logits_of(whole, tokens())[PREFIX:]
    assert distance(exact[BASELINE], expected) < 1e-6
    in_float32 = logits(Served(network(), rounds=False), BASELINE)
    assert distance(in_float32, expected) < 1e-5


def test_hybrid_is_absorb(exact: dict[str, Tensor]) -> None:
    assert distance(exact["hybrid_mla"], exact[BASELINE]) < 1e-9


def test_the_control_is_noticed(exact: dict[str, Tensor], rounded: dict[str, Tensor]) -> None:
    """Far beyond what rounding does: FP8 is the coarsest rounding here."""
    assert distance(exact["wrong_lse_base"], exact[BASELINE]) > 0.02
    worst = max(distance(rounded[name], rounded[BASELINE]) for name in IMPLS if name != "wrong_lse_base")
    assert distance(rounded["wrong_lse_base"], rounded[BASELINE]) > 2 * worst


QUANTISED = [name for name in IMPLS if name not in (BASELINE, "hybrid_mla", "wrong_lse_base")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data as the training's `prepare` writes them, of made-up pages."""
    out = tmp_path_factory.mktemp("data")
    write_toy_data(out)
    return out


@pytest.fixture(scope="module")
def data(folder: Path) -> Data:
    return Data(folder)


def test_the_study(data: Data) -> None:
    plan = Plan(prose_tokens=400, cases=1, lengths={512: 2}, questions=2, activation_prompts=1)
    served = Served(network(data.tokenizer.get_vocab_size()))
    found = list(demo(served, data, plan))
    assert found == list(demo(served, data, plan))  # same seed, same figures
    by_task = {
        task: {name: metrics for name, case, metrics in found if case.get("task") == task}
        for task in ("prose", "dictionary", "lookup")
    }
    assert all(list(records) == list(IMPLS) for records in by_task.values())
    assert "perplexity_change_pct" not in by_task["prose"][BASELINE]
    for name, metrics in by_task["prose"].items():
        assert metrics["perplexity_low"] <= metrics["perplexity"] <= metrics["perplexity_high"]
        if name != BASELINE:
            ratio = metrics["perplexity"] / by_task["prose"][BASELINE]["perplexity"]
            assert metrics["perplexity_change_pct"] == pytest.approx(100 * (ratio - 1))
    assert all("lookup_acc" in metrics for metrics in by_task["lookup"].values())
    case = next(case for _, case, _ in found if case.get("task") == "lookup")
    assert case == dict(study="demo", task="lookup", length=512, prompts=2, questions=4)
    ranges = [metrics for _, case, metrics in found if case["study"] == "demo_ranges"]
    assert len(ranges) == 4 and all(list(m.values()) == sorted(m.values()) for m in ranges)
    layers = {(name, case["layer"]): m["rel_err"] for name, case, m in found if case["study"] == "demo_layers"}
    for layer in range(2):
        assert layers[BASELINE, layer] < 2**-8
        assert all(2**-9 < layers[name, layer] < 2**-3 for name in QUANTISED)
        assert layers["wrong_lse_base", layer] > layers["hybrid_mla", layer]


def test_the_command(folder: Path, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = data.tokenizer.get_vocab_size()
    (tmp_path / "config.json").write_text(json.dumps(config(vocab)))
    save_file({name: w.contiguous() for name, w in network(vocab).state_dict().items()}, tmp_path / "model.safetensors")
    app = accuracy.typer.Typer()
    app.command()(accuracy.main)
    out = tmp_path / "accuracy.jsonl"
    monkeypatch.setattr(accuracy, "MODEL", tmp_path)
    options = ["--model", "demo", "--data", str(folder), "--out", str(out)]
    sizes = ["--prose-tokens", "0", "--cases", "0", "--lengths", "512:2", "--impl", "hybrid_mla_fp8_rows"]
    found = CliRunner().invoke(app, [*options, *sizes])
    assert found.exit_code == 0, found.output
    records = read_records(out)
    assert {record["bench"] for record in records} == {"accuracy"} and len(records) == 2 + 4 + 2 * 2
    assert CliRunner().invoke(app, ["--model", "other"]).exit_code != 0
    assert CliRunner().invoke(app, [*options, "--lengths", "long"]).exit_code != 0
    assert CliRunner().invoke(app, ["--model", "demo", "--server", "--outliers"]).exit_code != 0

"""The demo model as it is served, on a tiny random network: its attention, its implementations, and their study."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from bench.records import read_records
from demo_model.checkpoint import Settings, model_config
from lab.accuracy import command as accuracy
from lab.accuracy import trained as study
from lab.accuracy.outliers import CONTENT_POWERS, ROTARY_POWERS, put_outliers
from lab.accuracy.served import BASELINE, IMPLS, PlainRows, Served, attend
from lab.accuracy.trained import Plan, Question, Window, cut, demo, estimate, lookup_prompts, prose_windows
from lab.training.batches import Data
from lab.training.network import Network, pack
from lab.training.preparation import write
from lab.training.sources import Document, Word
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.reference.fp8 import flash
from sglang_mla_ext.kernels.storage.expanded import FP8

PREFIX, OWN, VOCAB = 300, 20, 600


def config(vocab: int = VOCAB) -> dict:
    sizes = dict(layers=2, heads=2, hidden=64, intermediate=96, q_lora_rank=32, vocab=vocab, max_positions=16384)
    return model_config(Settings(**sizes, seed=0, config_only=False))


def network(vocab: int = VOCAB) -> Network:
    """Random weights that BF16 has, large enough for attention to look at some keys more than at others."""
    found = Network(config(vocab))
    found.init_weights(0)
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


def test_outliers_change_what_is_stored_and_nothing_in_bf16(rounded: dict[str, Tensor]) -> None:
    """Nor in an expanded prefix, in FP8 too, since what is expanded has no basis of its own."""
    changed = network()
    put_outliers(changed)
    served, plain = Served(changed), Served(network())
    for name in (BASELINE, "hybrid_mla", "hybrid_mla_fp8_prefix"):
        assert torch.equal(logits(served, name), rounded[name]), name
    for rows, before in zip(served.prefill(tokens()), plain.prefill(tokens()), strict=True):
        ratios = [(after / own).abs().amax(0).log2() for after, own in zip(rows, before, strict=True)]
        assert [(int(ratio.min()), int(ratio.max())) for ratio in ratios] == [CONTENT_POWERS, ROTARY_POWERS]
    of_rows = "hybrid_mla_fp8_rows"
    apart, before_that = (distance(one, rounded[BASELINE]) for one in (logits(served, of_rows), rounded[of_rows]))
    assert 0 < apart < 1.05 * before_that


def test_without_rounding_it_is_the_network(exact: dict[str, Tensor]) -> None:
    """In float64: what is left is the float32 inside the norms and rotations."""
    whole = network().double()
    expected = whole.lm_head(whole(pack([tokens()])))[PREFIX:]
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


def test_rounding_to_bf16_costs_what_bf16_has(exact: dict[str, Tensor], rounded: dict[str, Tensor]) -> None:
    """2^-9 for each rounding, some ten of them in a row in two layers."""
    for name in (BASELINE, "hybrid_mla"):
        assert 1e-3 < distance(rounded[name], exact[BASELINE]) < 10 * 2**-9


QUANTISED = [name for name in IMPLS if name not in (BASELINE, "hybrid_mla", "wrong_lse_base")]


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised(name: str, rounded: dict[str, Tensor]) -> None:
    """e4m3 rounds by up to 2^-4; attention is a part of the residual stream, and its errors average over many keys."""
    assert 1e-3 < distance(rounded[name], rounded[BASELINE]) < 2**-4


def test_attend_is_the_reference_and_its_rounding_that_of_flash() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((5, 3, 24), (150, 3, 24), (150, 3, 8)))
    visible = torch.tensor([1, 64, 65, 149, 150])
    for row, n in enumerate(visible.tolist()):
        out, lse = attend(q.double(), k.double(), v.double(), visible, 0.3, None)
        parts = q[row, None, :, :16].double(), q[row, None, :, 16:].double()
        scores = torch.einsum("bhd,nhd->bhn", torch.cat(parts, -1), k[:n].double()) * 0.3
        expected = torch.einsum("bhn,nhd->bhd", scores.softmax(-1), v[:n].double())[0]
        torch.testing.assert_close(out[row], expected)
        torch.testing.assert_close(lse[row], scores.logsumexp(-1)[0])
    latent, whole = k[:, :1].bfloat16().float(), torch.full((5,), 150)
    out, _ = attend(q, latent, latent[..., :8], whole, 0.3, torch.bfloat16)
    expected = flash(q.flatten(0, 1), latent[:, 0], latent[:, 0, :8], 0.3, block_keys=64).unflatten(0, (5, 3))
    exact, _ = attend(q, latent, latent[..., :8], whole, 0.3, None)
    # Other blocks first, so not the same roundings, but as many.
    assert distance(out, exact) == pytest.approx(distance(expected, exact), rel=0.5)


def test_unscaled_weights_in_fp8_lose_what_is_small() -> None:
    """Far below the largest weight a key adds nothing to the output, but still to the sum it is divided by."""
    q, v = torch.ones(1, 1, 1), torch.ones(1 + 1024, 1, 1)
    k = torch.full((1 + 1024, 1, 1), math.log(2**-11))
    k[-1] = 0.0  # the last block is the first that is looked at
    out, lse = attend(q, k, v, torch.tensor([1025]), 1.0, FP8)
    assert out.item() == pytest.approx(1 / 1.5) and lse.item() == pytest.approx(math.log(1.5))


def test_rows_in_pieces_are_the_same(
    exact: dict[str, Tensor], rounded: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.accuracy.served.ROWS", 7)
    assert distance(logits(Served(network().double(), rounds=False), BASELINE), exact[BASELINE]) < 1e-9
    # How a CPU rounds products of BF16 matrices depends on their sizes.
    assert distance(logits(Served(network()), BASELINE), rounded[BASELINE]) < 2**-7


def test_windows_of_a_document() -> None:
    document = list(range(7000))
    found = list(cut(3, document))
    assert [(window.prefix[0], window.prefix[-1], window.tokens[0], window.tokens[-1]) for window in found] == [
        (0, 2046, 2047, 4096),  # the first half of 4,097 tokens is not scored
        (2048, 4095, 4096, 6144),
        (2903, 6143, 6144, 6999),
    ]
    assert list(cut(0, [5, 6, 7, 8])) == [Window(0, [5], [6, 7, 8])]
    assert list(cut(0, [5, 6])) == []


def test_estimates() -> None:
    """The mean of many, and an interval of 1.96 standard errors of it."""
    sums, counts = np.random.default_rng(0).normal(size=1000), np.ones(1000)
    found = estimate("x", study.mean_of, 1, sums, counts)
    assert found["x"] == pytest.approx(sums.mean())
    half = 1.96 * sums.std() / math.sqrt(1000)
    assert found["x_low"] == pytest.approx(sums.mean() - half, abs=0.1 * half)
    assert found["x_high"] == pytest.approx(sums.mean() + half, abs=0.1 * half)
    base = sums + 0.01
    assert study.change_of(base, sums, counts) == pytest.approx(100 * (math.exp(0.01) - 1))
    assert study.points_of(base, sums, counts) == pytest.approx(1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data as the training's `prepare` writes them, of made-up pages."""
    rng = random.Random(0)
    nouns = ["river", "stone", "house", "garden", "letter", "number", "window", "table", "winter", "summer"]
    pages = [
        Document("toy", str(index), "\n".join(" ".join(rng.choices(nouns, k=12)) + "." for _ in range(8)))
        for index in range(300)
    ]
    words = [
        Word(noun, "noun", f"a thing that is called {noun}", ["thing"], [nouns[index - 1]], ["matter"])
        for index, noun in enumerate(nouns)
    ]
    out = tmp_path_factory.mktemp("data")
    write(out, pages, words, vocab=VOCAB, names=200, chats=50)
    return out


@pytest.fixture(scope="module")
def data(folder: Path) -> Data:
    return Data(folder)


def test_prose_comes_from_many_documents(data: Data) -> None:
    found = prose_windows(data, 100, seed=0)
    assert sum(len(window.tokens) - 1 for window in found[:-1]) < 100 <= sum(len(w.tokens) - 1 for w in found)
    assert len({window.document for window in found}) == len(found) > 1
    assert prose_windows(data, 100, seed=0) == found != prose_windows(data, 100, seed=1)
    assert len(prose_windows(data, 10**9, seed=0)) == len(data.held_out)


def test_look_ups_ask_about_their_table(data: Data) -> None:
    for prompt in lookup_prompts(data, 512, Plan(lengths={512: 3})):
        system = data.tokenizer.decode(prompt.system, skip_special_tokens=False)
        assert len(prompt.questions) == 4 and len(prompt.system) < 512
        for question in prompt.questions:
            asked = data.tokenizer.decode(question.tokens, skip_special_tokens=False)
            assert asked.startswith("<|user|>") and asked.endswith("<|assistant|>")
            answer = data.tokenizer.decode(question.answers[0][:-1])
            assert any(
                answer in line and name in line for line in system.splitlines() for name in re.findall(r"\w+", asked)
            )


def test_right_counts_accepted_answers() -> None:
    """What the network itself would say is right, as one of several answers too; another one is not."""
    served, system, asked = Served(network()), tokens()[:30], tokens()[30:40]
    impl = PlainRows()
    kept = served.keep(impl, served.prefill(system))
    answer: list[int] = []
    for _ in range(3):
        answer.append(int(served.decode(impl, kept, 30, asked + answer)[-1].argmax()))
    wrong = [*answer[:2], answer[2] + 1]
    questions = [Question(asked, [answer]), Question(asked, [wrong, answer]), Question(asked, [wrong])]
    prompt = study.Prompt(system, questions)
    assert study.right(served, impl, served.prefill(system), prompt) == 2


def test_the_study(data: Data) -> None:
    plan = Plan(prose_tokens=60, cases=1, lengths={512: 2}, questions=2, activation_prompts=1)
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


def test_only_what_is_asked_for(data: Data) -> None:
    plan = Plan(impls=("sglang_fp8",), prose_tokens=0, cases=1, lengths={})
    found = list(demo(Served(network(data.tokenizer.get_vocab_size())), data, plan))
    assert [(name, case["task"]) for name, case, _ in found] == [(BASELINE, "dictionary"), ("sglang_fp8", "dictionary")]
    with pytest.raises(ValueError, match="unknown: \\['sglang', 77\\]"):
        Plan(impls=("sglang",), lengths={77: 3})


def test_the_command(folder: Path, data: Data, tmp_path: Path) -> None:
    vocab = data.tokenizer.get_vocab_size()
    (tmp_path / "config.json").write_text(json.dumps(config(vocab)))
    save_file({name: w.contiguous() for name, w in network(vocab).state_dict().items()}, tmp_path / "model.safetensors")
    app = accuracy.typer.Typer()
    app.command()(accuracy.main)
    out, images = tmp_path / "accuracy.jsonl", tmp_path / "images"
    options = ["--model", "demo", "--weights", str(tmp_path), "--data", str(folder), "--out", str(out)]
    sizes = ["--prose-tokens", "0", "--cases", "0", "--lengths", "512:2", "--impl", "hybrid_mla_fp8_rows"]
    found = CliRunner().invoke(app, [*options, *sizes, "--images", str(images)])
    assert found.exit_code == 0, found.output
    records = read_records(out)
    assert {record["bench"] for record in records} == {"accuracy"} and len(records) == 2 + 4 + 2 * 2
    assert sorted(path.name for path in images.iterdir()) == ["demo_layers.png", "demo_ranges.png"]
    assert CliRunner().invoke(app, ["--model", "other"]).exit_code != 0
    assert CliRunner().invoke(app, [*options, "--lengths", "long"]).exit_code != 0
    assert CliRunner().invoke(app, ["--model", "demo", "--images", str(images)]).exit_code != 0

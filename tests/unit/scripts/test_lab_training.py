"""The demo model: its data, training, drafting layer and examination, at toy size on the CPU; and what is shipped."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import study
import torch
from demo_data import write_toy_data
from demo_model.checkpoint import Settings, model_config
from fork_server import environment_without_sglangs
from lab.training.batches import Data
from lab.training.chats import QUESTIONS, dictionary_chat, lookup_cases, phrasings
from lab.training.command import save
from lab.training.network import PACKED, draft_prefix, hidden_states, init_weights, make_network
from safetensors.torch import load_file
from transformers import DeepseekV3ForCausalLM
from typer.testing import CliRunner

REPOSITORY = Path(__file__).resolve().parents[3]
SHIPPED = REPOSITORY / "configs" / "demo_model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data")
    write_toy_data(out)
    return out


def training(*words: object) -> str:
    found = CliRunner().invoke(study.app, ["training", *map(str, words)])
    assert found.exit_code == 0, found.output
    return found.output


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained, and the layer that drafts, which was trained behind it."""
    model = tmp_path_factory.mktemp("model")
    sizes = dict(layers=2, heads=2, hidden=32, intermediate=32, q_lora_rank=16, max_positions=8192)
    few = "--steps=3 --tokens=256 --context=128 --rate=1e-3 --workers=0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lab.training.command.SIZES", sizes)
        training("train", folder, model, *few.split(), "--cases=1")
    before = load_file(model / "model.safetensors")
    training("draft", folder, model, *few.split())
    after = load_file(model / "model.safetensors")
    assert all(torch.equal(after[name], weight) for name, weight in before.items()) and len(after) > len(before)
    return model


@pytest.mark.slow
def test_the_study(folder: Path, trained: Path, tmp_path: Path) -> None:
    report = json.loads((trained / "training_draft.json").read_text())
    assert report["steps"] == 3 and report["curve"][-1]["step"] == 3
    assert json.loads((trained / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert (trained / "tokenizer.json").is_file() and (trained / "chat_template.jinja").is_file()
    out = tmp_path / "records.jsonl"
    said = training("examine", trained, folder, "--cases", 2, "--out", out)
    assert "dictionary_acc" in said and json.loads(out.read_text())["perplexity"] > 1


def test_packed_documents_do_not_see_each_other(tmp_path: Path) -> None:
    """Each has the logits that transformers gives it alone, from the checkpoint, with its own attention; in float32."""
    sizes = dict(layers=2, heads=2, hidden=64, intermediate=96, q_lora_rank=32, max_positions=16384, seed=0)
    config = model_config(Settings(vocab=600, config_only=False, **sizes))
    network = make_network(config, PACKED)
    init_weights(network, 0, layers=2)
    for name, weight in network.named_parameters():
        spread = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
        changed = 3 * weight.data if weight.dim() == 2 else 1 + 0.1 * spread
        weight.data = changed.to(torch.bfloat16).float()
    save(tmp_path, {name: weight.to(torch.bfloat16) for name, weight in network.state_dict().items()}, config)
    theirs = DeepseekV3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(0, 600, (200,), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(50), torch.arange(200)])
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
        found = network.lm_head(hidden_states(network, torch.cat([tokens[:50], tokens]), positions))
    torch.testing.assert_close(found[50:], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[:50], expected[:50], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.release("0.5.17", reason="0.5.23 makes the layer in a worker that has published its ranks alone")
def test_the_drafting_layer_equals_sglang_s_own(trained: Path) -> None:
    """In float32; and SGLang loads every tensor of the layer by its name. See sglang_nextn.py."""
    program = Path(__file__).parents[1].joinpath("sglang_nextn.py")
    env = environment_without_sglangs([str(REPOSITORY / part) for part in ("", "scripts")])
    command = [sys.executable, "-W", "ignore", str(program), str(trained)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-4000:]


def test_it_is_examined_in_names_and_words_that_training_does_not_use(folder: Path) -> None:
    data = Data(folder)
    assert not set(data.names) & set(data.held_out_names)
    for case in lookup_cases(data.material(held_out=True), 5, 500, lambda text: len(data.encode(text)), seed=0):
        assert case.accepted[0] in case.prompt and any(name in case.prompt for name in data.held_out_names)
    for kind in QUESTIONS:
        for word in data.words:
            assert not set(phrasings(word.word, kind, True)) & set(phrasings(word.word, kind, False))
    chats = (dictionary_chat(random.Random(seed), data.material(), 400) for seed in range(30))
    asked = {question for chat in chats for question, _ in chat.turns}
    held_out = {text for word in data.words for kind in QUESTIONS for text in phrasings(word.word, kind, True)}
    assert asked and not asked & held_out and not any(re.search(r"<\|", text) for text in asked)


def test_shipped_weights_are_within_their_limit() -> None:
    assert sum(path.stat().st_size for path in SHIPPED.glob("*.safetensors")) < 32 * 2**20
    config = json.loads((SHIPPED / "config.json").read_text())
    names = load_file(SHIPPED / "model.safetensors")
    assert any(name.startswith(draft_prefix(config["num_hidden_layers"])) for name in names) == bool(
        config["num_nextn_predict_layers"]
    )

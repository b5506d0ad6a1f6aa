"""The demo model's drafting layer: its function, its training and its checkpoint, at toy size on the CPU."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from demo_data import write_toy_data
from demo_model.checkpoint import Settings, model_config
from lab.training.acceptance import Case, acceptance, chat_cases, count_steps, greedy
from lab.training.batches import EOS_ID, Batches, Data
from lab.training.chats import dictionary_chat
from lab.training.checkpoints import load_network, logits_of, stored, write_checkpoint, write_draft
from lab.training.draft import BIAS, Draft, config_with_draft, drafted, load_draft, prefix_of
from lab.training.draft_attention import attend_own_each, attend_own_packed
from lab.training.draft_trainer import STEP_WEIGHTS, DraftPlan, DraftTrainer, losses
from lab.training.network import Network, pack
from lab.training.train_draft import main
from safetensors.torch import load_file

CPU = torch.device("cpu")
REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = REPOSITORY / "configs" / "demo_model"
MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data")
    write_toy_data(out)
    return out


@pytest.fixture(scope="module")
def data(folder: Path) -> Data:
    return Data(folder)


def settings(vocab: int) -> Settings:
    sizes = dict(layers=2, heads=2, hidden=64, intermediate=96, q_lora_rank=32, max_positions=16384, seed=0)
    return Settings(vocab=vocab, config_only=False, **sizes)


def spread_weights(module: torch.nn.Module) -> None:
    """Weights at which every part of the module matters, exact in BF16."""
    for name, weight in module.named_parameters():
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
        weight.data = (0.1 * drawn if weight.dim() == 2 else 1 + 0.1 * drawn).to(torch.bfloat16).float()


def small_draft(vocab: int = 600) -> tuple[dict, Draft]:
    config = config_with_draft(model_config(settings(vocab)))
    draft = Draft(config).eval()
    spread_weights(draft)
    draft.mlp.gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 8))
    return config, draft


@pytest.fixture(scope="module")
def model(folder: Path, data: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a drafting layer."""
    of = settings(data.tokenizer.get_vocab_size())
    network = Network(model_config(of))
    network.init_weights(0)
    out = tmp_path_factory.mktemp("model")
    write_checkpoint(network, of, folder / "tokenizer", out)
    return out


def theirs(config: dict, draft: Draft) -> tuple[torch.nn.Module, torch.nn.Module]:
    """transformers' decoder layer with experts, with the draft's weights, and its rotary embedding."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding

    shape = DeepseekV3Config(**config)
    shape._attn_implementation = "eager"
    shape._experts_implementation = "eager"
    layer = DeepseekV3DecoderLayer(shape, config["num_hidden_layers"])
    state = {name: x for name, x in draft.state_dict().items() if "mlp.experts" not in name}
    state = {name: x for name, x in state.items() if not name.startswith(("enorm", "hnorm", "eh_proj", "shared_head"))}
    experts = draft.mlp.experts
    both = [torch.cat((expert.gate_proj.weight, expert.up_proj.weight)) for expert in experts]
    state["mlp.experts.gate_up_proj"] = torch.stack(both)
    state["mlp.experts.down_proj"] = torch.stack([expert.down_proj.weight for expert in experts])
    layer.load_state_dict(state)
    return layer.eval(), DeepseekV3RotaryEmbedding(shape)


@torch.no_grad()
def test_steps_equal_transformers_layer_on_the_row_s_own_sequence() -> None:
    """In step s, a position's row follows the first step's inputs up to it and its own of the steps between."""
    config, draft = small_draft()
    layer, rotary = theirs(config, draft)
    generator = torch.Generator().manual_seed(1)
    documents = [list(range(n)) for n in (1, 9, 14)]
    packed = pack(documents)
    embedded = torch.randn(3, 24, 64, generator=generator)
    hidden, kept, inputs = torch.randn(24, 64, generator=generator), [], []
    for step in range(3):
        # W_eh [enorm(e); hnorm(h)], written plainly
        halves = (embedded[step], draft.enorm.weight), (hidden, draft.hnorm.weight)
        normed = [x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight for x, weight in halves]
        inputs.append(torch.cat(normed, dim=-1) @ draft.eh_proj.weight.T)
        hidden = draft(embedded[step], hidden, packed, kept)
        for begin, end in ((0, 1), (1, 10), (10, 24)):
            for row in range(begin, end):
                sequence = torch.cat([inputs[0][begin : row + 1], *(x[row : row + 1] for x in inputs[1:])])[None]
                n = sequence.shape[1]
                mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
                places = torch.arange(n)[None]
                out = layer(sequence, attention_mask=mask, position_embeddings=rotary(sequence, places))
                out = (out[0] if isinstance(out, tuple) else out)[0, -1]
                expected = out * torch.rsqrt(out.square().mean() + 1e-6) * draft.shared_head.norm.weight
                torch.testing.assert_close(hidden[row], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_layer_equals_sglang_s_own(model: Path, tmp_path: Path) -> None:
    """In float32; and SGLang loads every tensor of the layer by its name. See sglang_nextn.py."""
    config, draft = small_draft(json.loads((model / "config.json").read_text())["vocab_size"])
    write_draft(stored(draft), config, model, tmp_path)
    program = Path(__file__).with_name("sglang_nextn.py")
    env = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    path = os.pathsep.join(str(REPOSITORY / part) for part in ("", "scripts"))
    command = [sys.executable, "-W", "ignore", str(program), str(tmp_path)]
    ended = subprocess.run(command, env=env | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-4000:]


def flash_forward(q, k, v, starts, _, longest, *others, scale):
    """torch's operator, of one document: out and lse."""
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float()).to(q.dtype)
    return out, scores.logsumexp(-1), torch.empty(2), torch.empty(0), torch.empty(0)


def flash_backward(grad, q, k, v, out, lse, *others, scale):
    """torch's operator, which takes the softmax and its gradient from lse and out."""
    q, k, v, grad = (x.float() for x in (q, k, v, grad))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    weights = (scores - lse.unsqueeze(-1)).exp()
    delta = (grad * out.float()).sum(-1).T.unsqueeze(-1)  # [heads, tokens, 1]
    of_scores = weights * (torch.einsum("qhd,khd->hqk", grad, v) - delta) * scale
    grads = (("hqk,khd->qhd", of_scores, k), ("hqk,qhd->khd", of_scores, q), ("hqk,qhd->khd", weights, grad))
    return tuple(torch.einsum(*of).to(torch.bfloat16) for of in grads)


def test_merged_attention_equals_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed attention around stand-ins for torch's operators, forward and backward, in BF16."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    generator = torch.Generator().manual_seed(0)
    packed = pack([[0] * 23])
    shapes = [(23, 2, 24), (23, 2, 24), (23, 2, 16), (23, 2, 2, 24), (23, 2, 2, 16), (23, 2, 16)]
    *drawn, grad = (torch.randn(s, generator=generator).to(torch.bfloat16) for s in shapes)
    results = []
    for attend in (attend_own_each, attend_own_packed):
        inputs = [x.clone().requires_grad_() for x in drawn]
        out = attend(*inputs, packed, 0.2)
        results.append([out, *torch.autograd.grad(out, inputs, grad)])
    for plain, merged in zip(*results, strict=True):
        assert (plain.float() - merged.float()).norm() < 0.01 * plain.float().norm()  # BF16 rounds by 0.002


def test_own_keys_get_their_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    packed = pack([[0] * 3, [0] * 2])
    shapes = [(5, 2, 6), (5, 2, 6), (5, 2, 4), (5, 2, 2, 6), (5, 2, 2, 4)]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    scores = lambda *x: attend_own_each(*x, packed, 0.4)  # noqa: E731
    # Weights are rounded to float32 there, which bounds how well differences agree.
    assert torch.autograd.gradcheck(scores, inputs, eps=1e-2, atol=1e-3, rtol=1e-2)


def test_bias_chooses_experts_and_balance_moves_it() -> None:
    _, draft = small_draft()
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    experts = draft.mlp
    weights = experts.route(x)
    assert ((weights > 0).sum(-1) == 2).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(50))
    experts.gate.e_score_correction_bias[3] = 9
    assert (experts.route(x)[:, 3] > 0).all()
    experts.train().route(x)
    experts.balance(0.5)
    assert experts.gate.e_score_correction_bias[3] == 8.5 and not experts.load.any()


def test_losses_count_drafts_of_answers_only(data: Data) -> None:
    """Against a plain loop over rows; targets are the model's."""
    vocab = data.tokenizer.get_vocab_size()
    network, (_, draft) = Network(model_config(settings(vocab))), small_draft(vocab)
    network.init_weights(0)
    batch = Batches(data, 300, seed=0, shares={"dictionary": 0.8, "prose": 0.2})[0, 120]
    together, divergences, _ = losses(network, draft, batch)
    assert together.item() == pytest.approx(sum(w * x for w, x in zip(STEP_WEIGHTS, divergences, strict=True)).item())
    packed = batch.packed
    with torch.no_grad():
        hidden = network(packed)
        wanted, kept = network.lm_head(hidden).log_softmax(-1), []
        for ahead in (1, 2, 3):
            hidden = draft(network.model.embed_tokens(packed.tokens.roll(-ahead)), hidden, packed, kept)
            found = network.lm_head(hidden).log_softmax(-1)
            total = weight = 0.0
            for begin, end in zip(packed.starts.tolist(), packed.starts.tolist()[1:], strict=False):
                for row in range(begin, end - ahead):
                    of_row = float(batch.weights[row + ahead]) if batch.weights[row] > 0 else 0.0
                    total += of_row * float((wanted[row + ahead].exp() * (wanted[row + ahead] - found[row])).sum())
                    weight += of_row
            assert divergences[ahead - 1].item() == pytest.approx(total / weight, rel=1e-3)


def test_training_lowers_the_loss_and_leaves_the_model(data: Data) -> None:
    config = config_with_draft(model_config(settings(data.tokenizer.get_vocab_size())))
    network = Network(config)
    spread_weights(network)
    before = {name: weight.clone() for name, weight in network.state_dict().items()}
    plan = DraftPlan(tokens=256, context=128, rate=2e-3, seed=0, minutes=None, steps=20)
    trainer = DraftTrainer(plan, network, config, data, CPU, workers=0, compiled=False)
    first = trainer.gradients(trainer.batches[0, 128])[0].item()
    trainer.train()
    assert trainer.curve[-1]["step"] == 20 and trainer.curve[-1]["loss"] < 0.8 * first
    assert trainer.draft.mlp.gate.e_score_correction_bias.any()
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_checkpoint_keeps_the_model_and_has_sglang_s_names(model: Path, tmp_path: Path) -> None:
    config, draft = small_draft(json.loads((model / "config.json").read_text())["vocab_size"])
    size = write_draft(stored(draft), config, model, tmp_path)
    written, before = load_file(tmp_path / "model.safetensors"), load_file(model / "model.safetensors")
    assert size == (tmp_path / "model.safetensors").stat().st_size
    for name, weight in before.items():
        assert torch.equal(written.pop(name), weight)
    attention = "q_a_proj q_a_layernorm q_b_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj o_proj"
    names = {f"self_attn.{name}.weight" for name in attention.split()} | {BIAS, "mlp.gate.weight"}
    names |= {f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")}
    names |= {f"{name}_layernorm.weight" for name in ("input", "post_attention")}
    experts = ["shared_experts", *(f"experts.{index}" for index in range(8))]
    names |= {f"mlp.{expert}.{name}_proj.weight" for expert in experts for name in ("gate", "up", "down")}
    assert set(written) == {f"model.layers.2.{name}" for name in names}
    assert {x.dtype for name, x in written.items() if not name.endswith(BIAS)} == {torch.bfloat16}
    assert written[prefix_of(config) + BIAS].dtype == torch.float32
    loaded = load_draft(tmp_path, CPU)
    for name, weight in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name].float(), weight), name
    # Both networks and transformers read the model as before; a second layer takes the place of the first.
    same = load_network(tmp_path, CPU).state_dict()
    assert all(torch.equal(weight, same[name]) for name, weight in load_network(model, CPU).state_dict().items())
    assert write_draft(stored(draft), config, tmp_path, tmp_path) == size


def test_transformers_reads_the_model_without_the_layer(model: Path, tmp_path: Path) -> None:
    from transformers import DeepseekV3ForCausalLM

    config, draft = small_draft(json.loads((model / "config.json").read_text())["vocab_size"])
    write_draft(stored(draft), config, model, tmp_path)
    read = DeepseekV3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.arange(40)
    network = load_network(model, CPU).float()
    with torch.no_grad():
        torch.testing.assert_close(network.lm_head(network(pack([tokens.tolist()]))), read(tokens[None]).logits[0])


def test_a_layer_of_the_shipped_model_has_room_in_the_repository() -> None:
    config = config_with_draft(json.loads((SHIPPED / "config.json").read_text()))
    draft = Draft(config)
    size = 2 * sum(weight.numel() for weight in draft.parameters())
    assert size <= 8 * MIB
    tensors = load_file(SHIPPED / "model.safetensors")
    model = sum(2 * x.numel() for name, x in tensors.items() if not name.startswith(prefix_of(config)))
    assert model + size + 64 * 1024 < 32 * MIB


def test_shipped_weights_are_within_their_limit() -> None:
    assert sum(path.stat().st_size for path in SHIPPED.glob("*.safetensors")) < 32 * MIB
    config = json.loads((SHIPPED / "config.json").read_text())
    names = load_file(SHIPPED / "model.safetensors")
    assert any(name.startswith(prefix_of(config)) for name in names) == bool(config["num_nextn_predict_layers"])


def test_steps_of_verification_are_counted_as_a_server_meets_them() -> None:
    text = [9, 9, 1, 2, 3, 4, 5, EOS_ID]  # two of the prompt; prefill gives 1
    nothing = [0, 0, 0]
    drafts = [nothing, [2, 3, 0], nothing, nothing, [5, EOS_ID, 7], nothing, nothing, nothing]
    found = count_steps(2, text, drafts)
    # 2 3 and the 4 that verification adds; then 5 and </s>, behind which nothing counts
    assert found == (5, 2, (2, 2, 0))
    assert count_steps(2, text, [nothing] * 8) == (5, 5, (0, 0, 0))
    assert count_steps(2, text[:3], [nothing] * 3) == (0, 0, (0, 0, 0))


def test_greedy_answers_need_no_right_guess(data: Data) -> None:
    network = Network(model_config(settings(data.tokenizer.get_vocab_size())))
    spread_weights(network)
    logits = logits_of(network, CPU)
    cases = chat_cases(data, 3, seed=0)
    plain = []
    for case in cases:
        text = list(case.prompt)
        while len(text) - len(case.prompt) < 64 and text[-1] != EOS_ID:
            text.append(int(logits([text])[0][-1].argmax()))
        plain.append(text[len(case.prompt) :])
    half_right = [Case(case.prompt, [*text[:5], 7, *text[6:]], False) for case, text in zip(cases, plain, strict=True)]
    assert greedy(logits, cases) == plain == greedy(logits, half_right)


def test_drafts_of_one_who_knows_are_all_accepted(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(model_config(settings(data.tokenizer.get_vocab_size())))
    spread_weights(network)

    def perfect(network: Network, draft: Draft, packed, steps: int) -> torch.Tensor:
        return torch.stack([packed.tokens.roll(-2 - at) for at in range(steps)], dim=-1)

    monkeypatch.setattr("lab.training.acceptance.drafted", perfect)
    _, draft = small_draft(data.tokenizer.get_vocab_size())
    figures = acceptance(logits_of(network, CPU), network, draft, data, cases=6)
    assert 3.5 < figures["accept_length"] <= 4 and figures["accept_1"] > 0.95


def test_drafting_feeds_its_own_tokens(data: Data) -> None:
    """Row by row, as a server drafts: a text that ends with the drafts so far has the same next draft."""
    vocab = data.tokenizer.get_vocab_size()
    network, (_, draft) = Network(model_config(settings(vocab))).requires_grad_(False), small_draft(vocab)
    spread_weights(network)
    text = torch.randint(5, vocab, (12,), generator=torch.Generator().manual_seed(0)).tolist()
    all_drafts = drafted(network, draft, pack([text]), 3)
    alone = drafted(network, draft, pack([text[:6]]), 3)
    assert torch.equal(all_drafts[:5], alone[:5])  # later tokens change nothing
    assert len(set(all_drafts.flatten().tolist())) > 4


def test_held_out_chats_are_asked_in_words_that_training_does_not_use(data: Data) -> None:
    trained = {q for seed in range(30) for q, _ in dictionary_chat(random.Random(seed), data.material(), 400).turns}
    for case in chat_cases(data, 30, seed=1):
        prompt = data.tokenizer.decode(case.prompt, skip_special_tokens=False)
        assert re.search(r"<\|user\|>(.*)<\|assistant\|>$", prompt)[1] not in trained
        assert case.expected[-1] == EOS_ID


def test_whole_command(folder: Path, model: Path, tmp_path: Path) -> None:
    call = dict(tokens=256, context=128, rate=1e-3, seed=0, workers=0, compiled=False, cases=3)
    main(data=folder, model=model, out=tmp_path, minutes=None, steps=3, layer=None, **call)
    report = json.loads((tmp_path / "training_draft.json").read_text())
    assert report["steps"] == 3 and report["curve"][-1]["step"] == 3
    assert report["bytes"] == (tmp_path / "model.safetensors").stat().st_size
    assert report["acceptance"]["accept_length"] >= 1 and 0 <= report["acceptance"]["accept_3"] <= 1
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (model / name).read_bytes()
    again = tmp_path / "again"
    main(data=folder, model=model, out=again, minutes=None, steps=None, layer=tmp_path / "draft.pt", **call)
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (tmp_path / name).read_bytes()

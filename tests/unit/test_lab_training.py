"""The demo model's data, training and checkpoint, at toy size on the CPU."""

from __future__ import annotations

import json
import random
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from demo_data import write_toy_data
from demo_model.checkpoint import Settings, model_config
from lab.training.batches import ANSWER_WEIGHT, ASSISTANT_ID, EOS_ID, Batches, Data, Prose
from lab.training.chats import (
    QUESTIONS,
    Chat,
    dictionary_cases,
    dictionary_chat,
    lookup_cases,
    lookup_chat,
    make_table,
    one_word_answers,
    phrasings,
    render,
    system_with_table,
)
from lab.training.checkpoints import load_network, logits_of, write_checkpoint
from lab.training.examination import examine, windows
from lab.training.network import Network, attend_each, pack
from lab.training.preparation import is_held_out
from lab.training.sources import Document, Page, clean_gloss, pod_paragraphs
from lab.training.train import main
from lab.training.trainer import Plan, Trainer, progress_of, rate_at

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data")
    write_toy_data(out)
    return out


@pytest.fixture(scope="module")
def data(folder: Path) -> Data:
    return Data(folder)


def settings(vocab: int, layers: int = 2) -> Settings:
    return Settings(
        layers=layers,
        heads=2,
        hidden=64,
        intermediate=96,
        q_lora_rank=32,
        vocab=vocab,
        max_positions=16384,
        seed=0,
        config_only=False,
    )


def plan(data: Data, steps: int) -> Plan:
    return Plan(
        settings(data.tokenizer.get_vocab_size(), layers=1),
        tokens=512,
        context=256,
        rate=5e-3,
        seed=0,
        minutes=None,
        steps=steps,
    )


def trainer(data: Data, steps: int) -> Trainer:
    return Trainer(plan(data, steps), data, CPU, workers=0, compiled=False)


def test_logits_equal_transformers(tmp_path: Path) -> None:
    """Same function from the same checkpoint, in float32: only the order of sums differs."""
    from transformers import DeepseekV3ForCausalLM

    network = Network(model_config(settings(600)))
    network.init_weights(0)
    for name, weight in network.named_parameters():
        spread = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
        changed = 3 * weight.data if weight.dim() == 2 else 1 + 0.1 * spread
        weight.data = changed.to(torch.bfloat16).float()
    write_checkpoint(network, settings(600), None, tmp_path)
    theirs = DeepseekV3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(0, 600, (200,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
        # The second document must not see the first.
        found = network.lm_head(network(pack([tokens[:50].tolist(), tokens.tolist()])))
    torch.testing.assert_close(found[50:], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[:50], expected[:50], atol=1e-5, rtol=1e-5)


def test_checkpoint_is_loaded_as_it_was_written(tmp_path: Path) -> None:
    network = Network(model_config(settings(600)))
    network.init_weights(0)
    write_checkpoint(network, settings(600), None, tmp_path)
    loaded = load_network(tmp_path, CPU)
    assert loaded.frequencies.dtype == torch.float32
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, network.state_dict()[name].to(torch.bfloat16)), name


def test_rendered_chat_is_what_the_template_gives(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    chat = Chat("You know words.", [("Define river.", "river (noun): water."), ("And stone?", "rock")])
    messages = [{"role": "system", "content": chat.system}]
    for question, answer in chat.turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == render(chat)
    asked = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert asked.endswith("Define river.<|assistant|>")


def test_lookups_have_the_table_s_answers(data: Data) -> None:
    material = data.material()
    for seed in range(20):
        rng = random.Random(seed)
        table = make_table(rng, material, 12)
        system = system_with_table(rng, material, table, prose_tokens=100, short=True)
        for line in table.lines():
            assert line in system
        chat = lookup_chat(random.Random(seed), material, 500)
        for question, answer in chat.turns:
            name = next((name for name in data.names if re.search(rf"\b{name}\b", question)), None)
            if name:
                value = answer.rstrip(".").split()[-1]
                assert any(name in line and value in line for line in chat.system.splitlines()), (question, answer)


def test_lookup_prompts_fill_their_length_with_names_never_trained_on(data: Data) -> None:
    assert not set(data.names) & set(data.held_out_names)
    material = data.material(held_out=True)
    for tokens in (300, 900):
        for case in lookup_cases(material, 5, tokens, lambda text: len(data.encode(text)), seed=0):
            assert 0.9 * tokens <= len(data.encode(case.prompt)) <= tokens
            assert case.accepted[0] in case.prompt
            assert any(name in case.prompt for name in data.held_out_names)


def test_examination_asks_in_words_that_training_does_not_use(data: Data) -> None:
    for kind in QUESTIONS:
        for word in data.words:
            assert not set(phrasings(word.word, kind, True)) & set(phrasings(word.word, kind, False))
    trained = {q for seed in range(30) for q, _ in dictionary_chat(random.Random(seed), data.material(), 400).turns}
    assert trained
    by_word = {word.word: word for word in data.words}
    for kind, cases in dictionary_cases(data.words, 5, seed=0).items():
        for case in cases:
            question = re.search(r"<\|user\|>(.*)<\|assistant\|>$", case.prompt)[1]
            word = next(word for word in by_word if re.search(rf"\b{word}\b", question))
            assert question not in trained and list(case.accepted) == one_word_answers(by_word[word], kind)


def test_answers_weigh_and_questions_do_not(data: Data) -> None:
    batch = Batches(data, 4096, seed=0)[3, 512]
    packed = batch.packed
    tokens, weights = packed.tokens.numpy(), batch.weights.numpy()
    assert len(tokens) == 4096 and {0.0, 1.0, ANSWER_WEIGHT} == set(np.unique(weights).tolist())
    assert (tokens[1:][weights[:-1] > 1] != ASSISTANT_ID).all()
    ends = packed.starts[1:].numpy() - 1
    assert (weights[ends] == 0).all() and int(packed.starts[-1]) == 4096
    for begin, end in zip(packed.starts.tolist(), packed.starts.tolist()[1:], strict=False):
        assert torch.equal(packed.positions[begin:end], torch.arange(end - begin))
        answers = np.flatnonzero(tokens[begin:end] == ASSISTANT_ID)
        for at in answers[answers < end - begin - 1]:
            assert weights[begin + at] == ANSWER_WEIGHT  # the target after <|assistant|>
    again = Batches(data, 4096, seed=0)[3, 512]
    assert torch.equal(again.packed.tokens, packed.tokens)


def test_training_lowers_the_loss_and_resumes_exactly(data: Data, tmp_path: Path) -> None:
    whole = trainer(data, steps=20)
    first = whole.gradients(whole.batches[0, 256])[0].item()
    assert whole.train(tmp_path / "whole", stop_after=None, save_every=99)
    assert whole.run.curve[-1]["loss"] < first - 0.5

    part = trainer(data, steps=20)
    batches = (part.batches[key] for key in part.keys(lambda: 0.0))
    for _ in range(7):
        part.step(next(batches), rate_at(part.plan, part.run.step, progress_of(part.plan, part.run.step, 0.0)))
        part.run.step += 1
    part.save(tmp_path / "part")
    other = trainer(data, steps=20)
    other.resume(tmp_path / "part")
    assert other.run.step == 7 and other.train(tmp_path / "part", stop_after=None, save_every=99)
    assert other.run.curve[-1]["loss"] == whole.run.curve[-1]["loss"]


def test_whole_command(folder: Path, tmp_path: Path) -> None:
    """Stop, go on, checkpoint, examination."""
    sizes = dict(layers=1, heads=2, hidden=32, intermediate=32, q_lora_rank=16, max_positions=8192, workers=0)
    rest = dict(tokens=256, context=128, rate=1e-3, seed=0, compiled=None, cases=2, lengths="512", prose_tokens=500)
    call = dict(data=folder, out=tmp_path, minutes=None, steps=3, save_every=9.0, **sizes, **rest)
    main(stop_after=0.0, **call)
    assert not (tmp_path / "model.safetensors").exists()
    main(stop_after=None, **call)
    report = json.loads((tmp_path / "training.json").read_text())
    assert report["steps"] == 3 and report["curve"][-1]["step"] == 3
    assert {"perplexity", "dictionary_acc", "lookup_acc_512"} <= set(report["examination"])
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).is_file(), name
    assert (tmp_path / "training.png").is_file() == (find_spec("matplotlib") is not None)


def test_examination_of_one_who_knows(data: Data) -> None:
    """Logits that spell the expected answer are right, others are not."""
    right = dictionary_cases(data.words, 2, 1) | {"": lookup_cases(data.material(True), 2, 500, len, 1)}
    known = {case.prompt: case.accepted[0] for cases in right.values() for case in cases}

    def logits(documents: list[list[int]]) -> list[torch.Tensor]:
        found = []
        for document in documents:
            text = data.tokenizer.decode(document, skip_special_tokens=False)
            prompt = next((p for p in known if data.encode(p) == document[: len(data.encode(p))]), None)
            one = torch.zeros(len(document), data.tokenizer.get_vocab_size())
            answer = [*data.encode(known[prompt]), EOS_ID] if prompt else []
            begin = len(data.encode(prompt)) - 1 if prompt else 0
            for at, token in enumerate(answer):
                if begin + at < len(document):
                    one[begin + at, token] = 1
            found.append(one)
            assert text
        return found

    figures = examine(logits, data, count=2, seed=1, lengths=(), prose_tokens=10)
    assert figures["dictionary_acc"] == 1.0
    assert figures["perplexity"] == pytest.approx(data.tokenizer.get_vocab_size(), rel=0.01)


def test_examination_runs_on_the_network(data: Data) -> None:
    network = Network(model_config(settings(data.tokenizer.get_vocab_size(), layers=1)), attend_each)
    network.init_weights(0)
    figures = examine(logits_of(network, CPU), data, count=1, lengths=(512,), prose_tokens=200)
    assert 300 < figures["perplexity"] < 1200


@pytest.mark.parametrize("tokens", [0, 1, 2, 8, 9, 10, 13, 14, 40])
def test_each_token_but_the_first_is_predicted_once_from_enough_before_it(tokens: int) -> None:
    predicted = []
    for begin, first, end in windows(tokens, window=8, stride=4):
        assert end - 1 - begin <= 8 and (begin == 0 or first - begin >= 8 - 4)
        predicted += range(first, end)
    assert predicted == list(range(1, tokens))


def test_text_of_pages() -> None:
    page = Page()
    page.feed(
        "<nav><p>Home, and many other words that would be long enough for a paragraph.</p></nav><p>This is a sentence "
        "with <b>some</b> marks,\n long enough to be kept as a paragraph.</p><pre>x = 1</pre><p>Short.</p>"
    )
    page.close()
    assert page.paragraphs == ["This is a sentence with some marks, long enough to be kept as a paragraph."]
    pod = "=head1 NAME\n\nUse C<open> and B<I<close>> to work with a file that has been given by its name.\n\n    x;\n"
    assert pod_paragraphs(pod) == ["Use open and close to work with a file that has been given by its name."]
    assert clean_gloss('a large stream of water (larger than a creek); "the river was navigable"') == (
        "a large stream of water"
    )


def test_split_is_by_page(folder: Path) -> None:
    pages = [Document("toy", str(index), "") for index in range(300)]
    held_out = sum(map(is_held_out, pages))
    assert 0 < held_out < 30
    assert len(Prose(folder, "train")) == 300 - held_out and len(Prose(folder, "held_out")) == held_out

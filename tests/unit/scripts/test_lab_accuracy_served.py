"""The accuracy study asked of servers: answers that are forced, what is asked, and changed copies of the package.

tests/server/test_forced.py forces answers of a real server; the whole study needs a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import dill
import pytest
import torch
from bench.records import write_record
from bench.tables import specs
from lab.accuracy import forced, on_server
from lab.accuracy.on_server import SETUPS, SUMS_IN_PLACE, WRONG_BASE, Change, changed_package
from tables_of import lines_of

VOCAB = 50


def step(processor: forced.Forced, logits: torch.Tensor, params: list[dict]) -> tuple[list[int], list[list]]:
    """What SGLang makes of processed logits with `top_logprobs_num` 2: tokens, and pairs as in its answers."""
    logprobs = torch.log_softmax(processor(logits.clone(), params), dim=-1)
    top = logprobs.topk(2)
    pairs = [
        [[value, token, None] for value, token in zip(*row, strict=True)]
        for row in zip(*map(torch.Tensor.tolist, top), strict=True)
    ]
    return logprobs.argmax(-1).tolist(), pairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forced_answer_tells_the_models_own_log_probabilities(dtype: torch.dtype) -> None:
    """For likely and for hopeless tokens, the vocabulary's last among them, in a batch at different places."""
    generator = torch.Generator().manual_seed(0)
    given = [[3, VOCAB - 1, 7], [0, 1]]
    body = forced.request([9, 9], given[0])
    processor = dill.loads(bytes.fromhex(json.loads(body["custom_logit_processor"])["callable"]))()  # as SGLang does
    params = [dict(body["sampling_params"]["custom_params"]), {"tokens": given[1]}]
    answers: list[dict] = [{"output_ids": [], "meta_info": {"output_top_logprobs": []}} for _ in given]
    expected: list[list[float]] = [[], []]
    for place in range(3):  # one step more than the second request has
        logits = (10 * torch.randn(2, VOCAB, generator=generator)).to(dtype)
        if place == 1:
            logits[0, VOCAB - 1] = 40  # certain: its log-probability is 0
        tokens, pairs = step(processor, logits, params)
        for request in range(2):
            if place < len(given[request]):
                answers[request]["output_ids"].append(tokens[request])
                answers[request]["meta_info"]["output_top_logprobs"].append(pairs[request])
                own = torch.log_softmax(logits[request].float(), dim=-1)
                expected[request].append(own[given[request][place]].item())
    for answer, tokens, values in zip(answers, given, expected, strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 0.2
        assert forced.logprobs_of(answer, tokens) == pytest.approx(values, abs=tolerance)
    with pytest.raises(RuntimeError, match="enable-custom-logit-processor"):
        forced.logprobs_of(answers[0], [1, 2, 3])


def test_controls_change_what_they_say_and_nothing_else(tmp_path: Path) -> None:
    folder = changed_package(tmp_path / "changed", (*SUMS_IN_PLACE, *WRONG_BASE))
    original = Path(on_server.sglang_mla_ext.__file__).parent
    files = [path.relative_to(original) for path in original.rglob("*.py")]
    files += [Path("kernels") / path.relative_to(original / "kernels") for path in (original / "kernels").rglob("*.py")]
    changed = {
        str(file) for file in files if (folder / original.name / file).read_text() != (original / file).read_text()
    }
    assert changed == {change.file for change in (*SUMS_IN_PLACE, *WRONG_BASE)}
    for change in (*SUMS_IN_PLACE, *WRONG_BASE):
        text = (folder / original.name / change.file).read_text()
        assert change.old not in text and text.count(change.new) >= change.times
    with pytest.raises(RuntimeError, match=r"kernels/merge\.py has 0 times 'no such text'"):
        changed_package(tmp_path / "changed", [Change("kernels/merge.py", "no such text", "", 1)])


def test_the_table_has_servers_beside_references(tmp_path: Path) -> None:
    path = tmp_path / "accuracy.jsonl"

    def record(study: str, impl: str, case: dict, **metrics: float) -> None:
        case = dict(study=study, **case)
        write_record(path, bench="accuracy", impl=impl, case=case, gpu="GPU", command="run it", **metrics)

    def around(name: str, value: float) -> dict:
        return {name: value, f"{name}_low": value - 0.05, f"{name}_high": value + 0.05}

    for impl in SETUPS:
        prose = {} if impl == "sglang_bf16" else around("perplexity_change_pct", 0.5)
        if impl != "hybrid_mla_speculative":
            record("served", impl, dict(task="prose", tokens=100), perplexity=20.0, **prose)
        for case in (dict(task="dictionary", questions=5), dict(task="lookup", length=512, questions=8)):
            points = {} if impl == "sglang_bf16" else around(f"{case['task']}_acc_diff_points", 0.0)
            record("served", impl, case, **{f"{case['task']}_acc": 1.0}, **points)
    for tokens, change in ((60588, 0.6), (999, 0.9)):
        record("demo", "hybrid_mla", dict(task="prose", tokens=tokens), **around("perplexity_change_pct", change))
    rows = {row[0]: row[1:] for row in lines_of(specs()["docs/accuracy.md"]["served"], path)[1:]}
    assert rows["BF16"] == ["20.000", "–", "–", "100.0", "100.0"]
    right = ["100.0, +0.00 (-0.05 to +0.05)"] * 2
    served, reference = "+0.50 (+0.45 to +0.55)", "+0.60 (+0.55 to +0.65)"
    assert rows["prefix expanded in BF16"] == ["20.000", served, reference, *right]
    assert rows["prefix expanded in BF16, drafts"] == ["–", "–", "–", *right]
    assert rows["control: FP8 sums in place"] == ["20.000", served, "–", *right]
    assert len(rows) == len(SETUPS)

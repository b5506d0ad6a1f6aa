"""What `sglang-mla plan` predicts: weights, the step, memory, thresholds; as JSON and as a plot."""

from __future__ import annotations

import dataclasses
import json

import pytest
from demo_model.rank import Rank, rank_config
from typer.testing import CliRunner

from sglang_mla_ext.adapter.launch.feature_findings import DRAFT_TOKENS
from sglang_mla_ext.cli import app
from sglang_mla_ext.predict import report, tables, weights
from sglang_mla_ext.predict.memory import (
    buffer_bytes,
    default_fraction,
    default_transient_tokens_of,
    memory,
    weight_bytes,
)
from sglang_mla_ext.predict.rates import Gpu
from sglang_mla_ext.predict.sharing import PLAIN, Cover
from sglang_mla_ext.predict.step import Deployment, attention_seconds, latent_seconds, predict
from sglang_mla_ext.predict.weights import Product, UnknownModelError, products, read_model

H200 = Gpu.from_json("h200")
V3 = read_model("deepseek-v3")


def planned(*options: str) -> dict:
    result = CliRunner().invoke(app, ["plan", "--json", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def refused(*options: str) -> str:
    result = CliRunner().invoke(app, ["plan", *options])
    assert result.exit_code == 2
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        # As the models' cards have them; the layer that drafts is not counted.
        ("deepseek-v3", 671.0, 37),
        ("deepseek-v2-lite", 15.7, 2.4),
        ("kimi-k2", 1026, 32),
        ("kimi-k2.5", 1026, 32),
        ("longcat-flash", 560, 27),
        ("kimi-linear", 49.1, 3),
        ("kimi-k3", 2779, 104),
    ],
)
def test_parameters(name, billions, active):
    config = read_model(name)
    parts = products(config)
    embedding = weights.embedding_bytes(config) / weights.BF16_BYTES
    assert (sum(part.stored for part in parts) + embedding) / 1e9 == pytest.approx(billions, rel=0.002)
    assert sum(part.macs(1) * part.layers for part in parts) / 1e9 == pytest.approx(active, rel=0.05)


def test_bytes_follow_the_checkpoint():
    def gigabytes(name: str, dtype: str = "auto") -> float:
        return sum(part.stored * part.element_bytes for part in products(read_model(name), dtype)) / 1e9

    assert gigabytes("deepseek-v3") == pytest.approx(672, abs=1)
    assert gigabytes("deepseek-v3", "bf16") == pytest.approx(2 * 670, abs=2)
    assert gigabytes("kimi-k2-thinking") == pytest.approx(592, abs=1)  # experts in 4 bits
    assert gigabytes("glm-4.7-flash") == pytest.approx(2 * 30, abs=1)
    assert gigabytes("longcat-flash") == pytest.approx(2 * gigabytes("longcat-flash-fp8"), rel=0.01)
    with pytest.raises(UnknownModelError, match="gguf"):
        products({**V3, "quantization_config": {"quant_method": "gguf"}})


def test_experts_touched_by_a_batch():
    experts = Product("experts", "experts", 10, 1, True, 1.0, experts=256, chosen=8)
    assert experts.touched(1) == pytest.approx(8 * 10)
    assert experts.touched(128) == pytest.approx(256 * 10 * (1 - (1 - 8 / 256) ** 128))
    assert experts.touched(10_000) == pytest.approx(256 * 10)
    assert experts.macs(3) == 3 * 8 * 10
    # Of the experts that LongCat's router chooses from a third do nothing.
    (chosen,) = {part.chosen for part in products(read_model("longcat-flash")) if part.experts}
    assert chosen == 8


def test_every_shipped_model_is_planned():
    layers = {
        **{"deepseek-v2-lite": 27, "deepseek-v3": 61, "glm-4.7-flash": 47, "mistral-large-3": 61, "kimi-linear": 7},
        **{"kimi-k2": 61, "kimi-k2-thinking": 61, "kimi-k2.5": 61, "kimi-k3": 24},
        **{"longcat-flash": 56, "longcat-flash-fp8": 56},
    }
    assert set(layers) == set(weights.model_names())
    for name in weights.model_names():
        of = Deployment(read_model(name), H200, tp=4)  # which divides GLM-4.7-Flash's 20 heads, too
        assert of.dims.num_layers == layers[name]
        assert predict(of, of.cover(128, 4096), 128, 4096, 256).seconds > 0


def test_weights_of_kimi_k3_are_its_checkpoints():
    """By the index of its files, and the shapes of what is for images."""
    images = 2 * (7168 + 4096 * 4096 + 7168 * 4096 + 1024 + 64 * 64 * 1024 + 1024 * 3 * 14 * 14)
    images += 2 * 27 * (2 * 4096 * 1024 + 2 * 1024 + 1024 * 1536 + 4608 * 1024)
    k3 = Deployment(read_model("moonshotai/Kimi-K3"), H200)
    # Norms and convolutions are left out.
    assert weight_bytes(k3) == pytest.approx(1_560_860_324_864 - images, rel=1e-4)


def test_layers_with_linear_attention():
    k3 = Deployment(read_model("kimi-k3"), H200, tp=16)
    assert (k3.dims.num_layers, k3.cost.local_heads, weights.all_layers(k3.config)) == (24, 6, 93)
    assert k3.state_bytes == 69 * (6 * 128 * 128 * 4 + 3 * 3 * 6 * 128 * 2)
    assert Deployment(read_model("kimi-k2"), H200).state_bytes == 0
    step = predict(k3, PLAIN, 98, 26472, 512)
    assert step.states == pytest.approx(98 * 2 * k3.state_bytes / H200.step.bytes_per_s)
    fewer = {**k3.config, "num_hidden_layers": 92}  # without the last one, which has MLA
    assert predict(dataclasses.replace(k3, config=fewer), PLAIN, 98, 26472, 512).attention == pytest.approx(
        step.attention * 23 / 24
    )


def test_what_is_not_planned_beside_linear_layers():
    for option in (("--draft-tokens", "4"), ("--kv-cache-dtype", "fp8_e4m3")):
        assert "drafts are refused, and an FP8 cache is not predicted" in refused("--model", "kimi-k3", *option)
    assert "what linear attention takes in one is not known" in refused("--model", "kimi-k3", "--arrivals", "200")
    with pytest.raises(weights.UnknownModelError, match="of a kind that nothing is known of"):
        products({**V3, "linear_attn_config": {"num_heads": 8}})


def test_states_take_their_share_of_the_memory():
    found = planned("--model", "kimi-k3", "--tp", "16", "--prefix", "26472", "--batch", "512", "--mem-fraction", "0.9")
    whole, case = found["memory"], found["cases"][0]
    left = 0.9 * H200.sheet.memory_bytes / 2**30 - whole["weights_gib"]
    assert whole["states_gib"] == pytest.approx(left * 0.9 / 1.9) and whole["budget_gib"] == pytest.approx(left / 1.9)
    # With four states of a request in place of five they are 115, and SGLang's cookbook says 98.
    assert 85 < whole["states_of_requests"] < 98
    assert case["running"]["chosen"] == case["memory"]["most_requests"]["absorb"] == whole["states_of_requests"]
    assert set(case["rest_parts_ms"]) >= {"linear", "states", "experts"}


def test_a_model_by_its_file_or_its_name_on_hugging_face(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(V3))
    assert (
        read_model(str(file))
        == read_model(str(tmp_path))
        == read_model("deepseek-ai/DeepSeek-R1")
        == read_model("deepseek-r1")
        == V3
    )
    options = ("--prefix", "7069", "--batch", "64")
    by_file, by_name = planned("--model", str(file), *options), planned(*options)
    assert by_file["cases"] == by_name["cases"]
    file.write_text('{"hidden_size": 64}')
    assert "it has no num" in refused("--model", str(file))
    file.write_text(json.dumps({**V3, "num_hidden_layers": 0}))
    assert "it has no layers with MLA" in refused("--model", str(file))
    file.write_text(json.dumps({name: V3[name] for name in V3 if "layers" not in name}))
    assert "it has no num_hidden_layers" in refused("--model", str(file))
    assert "Known are deepseek-v2-lite" in refused("--model", "gpt-2")


def test_ranks_share_what_they_can():
    def of(tp: int, dp: int = 1) -> Deployment:
        return Deployment(V3, H200, tp, dp)

    assert (of(8).cost.local_heads, of(8, 8).cost.local_heads, of(16, 4).cost.local_heads) == (16, 128, 32)
    assert of(8, 8).per_rank(100) == 13
    assert weight_bytes(of(1)) / 8 < weight_bytes(of(8)) < weight_bytes(of(8, 8)) < weight_bytes(of(1))
    eight = [predict(of(8, dp), PLAIN, 256, 7069, 256) for dp in (1, 8)]
    assert eight[0].products["experts"] == pytest.approx(eight[1].products["experts"])
    # DP attention gathers its rows by NCCL, once a layer; others sum them up twice.
    assert eight[1].exchanges > eight[0].exchanges > 0 == predict(of(1), PLAIN, 256, 7069, 256).exchanges
    two, four = (predict(of(tp), PLAIN, 256, 7069, 256).exchanges for tp in (2, 4))
    assert 0 < two < four < eight[0].exchanges
    with pytest.raises(ValueError, match="does not divide"):
        of(8, 3)


def test_a_step_is_its_parts():
    of = Deployment(V3, H200, 8)
    whole = Cover(naive=26472)
    step = predict(of, whole, 128, 26472, 512)
    assert set(step.products) == {"attention", "dense", "experts", "head"}
    assert step.attention == 61 * attention_seconds(of, whole, 128, 26472, 512)
    assert step.seconds == pytest.approx(step.attention + sum(step.products.values()) + step.exchanges + step.overhead)
    drafts = predict(dataclasses.replace(of, query_tokens=4), whole, 128, 26472, 512)
    assert step.seconds < drafts.seconds < 4 * step.seconds


def test_what_is_not_expanded_is_attended_to_in_other_ways():
    of = Deployment(V3, H200, 8)

    def seconds(*cover: int) -> float:
        return attention_seconds(of, Cover(*cover), 128, 26472, 512)

    assert seconds() == attention_seconds(of, PLAIN, 128, 26472, 512)
    assert seconds(26472) < seconds(13312, 13160) < seconds(0, 26432) < seconds(13312) < seconds()
    # One request shares with nobody.
    assert attention_seconds(of, Cover(26472), 1, 26472, 512) == attention_seconds(of, PLAIN, 1, 26472, 512)


def test_padding_takes_less_than_rows():
    few, all_heads = (Deployment(V3, H200, tp).cost for tp in (8, 1))
    assert latent_seconds(all_heads, 8, 100_000, 0.5) == latent_seconds(all_heads, 8, 100_000, 1)
    padded, plain = (latent_seconds(few, 512, 7069, padding, shared=True) for padding in (0.5, 1))
    assert padded == pytest.approx(plain * (16 + 0.5 * 48) / 64)
    assert latent_seconds(few, 512, 7069, 1) > plain  # without sharing, their reads bound them


def test_memory():
    of = Deployment(V3, H200, 8)
    found = memory(of, 0.85)
    assert found.weights == pytest.approx(672.3e9 / 8, rel=0.03)
    assert found.budget + found.weights == pytest.approx(H200.sheet.memory_bytes * 0.85)
    assert (found.latent_token, found.expanded_token) == (1152 * 61, 8320 * 61)
    # A quarter by default, of which our own buffers take a part.
    assert found.taken == int(found.budget) // 4
    left = found.taken - buffer_bytes(of, expands=True) - found.chunks * 256 * found.expanded_token
    assert 0 <= left < 256 * found.expanded_token
    assert found.tokens(shared=False) * 0.75 == pytest.approx(found.tokens(shared=True), rel=1e-5)
    most = found.most_requests(26472, 1000, shared=True)
    assert 26472 + most * 1000 <= found.tokens(shared=True) < 26472 + (most + 1) * 1000
    assert memory(of, 0.85, 4 << 30).taken == 4 << 30
    # With all heads on a rank a quarter holds too little; what is asked for is taken all the same.
    alone = Deployment(V3, H200, 8, 8)
    assert memory(alone, 0.85).chunks == 0 and memory(alone, 0.85).taken == buffer_bytes(alone, expands=False)
    assert memory(alone, 0.85, 9 << 30).chunks > 8
    nothing = memory(Deployment(V3, H200), 0.85)
    assert (nothing.budget, nothing.chunks, nothing.most_requests(26472, 1000, shared=False)) == (0, 0, 0)


def test_memory_is_the_servers():
    """Kimi-K2, TP 8, 24 layers, on an H200: what SGLang 0.5.23's log said with 3.6 GiB (rank-kimi-k2.jsonl)."""
    of = Deployment(rank_config(Rank("tp8", 24, "kimi-k2")), H200)
    of = dataclasses.replace(of, prefill_expand_tokens=default_transient_tokens_of(of, 0.85, 3.6 * 2**30))
    assert of.prefill_expand_tokens == 32768
    assert memory(of, 0.85, 3.6 * 2**30).chunks * 256 == 34816
    assert buffer_bytes(of, expands=False) == pytest.approx(0.252 * 2**30, rel=0.01)


def test_the_fraction_is_sglangs():
    """As 0.5.17 computes them from the GPU's MiB: 8 ranks, and 8 with DP attention, which needs larger graphs."""
    assert [default_fraction(Deployment(V3, H200, 8, dp)) for dp in (1, 8)] == pytest.approx([0.886, 0.758], abs=0.001)


def test_json_has_all_of_it():
    found = planned("--tp", "8", "--dp", "2", "--prefix", "26472", "--requests", "256", "--tail", "300")
    assert (found["heads_per_gpu"], found["dp"], found["tail"]) == (32, 2, 300)
    assert found["threshold"]["equation_1_data_sheet"] == pytest.approx(989 / 4.8 * 320 / 1088, rel=1e-3)
    (case,) = found["cases"]
    assert case["requests_per_rank"] == 128 and case["chosen"] == "naive"
    ms, rate = case["step_ms"], case["tokens_per_s"]
    assert ms["chosen"] == pytest.approx(case["attention_ms"]["chosen"] + case["rest_ms"])
    assert case["rest_ms"] == pytest.approx(sum(case["rest_parts_ms"].values()))
    assert rate["chosen"] == pytest.approx(256 / ms["chosen"] * 1e3)
    assert case["segments"] == [
        {"mode": "naive", "start": 0, "end": 9984},
        {"mode": "grouped_absorb", "start": 9984, "end": 26432},
    ]


def test_storage_and_drafts():
    def case(*options: str) -> dict:
        return planned("--tp", "8", "--prefix", "26472", "--batch", "128", *options)["cases"][0]

    plain, fp8, prefix = case(), case("--kv-cache-dtype", "fp8_e4m3"), case("--prefix-dtype", "fp8_e4m3")
    assert fp8["memory"]["latent_gib"] == pytest.approx(plain["memory"]["latent_gib"] * 656 / 1152)
    assert prefix["expanded_gib"] == fp8["expanded_gib"] < 0.52 * plain["expanded_gib"]
    assert prefix["memory"]["latent_gib"] == plain["memory"]["latent_gib"]
    bf16 = case("--dtype", "bf16")
    assert bf16["rest_ms"] > plain["rest_ms"]
    drafts = case("--draft-tokens", "4", "--accept-length", "2.5")
    assert drafts["tokens_per_s"]["chosen"] == pytest.approx(128 * 2.5 / drafts["step_ms"]["chosen"] * 1e3)
    assert "is not one of auto, bf16" in refused("--prefix-dtype", "int8")


def test_less_memory_for_prefixes_takes_longer():
    case = ("--tp", "8", "--prefix", "26472", "--batch", "128", "--prefix-memory-gb")
    whole, half, none = (planned(*case, gib)["cases"][0] for gib in ("13.2", "10", "0"))
    ms = [case["step_ms"]["chosen"] for case in (whole, half, none)]
    assert ms[0] < ms[1] < ms[2] < none["step_ms"]["absorb"]
    ways = [[each["mode"] for each in case["segments"]] for case in (whole, half, none)]
    assert ways == [["naive"], ["naive", "grouped_absorb"], ["grouped_absorb"]]
    assert whole["memory"]["expanded_tokens"] == 26472 and none["memory"]["expanded_tokens"] == 0


def test_a_measured_step_gives_the_rest():
    case = ("--tp", "8", "--prefix", "26472", "--batch", "128")
    (found,) = planned(*case, "--step-ms", "60")["cases"]
    assert found["step_ms"]["absorb"] == pytest.approx(60)
    assert found["rest_ms"] == pytest.approx(60 - found["attention_ms"]["absorb"])
    assert found["rest_parts_ms"] is None
    assert "is less than attention alone is predicted to take" in refused(*case, "--step-ms", "3")
    assert "of one step" in refused("--step-ms", "60", "--batch", "64", "--batch", "128")


@pytest.mark.parametrize("written", ["{}", "[]", '{"name": "H200", "l2_bytes": null}'])
def test_a_file_that_has_no_rates_is_refused(tmp_path, written):
    (tmp_path / "gpu.json").write_text(written)
    assert "no file of rates" in refused("--gpu", str(tmp_path / "gpu.json"))


@pytest.mark.parametrize("option", ["--step-ms", "--accept-length", "--prefix-memory-gb", "--prefill-pass-ms"])
def test_a_number_that_is_not_finite_is_refused(option):
    assert "inf is not a finite number" in refused(option, "inf")


def test_gpus_that_were_not_measured_say_so():
    def said(gpu: str) -> str:
        return CliRunner().invoke(app, ["plan", "--tp", "8", "--gpu", gpu]).output

    assert "are derived from data sheets, not measured" in said("h20") and Gpu.from_json("h20").derived
    assert "only attention's rates were measured" in said("h100") and not Gpu.from_json("h100").derived
    assert "derived" not in said("h200")
    half = dataclasses.replace(H200, step=Gpu.from_json("h20").step)
    of = Deployment(V3, half, 8)
    asked = report.Asked("deepseek-v3", "h200", [7069], [64], 512)
    assert any("only attention's rates" in line for line in tables.sentences(of, report.report(of, asked)))
    assert "attention alone is shown" in said("cpu") and "tokens/s" not in said("cpu")


def recommended(*options: str) -> str:
    result = CliRunner().invoke(app, ["plan", *options])
    assert result.exit_code == 0, result.output
    before, _, _ = result.output.partition("┏")
    return " ".join(before.split())


def advised(found: dict) -> str:
    """All that the recommendation says."""
    return " ".join([found["verdict"], *found["notes"]])


def test_it_begins_with_the_verdict():
    said = recommended("--tp", "8", "--prefix", "26472", "--batch", "256")
    found = planned("--tp", "8", "--prefix", "26472", "--batch", "256")
    advice, memory = found["recommendation"], found["memory"]
    # A little more than the default holds the whole prompt.
    assert (
        advice["turn_on"] and advice["flags"][1] == "--hybrid-mla-prefix-memory-gb 13.2" and advice["flags"][1] in said
    )
    assert found["cases"][0]["ratio"] < advice["ratio"][0] and f"{advice['ratio'][0]:.2f}x" in said
    assert advice["pays_from"] == {"26472": 2} and "26,472 tokens: break-even at 2 requests" in said
    assert memory["cache_tokens"]["absorb"] == advice["cache_tokens"]["stock"] > advice["cache_tokens"]["shared"]
    assert f"{advice['cache_tokens']['shared']:,} tokens in place of {advice['cache_tokens']['stock']:,}" in said
    assert "--hybrid-mla-prefix-memory-gb" not in recommended("--tp", "8", "--prefix", "7069", "--batch", "256")


def test_advice_for_short_answers():
    """Mixed steps gain where decode alone does not."""
    few = ("--tp", "8", "--dp", "8", "--prefix-sharding", "--prefix", "7069", "--batch", "128")
    assert recommended(*few).startswith("OFF")
    assert recommended(*few, "--arrivals", "112").startswith("ON: ")
    many = ("--tp", "8", "--prefix", "7069", "--batch", "128", "--arrivals", "112")
    least, most = planned(*many, "--prefill-pass-ms", "298")["recommendation"]["ratio_replaced"]
    assert least == most > 2
    assert planned(*many[:6])["recommendation"]["ratio_replaced"] is None


def test_the_gain_with_short_answers_without_and_with_a_slow_host():
    """The lower one comes first, and is what the recommendation rests on."""
    options = ("--tp", "8", "--prefix", "7069", "--batch", "128", "--arrivals", "112")
    found = planned(*options)
    first, second = found["cases"][0]["arrivals"]
    assert (first["prefill_pass_ms"], second["prefill_pass_ms"]) == (0, pytest.approx(297.5))
    assert 1.5 < first["ratio"] < 2 < 4 < second["ratio"]
    advice = found["recommendation"]
    assert advice["ratio_replaced"] == [first["ratio"]] * 2
    assert advice["ratio_replaced_slow_host"] == [second["ratio"]] * 2
    said = f"; {first['ratio']:.2f}x where requests are replaced as they end ({second['ratio']:.2f}x with a host that"
    assert said in advice["verdict"]
    alone = planned(*options, "--prefill-pass-ms", "0")["recommendation"]
    assert alone["ratio_replaced"] == advice["ratio_replaced"] and alone["ratio_replaced_slow_host"] is None


def test_advice_where_nothing_is_gained():
    few = recommended("--tp", "8", "--prefix", "7069", "--batch", "4")
    assert few.startswith("OFF") and "break-even: 11 requests at 7,069 tokens" in few
    heavy = recommended("--tp", "8", "--dp", "8", "--no-prefix-sharding", "--prefix", "26472")
    assert heavy.startswith("OFF") and "Without DP attention" in heavy
    assert "do not fit in 1 of these GPUs" in recommended()
    assert "with --mem-fraction-static 0.63" in recommended("--tp", "8", "--mem-fraction", "0.5", "--batch", "256")
    assert planned("--gpu", "cpu", "--model", "deepseek-v2-lite")["recommendation"] is None


def test_fp8_weights_of_mistral_large_3_fit_an_h200s_host():
    found = planned("--model", "mistral-large-3", "--tp", "8", "--prefix", "26472", "--batch", "256")
    assert found["memory"]["weights_gib"] == pytest.approx(79, abs=2) and found["recommendation"]["turn_on"]
    assert "FP4 weights are for Blackwell" in refused("--model", "mistralai/Mistral-Large-3-675B-Instruct-2512-NVFP4")


@pytest.mark.parametrize(
    ("options", "fraction", "said"),
    [
        (("--gpu", "h20", "--tp", "8"), 0.94, "does not hold a single one of these requests; with"),
        (
            ("--model", "kimi-k2", "--gpu", "h100", "--tp", "16", "--prefix", "7069"),
            *(0.88, "The KV cache is small: with"),
        ),
        (("--tp", "8", "--mem-fraction", "0.5", "--prefix", "7069"), 0.63, "the weights do not fit; with"),
    ],
    ids=["no request", "few requests", "no weights"],
)
def test_a_larger_fraction_of_the_memory_is_named_where_only_that_is_missing(options, fraction, said):
    case = (*options, "--batch", "256") + (() if "--prefix" in options else ("--prefix", "26472"))
    advice = planned(*case)["recommendation"]
    assert advice["mem_fraction"] == fraction
    assert f"{said} --mem-fraction-static {fraction:.2f}" in advised(advice) and "expect 1." in advised(advice)
    better = planned(*case, "--mem-fraction", str(fraction))
    assert better["memory"]["cache_tokens"]["absorb"] >= better["cases"][0]["prompt"] + 256 * 512
    assert better["recommendation"]["mem_fraction"] is None and better["recommendation"]["turn_on"] is not None


def test_no_fraction_is_named_where_none_is_large_enough():
    assert planned("--gpu", "h20", "--tp", "4")["recommendation"]["mem_fraction"] is None
    assert planned("--tp", "8", "--prefix", "7069", "--batch", "64")["recommendation"]["mem_fraction"] is None


def test_more_requests_than_a_step_shares_with():
    """Above 1,024 rows a step is plain absorb, and more requests gain nothing: they have to wait."""
    lite = ("--model", "deepseek-v2-lite", "--prefix", "20000", "--tail", "100", "--batch")
    advice, fewer = (planned(*lite, batch)["recommendation"] for batch in ("1500", "1024"))
    assert advice["turn_on"] and "--max-running-requests 1024" in advice["flags"]
    assert "--max-running-requests" not in advised(fewer) and 3 < advice["ratio"][0] < fewer["ratio"][0]
    assert "Requests beyond --max-running-requests wait." in advised(advice)
    drafts = ("--tp", "8", "--prefix", "4759", "--batch", "512", "--draft-tokens", "4", "--accept-length", "2.5")
    found = planned(*drafts)
    said = found["recommendation"]["verdict"]
    assert said.startswith("OFF") and "gains more with more requests" not in said
    assert "a step shares up to 1,024 rows: --max-running-requests 256, while others wait, gives 0.9" in said
    assert found["cases"][0]["why_plain"].endswith("--max-running-requests 256 keeps steps below")


def test_advice_to_hold_prefixes_together():
    """In BF16 the default holds a part of the prompt, in FP8 all of it fits; not where it cannot be, or is already."""
    together = ("--tp", "8", "--dp", "8", "--prefix", "26472", "--batch", "1024")
    case = (*together, "--no-prefix-sharding")
    said, sharded = (recommended(*case), planned(*together, "--prefix-dtype", "fp8_e4m3")["recommendation"])
    assert (
        said.startswith("OFF without the changes below: ")
        and "With --hybrid-mla-prefix-sharding auto expect 1." in said
    )
    fp8 = "With --hybrid-mla-prefix-dtype fp8_e4m3, --hybrid-mla-prefix-sharding auto and --hybrid-mla-prefix-memory-gb"
    assert f"{fp8} 7.3 expect {sharded['ratio'][0]:.2f}x, at FP8's precision." in said
    assert "Prefill gains in addition" in said
    apart = recommended(*case, "--prefill-expand-tokens", "0")
    assert "6.8 and --hybrid-mla-prefill-expand-tokens 0 expect" in apart and "and with later first tokens" in apart
    assert "Prefill gains" not in apart
    assert sharded["turn_on"] and not any(note.startswith("With --") for note in sharded["notes"])
    assert "prefix-sharding" not in recommended(*case[:2], "--dp", "4", *case[4:]) + recommended("--tp", "8", *case[4:])


def test_a_rank_with_all_heads_where_it_pays():
    kimi = ("--model", "kimi-k2.5", "--tp", "8", "--dp", "8", "--kv-cache-dtype", "fp8_e4m3", "--prefix", "7069")
    said = recommended(*kimi, "--no-prefix-sharding")
    assert said.startswith("ON: ") and "--hybrid-mla-dp-routing prefix" in said
    assert "requests a rank" in said


def test_nothing_saved_says_why_and_the_cache_limits_what_runs():
    batches = (word for batch in (128, 512, 1024, 2048) for word in ("--batch", str(batch)))
    case = ("--tp", "8", "--dp", "8", "--no-prefix-sharding", "--prefix", "26472", *batches)
    found = planned(*case)
    assert [case["requests"] for case in found["cases"]] == [128, 512, 1024, 2048]
    reasons = [case["why_plain"] for case in found["cases"]]
    assert "at 37 requests a rank" in reasons[0] and reasons[1] == "no memory for expanded tokens"
    output = CliRunner().invoke(app, ["plan", *case]).output
    assert all(reason in output for reason in reasons) and "512 (64)" in output
    full = planned("--tp", "8", "--prefix", "26472", "--batch", "4000")["cases"][0]
    assert full["running"]["chosen"] < full["running"]["absorb"] == full["memory"]["most_requests"]["absorb"] < 4000
    assert full["tokens_per_s"]["chosen"] == pytest.approx(full["running"]["chosen"] / full["step_ms"]["chosen"] * 1e3)


def test_small_groups_gain_in_the_step_what_the_planner_counts():
    """16 requests on 7,069 tokens, 16 heads: grouped absorb, 5 of 40 us a layer were measured."""
    (case,) = planned("--tp", "8", "--prefix", "7069", "--batch", "16")["cases"]
    assert case["chosen"] == "grouped_absorb" and 0.1 < case["saved"] < 0.15 and case["ratio"] > 1.01


@pytest.mark.parametrize("name", ["h800", "H200", "nvidia H20"])
def test_gpus_as_people_name_them(name):
    assert Gpu.named(name).sheet is not None and Gpu.named(name).key == name.lower().split()[-1].replace("800", "100")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *(("a100", "a GPU before Hopper"), ("RTX 6000 Ada", "a GPU before Hopper"), ("gaudi3", "no NVIDIA GPU")),
        *((name, "a Blackwell GPU") for name in ("B200", "b300", "gb200", "rtx5090")),
        *((name, "an AMD GPU") for name in ("mi300x", "AMD Instinct MI355X")),
    ],
)
def test_gpus_that_it_does_not_run_on(name, what):
    assert f"does not run on {name}, {what}: " in refused("--gpu", name)


def test_cards_of_one_name_with_other_memory():
    assert {Gpu.named(name).key for name in ("h20-3e", "h20-141gb", "NVIDIA H20-3e")} == {"h20-3e"}
    more, less = Gpu.named("h20-3e").sheet, Gpu.named("h20-96gb").sheet
    assert (more.memory_bytes, more.bytes_per_s) == (H200.sheet.memory_bytes, H200.sheet.bytes_per_s)
    assert (less, more.bf16_flops) == (Gpu.from_json("h20").sheet, less.bf16_flops)
    assert Gpu.named("NVIDIA H100 80GB HBM3").key == "h100" and Gpu.named("h200-141gb").key == "h200"
    for name in ("h100-nvl", "h100-pcie", "h100-94gb", "h20-48gb"):
        assert "is another card" in refused("--gpu", name)


@pytest.mark.parametrize(
    ("option", "name", "said"),
    [
        ("--model", "deepsek-r1", "Did you mean deepseek-r1?"),
        ("--model", "kimik2", "Did you mean kimi-k2?"),
        ("--model", "deepseek-v3.2", "deepseek-v3.2 is not supported: DeepSeek Sparse Attention"),
        ("--model", "deepseek-ai/DeepSeek-V3.2-Exp", "is not supported: DeepSeek Sparse Attention"),
        ("--gpu", "h20o", "Did you mean h20?"),
    ],
)
def test_a_name_that_is_not_known(option, name, said):
    assert said in refused(option, name)


def test_the_largest_burst_is_told_whatever_the_order():
    for batches in (("256", "64"), ("64", "256")):
        flags = [word for batch in batches for word in ("--batch", batch)]
        output = CliRunner().invoke(app, ["plan", "--tp", "8", "--prefix", "26472", *flags]).output
        assert "256 requests at once" in output and "64 requests at once" not in output


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    for name, options in (("a.png", ("--tp", "8")), ("b.svg", ("--gpu", "cpu", "--model", "deepseek-v2-lite"))):
        planned(*options, "--plot", str(tmp_path / name))
        assert (tmp_path / name).stat().st_size > 10_000
    assert "Format" in refused("--plot", str(tmp_path / "a.xyz"))


def test_prefixes_that_ranks_hold_together() -> None:
    """An eighth of the memory, and shared where a rank alone has no room; the exchange is a part of the step."""
    sharded, alone = (
        planned("--tp", "8", "--dp", "8", "--prefix", "26472", "--requests", "1024", *flags)
        for flags in ([], ["--no-prefix-sharding"])
    )
    (case,), (other,) = sharded["cases"], alone["cases"]
    assert 7 * case["expanded_gib"] < other["expanded_gib"] < 8 * case["expanded_gib"]
    assert (case["chosen"], other["chosen"]) == ("naive", "absorb") and case["ratio"] > other["ratio"]
    assert (
        sharded["threshold"]["pays_from_all_expanded"]["26472"] < alone["threshold"]["pays_from_all_expanded"]["26472"]
    )
    of = Deployment(V3, H200, 8, 8, prefix_sharding=True)
    free = dataclasses.replace(of.gpu, rates=dataclasses.replace(of.gpu.rates, exchange=None, exchange_by_stores=None))
    rates = of.cost.rates.exchange
    assert rates == of.gpu.rates.exchange_by_stores, "ranks of one host"
    assert Deployment(V3, H200, 16, 16, prefix_sharding=True).cost.rates.exchange == of.gpu.rates.exchange, (
        "of two hosts"
    )
    cover = Cover(naive=26472)
    exchange = (
        predict(of, cover, 1024, 26472, 0).seconds
        - predict(dataclasses.replace(of, gpu=free), cover, 1024, 26472, 0).seconds
    )
    bytes_sent = 128 * (128 - 16) * (192 + 128) * 2
    assert exchange == pytest.approx(61 * (rates.overhead_s + bytes_sent / rates.bytes_per_s))
    assert "--hybrid-mla-prefix-sharding" not in advised(sharded["recommendation"]), "it is the server's default"
    hosts = planned("--tp", "16", "--dp", "16", "--prefix", "26472", "--requests", "2048", "--prefix-sharding")
    assert "--hybrid-mla-prefix-sharding nccl" in advised(hosts["recommendation"])
    for bad in ({"dp": 4}, {"tp": 1, "dp": 1}):
        with pytest.raises(ValueError, match="--prefix-sharding needs --dp as large as --tp"):
            Deployment(**{"config": V3, "gpu": H200, "tp": 8, "dp": 8, "prefix_sharding": True, **bad})


def test_what_a_launch_refuses_is_not_planned(tmp_path):
    file = tmp_path / "config.json"
    for change, why in (({"index_topk": 2048}, "sparse attention"), ({"kv_lora_rank": 256}, "256 + 64 elements")):
        file.write_text(json.dumps(V3 | change))
        assert why in refused("--model", str(tmp_path))
    assert "context has 163,840 tokens" in refused("--prefix", "500000")
    assert "adds at most 4" in refused("--draft-tokens", "4", "--accept-length", "6")
    assert "less than or equal to 8" in refused("--draft-tokens", "9")
    assert DRAFT_TOKENS[-1] == 8
    assert "is 0, or at least 256" in refused("--prefill-expand-tokens", "100")


def test_arrivals_run_no_more_requests_than_the_cache_holds():
    def served(*more: str) -> dict:
        options = ("--tp", "8", "--arrivals", "4000", "--prefill-pass-ms", "0", *more)
        return planned(*options)["cases"][0]["arrivals"][0]

    most = 687_369 // (128 + 2000)  # tokens of the cache, without the prompt
    assert (
        served("--batch", "512")["absorb"]["tokens_per_s"] == served("--batch", str(most - 3))["absorb"]["tokens_per_s"]
    )
    assert served("--batch", "512")["ratio"] < served("--batch", "128")["ratio"] * 1.5


def test_advice_where_the_memory_named_is_too_little():
    """Advice names other memory, and no flag for ranks of DP attention where there are none."""

    def said(*options: str) -> str:
        return " ".join(CliRunner().invoke(app, ["plan", *options]).output.split())

    tight = said("--tp", "8", "--prefix", "26000", "--prefix-memory-gb", "4")
    assert "With --hybrid-mla-prefix-memory-gb 13 expect" in tight and "sharding" not in tight
    assert "and the default memory for prefixes expect" in tight
    assert "use less memory for prefixes" in said("--tp", "8", "--prefix-memory-gb", "200")
    assert "use more of them (--tp), or weights of fewer bits" in said("--tp", "4")

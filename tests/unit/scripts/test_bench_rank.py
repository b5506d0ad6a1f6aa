"""One rank of a whole model: its configuration as SGLang reads it, what is sent to it, and who is measured when."""

from __future__ import annotations

import contextlib
import itertools
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_rank
import numpy as np
import pytest
import typer
from bench import beside, server
from bench.beside import Comparison, in_turns
from bench.client import ClientFailedError
from bench.records import read_records
from bench.server import ServerFailedError, Started
from bench.workload_runs import Timings
from bench.workloads import KINDS, Workload, make_load
from demo_model.rank import DIVIDED, K3, K3_MLA, OF_K3, Rank, make_rank, rank_config
from sglang.srt.configs.kimi_linear import KimiLinearConfig
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from typer.testing import CliRunner

from sglang_mla_ext.configs import read_config

VOCABULARY = np.arange(10, 9_000)


@pytest.mark.parametrize(
    ("divided", "heads", "experts", "width", "dense"),
    [("tp8", 16, 256, 256, 2304), ("dp8", 128, 32, 2048, 18432)],
)
def test_sglang_reads_a_rank(divided: str, heads: int, experts: int, width: int, dense: int, tmp_path: Path) -> None:
    rank = Rank(divided, 36)
    assert make_rank(tmp_path / "rank", rank) and not make_rank(tmp_path / "rank", rank)
    config = ModelConfig(str(tmp_path / "rank"))
    assert (config.num_hidden_layers, config.num_attention_heads, config.hidden_size) == (36, heads, 7168)
    assert config.attention_arch == AttentionArch.MLA and config.context_len == 65536
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.vocab_size) == (512, 64, 129280 // 8)
    assert config.quantization == "fp8"
    text = config.hf_text_config
    assert (text.n_routed_experts, text.moe_intermediate_size, text.intermediate_size) == (experts, width, dense)
    assert (text.first_k_dense_replace, text.num_experts_per_tok, text.q_lora_rank) == (3, 8, 1536)


def test_ranks_that_run_together_have_the_experts_of_as_many() -> None:
    """A rank's share is the same: SGLang divides these experts among those that run."""
    one, four = (rank_config(Rank("dp8", 36, running=running)) for running in (1, 4))
    differ = {field: (one[field], four[field]) for field in one if one[field] != four[field]}
    assert differ == {"n_routed_experts": (32, 128), "vocab_size": (129280 // 8, 129280 // 2)}


@pytest.mark.parametrize("divided", DIVIDED)
@pytest.mark.parametrize("model", ["deepseek-v3", "kimi-k2"])
def test_all_ranks_are_the_whole_model(divided: str, model: str) -> None:
    rank = Rank(divided, model=model)
    config, own = rank_config(replace(rank, running=rank.ranks)), read_config("checkpoints", model)["config"]
    for field in (*DIVIDED["tp8"], *DIVIDED["dp8"]):
        assert config[field] == own[field]


@pytest.mark.parametrize(("divided", "running"), [("tp8", 3), ("dp8", 3), ("dp8", 16)])
def test_ranks_that_cannot_run_together(divided: str, running: int) -> None:
    with pytest.raises(ValueError, match=f"{running} ranks of deepseek-v3's {divided} cannot run together"):
        Rank(divided, running=running)
    with pytest.raises(ValueError, match="2 ranks of kimi-k3's tp8 cannot run together"):
        Rank("tp8", 9, K3, running=2)


@pytest.mark.parametrize("divided", ["tp4", "dp4"])
def test_ranks_run_behind_one_server(divided: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With DP attention where they have requests of their own."""
    asked: list[list[str]] = []
    monkeypatch.setattr(Comparison, "run", lambda self, arguments, environment, **options: asked.append(arguments))
    app = typer.Typer()
    app.command()(bench_rank.main)
    done = CliRunner().invoke(app, ["--rank", divided, "--running", "4", "--layers", "4"])
    assert done.exit_code == 0, done.output
    given = asked[0][asked[0].index("--tp-size") :]
    assert given == ["--tp-size", "4", *(["--dp-size", "4", "--enable-dp-attention"] if divided == "dp4" else [])]


@pytest.mark.parametrize("divided", OF_K3)
def test_sglang_reads_a_rank_of_kimi_k3(divided: str) -> None:
    """Layers of both kinds in their order, and so many of a rank's experts for a token as come to it in the mean."""
    ranks = int(divided[2:])
    config = rank_config(Rank(divided, 9, K3))
    text = KimiLinearConfig(**config["text_config"])
    assert config["architectures"] == ["KimiK3ForConditionalGeneration"] and config["language_model_only"]
    assert (text.num_hidden_layers, text.num_attention_heads, text.kv_lora_rank) == (9, 96 // ranks, 512)
    assert text.is_mla and text.is_linear_attn and text.quantization_config["format"] == "mxfp4-pack-quantized"
    assert (text.full_attention_layer_ids, text.linear_attn_config["num_heads"]) == ([3, 7], 96 // ranks)
    assert text.linear_layer_ids == [0, 1, 2, 4, 5, 6, 8]
    assert (text.num_experts, text.num_experts_per_token) == (896 // ranks, 16 // ranks)
    assert (text.moe_intermediate_size, text.routed_expert_hidden_size, text.attn_res_block_size) == (3072, 3584, 12)


@pytest.mark.parametrize("divided", OF_K3)
def test_a_rank_of_its_mla_layers_alone(divided: str, tmp_path: Path) -> None:
    """As layers of DeepSeek-V3's class, so that any SGLang has them."""
    ranks = int(divided[2:])
    make_rank(tmp_path, Rank(divided, 24, K3_MLA))
    config = ModelConfig(str(tmp_path))
    assert (config.num_hidden_layers, config.num_attention_heads, config.quantization) == (24, 96 // ranks, None)
    assert config.hf_config.architectures == ["DeepseekV3ForCausalLM"] and config.hidden_size == 7168
    text = config.hf_text_config
    assert (text.first_k_dense_replace, text.intermediate_size, text.q_lora_rank) == (24, 2 * 3072 // ranks, 1536)


@pytest.mark.parametrize("model", [K3, K3_MLA])
def test_kimi_k3_is_not_divided_by_requests(model: str) -> None:
    with pytest.raises(ValueError, match=f"{model} is divided by tp8 or tp16, not dp8"):
        Rank("dp8", 24, model)


@pytest.mark.parametrize(("divided", "model"), itertools.product(DIVIDED, ("deepseek-v3", "kimi-k2")))
def test_a_ranks_sizes_fit_the_blocks_and_the_router(divided: str, model: str) -> None:
    """A block of FP8 is 128 wide; a token's experts are in the groups that it may go to, two of each at least."""
    config = rank_config(Rank(divided, model=model))
    assert config["num_hidden_layers"] == 61
    block = config["quantization_config"]["weight_block_size"][0]
    for width in ("intermediate_size", "moe_intermediate_size", "hidden_size", "q_lora_rank"):
        assert config[width] % block == 0
    per_group = config["n_routed_experts"] // config["n_group"]
    assert per_group >= 2 and per_group * config["topk_group"] >= config["num_experts_per_tok"]


def load(kind: str, concurrency: int = 8, **options: Any) -> Workload:
    sizes = {"answers": 6, "output_tokens": 32} | options
    return make_load(kind, 100, concurrency, VOCABULARY, 0, **sizes)


def warm_up(workload: Workload) -> Workload:
    return replace(workload, sessions=workload.warm_up)


def own(workload: Workload) -> list[int]:
    return [len(turn.ids) - 100 for (turn,) in workload.sessions]


def answers(workload: Workload) -> list[int]:
    return [turn.output_tokens for turns in workload.sessions for turn in turns]


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_up_shares_the_prompt_and_nothing_else(kind: str) -> None:
    one = load(kind)
    (prompt,) = one.cached
    sent = [turns[0].ids for turns in (*one.warm_up, *one.sessions)]
    assert len(prompt) == 100 and all(ids[:100] == prompt for ids in sent)
    assert len({tuple(ids) for ids in sent}) == len(sent)
    assert max(answers(warm_up(one))) <= 64
    assert one.digest == load(kind).digest


def test_decode_sends_all_at_once() -> None:
    one = load("decode")
    assert one.all_at_once and warm_up(one).all_at_once and one.stream_interval == 16
    assert warm_up(load("decode", 100)).requests == 64
    assert {*answers(one)} == {32} and 350 <= min(own(one)) <= max(own(one)) <= 450


def test_short_has_answers_that_others_wait_for() -> None:
    one = load("short", 128)
    assert (one.requests, one.concurrency, one.stream_interval) == (768, 128, 1)
    assert not warm_up(one).all_at_once and warm_up(one).requests == 160
    assert 60 <= min(own(one)) < 70 < 290 < max(own(one)) <= 300
    assert np.mean(answers(one)) == pytest.approx(112, rel=0.05)
    assert load("short", answers=3).requests == 24


@pytest.mark.parametrize(("kind", "mean"), [("mmlu", 248), ("gsm8k", 314), ("simpleqa", 111)])
def test_datasets_answers(kind: str, mean: float) -> None:
    assert np.mean(answers(load(kind, 256))) == pytest.approx(mean, rel=0.15)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([None], [["a None"], ["b None"], ["c None"]]),
        (["0", "3"], [["a 0", "b 3"], ["c 0"]]),
    ],
)
def test_turns(gpus: list[str | None], expected: list[list[str]], tmp_path: Path) -> None:
    groups = in_turns(["a", "b", "c"], gpus, tmp_path)
    assert [[f"{placed.backend} {placed.gpu}" for placed in group] for group in groups] == expected
    logs = [placed.log for group in groups for placed in group]
    assert len({*logs}) == len(logs)


class Servers:
    """Servers that start at once, or not at all; and what is measured on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[tuple[str, str | None]] = []
        self.ended: list[str] = []
        self.arguments: list[str] = []
        self.environment: dict[str, str] = {}

    @contextlib.contextmanager
    def start(self, arguments: list[str], port: int, log: Path, console: Any, environment: Any) -> Iterator[Started]:
        name = arguments[1]
        self.arguments, self.environment = arguments, environment
        self.started.append((name, environment.get("CUDA_VISIBLE_DEVICES")))
        try:
            yield Started(name, f"http://{name}", log, console)  # type: ignore[arg-type]
        finally:
            self.ended.append(name)

    @staticmethod
    def wait(name: str, *others: Any) -> None:
        if name == "ill":
            raise ServerFailedError("no memory")

    def run(self, url: str, workload: Workload, *others: Any) -> Timings:
        assert workload.warm_up
        name = url.removeprefix("http://")
        if name == "bad":
            raise ClientFailedError("not all answered")
        while name == "slow" and "slow" not in self.ended:
            time.sleep(0.01)
        return Timings(2.0, 100.0, None, 200.0, 10.0, 20.0, 30.0, 1.0, 2.0, None, None)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Servers:
    found = Servers(tmp_path)
    monkeypatch.setattr(beside, "started_server", found.start)
    monkeypatch.setattr(server, "wait_until_ready", found.wait)
    monkeypatch.setattr(beside, "run_workload", found.run)
    monkeypatch.setattr(beside, "server_case", lambda url, dims: {"heads": dims.num_heads})
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the ranks, each of which is written once."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def bench(servers: Servers, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(bench_rank, "work_folder", lambda: models)
    app = typer.Typer()
    app.command()(bench_rank.main)

    def run(
        *arguments: str,
        rank: str = "tp8",
        of: str = "deepseek-v3",
        case: str = "short:20:2",
        backends: tuple[str, ...] = (),
    ) -> Any:
        named = [word for name in backends for word in ("--backend", name)]
        small = ["--rank", rank, "--of", of, "--layers", "4", "--case", case, "--log-folder", str(tmp_path)]
        return CliRunner().invoke(app, [*arguments, *named, *small])

    return run


def test_records_say_which_rank_where(servers: Servers, bench: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    done = bench("--gpus", "0,1", "--out", str(out), backends=("hybrid_mla --hybrid-mla-mode naive", "flashmla"))
    assert done.exit_code == 0, done.output
    assert servers.started == [("hybrid_mla", "0"), ("flashmla", "1")]
    assert servers.environment["SGLANG_ENABLE_JIT_DEEPGEMM"] == "0"
    assert servers.environment["SGLANG_SIMULATE_UNIFORM_EXPERTS"] == "1"
    assert servers.arguments[servers.arguments.index("--load-format") + 1] == "dummy"
    records = read_records(out)
    assert sorted((r["impl"], r["run"], r["case"]["on"]) for r in records) == [
        *(("hybrid_mla", 1, "0"), ("sglang_flashmla", 1, "1")),
    ]
    for record in records:
        case = record["case"]
        assert (record["bench"], case["rank"], case["heads"], case["deep_gemm"]) == ("short", "tp8", 16, False)
        assert record["steady_tok_s"] == 200 and {"gpu", "commit", "date", "command"} <= {*record}


def test_what_fails_does_not_end_the_others(servers: Servers, bench: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    flags = ["--gpus", "0,1", "--deep-gemm", "--out", str(out)]
    done = bench(*flags, case="decode:30:3", backends=("bad", "ill", "good", "fine"))
    assert {(record["bench"], record["case"]["prompt"]) for record in read_records(out)} == {
        ("decode", "30 tokens, 3 requests")
    }
    assert done.exit_code == 1 and "bad: not all answered" in done.output and "ill: no memory" in done.output
    assert "SGLANG_ENABLE_JIT_DEEPGEMM" not in servers.environment
    assert sorted(record["impl"] for record in read_records(out)) == ["sglang_fine", "sglang_good"]


def test_the_limit_stops_servers_and_keeps_what_is_there(
    servers: Servers, bench: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that would start behind it do not. The clock stands still until the slow server starts, and again there."""

    def monotonic() -> float:
        if "slow" in servers.ended:
            return 60.0
        return 59.9 if any(name == "slow" for name, _ in servers.started) else 0.0

    clock = types.SimpleNamespace(monotonic=monotonic)
    monkeypatch.setattr(bench_rank, "time", clock)
    monkeypatch.setattr(beside, "time", clock)
    out = tmp_path / "records.jsonl"
    done = bench("--limit-s", "60", "--out", str(out), backends=("good", "slow", "never"))
    assert done.exit_code == 1 and "slow: no time left" in done.output
    assert [name for name, _ in servers.started] == servers.ended == ["good", "slow"]
    assert read_records(out)[0]["impl"] == "sglang_good"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": "tp9"}, "tp4, tp8, tp16, dp4, dp8"),
        ({"of": "llama"}, "deepseek-v3, kimi-k2"),
        ({"case": "long:20:2"}, "no workload long"),
        ({"case": "short:7069"}, "not short:7069"),
    ],
)
def test_what_the_command_refuses(arguments: dict[str, str], message: str, bench: Callable[..., Any]) -> None:
    done = bench(**arguments)
    assert done.exit_code == 2 and message in " ".join(done.output.split())

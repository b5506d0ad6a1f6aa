"""`sglang-mla`: what `plan` shows, what `doctor` finds, and how little both load."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from contextlib import nullcontext

import pytest
from typer.testing import CliRunner

from sglang_mla_ext import __version__, doctor
from sglang_mla_ext.adapter.compat.contract import ContractError, installed_version
from sglang_mla_ext.adapter.compat.findings import Finding, unsupported
from sglang_mla_ext.adapter.compat.table import Feature
from sglang_mla_ext.adapter.launch import examine, tested_configurations
from sglang_mla_ext.adapter.launch.launch_line import LaunchLine
from sglang_mla_ext.cli import app


def plan(*options: str) -> str:
    result = CliRunner().invoke(app, ["plan", "--details", *options])
    assert result.exit_code == 0, result.output
    return result.output


def chosen(output: str) -> list[list[str]]:
    """The cells of the first table's rows."""
    lines = (line[1:-1].split("│") for line in output.partition("└")[0].splitlines() if line.startswith("│"))
    return [[cell.strip() for cell in cells] for cells in lines]


def test_few_heads_have_three_modes():
    rows = chosen(plan("--tp", "8", "--prefix", "7069", "--batch", "2", "--batch", "16", "--batch", "512"))
    assert [(row[1], row[5]) for row in rows if row[0]] == [("2", "absorb"), ("16", "grouped"), ("512", "naive")]
    assert "26,472 tokens: break-even at 2 requests" in plan("--tp", "8", "--prefix", "26472")


def test_drafts_make_sharing_pay_earlier():
    def pays_from(*options: str) -> int:
        output = plan("--prefix", "26472", "--batch", "16", *options)
        return int(output.split("break-even at ")[1].split()[0])

    alone, four = pays_from(), pays_from("--draft-tokens", "4")
    assert 3 < alone / four < 5
    assert "4 tokens each" in " ".join(plan("--draft-tokens", "4").split()) and "tokens each" not in plan()


@pytest.mark.parametrize("options", [("--tp", "1"), ("--tp", "8", "--gpu", "h20")], ids=["128 heads", "not measured"])
def test_where_servers_do_not_stack_requests_the_mode_is_not_shown(options):
    output = plan(*options)
    assert "grouped" not in output and "naive" in output


@pytest.mark.parametrize(
    ("command", "absent"),
    [
        ("plan", ("torch", "triton", "sglang", "numpy", "matplotlib")),
        # Where there is a GPU, torch is asked for its name.
        ("doctor", ("sglang", "sglang_mla_ext.kernels")),
    ],
)
def test_it_loads_little(command, absent):
    code = (
        "import sys\n"
        "from sglang_mla_ext.cli import app\n"
        f"app([{command!r}], standalone_mode=False)\n"
        f"found = [name for name in sys.modules if (name + '.').startswith({tuple(name + '.' for name in absent)!r})]\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert ("CANNOT RUN" if command == "plan" else "ready") in done.stdout


def test_a_plan_is_there_at_once():
    """By its processor time: how long it waits for others says nothing of it. What it must not import takes more."""
    code = "from sglang_mla_ext.cli import app; app(['plan', '--tp', '8'], standalone_mode=False)"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=300)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 3.0


def test_doctor_is_content_with_the_installed_sglang(monkeypatch):
    monkeypatch.setattr(doctor, "gpu_here", lambda: (None, None))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0 and "ready" in result.output and "not ready" not in result.output
    assert str(installed_version()) in result.output and "no GPU" in result.output


def test_doctor_warns_of_a_version_that_was_not_tested(monkeypatch):
    monkeypatch.setattr(doctor, "untested", lambda: "sglang 99.0 was not tested")
    monkeypatch.setattr(doctor, "gpu_here", lambda: (None, None))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0 and "sglang 99.0 was not tested" in result.output


def test_doctor_names_what_is_wrong(monkeypatch):
    monkeypatch.setattr(doctor, "compare", lambda: {Feature.BASE: ["sglang.srt.gone (a reason): it is gone"]})
    monkeypatch.setattr(doctor, "gpu_here", lambda: ("NVIDIA A100-SXM4-80GB", (8, 0)))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1 and "not ready" in result.output
    assert "sglang.srt.gone (a reason): it is gone" in result.output
    assert "NVIDIA A100-SXM4-80GB is not a Hopper GPU" in result.output


def test_doctor_warns_of_what_this_machine_does_not_ask_for(monkeypatch):
    """What a server would miss only with a feature, or on another device."""
    gone = {feature: [f"sglang.srt.{feature.name} (a reason): it is gone"] for feature in Feature}
    del gone[Feature.BASE]
    monkeypatch.setattr(doctor, "compare", lambda: dict(gone))
    for gpu, here, elsewhere in (("NVIDIA H200", "GPU", "CPU"), (None, "CPU", "GPU")):
        monkeypatch.setattr(doctor, "gpu_here", lambda gpu=gpu: (gpu, (9, 0) if gpu else None))
        result = CliRunner().invoke(app, ["doctor"])
        output = " ".join(result.output.split())
        assert result.exit_code == 1 and f"it is gone sglang.srt.{here} (a reason): it is gone" in output
        assert f"not with a {elsewhere}: sglang.srt.{elsewhere} (a reason): it is gone" in output
        assert "not with --enable-hierarchical-cache: sglang.srt.HOST_CACHE (a reason): it is gone" in output
    del gone[Feature.CPU]
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0 and "not with --speculative-algorithm" in result.output


def examined(monkeypatch: pytest.MonkeyPatch, outcome: str, line: LaunchLine, *words: str, **found) -> tuple[int, str]:
    """What `doctor -- words` says of an examination, and its exit status."""
    found = {"findings": [], "changes": [], "settings": [], "models": {}, **found}
    examination = examine.Examination(outcome=outcome, line=line, **found)
    monkeypatch.setattr(examine, "examiner", lambda: nullcontext(lambda line: examination))
    monkeypatch.setattr(doctor, "gpu_here", lambda: (None, None))
    result = CliRunner().invoke(app, ["doctor", *words])
    return result.exit_code, result.output


RUN = tested_configurations.tested({tested_configurations.TENSOR: 16, tested_configurations.NODES: 16}, "0.5.17")


def test_doctor_says_what_to_change(monkeypatch):
    code, output = examined(
        monkeypatch,
        examine.CHANGED,
        LaunchLine({"A": "1"}, ["--model-path", "/m/V3", "--attention-backend", "hybrid_mla"]),
        *("A=1", "sglang", "serve", "/m/V3", "--page-size", "1", "--attention-backend", "fa3"),
        findings=[Finding("--page-size", "hybrid_mla needs --page-size 64, not 1; remove the flag.")],
        changes=["--page-size 64 in place of --page-size 1"],
        settings=["--disable-prefill-cuda-graph"],
        tested=RUN,
        memory_report="about: 530 tokens",
        models={"/m/V3": "deepseek-ai/DeepSeek-V3"},
    )
    assert code == 0
    assert output.splitlines() == [
        "WORKS WITH A CHANGE (examined as on an H200)",
        "  hybrid_mla needs --page-size 64, not 1; remove the flag.",
        "  change: --page-size 64 in place of --page-size 1",
        "SGLang 0.5.17: tested on the CPU only: several nodes; never run on 16 ranks: several nodes (on 2)",
        "about: 530 tokens",
        "automatic setting: --disable-prefill-cuda-graph (prefill passes cost the host about 2.5 ms a layer, 5 with "
        "experts)",
        "treating /m/V3 as deepseek-ai/DeepSeek-V3",
        "A=1 python -m sglang.launch_server --model-path /m/V3 --attention-backend hybrid_mla",
    ]


def test_doctor_has_nothing_to_say_of_what_works(monkeypatch):
    arguments = ["--model-path", "deepseek-ai/DeepSeek-V3", "--attention-backend", "hybrid_mla"]
    run = tested_configurations.tested({tested_configurations.SERVER: 1}, "0.5.17")
    code, output = examined(monkeypatch, examine.WORKS, LaunchLine({}, arguments), *arguments, tested=run)
    assert (code, output.splitlines()) == (
        0,
        ["WORKS (examined as on an H200)", "SGLang 0.5.17: tested on a GPU"],
    )


def test_doctor_speaks_to_programs(monkeypatch):
    line, command = LaunchLine({}, ["--tp", "16"]), ["python", "-m", "sglang.launch_server", "--tp", "16"]
    found = dict(tested=RUN, findings=[Finding("a", "no"), Finding("b", "nor")])
    code, output = examined(monkeypatch, examine.CHANGED, line, "--json", *command, **found)
    said = json.loads(output)
    assert code == 0 and said["outcome"] == "works with a change"
    assert said["findings"] == [{"code": "a", "text": "no"}, {"code": "b", "text": "nor"}]
    assert said["run"]["place"] == "cpu" and said["command"] == " ".join(command)
    code, output = examined(monkeypatch, examine.REFUSED, line, "--json", "--", *command)
    assert code == 1 and json.loads(output)["run"] is None
    monkeypatch.setattr(doctor, "gpu_here", lambda: (None, None))
    assert json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)["sglang-mla-ext"] == __version__


def test_doctor_cannot_tell(monkeypatch):
    why = dict(findings=[Finding("model", "a/b is not known: give a folder.")], elsewhere="image:1 has another")
    code, output = examined(monkeypatch, examine.CANNOT_TELL, LaunchLine({}, []), "--model-path", "a/b", **why)
    assert (code, output.splitlines()) == (
        3,
        ["CANNOT TELL", "  a/b is not known: give a folder.", "image:1 has another"],
    )


def test_doctor_keeps_what_runs_the_container(monkeypatch):
    docker = ("docker", "run", "-e", "HF_TOKEN=hf_x", "lmsysorg/sglang:v0.5.23", "sglang", "serve")
    line = LaunchLine({"HF_TOKEN": "hf_x"}, ["--tp", "8"], docker[4], docker)
    code, output = examined(monkeypatch, examine.CHANGED, line, *docker, "m", tested=RUN)
    assert code == 0 and "hf_x" not in output
    assert output.splitlines()[1].startswith("the image has to contain sglang-mla-ext")
    assert output.splitlines()[-1] == "docker run -e 'HF_TOKEN=***' lmsysorg/sglang:v0.5.23 sglang serve --tp 8"
    _, output = examined(monkeypatch, examine.CHANGED, line, "--json", *docker, "m", tested=RUN)
    said = json.loads(output)
    assert "hf_x" not in output and said["command"].startswith("docker run") and "sglang-mla-ext" in said["in_image"]


def test_that_decode_gains_nothing_stands_in_the_verdict(monkeypatch):
    line = LaunchLine({}, ["--tp", "8"])
    caveat = "decode gains nothing: with DP attention and so on"
    _, output = examined(monkeypatch, examine.WORKS, line, *line.arguments, tested=RUN, caveat=caveat)
    assert output.splitlines()[0] == f"WORKS (examined as on an H200), but {caveat}"
    _, output = examined(monkeypatch, examine.WORKS, line, "--json", *line.arguments, tested=RUN, caveat=caveat)
    assert json.loads(output)["caveat"] == caveat and json.loads(output)["in_image"] is None


def test_what_all_commands_have():
    assert CliRunner().invoke(app, ["--version"]).output == f"sglang-mla-ext {__version__}\n"
    for command in ("doctor", "plan", "top"):
        shown = CliRunner().invoke(app, [command, "--help"], terminal_width=80, env={"COLUMNS": "80"}).output
        assert "…" not in shown and not any(line.endswith("-") for line in shown.splitlines())
        assert max(map(len, shown.splitlines())) <= 80


def test_doctor_refuses_with_every_reason(monkeypatch):
    findings = unsupported({"--pp-size above 1": True, "--enable-lora": True})
    line = LaunchLine({}, ["--model-path", "m"])
    code, output = examined(monkeypatch, examine.REFUSED, line, *line.arguments, findings=findings)
    assert code == 1
    assert output.splitlines() == ["REFUSED (examined as on an H200)", *(f"  {finding.text}" for finding in findings)]


def test_doctor_wants_a_launch_of_sglang(monkeypatch):
    code, output = examined(monkeypatch, examine.WORKS, LaunchLine({}, []), "vllm", "serve", "m")
    assert code == 1 and output.startswith("there is no launch of SGLang in it: give `python -m sglang.launch_server")


def test_doctor_looks_at_the_machine_first(monkeypatch):
    def differs(asked):
        raise ContractError("cannot run", ["sglang.srt.gone (a reason): it is gone"])

    monkeypatch.setattr(doctor, "check", differs)
    code, output = examined(monkeypatch, examine.WORKS, LaunchLine({}, []), "sglang", "serve", "m")
    assert code == 1 and "sglang.srt.gone" in output and "not ready" in output

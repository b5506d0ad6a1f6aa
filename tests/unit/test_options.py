"""Options: flag to environment variable to value, and one clear error for each bad one."""

from __future__ import annotations

import argparse

import pytest

from sglang_mla_ext.options import OPTIONS, HybridMLAOptions, OptionError, add_flags, flags_to_env

NAMES = list(OPTIONS)

# option, text on the command line, value
GOOD = [
    ("prefix_memory_gb", "1.5", 1.5),
    ("prefix_memory_gb", "0", 0.0),
    ("prefix_dtype", "auto", "auto"),
    ("prefix_dtype", "bf16", "bf16"),
    ("prefix_dtype", "fp8_e4m3", "fp8_e4m3"),
    ("min_prefix_len", "1", 1),
    ("mode", "auto", "auto"),
    ("mode", "absorb", "absorb"),
    ("mode", "naive", "naive"),
    ("mode", "grouped_absorb", "grouped_absorb"),
    ("expand_tokens_per_step", "100", 100),
    ("prefill_expand_tokens", "0", 0),
    ("prefill_expand_tokens", "8192", 8192),
    ("verify_interval", "0", 0),
    ("verify_interval", "1000", 1000),
    ("dp_routing", "sglang", "sglang"),
    ("dp_routing", "prefix", "prefix"),
    ("prefix_sharding", "auto", "auto"),
    ("prefix_sharding", "off", "off"),
    ("mixed_tokens", "0", 0),
    ("mixed_tokens", "64", 64),
]

# option, value, what the message says beside the flag
BAD = [
    ("prefix_memory_gb", -1.0, "must be 0 (never expand) or more"),
    ("prefix_dtype", "int8", "use one of auto, bf16, fp8_e4m3"),
    ("min_prefix_len", 0, "at least 1"),
    ("mode", "fast", "use one of auto, absorb, naive, grouped_absorb"),
    ("expand_tokens_per_step", 0, "at least 1"),
    ("prefill_expand_tokens", 255, "must be 0 (never) or at least 256, a chunk"),
    ("prefill_expand_tokens", -1, "must be 0 (never) or at least 256, a chunk"),
    ("verify_interval", -1, "must be 0 (never) or more"),
    ("dp_routing", "random", "use one of sglang, prefix"),
    ("prefix_sharding", "on", "use one of auto, off"),
    ("mixed_tokens", 63, "must be 0 (never mix) or at least 64, a page"),
    ("mixed_tokens", -1, "must be 0 (never mix) or at least 64, a page"),
]


def flag(name: str) -> str:
    return "--hybrid-mla-" + name.replace("_", "-")


def variable(name: str) -> str:
    return "SGLANG_HYBRID_MLA_" + name.upper()


def parse(*args: str) -> dict[str, str]:
    """The environment after a command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path")
    add_flags(parser)
    env: dict[str, str] = {"HOME": "/"}
    flags_to_env(parser.parse_args(args), env)
    return env


def test_every_option_is_tried_here() -> None:
    assert {name for name, *_ in GOOD} == {name for name, *_ in BAD} == set(NAMES)


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
def test_from_flag_through_environment_to_value(name: str, text: str, value: object) -> None:
    env = parse("--model-path", "m", flag(name), text)
    assert set(env) == {"HOME", variable(name)}
    assert HybridMLAOptions.from_env(env) == HybridMLAOptions(**{name: value})


def test_all_flags_together() -> None:
    args = {name: text for name, text, _ in GOOD}
    env = parse(*(part for name, text in args.items() for part in (flag(name), text)))
    options = HybridMLAOptions.from_env(env)
    assert {name: str(getattr(options, name)) for name in NAMES} == {**args, "prefix_memory_gb": "0.0"}


@pytest.mark.parametrize("name", NAMES)
def test_help_names_the_environment_variable(name: str) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    (action,) = [action for action in parser._actions if action.option_strings == [flag(name)]]
    assert f"Also {variable(name)}." in action.help


def test_nothing_given_changes_nothing() -> None:
    assert parse("--model-path", "m") == {"HOME": "/"}
    assert HybridMLAOptions.from_env({}) == HybridMLAOptions()
    assert HybridMLAOptions.from_env({variable(name): "" for name in NAMES}) == HybridMLAOptions()


def test_reads_the_process_environment_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(variable(name), raising=False)
    monkeypatch.setenv(variable("mode"), "naive")
    assert HybridMLAOptions.from_env() == HybridMLAOptions(mode="naive")
    flags_to_env(argparse.Namespace(hybrid_mla_mode="absorb"))
    assert HybridMLAOptions.from_env().mode == "absorb", "a flag wins over the variable"


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_bad_values_name_the_flag_and_what_to_do(name: str, value: object, message: str) -> None:
    for make in (lambda: HybridMLAOptions(**{name: value}), lambda: HybridMLAOptions.from_env({variable(name): value})):
        with pytest.raises(OptionError) as error:
            make()
        assert flag(name) in str(error.value) and message in str(error.value)


@pytest.mark.parametrize("name", ["prefix_memory_gb", "min_prefix_len", "expand_tokens_per_step"])
def test_a_variable_that_is_no_number_is_named(name: str) -> None:
    with pytest.raises(OptionError, match=f"{variable(name)}='many' does not parse"):
        HybridMLAOptions.from_env({variable(name): "many"})


@pytest.mark.parametrize("args", [("mode", "fast"), ("prefix_dtype", "int8"), ("min_prefix_len", "1.5")], ids=str)
def test_the_parser_refuses_what_it_can(args: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(flag(args[0]), args[1])
    assert flag(args[0]) in capsys.readouterr().err


def test_what_each_mode_allows() -> None:
    modes = {mode: HybridMLAOptions(mode=mode) for mode in OPTIONS["mode"].choices}
    assert [mode for mode, options in modes.items() if options.may_expand] == ["auto", "naive"]
    assert [mode for mode, options in modes.items() if options.may_group] == ["auto", "grouped_absorb"]


@pytest.mark.parametrize("text", ["nan", "inf"])
def test_a_memory_size_is_finite(text: str) -> None:
    with pytest.raises(OptionError):
        HybridMLAOptions.from_env({variable("prefix_memory_gb"): text})


def test_an_option_that_there_is_not() -> None:
    with pytest.raises(TypeError, match="no option is named speed"):
        HybridMLAOptions(speed=2)

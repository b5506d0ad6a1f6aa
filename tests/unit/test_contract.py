"""The contract: the installed SGLang keeps it, and what does not is reported by name."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_mla_ext.adapter import contract
from sglang_mla_ext.adapter.contract import ContractError, Use

BACKENDS = "sglang.srt.server_args.ServerArgs.get_attention_backends"


@pytest.fixture
def server_args_class() -> Iterator[Any]:
    from sglang.srt.server_args import ServerArgs

    yield ServerArgs


def test_the_installed_sglang_is_as_expected() -> None:
    assert contract.mismatches() == []
    contract.check()


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "version", lambda package: "0.4.9")
    with pytest.raises(ContractError, match=r"sglang is 0\.4\.9; this release works with 0\.5\.17(.|\n)*pip install"):
        contract.check(launcher_only=True)


def test_no_sglang_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise contract.PackageNotFoundError(package)

    monkeypatch.setattr(contract, "version", missing)
    with pytest.raises(ContractError, match="sglang is not installed"):
        contract.check(launcher_only=True)


def test_a_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch, server_args_class: Any) -> None:
    monkeypatch.setattr(server_args_class, "get_attention_backends", lambda args: None)
    (line,) = contract.mismatches(launcher_only=True)
    assert line.startswith(f"{BACKENDS} (is the backend asked for): takes ('args',), expected ('self',)")


def test_a_class_method_keeps_its_name_for_cls(monkeypatch: pytest.MonkeyPatch, server_args_class: Any) -> None:
    monkeypatch.setattr(server_args_class, "from_cli_args", classmethod(lambda cls, namespace: None))
    (line,) = contract.mismatches(launcher_only=True)
    assert "ServerArgs.from_cli_args" in line and "takes ('namespace',), expected ('args',)" in line


def test_what_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, server_args_class: Any) -> None:
    monkeypatch.delattr(server_args_class, "get_attention_backends")
    (line,) = contract.mismatches(launcher_only=True)
    assert line.startswith(f"{BACKENDS} (is the backend asked for):")


def test_all_differences_are_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    uses = (
        Use("sglang.gone.Thing.call", ("self",), "one reason", launcher=True),
        Use("sglang.srt.server_args.absent", None, "another reason", launcher=True),
        Use("json.dumps", ("text",), "a third", launcher=True),
        Use("json.also_absent", None, "of the worker"),
        Use("json.__all__", None, "one of another class", launcher=True, kind=tuple),
    )
    monkeypatch.setattr(contract, "CONTRACT", uses)
    with pytest.raises(ContractError) as error:
        contract.check(launcher_only=True)
    assert all(f"{use.path} ({use.why})" in str(error.value) for use in (*uses[:3], uses[4]))
    assert "json.__all__ (one of another class): is a list, expected a tuple" in str(error.value)
    assert "also_absent" not in str(error.value), "the launching process does not look at the worker's part"
    assert len(contract.mismatches()) == 5


def test_a_hooked_function_and_further_parameters_are_no_difference(
    monkeypatch: pytest.MonkeyPatch, server_args_class: Any
) -> None:
    original = server_args_class.get_attention_backends

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    monkeypatch.setattr(server_args_class, "get_attention_backends", hooked)
    assert contract.mismatches(launcher_only=True) == []

    class_method = server_args_class.from_cli_args.__func__

    @functools.wraps(class_method)
    def hooked_class_method(*args: Any, **kwargs: Any) -> Any:
        return class_method(*args, **kwargs)

    monkeypatch.setattr(server_args_class, "from_cli_args", classmethod(hooked_class_method))
    assert contract.mismatches(launcher_only=True) == []

    monkeypatch.setattr(server_args_class, "get_attention_backends", lambda self, phase=None: None)
    assert contract.mismatches(launcher_only=True) == []


def test_the_table_says_why_and_names_nothing_twice() -> None:
    paths = [use.path for use in contract.CONTRACT]
    assert len(set(paths)) == len(paths)
    assert all(use.why for use in contract.CONTRACT)

"""The contract: the installed SGLang keeps it, what does not is reported by name, and the table is complete."""

from __future__ import annotations

import ast
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_mla_ext.adapter import compat
from sglang_mla_ext.adapter.compat import contract, releases, sglang_0_5_17, sglang_0_5_23
from sglang_mla_ext.adapter.compat.contract import ContractError
from sglang_mla_ext.adapter.compat.installed import choose
from sglang_mla_ext.adapter.compat.syntax import NotThere, SourceTree, without_collector
from sglang_mla_ext.adapter.compat.table import Table, Use

HERE = contract.table()
"""What is used of the installed release."""
ARGS = "sglang.srt.server_args.ServerArgs"
REGISTER = "sglang.srt.layers.attention.attention_registry.register_attention_backend"
ADAPTER = Path(contract.__file__).parents[1]
Change = Callable[[str, str], None]


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> Change:
    """Lets SGLang's source be read as if every match of a pattern in it were something else."""

    def change(pattern: str, replacement: str) -> None:
        monkeypatch.setattr(
            SourceTree, "_read", lambda tree, file: re.sub(pattern, replacement, file.read_text(encoding="utf-8"))
        )

    return change


def uses_of(monkeypatch: pytest.MonkeyPatch, *uses: Use) -> None:
    monkeypatch.setattr(contract, "SUPPORTED", {str(contract.installed_version()): Table(uses, (), HERE.fields_of)})


def of_path(*paths: str) -> tuple[Use, ...]:
    return tuple(use for use in HERE.uses if use.path in paths)


# -- the installed SGLang ----------------------------------------------------------------------------------------------


def test_the_installed_sglang_is_as_expected() -> None:
    assert contract.mismatches() == []
    contract.check()


def test_the_check_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is read once, and the search in it takes twice as long as to parse it: in all half a second to two."""
    read, texts = SourceTree._read, dict[Path, str]()

    def read_once(tree: SourceTree, file: Path) -> str:
        assert file not in texts
        return texts.setdefault(file, read(tree, file))

    monkeypatch.setattr(SourceTree, "_read", read_once)
    begin = time.process_time()
    contract.mismatches()
    spent, begin = time.process_time() - begin, time.process_time()
    with without_collector():
        for text in texts.values():
            ast.parse(text)
    assert spent < 6 * (time.process_time() - begin)


def test_an_older_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "version", lambda package: "0.4.9")
    with pytest.raises(ContractError, match=r"sglang is 0\.4\.9; this release works with 0\.5\.17(.|\n)*pip install"):
        contract.check()


@pytest.mark.parametrize("version", ["0.5.20", "0.5.99", "99.0.post1"])
def test_a_version_that_was_not_tested_starts_with_a_warning_where_the_contract_holds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    monkeypatch.setattr(contract, "SUPPORTED", dict.fromkeys(("0.5.17", "0.5.23"), HERE))
    monkeypatch.setattr(contract, "version", lambda package: version)
    contract.check()
    assert f"sglang {version} was not tested" in caplog.text


@pytest.mark.parametrize("version", ["0.5.20", "0.5.99"])
def test_it_stops_with_the_differences_where_it_does_not(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    other = Table((Use("json.gone", "function", "a reason"),), ())
    monkeypatch.setattr(contract, "SUPPORTED", {"0.5.17": HERE, "0.5.23": other})
    monkeypatch.setattr(contract, "version", lambda package: version)
    with pytest.raises(ContractError, match=r"json\.gone \(a reason\): module json has no 'gone'"):
        contract.check()


def test_a_tested_version_starts_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    contract.check()
    assert contract.installed_version() in contract.SUPPORTED and caplog.text == ""


def test_no_sglang_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise contract.PackageNotFoundError(package)

    monkeypatch.setattr(contract, "version", missing)
    with pytest.raises(ContractError, match="sglang is not installed"):
        contract.check()


def test_a_release_is_compared_with_its_own_column(monkeypatch: pytest.MonkeyPatch) -> None:
    ages = ("oldest", "older", "newer")
    releases = [Table((Use(f"json.gone_in_{age}", "function", "a reason"),), ()) for age in ages]
    monkeypatch.setattr(contract, "SUPPORTED", dict(zip(("0.5.17", "0.5.23", "0.5.30"), releases, strict=True)))
    for version, gone in (
        ("0.5.17", "oldest"),
        ("0.5.17.post1", "oldest"),
        ("0.5.20", "older"),
        ("0.5.23", "older"),
        ("0.5.24", "newer"),
        ("0.5.30", "newer"),
        ("0.6.0rc1", "newer"),
    ):
        monkeypatch.setattr(contract, "version", lambda package, version=version: version)
        (line,) = contract.mismatches()
        assert f"gone_in_{gone}" in line
        assert (contract.untested() is None) == (version in contract.SUPPORTED)


# -- differences -------------------------------------------------------------------------------------------------------


def test_a_changed_signature_is_named(change: Change) -> None:
    change(r"def register_attention_backend\(name", "def register_attention_backend(label")
    (line,) = contract.mismatches()
    assert line.startswith(f"{REGISTER} (the backend's factory): takes ('label',), expected ('name',)")


def test_a_class_method_keeps_its_name_for_cls(change: Change) -> None:
    change(r"def from_cli_args\(\s*cls, args\b", "def from_cli_args(cls, namespace")
    (line,) = contract.mismatches()
    assert f"{ARGS}.from_cli_args" in line and "takes ('namespace',), expected ('args',)" in line


def test_what_is_gone_is_named(change: Change) -> None:
    change(r"def register_attention_backend\(", "def register_backend(")
    (line,) = contract.mismatches()
    module, _, name = REGISTER.rpartition(".")
    assert line == f"{REGISTER} (the backend's factory): module {module} has no '{name}'"


def test_a_parameter_that_is_passed_by_name_is_missed(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    pool = "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.__init__"
    uses_of(monkeypatch, *of_path(pool))
    assert contract.mismatches() == []
    change(r"\benable_memory_saver: bool", "saves_memory: bool")
    (line,) = contract.mismatches()
    assert line.startswith(f"{pool} (the FP8 pool): takes ('self', 'size',")
    assert line.endswith("expected also enable_memory_saver")


@pytest.mark.parametrize(
    "path",
    [
        f"{ARGS}.enable_mixed_chunk",
        "sglang.srt.model_executor.cuda_graph_config.CudaGraphConfig.prefill",
        "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.w_scale",
        "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.use_deep_gemm_bmm",
        "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.chunked_prefix_cache_threshold",
        "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.qk_rope_head_dim",
        "sglang.srt.managers.schedule_batch.Req.last_node",
        "sglang.srt.managers.scheduler.Scheduler.tree_cache",
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.prefix_chunk_starts_cpu",
        "sglang.srt.model_executor.model_runner.ModelRunner.kv_cache_dtype",
        "sglang.srt.layers.attention.flashmla_backend.FlashMLABackend.enable_chunk_kv",
        "sglang.srt.models.deepseek_common.attention_backend_handler.AttnForwardMethod.MHA_CHUNKED_KV",
        "sglang.srt.configs.model_config.is_deepseek_dsa",
    ],
)
def test_a_renamed_thing_is_named(monkeypatch: pytest.MonkeyPatch, change: Change, path: str) -> None:
    (use,) = of_path(path)
    uses_of(monkeypatch, use)
    assert contract.mismatches() == []
    name = path.rpartition(".")[2]
    change(rf"\b{name}\b", f"{name}_of_old")
    (line,) = contract.mismatches()
    assert line.startswith(f"{path} ({use.why}): ") and f"has no '{name}'" in line


def test_all_differences_are_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    uses = (
        Use("sglang.gone.Thing.call", "function", "one reason", ("self",)),
        Use("sglang.srt.server_args.absent", "attribute", "another reason"),
        Use("json.dumps", "function", "a third", ("text",)),
        Use("json.dumps.inside", "attribute", "below a function"),
        Use("json.JSONEncoder.item_separator", "list", "one of another kind"),
        Use("not_a_package.thing", "function", "a package that is not there"),
    )
    uses_of(monkeypatch, *uses, Use("json.JSONEncoder", "class", "as it is", ("self",), ("sort_keys",)))
    with pytest.raises(ContractError) as error:
        contract.check()
    message = str(error.value)
    assert all(f"{use.path} ({use.why})" in message for use in uses) and "as it is" not in message
    assert "json.JSONEncoder.item_separator (one of another kind): is an attribute, expected a list" in message
    assert "no package 'not_a_package' is installed" in message
    assert len(contract.mismatches()) == len(uses)


def test_further_parameters_are_no_difference(change: Change) -> None:
    change(r"def register_attention_backend\(name", "def register_attention_backend(name, phase=None")
    assert contract.mismatches() == []


def test_the_compiled_package_is_checked_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    uses = tuple(use for use in contract.SUPPORTED["0.5.17"].uses if use.path.startswith("sgl_kernel."))
    assert len(uses) == 2
    folder = tmp_path / "sgl_kernel"
    folder.mkdir()
    (folder / "__init__.py").write_text("import torch_that_is_not_there")
    (folder / "flash_mla.py").write_text(
        "def get_mla_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k, is_fp8_kvcache=False): ...\n"
        "def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim, causal=False): ...\n"
    )
    tree = SourceTree(_folders={"sgl_kernel": [folder]})
    metadata, attention = (contract.difference(use, tree) for use in uses)
    assert metadata is None
    assert (
        attention is not None and "expected ('q', 'k_cache', 'block_table', 'cache_seqlens', 'head_dim_v'" in attention
    )
    assert [contract.difference(use, SourceTree(_folders={"sgl_kernel": []})) for use in uses] == [None, None]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.5.17", sglang_0_5_17.Release0517),
        ("0.5.17.post1", sglang_0_5_17.Release0517),
        ("0.5.20", sglang_0_5_23.Release0523),
        ("0.5.23", sglang_0_5_23.Release0523),
        ("0.5.99", sglang_0_5_23.Release0523),
    ],
)
def test_a_release_between_two_is_the_newer_one(
    monkeypatch: pytest.MonkeyPatch, version: str, expected: type[sglang_0_5_17.Release0517]
) -> None:
    monkeypatch.setattr(contract, "version", lambda package: version)
    assert type(choose()) is expected


# -- a new release -----------------------------------------------------------------------------------------------------

CONTRIBUTING = Path(__file__).parents[4] / "docs" / "contributing.md"


@pytest.fixture
def made_up_release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """0.5.99, as the documentation has it: one folder with one file."""
    code = re.search(r"`sglang_0_5_99/__init__\.py`:\n\n( *)```python\n(.*?)\1```", CONTRIBUTING.read_text(), re.DOTALL)
    assert code is not None
    (tmp_path / "sglang_0_5_99").mkdir()
    (tmp_path / "sglang_0_5_99" / "__init__.py").write_text(textwrap.dedent(code[2]))
    monkeypatch.setattr(compat, "__path__", [*compat.__path__, str(tmp_path)])
    monkeypatch.setattr(compat, "sglang_0_5_99", None, raising=False)
    monkeypatch.setattr(contract, "SUPPORTED", releases.supported())
    monkeypatch.setattr(contract, "version", lambda package: "0.5.99")
    yield
    del sys.modules[f"{compat.__name__}.sglang_0_5_99"]


def test_a_new_release_is_one_folder_with_one_file(made_up_release: None) -> None:
    assert contract.line() == list(contract.SUPPORTED)[-1] == "0.5.99" and contract.untested() is None
    before, now = list(contract.SUPPORTED.values())[-2:]
    old = "sglang.kernels.ops.attention.flash_mla_interface.get_mla_metadata"
    new = old.replace("get_mla_metadata", "make_mla_metadata")
    assert {use.path for use in before.uses} ^ {use.path for use in now.uses} == {old, new}
    assert now.path_of("sgl_kernel.flash_mla.get_mla_metadata") == new, "by its name in the oldest release"
    release = choose()
    assert isinstance(release, sglang_0_5_23.Release0523) and type(release).__name__ == "Release0599"
    assert type(release).flash_mla is not sglang_0_5_23.Release0523.flash_mla
    assert type(release).set_draft_backend is sglang_0_5_23.Release0523.set_draft_backend, "as before"
    assert release.TreeView is sglang_0_5_23.Release0523.TreeView


NEWEST = list(contract.SUPPORTED)[-1]


@pytest.mark.skipif(contract.line() != NEWEST, reason="others are compared with the newest release")
@pytest.mark.parametrize("version", ["0.5.20", "0.5.99"])
def test_the_newest_source_starts_under_another_version(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    monkeypatch.setattr(contract, "version", lambda package: version)
    monkeypatch.setattr(contract, "_as_expected", set())
    contract.check()
    assert f"sglang {version} was not tested with this release, which works with 0.5.17, 0.5.23" in caplog.text


@pytest.mark.skipif(contract.line() != NEWEST, reason="it follows on the newest release")
def test_it_is_compared_with_its_own_names(
    monkeypatch: pytest.MonkeyPatch, made_up_release: None, change: Change
) -> None:
    change(r"\bget_mla_metadata\b", "make_mla_metadata")
    assert contract.mismatches() == []
    monkeypatch.setattr(contract, "version", lambda package: NEWEST)
    (line,) = contract.mismatches()
    assert "flash_mla_interface has no 'get_mla_metadata'" in line


# -- the table ---------------------------------------------------------------------------------------------------------


def test_the_table_says_why_and_names_nothing_twice() -> None:
    for release in contract.SUPPORTED.values():
        for things in ([use.path for use in release.uses], [read.name for read in release.read_of_backend]):
            assert len(set(things)) == len(things)
        assert all(thing.why for thing in (*release.uses, *release.read_of_backend))


def adapter_modules() -> Iterator[tuple[str, ast.Module]]:
    """Those that run beside the installed release: not what is for another tree or other arguments."""
    for file in sorted(ADAPTER.rglob("*.py")):
        release = next((part for part in file.parts if part.startswith("sglang_0_")), None)
        if release is not None and release != HERE_FOLDER:
            continue
        yield str(file.relative_to(ADAPTER)), ast.parse(file.read_text(encoding="utf-8"))


HERE_FOLDER = f"sglang_{contract.line().replace('.', '_')}"
_CACHE = "radix_cache.RadixCache" if contract.line() == "0.5.17" else "unified_radix_cache.UnifiedRadixCache"
NARROWED = {"sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache": f"sglang.srt.mem_cache.{_CACHE}"}
"""Classes of parameters that the code takes only if they are of another one."""


def imported(tree: ast.AST) -> dict[str, str]:
    """Local name -> path of what a file of the adapter imports from SGLang, wherever in it and for types too."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("sglang", "sgl_kernel")
        for alias in node.names
    }


@pytest.fixture(scope="module")
def tree() -> SourceTree:
    return SourceTree(HERE.fields_of)


@pytest.fixture(scope="module")
def known(tree: SourceTree) -> set[int]:
    """Where the things in the table are defined, and the classes and modules that they are in, by the ids of nodes."""
    found = set()
    for use in HERE.uses:
        path = use.path
        while "." in path and not (path.startswith("sgl_kernel") and not tree.is_installed("sgl_kernel")):
            found.add(id(tree.find(path).node or tree.find(path).module))
            path = path.rpartition(".")[0]
    return found


def test_everything_that_the_adapter_imports_is_in_the_table(tree: SourceTree, known: set[int]) -> None:
    paths = {use.path for use in HERE.uses}
    types = {"sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache", "sglang.srt.mem_cache.memory_pool.KVCache"}
    unknown = []
    for file, module in adapter_modules():
        for path in set(imported(module).values()) - paths - types:
            if path.startswith("sgl_kernel."):
                unknown.append(f"{file}: {path}")
                continue
            found = tree.find(path)
            if id(found.node or found.module) not in known:
                unknown.append(f"{file}: {path}")
    assert unknown == []


def test_every_attribute_that_the_adapter_reads_is_in_the_table(tree: SourceTree, known: set[int]) -> None:
    """Of parameters that are annotated with a class of SGLang's."""
    unknown, read = set(), 0
    for file, module in adapter_modules():
        classes = imported(module)
        for function in ast.walk(module):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
            typed = {a.arg: classes.get(ast.unparse(a.annotation)) for a in arguments if a.annotation is not None}
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and typed.get(node.value.id):
                    owner = str(typed[node.value.id])
                    path = f"{NARROWED.get(owner, owner)}.{node.attr}"
                    read += 1
                    try:
                        if id(tree.find(path).node) not in known:
                            unknown.add(f"{file}: {path}")
                    except NotThere as error:
                        unknown.add(f"{file}: {error}")
    assert sorted(unknown) == []
    assert read > 50

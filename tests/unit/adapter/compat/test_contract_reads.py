"""What SGLang reads of an attention backend, in its source, and the contract's table of it."""

from __future__ import annotations

import ast
import importlib.util
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_mla_ext.adapter.compat import contract
from sglang_mla_ext.adapter.compat.syntax import NotThere, SourceTree

HERE = contract.table()
"""What is used of the installed release."""


@pytest.fixture(scope="module")
def tree() -> SourceTree:
    return SourceTree(HERE.fields_of)


RECEIVERS = {"attn_backend", "target_attn_backend", "decode_attn_backend", "decode_backend", "prefill_backend"}
GETTERS = {"get_attn_backend", "_select_backend"}

READ_OF_OTHERS = {
    "other models": """
        conv_state_metadata forward_core_compressor forward_indexer_compressor full_attn_backend
        fused_qk_rope_store_kv_fp8 get_swa_out_cache_loc get_unified_swa_loc init_forward_metadata_indexer
        linear_attn_backend sconv_intermediate_window sconv_state sparse store_cache use_fp8
    """,
    "DeepSeek Sparse Attention": "get_indexer_metadata kv_cache_dtype use_mha",
    "two-batch overlap's own backend": "children primary",
    "Intel's backend, which alone has graphs on a CPU": """
        get_cpu_graph_seq_len_fill_value init_cpu_graph_state init_forward_metadata_capture_cpu_graph
    """,
    "TensorRT-LLM's and CuTe's MLA backends, known by their names": "data_type q8kv8_born_fp8_q_eligible",
    "ROCm": "num_kv_splits",
    "hybrid models with Mamba layers": "update_mamba_state_after_mtp_verify",
    "a draft model's backend": "draft_extend_metadata_captured_in_graph",
    "DSpark with DeepSeek V4's backend": "make_forward_metadata_from_raw_verify",
}
"""What SGLang reads of attention backends, by which: ours does not stand for these, and need not forward it."""
OF_OTHERS = {name for names in READ_OF_OTHERS.values() for name in names.split()}


def is_backend(node: ast.AST, known: set[str]) -> bool:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).rpartition(".")[2] in GETTERS
    return (isinstance(node, ast.Name) and node.id in RECEIVERS | known) or (
        isinstance(node, ast.Attribute) and node.attr in RECEIVERS
    )


def reads_of_backend(function: ast.AST) -> Iterator[str]:
    """Names that a function reads, asks for or sets on an attention backend."""
    known: set[str] = set()
    nodes = list(ast.walk(function))
    for node in nodes:
        if isinstance(node, ast.Assign) and is_backend(node.value, known):
            known |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.comprehension) and ast.unparse(node.iter).endswith("attn_backends"):
            known.add(ast.unparse(node.target))
        elif isinstance(node, ast.arg) and node.annotation and ast.unparse(node.annotation) == "AttentionBackend":
            known.add(node.arg)
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_backend(node.value, known):
            yield node.attr
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("getattr", "hasattr", "setattr")
            and is_backend(node.args[0], known)
            and isinstance(node.args[1], ast.Constant)
        ):
            yield node.args[1].value


@pytest.fixture(scope="module")
def readers() -> dict[str, set[str]]:
    """Name -> the files below sglang/srt that read it of an attention backend; other backends' own files left out."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0]) / "srt"
    found = defaultdict(set)
    for file in root.rglob("*.py"):
        name = str(file.relative_to(root))
        of_backends = name.startswith("layers/attention/") and not name.endswith("hybrid_attn_backend.py")
        text = file.read_text(encoding="utf-8")
        if of_backends or name.startswith("hardware_backend/") or "attn_backend" not in text:
            continue
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for read in reads_of_backend(function):
                    found[read].add(name)
    return found


FLASHMLA = "sglang.srt.layers.attention.flashmla_backend.FlashMLABackend"


@pytest.mark.skipif(contract.line() != "0.5.17", reason="of newer releases the next test asks less")
def test_what_sglang_reads_of_a_backend_is_in_the_table(readers: dict[str, set[str]]) -> None:
    table = {read.name: read for read in HERE.read_of_backend}
    assert {name: files for name, files in readers.items() if name not in OF_OTHERS.union(table)} == {}, "new readers"
    assert set(readers) >= OF_OTHERS, "no longer read"
    assert not OF_OTHERS & set(table)
    assert {read.name for read in table.values() if read.reader not in readers.get(read.name, ())} == set()


def test_what_sglang_reads_of_its_own_backend_is_in_the_table(tree: SourceTree, readers: dict[str, set[str]]) -> None:
    """What the backend that ours stands before answers otherwise than the interface, whose defaults ours has too."""
    table = {read.name: read for read in HERE.read_of_backend}
    new = []
    for name in readers.keys() - table.keys() - OF_OTHERS:
        try:
            found = tree.find(f"{FLASHMLA}.{name}")
        except NotThere:
            continue
        if not found.module.name.endswith(".base_attn_backend"):
            new.append(f"{name} in {found.module.name}")
    assert new == []
    assert {read.name for read in table.values() if read.reader not in readers.get(read.name, ())} == set()


def test_sglangs_own_backend_has_what_is_read_of_it(tree: SourceTree) -> None:
    for read in HERE.read_of_backend:
        tree.find(f"{FLASHMLA}.{read.name}")
    for name in OF_OTHERS - {"data_type", "draft_extend_metadata_captured_in_graph"}:
        try:
            found = tree.find(f"{FLASHMLA}.{name}")
        except NotThere:
            continue
        assert found.module.name.endswith(".base_attn_backend"), f"{name} is more than the interface's default"

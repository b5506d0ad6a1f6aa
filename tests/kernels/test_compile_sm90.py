"""The kernels compile for Hopper at DeepSeek-V3's dimensions, without a GPU, and fit it as planned.

Compiled in a process of its own: in this one the kernels are bound to the interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from sglang_mla_ext.kernels import naive_prefix

SHARED_MEMORY_PER_SM = 228 * 1024
REGISTERS_PER_SM = 64 * 1024
RESERVED_PER_CTA = 1024  # shared memory that the driver keeps of each CTA

COMPILE = r"""
import json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_mla_ext.kernels import merge, naive_prefix
from sglang_mla_ext.kernels.layout import CHUNK_TOKENS
from sglang_mla_ext.kernels.schedule import ITEM_FIELDS

def compile_for_hopper(kernel, types, constants, **options):
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = [n for n, t in types.items() if t.startswith("*") or t == "i32"]
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [("tt.divisibility", 16)] for n in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".ptx") as ptx, tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        Path(ptx.name).write_text(compiled.asm["ptx"])
        ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        log = subprocess.run(
            [ptxas, "-v", "--gpu-name=sm_90a", ptx.name, "-o", cubin.name], capture_output=True, text=True, check=True
        ).stderr
    number = lambda pattern: int(re.search(pattern, log).group(1))
    return dict(
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        shared_bytes=compiled.metadata.shared,
        wgmma=compiled.asm["ptx"].count("wgmma.mma_async"),
        tma=compiled.asm["ptx"].count("cp.async.bulk.tensor"),
    )

dn, dr, dv = 128, 64, 128
queries = dict(q_nope_ptr="*bf16", q_rope_ptr="*bf16")
results = dict(work_ptr="*i32", partial_out_ptr="*fp32", partial_lse2_ptr="*fp32")

def compile_naive(tile):
    found = compile_for_hopper(
        naive_prefix.naive_prefix_kernel,
        queries
        | results
        | dict(
            k_nope_desc=f"tensordesc<bf16[{tile.block_keys},{dn}]>",
            k_rope_desc=f"tensordesc<bf16[{tile.block_keys},{dr}]>",
            v_t_desc=f"tensordesc<bf16[{dv},{tile.block_keys}]>",
            scale_log2e="fp32",
        )
        | dict.fromkeys("heads items_offset q_nope_row q_nope_head q_rope_row q_rope_head".split(), "i32"),
        dict(DN=dn, DR=dr, DV=dv, CHUNK=CHUNK_TOKENS, ITEM=ITEM_FIELDS, BLOCK_ROWS=tile.block_rows,
             BLOCK_KEYS=tile.block_keys, PRECISION="tf32", NUM_STAGES=tile.num_stages),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return found | dict(num_warps=tile.num_warps, ctas_per_sm=tile.ctas_per_sm)

strides = "heads max_rows tail_row tail_head tail_lse_row tail_lse_head out_row out_head lse_row lse_head"
merged = compile_for_hopper(
    merge.merge_kernel,
    results
    | dict(tail_out_ptr="*bf16", tail_lse_ptr="*fp32", out_ptr="*bf16", lse_ptr="*fp32")
    | dict.fromkeys(strides.split(), "i32"),
    dict(DV=dv, ITEM=ITEM_FIELDS, BLOCK_HEADS=merge.BLOCK_HEADS, UNROLL=merge.SPLITS_IN_FLIGHT, IN_PLACE=True,
         WRITE_LSE=False, LN2=merge.LN2, LOG2E=merge.LOG2E),
    num_warps=4,
)
naive = {f"naive{tile.block_rows}": compile_naive(tile) for tile in naive_prefix.TILES}
json.dump(naive | dict(merge=merged), sys.stdout)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict:
    """What the compiler says of both kernels, compiled anew and not taken from Triton's cache."""
    directory = tmp_path_factory.mktemp("compile")
    script = directory / "compile_kernels.py"  # a file: Triton reads the source of what it compiles
    script.write_text(COMPILE)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(directory / "cache")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    process = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=300)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    print(result)
    return result


NAIVE = [f"naive{tile.block_rows}" for tile in naive_prefix.TILES]


@pytest.mark.parametrize("kernel", NAIVE)
def test_naive_kernel_uses_the_matrix_unit_and_the_copy_engine(compiled: dict, kernel: str) -> None:
    assert compiled[kernel]["wgmma"] > 0
    assert compiled[kernel]["tma"] > 0


@pytest.mark.parametrize("kernel", [*NAIVE, "merge"])
def test_no_register_is_spilled(compiled: dict, kernel: str) -> None:
    assert compiled[kernel]["spill_bytes"] == 0, compiled


@pytest.mark.parametrize("kernel", NAIVE)
def test_as_many_ctas_fit_on_a_multiprocessor_as_the_grid_counts_on(compiled: dict, kernel: str) -> None:
    found = compiled[kernel]
    ctas, threads = found["ctas_per_sm"], 32 * found["num_warps"]
    assert ctas * (found["shared_bytes"] + RESERVED_PER_CTA) <= SHARED_MEMORY_PER_SM, found
    assert ctas * threads * found["registers"] <= REGISTERS_PER_SM, found

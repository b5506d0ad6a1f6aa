"""The Triton absorb kernel over FP8 rows in the interpreter, against the exact result.

Products are in float32 there, of operands rounded as on a GPU. Everything outside the rows of a request is NaN: the
padding of the rows, the rest of its last page, and pages of no request; entries of the page table behind a request's
last page point far outside of the pool. The kernel compiles for Hopper, in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from test_latent_rows import NAN, poisoned_pool

from sglang_mla_ext.kernels.absorb.paged_fp8 import TritonAbsorbFP8
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.reference import fp8 as reference_fp8
from sglang_mla_ext.kernels.storage.latent_rows import LatentRowLayout, dequantize, quantize

SOFTMAX_SCALE = 0.01
"""So that many keys have a part in a result; with a larger one the largest key takes all."""

LAYOUT = LatentRowLayout()
# Rounding of the weights to BF16, 2^-9 of each.
BOUND_BF16 = 2e-3


@dataclass(frozen=True)
class Case:
    lens: tuple[int, ...]
    heads: int = 16
    queries: int = 1
    page_size: int = 64
    num_sms: int = 1
    rank: int = 512
    rope: int = 64
    outlier: bool = False

    def __str__(self) -> str:
        lens = "_".join(map(str, self.lens))
        sizes = f"h{self.heads}-q{self.queries}-p{self.page_size}-r{self.rank}-sms{self.num_sms}"
        return f"n{lens}-{sizes}-{self.outlier:d}"


def cases():
    yield Case((1,))
    yield Case((64, 0, 65))
    yield Case((0,))
    yield Case((130, 3), heads=8, num_sms=8)
    yield Case((257, 0, 1, 64), num_sms=6, rank=256)  # three runs of keys, some of them empty
    yield Case((200,), heads=128, num_sms=5, rank=128, rope=32)
    yield Case((70, 5), page_size=1)
    yield Case((300,), page_size=1, num_sms=4)
    yield Case((129, 1, 2, 0), heads=16, queries=2)  # one key for two query tokens: the first sees none
    yield Case((65, 128), heads=128, queries=2, num_sms=4, rank=128, rope=32)
    yield Case((100, 33), heads=4, rank=64, rope=16, num_sms=4)
    yield Case((300, 90), outlier=True, num_sms=4)


class Problem:
    """A pool, the pages of each request in it, and queries; seeded."""

    def __init__(self, case: Case) -> None:
        self.case, self.layout = case, LatentRowLayout(case.rank, case.rope)
        generator = torch.Generator().manual_seed(sum(case.lens) + case.heads)
        size = case.page_size
        pages = [-(-n // size) for n in case.lens]
        self.pool = poisoned_pool((sum(pages) + 3) * size, self.layout)
        order = torch.randperm(sum(pages) + 3, generator=generator).int()
        self.table = torch.full((len(pages), max(pages) + 2), 1 << 30, dtype=torch.int32)
        self.rows: list[torch.Tensor] = []
        for request, (n, count) in enumerate(zip(case.lens, pages, strict=True)):
            self.table[request, :count], order = order[:count], order[count:]
            token_size = 10 ** (2 * torch.rand(n, 1, generator=generator) - 1)
            latent = token_size * torch.randn(n, case.rank, generator=generator)
            rope = torch.randn(n, case.rope, generator=generator)
            if case.outlier and n:
                latent[n // 3] = 20 * torch.randn(case.rank, generator=generator)
                latent[n // 2, 5] = 300.0
            rows = quantize(latent, rope)
            slots = self.table[request].repeat_interleave(size)[:n] * size + torch.arange(n) % size
            self.layout_rows(slots.long(), rows)
            self.rows.append(rows)
        tokens = len(pages) * case.queries
        # Numbers of BF16, which is what the kernels for Hopper read.
        self.q_absorbed = torch.randn(tokens, case.heads, case.rank, generator=generator).bfloat16().float()
        self.q_rope = torch.randn(tokens, case.heads, case.rope, generator=generator).bfloat16().float()

    def layout_rows(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Write all but the padding, which stays as it is."""
        for part in (slice(0, self.layout.rope_offset - 12), slice(self.layout.rope_offset, None)):
            self.pool[slots, part] = rows[:, part]

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        case = self.case
        absorb = TritonAbsorbFP8(
            max_requests=len(case.lens) + 1,
            heads=case.heads,
            device="cpu",
            layout=self.layout,
            query_tokens=case.queries,
            page_size=case.page_size,
            num_sms=case.num_sms,
        )
        out, lse = torch.full_like(self.q_absorbed, NAN), torch.full(self.q_absorbed.shape[:2], NAN)
        lens = torch.tensor(case.lens, dtype=torch.int32)
        absorb.run(self.q_absorbed, self.q_rope, self.pool, self.table, lens, SOFTMAX_SCALE, out, lse)
        return out, lse

    def expected(self, exact: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention in float64 to what is stored, of rounded queries too; or the rounding steps of the kernels for
        Hopper, whose weights are FP8, in float32."""
        queries, parts = self.case.queries, []
        for request, rows in enumerate(self.rows):
            of_request = slice(request * queries, (request + 1) * queries)
            query = self.q_absorbed[of_request], self.q_rope[of_request]
            visible = (len(rows) - queries + 1 + torch.arange(queries)).clamp(min=0)
            if not exact:
                keys = reference_fp8.keys_of_rows(rows, self.layout)
                parts.append(reference_fp8.absorb_fp8(*query, keys, SOFTMAX_SCALE, visible))
                continue
            rounded = dequantize(quantize(query[0].flatten(0, 1), query[1].flatten(0, 1)), self.layout)
            query = [part.view_as(whole).double() for part, whole in zip(rounded, query, strict=True)]
            keys = torch.cat(dequantize(rows, self.layout), dim=-1).expand(queries, -1, -1)
            parts.append(reference.absorb(*query, keys, visible, SOFTMAX_SCALE))
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def assert_close(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], bound: float) -> None:
    errors = reference.errors(actual[0], expected[0])
    assert errors.rel_l2 <= bound and errors.cos_dist <= bound**2, errors
    assert torch.equal(actual[1].isinf(), expected[1].isinf())
    torch.testing.assert_close(actual[1], expected[1].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_it_is_exact_but_for_the_rounding_of_weights(case: Case) -> None:
    problem = Problem(case)
    assert_close(problem.run(), problem.expected(), BOUND_BF16)


def test_a_nan_row_is_seen_by_those_who_attend_to_it_only() -> None:
    problem = Problem(Case((70, 40)))
    slot = problem.table[1, 0] * 64 + 7
    LAYOUT.scale(problem.pool)[slot] = NAN
    out, lse = problem.run()
    assert out[1].isnan().all() and lse[1].isnan().all()
    assert out[0].isfinite().all() and lse[0].isfinite().all()


def test_keys_are_cut_where_requests_do_not_fill_the_gpu() -> None:
    absorb = TritonAbsorbFP8(max_requests=300, heads=128, device="cpu", num_sms=132)
    splits = [absorb.splits(requests) for requests in (1, 4, 16, 66, 132, 133, 300)]
    assert splits == [32, 32, 8, 2, 1, 1, 1]
    assert absorb._partial_out.shape[0] <= 2 * 132 / 2, "as many programs as fill the GPU, two tiles of heads each"
    assert absorb.workspace_bytes < 200 << 20


@pytest.mark.parametrize("change", ["requests", "lens", "table", "out", "lse", "pool", "query", "scale"])
def test_wrong_arguments_are_refused(change: str) -> None:
    absorb = TritonAbsorbFP8(max_requests=2, heads=16, device="cpu")
    values = {
        "q_absorbed": torch.zeros(2, 16, 512),
        "q_rope": torch.zeros(2, 16, 64),
        "pool": torch.zeros(128, 656, dtype=torch.uint8),
        "page_table": torch.zeros(2, 3, dtype=torch.int32),
        "lens": torch.ones(2, dtype=torch.int32),
        "softmax_scale": 1.0,
        "out": torch.zeros(2, 16, 512),
        "lse": torch.zeros(2, 16),
    }
    wrong = {
        "requests": {name: torch.zeros(3, *value.shape[1:], dtype=value.dtype) for name, value in values.items()
                     if name not in ("pool", "softmax_scale")},
        "lens": {"lens": torch.ones(2, dtype=torch.int64)},
        "table": {"page_table": torch.zeros(3, 3, dtype=torch.int32)},
        "out": {"out": torch.zeros(2, 512, 16).mT},
        "lse": {"lse": torch.zeros(2, 8)},
        "pool": {"pool": torch.zeros(128, 640, dtype=torch.uint8)},
        "query": {"q_rope": torch.zeros(2, 16, 32)},
        "scale": {"softmax_scale": 0.0},
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"must be|there is room for 2"):
        absorb.run(**{**values, **wrong[change]})


@pytest.mark.parametrize("sizes", [{"heads": 0}, {"layout": LatentRowLayout(48, 16)}], ids=str)
def test_wrong_sizes_are_refused(sizes: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        TritonAbsorbFP8(**{"max_requests": 2, "heads": 16, "device": "cpu", **sizes})


# ---- for Hopper

COMPILE = r"""
import json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_mla_ext.kernels.absorb import triton_fp8_absorb as absorb_fp8
from sglang_mla_ext.kernels.constants import LN2

def compile_for_hopper(heads, page_size):
    kernel = absorb_fp8.absorb_fp8_kernel
    types = dict(q_content_ptr="*fp8e4nv", q_scale_ptr="*fp32", q_rope_ptr="*bf16", content_ptr="*fp8e4nv",
                 scale_ptr="*fp32", rope_ptr="*bf16", table_ptr="*i32", lens_ptr="*i32", out_ptr="*fp32",
                 lse_ptr="*fp32", scale_log2e="fp32", row_bytes="i32", table_row="i32", splits="i32")
    constants = dict(HEADS=heads, QUERY_TOKENS=1, R=512, DR=64, PAGE=page_size, BLOCK_ROWS=absorb_fp8.BLOCK_ROWS,
                     BLOCK=absorb_fp8.BLOCK_KEYS, SPLIT=True, EXACT=False, LN2=LN2)
    names = kernel.arg_names
    aligned = [name for name, kind in types.items() if kind.startswith("*") or name == "row_bytes"]
    source = ASTSource(
        kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [("tt.divisibility", 16)] for name in aligned},
    )
    options = dict(num_warps=absorb_fp8.NUM_WARPS, num_stages=absorb_fp8.NUM_STAGES)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".ptx") as ptx_file, tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        Path(ptx_file.name).write_text(ptx)
        ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        command = [ptxas, "-v", "--gpu-name=sm_90a", ptx_file.name, "-o", cubin.name]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    number = lambda pattern: int(re.search(pattern, log).group(1))
    return dict(
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        serialized="C7512" in log or "serialized" in log,
        shared_bytes=compiled.metadata.shared,
        products=sorted(set(re.findall(r"wgmma\.mma_async[.\w]*", ptx))),
        vector_copies=len(re.findall(r"cp\.async\.cg", ptx)),
    )

print(json.dumps({"heads128-page64": compile_for_hopper(128, 64), "heads16-page1": compile_for_hopper(16, 1)}))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the compiler says, compiled anew; see test_compile_sm90.py."""
    directory = tmp_path_factory.mktemp("compile")
    script = directory / "compile_kernel.py"
    script.write_text(COMPILE)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(directory / "cache")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    process = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=300)
    assert process.returncode == 0, process.stderr
    print(process.stdout)
    return json.loads(process.stdout)


@pytest.mark.parametrize("kernel", ["heads128-page64", "heads16-page1"])
def test_it_compiles_for_hopper_and_fits(compiled: dict, kernel: str) -> None:
    found = compiled[kernel]
    assert not found["serialized"] and found["shared_bytes"] <= 227 * 1024
    assert found["vector_copies"] > 0
    kinds = {product.split(".f32.")[1] for product in found["products"]}
    assert kinds == {"e4m3.e4m3", "bf16.bf16"}  # content, and the rotary part
    wide = next(product for product in found["products"] if "n256" in product)  # weights times values
    assert wide.endswith("bf16.bf16")
    assert found["spill_bytes"] <= 512

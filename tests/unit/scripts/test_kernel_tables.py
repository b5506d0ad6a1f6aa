"""Tables of the kernels' times: what stands beside ours, and what ours is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench.records import write_record
from bench.tables import specs
from tables_of import named_rows

ATTENTION, DECODE = (specs()["docs/performance.md"][name] for name in ("attention-h100", "decode"))

STOCK_MS = {
    ("flashmla_bf16", "bf16"): 2.0,
    ("flashmla_fp8", "fp8"): 0.5,
    ("fa3_bf16", "bf16"): 1.5,
    ("flashinfer_mla", "bf16"): 3.0,
}


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "records.jsonl")


class Records:
    """A file of records of one bench."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, impl: str, ms: float, dtype: str, case: dict[str, Any], **metrics: float) -> None:
        case = dict(tail=512, s_q=1, dtype=dtype) | case
        what = dict(bench="attention", impl=impl, part="all", gpu="GPU", command="run it")
        write_record(self.path, case=case, ms=ms, **what, **metrics)

    def add_stock(self, case: dict[str, Any], *, without: tuple[str, ...] = ()) -> None:
        for (impl, dtype), ms in STOCK_MS.items():
            if impl not in without:
                self.add(impl, ms, dtype, case)


SHARED = dict(prefix=7069, heads=16, batch=128)


def test_ours_over_shared_prefixes_is_compared_with_the_fastest(records: Records) -> None:
    """Over the same cache, so FlashMLA FP8 does not count; and not where SGLang's default was not measured."""
    other = SHARED | dict(batch=256)
    records.add_stock(SHARED)
    records.add_stock(other, without=("fa3_bf16",))
    for case in (SHARED, other):
        records.add("typhoon_parts", 0.4, "bf16", case)
        records.add("hybrid_mla", 0.5, "bf16", case)
        records.add("hybrid_mla", 0.25, "fp8", case)
    columns = ("FA3 BF16 ms", "FlashInfer BF16 ms", "fastest stock / ours BF16", "fastest stock / ours FP8")
    found = [[row[column] for column in columns] for row in named_rows(ATTENTION, records.path)]
    assert found == [["1.500", "3.000", "3.00x", "6.00x"], ["–", "3.000", "–", "–"]]


def test_without_the_default_nothing_over_shared_prefixes_is_compared(records: Records) -> None:
    records.add_stock(SHARED, without=("fa3_bf16",))
    records.add("hybrid_mla", 0.5, "bf16", SHARED)
    times = ["FlashMLA BF16 ms", "FlashMLA FP8 ms", "ours BF16 ms"]
    times.insert(2, "FlashInfer BF16 ms")
    assert list(named_rows(ATTENTION, records.path)[0]) == ["heads", "requests", "prefix", "tail", *times]


PRIVATE = dict(prefix=0, heads=16, batch=128)


@pytest.mark.parametrize(
    ("without", "expected"),
    [
        (("fa3_bf16",), {"FlashMLA BF16 / ours": "4.00x"}),
        ((), {"FA3 BF16 ms": "1.500", "FlashMLA BF16 / ours": "4.00x", "fastest BF16 stock / ours": "3.00x"}),
    ],
)
def test_decode_is_compared_with_the_fastest(
    records: Records, without: tuple[str, ...], expected: dict[str, str]
) -> None:
    records.add_stock(PRIVATE, without=without)
    records.add("hybrid_mla", 0.5, "fp8", PRIVATE, floor_share=0.8)
    (row,) = named_rows(DECODE, records.path)
    common = {"FlashMLA BF16 ms", "FlashMLA FP8 ms", "ours ms", "of its floor"}
    assert {*row} == {"heads", "requests", "query tokens", "tokens", *common, *expected}
    assert expected.items() <= row.items()


def test_decode_without_the_default_in_one_case(records: Records) -> None:
    """Its ratio is left out, not another one."""
    other = PRIVATE | dict(batch=64)
    records.add_stock(PRIVATE)
    records.add_stock(other, without=("fa3_bf16",))
    for case in (PRIVATE, other):
        records.add("hybrid_mla", 0.5, "fp8", case, floor_share=0.8)
    assert [row["fastest BF16 stock / ours"] for row in named_rows(DECODE, records.path)] == ["3.00x", "–"]

"""The cost model: its counts are design's table, its times are the measured ones."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from bench.planner_verdicts import LARGEST_LOSS, verdicts, without_overheads
from bench.records import read_records
from hypothesis import given
from hypothesis import strategies as st

from sglang_mla_ext.configs import config_names
from sglang_mla_ext.kernels.absorb.stacking import STRIP_ROWS
from sglang_mla_ext.predict import weights
from sglang_mla_ext.prefix.planner import break_even, cost_model
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates, ModeRates, rates_for
from sglang_mla_ext.prefix.planner.model_dims import ModelDims
from sglang_mla_ext.segment import Mode

V3 = ModelDims.of("deepseek-v3")
H200 = GpuRates.from_json("h200")
WORK = without_overheads(H200)
PLANNER_RECORDS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "planner.jsonl"


def model(heads: int = 128, gpu: str = "h200", **kwargs: int) -> CostModel:
    return CostModel(V3, heads, GpuRates.from_json(gpu), **kwargs)


# -- configurations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", weights.model_names())
def test_every_model_has_mla_dimensions(name):
    dims = ModelDims.of(name)
    of_naive = 512 if name == "glm-4.7-flash" else 320  # its heads have 192 + 64 and 256 dimensions
    assert (dims.latent_dim, dims.absorb_macs, dims.naive_macs) == (576, 1088, of_naive)


@pytest.mark.parametrize("name", config_names("gpus"))
def test_every_gpu_has_rates_and_their_source(name):
    rates = GpuRates.from_json(name)
    assert set(rates.modes) == set(Mode)
    assert "easured" in rates.source
    for mode_rates in rates.modes.values():
        assert mode_rates.bytes_per_s > 1e9
        assert mode_rates.macs_per_s > 1e9
        assert 0 <= mode_rates.overhead_s < 1e-3
        assert 0 <= mode_rates.overhead_per_root_row_s < 1e-5
        assert mode_rates.row_tile >= 1


def test_dimensions_from_a_hugging_face_folder(tmp_path):
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "hidden_size": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelDims.of(tmp_path) == ModelDims(2, 4, 512, 128, 64, 128, 128)
    assert ModelDims.from_config({"vision_config": {}, "text_config": config}) == ModelDims.from_config(config)
    with pytest.raises(ValueError, match="it has no kv_lora_rank"):
        ModelDims.from_config({k: v for k, v in config.items() if k != "kv_lora_rank"})


@pytest.mark.parametrize(
    ("device", "gpu"),
    [
        ("NVIDIA H200", "NVIDIA H200"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM"),
        ("NVIDIA H20", "NVIDIA H20"),
        ("NVIDIA H20-3e", "NVIDIA H20-3e"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB"),
        ("cpu", "CPU"),
    ],
)
def test_rates_by_device_name(device, gpu, caplog):
    assert rates_for(device).name == gpu
    assert not caplog.records


def test_unknown_device_gets_the_h100_and_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert rates_for("NVIDIA B300").name == "NVIDIA H100 SXM"
    assert "B300" in caplog.text


# -- counts ------------------------------------------------------------------------------------------------------------


def test_counts_are_the_table():
    b, h, n = 7, 128, 1000
    cost = model(h)
    assert break_even.macs(cost, Mode.ABSORB, b, n) == b * h * n * 1088
    assert break_even.macs(cost, Mode.GROUPED_ABSORB, b, n) == b * h * n * 1088
    assert break_even.macs(cost, Mode.NAIVE, b, n) == b * h * n * 320
    assert break_even.bytes_read(cost, Mode.ABSORB, b, n) == 2 * b * n * 576
    assert break_even.bytes_read(cost, Mode.GROUPED_ABSORB, b, n) == 2 * n * 576
    assert break_even.bytes_read(cost, Mode.NAIVE, b, n) == 2 * (n * h * 256 + n * 64)


def test_padding_is_counted():
    """12 heads are stacked as 16, and computed by plain absorb as 64; heads of 192 columns are computed as 256."""
    of_12, of_16 = (model(heads).work_seconds(Mode.GROUPED_ABSORB, 96, 60000) for heads in (12, 16))
    assert of_12 == of_16
    assert model(12).work_seconds(Mode.NAIVE, 96, 60000) < model(16).work_seconds(Mode.NAIVE, 96, 60000)
    narrow, wide, whole = (
        CostModel(replace(V3, qk_nope_head_dim=dim), 16, GpuRates.from_json("h200")) for dim in (128, 192, 256)
    )
    big = [cost.work_seconds(Mode.NAIVE, 900, 60000) for cost in (narrow, wide, whole)]
    assert big[0] < big[1] == big[2]
    assert break_even.bytes_read(wide, Mode.NAIVE, 1, 1) < break_even.bytes_read(whole, Mode.NAIVE, 1, 1)


def test_a_strip_is_the_kernels():
    assert cost_model._STRIP_ROWS == STRIP_ROWS


def test_counts_of_several_query_tokens():
    """As if there were as many more requests, but for plain absorb's bytes: a request's tokens are read once."""
    one, four = model(128), model(128, query_tokens=4)
    for mode in Mode:
        assert break_even.macs(four, mode, 7, 1000) == break_even.macs(one, mode, 28, 1000)
        assert break_even.bytes_read(four, mode, 7, 1000) == break_even.bytes_read(one, mode, 7, 1000)
        assert four.segment_seconds(mode, 7) == pytest.approx(one.segment_seconds(mode, 28))
    assert four.tail_rows(7) == one.tail_rows(28)
    assert model(16, query_tokens=4).tail_rows(7) == model(16).tail_rows(7), "what one tile has room for"


@pytest.mark.parametrize("queries", [2, 4, 8])
@pytest.mark.parametrize(("gpu", "storage"), [("h200", 2), ("h200", 1), ("h20", 1)])
def test_sharing_pays_that_many_times_earlier(gpu, storage, queries):
    """By hand, with rates alone: n requests cost absorb n·W·128·1088 MACs a key, naive its bytes or n·W·128·320 MACs,
    the rows in whole tiles. With the launches counted it is about as many times earlier, too."""
    tokens, heads = 26472, 128
    cost = model(heads, gpu, expanded_element_bytes=storage, query_tokens=queries)
    absorb, naive = cost.rates.modes[Mode.ABSORB], cost.rates.modes[Mode.NAIVE]
    free = replace(naive, overhead_s=0.0, overhead_per_root_row_s=0.0, row_tile=1)
    modes = {Mode.ABSORB: replace(absorb, overhead_s=0.0, overhead_per_root_row_s=0.0), Mode.NAIVE: free}
    rates = replace(cost.rates, modes=modes, l2_bytes=0)

    def pays(count):
        rows = count * queries * heads * tokens
        by_absorb = max(count * tokens * 1152 / absorb.bytes_per_s, rows * 1088 / absorb.macs_per_s)
        expanded = tokens * (heads * 256 * storage + 64 * 2)
        return max(expanded / naive.bytes_per_s, rows * 320 / naive.matrix_rate(storage)) < by_absorb

    by_hand = next(count for count in range(2, 4096) if pays(count))
    assert break_even.smallest_profitable_group(replace(cost, rates=rates), tokens) == by_hand
    alone = replace(cost, query_tokens=1)
    earlier = break_even.smallest_profitable_group(alone, tokens) / break_even.smallest_profitable_group(cost, tokens)
    assert 0.7 * queries < earlier < 1.3 * queries


def test_storage_in_fp8():
    cost = model(16, expanded_element_bytes=1, latent_element_bytes=1)
    assert cost.expanded_token_bytes == 16 * 256 + 64 * 2  # rotary part stays BF16
    assert cost.latent_row_bytes == 656


def test_overhead_grows_with_the_root_of_padded_rows():
    """A request's 16 heads take a tile of 64 rows; four times the requests, twice what depends on them."""
    rates = ModeRates(1e30, 1e30, None, overhead_s=1e-6, row_tile=64, overhead_per_root_row_s=1e-6)
    cost = CostModel(V3, 16, GpuRates("GPU", 0, dict.fromkeys(Mode, rates), "none"))
    assert [cost.tail_rows(requests) for requests in (1, 4)] == [64, 256]
    assert cost.seconds(Mode.NAIVE, 1, 100) == pytest.approx(9e-6)
    assert cost.seconds(Mode.GROUPED_ABSORB, 4, 100) == pytest.approx(17e-6)


def test_equation_1_gives_the_papers_threshold():
    """Ascend NPU: 376 TOPS (two operations a MAC) and 1.8 TB/s give 61."""
    npu = ModeRates(bytes_per_s=1.8e12, macs_per_s=188e12, fp8_macs_per_s=None, overhead_s=0, row_tile=1)
    cost = CostModel(V3, 128, GpuRates("NPU", 0, dict.fromkeys(Mode, npu), "TyphoonMLA, section 3.2"))
    assert int(break_even.threshold_batch(cost)) == 61
    assert break_even.threshold_batch(replace(cost, query_tokens=2)) == pytest.approx(
        break_even.threshold_batch(cost) / 2
    )


# -- times: an H200, one layer, DeepSeek-V3, measured ms ---------------------------------------------------------------

# FlashMLA BF16: heads, requests, tokens of each (26,432, 7,040 or 4,736 of them shared), ms.
ABSORB_BF16 = [
    (128, 64, 26984, 0.798),
    (128, 128, 26984, 1.662),
    (128, 256, 26984, 3.493),
    (128, 512, 26984, 7.049),
    (128, 128, 7581, 0.475),
    (128, 512, 7581, 1.915),
    (128, 128, 5271, 0.303),
    (64, 128, 26984, 0.851),
    (64, 512, 26984, 3.726),
    (16, 128, 26984, 0.809),
    (16, 512, 26984, 3.250),
]
ABSORB_FP8 = [
    (128, 64, 26984, 0.649),
    (128, 128, 26984, 1.286),
    (128, 256, 26984, 2.524),
    (128, 512, 26984, 5.005),
    (128, 128, 7581, 0.390),
    (128, 512, 7581, 1.491),
    (128, 128, 5271, 0.279),
    (64, 128, 26984, 0.651),
    (64, 512, 26984, 2.527),
    (16, 128, 26984, 0.639),
    (16, 512, 26984, 2.484),
]
# The naive kernel for Hopper and its merge: heads, requests, tokens, ms (benchmarks/results/attention.jsonl).
NAIVE_BF16 = [
    (128, 64, 26472, 0.4244),
    (128, 128, 26472, 0.5233),
    (128, 256, 26472, 0.9501),
    (128, 512, 26472, 1.7818),
    (128, 128, 7069, 0.1590),
    (128, 512, 7069, 0.5295),
    (128, 128, 4759, 0.1229),
    (128, 1024, 4759, 0.7300),
    (64, 128, 26472, 0.2713),
    (64, 512, 26472, 0.9064),
    (16, 128, 26472, 0.0828),
    (16, 512, 26472, 0.2354),
]
NAIVE_FP8 = [
    (128, 64, 26472, 0.2410),
    (128, 128, 26472, 0.3957),
    (128, 256, 26472, 0.7016),
    (128, 512, 26472, 1.3651),
    (128, 128, 7069, 0.1200),
    (128, 512, 7069, 0.4071),
    (128, 128, 4759, 0.0867),
    (128, 1024, 4759, 0.5781),
    (64, 128, 26472, 0.1952),
    (64, 512, 26472, 0.6790),
    (16, 128, 26472, 0.0619),
    (16, 512, 26472, 0.1781),
]

MEASURED = [
    pytest.param(mode, element_bytes, *row, id=f"{mode.value}-{element_bytes}B-h{row[0]}-b{row[1]}-l{row[2]}")
    for mode, element_bytes, rows in (
        (Mode.ABSORB, 2, ABSORB_BF16),
        (Mode.ABSORB, 1, ABSORB_FP8),
        (Mode.NAIVE, 2, NAIVE_BF16),
        (Mode.NAIVE, 1, NAIVE_FP8),
    )
    for row in rows
]


@pytest.mark.parametrize(("mode", "element_bytes", "heads", "group_size", "tokens", "measured_ms"), MEASURED)
def test_predicts_measured_times(mode, element_bytes, heads, group_size, tokens, measured_ms):
    """The work within 18 %, beside at most 30 us of naive's launches: overheads in the file are fitted to choices."""
    work_ms = CostModel(V3, heads, WORK, element_bytes, element_bytes).seconds(mode, group_size, tokens) * 1e3
    launches_ms = 0.03 if mode is Mode.NAIVE else 0.0
    assert 0.82 * work_ms <= measured_ms <= 1.18 * work_ms + launches_ms


def test_chooses_a_mode_near_the_fastest_measured_one():
    """In all cases of the recorded grid, whole decode attention of each mode."""
    records = [of_case for of_case in read_records(PLANNER_RECORDS) if rates_for(of_case["gpu"]) == H200]
    found = verdicts(records, H200)
    assert len(found) >= 200
    assert max(verdict.loss for verdict in found) <= 0.09
    assert sum(verdict.loss <= LARGEST_LOSS for verdict in found) >= 0.99 * len(found)


# -- choices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 16, 64])
@pytest.mark.parametrize("group_size", [1, 2, 64, 128])
@pytest.mark.parametrize("heads", [16, 128])
def test_small_prefixes_stay_absorb(heads, group_size, tokens):
    assert break_even.best_mode(model(heads), group_size, tokens, {Mode.ABSORB, Mode.NAIVE}) is Mode.ABSORB


def test_a_group_of_one_is_absorb_whatever_is_allowed():
    assert break_even.best_mode(model(), 1, 26472, {Mode.NAIVE}) is Mode.ABSORB


@pytest.mark.parametrize("gpu", ["h100", "h200", "a100"])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_large_groups_on_long_prefixes_are_naive(gpu, heads):
    assert break_even.best_mode(model(heads, gpu), 512, 26472) is Mode.NAIVE


def test_grouped_absorb_where_heads_are_few_and_naive_has_no_room():
    assert break_even.best_mode(model(16), 128, 26472, {Mode.ABSORB, Mode.GROUPED_ABSORB}) is Mode.GROUPED_ABSORB


@pytest.mark.parametrize(("heads", "low", "high"), [(128, 25, 50), (64, 20, 50), (16, 8, 20)])
def test_smallest_profitable_group(heads, low, high):
    cost = model(heads)
    smallest = break_even.smallest_profitable_group(cost, 26472)
    assert smallest is not None
    assert low <= smallest <= high
    allowed = {Mode.ABSORB, Mode.NAIVE}
    assert break_even.best_mode(cost, smallest, 26472, allowed) is Mode.NAIVE
    assert break_even.best_mode(cost, smallest - 1, 26472, allowed) is Mode.ABSORB


def test_no_profitable_group():
    assert break_even.smallest_profitable_group(model(), 0) is None
    assert break_even.smallest_profitable_group(model(), 26472, limit=4) is None
    with pytest.raises(ValueError, match="no mode"):
        break_even.best_mode(model(), 2, 100, set())


@given(
    group_size=st.integers(2, 4096),
    tokens=st.integers(1, 200_000),
    heads=st.sampled_from([1, 4, 16, 64, 128]),
    gpu=st.sampled_from(config_names("gpus")),
    expanded=st.sampled_from([1, 2, 4]),
)
def test_the_best_mode_is_the_cheapest_and_costs_grow_with_work(group_size, tokens, heads, gpu, expanded):
    cost = model(heads, gpu, expanded_element_bytes=expanded)
    best = cost.seconds(break_even.best_mode(cost, group_size, tokens), group_size, tokens)
    for mode in Mode:
        assert best <= cost.seconds(mode, group_size, tokens)
        assert cost.seconds(mode, group_size, tokens) <= cost.seconds(mode, group_size + 1, tokens)
        assert cost.seconds(mode, group_size, tokens) <= cost.seconds(mode, group_size, tokens + 1)

"""The calibration's arithmetic, its file, and the judgement of the planner's choices; nothing is timed here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from bench import rates_file
from bench.cases import DN, DR, DV, Case
from bench.rates_file import write_exchange

from sglang_mla_ext.configs import config_names, read_config
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.gpu_rates import ExchangeRates, GpuRates
from sglang_mla_ext.prefix.planner.model_dims import ModelDims
from sglang_mla_ext.segment import Mode

V3 = ModelDims.of("deepseek-v3")
SHARED_MEMORY_PER_SM = 228 * 1024
BESIDE_OPERANDS = 2048  # bytes of a CTA's shared memory for barriers and for the driver, at most
WRONG = dict(
    bytes_per_s=1.0, macs_per_s=1.0, fp8_macs_per_s=None, overhead_s=1.0, overhead_per_root_row_s=1.0, row_tile=64
)


@pytest.fixture(scope="module")
def calibration() -> ModuleType:
    """Imported here: it imports Triton (see conftest)."""
    return pytest.importorskip("bench.calibration")


@pytest.fixture(scope="module")
def tile_choice() -> ModuleType:
    return pytest.importorskip("bench.calibration")


@pytest.fixture(scope="module")
def planner_checks() -> ModuleType:
    return pytest.importorskip("bench.planner_checks")


# -- rates -------------------------------------------------------------------------------------------------------------


def samples_of(calibration: ModuleType, mode: Mode, rates: GpuRates, noise: tuple[float, ...] = (1.0,)) -> list:
    """Times that a GPU with these rates takes, launches left out; one for each factor in `noise`."""
    cases = [("memory", 128, 64, 26472, "bf16"), ("matrix", 128, 512, 26472, "bf16"), ("matrix", 128, 512, 7069, "fp8")]
    samples = []
    for bound, heads, rows, tokens, dtype in cases:
        size = 1 if dtype == "fp8" else 2
        seconds = CostModel(V3, heads, rates, size, size).work_seconds(mode, rows, tokens)
        samples += [calibration.Sample(bound, heads, rows, tokens, dtype, seconds * factor) for factor in noise]
    return samples


@pytest.mark.parametrize("noise", [(1.0,), (1.0, 1.0, 5.0)], ids=["exact", "one of three is far off"])
def test_fit_finds_the_rates_of_a_gpu(calibration, noise):
    h200 = GpuRates.from_json("h200")
    expected = h200.modes[Mode.NAIVE]
    found = calibration.fit(Mode.NAIVE, samples_of(calibration, Mode.NAIVE, h200, noise), WRONG | {"tiles": {}})
    for name in ("bytes_per_s", "macs_per_s", "fp8_macs_per_s"):
        assert found[name] == pytest.approx(getattr(expected, name), rel=0.01), name
    assert found["overhead_s"] == found["overhead_per_root_row_s"] == 1.0  # they are fitted to choices alone
    assert (found["row_tile"], found["tiles"]) == (64, {})


def test_fit_keeps_what_was_not_measured(calibration):
    before = WRONG | {"fp8_macs_per_s": 7.0}
    assert calibration.fit(Mode.ABSORB, [], before) == before
    memory = calibration.Sample("memory", 16, 128, 8192, "bf16", 1e-3)
    found = calibration.fit(Mode.ABSORB, [memory], before)
    assert found == before | {"bytes_per_s": pytest.approx(128 * 8192 * 1152 / 1e-3, rel=0.01)}


def test_absorb_reads_private_pages_once_a_request(calibration):
    """Prefixes that would fit the L2 cache if requests shared them."""
    sample = calibration.Sample("memory", 16, 128, 8192, "bf16", 1e-3)
    values = WRONG | dict(bytes_per_s=1e12, macs_per_s=1e15, overhead_s=0.0, overhead_per_root_row_s=0.0)
    assert calibration.predicted(sample, Mode.ABSORB, values) == pytest.approx(128 * 8192 * 1152 / 1e12)


# -- tiles -------------------------------------------------------------------------------------------------------------


def test_the_fastest_tile_wins_and_the_first_of_equals(tile_choice):
    first, second, third = (tile_choice.Tile(block_keys=keys) for keys in (64, 128, 256))
    assert tile_choice.pick_tile({first: [1.0, 4.0], second: [0.9, 3.0], third: [2.0, 2.0]}) == second
    assert tile_choice.pick_tile({first: [1.005, 4.0], second: [1.0, 4.0]}) == first


class FakeGpu:
    """Stands for the timing of tiles. A tile's ms in a case are those of `ms`, or 1; a call is (tile, case)."""

    def __init__(self, tile_choice: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ms: dict = {}
        self.broken: set = set()
        self.turns: list = []  # calls, in order

        def checked(tile, dtype, case, expected):
            if (tile, case) in self.broken:
                raise ValueError("differs")
            return tile, case

        def sustained_ms(call, seconds):
            self.turns.append(call)
            ms = self.ms.get(call, 1.0)
            return ms.pop(0) if isinstance(ms, list) else ms

        monkeypatch.setattr(tile_choice, "checked", checked)
        monkeypatch.setattr(tile_choice, "sustained_ms", sustained_ms)
        monkeypatch.setattr(tile_choice, "free_memory", lambda: None)  # it collects garbage, of all tests before, too


@pytest.fixture
def gpu(tile_choice, monkeypatch) -> FakeGpu:
    return FakeGpu(tile_choice, monkeypatch)


def test_tiles_of_an_h200(tile_choice, gpu):
    """In FP8 two programs of 64 rows are the fastest for up to 64 rows, as fast as another for 128, slower for 512."""
    small, large = (bucket[0] for bucket in tile_choice.CANDIDATES["fp8"])
    assert (small.block_rows, large.block_rows) == (64, 128) and small in tile_choice.CANDIDATES["fp8"][1]
    for cases, candidates in zip(tile_choice.TILE_CASES, tile_choice.CANDIDATES["fp8"], strict=False):
        gpu.ms |= {(tile, case): 2.0 for case in cases for tile in candidates if tile not in (small, large)}
    for case in tile_choice.TILE_CASES[1]:
        if case.heads == 128:
            ms = {128: (0.388, 0.385), 512: (1.441, 1.344)}[case.batch]
            gpu.ms |= dict(zip(((small, case), (large, case)), ms, strict=True))
    assert tile_choice.choose_tiles("fp8") == [small, large]
    for case in tile_choice.TILE_CASES[1]:
        gpu.ms[large, case] = 3.0
    assert tile_choice.choose_tiles("fp8") == [small]


def test_tiles_take_turns_and_the_median_round_counts(tile_choice, gpu):
    case = tile_choice.TILE_CASES[0][0]
    first, second = tile_choice.CANDIDATES["bf16"][0][:2]
    gpu.ms = {(first, case): [1.0, 9.0, 2.0], (second, case): [3.0, 3.0, 3.0]}
    assert tile_choice.time_tiles([first, second], "bf16", case) == {first: 2.0, second: 3.0}
    assert gpu.turns == [(first, case), (second, case)] * 3


def test_a_tile_that_fails_in_one_case_is_out(tile_choice, gpu):
    candidates, cases = tile_choice.CANDIDATES["bf16"][0], tile_choice.TILE_CASES[0]
    gpu.ms = {(candidates[0], case): 0.1 for case in cases} | {(candidates[2], case): 0.5 for case in cases}
    gpu.broken = {(candidates[0], cases[1])}
    assert tile_choice.choose_tiles("bf16")[0] == candidates[2]
    gpu.broken = {(tile, cases[0]) for tile in candidates}
    assert tile_choice.choose_tiles("bf16") == []


def test_large_tiles_are_judged_at_few_and_many_requests_within_half_a_minute(tile_choice):
    """The power limit shows at 512 requests only. Prefixes are read from memory, as in a server with many layers."""
    small, large, between = tile_choice.TILE_CASES
    assert {128, 512} <= {case.batch for case in large if case.heads == 128}
    assert all(case.batch > 64 for case in large) and all(case.batch <= 64 for case in small)
    assert all(128 < case.batch <= 192 for case in between)
    l2 = GpuRates.from_json("h200").l2_bytes

    def fp8_bytes(case: Case) -> int:
        return case.prefix * (case.heads * (DN + DV) + 2 * DR)

    assert all(fp8_bytes(case) > l2 for case in (*small, *large, *between))
    turns = sum(
        len(candidates) * len(cases)
        for buckets in tile_choice.CANDIDATES.values()
        for candidates, cases in zip(buckets, tile_choice.TILE_CASES, strict=False)
    )
    assert turns * tile_choice.ROUNDS * tile_choice.TURN_S < 30
    assert tile_choice.ROUNDS >= 3 and tile_choice.ROUNDS * tile_choice.TURN_S >= 0.3


def test_tiles_must_agree_with_the_first(tile_choice, monkeypatch):
    """All start from the same seed, so only the factor differs."""
    expected: list[torch.Tensor] = []

    def check(factor: float, dtype: str = "bf16") -> None:
        monkeypatch.setattr(tile_choice, "shared_part_and_merge", lambda *of: lambda: factor * torch.randn(2, 3, 4))
        tile_choice.checked(tile_choice.Tile(), dtype, tile_choice.TILE_CASES[0][0], expected)

    monkeypatch.setattr(tile_choice, "captured", lambda function: function)
    check(1.0)
    check(1.01)
    for factor in (1.05, float("nan")):
        with pytest.raises(ValueError, match="differs"):
            check(factor)
    check(1.05, "fp8")
    assert len(expected) == 1


def test_candidates_fit_a_multiprocessor(tile_choice, planner_checks):
    from sglang_mla_ext.kernels.naive.sm90_naive import TILES
    from sglang_mla_ext.kernels.naive.tiles import LARGEST_TILE
    from sglang_mla_ext.kernels.storage.expanded import CHUNK_TOKENS

    for dtype, buckets in tile_choice.CANDIDATES.items():
        size = planner_checks.DTYPES[dtype].itemsize
        for candidates, default in zip(buckets, TILES[planner_checks.DTYPES[dtype]], strict=True):
            assert candidates[0] == default
            assert len(set(candidates)) == len(candidates)
            for tile in candidates:
                query = tile.block_rows * (DN * size + DR * 2)
                stage = tile.block_keys * ((DN + DV) * size + DR * 2)
                used = query + tile.num_stages * stage + BESIDE_OPERANDS
                assert used * tile.ctas_per_sm <= SHARED_MEMORY_PER_SM, (dtype, tile)
                assert tile.block_rows in (64, 128, 192)
                assert tile.rows_in_flight <= LARGEST_TILE.rows_in_flight, (dtype, tile)
                assert CHUNK_TOKENS % tile.block_keys == 0
        assert all(tile.block_rows == 64 for tile in buckets[0])


def test_tiles_by_rows(tile_choice, planner_checks):
    rates = GpuRates.from_json("h200")
    tiles = planner_checks.tiles_of(rates)
    for dtype, of_rows in (("bf16", [64, 128, 192, 128, 128]), ("fp8", [64, 128, 64, 128, 128])):
        assert [planner_checks.tile_of(tiles, dtype, rows).block_rows for rows in (64, 65, 192, 256, 512)] == of_rows
    assert planner_checks.tile_of(planner_checks.tiles_of(GpuRates.from_json("a100")), "bf16", 64) is None
    small, large = tile_choice.Tile(block_keys=64), tile_choice.Tile(block_keys=128)
    assert planner_checks.tile_of({"bf16": [small, large]}, "bf16", 64) == small
    assert planner_checks.tile_of({"bf16": [small, large]}, "bf16", 512) == large


def test_a_configuration_without_tiles_has_none():
    assert GpuRates.from_json("a100").naive_tiles == {}
    assert {name: len(tiles) for name, tiles in GpuRates.from_json("h100").naive_tiles.items()} == {
        "bf16": 3,
        "fp8_e4m3": 2,
    }


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", config_names("gpus"))
def test_json_reads_back(name):
    config = read_config("gpus", name)
    text = rates_file.to_json(config)
    assert json.loads(text) == config
    assert max(len(line) for line in text.splitlines() if '"source"' not in line) <= 100


def test_json_is_short():
    assert (
        rates_file.to_json({"a": [], "b": 3.8e12, "c": 1.5e-5, "d": None})
        == '{"a": [], "b": 3.8e12, "c": 1.5e-05, "d": null}'
    )
    assert rates_file.to_json({"a": {"b": 1}}) == '{\n  "a": {"b": 1}\n}'


def test_a_file_of_another_gpu_is_refused(tmp_path):
    path = tmp_path / "h200.json"
    path.write_text(json.dumps(read_config("gpus", "h200")))
    assert rates_file.starting_config(path, "NVIDIA H200") == (read_config("gpus", "h200"), "this file")
    with pytest.raises(ValueError, match="NVIDIA H20"):
        rates_file.starting_config(path, "NVIDIA H20")


@pytest.mark.parametrize(("device", "name"), [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100")])
def test_a_new_file_starts_from_the_gpus_shipped_rates(tmp_path, device, name):
    """Not from the default GPU's: what is not measured would be another GPU's."""
    config, origin = rates_file.starting_config(tmp_path / "new.json", device)
    assert (config, origin) == (read_config("gpus", name), f"configs/gpus/{name}.json")


@pytest.mark.parametrize(("device", "word"), [("NVIDIA GH200 480GB", "gh200"), ("Something", "something")])
def test_a_new_file_of_an_unknown_gpu_starts_from_the_default(tmp_path, device, word):
    config, origin = rates_file.starting_config(tmp_path / "new.json", device)
    assert (config["name"], config["device_words"]) == (device, [word])
    assert (config["modes"], origin) == (read_config("gpus", "h100")["modes"], "configs/gpus/h100.json")


@pytest.mark.parametrize("exists", [True, False])
def test_what_is_measured_is_what_is_read(calibration, tile_choice, monkeypatch, tmp_path, capsys, exists):
    """Fitted rates, chosen tiles and their source go through the file; a mode that is not measured stays."""
    device = SimpleNamespace(name="NVIDIA H200", L2_cache_size=60 << 20)
    monkeypatch.setattr(calibration.torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setenv("GIT_COMMIT", "abc")
    chosen = [tile_choice.Tile(block_keys=32, num_stages=4, ctas_per_sm=2), tile_choice.Tile(block_rows=128)]
    monkeypatch.setattr(calibration, "choose_tiles", lambda dtype: chosen if dtype == "fp8" else [])
    a100, h200 = GpuRates.from_json("a100"), read_config("gpus", "h200")
    naive = samples_of(calibration, Mode.NAIVE, GpuRates.from_json("h200"))

    def samples(tiles, rep_ms):
        assert (tiles, rep_ms) == ({"fp8": chosen}, 20)
        return naive

    measured = {
        Mode.NAIVE: calibration.Calibration(samples, "of naive"),
        Mode.ABSORB: calibration.Calibration(lambda tiles, rep_ms: [], "of absorb"),
    }
    monkeypatch.setattr(calibration, "CALIBRATED", measured)
    out = tmp_path / "made" / "h200.json"
    if exists:
        out.parent.mkdir()
        out.write_text(json.dumps(h200))
    start = rates_file.starting_config(out, device.name)
    assert not calibration.calibrate(out, *start, 20)  # the BF16 tiles and absorb are missing
    assert str(out) in capsys.readouterr().out

    rates = GpuRates.from_json(out)
    before = h200["modes"]
    written = json.loads(out.read_text())
    assert (rates.name, rates.l2_bytes, written["device_words"]) == ("NVIDIA H200", 60 << 20, ["h200"])
    for kept in (Mode.ABSORB, Mode.GROUPED_ABSORB):
        assert written["modes"][kept.value] == before[kept.value]
    assert rates.modes[Mode.NAIVE].macs_per_s == pytest.approx(h200["modes"]["naive"]["macs_per_s"], rel=0.01)
    assert rates.modes[Mode.NAIVE] != a100.modes[Mode.NAIVE]
    assert [tile_choice.Tile(**tile) for tile in rates.naive_tiles["fp8_e4m3"]] == chosen
    assert list(rates.naive_tiles["bf16"]) == before["naive"]["tiles"]["bf16"]
    origin = "this file" if exists else "configs/gpus/h200.json"
    not_measured = f"absorb: not measured, what {origin} had before."
    for part in ("easured by scripts/calibrate.py on NVIDIA H200", "naive: of naive.", not_measured):
        assert part in rates.source


def exchange_records(us=30.0, row_us=0.4096, **changes) -> list[dict]:
    """By default of 30 us and 1e11 bytes a second, on two GPUs."""
    return [
        {
            "bench": "exchange",
            "impl": "nccl",
            "case": {"ranks": 2, "heads": 128, "rows": rows, "layers": 61, "sent_bytes": rows * 40960},
            "all_us": us + rows * row_us,
            **{"gpu": "NVIDIA H100 80GB HBM3", "torch": "2.11.0", "commit": "abc", "date": "2026-11-25T13:32:13"},
            **changes,
        }
        for rows in (16, 64, 256)
    ]


def test_what_an_exchange_costs(tmp_path: Path) -> None:
    """Of the newest run through NCCL on the file's GPU, and the newest by stores; the rest of the file stays."""
    out = tmp_path / "h100.json"
    before = read_config("gpus", "h100")
    out.write_text(rates_file.to_json(before))
    others = [
        *exchange_records(date="2026-11-24T10:00:00", all_us=900.0),
        *exchange_records(impl="peers", us=10.0, row_us=0.2048, date="2026-11-26T10:00:00"),
        *exchange_records(gpu="NVIDIA H200", date="2026-11-26T10:00:00", all_us=5.0),
        *exchange_records(bench="decode", date="2026-11-26T10:00:00"),
    ]
    write_exchange(out, others + exchange_records())
    after = json.loads(out.read_text())
    found = after.pop("exchange")
    assert found.pop("source").startswith("Measured by scripts/bench_exchange.py on 2 NVIDIA H100 80GB HBM3")
    assert found == {"overhead_s": 3e-5, "bytes_per_s": 1e11}
    stores = after.pop("exchange_by_stores")
    assert "stores into each other's memory" in stores.pop("source")
    assert stores == {"overhead_s": 1e-5, "bytes_per_s": 2e11}
    assert after == {name: value for name, value in before.items() if not name.startswith("exchange")}
    rates = GpuRates.from_json(out)
    assert rates.by_stores().exchange == ExchangeRates(1e-5, 2e11) != rates.exchange
    assert replace(rates, exchange_by_stores=None).by_stores().exchange == rates.exchange
    with pytest.raises(ValueError, match="no exchange through NCCL"):
        write_exchange(out, exchange_records(impl="peers"))
    with pytest.raises(ValueError, match="do not grow"):
        write_exchange(out, exchange_records(all_us=5.0))
    with pytest.raises(ValueError, match="one number of bytes"):
        write_exchange(out, exchange_records()[:1])

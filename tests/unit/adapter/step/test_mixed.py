"""New tokens as rows of a decode step: which batches, what becomes of them, and when that is sooner."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_mla_ext.adapter.step import mixed as module
from sglang_mla_ext.adapter.step.mixed import MixedRule, as_rows, refusal, take_last_rows
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates
from sglang_mla_ext.prefix.planner.model_dims import ModelDims
from sglang_mla_ext.reasons import NotMixed
from sglang_mla_ext.rows import Rows
from sglang_mla_ext.segment import Mode

H200 = CostModel(ModelDims.of("deepseek-v3"), 128, GpuRates.from_json("h200"))

# ---- batches of SGLang's


def forward_batch(mode: str, prefixes: list[int], counts: list[int]) -> Any:
    """SGLang's ForwardBatch of an extend; of a mixed one, where requests decode that have one token each."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    lens = torch.tensor([prefix + count for prefix, count in zip(prefixes, counts, strict=True)])
    positions = [prefix + token for prefix, count in zip(prefixes, counts, strict=True) for token in range(count)]
    requests = len(counts)
    return ForwardBatch(
        forward_mode=ForwardMode[mode],
        batch_size=requests,
        input_ids=torch.arange(sum(counts)) + 100,
        req_pool_indices=torch.arange(requests) + 5,
        seq_lens=lens,
        out_cache_loc=torch.arange(sum(counts)) + 1000,
        seq_lens_sum=int(lens.sum()),
        orig_seq_lens=lens.int(),
        seq_lens_cpu=lens.clone(),
        positions=torch.tensor(positions),
        extend_num_tokens=sum(counts),
        extend_seq_lens=torch.tensor(counts, dtype=torch.int32),
        extend_prefix_lens=torch.tensor(prefixes, dtype=torch.int32),
        extend_start_loc=torch.tensor([0] * requests, dtype=torch.int32),
        extend_prefix_lens_cpu=prefixes,
        extend_seq_lens_cpu=counts,
        extend_logprob_start_lens_cpu=counts,
        global_forward_mode=ForwardMode[mode],
        is_extend_in_batch=True,
        return_logprob=True,
        top_logprobs_nums=[0] * requests,
        token_ids_logprobs=[None] * requests,
        mm_inputs=[None] * requests,
        rids=[f"r{request}" for request in range(requests)],
        lora_ids=[f"l{request}" for request in range(requests)],
        sampling_info="what SGLang samples with",
    )


def test_a_batch_becomes_a_decode_batch_of_its_tokens() -> None:
    from dataclasses import fields

    for mode, prefixes, counts in (
        ("EXTEND", [7, 0, 64], [3, 2, 1]),
        ("MIXED", [0, 40, 9], [4, 1, 1]),
        ("EXTEND", [12], [5]),
        ("EXTEND", [3, 4], [1, 1]),
    ):
        batch = forward_batch(mode, prefixes, counts)
        before = copy.copy(batch)
        found = as_rows(batch, Rows.of(counts))
        assert all(getattr(batch, field.name) is getattr(before, field.name) for field in fields(batch))
        of = [request for request, count in enumerate(counts) for _ in range(count)]
        lens = [prefix + token + 1 for prefix, count in zip(prefixes, counts, strict=True) for token in range(count)]
        assert found.forward_mode.name == found.global_forward_mode.name == "DECODE"
        assert found.batch_size == len(of) and found.seq_lens_sum == sum(lens)
        for name, expected, dtype in (
            ("req_pool_indices", [5 + request for request in of], torch.int64),
            ("seq_lens", lens, torch.int64),
            ("seq_lens_cpu", lens, torch.int64),
            ("orig_seq_lens", lens, torch.int32),
        ):
            assert getattr(found, name).tolist() == expected and getattr(found, name).dtype == dtype, name
        assert (list(found.rids), list(found.lora_ids)) == ([f"r{each}" for each in of], [f"l{each}" for each in of])
        for name in ("input_ids", "positions", "out_cache_loc", "sampling_info"):
            assert getattr(found, name) is getattr(batch, name), name
        assert not (found.return_logprob or found.is_extend_in_batch or found.is_prefill_only)
        extend = [field.name for field in fields(batch) if field.name.startswith("extend_")]
        assert len(extend) >= 8
        for name in (*extend, "top_logprobs_nums", "token_ids_logprobs", "mm_inputs"):
            assert getattr(found, name) is None, name


def request(**changes: Any) -> Any:
    """What is looked at of SGLang's Req."""
    values = dict(
        input_embeds=None,
        positional_embed_overrides=None,
        multimodal_inputs=None,
        return_hidden_states=False,
        is_prefill_only=False,
    )
    return SimpleNamespace(**{**values, **changes})


def schedule_batch(prefixes: list[int], counts: list[int], **changes: Any) -> Any:
    """What is looked at of SGLang's ScheduleBatch; of its requests, the last one has what is changed of any."""
    reqs = [request() for _ in counts]
    values = dict(
        reqs=reqs,
        prefix_lens=prefixes,
        extend_lens=counts,
        extend_num_tokens=sum(counts),
        extend_logprob_start_lens=counts,
        encoder_lens=None,
        return_logprob=False,
        hicache_consumer_index=-1,
    )
    for name in vars(reqs[-1]).keys() & changes.keys():
        setattr(reqs[-1], name, changes.pop(name))
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"return_logprob": True}, None),  # of what is generated
        ({"extend_logprob_start_lens": [3, 1]}, None),  # nobody asks
        ({"return_logprob": True, "extend_logprob_start_lens": [3, 1]}, NotMixed.INPUT_LOGPROBS),
        ({"input_embeds": "given"}, NotMixed.INPUT_EMBEDS),
        ({"positional_embed_overrides": "given"}, NotMixed.INPUT_EMBEDS),
        ({"multimodal_inputs": "an image"}, NotMixed.MULTIMODAL),
        ({"encoder_lens": [3]}, NotMixed.ENCODER),
        ({"return_hidden_states": True}, NotMixed.HIDDEN_STATES),
        ({"return_hidden_states": "last"}, NotMixed.HIDDEN_STATES),
        ({"is_prefill_only": True}, NotMixed.PREFILL_ONLY),
        ({"hicache_consumer_index": 0}, NotMixed.LOADING_FROM_HOST),
    ],
    ids=str,
)
def test_what_cannot_be_mixed(changes: dict[str, Any], reason: NotMixed | None) -> None:
    assert refusal(schedule_batch([7, 0], [3, 2], **changes)) == reason


# ---- what is mixed


class Prefixes:
    """Of which so many tokens are expanded for each request."""

    def __init__(self, expanded: int = 0) -> None:
        self.expanded, self.fails, self.source = expanded, False, self

    def expanded_lens(self, reqs: Any, prefix_lens: list[int]) -> list[int]:
        if self.fails:
            raise RuntimeError("no")
        return [min(self.expanded, length) for length in prefix_lens]


EAGER_LAYER_S = H200.rates.passes.eager_layer_s
SLOW_HOST = replace(H200, rates=replace(H200.rates, passes=replace(H200.rates.passes, eager_layer_s=1.0)))


def make(expanded: int = 0, cost: CostModel = H200, **options: Any) -> MixedRule:
    values = dict(tokens=256, most_rows=300, cost=cost, counters=Counters(), grouped=False)
    return MixedRule(prefixes=Prefixes(expanded), **{**values, **options})


def test_more_rows_than_there_is_a_graph_for_are_not_mixed() -> None:
    rule = make(cost=SLOW_HOST)
    assert rule.allows(schedule_batch([0], [300])) and rule.allows(schedule_batch([0], [250]), running=50)
    assert not rule.allows(schedule_batch([0], [301])) and not rule.allows(schedule_batch([0], [250]), running=51)
    # With running requests it is asked again without them.
    assert rule._counters.not_mixed == {"more_rows": 1}
    runner = SimpleNamespace(
        decode_cuda_graph_runner=SimpleNamespace(max_bs=200), model_config=SimpleNamespace(vocab_size=1000)
    )
    rule.begin(runner)
    assert rule.most_rows == 200 and rule.room(150) == 50
    # Steps of more running rows share nothing.
    assert [make(most_rows=2048).room(running) for running in (1024, 1025)] == [1024, 0]
    assert [make(most_rows=2048, query_tokens=4).room(running) for running in (256, 257)] == [1024, 0]
    runner.decode_cuda_graph_runner = None
    rule.begin(runner)
    assert rule.most_rows == 200


def test_where_ranks_vote_a_batch_with_running_requests_fits_a_prefill_pass_too() -> None:
    """A batch becomes a prefill pass if another rank prefills; without running requests any prefill pass holds it."""
    runner = SimpleNamespace(decode_cuda_graph_runner=None)
    for prefill_rows, room in ((0, 0), (200, 200), (1000, 300)):
        rule = make(prefill_rows=prefill_rows)
        rule.begin(runner)
        assert rule.mixed_rows == 300 and rule.room(50) == 250
        rule.begin(runner, votes=True)
        assert rule.mixed_rows == room and rule.room(50) == room - 50 and rule.room(0) == 300


def test_a_pass_is_mixed_where_that_is_sooner() -> None:
    """Over what is expanded, and not where many rows would read a long history each, which a pass makes keys and values
    of once."""
    long, short = schedule_batch([20000], [500]), schedule_batch([20000], [2])
    rule = make(most_rows=500)
    assert not rule.allows(long) and rule.allows(short)
    assert rule._counters.not_mixed == {"pass_is_faster": 1}
    assert make(expanded=19500, most_rows=500).allows(long)
    assert make(cost=SLOW_HOST, most_rows=500).allows(long)
    few_heads = CostModel(H200.dims, 8, H200.rates)
    alone, together = (make(cost=few_heads, grouped=grouped) for grouped in (False, True))
    arguments = [20000], [0], [100]
    assert together.seconds(*arguments) < alone.seconds(*arguments), "its own history is read once"
    assert alone.seconds([20000], [20000], [100]) < alone.seconds(*arguments)


def test_a_pass_makes_keys_and_values_for_each_of_its_requests() -> None:
    """Unless it expands for itself what they share."""
    four = schedule_batch([26432] * 4, [128] * 4)
    apart, together = (make(expanded=7168, most_rows=512, expands_once=once) for once in (False, True))
    assert apart.allows(four) and not together.allows(four)
    arguments = [26432] * 2, [7168] * 2, [1] * 2
    once, each = make(expands_once=True).pass_seconds(*arguments), make().pass_seconds(*arguments)
    assert EAGER_LAYER_S < once < each < 2 * once
    assert make().pass_seconds([0], [0], [1]) == EAGER_LAYER_S
    # As many products as 120 rows of plain absorb have, and not much more memory.
    rows = H200.making_seconds(1000) / (H200.work_seconds(Mode.ABSORB, 64, 1000) / 64)
    assert 120 < rows < 240


def test_every_rank_is_asked_also_by_one_that_cannot_say() -> None:
    """Or the others would wait for its answer; whatever is not a question of time all know by themselves."""
    asked: list[bool] = []

    def one_says_no(answer: bool) -> bool:
        asked.append(answer)
        return False

    rule, batch = make(agree=one_says_no), schedule_batch([100], [2])
    assert not rule.allows(batch)
    rule._prefixes.fails = True
    assert not rule.allows(batch)
    assert asked == [True, False]
    assert rule._counters.not_mixed == {"pass_is_faster": 2}
    assert rule._counters.fallbacks == {"predict_mixed": 1}
    assert not rule.allows(schedule_batch([100], [2], is_prefill_only=True)) and len(asked) == 2


def test_all_ranks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.distributed import parallel_state

    from sglang_mla_ext.adapter.ranks.ranks import all_ranks_agree

    group = SimpleNamespace(world_size=1, cpu_group="ours")
    monkeypatch.setattr(parallel_state, "get_attn_tp_group", lambda: group)
    assert all_ranks_agree() is bool
    group.world_size, others = 2, [1]

    def all_reduce(tensor: torch.Tensor, operation: Any, of_group: Any) -> None:
        assert operation == torch.distributed.ReduceOp.MIN and of_group == "ours"
        tensor.clamp_(max=others[0])

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    agree = all_ranks_agree()
    assert agree(True) is True and agree(False) is False
    others[0] = 0
    assert agree(True) is False


def test_logits_are_those_of_last_rows() -> None:
    """And the batch that ran stays with the pass. What fails is seen in hook_scenarios_mixed.py."""
    batch, seen = forward_batch("EXTEND", [7, 0, 64], [3, 2, 1]), []
    module.passes.now = module.Pass(module.Kind.DECODE, Rows.of([3, 2, 1]), mixed=True)

    def forward(runner: Any, rows: Any, *more: Any) -> Any:
        seen.append((runner, rows, more))
        logits = SimpleNamespace(next_token_logits=torch.arange(6.0)[:, None], customized_info=None)
        return SimpleNamespace(logits_output=logits)

    now = module.passes.now
    session, runner = SimpleNamespace(steps=SimpleNamespace(fail=pytest.fail)), SimpleNamespace(is_draft_worker=False)
    output = module.around_forward_raw(session, forward, runner, batch, "proxies", False, 1)
    assert output.logits_output.next_token_logits.flatten().tolist() == [2, 4, 5]
    assert seen == [(runner, now.as_rows, ("proxies", False, 1))] and now.as_rows.batch_size == 6
    module.passes.end()


def test_what_a_model_says_of_each_token_is_of_last_rows() -> None:
    """Padded where it comes from a graph, whose own dictionary stays as it is; perhaps of last rows already where the
    head has these alone."""
    now = module.Pass(module.Kind.DECODE, Rows.of([3, 2, 1]), last_rows=torch.tensor([2, 4, 5]))
    info = {"of a graph": torch.arange(8.0), "of rows": list("abcdef"), "of requests": [7, 8, 9]}
    output = SimpleNamespace(next_token_logits=torch.arange(6.0), customized_info=dict(info))
    captured = output.customized_info
    take_last_rows(output, now)
    assert output.next_token_logits.tolist() == [2, 4, 5]
    assert output.customized_info == {"of a graph": [2, 4, 5], "of rows": ["c", "e", "f"], "of requests": [7, 8, 9]}
    assert captured == info

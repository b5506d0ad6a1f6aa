"""Whether ranks hold expanded prefixes together, what is said where they cannot, and a rank's part in their steps."""

from __future__ import annotations

import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import test_limits
import torch
from doubles import request as request_of

from sglang_mla_ext.adapter.compat import contract
from sglang_mla_ext.adapter.launch import limits, sharded_prefixes
from sglang_mla_ext.adapter.ranks import prompts, ranks, sharded
from sglang_mla_ext.adapter.ranks.prompts import PromptNames
from sglang_mla_ext.adapter.ranks.sharded import ShardedSteps
from sglang_mla_ext.kernels.naive import peers
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.prefix.memory.pool import ExpandedPool
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates
from sglang_mla_ext.prefix.planner.model_dims import ModelDims
from sglang_mla_ext.prefix.planner.planner import Planner
from sglang_mla_ext.prefix.planner.room import Capacity
from sglang_mla_ext.prefix.sharded.member import Member
from sglang_mla_ext.prefix.sharded.names import KEY_BYTES, Names, chunk_names
from sglang_mla_ext.prefix.sharded.reports import Reports
from sglang_mla_ext.prefix.sharing import Sharing

EIGHT = {"enable_dp_attention": True, "tp_size": 8, "dp_size": 8, "attn_dp_size": 8}


def server_args(**changes: Any) -> Any:
    return test_limits.server_args(**{**EIGHT, **changes})


@pytest.mark.parametrize(
    ("changes", "given", "reason"),
    [
        ({}, {}, None),
        ({"moe_dense_tp_size": 1, "enable_dp_lm_head": True}, {}, None),
        ({"moe_a2a_backend": "deepep"}, {}, None),
        ({"enable_dp_attention": False, "attn_dp_size": 1}, {}, "without DP attention"),
        ({"dp_size": 4, "attn_dp_size": 4}, {}, "--dp-size 4 that is not --tp-size 8"),
        ({"dims": {**test_limits.DEEPSEEK, "num_attention_heads": 60}}, {}, "60 heads, which 8 ranks do not divide"),
        ({}, {"mode": "grouped_absorb"}, "never expands"),
        (test_limits.EAGLE, {}, None),
        ({"disaggregation_mode": "prefill"}, {}, "--disaggregation-mode"),
        ({"elastic_ep_backend": "nixl"}, {}, "--elastic-ep-backend"),
        (
            {"moe_dense_tp_size": 1, "enable_dp_lm_head": True, "moe_a2a_backend": "deepep"},
            {},
            "--moe-dense-tp-size with",
        ),
        ({"cuda_graph_config": test_limits.graphs("disabled", decode="disabled")}, {}, "decode without CUDA graphs"),
        ({"disable_cuda_graph_padding": True}, {}, "--disable-cuda-graph-padding"),
        ({}, {"prefix_sharding": "peers"}, None),
        ({"enable_dp_attention": False, "attn_dp_size": 1}, {"prefix_sharding": "peers"}, "without DP attention"),
        ({}, {"dp_routing": "prefix"}, "routing"),
        ({"dims": {**test_limits.DEEPSEEK, "num_attention_heads": 32}}, {}, "few heads"),
        ({"dims": {**test_limits.DEEPSEEK, "num_attention_heads": 32}}, {"prefix_sharding": "peers"}, None),
        ({}, {"dp_routing": "prefix", "prefix_sharding": "peers"}, None),
        ({"nnodes": 2}, {}, "ranks on several nodes"),
        ({"nnodes": 2}, {"prefix_sharding": "peers"}, "ranks on several nodes"),
        ({"nnodes": 2}, {"prefix_sharding": "nccl"}, None),
    ],
    ids=str,
)
def test_where_prefixes_are_sharded(
    changes: dict[str, Any], given: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shard with and without a flag. Warn of an obstacle only if the user did not choose it and could remove it."""
    args, by_itself = server_args(**changes), "prefix_sharding" not in given
    assert test_limits.server(args, **given | {"prefix_sharding": "off"}).ranks.sharding == 1
    assert test_limits.server(args, **given).ranks.sharding == (8 if reason is None else 1)
    for name, value in given.items():
        monkeypatch.setenv(f"SGLANG_HYBRID_MLA_{name.upper()}", value)
    begins = "Each rank expands prefixes for itself" if by_itself else sharded_prefixes.FLAG
    said = [each for each in limits.warnings(test_limits.server(args)) if each.startswith(begins)]
    chosen = ("without DP attention", "never expands", "routing", "few heads")
    silent = reason is None or (by_itself and reason in chosen)
    assert len(said) == (not silent) and all(reason in each for each in said)


def test_ranks_without_gpus_store_into_no_memory_but_their_own() -> None:
    args = server_args()
    assert test_limits.server(args, on_gpu=False, prefix_sharding="nccl").ranks.sharding == 8
    for stores, warns in (("auto", False), ("peers", True)):
        alone = test_limits.server(args, on_gpu=False, prefix_sharding=stores).ranks
        assert alone.sharding == 1 and "a CPU" in alone.sharding_obstacle
        assert (alone.sharding_warning is not None) == warns


@pytest.mark.parametrize(
    ("how", "mine", "others", "expected"),
    [
        ("auto", True, True, "auto"),
        ("auto", False, True, "off"),
        ("auto", True, False, "off"),
        ("peers", False, False, "peers"),
        ("nccl", False, False, "nccl"),
        ("off", False, False, "off"),
    ],
)
def test_ranks_that_do_not_reach_each_other_hold_their_own_prefixes(
    how: str, mine: bool, others: bool, expected: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Turn sharding off on all ranks if one reaches no other. A way that the user names is not checked."""

    def mailbox(*args: object) -> None:
        if not mine:
            raise RuntimeError("no handle")

    group = SimpleNamespace(device_group="all")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(peers, "symmetric_mailbox", mailbox)
    monkeypatch.setattr(ranks, "tp_group", lambda: group)
    monkeypatch.setattr(ranks, "all_ranks_agree", lambda of: lambda answer: answer and others)
    server = test_limits.server(server_args(), prefix_sharding=how)
    assert ranks.sharding_in_reach(server).prefix_sharding == expected
    assert ("not sharded" in caplog.text) == (how != expected)
    assert ("no handle" in caplog.text) == (how != expected and not mine)


def test_nccl_is_kept_from_registering_unless_the_user_says_so() -> None:
    for before in ({}, {"NCCL_GRAPH_REGISTER": "1"}):
        environment = dict(before)
        sharded_prefixes.set_environment(environment)
        assert environment == {"NCCL_GRAPH_REGISTER": "0", **before}


# ---- a rank's part

CHUNK = 256


class Rank:
    """One of two ranks, of which the other one says and has the same."""

    def __init__(self, graphs: list[int] | None = None, query_tokens: int = 1) -> None:
        dims, rates = ModelDims.of("deepseek-v3"), GpuRates.from_json("h200")
        cost = CostModel(dims, 128, rates, query_tokens=query_tokens, ranks=2)
        options = HybridMLAOptions(mode="naive", expand_tokens_per_step=CHUNK)
        pool = ExpandedPool(8, CHUNK)
        self.counters, self.failures, self.expanded = Counters(), [], []
        names = PromptNames(bytes(32), CHUNK)
        reports = Reports(pool, names, ahead=4)
        self.slots = sharded.SlotsOfPass(reports, torch.arange(4000).view(4, 1000))
        planner = Planner(options, cost, Capacity(8, 64), CHUNK, self.counters)
        expander: Any = SimpleNamespace(expand=self._expand)
        self.prefixes = Sharing(reports, pool, planner, expander, self.counters, shortest=1)
        self.sharded = ShardedSteps(
            Member(self.prefixes, reports, rank=0),
            names,
            self.slots,
            self.counters,
            chunk_tokens=CHUNK,
            gather=lambda mine: [mine, mine],
            requests=range(1, 17),
            query_tokens=cost.query_tokens,
            can_share=lambda: True,
            fail=lambda what, error: self.failures.append(what.code),
        )
        if graphs is not None:
            runner = SimpleNamespace(decode_cuda_graph_runner=SimpleNamespace(capture_bs=graphs))
            self.sharded.begin(runner)

    def _expand(self, node: bytes, node_end: int, start: int, end: int, chunks: list[int]) -> None:
        if self.counters.steps_verify:  # a switch of the test
            raise MemoryError
        slots = self.slots.slots(node, node_end, start, end)
        self.expanded.append((slots[0].item(), len(slots)))

    def step(
        self, reqs: list[Any], *, new_tokens: int = 0, running: int = 0, extends: bool = False, graphs: bool = True
    ) -> Any:
        """
        Args:
            running: beside new tokens of the first requests, the last so many decode.
        """
        mode = SimpleNamespace(is_idle=lambda: not reqs, is_decode=lambda: not new_tokens)
        new = len(reqs) - running
        rows = [new_tokens or 1] * new + [1] * running
        lens = {"prefix_lens": [CHUNK + 5] * new + [700] * running, "extend_lens": rows}
        self.sharded.comes(SimpleNamespace(forward_mode=mode, reqs=reqs, **lens))
        tokens = [sum(rows)] * 2
        info = SimpleNamespace(global_num_tokens=tokens, is_extend_in_batch=extends, can_run_decode_cuda_graph=graphs)
        self.sharded.agree(info)
        plan = self.sharded.shared_plan()
        self.sharded.expand(torch.arange(len(reqs)) + 1)
        assert self.sharded.agreed == (plan is not None), "until the next batch comes"
        return plan


def request(tokens: int, **changes: Any) -> Any:
    return request_of(list(range(tokens)), **changes)


def test_a_rank_expands_from_its_slots_and_shares_what_both_have() -> None:
    rank = Rank(graphs=[1, 2, 8])
    reqs = [request(600), request(600)]
    assert [rank.step(reqs) for _ in range(2)] == [None, None] and rank.expanded == [(1000, CHUNK)]
    plan = rank.step(reqs)
    assert plan.each == 2 and rank.expanded[1:] == [(1000 + CHUNK, CHUNK)]
    assert [(each.rows, each.end) for each in plan.segments] == [((0, 1, 2, 3), CHUNK)]
    (segment,) = rank.step([*reqs, request(600)]).segments
    assert segment.rows == (0, 1, 2, 8, 9, 10) and segment.end == 2 * CHUNK, "rows of a rank are those of its graph"
    (segment,) = rank.step(reqs, new_tokens=3).segments
    assert segment.end == CHUNK and len(segment.rows) == 12, "where new tokens are rows, only what is cached"
    assert rank.prefixes.source.expanded_lens(reqs, [600, 300]) == [2 * CHUNK, CHUNK]
    others = [request(600, extra_key="salt"), request(600, input_embeds=object())]
    assert rank.step(others) is None and rank.prefixes.plan.segments == ()
    others = [request(600, positional_embed_overrides=object()) for _ in range(2)]
    assert rank.step(others) is None and rank.prefixes.source.expanded_lens(others, [600, 600]) == [0, 0]
    assert not rank.failures and not rank.counters.not_sharded


def test_keys_and_salts_keep_names_apart() -> None:
    """SGLang 0.5.17 joins the salt to the key; newer releases have two fields. Clients write anything in them."""
    apart = [{}, {"extra_key": "a"}, {"extra_key": "b"}, {"extra_key": "('a', None)"}]
    if contract.line() != "0.5.17":
        apart += [{"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_key": "a", "cache_salt": "b"}]
        apart += [{"extra_key": "b", "cache_salt": "a"}, {"extra_key": "None", "cache_salt": "a"}]
    names = PromptNames(bytes(KEY_BYTES), CHUNK)
    assert len({names(request(600, **keys)) for keys in apart}) == len(apart)
    assert all(names(request(600, **keys)) == names(request(600, **keys)) for keys in apart)


def test_in_a_mixed_batch_running_requests_share_all_of_their_prompts() -> None:
    """New requests share as much of theirs as is cached."""
    rank = Rank(graphs=[1, 2, 8])
    reqs = [request(600), request(600)]
    for _ in range(3):
        rank.step(reqs)
    plan = rank.step([request(600), *reqs], new_tokens=3, running=2)
    assert plan.each == 8, "five rows of each rank, and padding"
    mine = {(each.start, each.end): [row for row in each.rows if row < 8] for each in plan.segments}
    assert mine == {(0, CHUNK): [0, 1, 2, 3, 4], (CHUNK, 2 * CHUNK): [3, 4]}
    assert not rank.failures and not rank.counters.not_sharded


def test_a_prompt_is_named_once_whatever_batches_its_request_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naming takes the host 0.3 ms for 7,000 tokens; decode steps take turns with passes whose new tokens are rows."""
    named: list[int] = []

    def count(tokens: list[int], *of_server: Any) -> Names:
        named.append(len(tokens))
        return chunk_names(tokens, *of_server)

    monkeypatch.setattr(prompts, "chunk_names", count)
    rank = Rank(graphs=[1, 2, 8])
    reqs, newcomer = [request(600), request(601)], request(602)
    for _ in range(3):
        rank.step(reqs), rank.step([newcomer], new_tokens=3), rank.step([])
    assert named == [600, 601, 602]
    reqs[0].origin_input_ids = [0]  # as SGLang's abort
    rank.step(reqs)
    assert named == [600, 601, 602, 1]
    gone = weakref.ref(newcomer)
    del newcomer
    rank.sharded.comes(None)
    assert gone() is None and not rank.failures


def test_after_ten_minutes_without_a_shared_step_the_log_says_how_to_have_the_memory_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log it once, counting time with requests alone, and never after a shared step."""
    now = [1000.0]
    monkeypatch.setattr(sharded.time, "monotonic", lambda: now[0])
    caplog.set_level("INFO")

    def said_after(reqs: list[Any]) -> int:
        caplog.clear()
        rank = Rank(graphs=[1, 2, 8])
        for seconds in (5000, 5000, 300, 250, 250, 250, 250):
            now[0] += seconds
            rank.step(reqs if rank.sharded._first_pass_s or seconds < 5000 else [])
        return caplog.text.count("--hybrid-mla-prefix-memory-gb 0")

    assert said_after([request(60), request(60)]) == 1
    assert said_after([request(600), request(600)]) == 0


def test_who_shares_nothing_seldom_waits_for_the_others() -> None:
    rank, said = Rank(graphs=[1, 2, 8]), []
    gather = rank.sharded._gather
    rank.sharded._gather = lambda mine: (said.append(len(mine)), gather(mine))[1]

    def votes(reqs: list[Any], steps: int) -> list[int]:
        found = []
        for _ in range(steps):
            said.clear()
            rank.step(reqs)
            found.append(len(said))
        return found

    short, others = [request(60), request(60)], [request(61), request(60)]
    assert votes(short, 7) == [3, 0, 0, 0, 0, 1, 0], "the first agreement takes reports, too"
    assert votes(others, 4) == [0, 0, 0, 1]
    reqs = [request(600), request(600)]
    assert votes(reqs, 8) == [0, 0, 0, 0, 3, 1, 3, 3], "two chunks are wanted, then expanded one by one"
    assert rank.step(reqs).segments and not rank.counters.not_sharded


def test_the_time_for_agreeing_is_the_hosts_without_what_it_waits_for_others() -> None:
    rank, waits_s = Rank(graphs=[1, 2, 8]), 0.2
    gather = rank.sharded._gather
    rank.sharded._gather = lambda mine: (time.sleep(waits_s), gather(mine))[1]
    rank.step([request(600), request(600)])
    assert 0 < rank.counters.plan_seconds < waits_s


def test_drafts_are_rows_of_their_requests() -> None:
    """Ranks tell each other numbers of requests, and captured graphs have so many; each request has three rows."""
    rank = Rank(graphs=[1, 2, 8], query_tokens=3)
    reqs = [request(600), request(600)]
    rank.step(reqs), rank.step(reqs)
    plan = rank.step(reqs)
    assert plan.each == 6 and [each.rows for each in plan.mine.segments] == [(0, 1)], "requests of its own"
    (segment,) = plan.segments
    assert segment.rows == tuple(range(12)), "rows of all"
    (segment,) = rank.step([*reqs, request(300)]).segments[:1]
    assert segment.rows == (*range(9), *range(24, 33)), "eight requests of each rank, some of them padding"
    assert not rank.failures and not rank.counters.not_sharded


def test_what_is_not_sharded_is_counted() -> None:
    rank = Rank(graphs=[1, 2, 8, 32])
    reqs = [request(600)]
    assert rank.step(reqs, extends=True) is rank.step(reqs, graphs=False) is rank.step(reqs * 9) is None
    assert rank.step([]) is None, "nobody has any work"
    rank.sharded._can_share = lambda: False
    assert rank.step(reqs) is None
    assert rank.counters.not_sharded == {"rank_prefilling": 1, "more_rows": 2, "rank_paused": 1}
    without_graphs = Rank()
    without_graphs.sharded.comes(None)
    info = {"is_extend_in_batch": False, "can_run_decode_cuda_graph": False}
    without_graphs.sharded.agree(SimpleNamespace(global_num_tokens=[2, 0], **info))
    assert without_graphs.counters.not_sharded == {"rank_without_rows": 1}


def test_plans_that_differ_are_counted_and_voted_on_again(caplog: pytest.LogCaptureFixture) -> None:
    """In the next step, and if they differ again and again, less and less often; what is not voted on counts, too."""
    rank, reqs, votes = Rank(graphs=[1, 2, 8]), [request(600), request(600)], []
    while rank.step(reqs) is None:
        pass
    alike = rank.sharded._gather

    def other_plan(mine: Any) -> Any:
        votes[-1] += 1
        return [mine, [1]] if len(mine) == 1 else alike(mine)

    def in_steps(count: int) -> list[int]:
        votes.clear()
        for _ in range(count):
            votes.append(0)
            assert rank.step(reqs) is None and rank.sharded.shared_plan() is None
        return list(votes)

    reqs.append(request(600))
    rank.sharded._gather = other_plan
    assert in_steps(11) == [3, 3, 0, 0, 0, 0, 3, 0, 0, 0, 0]
    assert rank.counters.not_sharded == {"plans_differ": 11} and not rank.failures
    rank.sharded._without_vote, rank.sharded._differed = 0, 100
    assert sum(map(bool, in_steps(66))) == 2
    rank.sharded._gather, rank.sharded._without_vote = alike, 0
    assert rank.step(reqs).segments
    rank.sharded._gather = other_plan
    reqs.append(request(600))
    assert in_steps(2) == [3, 3], "from the start again"
    assert caplog.text.count("ranks made different plans") == 1


def test_ranks_compare_what_decides_whether_they_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    """And which attention is in which graph."""
    compared: list[dict[str, Any]] = []
    monkeypatch.setattr(sharded, "check_alike", compared.append)
    Rank(graphs=[8, 1, 2])
    (found,) = compared
    assert found == {"rows of decode graphs": [1, 2, 8], "requests of a rank that share": range(1, 17)}


def test_a_failed_expansion_is_told_and_leaves_the_step_as_agreed() -> None:
    rank = Rank(graphs=[2])
    reqs = [request(600), request(600)]
    rank.step(reqs), rank.step(reqs)
    rank.counters.steps_verify = 1
    assert rank.step(reqs).segments and rank.failures == ["expand"]

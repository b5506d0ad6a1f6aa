"""Data-parallel ranks that keep prompts together."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_mla_ext.adapter.compat import contract
from sglang_mla_ext.adapter.launch import dp_routing
from sglang_mla_ext.adapter.launch.dp_routing import Router
from sglang_mla_ext.prefix.affinity import LEAST_SLACK, PAGE_TOKENS, SLACK, PromptAffinity

PROMPTS = [[rank + token for token in range(10 * PAGE_TOKENS)] for rank in (0, 5000, 9000)]


def affinity(ranks: int = 2, **options: Any) -> PromptAffinity:
    return PromptAffinity(ranks, **({"min_prefix_len": 2 * PAGE_TOKENS} | options))


def question(seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=100)


def test_prompts_that_begin_alike_stay_together() -> None:
    kept = affinity()
    ranks: dict[int, set[int]] = {}
    for index in range(40):
        prompt = index % 2
        ranks.setdefault(prompt, set()).add(kept.assign(f"{index}", PROMPTS[prompt] + question(index)))
    assert ranks in ({0: {0}, 1: {1}}, {0: {1}, 1: {0}})
    assert kept.load == [20, 20]


def test_one_prompt_fills_a_rank_no_more_than_the_slack() -> None:
    for ranks in (2, 3, 8):
        kept = affinity(ranks)
        for index in range(400):
            kept.assign(f"{index}", PROMPTS[0] + question(index))
            assert max(kept.load) <= max(min(kept.load) + LEAST_SLACK, sum(kept.load) / ranks * (1 + SLACK)) + 1
        assert max(kept.load) > sum(kept.load) / ranks


def test_a_prompt_that_had_to_go_elsewhere_comes_back() -> None:
    """Both ranks have had it; its requests go where most of the unfinished ones are."""
    kept = affinity()
    of_prompt = [[kept.assign(f"{prompt} {n}", PROMPTS[prompt] + question(n)) for n in range(9)] for prompt in (0, 1)]
    assert len(set(of_prompt[0])) == len(set(of_prompt[1])) == 2  # one after the other: neither had room
    home = max((0, 1), key=of_prompt[0].count)
    for n in range(9):
        if of_prompt[0][n] != home:
            kept.finish(f"0 {n}")
        if of_prompt[1][n] == home:
            kept.finish(f"1 {n}")
    for n in range(10, 16):
        assert kept.assign(f"0 {n}", PROMPTS[0] + question(n)) == home
        assert kept.assign(f"1 {n}", PROMPTS[1] + question(n)) == 1 - home


def loaded(kept: PromptAffinity, *load: int) -> PromptAffinity:
    """The same, with so many requests of each rank that have nothing in common with any other."""
    for request in kept.unfinished:
        kept.finish(request)
    for rank, count in enumerate(load):
        for index in range(count):
            kept.assign(f"alone {rank} {index}", [], rank=rank)
    assert kept.load == list(load)
    return kept


def test_the_longest_match_counts() -> None:
    """A conversation goes where it was, not where its system prompt is."""
    kept = affinity()
    conversation = PROMPTS[0] + question(0) * 3
    first = kept.assign("first", PROMPTS[0])
    other = loaded(kept, *((9, 0) if first == 0 else (0, 9))).assign("other", conversation)
    assert other != first
    assert loaded(kept, 0, 0).assign("more", conversation + question(1)) == other
    assert loaded(kept, 0, 1).assign("front", PROMPTS[0][: 5 * PAGE_TOKENS]) == 0  # both have it: the less busy one


@pytest.mark.parametrize("tokens", [[], [1], list(range(2 * PAGE_TOKENS - 1))])
def test_short_prompts_and_short_matches_go_where_there_is_least_to_do(tokens: list[int]) -> None:
    kept = affinity()
    for _ in range(2):
        assert loaded(kept, 1, 0).assign("one", tokens) == 1
        assert loaded(kept, 0, 1).assign("one", tokens) == 0


def test_what_is_not_the_same_has_nothing_in_common() -> None:
    kept = affinity()
    prompt = PROMPTS[0]
    assert loaded(kept, 0, 1).assign("x", prompt, "one") == 0
    assert loaded(kept, 1, 0).assign("x", prompt, "one") == 0
    assert loaded(kept, 1, 0).assign("x", prompt, "two") == 1
    swapped = prompt[PAGE_TOKENS : 2 * PAGE_TOKENS] + prompt[:PAGE_TOKENS] + prompt[2 * PAGE_TOKENS :]
    for other in (swapped, [1, *prompt], [*prompt[:PAGE_TOKENS], 7, *prompt[PAGE_TOKENS + 1 :]]):
        fresh = affinity()
        loaded(fresh, 0, 1).assign("x", prompt)
        assert loaded(fresh, 1, 0).assign("x", other) == 1


def test_memory_is_bounded_and_the_least_recently_used_go_first() -> None:
    kept = affinity(max_pages=25)
    for prompt in (0, 1, 2):
        loaded(kept, 0, 1).assign("x", PROMPTS[prompt])
    loaded(kept, 1, 0)
    assert len(kept._holders) == 25 and not kept._running
    # Of the first prompt five pages are left, its front.
    assert [len(PROMPTS[0]) // PAGE_TOKENS, *kept._matched(kept._hashes(PROMPTS[0], ""))] == [10, 5, 0]
    assert kept.assign("y", PROMPTS[0][: 5 * PAGE_TOKENS]) == 0
    long = list(range(100 * PAGE_TOKENS))
    loaded(kept, 0, 1).assign("z", long)
    assert len(kept._holders) == 25 and loaded(kept, 1, 0).assign("z", long) == 0


def request(rid: str, tokens: list[int] | None, **fields: Any) -> SimpleNamespace:
    apart = dict(extra_key=None, cache_salt=None, lora_id=None) | fields
    return SimpleNamespace(rid=rid, input_ids=tokens, sampling_params=None, routed_dp_rank=None, **apart)


def test_requests_get_a_rank_and_count_until_they_are_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(dp_routing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    router, unfinished = Router(2, 2 * PAGE_TOKENS), set()

    def send(*requests: SimpleNamespace) -> list[int | None]:
        unfinished.update(each.rid for each in requests)
        router.route(requests[0] if len(requests) == 1 else SimpleNamespace(batch=list(requests)), unfinished)
        return [each.routed_dp_rank for each in requests]

    alone = [send(request(f"a{index}", [index]))[0] for index in range(4)]
    assert sorted(alone) == [0, 0, 1, 1]
    assert len(set(send(*(request(f"b{index}", PROMPTS[0] + question(index)) for index in range(2))))) == 1
    named = request("c", PROMPTS[1])
    named.routed_dp_rank = 1
    assert send(named) == [1] and sum(router._affinity.load) == 7  # its sender knows better, and it counts
    unfinished &= {"c"}
    now[0] += 1
    assert send(request("d", [5])) == [0] and router._affinity.load == [1, 1]


@pytest.mark.parametrize("field", ["extra_key", "lora_id", *(["cache_salt"] if contract.line() != "0.5.17" else [])])
def test_requests_that_cannot_share_need_not_stay_together(field: str) -> None:
    """Of one prompt, but of two tenants or two adapters."""
    router, sent = Router(2, 2 * PAGE_TOKENS), [request(name, PROMPTS[0], **{field: name}) for name in ("a", "b")]
    for each in sent:
        router.route(each, {"a", "b"})
    assert [each.routed_dp_rank for each in sent] == [0, 1]


def test_other_messages_are_left_alone() -> None:
    router = Router(2, 256)
    message, embeddings = SimpleNamespace(rid="x"), request("y", None)
    health_check = request("HEALTH_CHECK_1.5", [0])
    for each in (message, embeddings, health_check):
        router.route(each, set())
    assert vars(message) == {"rid": "x"} and embeddings.routed_dp_rank is health_check.routed_dp_rank is None


class Manager:
    """What is read of SGLang's, by all releases."""

    def __init__(self, backend: str = "hybrid_mla", dp_size: int = 2) -> None:
        names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
        backends = dict.fromkeys(names, backend)
        ranks = {"dp_size": dp_size, "attn_dp_size": 1, "enable_dp_attention": False}
        self.server_args = SimpleNamespace(**backends, **ranks, get_attention_backends=lambda: (backend, backend))
        self.rid_to_state: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("manager", "routing", "rank"),
    [
        (Manager(), "prefix", 0),
        (Manager(), "sglang", None),
        (Manager(dp_size=1), "prefix", None),
        (Manager("flashmla"), "prefix", None),  # another engine of the same process
    ],
)
def test_who_is_routed(monkeypatch: pytest.MonkeyPatch, manager: Any, routing: str, rank: int | None) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_MLA_DP_ROUTING", routing)
    sent = request("x", PROMPTS[0])
    dp_routing.before_dispatch(manager, sent)
    assert sent.routed_dp_rank == rank


def test_ranks_of_dp_attention_may_be_no_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with 0.5.23's --attn-dp-size."""
    monkeypatch.setattr(dp_routing.installed, "dp_attention_ranks", lambda args: 2)
    test_who_is_routed(monkeypatch, Manager(dp_size=1), "prefix", 0)


def test_managers_do_not_share_what_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_MLA_DP_ROUTING", "prefix")
    for _ in range(2):
        manager: Any = Manager()
        for index in range(2):
            sent = request(f"{index}", [index])
            manager.rid_to_state[sent.rid] = None
            dp_routing.before_dispatch(manager, sent)
            assert sent.routed_dp_rank == index

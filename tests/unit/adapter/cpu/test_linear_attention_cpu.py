"""Linear attention in torch, in place of SGLang's kernels: against products of matrices in float64, in pieces, and a
token at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize, softplus

from sglang_mla_ext.adapter.cpu import linear_attention

TOKENS, HEADS, K, V = 70, 2, 8, 4
STARTS = torch.tensor([0, 5, TOKENS])  # two requests


def inputs(tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return dict(
        q=randn(1, tokens, HEADS, K),
        k=randn(1, tokens, HEADS, K),
        v=randn(1, tokens, HEADS, V),
        g=randn(1, tokens, HEADS, K),
        beta=randn(1, tokens, HEADS),
        A_log=randn(1, 1, HEADS, 1),
        dt_bias=randn(HEADS * K) - 2,
    )


def run(given: dict[str, torch.Tensor], states: torch.Tensor, starts: torch.Tensor, **more: Any) -> Any:
    slots = torch.tensor([3, 1])[: len(starts) - 1]
    return linear_attention.chunk_kda(
        **given, initial_state=states, initial_state_indices=slots, cu_seqlens=starts, **more
    )


def part(given: dict[str, torch.Tensor], tokens: slice) -> dict[str, torch.Tensor]:
    return {name: x[:, tokens] if x.dim() > 2 and len(x) == 1 and name != "A_log" else x for name, x in given.items()}


def test_prefill_equals_products_of_matrices() -> None:
    given, states = inputs(), torch.randn(4, HEADS, V, K, generator=torch.Generator().manual_seed(1))
    before = states.double()
    kept = torch.zeros(2, HEADS, V, K)
    out, found = run(
        given, states, STARTS, output_intermediate_states=True, track_state=kept, track_chunk_idx=torch.tensor([-1, 1])
    )
    for slot, (begin, end) in ((3, (0, 5)), (1, (5, TOKENS))):
        for head in range(HEADS):
            state = before[slot, head]
            for t in range(begin, end):
                q, k = (normalize(given[name][0, t, head].double(), dim=0) for name in ("q", "k"))
                gate = given["g"][0, t, head] + given["dt_bias"].view(HEADS, K)[head]
                decay = (-given["A_log"].flatten()[head].exp() * softplus(gate)).exp().double()
                beta = given["beta"][0, t, head].sigmoid().double()
                forgets = torch.diag(decay) @ (torch.eye(K, dtype=torch.float64) - beta * torch.outer(k, k))
                if (begin, t) == (5, 5 + linear_attention.CHUNK_TOKENS):
                    assert torch.allclose(kept[1, head].double(), state, atol=1e-5)
                state = state @ forgets + beta * torch.outer(given["v"][0, t, head].double(), k)
                assert torch.allclose(out[0, t, head].double(), state @ q * K**-0.5, atol=1e-5)
            assert torch.allclose(states[slot, head].double(), state, atol=1e-5)
    assert found.shape[1] == 3 and torch.equal(found[0, 2], kept[1])
    assert torch.equal(states[::2], before[::2].float())  # of no request


def test_pieces_and_single_tokens_give_the_same() -> None:
    given, starts = inputs(), torch.tensor([0, TOKENS])
    whole_states, states = torch.zeros(4, HEADS, V, K), torch.zeros(4, HEADS, V, K)
    whole = run(given, whole_states, starts)
    first = run(part(given, slice(0, 66)), states, torch.tensor([0, 66]))
    outs = [first]
    for t in range(66, TOKENS):
        one = part(given, slice(t, t + 1))
        outs.append(
            linear_attention.decode_kda(
                **{name: one[name] for name in ("q", "k", "v", "A_log", "dt_bias")},
                a=one["g"].flatten(2),
                b=one["beta"],
                initial_state_source=states,
                initial_state_indices=torch.tensor([3]),
                cu_seqlens=torch.tensor([0, 1]),
            )
        )
    assert torch.allclose(torch.cat(outs, dim=1), whole, atol=1e-5)
    assert torch.allclose(states, whole_states, atol=1e-5)


def test_convolution_goes_on_where_it_was() -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(6, 9, generator=generator), torch.randn(6, 4, generator=generator)
    states, ways = torch.full((3, 6, 3), float("nan")), dict(cache_indices=torch.tensor([2]))
    expected = torch.nn.functional.silu(
        torch.nn.functional.conv1d(torch.nn.functional.pad(x, (3, 0))[None], weight[:, None], groups=6)[0]
    )
    outs = []
    for begin, end in ((0, 2), (2, 7)):
        ways |= dict(has_initial_state=torch.tensor([begin > 0]), query_start_loc=torch.tensor([0, end - begin]))
        outs.append(linear_attention.convolve(x[:, begin:end], weight, None, conv_states=states, **ways))
    for t in (7, 8):
        rows = x[:, t][None].repeat(2, 1)
        slots = torch.tensor([2, -1])  # the other is padding
        out = linear_attention.update_convolution(rows, states, weight, None, conv_state_indices=slots)
        outs.append(out[0][:, None])
    assert torch.allclose(torch.cat(outs, dim=1), expected, atol=1e-5)
    assert states[:2].isnan().all()


@pytest.mark.parametrize("repeats", [False, True])
def test_no_pass_is_run_twice_whose_states_would_take_their_tokens_twice(repeats: bool) -> None:
    from sglang_mla_ext.adapter.failure import OurPartFailedError, around_pass
    from sglang_mla_ext.reasons import Fallback

    runs: list[Any] = []

    def fails_once(runner: Any, batch: Any) -> str:
        runs.append(batch)
        if len(runs) == 1:
            raise OurPartFailedError(Fallback.ATTENTION, MemoryError())
        return "done"

    session: Any = SimpleNamespace(steps=SimpleNamespace(fail=lambda what, error: None), repeats=repeats)
    if repeats:
        assert around_pass(session, fails_once, None, SimpleNamespace()) == "done"
        return
    with pytest.raises(OurPartFailedError):
        around_pass(session, fails_once, None, SimpleNamespace())
    assert len(runs) == 1

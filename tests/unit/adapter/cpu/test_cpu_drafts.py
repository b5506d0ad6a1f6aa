"""SGLang's functions for drafts on a CPU: a chain, and what of it is accepted."""

from __future__ import annotations

import pytest
import torch

from sglang_mla_ext.adapter.cpu import drafts

ROWS = 3  # of a request: the last accepted token and two drafts


def chain(seq_lens: list[int]) -> dict[str, torch.Tensor]:
    requests = len(seq_lens)
    found = {
        "tree_mask": torch.ones(requests * ROWS * ROWS, dtype=torch.bool),
        "positions": torch.empty(requests * ROWS, dtype=torch.long),
        **{name: torch.full((requests, ROWS), -1) for name in ("retrieve_index", "retrieve_next_token")},
        "retrieve_next_sibling": torch.full((requests, ROWS), -1),
    }
    lens, none = torch.tensor(seq_lens, dtype=torch.long), torch.empty(0)
    drafts.build_tree_kernel_efficient_cpu(none, none, lens, *found.values(), 1, ROWS - 1, ROWS, 1)
    return found


@pytest.mark.parametrize("seq_lens", [[], [5], [7, 1]])
def test_each_draft_follows_the_one_before(seq_lens: list[int]) -> None:
    found, requests = chain(seq_lens), len(seq_lens)
    assert found["positions"].tolist() == [length + row for length in seq_lens for row in range(ROWS)]
    assert found["retrieve_index"].flatten().tolist() == list(range(requests * ROWS))
    assert found["retrieve_next_token"].tolist() == [[1, 2, -1]] * requests
    assert (found["retrieve_next_sibling"] == -1).all()
    masks = found["tree_mask"].view(-1, ROWS, ROWS)
    assert all(torch.equal(mask, torch.ones(ROWS, ROWS).tril().bool()) for mask in masks)


def test_a_tree_with_branches_is_refused() -> None:
    none = torch.empty(0)
    with pytest.raises(NotImplementedError, match="--speculative-eagle-topk 1"):
        drafts.build_tree_kernel_efficient_cpu(*[none] * 8, 2, 2, 4, 1)


def test_drafts_are_accepted_up_to_the_first_wrong_one() -> None:
    """Of four requests all, one, none, and none though the second is right."""
    candidates = torch.tensor([[1, 2, 3], [1, 2, 9], [1, 9, 3], [1, 9, 3]])
    target = torch.tensor([[2, 3, 4], [2, 3, 4], [2, 3, 4], [2, 3, 4]])
    index = chain([4, 4, 4, 4])["retrieve_index"]
    predicts = torch.full((12,), -1, dtype=torch.int32)
    accept_index, accepted = torch.full((4, ROWS), -1, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    drafts.verify_tree_greedy_cpu(predicts, accept_index, accepted, candidates, index, index, index, target)
    assert accepted.tolist() == [2, 1, 0, 0]
    assert accept_index.tolist() == [[0, 1, 2], [3, 4, -1], [6, -1, -1], [9, -1, -1]]
    assert predicts.tolist() == [2, 3, 4, 2, 3, -1, 2, -1, -1, 2, -1, -1]
    slots, bonus = torch.full((12,), -1), torch.empty(4, dtype=torch.int32)
    drafts.fill_accept_out_cache_loc_cpu(accept_index.flatten(), torch.arange(100, 112), slots)
    assert slots.tolist()[:8] == [100, 101, 102, 103, 104, 106, 109, -1]
    drafts.fill_bonus_tokens_cpu(predicts.view(4, ROWS), accepted + 1, bonus, ROWS)
    assert bonus.tolist() == [4, 3, 2, 2], "the model's token behind the last accepted one"


def test_slots_are_those_of_the_request_table() -> None:
    table, rows = torch.arange(40, dtype=torch.int32).view(4, 10), torch.tensor([3, 1])
    out = torch.empty(4, dtype=torch.int64)
    drafts.assign_draft_cache_locs_contiguous_cpu(rows, table, torch.tensor([2, 5]), out, 10, 1, 2)
    assert out.tolist() == [32, 33, 15, 16]
    drafts.assign_extend_cache_locs_cpu(rows, table, torch.tensor([0, 7]), torch.tensor([1, 10]), out, 10)
    assert out.tolist() == [30, 17, 18, 19]

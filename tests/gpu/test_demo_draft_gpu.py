"""The fast attention that the demo model's drafting layer is trained with, on a GPU."""

from __future__ import annotations

import pytest
import torch
from lab.training.draft_attention import pick_own_attention

pytestmark = pytest.mark.gpu


def test_packed_attention_with_own_keys_is_taken() -> None:
    """It is compared with the plain one, forward and backward, before it is."""
    _, why = pick_own_attention(torch.device("cuda"), heads=4, dims=(192, 128))
    assert why.startswith("FlashAttention"), why

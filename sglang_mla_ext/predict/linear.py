"""Time and memory of layers with linear attention beside those with MLA, as Kimi-Linear and Kimi-K3 have them (KDA), as
far as they follow from the configuration.

Counted are the products, and that a step reads and writes the state of each request once. Not counted: what the kernels
of linear attention take beyond that, and the launches of Kimi-K3's mixed residuals, whose bytes are. Together they took
an H200 8.0 to 8.4 ms a step of 93 layers, 98 requests (6 heads a GPU), and 0.3 ms of 8 layers: more than in proportion,
as residuals mix more blocks the deeper they are. Two depths are too few to tell the two apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STATE_BYTES, WINDOW_BYTES = 4, 2
"""Bytes of an element of a state (`--mamba-ssm-dtype`), and of the convolution's window, by SGLang's defaults."""
STATE_SHARE = 0.9 / 1.9
"""Share of the static memory left by the weights that is for states: `--mamba-full-memory-ratio 0.9`, the default."""
STATES_OF_A_REQUEST = 5
"""States that SGLang 0.5.23 keeps for a running request beside a radix tree (`--mamba-radix-cache-strategy
extra_buffer`, the default); 4 with `extra_buffer_lazy`. With these 4 SGLang's cookbook has 98 requests of Kimi-K3 on 16
H200s at `--mem-fraction-static 0.90`, where this counts 115."""


def is_linear(config: Mapping[str, Any]) -> bool:
    """Return whether a model has layers with linear attention."""
    return bool(config.get("linear_attn_config"))


def layers(config: Mapping[str, Any]) -> int:
    """Layers with linear attention; they are numbered from 1."""
    last = int(config["num_hidden_layers"])
    return sum(layer <= last for layer in config["linear_attn_config"]["kda_layers"])


def matrices(config: Mapping[str, Any]) -> list[tuple[str, int, bool]]:
    """Return the products of a layer with linear attention: name, elements of the weights, and whether ranks divide
    them by heads."""
    linear, hidden = config["linear_attn_config"], int(config["hidden_size"])
    dim, heads = int(linear["head_dim"]), int(linear["num_heads"])
    width = heads * dim
    found = [("linear q, k, v", 3 * hidden * width, True)]
    low_rank = [("decay", "f")]
    if linear.get("use_full_rank_gate"):
        found.append(("linear gate", hidden * width, True))
    else:
        low_rank.append(("gate", "g"))
    for name, letter in low_rank:
        found.append((f"linear {name}, {letter}_a", hidden * dim, False))
        found.append((f"linear {name}, {letter}_b", dim * width, True))
    return [*found, ("linear b", hidden * heads, True), ("linear o", width * hidden, True)]


def state_bytes(config: Mapping[str, Any], ranks: int) -> int:
    """Bytes of one state of a request in all such layers, on one of so many ranks that share the heads: a matrix
    `[dim, dim]` of each head, and the last inputs of three convolutions."""
    linear = config["linear_attn_config"]
    dim, heads = int(linear["head_dim"]), int(linear["num_heads"])
    window = 3 * (int(linear["short_conv_kernel_size"]) - 1)
    return layers(config) * heads * dim * (dim * STATE_BYTES + window * WINDOW_BYTES) // ranks


def residual_elements(config: Mapping[str, Any]) -> float:
    """Elements of earlier hidden states that a layer reads for a row, in the mean: attention and MLP each mix the sums
    of all blocks of `attn_res_block_size` layers so far."""
    if not (block := config.get("attn_res_block_size")):
        return 0.0
    blocks = int(config["num_hidden_layers"])
    kept = sum(layer // int(block) + 1 for layer in range(blocks)) / blocks
    return 2 * kept * int(config["hidden_size"])

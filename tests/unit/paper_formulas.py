"""The papers' formulas, each with its equation or table, to be held against the values that they print.

Symbols: B requests, S query tokens of each, Ls shared and Ln other tokens of context, H heads, D_qk and D_v the widths
of a head's key and value, D_l the latent rank, D_r the rotary width, T operations per second, M bytes per second. What
a paper prints and its own formula does not give is said beside the formula; test_lab_papers.py compares both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sglang_mla_ext.prefix.planner.model_dims import ModelDims

PAPER_UNIT = 1024
"""TyphoonMLA's table 1 counts in units of 1,024."""


class Rates(NamedTuple):
    """A processor as the papers describe it: `flops` T and `bytes_per_s` M."""

    flops: float
    bytes_per_s: float


ASCEND = Rates(376e12, 1.8e12)
"""Of TyphoonMLA's section 4 and its B_theta."""
ASCEND_ROOFLINE = Rates(400e12, 1.8e12)
"""Of TyphoonMLA's figure 6."""
GPU_OF_AMLA = Rates(989e12, 3.35e12)
"""Of AMLA's table 5."""


class Work(NamedTuple):
    """MACs, and words read."""

    macs: float
    words: float


def typhoon_table_1(dims: ModelDims, batch: int, shared: int, other: int, query_tokens: int = 1) -> dict[str, Work]:
    """TyphoonMLA, table 1: MACs and words read of one layer's attention, by formulation.

    The words of K count its rotary part for each head, as the paper does; it is stored once here (cost_model.py).
    """
    heads = dims.num_heads
    naive, absorb = heads * dims.naive_macs, heads * dims.absorb_macs
    rows = batch * query_tokens
    return {
        "naive": Work(rows * (shared + other) * naive, (shared + batch * other) * naive),
        "absorb": Work(rows * (shared + other) * absorb, (shared + batch * other) * dims.latent_dim),
        "typhoon": Work(rows * (shared * naive + other * absorb), shared * naive + batch * other * dims.latent_dim),
    }


def typhoon_threshold(dims: ModelDims, rates: Rates, query_tokens: int = 1) -> float:
    """TyphoonMLA, equation 1: the batch from which naive pays, (D_qk + D_v) / (S (2 D_l + D_r)) * T / M.

    Words of two bytes and MACs of two operations: the twos cancel.
    """
    return dims.naive_macs / (query_tokens * dims.absorb_macs) * rates.flops / rates.bytes_per_s


def typhoon_seconds(dims: ModelDims, rates: Rates, batch: int, shared: int, other: int) -> dict[str, float]:
    """TyphoonMLA, figures 7 and 8 (and the bars of figure 4): time of one layer by table 1, the slower of reading and
    computing in each of the two parts; `typhoon` takes naive for the shared part above the threshold.

    Figure 7 says that naive over the shared part is constant up to a batch of 128, and that naive is faster above 64.
    By the formula it is constant up to T/M: 209 with section 4's rates, 222 with figure 6's, so 128 is the last power
    of two. The threshold is 61 with the first, 65 with the second: a batch of 64 is absorb's only with the second.
    Figure 8 was measured: at a batch of 512 it shows twice absorb's speed, and the formula gives 3.2 times.
    """

    def seconds(work: Work) -> float:
        return max(2 * work.macs / rates.flops, 2 * work.words / rates.bytes_per_s)

    of_shared = typhoon_table_1(dims, batch, shared, 0)
    of_other = typhoon_table_1(dims, batch, 0, other)
    part = "naive" if batch > typhoon_threshold(dims, rates) else "absorb"
    return {
        "naive": seconds(of_shared["naive"]) + seconds(of_other["naive"]),
        "absorb": seconds(of_shared["absorb"]) + seconds(of_other["absorb"]),
        "typhoon": seconds(of_shared[part]) + seconds(of_other["absorb"]),
    }


def typhoon_roofline(dims: ModelDims, rates: Rates, batch: int, shared: int, mode: str) -> float:
    """TyphoonMLA, figure 6: query tokens per second of one layer over a shared prefix alone."""
    return batch / typhoon_seconds(dims, rates, batch, shared, 0)[mode]


def typhoon_ridge(dims: ModelDims, rates: Rates, mode: str) -> float:
    """The batch at which a formulation over a shared prefix begins to be bound by computing: figure 6's bends."""
    of_one = typhoon_table_1(dims, 1, 1, 0)[mode]
    return of_one.words / of_one.macs * rates.flops / rates.bytes_per_s


@dataclass(frozen=True)
class Footprint:
    """TyphoonMLA, figure 5: bytes of a whole deployment.

    The figure prints no values; the text says that the expansion costs about 3 % of it across a wide range. The paper
    gives no formula. Counted as follows the share is below 3 % only where the cache is large: with 16,384 requests of
    131,072 tokens and more it is at most 2 %, and at 4,096 of 32,768 tokens it is 30 %, of one expanded copy for each
    data-parallel replica.

    Attributes:
        weights: once, experts spread over all devices; attention's once for each replica is left out.
        latent: of all requests at their longest; expanded: of the prefix, once for each replica.
    """

    weights: float
    latent: float
    expanded: float

    @property
    def overhead(self) -> float:
        """The expansion as a share of everything else."""
        return self.expanded / (self.weights + self.latent)


def typhoon_footprint(
    dims: ModelDims, weights: float, requests: int, longest: int, prefix: int = 26472, replicas: int = 24
) -> Footprint:
    """Figure 5's cell: weights and cache in FP8, one byte a word; the prefix expanded as table 1 counts it.

    Args:
        weights: bytes of the model's.
        replicas: data-parallel ones; tensor and sequence parallelism split one copy.
    """
    latent = requests * longest * dims.latent_dim * dims.num_layers
    expanded = replicas * prefix * dims.num_heads * dims.naive_macs * dims.num_layers
    return Footprint(weights, float(latent), float(expanded))


def typhoon_token_rate(attention_ms: float, rest_ms: float, batch: int = 128) -> float:
    """TyphoonMLA, table 3: tokens per second of a step.

    Its six rates follow from its times. The speed-up of up to 1.48 that the text names does not: 1.48 is the rate, in
    thousands; the ratio of prompt A's two rates is 1.47.
    """
    return batch / (attention_ms + rest_ms) * 1e3


def amla_intensity(heads: int, kv_heads: int, query_tokens: int, key_dim: int, value_dim: int, shared: bool) -> float:
    """AMLA, table 2: operations per byte of attention in BF16, keys and values alone.

    The text of the paper that this was made from has lost the printed row; what the formula gives is 1 for 64 heads
    each with keys of its own (MHA), 8 for 8 groups of 8 (GQA), and 121, 242 and 484 for MLA with 64 heads, 128, and
    128 with two query tokens.

    Args:
        shared: whether values are a part of the keys, as a latent row's are.
    """
    flops = 2 * heads * query_tokens * (key_dim + value_dim)
    words = key_dim if shared else key_dim + value_dim
    return flops / (2 * kv_heads * words)


def amla_utilisation(
    dims: ModelDims, rates: Rates, seconds: float, context: int, query_tokens: int, heads: int = 128, batch: int = 96
) -> float:
    """AMLA, table 5: the share of the peak that a kernel's time stands for."""
    return 2 * batch * heads * query_tokens * context * dims.absorb_macs / seconds / rates.flops

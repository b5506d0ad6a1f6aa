"""The time of a whole decode step: attention in a mode, and the rest.

    attention of a layer = work over the prefix + work over the tails + launches
    product              = max(bytes of its weights / bandwidth, MACs / rate) + a constant
    step                 = layers * (attention + other launches) + layers with experts * a constant + products
                           + exchanges between GPUs + a constant

Layers with linear attention have the other launches, too, and their states in place of attention (linear.py).

The work is the cost model's (prefix/planner/cost_model.py); the constants are named in rates.py. New tokens mixed in
(mixed.py) are rows more of all of it. What is not in it: drafts of a speculative step, eager prefill beside decoding,
and that requests end and begin (arrivals.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sglang_mla_ext.kernels.absorb.stacking import rows_per_tile  # plain Python
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS  # plain Python
from sglang_mla_ext.predict import linear, weights
from sglang_mla_ext.predict.rates import Gpu
from sglang_mla_ext.predict.sharing import PLAIN, Cover, cover, may_group, plan
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.model_dims import ModelDims, language_part
from sglang_mla_ext.prefix.planner.plan import Plan
from sglang_mla_ext.segment import Mode

# Products run on tiles that fit the batch to about so many rows.
ROW_STEP = 8
GPUS_OF_A_HOST = 8  # that store into each other's memory, where ranks shard prefixes
GATHER_S, GATHER_BYTES_PER_S = 4e-5, 2e11
"""Time of the exchanges of DP attention in a layer beside their bytes, and the rate of these, by NCCL among H200s of a
host: decode steps of two and four ranks over 16 tokens take 0.07 and 0.16 ms a layer longer than those of one
(spread.jsonl). These alone would give a third of the rate, with which prefill passes would be too long."""


@dataclass(frozen=True)
class Arriving:
    """New tokens that are mixed into a decode step as rows of it.

    Attributes:
        tokens: of all data-parallel ranks, which have as many each; requests: whose they are, with as many each.
        history: tokens of its own that each request has before them, beside the shared prompt.
    """

    tokens: int = 0
    requests: int = 1
    history: int = 0

    @property
    def own(self) -> float:
        """Tokens of its request's own that a new row attends to in the mean, itself included."""
        return self.history + (self.tokens / self.requests + 1) / 2


NOBODY = Arriving()


@dataclass(frozen=True)
class Deployment:
    """A model on GPUs.

    Attributes:
        config: the model's from Hugging Face; of models of images the language part is kept.
        tp, dp: as SGLang's flags with DP attention: of `tp` ranks `tp / dp` share the heads of a request.
        query_tokens: of a request in a step.
        latent_element_bytes, expanded_element_bytes: of the KV cache and of expanded prefixes, 2 or 1.
        dtype: of the weights, see `weights.products`.
        prefix_sharding: data-parallel ranks hold expanded prefixes together (--hybrid-mla-prefix-sharding).
        prefill_expand_tokens: that a prefill pass expands at a time for itself (--hybrid-mla-prefill-expand-tokens).
    """

    config: Mapping[str, Any]
    gpu: Gpu
    tp: int = 1
    dp: int = 1
    query_tokens: int = 1
    latent_element_bytes: int = 2
    expanded_element_bytes: int = 2
    dtype: str = "auto"
    prefix_sharding: bool = False
    prefill_expand_tokens: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", language_part(self.config))
        if self.tp % self.dp:
            raise ValueError(f"--dp {self.dp} does not divide --tp {self.tp}: SGLang's ranks are counted by --tp")
        if self.dims.num_heads % self.head_ranks:
            raise ValueError(f"{self.dims.num_heads} heads do not divide among {self.head_ranks} ranks")
        if self.prefix_sharding and not may_shard(self.tp, self.dp, self.dims.num_heads):
            raise ValueError(
                f"prefixes are sharded over ranks of DP attention with requests of their own, which divide "
                f"{self.dims.num_heads} heads: --prefix-sharding needs --dp as large as --tp"
            )
        if self.has_states and (self.query_tokens > 1 or self.latent_element_bytes < 2):
            raise ValueError(
                "beside layers with linear attention drafts are refused, and an FP8 cache is not predicted"
            )

    @cached_property
    def dims(self) -> ModelDims:
        return ModelDims.from_config(self.config)

    @property
    def has_states(self) -> bool:
        """Return whether layers with linear attention keep a state for each request."""
        return linear.is_linear(self.config)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of one state of a request in all layers, on one GPU; 0 where there are no such layers."""
        return linear.state_bytes(self.config, self.head_ranks) if self.has_states else 0

    @property
    def head_ranks(self) -> int:
        """Ranks that share the heads of a request."""
        return self.tp // self.dp

    @cached_property
    def products(self) -> tuple[weights.Product, ...]:
        return weights.products(self.config, self.dtype)

    @cached_property
    def cost(self) -> CostModel:
        return CostModel(
            self.dims,
            self.dims.num_heads // self.head_ranks,
            self.gpu.rates.by_stores() if self.tp <= GPUS_OF_A_HOST else self.gpu.rates,
            self.expanded_element_bytes,
            self.latent_element_bytes,
            self.query_tokens,
            self.dp if self.prefix_sharding else 1,
        )

    @cached_property
    def plan(self) -> Callable[[int, int, int], Plan]:
        """Return `sharing.plan` with this cost. Plans are kept, because many steps of a few sizes are asked for."""
        return functools.cache(functools.partial(plan, self.cost))

    def cover(self, requests: int, prompt: int, chunks: int | None = None) -> Cover:
        """Return how a server attends to a prompt that `requests` requests of one rank share.

        Args:
            chunks: of expanded tokens that fit in its memory; by default as many as the prompt needs.
        """
        return cover(self.plan(requests, prompt, -(-prompt // CHUNK_TOKENS) if chunks is None else chunks))

    def kept_for_prefill(self, requests: int, prompt: int, chunks: int | None = None) -> int:
        """First tokens of a prompt that prefill finds expanded, while so many requests of all ranks share it: what
        ranks hold together none of them prefills with. See `cover`."""
        return 0 if self.prefix_sharding else self.cover(self.per_rank(requests), prompt, chunks).naive

    def per_rank(self, requests: int) -> int:
        """Requests on the busiest of the data-parallel ranks."""
        return -(-requests // self.dp)

    def mixed_rows(self, arriving: Arriving) -> int:
        """New tokens on the busiest of the data-parallel ranks, in requests, which have `query_tokens` rows each."""
        return -(-self.per_rank(arriving.tokens) // self.query_tokens)

    def ranks_of(self, product: weights.Product) -> int:
        """GPUs that share a product's weights."""
        if not product.split:
            return 1
        return self.head_ranks if product.of_heads else self.tp


def may_shard(tp: int, dp: int, heads: int) -> bool:
    """Return whether ranks of DP attention can shard prefixes: each has requests of its own, and they divide the
    heads."""
    return dp == tp > 1 and heads % dp == 0


def shards_by_default(of: Deployment) -> bool:
    """Return whether a server shards prefixes over ranks by default."""
    few_heads = rows_per_tile(of.dims.num_heads) is not None  # grouped absorb shares without an exchange
    return may_shard(of.tp, of.dp, of.dims.num_heads) and of.tp <= GPUS_OF_A_HOST and not few_heads


def with_default_sharding(of: Deployment) -> Deployment:
    """Return a deployment with prefixes sharded where a server shards them by default, and nowhere else."""
    return dataclasses.replace(of, prefix_sharding=shards_by_default(of))


@dataclass(frozen=True)
class Step:
    """Seconds of a step.

    Attributes:
        cover: how it attends to what is shared.
        attention: in all layers.
        products: by kind; states: of linear layers, read and written; exchanges: between GPUs.
        overhead: other launches and the step's own constant.
    """

    cover: Cover
    attention: float
    products: Mapping[str, float]
    states: float
    exchanges: float
    overhead: float

    @property
    def rest(self) -> float:
        """Seconds of all but attention."""
        return sum(self.products.values()) + self.states + self.exchanges + self.overhead

    @property
    def seconds(self) -> float:
        return self.attention + self.rest


def allowed_modes(of: Deployment) -> list[Mode]:
    """The modes that a server's `auto` chooses from."""
    return [mode for mode in Mode if mode is not Mode.GROUPED_ABSORB or may_group(of.cost)]


def attention_seconds(
    of: Deployment, cover: Cover, requests: int, prompt: int, tail: int, arriving: Arriving = NOBODY
) -> float:
    """Return the seconds of one layer's attention of requests of one rank to a prompt that they share and to tails of
    their own.

    New tokens attend to the prompt as requests do, whatever its mode, and by absorb to what their own request has
    before them, which the L2 cache holds for the rows of one request. What launches take beside plain absorb's is of
    each mode in which the step attends at all.

    Args:
        cover: what of the prompt is attended to together.
    """
    assert of.gpu.step is not None
    mixed_rows = of.mixed_rows(arriving)
    everyone = requests + mixed_rows
    if everyone * of.cost.ranks < 2:
        cover = PLAIN
    cost, step = of.cost, of.gpu.step
    rows = everyone * of.query_tokens * cost.local_heads
    launches = {mode: step.attention_s[mode] + step.attention_row_s[mode] * rows for mode in Mode}
    seconds = launches[Mode.ABSORB]
    for mode, tokens in ((Mode.NAIVE, cover.naive), (Mode.GROUPED_ABSORB, cover.grouped)):
        if tokens:
            seconds += cost.work_seconds(mode, everyone * cost.ranks, tokens) + launches[mode] - launches[Mode.ABSORB]
    if cover.naive:
        seconds += cost.exchange_seconds(everyone * cost.ranks)
    seconds += latent_seconds(cost, everyone, prompt - sum(cover), step.padding, shared=True)
    seconds += latent_seconds(cost, requests, tail, step.padding)
    if mixed_rows:
        newcomers = min(of.per_rank(arriving.requests), mixed_rows)
        each = -(-mixed_rows // newcomers)
        seconds += newcomers * latent_seconds(cost, each, arriving.own, step.padding, shared=True)
    return seconds


def latent_seconds(cost: CostModel, requests: int, tokens: float, padding: float, shared: bool = False) -> float:
    """The work of plain absorb of each request over so many tokens, as the cost model's but for the rows of padding,
    which are zeros: the GPU's clock is higher with them.

    Args:
        padding: time of a row of padding, as a share of another's.
        shared: whether the tokens are the same for all, and read once where the L2 cache holds them.
    """
    rates = cost.rates.modes[Mode.ABSORB]
    read = tokens * cost.latent_row_bytes
    readers = 1 if shared and read <= cost.rates.l2_bytes else requests
    own_rows, tile_rows = requests * cost.local_heads * cost.query_tokens, cost.tail_rows(requests)
    macs = (own_rows + padding * (tile_rows - own_rows)) * tokens * cost.dims.absorb_macs
    return max(readers * read / rates.bytes_per_s, macs / rates.matrix_rate(cost.latent_element_bytes))


def predict(of: Deployment, cover: Cover, requests: int, prompt: int, tail: int, arriving: Arriving = NOBODY) -> Step:
    """A decode step of so many requests, of all data-parallel ranks, that share a prompt.

    Args:
        cover: how each rank attends to the prompt.
        tail: tokens of each request after the prompt.
        arriving: new tokens mixed in, rows more of all products.
    Raises:
        ValueError: the GPU has no constants of a step.
    """
    if (rates := of.gpu.step) is None or of.gpu.sheet is None:
        raise ValueError(f"{of.gpu.key} has no constants of a step")
    mine = of.per_rank(requests)
    rows = (mine + of.mixed_rows(arriving)) * of.query_tokens
    all_rows = rows * of.dp
    products: dict[str, float] = {}
    for product in of.products:
        seconds = product.layers * product_seconds(of, product, rows if product.of_heads else all_rows)
        products[product.kind] = products.get(product.kind, 0.0) + seconds
    layers = weights.all_layers(of.config)
    overhead = layers * (rates.layer_s + rows * activation_bytes(of) / rates.bytes_per_s) + rates.step_s
    overhead += weights.expert_layers(of.products) * rates.experts_s
    exchanges = layers * (_exchange_seconds(of, rows, of.head_ranks) + _exchange_seconds(of, all_rows, of.tp))
    attention = of.dims.num_layers * attention_seconds(of, cover, mine, prompt, tail, arriving)
    states = 2 * mine * of.state_bytes / rates.bytes_per_s
    return Step(cover, attention, products, states, exchanges, overhead)


def product_seconds(of: Deployment, product: weights.Product, rows: int) -> float:
    """Seconds of a product in one layer, on one GPU."""
    rates, sheet, ranks = of.gpu.step, of.gpu.sheet, of.ranks_of(product)
    assert rates is not None and sheet is not None
    padded = -(-rows // ROW_STEP) * ROW_STEP
    read = product.touched(rows) * product.element_bytes / ranks / rates.bytes_per_s
    rate = rates.macs_per_s * sheet.flops(product.element_bytes) / sheet.bf16_flops
    return max(read, product.macs(padded) / ranks / rate) + rates.product_s


def activation_bytes(of: Deployment) -> int:
    """Bytes that the launches between the products of a layer read and write for a row: two sums with the residual and
    their norms, the MLP's activation, the query in its two parts and as one, and residuals of earlier layers."""
    hidden, width = of.dims.hidden_size, weights.mlp_width(of.config) // of.tp
    query = 2 * of.cost.local_heads * of.dims.latent_dim
    return int(2 * (8 * hidden + 3 * width + query + linear.residual_elements(of.config)))


def _exchange_seconds(of: Deployment, rows: int, ranks: int) -> float:
    """The sum of a batch's rows over ranks, sent around a ring. Among ranks with rows of their own DP attention gathers
    these before an MLP and scatters them behind it; other exchanges are from the data sheet, never measured."""
    if ranks == 1:
        return 0.0
    assert of.gpu.sheet is not None
    overhead_s, bytes_per_s = of.gpu.sheet.exchange_s, of.gpu.sheet.link_bytes_per_s
    if of.dp > 1 and ranks == of.tp:
        overhead_s, bytes_per_s = GATHER_S, min(bytes_per_s, GATHER_BYTES_PER_S)
    return overhead_s + 2 * (ranks - 1) / ranks * rows * of.dims.hidden_size * 2 / bytes_per_s

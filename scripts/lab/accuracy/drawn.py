"""The studies of SnapMLA, AMLA and FlashMLA-ETAP of how much rounding costs, on drawn data.

Everything is computed on the CPU, by kernels/reference/fp8.py and rescaling.py in the precision that a kernel has, and
compared with float64 over the same inputs. Latent dimensions of DeepSeek-V3: 512 content and 64 rotary elements; the
content is the values, too. Seeds are fixed; every metric is the mean over the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab.accuracy.rescaling import Rescale, flash
from lab.accuracy.served import SNAPMLA
from sglang_mla_ext.kernels.reference.fp8 import Configuration, absorb_fp8, round_keys

LATENT, ROPE = 512, 64
SNAPMLA_NAMES: dict[Configuration, str] = {
    "per_token": "hybrid_mla",
    "snapmla": "snapmla",
    **{configuration: name for name, configuration in SNAPMLA.items()},
}
SNAPMLA_TOKENS, SNAPMLA_HEADS, SNAPMLA_SAMPLES = 32768, 128, 2
ROTARY_LOGIT_STD = (1.0, 4.0, 16.0)
CONTENT_LOGIT_STD = 1.0
AMLA_NAMES: dict[Rescale, str] = {
    "multiply": "amla_base",
    "add": "amla_mul_by_add",
    "add_uncompensated": "amla_uncompensated",
    "lattice": "hybrid_mla",
}
AMLA_TOKENS, AMLA_HEADS, AMLA_SAMPLES = 8192, 32, 10
AMLA_NORMAL = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0)
AMLA_UNIFORM = (1.0, 3.0, 5.0, 10.0, 20.0, 50.0)
ETAP_TOKENS, ETAP_HEADS = (8192, 65536), 16


def attention(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> Tensor:
    """The truth, float64 `[H, dv]`: q `[H, d]`, k `[n, d]`, v `[n, dv]`."""
    q, k, v = (tensor.double()[None] for tensor in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=softmax_scale)[0]


def measures(actual: Tensor, truth: Tensor) -> dict[str, float]:
    """Root of the mean square error, 1 - cosine similarity, and relative error in the L2 (Frobenius) norm."""
    actual, truth = actual.double().flatten(), truth.double().flatten()
    error = (actual - truth).norm().item()
    cosine = torch.nn.functional.cosine_similarity(actual, truth, dim=0, eps=0.0).item()
    return dict(rmse=error / len(truth) ** 0.5, cos_dist=1 - cosine, rel_err=error / truth.norm().item())


def student_t(shape: tuple[int, ...], freedom: int, generator: torch.Generator) -> Tensor:
    """Heavier in its tails than the normal distribution, and narrower around zero."""
    squares = torch.zeros(shape)
    for _ in range(freedom):
        squares += torch.randn(shape, generator=generator).square_()
    return torch.randn(shape, generator=generator) / (squares / freedom).sqrt()


def cache_like_figure_3(tokens: int, sizes: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Latent rows as SnapMLA, figure 3 and section 3.1.1, describes them: BF16 `[n, 512]` and `[n, 64]`.

    Content is concentrated around zero and ends at ±10; the rotary part has channels of very different sizes
    (deviations of 1 to 300) and ends at ±1,000.

    Args:
        sizes: "equal", or "spread": each token's content is multiplied by a factor of its own, 0.001 to 1.
    """
    content = 0.7 * student_t((tokens, LATENT), 5, generator)
    if sizes == "spread":
        content *= 10 ** (-3 * torch.rand(tokens, 1, generator=generator))
    rope = torch.logspace(0, 2.5, ROPE) * torch.randn(tokens, ROPE, generator=generator)
    return content.clamp(-10, 10).bfloat16(), rope.clamp(-1000, 1000).bfloat16()


def queries_for(keys: Tensor, logit_std: float, heads: int, generator: torch.Generator) -> Tensor:
    """Draw queries `[heads, d]`, BF16, whose products with the keys `[n, d]`, softmax scale 1, have this deviation."""
    queries = torch.randn(heads, keys.shape[1], generator=generator)
    deviation = (queries @ keys[:4096].float().T).std(dim=1, keepdim=True)
    return (queries * (logit_std / deviation)).bfloat16()


def mean(samples: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric."""
    return {name: sum(sample[name] for sample in samples) / len(samples) for name in samples[0]}


Study = Iterator[tuple[str, dict[str, Any], dict[str, float]]]
"""Impl, case and metrics of each record."""


def snapmla(tokens: int = SNAPMLA_TOKENS, heads: int = SNAPMLA_HEADS, samples: int = SNAPMLA_SAMPLES) -> Study:
    """Study (a): the ways to round the cache, SnapMLA's table 2 and ours, and attention in BF16."""
    for sizes in ("equal", "spread"):
        for rotary_std in ROTARY_LOGIT_STD:
            generator = torch.Generator().manual_seed(0)
            found: dict[str, list[dict[str, float]]] = {name: [] for name in (*SNAPMLA_NAMES.values(), "bf16")}
            for _ in range(samples):
                latent, rope = cache_like_figure_3(tokens, sizes, generator)
                q = queries_for(latent, CONTENT_LOGIT_STD, heads, generator)
                q_rope = queries_for(rope, rotary_std, heads, generator)
                whole_q, keys = torch.cat([q, q_rope], dim=1), torch.cat([latent, rope], dim=1)
                truth = attention(whole_q, keys, latent, 1.0)
                for configuration, name in SNAPMLA_NAMES.items():
                    rounded = round_keys(latent, rope, configuration)
                    ours = configuration == "per_token"
                    out, _ = absorb_fp8(q[None], q_rope[None], rounded, 1.0, power_of_two=ours)
                    found[name].append(measures(out[0].bfloat16(), truth))
                out = flash(whole_q, keys, latent, 1.0, block_keys=64)
                found["bf16"].append(measures(out.bfloat16(), truth))
            case = dict(study="snapmla", distribution="figure3", token_sizes=sizes, tokens=tokens, heads=heads)
            case |= dict(content_logit_std=CONTENT_LOGIT_STD, rotary_logit_std=rotary_std, samples=samples)
            for name, of_name in found.items():
                yield name, case, mean(of_name)


def drawn(distribution: str, size: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Float32 of this shape: "normal" with deviation `size`, or "uniform" between -size and size."""
    if distribution == "normal":
        return size * torch.randn(shape, generator=generator)
    return size * (2 * torch.rand(shape, generator=generator) - 1)


def amla(tokens: int = AMLA_TOKENS, heads: int = AMLA_HEADS, samples: int = AMLA_SAMPLES) -> Study:
    """Study (b): the ways to rescale an accumulator."""
    softmax_scale = (LATENT + ROPE) ** -0.5
    for distribution, all_sizes in (("normal", AMLA_NORMAL), ("uniform", AMLA_UNIFORM)):
        for size in all_sizes:
            generator = torch.Generator().manual_seed(0)
            found: dict[Rescale, list[dict[str, float]]] = {rescale: [] for rescale in AMLA_NAMES}
            for _ in range(samples):
                q = drawn(distribution, size, (heads, LATENT + ROPE), generator).bfloat16()
                k = drawn(distribution, size, (tokens, LATENT + ROPE), generator).bfloat16()
                truth = attention(q, k, k[:, :LATENT], softmax_scale)
                for rescale, of_rescale in found.items():
                    out = flash(q, k, k[:, :LATENT], softmax_scale, rescale=rescale)
                    of_rescale.append(measures(out.bfloat16(), truth))
            case = dict(study="amla", distribution=distribution, size=size, tokens=tokens, heads=heads, samples=samples)
            for rescale, of_rescale in found.items():
                yield AMLA_NAMES[rescale], case, mean(of_rescale)


def with_outliers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normal; to one element in 1,000 a normal value of deviation 10 is added."""
    outliers = 10 * torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.001)
    return torch.randn(shape, generator=generator) + outliers


def etap(all_tokens: tuple[int, ...] = ETAP_TOKENS) -> Study:
    """Study (c): attention in FP16, inputs, weights and output."""
    draws: dict[str, Callable[..., Tensor]] = {
        "normal": partial(drawn, "normal", 1.0),
        "normal with outliers": with_outliers,
        "normal of deviation 10": partial(drawn, "normal", 10.0),
    }
    for tokens in all_tokens:
        for distribution, draw in draws.items():
            generator = torch.Generator().manual_seed(0)
            q = draw((ETAP_HEADS, LATENT + ROPE), generator=generator).half()
            k = draw((tokens, LATENT + ROPE), generator=generator).half()
            softmax_scale = (LATENT + ROPE) ** -0.5
            truth = attention(q, k, k[:, :LATENT], softmax_scale)
            out = flash(q, k, k[:, :LATENT], softmax_scale, dtype=torch.float16, block_keys=64)
            case = dict(study="etap", distribution=distribution, tokens=tokens, heads=ETAP_HEADS)
            size = truth.square().mean().sqrt().item()
            yield "fp16", case, dict(measures(out.half(), truth), rms=size)

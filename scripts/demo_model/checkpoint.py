"""Checkpoints of DeepSeek-V3's architecture with its real head dimensions: configuration, weights, tokenizer."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import typer
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sglang_mla_ext.configs import read_config

BOS, EOS, SYSTEM, USER, ASSISTANT = SPECIAL_TOKENS = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
TOKENS = {"bos_token_id": SPECIAL_TOKENS.index(BOS), "eos_token_id": SPECIAL_TOKENS.index(EOS)}
CHAT_TEMPLATE = (
    "<s>{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STAMP = "demo_model.json"
KV_LORA_RANK, ROPE_DIM, NOPE_DIM, V_DIM = 512, 64, 128, 128
YARN_ORIGINAL_POSITIONS = 4096
BLOCK = 128  # side of the blocks of a matrix that share one scale in FP8
EXPERTS = 8  # of a layer that drafts
NEAR_SIGNAL, NEAR_WEIGHT = 4.0, 0.5  # of the heads that attend to near tokens; see `weights`

DRAFTING = (
    *("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)
"""Arguments of a server that drafts three tokens a step with the layer for it that is in a checkpoint."""


@dataclass(frozen=True)
class Settings:
    """Settings of a demo checkpoint. A `q_lora_rank` of 0 makes it DeepSeek-V2-Lite's architecture, with queries of
    one projection."""

    layers: int
    heads: int
    hidden: int
    intermediate: int
    q_lora_rank: int
    vocab: int
    max_positions: int
    seed: int
    config_only: bool
    fp8_blocks: bool = False
    nextn: bool = False  # one more layer, which predicts the token after next
    experts: bool = False  # layers behind the first are mixtures of experts
    version: int = 2  # of the output; raise it when the weights or the tokenizer change


def model_config(settings: Settings) -> dict[str, Any]:
    """Return `config.json`: DeepSeek-V3's own but for sizes, with dense layers only."""
    config = dict(read_config("checkpoints", "deepseek-v3")["config"])
    if not settings.fp8_blocks:
        del config["quantization_config"]
    factor = settings.max_positions / YARN_ORIGINAL_POSITIONS
    of_v2 = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "topk_method": "greedy",
        "scoring_func": "softmax",
    }
    sizes = {
        "hidden_size": settings.hidden,
        "intermediate_size": settings.intermediate,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "vocab_size": settings.vocab,
        "q_lora_rank": settings.q_lora_rank,
        "max_position_embeddings": settings.max_positions,
        "rope_scaling": config["rope_scaling"] | {"factor": factor},
        # A layer that drafts has experts whatever the others have; so the fields are always there.
        "first_k_dense_replace": 1 if settings.experts else settings.layers,
        "moe_intermediate_size": settings.hidden,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": int(settings.nextn),
    }
    return config | TOKENS | sizes | ({} if settings.q_lora_rank else of_v2)


def weights(settings: Settings, nope_dim: int = NOPE_DIM, v_dim: int = V_DIM) -> dict[str, torch.Tensor]:
    """Random BF16 weights, `[out, in]`, by their Hugging Face names; so many content and value dimensions a head.

    Every matrix preserves the scale of its input (standard deviation 1/sqrt(in)). Two are larger: the queries', so that
    attention picks few keys out of thousands, and the last one, so that the likeliest token stands out. The first
    element of the hidden state is the same for all tokens; every other head turns it into a rotary key and query, whose
    product is largest at distance 0. So half of the heads attend to near tokens, and an answer depends on its question;
    half attend anywhere, and it depends on the system prompt.

    A layer that drafts is such a layer, with a mixture of experts, which SGLang makes it whatever the others are. What
    it drafts is hardly ever right.
    """
    generator = torch.Generator().manual_seed(settings.seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))
        return values.to(torch.bfloat16)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    hidden, heads, q_rank = settings.hidden, settings.heads, settings.q_lora_rank
    embedding = matrix(settings.vocab, hidden, gain=math.sqrt(hidden))
    embedding[:, 0] = NEAR_SIGNAL
    tensors, biases = {"model.embed_tokens": embedding}, {}
    for layer in range(settings.layers + settings.nextn):
        prefix = f"model.layers.{layer}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        if q_rank:
            q_a = matrix(q_rank, hidden)
            q_a[0] = 0
            q_a[0, 0] = 1
            tensors |= {f"{attention}q_a_proj": q_a, f"{attention}q_a_layernorm": ones(q_rank)}
        query = matrix(heads * (nope_dim + ROPE_DIM), q_rank or hidden, gain=2.0)
        query.view(heads, nope_dim + ROPE_DIM, -1)[::2, nope_dim:, 0] = NEAR_WEIGHT
        kv_a = matrix(KV_LORA_RANK + ROPE_DIM, hidden)
        kv_a[KV_LORA_RANK:, 0] = NEAR_WEIGHT
        out = matrix(hidden, heads * v_dim, gain=2.0)
        down = matrix(hidden, settings.intermediate, gain=2.0)
        out[0] = down[0] = 0
        tensors |= {
            f"{attention}{'q_b_proj' if q_rank else 'q_proj'}": query,
            f"{prefix}input_layernorm": ones(hidden),
            f"{attention}kv_a_proj_with_mqa": kv_a,
            f"{attention}kv_a_layernorm": ones(KV_LORA_RANK),
            f"{attention}kv_b_proj": matrix(heads * (nope_dim + v_dim), KV_LORA_RANK),
            f"{attention}o_proj": out,
            f"{prefix}post_attention_layernorm": ones(hidden),
        }
        if layer < (1 if settings.experts else settings.layers):
            tensors |= {f"{mlp}{kind}_proj": matrix(settings.intermediate, hidden) for kind in ("gate", "up")}
            tensors[f"{mlp}down_proj"] = down
            continue
        for expert in [*(f"experts.{index}" for index in range(EXPERTS)), "shared_experts"]:
            tensors |= {f"{mlp}{expert}.{kind}_proj": matrix(hidden, hidden) for kind in ("gate", "up", "down")}
        tensors[f"{mlp}gate"] = matrix(EXPERTS, hidden)
        biases[f"{mlp}gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
        if layer == settings.layers:
            tensors |= {f"{prefix}{norm}": ones(hidden) for norm in ("enorm", "hnorm", "shared_head.norm")}
            tensors[f"{prefix}eh_proj"] = matrix(hidden, 2 * hidden)
    head = matrix(settings.vocab, hidden, gain=3.0)
    head[: len(SPECIAL_TOKENS)] = 0  # greedy text never ends early
    head[:, 0] = 0
    tensors |= {"model.norm": ones(hidden), "lm_head": head}
    return {f"{name}.weight": tensor for name, tensor in tensors.items()} | biases


def in_fp8_blocks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The layers' projections as in DeepSeek-V3's own checkpoint: e4m3, and beside each `[out, in]` its inverse scales
    `[out / 128, in / 128]`, rounded up, float32."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    found = {}
    for name, tensor in tensors.items():
        if "_proj" not in name or "eh_proj" in name:  # SGLang has that one in the model's own dtype
            found[name] = tensor
            continue
        rows, columns = tensor.shape
        padded = torch.nn.functional.pad(tensor.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))  # [out / 128, 128, in / 128, 128]
        scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / limit
        rounded = (blocks / scale[:, None, :, None]).clamp(-limit, limit).to(torch.float8_e4m3fn)
        found[name] = rounded.view(padded.shape)[:rows, :columns].contiguous()
        found[f"{name}_scale_inv"] = scale
    return found


def train_tokenizer(texts: Iterable[str], vocab: int, chat_template: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of these texts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, additional_special_tokens=[SYSTEM, USER, ASSISTANT]
    )
    fast.chat_template = chat_template
    return fast


def make(out: Path, settings: Settings) -> bool:
    """Write the checkpoint unless it exists already; return whether anything was written."""

    def tensors() -> dict[str, torch.Tensor]:
        return in_fp8_blocks(weights(settings)) if settings.fp8_blocks else weights(settings)

    return write(out, settings, model_config(settings), None if settings.config_only else tensors)


def write(
    out: Path, settings: Any, config: dict[str, Any], tensors: Callable[[], dict[str, torch.Tensor]] | None = None
) -> bool:
    """Write a checkpoint with a tokenizer, unless it exists already; return whether anything was written.

    Args:
        settings: a dataclass, what the checkpoint depends on.
        tensors: makes the weights by name; None for no weights.
    """
    known, stamp = out / STAMP, asdict(settings)
    if known.is_file() and json.loads(known.read_text()) == stamp:
        return False
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=out.name) as temporary:
        folder = Path(temporary) / "model"
        texts, vocab = (topics[name] for name in sorted(topics)), config.get("text_config", config)["vocab_size"]
        train_tokenizer(texts, vocab, CHAT_TEMPLATE).save_pretrained(folder)
        if tensors is not None:
            save_file(tensors(), folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (folder / STAMP).write_text(json.dumps(stamp) + "\n")
        if out.exists():
            if not known.is_file() and any(out.iterdir()):
                raise typer.BadParameter(f"{out} exists and is not a demo checkpoint")
            shutil.rmtree(out)
        folder.rename(out)
    return True

"""A trained demo model: its checkpoint on disk, the network read back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from demo_model.checkpoint import Settings, model_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from lab.training.draft import BIAS, Draft, prefix_of
from lab.training.examination import Logits
from lab.training.network import Attend, Network, load_weights, pack


def write_checkpoint(network: Network, settings: Settings, tokenizer: Path | None, out: Path) -> int:
    """Write BF16 weights, configuration and tokenizer.

    Returns:
        Bytes of the weights' file.
    """
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.to(torch.bfloat16).cpu().contiguous() for name, weight in network.state_dict().items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(model_config(settings), indent=2) + "\n")
    if tokenizer:
        shutil.copytree(tokenizer, out, dirs_exist_ok=True)
    return (out / "model.safetensors").stat().st_size


def stored(draft: Draft) -> dict[str, Tensor]:
    """A layer's tensors as a checkpoint has them: BF16, but for the router's bias."""
    return {
        name: weight.to(torch.float32 if name == BIAS else torch.bfloat16).cpu().contiguous()
        for name, weight in draft.state_dict().items()
    }


def write_draft(layer: dict[str, Tensor], config: dict[str, Any], model: Path, out: Path) -> int:
    """Write a model's checkpoint with a layer that drafts; the other weights stay as they are, bit for bit.

    Args:
        layer: from `stored`.
        config: of the model with the layer; model: folder of the model, with an earlier such layer or without one.
    Returns:
        Bytes of the weights' file.
    Raises:
        RuntimeError: what was written is not what was meant; the file is not put in place.
    """
    prefix = prefix_of(config)
    others = {name: x for name, x in load_file(model / "model.safetensors").items() if not name.startswith(prefix)}
    own = {prefix + name: weight for name, weight in layer.items()}
    out.mkdir(parents=True, exist_ok=True)
    part, whole = out / "model.safetensors.part", out / "model.safetensors"
    save_file(others | own, part, metadata={"format": "pt"})
    written = load_file(part)
    if set(written) != set(others) | set(own):
        raise RuntimeError(f"{part} has other tensors than the model and the layer")
    for name, before in others.items():
        if written[name].dtype != before.dtype or not torch.equal(written[name], before):
            raise RuntimeError(f"{name} is not what it was in {model}")
    del written
    part.rename(whole)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if out.resolve() != model.resolve():
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(model / name, out / name)
    return whole.stat().st_size


def logits_of(network: Network, device: torch.device) -> Logits:
    """The network in the form that the examination calls."""

    @torch.inference_mode()
    def logits(documents: list[list[int]]) -> list[Tensor]:
        found = network.lm_head(network(pack(documents, device)))
        return list(found.split([len(document) for document in documents]))

    return logits


def load_network(folder: Path, device: torch.device, attend: Attend | None = None) -> Network:
    """A checkpoint in BF16, as it is shipped."""
    config = json.loads((folder / "config.json").read_text())
    network = Network(config, *([attend] if attend else []))
    load_weights(network, folder)
    frequencies = network.frequencies
    network.to(device=device, dtype=torch.bfloat16)
    network.frequencies = frequencies.to(device)  # kept in float32
    return network

"""SGLang's own NextN layer on a CPU beside ours, as a program: it sets up SGLang's process-wide state.

    python sglang_nextn.py CHECKPOINT

Its attention is replaced by ours, since SGLang's needs a running server (the server tests compare that); all else is
SGLang's: which tensors it loads by which names, the two norms and their order, experts, residuals and the last norm.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lab.training.draft import Draft
from lab.training.network import draft_prefix, load_network, packed_mask
from safetensors.torch import load_file
from transformers import DynamicCache

from sglang_mla_ext.adapter.cpu import stubs

ROWS = 9


class Absent(SimpleNamespace):
    """Fields of a batch; those that do not matter to a layer in one process are None."""

    def __getattr__(self, name: str) -> None:
        return None


def load(folder: Path) -> Any:
    """The layer as a draft worker loads it from the checkpoint."""
    stubs.install()
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.models.deepseek_nextn import DeepseekV3ForCausalLMNextN
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    args = ServerArgs(model_path=str(folder), device="cpu", dtype="float32", attention_backend="torch_native")
    set_global_server_args_for_scheduler(args)
    with tempfile.TemporaryDirectory() as temporary:
        parallel_state.init_distributed_environment(
            backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{temporary}/meet"
        )
        parallel_state.initialize_model_parallel()
    config = ModelConfig(model_path=str(folder), is_draft_model=True, dtype="float32")
    initialize_dp_attention(args, config)
    initialize_moe_config(args)
    model = DeepseekV3ForCausalLMNextN(config.hf_config)
    for weight in model.parameters():
        weight.data.fill_(torch.nan)
    model.load_weights(load_file(folder / "model.safetensors").items())
    empty = {name for name, weight in model.named_parameters() if weight.isnan().any()}
    assert empty == {"model.embed_tokens.weight", "lm_head.weight"}, empty  # these come from the model
    return model


def load_draft(folder: Path) -> Draft:
    """Our layer of the checkpoint, whose experts transformers holds in one tensor."""
    config = json.loads((folder / "config.json").read_text())
    draft, prefix = Draft(config), draft_prefix(config["num_hidden_layers"])
    tensors = {name.removeprefix(prefix): x.float() for name, x in load_file(folder / "model.safetensors").items()}

    def of_experts(kind: str) -> torch.Tensor:
        return torch.stack([tensors[f"mlp.experts.{at}.{kind}.weight"] for at in range(config["n_routed_experts"])])

    tensors["mlp.experts.gate_up_proj"] = torch.cat([of_experts("gate_proj"), of_experts("up_proj")], dim=1)
    tensors["mlp.experts.down_proj"] = of_experts("down_proj")
    draft.load_state_dict({name: tensors[name] for name in draft.state_dict()})
    return draft.eval()


@torch.no_grad()
def compare(model: Any, draft: Draft, rotary: torch.nn.Module) -> None:
    """One step over one document."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    generator = torch.Generator().manual_seed(0)
    table = torch.randn(model.model.embed_tokens.weight.shape, generator=generator)
    model.model.embed_tokens.weight.data.copy_(table)
    tokens = torch.randint(5, 600, (ROWS,), generator=generator)
    hidden = torch.randn(ROWS, table.shape[1], generator=generator)

    def attention(positions: torch.Tensor, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        turns = rotary(hidden_states[None], positions[None])
        return draft.self_attn(hidden_states[None], turns, packed_mask(positions))[0][0]

    model.model.decoder.self_attn.forward = attention
    batch = Absent(spec_info=Absent(hidden_states=hidden), forward_mode=ForwardMode.EXTEND, input_ids=tokens)
    found = model.model(tokens, torch.arange(ROWS), batch)
    expected = draft(table[tokens], hidden, torch.arange(ROWS), rotary, DynamicCache())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


if __name__ == "__main__":
    of_checkpoint = Path(sys.argv[1])
    compare(load(of_checkpoint), load_draft(of_checkpoint), load_network(of_checkpoint).model.rotary_emb)

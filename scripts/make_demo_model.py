"""Write a small checkpoint of DeepSeek-V3's architecture with the real dimensions of its attention heads.

Random weights, seeded, of a scale at which attention matters and greedy text varies; a byte-level BPE tokenizer trained
on the text of Python's language reference, which comes with Python; a chat template with a system role. A second call
with the same settings writes nothing.

    python scripts/make_demo_model.py OUT [--layers 2] [--heads 4] [--seed 0]

With `--nextn` it has one layer more, which drafts: for `--speculative-algorithm NEXTN`.

For benchmarks: DeepSeek-V3's own dimensions with few layers and no weights (SGLang's `--load-format dummy` draws them):

    python scripts/make_demo_model.py OUT --config-only --layers 4 --heads 128 --hidden 7168 \\
        --intermediate 18432 --q-lora-rank 1536 --vocab 8192 --max-positions 65536
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from demo_model.checkpoint import YARN_ORIGINAL_POSITIONS, Settings, make


def main(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    layers: Annotated[int, typer.Option(min=1)] = 2,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    hidden: Annotated[int, typer.Option(min=16)] = 128,
    intermediate: Annotated[int, typer.Option(min=16, help="Width of the dense MLP.")] = 512,
    q_lora_rank: Annotated[int, typer.Option(min=0, help="0: one projection, as DeepSeek-V2-Lite.")] = 64,
    vocab: Annotated[int, typer.Option(min=512, help="Tokens in the vocabulary.")] = 2048,
    max_positions: Annotated[int, typer.Option(min=YARN_ORIGINAL_POSITIONS, help="Longest context.")] = 32768,
    seed: int = 0,
    config_only: Annotated[bool, typer.Option("--config-only", help="No weights.")] = False,
    fp8_blocks: Annotated[bool, typer.Option("--fp8-blocks", help="Projections in FP8, as DeepSeek-V3's own.")] = False,
    experts: Annotated[bool, typer.Option("--experts", help="Mixtures of experts behind the first layer.")] = False,
    nextn: Annotated[bool, typer.Option("--nextn", help="One more layer, for speculative decoding.")] = False,
) -> None:
    """Write a small random checkpoint of DeepSeek-V3's architecture."""
    sizes = layers, heads, hidden, intermediate, q_lora_rank, vocab, max_positions
    written = make(out, Settings(*sizes, seed, config_only, fp8_blocks, nextn, experts))
    print(f"{out}: {'written' if written else 'up to date'}")


if __name__ == "__main__":
    typer.run(main)

"""What goes past SGLang's layer, which gives an attention backend the absorbed query alone and takes the latent output
back.

The hook after the query's split leaves the query here, the backend takes it and leaves the tail's lse, and the hook
before the output projection sees from the lse that something is to be merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Relay:
    """One for each scheduler process.

    Attributes:
        q_nope: `[rows, heads, qk_nope_head_dim]`, the query of the layer that runs now, before absorption.
        tail_lse: `[rows, heads]` float32, natural log, of the layer whose shared part is still to be merged.
        query_scaling: `[rows, 1, 1]` of the pass; None unless the model scales its queries by their positions.
    """

    q_nope: Tensor | None = None
    tail_lse: Tensor | None = None
    query_scaling: Tensor | None = None

    def clear(self) -> None:
        """Forget what a pass that ended in an error has left."""
        self.q_nope = self.tail_lse = None


relay = Relay()

"""What passes between SGLang's layers, our hooks and our backend within one forward pass. Data only.

SGLang's MLA layer gives an attention backend the absorbed query alone and takes the latent output back, so the rest
goes past it: the hook after the query's split leaves the query here, the backend takes it and leaves the tail's lse,
and the hook before the output projection sees from the lse that something is to be merged. A prefill step's plan waits
here for its batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

    from sglang_mla_ext.kernels.watch import Watched


@dataclass
class Relay:
    """One for each scheduler process, which runs one forward pass at a time.

    Attributes:
        layers: ids of those whose attention is our backend's. A draft model's is another's.
        takes_query: whether the step attends to expanded prefixes, so that the layers' queries are needed.
        q_nope: `[rows, heads, qk_nope_head_dim]`, the query of the layer that runs now, before absorption.
        tail_lse: `[rows, heads]` float32, natural log, of the layer whose shared part is still to be merged.
        watched: what is to be looked at in that merge, if anything ever is.
        prefill: the plan of the prefill step that comes next (prefill.PrefillPlan), if it attends to expanded prefixes.
        prefill_lens: `[requests]` the cached tokens of that step: SGLang's own list, by which the step is known.
    """

    layers: Collection[int] = frozenset()
    takes_query: bool = False
    q_nope: Tensor | None = None
    tail_lse: Tensor | None = None
    watched: Watched | None = None
    prefill: object | None = None
    prefill_lens: Sequence[int] | None = None

    def clear(self) -> None:
        """Forget what is of a forward pass: another one begins, of this model or of its draft."""
        self.takes_query = False
        self.q_nope = self.tail_lse = self.watched = self.prefill = self.prefill_lens = None


relay = Relay()

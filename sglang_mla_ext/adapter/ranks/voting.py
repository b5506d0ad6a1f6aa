"""Votes of DP-attention ranks on mixing new tokens into a pass.

If one of them prefills, SGLang runs the pass on all of them without decode graphs, and decode shares nothing: with
0.5.23 in the prefill graph, where that holds the passes of all ranks, otherwise without graphs. A rank whose new tokens
are rows of a decode step, perhaps beside running requests, says that it decodes, so the others keep their graphs. They
are rows only if nobody prefills; otherwise its pass is the extend that it was.

Here is only what a rank says and what follows from what all said; SGLang makes the exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


class Voting:
    """Votes of one scheduler's rank on mixing its new tokens into a pass."""

    def __init__(self) -> None:
        self._offered: ScheduleBatch | None = None
        self._agreed: ScheduleBatch | None = None
        self._graphs = False

    def open(self, batch: ScheduleBatch | None, *, graphs: bool) -> None:
        """Begin the vote on a pass.

        Args:
            batch: whose new tokens this rank would have as rows of a decode step; None where it has no such batch.
            graphs: whether decode runs in CUDA graphs.
        """
        self._offered, self._agreed, self._graphs = batch, None, graphs

    def cast(self, info: Any) -> None:
        """Change what this rank is about to report of itself.

        Args:
            info: SGLang's MLPSyncBatchInfo.
        """
        if self._offered is not None:
            info.can_run_decode_cuda_graph, info.is_extend_in_batch = self._graphs, False
            info.local_forward_mode = type(self._offered.forward_mode).DECODE.value

    def close(self, batch: ScheduleBatch | None) -> bool:
        """Return whether what this rank offered was refused, because another rank prefills.

        Args:
            batch: that this rank runs, with what all ranks said.
        """
        offered, self._offered = self._offered, None
        if offered is None:
            return False
        assert batch is not None, "a rank that offers a batch runs one"
        if batch.is_extend_in_batch:
            return True
        self._agreed = batch
        return False

    def agreed_on(self, batch: ScheduleBatch) -> bool:
        """Return whether ranks agreed that the new tokens of a batch are rows of a decode step."""
        return batch is self._agreed

"""Ranks that compute together what follows attention (DP attention) agree on each pass before it.

If one of them prefills, SGLang runs the pass on all of them without CUDA graphs, where decode shares nothing. A rank
whose new tokens ride says that it decodes, so the others keep their graphs. It rides only if nobody prefills; otherwise
its pass is the extend that it was. It mixes nothing: a mixed batch could not go back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_mla_ext.adapter.step.riding import Riding, is_extend

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


class Voting:
    """Of one scheduler."""

    def __init__(self, riding: Riding) -> None:
        self._riding = riding
        self._would_ride: ScheduleBatch | None = None
        self._rides: ScheduleBatch | None = None
        self._no_graphs = False

    def would_ride(self, batch: ScheduleBatch | None) -> bool:
        """Whether the batch that this rank would run next can ride."""
        return batch is not None and is_extend(batch) and self._riding.can_ride(batch)

    def agree(
        self, sync: Callable[..., Any], would_ride: bool, batch: ScheduleBatch | None, *args: Any, **kwargs: Any
    ) -> Any:
        """`prepare_mlp_sync_batch_raw`, of the batch that this rank would run next.

        Args:
            sync: the original; kwargs: its `disable_cuda_graph` among them.
        Returns:
            the batch that it runs.
        """
        self._would_ride, self._rides = batch if would_ride else None, None
        self._no_graphs = kwargs["disable_cuda_graph"]
        try:
            found = sync(batch, *args, **kwargs)
        finally:
            self._would_ride = None
        if would_ride:
            if found.is_extend_in_batch:
                self._riding.count_not_ridden("another rank prefills")
            else:
                self._rides = found
        return found

    def cast(self, info: Any) -> None:
        """What this rank is about to say of itself.

        Args:
            info: SGLang's MLPSyncBatchInfo.
        """
        if self._would_ride is not None:
            info.can_run_decode_cuda_graph, info.is_extend_in_batch = not self._no_graphs, False
            info.local_forward_mode = type(self._would_ride.forward_mode).DECODE.value

    def rides(self, batch: ScheduleBatch) -> bool:
        """Whether the pass of a batch that was agreed on rides."""
        return batch is self._rides

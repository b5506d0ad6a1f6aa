"""Order of copies from SGLang's cache on the host (HiCache): what waits for them, and what they wait for.

A prefill step whose prefix is on the host gets new slots for it, and the rows are copied into them on a stream of their
own while the step runs, layer by layer. SGLang's pool has whoever asks for a layer's rows wait for that layer. Three
things are ours to do:

- Our FP8 pool waits where its rows are read (pool.py).
- A step that attends to expanded prefixes alone reads no row, and yet has to wait: steps after it, and its drafts, take
  the rows for granted (prefill.py).
- A copy into slots waits for the step before: with overlap scheduling that one is told to run before it is known which
  requests have ended, whose slots are given to others. It may still write there, and an expansion in it may still read
  what was there, and stays: a node that leaves the device keeps its place in the tree. SGLang does this itself from
  0.5.23 on; before, hooks.py does (`installed.wait_before_loading`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.cache_controller import LayerDoneCounter
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool


def wait_for_layer(pool: MLATokenToKVPool, layer_id: int) -> None:
    """Have the current stream wait until a layer's rows that the step loads from the host are in the pool."""
    counter: LayerDoneCounter | None = pool.layer_transfer_counter
    if counter is not None:
        counter.wait_until(layer_id - pool.start_layer)

"""Which of this rank's pool rows a run of slots takes: for copies between the GPU pool and host memory."""

from __future__ import annotations

import torch

from sglang_dcp_block.dcp.layout import DcpLayout


def rows_of_run(indices: torch.Tensor, layout: DcpLayout, rank: int) -> torch.Tensor:
    """This rank's physical rows of a run of widened slots, in order.

    Element k of the run must lie in its cycle where position k lies: whole virtual pages one after the other (they
    needn't be neighbours), and a partial one at most at the end. That holds for a request from its first token on and
    for the pages that SGLang's host cache moves. The selection then depends on the count alone, so nothing is read
    back from the GPU.

    Args:
        indices: (n,) int32 or int64, widened slot ids.

    Returns:
        (layout.local_len(n, rank),) rows, same dtype and device.
    """
    mine = torch.arange(layout.local_len(indices.shape[0], rank), device=indices.device)
    return layout.local_index(indices[layout.position(mine, rank)])

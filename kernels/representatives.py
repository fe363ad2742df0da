"""A pyramid whose nodes are keys: each node is represented by the key in its middle. In torch, on any device.

It has the layout of `kernels.pyramid`, so that the same walk reads it. A node at the ragged end is represented by the last
key where its middle lies beyond. Cost: the nodes are read and written once.
Source: HiP (arXiv 2406.09827, section 3.1), from its mathematics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyramidbench.kernels.pyramid import Pyramid


def representative_pyramid(k: Tensor, *, block_size: int, branching: int, levels: int) -> Pyramid:
    """The middle keys of the nodes of `levels` levels; k: [B, G, N, D]. `keys` counts what each node covers."""
    seq_len = k.shape[-2]
    middles, counts, offsets = [], [], [0]
    for level in range(levels):
        span = block_size * branching**level
        first = torch.arange(0, seq_len, span, device=k.device)
        middles.append((first + span // 2).clamp(max=seq_len - 1))
        counts.append((seq_len - first).clamp(max=span))
        offsets.append(offsets[-1] + len(first))
    keys = torch.cat(counts).to(torch.promote_types(k.dtype, torch.float32))
    return Pyramid(
        k.index_select(-2, torch.cat(middles)), keys, tuple(offsets), block_size, branching, has_bounds=False
    )

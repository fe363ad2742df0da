"""Block-sparse attention forward on the GPU: which kernel does a call. `kernels.attention` is the torch twin of both.

`attention_hopper` is the fast one, for Hopper and the shapes of a prefill; `attention_by_key` goes block by block, for many
lists of few rows each (token level); `attention_portable` does the rest: short token level, fp32, odd head dims and block
sizes, other devices, older Triton. Outputs and log-sum-exps agree up to rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from pyramidbench.kernels.attention_by_key import KeyTile, attend_by_key, key_tile, pays_by_key
from pyramidbench.kernels.attention_portable import AttendTile, attend_portable, attend_tile
from pyramidbench.selection import BlockSelection

if TYPE_CHECKING:
    from pyramidbench.kernels.attention_hopper import HopperTile


def attention_gap(head_dim: int, head_dim_v: int, block_size: int, dtype: str, scale: float) -> str | None:
    """Why these kernels cannot do a call, or None."""
    if dtype not in ("float16", "bfloat16", "float32"):
        return f"the Triton attention takes float16, bfloat16 and float32, not {dtype}"
    if max(head_dim, head_dim_v) > 256:
        return f"the Triton attention takes head dims up to 256, not {head_dim} and {head_dim_v}"
    if not 16 <= block_size <= 128:
        return f"the Triton attention takes block sizes of 16 to 128, not {block_size}"
    if scale <= 0:
        return f"the Triton attention takes a positive scale, not {scale}"
    return None


def has_tile_copies(*tensors: Tensor) -> bool:
    """Whether the device's copy engine can read tiles of these [B, G, N, D] tensors (Hopper on; 16-byte alignment)."""
    if tensors[0].device.type != "cuda" or torch.cuda.get_device_capability(tensors[0].device)[0] < 9:
        return False
    return all(
        tensor.data_ptr() % 16 == 0 and all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:3])
        for tensor in tensors
    )


def _has_warp_groups() -> bool:
    """Whether this Triton's Gluon has what `attention_hopper` is written in."""
    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)


def chosen_tile(q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection) -> AttendTile | HopperTile | KeyTile:
    """The kernel that does a call, named by the type of its tile sizes."""
    rows = q.shape[1] // selection.indices.shape[1] * selection.query_tile
    dims = (q.shape[3], v.shape[3], q.element_size())
    if pays_by_key(rows, selection.counts.numel(), *dims):
        return key_tile(rows, selection.indices.shape[-1], selection.tiling.blocks, *dims)
    return list_tile(q, k, v, selection)


def list_tile(q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection) -> AttendTile | HopperTile:
    """The kernel that does a call list by list."""
    head_dim, head_dim_v = q.shape[3], v.shape[3]
    rows = q.shape[1] // selection.indices.shape[1] * selection.query_tile
    if has_tile_copies(q, k, v) and _has_warp_groups():
        from pyramidbench.kernels.attention_hopper import hopper_gap, hopper_tile

        if hopper_gap(q, v, selection) is None:
            return hopper_tile(rows, selection.block_size, head_dim, head_dim_v)
    return attend_tile(rows, selection.block_size, head_dim, head_dim_v, q.element_size(), tma=has_tile_copies(k, v))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: BlockSelection,
    scale: float,
    tile: AttendTile | HopperTile | KeyTile | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, M, Dv] in q's dtype and log-sum-exp [B, H, M] in fp32. Arguments were checked by the caller.

    q, k, v: any strides with a contiguous last dimension. tile: tile sizes, and by their type the kernel, to use instead
    of the chosen ones.
    """
    if tile is None:
        tile = chosen_tile(q, k, v, selection)
    if isinstance(tile, KeyTile):
        return attend_by_key(q, k, v, selection, scale, tile)
    if isinstance(tile, AttendTile):
        return attend_portable(q, k, v, selection, scale, tile)
    from pyramidbench.kernels.attention_hopper import attend_hopper

    return attend_hopper(q, k, v, selection, scale, tile)

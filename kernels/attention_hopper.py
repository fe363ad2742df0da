"""Block-sparse attention forward for Hopper: warp groups that specialise, written in Gluon (Triton's lower level).

The maths, the output and the log-sum-exp are those of `kernels.attention_fwd`, whose `attend` calls this file where it
applies. Only the schedule differs. A program keeps GROUPS warp groups of 64 rows each (a row: a query head of a set × a
query of a tile, head-major; `kernels.attention_rows` has what they do) and one warp that feeds them: it walks the lists
of the program's tiles, and has the copy engine bring the listed blocks of K and V into rings in shared memory, a step of
BLOCK_N keys at a time. A program takes every n-th tile (n programs, one or two a multiprocessor): the next tile's
queries, keys and values arrive while the last one is being written.

Cost: 2·(D + Dv) operations per (row, key) pair; BLOCK_N·(D + Dv) elements through L2 per step and 64·GROUPS rows.
Bound by the matrix units, then by the bandwidth behind L2 once K and V of a head exceed it.
Source: FlashAttention-3 (arXiv 2407.08608) for the roles of the warp groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pyramidbench.kernels.attention_rows import GROUP_ROWS, Memory, Sizes, attend_rows, place, steps_of
from pyramidbench.selection import BlockSelection

LOG2_E = 1.4426950408889634
# A row of 128 bytes is what the copy engine swizzles, so that K and V come in panels of 64 columns.
PANEL = gl.constexpr(64)
# Triton 3.7 renamed the first and made the second public.
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def _pieces(ring, blocks):
    """A ring [STAGES, N, D] as what the copy engine writes: by step, by panel, by block, [1, 1, BLOCK_SIZE, PANEL]."""
    ROWS: gl.constexpr = blocks.block_type.shape[2]
    SHAPE: gl.constexpr = [ring.shape[0] * (ring.shape[2] // PANEL) * (ring.shape[1] // ROWS), 1, 1, ROWS, PANEL]
    if IS_PUBLIC:
        pieces = ring.reinterpret(ring.dtype, SHAPE, blocks.layout)
    else:
        pieces = ring._reinterpret(ring.dtype, SHAPE, blocks.layout)
    return pieces


@gluon.jit
def _bring(blocks, ring, full, empty, done, batch, kv_head, key_0, key_1):
    """One step of K or V: its blocks begin at key_0 and, where there are two, key_1."""
    STAGES: gl.constexpr = ring.shape[0]
    PANELS: gl.constexpr = ring.shape[2] // PANEL
    STEP: gl.constexpr = ring.shape[1] // blocks.block_type.shape[2]
    pieces = _pieces(ring, blocks)
    stage = done % STAGES
    mbarrier.wait(empty.index(stage), (done // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(stage), PANELS * STEP * blocks.block_type.nbytes)
    for panel in gl.static_range(PANELS):
        piece = (stage * PANELS + panel) * STEP
        _copy(blocks, [batch, kv_head, key_0, panel * PANEL], full.index(stage), pieces.index(piece))
        if STEP == 2:
            _copy(blocks, [batch, kv_head, key_1, panel * PANEL], full.index(stage), pieces.index(piece + 1))


@gluon.jit
def _feed(
    q_rows, k_blocks, v_blocks, memory, sizes, indices_ptr, counts_ptr,
    QUERY_TILE: gl.constexpr, BLOCK_SIZE: gl.constexpr, IS_CAUSAL: gl.constexpr, ZIGZAG: gl.constexpr,
):  # fmt: skip
    """The feeding warp: queries of a tile, then its blocks step by step, as room for them appears."""
    GROUPS: gl.constexpr = memory.q.shape[0]
    STEP: gl.constexpr = memory.k.shape[1] // BLOCK_SIZE
    done = 0
    for program in range(gl.program_id(0), sizes.programs, gl.num_programs(0)):
        batch, which, tile, chunk, listed = place(program, sizes, QUERY_TILE, GROUPS)
        lap = program // gl.num_programs(0)
        mbarrier.wait(memory.q_empty.index(0), (lap & 1) ^ 1)
        mbarrier.expect(memory.q_full.index(0), GROUPS * q_rows.block_type.nbytes)
        for group in gl.static_range(GROUPS):
            row = (chunk * GROUPS + group) * GROUP_ROWS
            head = which * (sizes.heads // sizes.sets) + row // QUERY_TILE
            query = tile * QUERY_TILE + row % QUERY_TILE
            _copy(q_rows, [batch, head, query, 0], memory.q_full.index(0), memory.q.index(group))
        list_ptr = indices_ptr + listed.to(gl.int64) * sizes.width
        count = gl.load(counts_ptr + listed)
        steps, whole = steps_of(count, tile, sizes, QUERY_TILE, BLOCK_SIZE, STEP, IS_CAUSAL)
        kv_head = which * sizes.kv_heads // sizes.sets
        for step in range(0, steps):
            first = steps - 1 - step
            if ZIGZAG:
                # Every other tile takes its steps without a mask in ascending order.
                first = gl.where((step >= steps - whole) & (lap % 2 == 1), step - (steps - whole), first)
            first *= STEP
            key_0 = gl.load(list_ptr + first, mask=count > 0, other=0) * BLOCK_SIZE
            key_1 = key_0
            if STEP == 2:
                key_1 = gl.load(list_ptr + gl.minimum(first + 1, count - 1), mask=count > 0, other=0) * BLOCK_SIZE
            _bring(k_blocks, memory.k, memory.k_full, memory.k_empty, done, batch, kv_head, key_0, key_1)
            _bring(v_blocks, memory.v, memory.v_full, memory.v_empty, done, batch, kv_head, key_0, key_1)
            done += 1


@gluon.jit
def _barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def _attend_hopper(
    q_rows, k_blocks, v_blocks, out_ptr, lse_ptr, indices_ptr, counts_ptr, scale_log2,
    heads, kv_heads, sets, tiles, width, seq_len_q, seq_len_kv, programs,
    QUERY_TILE: gl.constexpr, BLOCK_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    IS_CAUSAL: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ZIGZAG: gl.constexpr,
):  # fmt: skip
    # The values of a step are in use until the next step's scores are there.
    gl.static_assert(STAGES >= 2)
    RING: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    QUERIES: gl.constexpr = q_rows.block_type.shape[2]
    Q_RING: gl.constexpr = [GROUPS, 1, GROUP_ROWS // QUERIES, QUERIES, HEAD_DIM]
    memory = Memory(
        q=gl.allocate_shared_memory(q_rows.dtype, Q_RING, q_rows.layout),
        q_full=_barriers(1, 1),
        q_empty=_barriers(1, GROUPS),
        k=gl.allocate_shared_memory(k_blocks.dtype, [STAGES, BLOCK_N, HEAD_DIM], RING),
        k_full=_barriers(STAGES, 1),
        k_empty=_barriers(STAGES, GROUPS),
        v=gl.allocate_shared_memory(v_blocks.dtype, [STAGES, BLOCK_N, HEAD_DIM_V], RING),
        v_full=_barriers(STAGES, 1),
        v_empty=_barriers(STAGES, GROUPS),
    )
    sizes = Sizes(heads, kv_heads, sets, tiles, width, seq_len_q, seq_len_kv, programs)
    if GROUPS == 2:
        gl.warp_specialize([
            (attend_rows, (memory, sizes, indices_ptr, counts_ptr, out_ptr, lse_ptr, scale_log2,
                           0, QUERY_TILE, BLOCK_SIZE, IS_CAUSAL)),
            (attend_rows, (memory, sizes, indices_ptr, counts_ptr, out_ptr, lse_ptr, scale_log2,
                           1, QUERY_TILE, BLOCK_SIZE, IS_CAUSAL)),
            (_feed, (q_rows, k_blocks, v_blocks, memory, sizes, indices_ptr, counts_ptr,
                     QUERY_TILE, BLOCK_SIZE, IS_CAUSAL, ZIGZAG)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (attend_rows, (memory, sizes, indices_ptr, counts_ptr, out_ptr, lse_ptr, scale_log2,
                           0, QUERY_TILE, BLOCK_SIZE, IS_CAUSAL)),
            (_feed, (q_rows, k_blocks, v_blocks, memory, sizes, indices_ptr, counts_ptr,
                     QUERY_TILE, BLOCK_SIZE, IS_CAUSAL, ZIGZAG)),
        ], [1], [24])  # fmt: skip


@dataclass(frozen=True)
class HopperTile:
    """Launch shape of `_attend_hopper`: warp groups of 64 rows, keys a step, steps in the rings, order of the steps.

    ZIGZAG: a tile begins with the blocks that the last one ended with, so that L2 still has them. H200, 64k and 256k keys:
    3.54 and 17.5 ms; without it 3.52 and 17.9; without it and the groups' products in turn 3.49 and 17.8 (all before both
    blocks of a step shared a product).
    """

    GROUPS: int
    BLOCK_N: int
    STAGES: int
    ZIGZAG: bool = True

    @property
    def programs(self) -> int:
        """Programs that a multiprocessor's shared memory holds."""
        return 2 if self.GROUPS * self.BLOCK_N == 64 else 1

    @property
    def max_registers(self) -> int:
        """Registers a thread at launch: 64k by the warps of all programs there, of which the feeding one counts as four."""
        if self.GROUPS == 2:
            return 168
        return 128 if self.programs == 2 else 240


def hopper_tile(rows: int, block_size: int, head_dim: int, head_dim_v: int) -> HopperTile:
    """Launch shape for lists shared by `rows` rows (query heads of a set × queries of a tile), 16-bit elements."""
    groups = 1 if rows <= 64 else 2
    # Two groups, H200, 64k and 256k keys: steps of 128 keys 3.52 and 17.9 ms; of 64, 6 or 4 in the rings, 3.63 and 18.5.
    block_n = max(block_size, 64 * groups)
    # Of a multiprocessor's 227 KB; two programs of one group share it.
    room = (225 if block_n == 128 else 112) * 1024 - groups * 64 * head_dim * 2
    return HopperTile(groups, block_n, min(6, room // (block_n * (head_dim + head_dim_v) * 2)))


def hopper_gap(q: Tensor, v: Tensor, selection: BlockSelection) -> str | None:
    """Why this kernel cannot do a call that the copy engine can read, or None."""
    tile, sets = selection.query_tile, selection.indices.shape[1]
    if torch.cuda.get_device_capability(q.device)[0] != 9:
        return "its matrix instructions are Hopper's alone"
    if q.element_size() != 2:
        return f"it takes float16 and bfloat16, not {q.dtype}"
    if not {q.shape[3], v.shape[3]} <= {64, 128} or selection.block_size not in (64, 128):
        return "it takes head dims and block sizes of 64 and 128"
    if tile & (tile - 1) or q.shape[1] // sets * tile < 64:
        return "it takes lists shared by 64 rows or more, of tiles of a power of two"
    return None


def _descriptor(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box, layout)


def attend_hopper(
    q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection, scale: float, tile: HopperTile
) -> tuple[Tensor, Tensor]:
    """Output [B, H, M, Dv] in q's dtype and log-sum-exp [B, H, M] in fp32 of a call that `hopper_gap` finds no fault with.

    q, k, v: strides that the copy engine takes (16-byte aligned, a contiguous last dimension).
    """
    batch, heads, seq_len_q, head_dim = q.shape
    kv_heads, seq_len_kv, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    indices, counts = selection.indices.contiguous(), selection.counts.contiguous()
    sets, tiles, width = indices.shape[1:]
    block, query_tile = selection.block_size, selection.query_tile
    programs = batch * sets * tiles * triton.cdiv(heads // sets * query_tile, 64 * tile.GROUPS)
    out = torch.empty(batch, heads, seq_len_q, head_dim_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, seq_len_q, dtype=torch.float32, device=q.device)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    grid = (min(programs, processors * tile.programs),)
    queries = min(query_tile, 64)
    _attend_hopper[grid](
        _descriptor(q, [1, 64 // queries, queries, head_dim]),
        _descriptor(k, [1, 1, block, PANEL.value]), _descriptor(v, [1, 1, block, PANEL.value]),
        out, lse, indices, counts, scale * LOG2_E,
        heads, kv_heads, sets, tiles, width, seq_len_q, seq_len_kv, programs,
        QUERY_TILE=query_tile, BLOCK_SIZE=block, HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v, IS_CAUSAL=selection.causal,
        GROUPS=tile.GROUPS, BLOCK_N=tile.BLOCK_N, STAGES=tile.STAGES, ZIGZAG=tile.ZIGZAG,
        num_warps=4, maxnreg=tile.max_registers,
    )  # fmt: skip
    return out, lse

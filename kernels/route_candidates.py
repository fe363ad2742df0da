"""A level's candidates on the way down: the children of the nodes that were opened on the level above, from one list.

What may be ranked on a level is one interval [lo, hi), so the list is node lo - 1, the kept ones and node hi, in ascending
order (`kernels.route_walk` says why); child c of the node at place p is candidate p·branching + c. Device functions, which
the walks of prefill, of whole scored levels and of decoding call. Cost: a load of four bytes for each candidate, from L1 or L2.
Source: docs/selection.md.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def candidates(list_ptr, slot, slots, listed, lo, hi, BRANCHING: tl.constexpr):
    """Nodes at places `slot` of a level's candidates, and whether they may be ranked; without a list, lo + slot."""
    parent = tl.load(list_ptr + slot // BRANCHING, mask=slot < listed, other=-1)
    node = tl.where(listed == 0, lo + slot, parent * BRANCHING + slot % BRANCHING)
    return node, (slot < slots) & (node >= lo) & (node < hi)


@triton.jit
def resume(list_ptr, start_ptr, kept, slot, lo, hi):
    """Open the nodes kept above and the forced ones around them, as every level leaves them."""
    node = tl.load(start_ptr + slot, mask=slot < kept, other=-1)
    tl.store(list_ptr, lo - 1)
    tl.store(list_ptr + 1 + slot, node, mask=slot < kept)
    tl.store(list_ptr + kept + 1, tl.where(hi >= lo, hi, -1))
    tl.debug_barrier()

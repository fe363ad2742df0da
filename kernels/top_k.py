"""Top-K and logsumexp of register tensors in one program. Top-K is a threshold by bisection; the caller compacts.

Scores become integers in the same order (NaN and -inf count as the lowest score). The K-th highest is found by bisection
between the lowest and the highest of them, with early exit once a threshold parts exactly K from the rest; ties at the
threshold go to the lower place. On one H200 a walk with this (one warp per tile) took 1.24 ms where one with `tl.topk` on
packed int64 took 18.5, and it compiles in about a second where the other took minutes.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
EXCLUDED = tl.constexpr(-2147483648)


@triton.jit
def best(scores, allowed, count):
    """Which of the `allowed` places [n] hold the `count` highest fp32 scores; more than `count` must be allowed."""
    bits = tl.where(scores > LOWEST, scores, LOWEST).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    low = tl.min(tl.where(allowed, order, 0x7FFFFFFF)) - 1
    order = tl.where(allowed, order, EXCLUDED)
    high = tl.max(order)
    above = tl.sum(allowed.to(tl.int32))
    # Always: `above` places (at least `count`) are above low, fewer than `count` above high.
    while (low + 1 < high) & (above > count):
        middle = (low & high) + ((low ^ high) >> 1)
        found = tl.sum((order > middle).to(tl.int32))
        low = tl.where(found >= count, middle, low)
        above = tl.where(found >= count, found, above)
        high = tl.where(found >= count, high, middle)
    sure = order > low + 1
    tied = order == low + 1
    spare = count - tl.sum(sure.to(tl.int32))
    return sure | (tied & (tl.cumsum(tied.to(tl.int32)) <= spare))


@triton.jit
def log_sum_exp(x, AXIS: tl.constexpr):
    """logsumexp over one axis; -inf where all are, and NaN counts as -inf."""
    top = tl.max(x, AXIS)
    top = tl.where((top > float("-inf")) & (top < float("inf")), top, 0.0)
    total = tl.sum(tl.exp(x - tl.expand_dims(top, AXIS)), AXIS)
    return tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))

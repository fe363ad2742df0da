"""Work and rates: what a call attends to, the memory that it should need, and operations per second by three definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyramidbench.cost import attention_cost
from pyramidbench.gate import GateFailure
from pyramidbench.method import Method
from pyramidbench.passes import ATTENTION_WORK, pass_cost
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling
from pyramidbench.units import significant

BEYOND_PEAK = 1.1
"""A peak is a measurement too: FlashAttention-3 has come to 0.99 of one in a recorded run."""
RATED = {"cpu": ("float32", "float64"), "cuda": ("float32", "float64", "float16", "bfloat16")}
"""Dtypes whose rate the measured peak bounds: that of a CPU is measured in fp32, which its units for 16 bits may exceed."""


def work(method: Method, problem: Problem, selection: BlockSelection | None) -> dict[str, Any]:
    """The columns that say how much a call attends to, and what memory it should need."""
    columns: dict[str, Any] = {"density": 1.0, **expected_memory(method, problem)}
    if problem.direction == "decode":
        columns["bytes_per_token"] = method.cost(problem).bytes / (problem.batch * problem.seq_len_q)
    if selection is not None:
        columns |= {"density": selection.density(), "selected_blocks": float(selection.counts.double().mean())}
    return columns


def expected_memory(method: Method, problem: Problem) -> dict[str, Any]:
    """The memory columns by formula: the whole pass, and what is held at most in each of its stages.

    Building holds the pyramid; choosing the pyramid, the lists and the scores of a window; the index the lists; attention
    the lists, the output and its own scratch; the backward all that the whole pass is expected to hold.
    """
    forward, whole = method.cost(problem), pass_cost(method, problem)
    total = int(problem.output_bytes + whole.workspace_bytes)
    has = {stage.stage for stage in whole.stages} | {stage.stage for stage in forward.stages}
    stages = {
        "build": forward.pyramid_bytes,
        "route": forward.workspace_bytes,
        "attend": problem.output_bytes + forward.workspace_bytes - forward.pyramid_bytes,
        "backward": total,
    }
    held = {f"{stage}_expected_bytes": int(size) for stage, size in stages.items() if stage in has}
    return {"expected_memory_bytes": total, **held}


def rates(method: Method, problem: Problem, selection: BlockSelection | None, seconds: float) -> dict[str, Any]:
    """Rates by useful, executed and dense-equivalent work; docs/measuring.md defines the three."""
    cost, units = method.cost(problem), ATTENTION_WORK.get(problem.direction, 1.0)
    tiling = Tiling(problem.seq_len_q, problem.seq_len_kv, 1, 1, problem.causal)
    dense = attention_cost(problem, tiling.visible_pairs(), 0, 1).flops
    chosen = 0.0 if problem.direction == "backward" else cost.flops - cost.stage("attend").flops
    useful, executed = dense, _executed_dense(problem)
    if selection is not None:
        group = problem.heads // selection.indices.shape[1]
        useful = 2.0 * (problem.head_dim + problem.head_dim_v) * group * float(selection.pairs().sum())
        listed = float(selection.counts.sum()) * selection.block_size * selection.query_tile
        executed = 2.0 * (problem.head_dim + problem.head_dim_v) * group * listed
    return {
        "tokens_per_s": problem.batch * problem.seq_len_q / seconds,
        "useful_flops_per_s": (units * useful + chosen) / seconds,
        "executed_flops_per_s": (units * executed + chosen) / seconds,
        "dense_equivalent_flops_per_s": units * dense / seconds,
    }


def check_rate(rate: float, problem: Problem, peak: float | None, measured_again: Callable[[], float]) -> None:
    """Nothing where a useful rate is one that the device can reach. `peak` is what it reached at the start (None: not known);
    where the rate is above that, the peak is measured again first, as the device may have been busy then.

    Raises:
        GateFailure: it is not, so the time or the count of operations is wrong.
    """
    if peak is None or problem.dtype not in RATED[problem.device] or rate <= BEYOND_PEAK * peak:
        return
    best = max(peak, measured_again())
    if rate > BEYOND_PEAK * best:
        raise GateFailure(
            f"its useful rate of {significant(rate / 1e12)} TFLOP/s is above the device's measured peak of "
            f"{significant(best / 1e12)}: its time, or its count of operations, is wrong, or "
            "other programs kept the device busy while the peak was measured"
        )


def _executed_dense(problem: Problem) -> float:
    """Operations of a dense kernel that skips 128 × 128 tiles above the diagonal and computes the others whole."""
    coarse = Tiling(-(-problem.seq_len_q // 128), -(-problem.seq_len_kv // 128), 1, 1, problem.causal)
    return attention_cost(problem, coarse.visible_pairs() * 128.0 * 128.0, 0, 1).flops

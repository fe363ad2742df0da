"""What kernels of other packages have in common that they cannot do, said in one way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pyramidbench.problem import Problem

HALF = ("float16", "bfloat16")


def device_limit(what: str, problem: Problem) -> str | None:
    """Why a kernel for CUDA devices cannot do a problem, or None."""
    return None if problem.device == "cuda" else f"{what} needs a CUDA device; the tensors are on a {problem.device}"


def dtype_limit(what: str, problem: Problem, accepted: Sequence[str] = HALF) -> str | None:
    """Why a kernel that computes in some dtypes only cannot do a problem, or None."""
    return None if problem.dtype in accepted else f"{what} computes in {' and '.join(accepted)}, not in {problem.dtype}"


def head_dim_limit(what: str, problem: Problem, largest: int, step: int = 8) -> str | None:
    """Why a kernel that wants one head dim, up to `largest` in steps, cannot do a problem, or None."""
    if problem.head_dim != problem.head_dim_v:
        return f"{what} wants one head dim; q has {problem.head_dim} and v has {problem.head_dim_v}"
    if problem.head_dim > largest or problem.head_dim % step:
        return f"{what} takes head dims up to {largest} in steps of {step}, not {problem.head_dim}"
    return None


def causal_limit(what: str, problem: Problem) -> str | None:
    """Why a kernel that is always causal cannot do a problem, or None."""
    return None if problem.causal else f"{what} is always causal; give --causal"


def full_limit(what: str, problem: Problem) -> str | None:
    """Why a kernel without a causal mask cannot do a problem, or None."""
    return f"{what} has no causal mask; give --no-causal" if problem.causal else None


def square_limit(what: str, problem: Problem) -> str | None:
    """Why a kernel that wants as many queries as keys cannot do a problem, or None."""
    if problem.seq_len_q == problem.seq_len_kv:
        return None
    return f"{what} wants as many queries as keys, not {problem.seq_len_q} and {problem.seq_len_kv}"


def group_limit(what: str, problem: Problem) -> str | None:
    """Why a kernel in which each query head has its own keys cannot do a problem, or None."""
    if problem.group == 1:
        return None
    return f"{what} has no grouped key/value heads, and {problem.group} query heads share one here"


def capability_gap(what: str, generations: Sequence[int]) -> str | None:
    """Why this machine's device cannot run a kernel built for some generations (major compute capability), or None.

    None without a device, too: `device_limit` says that about a problem.
    """
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    if major in generations:
        return None
    return f"{what} is built for compute capability {', '.join(f'{g}.x' for g in generations)}; this device has {major}.{minor}"

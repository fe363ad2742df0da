"""Times of kernels that others wrote, for the tables of the scripts beside this file: CUDA events, warm L2."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def time_dense(q: Tensor, k: Tensor, v: Tensor, samples: int) -> dict[str, float]:
    """Milliseconds of each dense kernel that is here; a missing one says so."""
    times = {}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        sdpa = torch.nn.functional.scaled_dot_product_attention
        times["cuDNN"] = milliseconds(lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True), samples)
    by_token = [x.transpose(1, 2) for x in (q, k, v)]
    try:
        from fa3_fwd_interface import flash_attn_func
    except ImportError as error:
        print(f"no FA3 here ({error}); the wheel fa3-fwd brings it")
    else:
        times["FA3"] = milliseconds(lambda: flash_attn_func(*by_token, causal=True), samples)
    if q.shape[1] // k.shape[1] >= 16:
        times |= time_nsa(by_token, samples)
    print("dense: " + ", ".join(f"{name} {time:.3f}" for name, time in times.items()), flush=True)
    return {name: time for name, time in times.items() if name != "NSA"}


def time_nsa(by_token: list[Tensor], samples: int) -> dict[str, float]:
    """fla-core's native sparse attention with 16 blocks, selection included: no dense kernel, but a rival at token level."""
    try:
        from fla.ops.nsa import parallel_nsa
    except ImportError as error:
        print(f"no NSA here ({error}); the package fla-core brings it")
        return {}
    q, k, v = (x.contiguous() for x in by_token)
    gates = [torch.ones(q.shape[:3], device=q.device, dtype=q.dtype) for _ in range(2)]

    def call() -> object:
        return parallel_nsa(q, k, v, g_cmp=gates[0], g_slc=gates[1], block_counts=16, block_size=64)

    return {"NSA": milliseconds(call, samples)}


def milliseconds(call: Callable[[], object], samples: int) -> float:
    for _ in range(2):
        call()
    times = []
    for _ in range(samples):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]

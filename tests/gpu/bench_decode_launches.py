"""Which launches of a decoding step are fastest: one step under each choice, side by side, at a few shapes.

    python tests/gpu/bench_decode_launches.py [--no-check] [--samples 60] [--setting NAME ...] [--shapes 1x256 ...]

As bench_decode.py: bf16, 32 query and 8 key/value heads, head dim 128, blocks of 64, K 32, a step (append and attend) as a CUDA
graph's replay on a cold L2, median of events; also its append and its attend alone. First every setting is checked against the
torch twins: sets, outputs, and that a second step on the same counters gives equal bits. That runs in a process for each
setting, all at once, which leaves the kernels compiled. "kernels": of one step by the profiler on a cold L2; a kernel
that begins before the one before it ends counts its waiting too.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
bench = importlib.import_module("bench_decode")

SHAPES = [(1, 256), (1, 1024), (8, 128), (1, 32), (1, 16)]
"""Batch, and context in units of 1 024 tokens; `--shapes` names some as 1x256."""
RULES = {
    "pyramid": {},
    "start 2048": {"start_width": 2048},
    "beam 2, P 2": {"beam": 2, "leaf_candidates": 2},
    "summary leaf": {"leaf_score": "summary"},
    "start 2048, summary leaf": {"start_width": 2048, "leaf_score": "summary"},
    "flat, filtered": {"levels": 1},
}
TUNED = ("pyramid", "start 2048")
"""Rules that are timed under every setting; the others under the chosen one."""
SETTINGS: dict[str, dict[str, object]] = {
    "chosen": {},
    "overlap": {"decode_launch.OVERLAP_ITEMS": 1 << 30},
    "no overlap": {"decode_launch.OVERLAP_ITEMS": 0},
    "leaves first": {"decode_each.EACH_BYTES": -1 << 60},
    "each candidate": {"decode_each.EACH_BYTES": 1 << 60},
    "scan 12 MB": {"decode_call.SCAN_BYTES": 12 << 20},
    "scan 40 MB": {"decode_call.SCAN_BYTES": 40 << 20},
    "4 KB a warp": {"decode_walk.WARP_BYTES": 4096},
    "2 programs an SM": {"decode_attend.PROGRAMS_PER_SM": 2},
}
"""Constants of the kernels' modules, by what is changed."""


@contextmanager
def changed(setting: str) -> Iterator[None]:
    with ExitStack() as stack:
        for name, value in SETTINGS[setting].items():
            module, constant = name.split(".")
            found = importlib.import_module(f"pyramidbench.kernels.{module}")
            stack.enter_context(mock.patch.object(found, constant, value))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--no-check", action="store_true", help="time without checking first")
    parser.add_argument("--samples", type=int, default=60, help="replays timed of each call")
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="only these")
    parser.add_argument("--shapes", nargs="+", type=lambda text: tuple(map(int, text.split("x"))), default=SHAPES)
    parser.add_argument("--check-only", choices=SETTINGS, help="check one setting in this process and end")
    asked = parser.parse_args()
    if asked.check_only:
        check(asked.check_only)
        return
    if not asked.no_check:
        check_all(asked.setting)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    timer = bench.Timer(asked.samples, torch.empty(2 * l2, dtype=torch.uint8, device="cuda"))
    for batch, thousands in asked.shapes:
        time_shape(timer, batch, thousands * 1024 - bench.BLOCK // 2, asked.setting)


def check_all(settings: list[str]) -> None:
    """Every setting in a process of its own, at once.

    Raises:
        SystemExit: one of them found a difference.
    """
    running = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--check-only", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in settings
    }
    failed = {
        name: output for name, process in running.items() if (output := process.communicate()[0], process.returncode)[1]
    }
    for name, process in running.items():
        print(f"{name}: {'right' if process.returncode == 0 else 'WRONG'}", flush=True)
    if failed:
        raise SystemExit("\n".join(str(output)[-3000:] for output in failed.values()))


def check(setting: str) -> None:
    """Steps at the shapes that are timed, cut to 256k tokens in all, against the twins."""
    from pyramidbench.kernels.decode import attend_reference, choose_reference

    with changed(setting):
        for batch, thousands in [(1, 256), (8, 32), (1, 16)]:
            q, k, v = drawn(batch, thousands * 1024 - bench.BLOCK // 2)
            for rules in RULES if setting == "chosen" else TUNED:
                decoder = made(rules, q, k, v)
                first = decoder.attend(q)
                out, lists = decoder.attend(q), decoder.lists(q)
                assert torch.equal(out, first), f"{rules}: two steps differ"
                twin = choose_reference(q, decoder.store, decoder.rules, decoder.scale)
                share = (lists != twin).any(-1).double().mean().item()
                assert share <= 0.1, f"{rules}: {share:.1%} of the lists differ from the twin's"
                expected = attend_reference(q, decoder.store, lists, decoder.scale).double()
                assert torch.allclose(out.double(), expected, rtol=0.02, atol=4e-3 * float(expected.abs().max())), rules


def drawn(batch: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    heads = ((bench.HEADS, 1), (bench.KV_HEADS, keys), (bench.KV_HEADS, keys))
    q, k, v = (torch.randn(batch, *h, bench.HEAD_DIM, device="cuda", dtype=torch.bfloat16) for h in heads)
    return q, k, v


def made(rules: str, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """A cache that holds k and v."""
    problem = replace(bench.Problem.of(q, k, causal=True, scale=None), direction="decode")
    fixed = {"top_k": bench.TOP_K, "block_size": bench.BLOCK, "query_tile": 1, "implementation": "triton"}
    decoder = bench.create("pyramid", {**fixed, **RULES[rules]}).decoder(problem, bench.CacheLayout(k.device))
    decoder.append(k, v)
    return decoder


def time_shape(timer: bench.Timer, batch: int, keys: int, settings: list[str]) -> None:
    """The table of one batch and context: a line for each of the rules and settings."""
    q, k, v = drawn(batch, keys)
    print(f"-- batch {batch}, {-(-keys // 1024)}k tokens: µs of a step, its append, its attend", flush=True)
    fastest = min(
        filter(None, (bench.time_dense(timer, name, call) for name, call in bench.dense_calls(q, k, v).items())),
        default=0.0,
    )
    new = [x[:, :, -1:].contiguous() for x in (k, v)]
    for rules in RULES:
        decoder = made(rules, q, k, v)
        append = partial(decoder.append, *new, at=keys - 1)
        for setting in settings if rules in TUNED else settings[:1]:
            with changed(setting):
                times = [timer.median_us(bench.recorded(call)) for call in calls(append, partial(decoder.attend, q))]
                ratio = f"{fastest / times[0]:6.2f} times the fastest dense"
                parts = " ".join(f"{took:8.1f}" for took in times)
                print(f"   {rules:26}{setting:18}{parts}  {ratio}", flush=True)
                if setting in ("chosen", "no overlap"):
                    kernels(timer.flush, calls(append, partial(decoder.attend, q))[0])
        if rules == "pyramid":
            ending = 1 << (keys.bit_length() - 1)
            took = timer.median_us(bench.recorded(partial(decoder.append, *new, at=ending - 1)))
            print(f"   append of token {ending}, which ends a block and a node of every level: {took:.1f}", flush=True)
        del decoder


def calls(append: Callable[[], object], attend: Callable[[], object]) -> tuple[Callable[[], object], ...]:
    """A step, its append and its attend."""

    def step() -> object:
        append()
        return attend()

    return step, append, attend


def kernels(flush: Tensor, step: Callable[[], object]) -> None:
    """Times of a step's kernels on a cold L2, median of 5."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorder:
        for _ in range(5):
            flush.zero_()
            step()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in recorder.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.name.startswith("_"):
            times.setdefault(event.name, []).append(event.device_time)
    medians = {name: sorted(took)[len(took) // 2] for name, took in times.items()}
    parts = ", ".join(f"{name} {took:.1f} x{len(times[name]) // 5}" for name, took in medians.items())
    print(f"      kernels: {parts}", flush=True)


if __name__ == "__main__":
    main()

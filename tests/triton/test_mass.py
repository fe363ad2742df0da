"""The Triton block mass against the torch oracle, which is its twin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pyramidbench.oracle import block_mass as twin_mass
from pyramidbench.tiling import Tiling


@dataclass(frozen=True)
class Case:
    """One call; `tiles` None: all of them, else these."""

    name: str
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    block_size: int
    query_tile: int
    causal: bool = True
    tiles: tuple[int, ...] | None = None
    batch: int = 1


SMALL = [
    Case("tile-128-ragged", 1, 1, 200, 200, 16, 32, 128),
    Case("tile-16-group-3-more-keys", 3, 1, 50, 93, 24, 16, 16, batch=2),
    Case("more-queries-than-keys", 2, 1, 50, 30, 16, 16, 16),
    Case("token-level-group-4", 4, 1, 70, 90, 16, 32, 1),
    Case("block-and-tile-no-power-of-two", 4, 2, 70, 100, 16, 48, 20),
    Case("not-causal-ragged", 2, 2, 100, 150, 16, 16, 64, causal=False),
    Case("some-tiles", 2, 1, 300, 300, 16, 16, 16, tiles=(0, 5, 9, 18)),
    Case("some-tokens-out-of-order", 2, 1, 100, 140, 16, 16, 1, tiles=(99, 3, 50)),
    Case("head-dim-in-parts", 2, 1, 60, 60, 40, 16, 16),
    Case("one-query", 8, 1, 1, 77, 16, 32, 1),
    Case("group-16-blocks-of-128", 16, 1, 20, 300, 16, 128, 16),
]
LARGE = [
    Case("tile-128", 4, 4, 3000, 3000, 128, 64, 128),
    Case("tile-64-group-4-more-keys", 8, 2, 1000, 4000, 128, 64, 64),
    Case("tile-16-head-dim-64", 4, 2, 2000, 2000, 64, 32, 16),
    Case("token-level-group-8", 8, 1, 700, 3000, 128, 64, 1),
    Case("head-dim-256", 2, 1, 1000, 1000, 256, 64, 128),
    Case("head-dim-96-blocks-of-16", 2, 1, 1000, 1000, 96, 16, 128),
    Case("blocks-of-128-not-causal", 2, 2, 500, 1111, 128, 128, 128, causal=False),
    Case("some-tiles", 4, 2, 20_000, 20_000, 128, 64, 128, tiles=(0, 40, 99, 156)),
]
TOLERANCE = {torch.float32: 3e-5, torch.float16: 2e-5, torch.bfloat16: 2e-5}
"""Relative, beyond 1e-7 absolute: ten times what was measured on an H200. Products of 16-bit inputs are exact in fp32; what
differs is the order and the rounding of the sums."""


def named(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@named(SMALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_small(case: Case, dtype: torch.dtype, device: str) -> None:
    check(case, dtype, device)


@pytest.mark.gpu
@named(LARGE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large(case: Case, dtype: torch.dtype, device: str) -> None:
    check(case, dtype, device)


def test_rows_without_a_key_add_nothing(device: str) -> None:
    """20 queries stand before the first key: one tile of them, and four rows of the next."""
    from pyramidbench.kernels.mass import block_mass

    q, k = torch.randn(1, 1, 40, 16, device=device), torch.randn(1, 1, 20, 16, device=device)
    mass = block_mass(q, k, Tiling(40, 20, 16, 16, True), 0.25)
    torch.testing.assert_close(mass.sum(-1), torch.tensor([[[0.0, 0.75, 1.0]]], device=device))


def test_keys_after_the_last_one_are_not_read(device: str) -> None:
    from pyramidbench.kernels.mass import block_mass

    buffer = torch.randn(1, 1, 128, 16, device=device)
    buffer[:, :, 70:] = torch.nan
    mass = block_mass(torch.randn(1, 1, 70, 16, device=device), buffer[:, :, :70], Tiling(70, 70, 16, 16, True), 0.25)
    assert bool(mass.isfinite().all())


def test_sharp_attention_does_not_overflow(device: str) -> None:
    """Logits of several hundred: all mass of a row lies on one key."""
    check(Case("", 2, 1, 100, 100, 16, 16, 16), torch.float32, device, sharpness=100.0)


@pytest.mark.parametrize(
    ("tiling", "dim", "dtype", "scale", "reason"),
    [
        (Tiling(64, 64, 64, 64, True), 64, "float64", 1.0, "not float64"),
        (Tiling(64, 64, 64, 64, True), 320, "float16", 1.0, "head dims up to 256, not 320"),
        (Tiling(64, 64, 8, 64, True), 64, "float16", 1.0, "block sizes of 16 to 128, not 8"),
        (Tiling(512, 512, 64, 256, True), 64, "float16", 1.0, "query tiles up to 128, not 256"),
        (Tiling(64, 64, 64, 64, True), 64, "float16", -1.0, "a positive scale, not -1.0"),
    ],
)
def test_what_it_cannot_do_has_a_reason(tiling: Tiling, dim: int, dtype: str, scale: float, reason: str) -> None:
    from pyramidbench.kernels.mass import mass_gap

    said = mass_gap(tiling, dim, dtype, scale)
    assert said is not None
    assert reason in said
    assert mass_gap(Tiling(64, 64, 64, 64, True), 64, "bfloat16", 0.1) is None


def check(case: Case, dtype: torch.dtype, device: str, *, sharpness: float = 1.0) -> None:
    from pyramidbench.kernels.mass import block_mass

    torch.manual_seed(0)
    q = torch.randn(case.batch, case.queries, case.heads, case.head_dim, device=device) * sharpness
    q = q.to(dtype).transpose(1, 2)
    k = torch.randn(case.batch, case.kv_heads, case.keys, case.head_dim, device=device).to(dtype)
    tiling = Tiling(case.queries, case.keys, case.block_size, case.query_tile, case.causal)
    tiles = None if case.tiles is None else torch.tensor(case.tiles, device=device)
    mass = block_mass(q, k, tiling, case.head_dim**-0.5, tiles)
    sizes = {"block_size": case.block_size, "query_tile": case.query_tile}
    twin = twin_mass(q.double(), k.double(), **sizes, causal=case.causal, tiles=tiles)
    assert (mass.shape, mass.dtype) == (twin.shape, torch.float32)
    relative = TOLERANCE[dtype] * max(1.0, sharpness)
    assert bool(((mass - twin).abs() <= relative * twin + 1e-7).all()), float(
        ((mass - twin).abs() / (twin + 1e-7)).max()
    )


@pytest.mark.gpu
@pytest.mark.parametrize("query_tile", [1, 128])
def test_exact_top_k_chooses_the_same_blocks_as_on_the_twin(query_tile: int, device: str) -> None:
    from pyramidbench.problem import Problem
    from pyramidbench.registry import create

    torch.manual_seed(0)
    q = torch.randn(1, 4, 3000, 64, device=device, dtype=torch.bfloat16) * 2
    k = torch.randn(1, 2, 3000, 64, device=device, dtype=torch.bfloat16)
    problem = Problem.of(q, k, causal=True, scale=None)
    lists = [
        create("exact_topk", {"query_tile": query_tile, "top_k": 5, "implementation": kind}).select(q, k, problem)
        for kind in ("triton", "reference")
    ]
    assert lists[0] is not None
    assert lists[1] is not None
    # A near-tie may swap one block in a row of many thousands.
    assert float((lists[0].indices != lists[1].indices).any(-1).double().mean()) <= 1e-3


@pytest.mark.gpu
def test_a_cell_on_a_gpu_is_judged_on_all_tiles(device: str, tmp_path: Path) -> None:
    from pyramidbench.cell import Cell
    from pyramidbench.outcome import Settings
    from pyramidbench.runner import Runner

    cell = Cell(method="pyramid", parameters={"query_tile": 128}, heads=4, kv_heads=2, seq_len=8000, seq_len_kv=8000,
                dtype="bfloat16", timed=False)  # fmt: skip
    settings = Settings(device, "here", tmp_path, 0.01, 1)
    record = Runner(settings).measure(cell)
    assert record.status == "ok", record.reason
    assert record.sampled_tiles == 63

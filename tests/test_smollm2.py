"""The real model: what is captured from SmolLM2 has the statistics that its attention is known for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pyramidbench.capture import capture
from pyramidbench.capture_file import describe_capture, read_layer
from pyramidbench.model_files import SMOLLM2_MEMBER, models_folder
from pyramidbench.oracle import block_mass
from pyramidbench.texts import STDLIB_LABEL


@pytest.mark.model
def test_smollm2_attends_as_published(tmp_path: Path) -> None:
    """At 2 048 tokens, blocks and tiles of 64, measured: layer 7 .568 and .613, layer 13 .821 and .960."""
    if not (models_folder() / SMOLLM2_MEMBER).is_file():
        pytest.skip("the SmolLM2 weights are not here; run `make model`")
    out = tmp_path / "smollm2.safetensors"
    metadata = capture("smollm2", None, out, layers=[7, 13], tokens=2048).metadata
    assert describe_capture(out).label == f"smollm2-135m-instruct:{STDLIB_LABEL}"
    assert (metadata.heads, metadata.kv_heads, metadata.head_dim, metadata.rope_theta) == (9, 3, 64, 1e5)
    best, forced = attention_shares(out, 7)
    assert 0.45 < best < 0.7
    assert 0.5 < forced < 0.73
    best, forced = attention_shares(out, 13)
    assert 0.74 < best < 0.9
    assert 0.9 < forced < 0.99


def attention_shares(out: Path, layer: int) -> tuple[float, float]:
    """Mean mass in the best 10 % of the visible blocks, and in the sink block with the last two, over all tiles."""
    q, k, _ = read_layer(out, layer, 2048, 2048)
    mass = block_mass(q.float(), k.float(), block_size=64, query_tile=64)[0]
    best, forced = [], []
    for tile in range(32):
        seen = mass[:, tile, : tile + 1]
        best.append(seen.topk(-(-(tile + 1) // 10)).values.sum(-1))
        forced.append(seen[:, sorted({0, max(0, tile - 1), tile})].sum(-1))
    return float(torch.stack(best).mean()), float(torch.stack(forced).mean())

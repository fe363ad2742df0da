"""Inputs: names and what they stand for; captures are read by slices, and every mistake is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pyramidbench.capture_file import CaptureMetadata, CaptureWriter, describe_capture
from pyramidbench.cell import Cell
from pyramidbench.errors import UserError
from pyramidbench.inputs import (
    describe_input,
    input_label,
    load_inputs,
    measures_quality,
    quality_source,
    synthetic_names,
)
from pyramidbench.rope_scaling import RopeScaling

CPU = torch.device("cpu")
METADATA = CaptureMetadata(
    model="hub/Tiny-Model",
    model_sha256=None,
    text="essay",
    text_sha256="0" * 64,
    tokens=40,
    layers=(2, 7),
    heads=4,
    kv_heads=2,
    head_dim=16,
    head_dim_v=8,
    rope_theta=1e5,
    scale=0.25,
    created_by="a test",
)
MakeCapture = Callable[..., Path]


def captured(path: Path, **changes: object) -> Cell:
    fields: dict[str, object] = {
        "method": "dense", "input": str(path), "layer": 7, "seq_len": 40, "seq_len_kv": 40, "heads": 4, "kv_heads": 2,
        "head_dim": 16, "head_dim_v": 8,
    }  # fmt: skip
    return Cell.model_validate(fields | changes)


def layer_tensors(layer: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(layer)
    shapes = ((1, 4, 40, 16), (1, 2, 40, 16), (1, 2, 40, 8))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


@pytest.fixture
def make_capture(tmp_path: Path) -> MakeCapture:
    def make(metadata: CaptureMetadata = METADATA, spoil: Callable[[Tensor], object] = torch.Tensor.numel) -> Path:
        path = tmp_path / "tiny.safetensors"
        with CaptureWriter(path, 2) as writer:
            for layer in (2, 7):
                q, k, v = layer_tensors(layer)
                spoil(k)
                writer.add(layer, q, k, v)
            writer.finish(metadata)
        return path

    return make


def test_quality_source(make_capture: MakeCapture) -> None:
    assert quality_source("topics") == "structured (topics)"
    assert quality_source("needles") == "structured (needles)"
    assert quality_source("normal") == "random tensors: no measure of quality"
    assert quality_source(str(make_capture())) == "captured"
    scaled = dataclasses.replace(METADATA, rope_scaling=RopeScaling("yarn", 2.5, 16))
    assert quality_source(str(make_capture(scaled))) == "captured, positions scaled by yarn 2.5, trained on 16"
    assert input_label(str(make_capture(scaled))) == "tiny-model+yarn-x2.5:essay"
    assert [name for name in synthetic_names() if not measures_quality(name)] == ["normal"]


@pytest.mark.parametrize("ask", [describe_input, quality_source, input_label])
def test_an_unknown_name_suggests_a_near_one(ask: Callable[[str], object]) -> None:
    with pytest.raises(UserError, match=r"unknown input 'topic'\. Did you mean 'topics'\?.*FILE\.safetensors"):
        ask("topic")


def test_a_capture_describes_itself(make_capture: MakeCapture) -> None:
    path = make_capture()
    description = describe_input(str(path))
    assert description is not None
    assert description.metadata == METADATA
    assert (description.batch, description.heads, description.kv_heads, description.seq_len) == (1, 4, 2, 40)
    assert (description.head_dim, description.head_dim_v, description.layers) == (16, 8, (2, 7))
    assert (description.scale, description.dtype) == (0.25, "float32")
    assert input_label(str(path)) == "tiny-model:essay"


def test_a_capture_gives_its_first_tokens_and_the_last_queries_of_those(make_capture: MakeCapture) -> None:
    q, k, v = load_inputs(captured(make_capture(), seq_len=5, seq_len_kv=30), CPU)
    whole_q, whole_k, whole_v = layer_tensors(7)
    assert torch.equal(q, whole_q[:, :, 25:30])
    assert torch.equal(k, whole_k[:, :, :30])
    assert torch.equal(v, whole_v[:, :, :30])


def test_another_softmax_scale_goes_into_the_queries(make_capture: MakeCapture) -> None:
    path = make_capture(dataclasses.replace(METADATA, scale=0.5))
    q, k, _ = load_inputs(captured(path), CPU)
    whole_q, whole_k, _ = layer_tensors(7)
    torch.testing.assert_close(q[:, :2] @ k.mT * 16**-0.5, whole_q[:, :2] @ whole_k.mT * 0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer": 3}, r"layer 3 is not in it; accepted: 2, 7"),
        ({"layer": None}, r"no layer is given; accepted: 2, 7"),
        ({"heads": 2}, r"has heads 4, given 2"),
        ({"head_dim": 32}, r"has head_dim 16, given 32"),
        ({"seq_len_kv": 41}, r"holds 40 tokens, given a length of 41; ask for at most 40"),
        ({"seq_len_kv": 30}, r"40 queries on 30 keys"),
    ],
)
def test_a_cell_that_the_capture_cannot_feed(
    make_capture: MakeCapture, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_inputs(captured(make_capture(), **changes), CPU)


def test_nan_in_a_capture_is_named(make_capture: MakeCapture) -> None:
    def spoil(k: Tensor) -> None:
        k[0, 1, :3, 0] = torch.nan

    with pytest.raises(UserError, match=r"layer 7, k holds NaN in 3 of 1280 entries as float32; capture"):
        load_inputs(captured(make_capture(spoil=spoil)), CPU)


def test_a_value_beyond_the_cells_dtype_is_named(make_capture: MakeCapture) -> None:
    path = make_capture(spoil=lambda k: k[0, 0, 0].fill_(1e6))
    load_inputs(captured(path), CPU)
    with pytest.raises(UserError, match=r"layer 7, k holds inf in 16 of 1280 entries as float16; use a wider dtype"):
        load_inputs(captured(path, dtype="float16"), CPU)


def test_a_missing_capture() -> None:
    with pytest.raises(UserError, match=r"'no/such\.safetensors' is not a file; .*pyramidbench capture"):
        describe_input("no/such.safetensors")


@pytest.mark.parametrize("keep", [0, 5, 4000, -1], ids=["empty", "start", "half", "one byte short"])
def test_a_damaged_capture_is_one_line(make_capture: MakeCapture, keep: int) -> None:
    path = make_capture()
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match="damaged") as caught:
        describe_input(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_of_other_tensors_is_no_capture(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(UserError, match="is no capture of format pyramidbench-capture 1: its metadata says nothing"):
        describe_input(str(path))


def test_metadata_that_promises_other_tensors(make_capture: MakeCapture) -> None:
    with pytest.raises(UserError, match=r"lacks the tensor layer\.9\.q \[1, 4, 40, 16\]"):
        describe_capture(make_capture(dataclasses.replace(METADATA, layers=(2, 9))))
    with pytest.raises(UserError, match=r"holds as \[1, 2, 40, 16\] the tensor layer\.2\.k \[1, 1, 40, 16\]"):
        describe_capture(make_capture(dataclasses.replace(METADATA, kv_heads=1)))


def test_metadata_of_another_kind(make_capture: MakeCapture) -> None:
    path = make_capture(dataclasses.replace(METADATA, scale="large"))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"wrong metadata \(scale 'large'\); docs/capture\.md says"):
        describe_capture(path)


def own_file(tmp_path: Path, *, without: str = "", dtype: torch.dtype = torch.float32, **changed: str) -> Path:
    """A file as docs/capture.md shows it, with some of its metadata left out or changed."""
    metadata = METADATA.to_text() | {"layers": "[0]", "tokens": "8", "heads": "4", "kv_heads": "2", "head_dim": "16",
                                     "head_dim_v": "16"} | changed  # fmt: skip
    kv_heads = int(metadata["kv_heads"])
    tensors = {f"layer.0.{name}": torch.ones(1, 4 if name == "q" else kv_heads, 8, 16).to(dtype) for name in "qkv"}
    path = tmp_path / "own.safetensors"
    save_file(tensors, path, {key: text for key, text in metadata.items() if key != without})
    return path


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"without": "scale"}, r"wrong metadata \(it lacks scale\)"),
        ({"kv_heads": "3"}, "4 query heads cannot be shared evenly by 3"),
        ({"dtype": torch.int32}, r"holds layer\.0\.q as I32; accepted: F16, BF16, F32, F64"),
    ],
)
def test_tensors_of_ones_own_that_cannot_be_used_are_refused_in_a_line(
    tmp_path: Path, file: dict[str, Any], message: str
) -> None:
    assert describe_capture(own_file(tmp_path, dtype=torch.float64)).dtype == "float64"
    with pytest.raises(UserError, match=message) as caught:
        describe_capture(own_file(tmp_path, **file))
    assert "\n" not in str(caught.value)

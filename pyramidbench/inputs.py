"""Inputs: where a cell's q, k and v come from, a seeded synthetic model or a capture of a real one."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from pyramidbench.capture_file import InputDescription, describe_capture, read_layer
from pyramidbench.cell import Cell
from pyramidbench.errors import UserError, unknown
from pyramidbench.problem import DTYPES
from pyramidbench.streams import Sizes
from pyramidbench.synthetic import MODELS, synthetic_tensors

__all__ = [
    "InputDescription",
    "describe_input",
    "input_label",
    "input_summary",
    "load_inputs",
    "measures_quality",
    "quality_source",
    "synthetic_names",
    "synthetic_summary",
]

CAPTURE_SUFFIX = ".safetensors"
CAPTURED = "captured"


def synthetic_names() -> tuple[str, ...]:
    """Names of the synthetic inputs."""
    return tuple(MODELS)


def synthetic_summary(name: str) -> str:
    """What a synthetic input models and what it cannot show: its docstring as paragraphs of one line each."""
    paragraphs = (type(_model(name)).__doc__ or "").split("\n\n")
    return "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def describe_input(name: str) -> InputDescription | None:
    """Sizes, layers and label of a capture (reads its header only); None for a synthetic input, which has any size.

    Raises:
        UserError: no such input, or a capture that is missing, damaged or incomplete.
    """
    if name.endswith(CAPTURE_SUFFIX):
        return describe_capture(Path(name))
    _model(name)
    return None


def input_label(name: str) -> str:
    """What the column `input` shows: a synthetic input's name, or a capture's model and text.

    Raises:
        UserError: as `describe_input`.
    """
    description = describe_input(name)
    return name if description is None else description.label


def input_summary(name: str) -> str:
    """What an input is: of a synthetic one its model, of a capture what its header says.

    Raises:
        UserError: as `describe_input`.
    """
    held = describe_input(name)
    if held is None:
        return synthetic_summary(name)
    origin, scaling = held.metadata, held.metadata.rope_scaling
    lines = [
        f"{held.label}: the attention of {origin.model} on the text {origin.text}, {quality_source(name)}",
        f"{held.seq_len} tokens; {held.heads} query heads on {held.kv_heads} key/value heads of {held.head_dim}; "
        f"stored as {held.dtype}",
        f"layers {', '.join(map(str, held.layers))}",
        f"made by {origin.created_by}",
    ]
    if scaling is not None and held.seq_len > scaling.trained_tokens:
        lines.insert(1, f"a context {held.seq_len / scaling.trained_tokens:g} times as long as the trained one")
    return "\n".join(lines)


def measures_quality(name: str) -> bool:
    """Whether quality on this input means anything: not on `normal`, whose attention has nothing to find."""
    return name != "normal"


def quality_source(name: str) -> str:
    """What quality on this input rests on; for random tensors, that it is no measure.

    Raises:
        UserError: as `describe_input`.
    """
    held = describe_input(name)
    if held is not None:
        scaling = held.metadata.rope_scaling
        return CAPTURED if scaling is None else f"{CAPTURED}, {scaling.told}"
    return f"structured ({name})" if measures_quality(name) else "random tensors: no measure of quality"


def load_inputs(cell: Cell, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, M, D], k [B, G, N, D] and v [B, G, N, Dv] of a cell, in its dtype, on `device`.

    Of a capture, the first N tokens, and the queries of the last M of those (bottom-right alignment). Where the model's
    softmax scale is not 1/√D, q is multiplied so that 1/√D gives the model's own logits. Reads only these slices.

    Raises:
        UserError: sizes that the input does not have, a capture that cannot be read, NaN or inf in it.
    """
    description = describe_input(cell.input)
    if description is None:
        tensors = synthetic_tensors(cell.input, _sizes(cell), cell.seed, DTYPES[cell.dtype])
        return _to_device(tensors, device)
    layer = _layer(cell, description)
    _check_sizes(cell, description)
    q, k, v = read_layer(description.path, layer, cell.seq_len, cell.seq_len_kv)
    factor = description.scale * math.sqrt(description.head_dim)
    if not math.isclose(factor, 1, rel_tol=1e-6):
        q = q.float() * factor
    dtype = DTYPES[cell.dtype]
    tensors = (q.to(dtype), k.to(dtype), v.to(dtype))
    for name, tensor in zip("qkv", tensors):
        check_finite(tensor, f"input '{cell.input}': layer {layer}, {name}")
    return _to_device(tensors, device)


def check_finite(tensor: Tensor, where: str) -> None:
    """Raise UserError if a tensor holds NaN or inf: `where` begins the message."""
    for what, wrong in (("NaN", tensor.isnan()), ("inf", tensor.isinf())):
        if count := int(wrong.sum()):
            hint = "use a wider dtype (bfloat16 or float32)" if what == "inf" else "capture the model again"
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"{where} holds {what} in {count} of {tensor.numel()} entries as {dtype}; {hint}.")


def _model(name: str) -> object:
    if name not in MODELS:
        raise unknown("input", name, [*MODELS, f"FILE{CAPTURE_SUFFIX}"])
    return MODELS[name]


def _sizes(cell: Cell) -> Sizes:
    return Sizes(
        batch=cell.batch,
        heads=cell.heads,
        kv_heads=cell.kv_heads,
        queries=cell.seq_len,
        keys=cell.seq_len_kv,
        head_dim=cell.head_dim,
        head_dim_v=cell.head_dim_v,
    )


def _layer(cell: Cell, description: InputDescription) -> int:
    layers = description.layers
    if cell.layer is None and len(layers) == 1:
        return layers[0]
    if cell.layer is None or cell.layer not in layers:
        given = "no layer is given" if cell.layer is None else f"layer {cell.layer} is not in it"
        raise UserError(f"input '{cell.input}': {given}; accepted: {', '.join(map(str, layers))}.")
    return cell.layer


def _check_sizes(cell: Cell, description: InputDescription) -> None:
    for name in ("batch", "heads", "kv_heads", "head_dim", "head_dim_v"):
        given, held = getattr(cell, name), getattr(description, name)
        if given != held:
            raise UserError(f"input '{cell.input}' has {name} {held}, given {given}; leave {name} out for a capture.")
    longest = description.seq_len
    if cell.seq_len_kv > longest:
        raise UserError(
            f"input '{cell.input}' holds {longest} tokens, given a length of {cell.seq_len_kv}; "
            f"ask for at most {longest}, or capture more tokens."
        )
    if cell.seq_len_kv != longest and not description.prefixes_stand:
        raise UserError(
            f"input '{cell.input}' was captured at {longest} tokens under a scaling that depends on their number, given a "
            f"length of {cell.seq_len_kv}; ask for {longest}, or capture that length."
        )
    if cell.seq_len > cell.seq_len_kv:
        raise UserError(
            f"input '{cell.input}': {cell.seq_len} queries on {cell.seq_len_kv} keys; "
            "a capture has one query for each key, so give at most as many queries as keys."
        )


def _to_device(tensors: tuple[Tensor, Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (tensor.contiguous().to(device) for tensor in tensors)
    return q, k, v

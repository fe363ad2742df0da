"""Capture: q, k and v of chosen layers of a causal language model on a text, to one file.

The model's attention is replaced by a recorder that writes each chosen layer as it is produced. The forward pass stops
at the last chosen layer: no logits, no key/value cache. Memory: the weights, one layer's activations, and the copy
that is being written. On a GPU attention runs in a kernel that holds no matrix of weights, so that all of it grows with the
number of tokens and not with its square.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import pyramidbench
from pyramidbench.capture_file import DTYPE_CODES, CaptureMetadata, CaptureWriter
from pyramidbench.device import pick_device
from pyramidbench.errors import UserError, unknown
from pyramidbench.inputs import CAPTURE_SUFFIX
from pyramidbench.model_files import ModelSource, Say, find_model, import_transformers, load_config, load_model, silent
from pyramidbench.recorder import LayerSizes, Recorder, run_model
from pyramidbench.rope_scaling import RopeScaling, scale_positions
from pyramidbench.texts import Passage, read_passage

DEFAULT_LAYERS = 5


@dataclass(frozen=True)
class CaptureReport:
    """What a capture wrote: `metadata` as in the file, the file's size, how long it took, and the peak of a GPU's memory."""

    path: Path
    metadata: CaptureMetadata
    size_bytes: int
    seconds: float
    peak_memory_bytes: int | None = None


def capture(
    model: str, text: Path | None, out: Path, layers: Sequence[int] | None = None, tokens: int = 8192,
    dtype: str = "float16", gguf_file: str | None = None, device: str = "cpu", rope_scaling: str | None = None,
    progress: Say | None = None,
) -> CaptureReport:  # fmt: skip
    """Run a model on the first `tokens` tokens of a text and write q, k and v of some layers to `out`.

    model: "smollm2" (fetched on first use), a Hugging Face hub name, a folder, or a path ending in .gguf; `gguf_file`
    names a GGUF file in a folder or a hub repository. text: a UTF-8 file, or None for the Python standard library's
    source. layers: default five, evenly spaced over those with full attention. dtype: what is stored. device: auto, cpu
    (runs in float32) or cuda (in bfloat16 where the weights are float32). rope_scaling: for more tokens than positions,
    "yarn", "dynamic" or "linear", or with a factor ("yarn:32"). progress: gets a line of text at each step.

    Raises:
        UserError: a model, text, layer, length, dtype, device or path that cannot be used; the message says what can.
    """
    started = time.perf_counter()
    say = progress or silent
    stored = _stored_dtype(dtype)
    _check_request(out, tokens)
    place, passage = pick_device(device), read_passage(text)
    source = find_model(model, gguf_file, say)
    config = load_config(source)
    chosen = _choose_layers(config.get_text_config(), layers)
    scaling = scale_positions(rope_scaling, tokens, config.get_text_config())
    network, tokenizer = load_model(source, place.type, config, running_dtype(config, place))
    ids = torch.tensor([token_ids(tokenizer, passage, tokens)], device=place)
    say(f"running {source.name} on {tokens} tokens of {passage.label}{f', {scaling.told}' if scaling else ''}")
    with CaptureWriter(out, len(chosen)) as writer:
        recorder = Recorder(writer, chosen, stored, say)
        peak = run_model(network, ids, recorder)
        origin = Origin(source, passage, f"{str(network.dtype).removeprefix('torch.')} on {place.type}", scaling)
        metadata = _metadata(origin, tokens, chosen, recorder.sizes(), _rope_theta(network.config.get_text_config()))
        writer.finish(metadata)
    return CaptureReport(out, metadata, out.stat().st_size, time.perf_counter() - started, peak)


@dataclass(frozen=True)
class Origin:
    """Where tensors come from: model, text, what the model ran in (such as "float32 on cpu"), and its scaled positions."""

    source: ModelSource
    passage: Passage
    ran: str
    scaling: RopeScaling | None


def _check_request(out: Path, tokens: int) -> None:
    if out.suffix != CAPTURE_SUFFIX:
        raise UserError(f"a capture is written to a file ending in {CAPTURE_SUFFIX}, given '{out}'.")
    if tokens < 2:
        raise UserError(f"a capture needs at least 2 tokens, given {tokens}.")
    existing = next(folder for folder in out.absolute().parents if folder.exists())
    if not os.access(existing, os.W_OK):
        raise UserError(f"'{out}' cannot be written: no permission in '{existing}'; give another path.")


def _stored_dtype(dtype: str) -> torch.dtype:
    accepted = {str(kind).removeprefix("torch."): kind for kind in DTYPE_CODES}
    if dtype not in accepted:
        raise unknown("capture dtype", dtype, accepted)
    return accepted[dtype]


def _choose_layers(config: Any, layers: Sequence[int] | None) -> tuple[int, ...]:
    """The layers asked for, ascending, or DEFAULT_LAYERS evenly spaced ones among those with full attention."""
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * count
    full = [layer for layer in range(count) if kinds[layer] == "full_attention"]
    if layers is None:
        wanted = min(DEFAULT_LAYERS, len(full))
        return tuple(full[round(i * (len(full) - 1) / max(1, wanted - 1))] for i in range(wanted))
    outside = [layer for layer in layers if not 0 <= layer < count]
    if outside or not layers:
        given = f"layer {outside[0]}" if outside else "no layer"
        raise UserError(f"{given} given; the model has layers 0 to {count - 1}.")
    return tuple(sorted(set(layers)))


def running_dtype(config: Any, device: torch.device) -> str | None:
    """None: float32 on a CPU, and what the weights are on a GPU, but for float32, which its attention kernels do not take."""
    wide = str(getattr(config, "dtype", None)).removeprefix("torch.") in ("None", "float32")
    return "bfloat16" if device.type == "cuda" and wide else None


def token_ids(tokenizer: Any, passage: Passage, tokens: int) -> list[int]:
    """The first `tokens` tokens of a text. Raises UserError where it has fewer."""
    # A prefix is enough of a long text: a token is rarely longer than 32 characters.
    start = passage.text[: 32 * tokens]
    ids = tokenizer(start, verbose=False).input_ids
    if len(ids) < tokens and len(start) < len(passage.text):
        ids = tokenizer(passage.text, verbose=False).input_ids
    if len(ids) < tokens:
        raise UserError(
            f"text '{passage.label}' has {len(ids)} tokens, {tokens} were asked for; "
            f"ask for at most {len(ids)}, or give a longer text."
        )
    return list(ids[:tokens])


def _metadata(
    origin: Origin, tokens: int, layers: tuple[int, ...], sizes: LayerSizes, rope_theta: float | None
) -> CaptureMetadata:
    made_by = f"pyramidbench {pyramidbench.__version__}, transformers {import_transformers().__version__}"
    return CaptureMetadata(
        model=origin.source.name,
        model_sha256=origin.source.sha256,
        text=origin.passage.label,
        text_sha256=origin.passage.sha256,
        tokens=tokens,
        layers=layers,
        rope_theta=rope_theta,
        created_by=f"{made_by}, {origin.ran}",
        rope_scaling=origin.scaling,
        **dataclasses.asdict(sizes),
    )


def _rope_theta(config: Any) -> float | None:
    """Base of the rotary position encoding; None for a model without one."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    theta = rope.get("rope_theta", getattr(config, "rope_theta", None))
    return None if theta is None else float(theta)

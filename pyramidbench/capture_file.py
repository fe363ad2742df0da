"""The capture file: q, k and v of chosen layers of a model, one .safetensors, written layer by layer, read by slices.

Tensors `layer.{i}.q` [1, H, N, D], `layer.{i}.k` [1, G, N, D] and `layer.{i}.v` [1, G, N, Dv], q and k after the
position encoding. Metadata says where they come from; its keys are the fields of CaptureMetadata, all text.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pyramidbench.errors import UserError
from pyramidbench.rope_scaling import RopeScaling

FORMAT = "pyramidbench-capture"
VERSION = "1"
DTYPE_CODES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
FLOAT_CODES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
"""What a file may hold, whoever wrote it."""
OWN = "docs/capture.md says how to write tensors of your own"


@dataclass(frozen=True)
class CaptureMetadata:
    """What a capture says about itself. `scale` is the model's softmax scale; None is an unknown or absent value.

    `model` is a hub name, a folder's or a file's name; `model_sha256` the checksum of its weights where they are one
    file. `text` labels the text, `text_sha256` is that of the whole text, of which `tokens` tokens were used. `rope_scaling`
    is what was done to the positions for a context beyond the trained one.
    """

    model: str
    model_sha256: str | None
    text: str
    text_sha256: str
    tokens: int
    layers: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    rope_theta: float | None
    scale: float
    created_by: str
    rope_scaling: RopeScaling | None = None
    format: str = FORMAT
    version: str = VERSION

    def to_text(self) -> dict[str, str]:
        """The fields as safetensors metadata, each as JSON unless it is text already; None is left out."""
        values = dataclasses.asdict(self)
        return {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in values.items()
            if value is not None
        }

    @classmethod
    def from_text(cls, text: dict[str, str]) -> CaptureMetadata:
        """The inverse of `to_text`. Raises pydantic's ValidationError where a key is missing or has a wrong value."""
        optional = {"model_sha256": None, "rope_theta": None}
        values = {key: json.loads(value) if key in ("layers", "rope_scaling") else value for key, value in text.items()}
        return TypeAdapter(cls).validate_python({**optional, **values})


@dataclass(frozen=True)
class InputDescription:
    """A capture's sizes and origin, as its header gives them. Lengths in tokens; `dtype` is the stored one."""

    path: Path
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    seq_len: int
    layers: tuple[int, ...]
    scale: float
    dtype: str
    metadata: CaptureMetadata

    @property
    def label(self) -> str:
        """Model and text, such as "smollm2-135m-instruct:python-stdlib"; the model's positions too, where they were scaled."""
        scaling = self.metadata.rope_scaling
        model = self.metadata.model.rpartition("/")[2].lower() + (f"+{scaling.name}" if scaling else "")
        return f"{model}:{self.metadata.text}"

    @property
    def prefixes_stand(self) -> bool:
        """Whether the first tokens are what a capture of so many tokens would hold."""
        return self.metadata.rope_scaling is None or self.metadata.rope_scaling.prefixes_stand


def describe_capture(path: Path) -> InputDescription:
    """What a capture holds; reads its header only.

    Raises:
        UserError: the file is missing, damaged, or no capture of this version; the message is one line.
    """
    if not path.is_file():
        raise UserError(
            f"input '{path}' is not a file; give a capture's path, or make one with `pyramidbench capture`."
        )
    try:
        with safe_open(path, framework="pt") as file:
            return _describe(path, file)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"input '{path}' is damaged or not a safetensors file ({_one_line(error)}); "
            "make it again with `pyramidbench capture`."
        ) from None


def read_layer(path: Path, layer: int, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of one layer for the first `keys` tokens, q of the last `queries` of those, in the stored dtype.

    The file is mapped into memory: only these slices are read. The sizes must be within the description's.
    """
    with safe_open(path, framework="pt") as file:
        q = file.get_slice(f"layer.{layer}.q")[:, :, keys - queries : keys]
        k = file.get_slice(f"layer.{layer}.k")[:, :, :keys]
        v = file.get_slice(f"layer.{layer}.v")[:, :, :keys]
    return q, k, v


class CaptureWriter:
    """Writes a capture layer by layer: nothing but the layer at hand is in memory, and nothing is copied twice.

    The tensors go behind a gap that is large enough for the header; `finish` fills the gap. safetensors allows padding
    with spaces there. The file bears a temporary name until it is whole; leaving the context early removes it.
    """

    def __init__(self, out: Path, layers: int) -> None:
        """Raises UserError where `out` cannot be written."""
        self.out = out
        self.header_bytes = 8192 + 512 * layers
        self.entries: dict[str, dict[str, Any]] = {}
        self.offset = 0
        self.temporary = out.with_name(f".{out.name}.{os.getpid()}.part")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.temporary.open("wb")
        except OSError as error:
            raise UserError(
                f"'{out}' cannot be written: {error.strerror}; give another path for the capture."
            ) from None
        self.file.write(b" " * (8 + self.header_bytes))

    def add(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Append one layer's tensors, all of one dtype among DTYPE_CODES."""
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            data = tensor.detach().contiguous().cpu()
            end = self.offset + data.nbytes
            self.entries[f"layer.{layer}.{name}"] = {
                "dtype": DTYPE_CODES[data.dtype],
                "shape": list(data.shape),
                "data_offsets": [self.offset, end],
            }
            self.file.write(data.view(torch.uint8).flatten().numpy().data)
            self.offset = end

    def finish(self, metadata: CaptureMetadata) -> None:
        """Write the header and give the file its name, replacing an older one."""
        header = json.dumps({"__metadata__": metadata.to_text(), **self.entries}).encode()
        assert len(header) <= self.header_bytes, "the gap for the header is too small"
        self.file.seek(0)
        self.file.write(self.header_bytes.to_bytes(8, "little") + header.ljust(self.header_bytes))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.temporary.replace(self.out)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
        self.temporary.unlink(missing_ok=True)


def _describe(path: Path, file: Any) -> InputDescription:
    text = file.metadata() or {}
    if text.get("format") != FORMAT or text.get("version") != VERSION:
        raise UserError(
            f"input '{path}' is no capture of format {FORMAT} {VERSION}: its metadata says "
            f"{text.get('format', 'nothing')} {text.get('version', '')}".rstrip()
            + f"; make one with `pyramidbench capture`, or {OWN}."
        )
    try:
        metadata = CaptureMetadata.from_text(text)
    except (ValidationError, json.JSONDecodeError) as error:
        raise UserError(f"input '{path}' has wrong metadata ({_faults(error)}); {OWN}.") from None
    if metadata.heads % metadata.kv_heads:
        raise UserError(
            f"input '{path}': {metadata.heads} query heads cannot be shared evenly by {metadata.kv_heads} of keys; {OWN}."
        )
    names = set(file.keys())
    for layer in metadata.layers:
        _check_layer(path, file, names, layer, metadata)
    return InputDescription(
        path=path,
        batch=1,
        heads=metadata.heads,
        kv_heads=metadata.kv_heads,
        head_dim=metadata.head_dim,
        head_dim_v=metadata.head_dim_v,
        seq_len=metadata.tokens,
        layers=metadata.layers,
        scale=metadata.scale,
        dtype=_stored_dtype(file, metadata.layers),
        metadata=metadata,
    )


def _check_layer(path: Path, file: Any, names: set[str], layer: int, metadata: CaptureMetadata) -> None:
    keys = (1, metadata.kv_heads, metadata.tokens)
    expected = {
        "q": (1, metadata.heads, metadata.tokens, metadata.head_dim),
        "k": (*keys, metadata.head_dim),
        "v": (*keys, metadata.head_dim_v),
    }
    for tensor, shape in expected.items():
        name = f"layer.{layer}.{tensor}"
        found = tuple(file.get_slice(name).get_shape()) if name in names else None
        if found != shape:
            what = "lacks" if found is None else f"holds as {list(found)}"
            raise UserError(f"input '{path}' {what} the tensor {name} {list(shape)} that its metadata promises; {OWN}.")
        code = str(file.get_slice(name).get_dtype())
        if code not in FLOAT_CODES:
            raise UserError(f"input '{path}' holds {name} as {code}; accepted: {', '.join(FLOAT_CODES)}.")


def _stored_dtype(file: Any, layers: tuple[int, ...]) -> str:
    return FLOAT_CODES[str(file.get_slice(f"layer.{layers[0]}.k").get_dtype())]


def _faults(error: ValidationError | json.JSONDecodeError) -> str:
    """What is wrong with metadata, key by key."""
    if isinstance(error, json.JSONDecodeError):
        return f"a list that is no JSON: {_one_line(error)}"
    lacking = [str(fault["loc"][0]) for fault in error.errors() if fault["type"] == "missing"]
    wrong = [f"{fault['loc'][0]} {fault['input']!r}" for fault in error.errors() if fault["type"] != "missing"]
    return "; ".join([*([f"it lacks {', '.join(lacking)}"] if lacking else []), *wrong])


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

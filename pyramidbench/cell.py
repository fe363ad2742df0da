"""Cell: one square of a sweep, a method with parameters on one problem and one input. Its identity is its content."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict

from pyramidbench.decoding import decoding
from pyramidbench.method import Method
from pyramidbench.problem import Pass, Problem
from pyramidbench.registry import create


class Cell(BaseModel):
    """Everything that defines a measurement. Two cells with equal fields are the same cell, in any run.

    `parameters` are those given on top of the preset of `method` ("name" or "name:preset"). `input` is a synthetic
    input's name or the path of a capture; `layer` picks a layer of a capture. `timed` False measures quality only.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    parameters: dict[str, Any] = {}
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    seq_len: int
    seq_len_kv: int
    head_dim: int = 64
    head_dim_v: int = 64
    dtype: str = "float32"
    causal: bool = True
    direction: Pass = "forward"
    input: str = "topics"
    layer: int | None = None
    seed: int = 0
    budget: str | None = None
    timed: bool = True

    @property
    def identity(self) -> str:
        """Twelve hex digits that name this cell in every run."""
        text = json.dumps(self.model_dump(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def group(self) -> str:
        """Cells with the same group share their tensors and the reference results on them."""
        return f"{self.tensors}-{self.direction}"

    @property
    def tensors(self) -> str:
        """Cells with the same one have equal tensors, in whatever pass."""
        shared = self.model_dump(exclude={"method", "parameters", "budget", "timed", "direction"})
        return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:12]

    def make_method(self) -> Method:
        """The method object, in pass decode as it decodes. Raises UserError where the spec or a parameter is wrong."""
        made = create(self.method, self.parameters)
        return decoding(made) if self.direction == "decode" else made

    def problem(self, device: str) -> Problem:
        """The attention call that this cell poses on a kind of device ("cpu" or "cuda")."""
        return Problem(
            batch=self.batch,
            heads=self.heads,
            kv_heads=self.kv_heads,
            seq_len_q=self.seq_len,
            seq_len_kv=self.seq_len_kv,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=self.dtype,
            causal=self.causal,
            scale=self.head_dim**-0.5,
            device=device,
            direction=self.direction,
        )

    def all_parameters(self) -> str:
        """Every parameter of the method, preset and defaults included, as JSON."""
        return json.dumps(dataclasses.asdict(self.make_method()))

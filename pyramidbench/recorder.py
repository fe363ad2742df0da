"""The recorder: an attention function that transformers calls in place of its own, and the pass through the model.

It sees q, k and v after the position encoding and with the key/value heads unrepeated, writes those of a chosen layer
to the capture at once, and computes exact attention.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyramidbench.capture_file import CaptureWriter
from pyramidbench.errors import UserError
from pyramidbench.inputs import check_finite
from pyramidbench.model_files import Say, import_transformers

INTERFACE = "pyramidbench_capture"
# Arguments of the interface under which attention is no plain softmax over the keys: no exact reference would hold.
NOT_PLAIN = ("softcap", "s_aux", "sinks", "position_bias")
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""The kernels that hold no matrix of weights: at 256k tokens one of 9 heads would take 1.2 TB in bf16."""


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of one layer's attention, and its softmax scale."""

    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    scale: float


class _LastLayer(Exception):
    """Ends the forward pass behind the last chosen layer."""


class Recorder:
    """The attention function: writes the tensors of chosen layers and computes exact attention for all."""

    def __init__(self, writer: CaptureWriter, chosen: tuple[int, ...], dtype: torch.dtype, say: Say) -> None:
        self.writer, self.chosen, self.dtype, self.say = writer, chosen, dtype, say
        self.seen: dict[int, LayerSizes] = {}

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **others: object,
    ) -> tuple[Tensor, None]:
        """transformers' interface: query [1, H, N, D], key and value [1, G, N, D]; returns [1, N, H, Dv]."""
        odd = [name for name in NOT_PLAIN if others.get(name) is not None]
        if odd:
            raise UserError(f"the model's attention uses {odd[0]}, which is no plain softmax; capture another model.")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        layer = getattr(module, "layer_idx", None)
        if layer in self.chosen:
            self._record(layer, query, key, value, attention_mask, scale)
        if len(self.seen) == len(self.chosen):
            raise _LastLayer
        # A layer with a mask of its own gets whatever kernel takes one: its matrix is there anyway.
        streams = query.device.type == "cuda" and attention_mask is None
        with sdpa_kernel(FUSED) if streams else nullcontext():
            output = torch.nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=attention_mask,
                is_causal=attention_mask is None,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        return output.transpose(1, 2).contiguous(), None

    def _record(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> None:
        if mask is not None:
            raise UserError(
                f"layer {layer} does not see all earlier tokens (a sliding window or chunks); "
                "choose layers with full attention, or fewer tokens than its window."
            )
        stored = (q.to(self.dtype), k.to(self.dtype), v.to(self.dtype))
        for name, tensor in zip("qkv", stored):
            check_finite(tensor, f"layer {layer}, {name}")
        self.writer.add(layer, *stored)
        self.seen[layer] = LayerSizes(q.shape[1], k.shape[1], q.shape[3], v.shape[3], scale)
        self.say(f"layer {layer} written ({len(self.seen)} of {len(self.chosen)})")

    def sizes(self) -> LayerSizes:
        """The sizes that all chosen layers share. Raises UserError where they differ or a layer was never seen."""
        missing = [layer for layer in self.chosen if layer not in self.seen]
        if missing:
            raise UserError(f"the model's layer {missing[0]} has no attention that transformers' interface can reach.")
        if len(set(self.seen.values())) > 1:
            raise UserError(
                f"layers {', '.join(map(str, self.chosen))} differ in heads, head_dim or softmax scale; "
                "capture them into separate files."
            )
        return next(iter(self.seen.values()))


def run_model(network: Any, ids: Tensor, recorder: Recorder) -> int | None:
    """The forward pass up to the last chosen layer, with `recorder` as the attention. Returns a GPU's peak memory in bytes."""
    transformers = import_transformers()
    from transformers.masking_utils import sdpa_mask

    name = type(network).__name__
    body = network.base_model
    if not getattr(body, "_supports_attention_backend", False):
        raise UserError(f"model class {name} does not go through transformers' attention interface; use another model.")
    transformers.AttentionInterface.register(INTERFACE, recorder.attend)
    transformers.AttentionMaskInterface.register(INTERFACE, sdpa_mask)
    network.set_attn_implementation(INTERFACE)
    if body.config._attn_implementation != INTERFACE:
        raise UserError(f"model class {name} does not let its attention be replaced; use another model.")
    on_gpu = ids.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode(), suppress(_LastLayer):
        body(input_ids=ids, use_cache=False)
    return torch.cuda.max_memory_allocated() if on_gpu else None

"""A model's mask, in any form that transformers gives it, as the spans of keys that each query sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyramidbench.errors import UserError
from pyramidbench.spans import Spans


def read_spans(
    batch_size: int, q_length: int = 0, kv_length: int = 0, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Any = None, attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu", local_size: int | None = None, cache_position: Tensor | None = None,
    **others: Any,
) -> Spans | None:  # fmt: skip
    """transformers' mask interface: None for plain causal attention over all keys, else what each query sees."""
    if others.get("use_vmap"):
        raise UserError("the model adds a mask of its own to the causal one; sparse attention cannot follow it.")
    if cache_position is not None:  # what earlier versions give in place of q_length and q_offset
        q_length, q_offset, device = len(cache_position), cache_position[0], cache_position.device
    offset = int(q_offset) - kv_offset
    padding = _padding(attention_mask, kv_length, kv_offset)
    whole = padding is None or bool(padding.all())
    near = local_size is None or kv_length <= local_size
    if allow_is_causal_skip and whole and near and offset + q_length == kv_length:
        return None
    batch, column = torch.arange(batch_size, device=device), torch.arange(kv_length, device=device)
    position = torch.arange(q_length, device=device) + offset

    def rows(start: int, end: int) -> Tensor:
        at = (batch[:, None, None, None], torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device))
        seen = mask_function(*at, (position[start:end] + kv_offset)[:, None], column + kv_offset)
        seen = seen.expand(batch_size, 1, end - start, kv_length)[:, 0]
        return seen if padding is None else seen & padding[:, None]

    return Spans.read(rows, q_length, kv_length, position)


def _padding(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """Which keys are real, bool [B, N]; a mask that ends before the keys do means that the rest is not there yet."""
    if attention_mask is None:
        return None
    missing = kv_length + kv_offset - attention_mask.shape[-1]
    padded = torch.nn.functional.pad(attention_mask.bool(), (0, max(0, missing)))
    return padded[:, kv_offset : kv_offset + kv_length]


def as_spans(mask: Spans | Tensor | None, q: Tensor, k: Tensor) -> Spans | None:
    """The mask as `read_spans` made it, or a caller's own one [B, 1, M, N], boolean or added to the logits."""
    if mask is None or isinstance(mask, Spans):
        return mask
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[-2] != q.shape[2]:
        given = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UserError(f"attention mask {given} is not supported; accepted: [batch, tokens] or [batch, 1, M, N].")
    seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
    seen = seen[..., : k.shape[2]].expand(q.shape[0], -1, -1)
    position = torch.arange(q.shape[2], device=q.device) + k.shape[2] - q.shape[2]
    return Spans.read(lambda start, end: seen[:, start:end], q.shape[2], k.shape[2], position)


def check_positions(position_ids: Tensor | None, spans: Spans | None, q: Tensor) -> None:
    """transformers looks for packed sequences only where there is no cache and no mask: elsewhere they would be mixed."""
    if spans is not None or position_ids is None or position_ids.dim() != 2 or q.shape[2] == 1:
        return
    if bool((position_ids.diff(dim=-1) != 1).any()):
        raise UserError("position_ids start anew inside a sequence: packed sequences need use_cache=False and no mask.")

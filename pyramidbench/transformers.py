"""Methods as attention of Hugging Face models: `attn_implementation="pyramidbench:pyramid"` on any causal language model.

    import pyramidbench.transformers as sparse
    sparse.use(model, "pyramid", top_k=13, dense_layers=2)   # training-free; checks that the model can do it
    model.generate(...)
    print(sparse.usage())                                    # proof that the sparse path ran

`register` makes all methods available under "pyramidbench:NAME" and "pyramidbench:NAME:PRESET". Parameters are those of
the method, and `dense_layers`; they come from `register`, and over these from the model's `config.pyramidbench`, a dict.
Prefill and cached decoding, grouped heads, padded batches and packed sequences run sequence by sequence on the keys that
belong to it. What cannot be done is a UserError. Nothing runs densely but the method `dense` and `dense_layers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyramidbench.errors import UserError
from pyramidbench.model_files import import_transformers
from pyramidbench.recorder import NOT_PLAIN
from pyramidbench.registry import method_names, preset_names, split_spec
from pyramidbench.spans import Spans
from pyramidbench.sparse_layer import SparseLayer, sparse_layer
from pyramidbench.usage import Tally, Usage

__all__ = ["Usage", "register", "reset_usage", "usage", "use"]

PREFIX = "pyramidbench:"
Configured = dict[str, Any]

_registered: Configured = {}
_tally = Tally()


def register(*, dense_layers: int | Sequence[int] = 0, **parameters: object) -> tuple[str, ...]:
    """Register every method with transformers, and return the names: "pyramidbench:pyramid", "pyramidbench:pyramid:fast", …

    dense_layers: layers that keep dense attention, a list of them or how many first ones. `parameters` are a method's
    (`top_k`, `query_tile`, …). Both hold for each model that uses one of the names and has no entry of its own in
    `config.pyramidbench`. A later call replaces an earlier one.

    Raises:
        UserError: transformers is missing or too old. A parameter that the method lacks is found when a model runs.
    """
    transformers = import_transformers()
    _registered.clear()
    _registered.update(parameters, dense_layers=dense_layers)
    names = tuple(PREFIX + spec for spec in _specs())
    for name in names:
        _register_name(transformers, name)
    return names


def use(model: Any, method: str, *, dense_layers: int | Sequence[int] = 0, **parameters: object) -> None:
    """Give a loaded model the attention of a method, "name" or "name:preset" or the path of a method's file.

    dense_layers and parameters as for `register`; they are kept in `model.config.pyramidbench`.

    Raises:
        UserError: an unknown method or parameter, or a model whose attention cannot be replaced.
    """
    transformers = import_transformers()
    split_spec(method)
    settings = {**parameters, "dense_layers": dense_layers}
    sparse_layer(method, settings)
    name = PREFIX + method
    _register_name(transformers, name)
    body = model.base_model
    shown = type(model).__name__
    if not getattr(body, "_supports_attention_backend", False):
        raise UserError(
            f"model class {shown} does not go through transformers' attention interface; use another model."
        )
    model.set_attn_implementation(name)
    config = body.config.get_text_config()
    if config._attn_implementation != name:
        raise UserError(f"model class {shown} does not let its attention be replaced; use another model.")
    config.pyramidbench = settings


def usage() -> Usage:
    """What the registered attention did since the start, or since `reset_usage`; the difference of two is one span's."""
    return _tally.read()


def reset_usage() -> None:
    """Count from zero."""
    global _tally
    _tally = Tally()


def _specs() -> Iterator[str]:
    for name in method_names():
        yield name
        yield from (f"{name}:{preset}" for preset in preset_names(name))


def _register_name(transformers: Any, name: str) -> None:
    transformers.AttentionInterface.register(name, partial(_attend, name.removeprefix(PREFIX)))
    transformers.AttentionMaskInterface.register(name, _spans)


def _attend(
    method: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Spans | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: query [B, H, M, D], key and value [B, G, N, D]; returns [B, M, H, Dv]."""
    _check_plain(module, dropout, others)
    own = getattr(getattr(module, "config", None), "pyramidbench", None)
    layer = sparse_layer(method, _registered if own is None else own)
    spans = _as_spans(attention_mask, query, key)
    index = getattr(module, "layer_idx", None)
    _check_positions(others.get("position_ids"), spans, query)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _run(layer, index, query, key, value, spans, scale).transpose(1, 2).contiguous(), None


def _run(
    layer: SparseLayer, index: int | None, q: Tensor, k: Tensor, v: Tensor, spans: Spans | None, scale: float
) -> Tensor:
    if layer.is_dense(index):
        return layer.dense(q, k, v, spans, scale, _tally)
    if spans is None:
        return layer.sparse(q, k, v, scale, _tally)
    output = q.new_zeros(*q.shape[:3], v.shape[-1])
    for part in spans.sequences():
        one = slice(part.batch, part.batch + 1)
        output[one, :, part.rows] = layer.sparse(
            q[one, :, part.rows], k[one, :, part.keys], v[one, :, part.keys], scale, _tally
        )
    return output


def _check_plain(module: Any, dropout: float, others: dict[str, Any]) -> None:
    odd = [name for name in NOT_PLAIN if others.get(name) is not None]
    if odd:
        raise UserError(f"the model's attention uses {odd[0]}, which is no plain softmax over keys; use another model.")
    if dropout:
        raise UserError(f"attention dropout {dropout} is not supported; set the model's attention_dropout to 0.")
    if others.get("output_attentions"):
        raise UserError("sparse attention has no matrix of weights; call the model without output_attentions.")
    causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise UserError("the layer's attention is not causal; only causal language models are supported.")


def _spans(
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


def _as_spans(mask: Spans | Tensor | None, q: Tensor, k: Tensor) -> Spans | None:
    """The mask as `_spans` made it, or a caller's own one [B, 1, M, N], boolean or added to the logits."""
    if mask is None or isinstance(mask, Spans):
        return mask
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[-2] != q.shape[2]:
        given = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UserError(f"attention mask {given} is not supported; accepted: [batch, tokens] or [batch, 1, M, N].")
    seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
    seen = seen[..., : k.shape[2]].expand(q.shape[0], -1, -1)
    position = torch.arange(q.shape[2], device=q.device) + k.shape[2] - q.shape[2]
    return Spans.read(lambda start, end: seen[:, start:end], q.shape[2], k.shape[2], position)


def _check_positions(position_ids: Tensor | None, spans: Spans | None, q: Tensor) -> None:
    """transformers looks for packed sequences only where there is no cache and no mask: elsewhere they would be mixed."""
    if spans is not None or position_ids is None or position_ids.dim() != 2 or q.shape[2] == 1:
        return
    if bool((position_ids.diff(dim=-1) != 1).any()):
        raise UserError("position_ids start anew inside a sequence: packed sequences need use_cache=False and no mask.")

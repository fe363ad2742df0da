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
from pyramidbench.model_masks import as_spans, check_positions, read_spans
from pyramidbench.recorder import NOT_PLAIN
from pyramidbench.registry import method_names, preset_names, split_spec
from pyramidbench.spans import Spans
from pyramidbench.sparse_layer import HELD_BY, SparseLayer, sparse_layer
from pyramidbench.usage import Tally, Usage

__all__ = ["Usage", "decoding_cache", "register", "reset_usage", "usage", "use"]

PREFIX = "pyramidbench:"
CACHED_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
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


def decoding_cache(model: Any, max_len: int) -> Any:
    """A cache for `model.generate(**inputs, past_key_values=…)` or the model's own call, of up to max_len tokens a sequence.

    With it a new token costs a step of the method's decoder in each layer: nothing is summarised anew, and what is attended
    to stays the same. It works for methods with a decoder of their own (pyramid, flat, quest, sliding_window, …; `usage` counts
    `step_calls`); dense layers and other methods keep keys and values in it as in transformers' DynamicCache. Sequences are
    not padded. It can be copied, repeated, cropped, reordered and reset, as a DynamicCache can.

    Raises:
        UserError: max_len below 1, or a model whose layers hold something else than keys and values.
    """
    import_transformers()
    if max_len < 1:
        raise UserError(f"max_len = {max_len}: accepted: a whole number from 1 on")
    odd = layers_without_keys(model)
    if odd:
        raise UserError(f"the model has layers of type {odd[0]}, which hold no keys and values; use its own cache.")
    from pyramidbench.decoding_cache import make_cache

    return make_cache(model.config.get_text_config().num_hidden_layers, max_len)


def layers_without_keys(model: Any) -> list[str]:
    """Types of a model's layers that keep something else than keys and values: with any, it needs its own cache."""
    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return sorted(set(types) - set(CACHED_LAYERS))


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
    transformers.AttentionMaskInterface.register(name, read_spans)


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
    spans = as_spans(attention_mask, query, key)
    index = getattr(module, "layer_idx", None)
    check_positions(others.get("position_ids"), spans, query)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _run(layer, index, query, key, value, spans, scale).transpose(1, 2).contiguous(), None


def _run(
    layer: SparseLayer, index: int | None, q: Tensor, k: Tensor, v: Tensor, spans: Spans | None, scale: float
) -> Tensor:
    if layer.is_dense(index):
        return layer.dense(q, k, v, spans, scale, _tally)
    held = getattr(k, HELD_BY, None)
    if held is not None and q.shape[2] == 1:
        stepper = held.stepper(layer, q, scale)
        if stepper is not None:
            _check_step(q, k, spans)
            return stepper.step(q, _tally)
    if spans is None:
        return layer.sparse(q, k, v, scale, _tally)
    output = q.new_zeros(*q.shape[:3], v.shape[-1])
    for part in spans.sequences():
        one = slice(part.batch, part.batch + 1)
        output[one, :, part.rows] = layer.sparse(
            q[one, :, part.rows], k[one, :, part.keys], v[one, :, part.keys], scale, _tally
        )
    return output


def _check_step(q: Tensor, k: Tensor, spans: Spans | None) -> None:
    if spans is not None:
        raise UserError(
            "the newest token does not see all cached keys: the sequences are padded, or the layer has a sliding window. A "
            "decoding cache holds sequences without padding; give prompts of one length, list layers with a window in "
            "dense_layers, or generate without the cache."
        )
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        raise UserError("a decoding cache has no gradients; call the model under torch.no_grad().")


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

"""A cache of transformers whose layers step through a method's decoder. Imports transformers (extra `hf`).

transformers gives an attention function no cache, only the keys that the cache returned: so these carry their layer with
them. A layer is a DynamicLayer until the first single token comes; then the method's decoder takes over keys and values.
"""

from __future__ import annotations

from typing import Any

from torch import LongTensor, Tensor
from transformers.cache_utils import Cache, DynamicLayer

from pyramidbench.decoder import TokenCache
from pyramidbench.sparse_layer import HELD_BY, SparseLayer, Stepper


def make_cache(layers: int, max_len: int) -> Cache:
    """An empty cache for up to max_len tokens a sequence."""
    return Cache(layers=[DecodingLayer(max_len) for _ in range(layers)])


class DecodingLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' is not typed throughout
    """Keys and values of one layer. `keys` and `values` are views of the decoder's where it has taken over."""

    def __init__(self, max_len: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.max_len = max_len
        self._stepper: Stepper | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **others: Any) -> tuple[Tensor, Tensor]:
        """Append [B, G, T, D] and [B, G, T, Dv]; returns all keys and values."""
        if self._stepper is None:
            super().update(key_states, value_states, *args, **others)
        else:
            self._stepper.decoder.append(key_states, value_states)
            self.keys, self.values = self._stepper.decoder.tokens()
        k, v = self._held()
        # A view of its own: an attribute of self.keys would keep both alive until the garbage collector comes.
        marked = k[:]
        setattr(marked, HELD_BY, self)
        return marked, v

    def stepper(self, layer: SparseLayer, q: Tensor, scale: float) -> Stepper | None:
        """The decoder of a method, with all that was appended; None where the method has none of its own.

        Raises:
            UserError: the method cannot decode this, or there are more than max_len tokens.
        """
        held = self._stepper
        if held is None or (held.method, held.scale) != (layer.method, scale):
            k, v = self._held()
            self._stepper = held = layer.stepper(q, k, v, scale, self.max_len)
            if held is not None:
                held.decoder.append(k, v)
                self.keys, self.values = held.decoder.tokens()
        return held

    def crop(self, tokens: int) -> None:
        """As transformers' own: a negative number of tokens is removed; versions differ in what others mean."""
        super().crop(tokens)
        held = self._cache()
        if held is not None:
            held.truncate(self.get_seq_length())

    def reorder_cache(self, beam_idx: LongTensor) -> None:
        """Sequence b becomes what beam_idx[b] was."""
        held = self._cache()
        if held is None:
            super().reorder_cache(beam_idx)
        else:
            held.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence `repeats` times; the next single token fills a new decoder."""
        super().batch_repeat_interleave(repeats)
        self._stepper = None

    def batch_select_indices(self, indices: Tensor) -> None:
        """These sequences alone; the next single token fills a new decoder."""
        super().batch_select_indices(indices)
        self._stepper = None

    def reset(self) -> None:
        """Empty the layer."""
        self.keys = self.values = self._stepper = None
        self.is_initialized = False

    def _held(self) -> tuple[Tensor, Tensor]:
        """All keys and values; something was appended before."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def _cache(self) -> TokenCache | None:
        """The decoder, where it can cut and reorder sequences; another one is given up, and filled anew when needed."""
        held = self._stepper
        if held is not None and isinstance(held.decoder, TokenCache):
            return held.decoder
        self._stepper = None
        return None

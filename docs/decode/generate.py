"""Generates text with a language model through two caches, dense and pyramid, and prints both with their speed.

    python docs/decode/generate.py [--prompt-tokens 2048] [--tokens 48] [--top-k 8] [--seed 0] [--model smollm2] [--text FILE]

The model goes through transformers' attention interface with its own cache switched off: each layer has a cache here. The
prompt is attended to densely in both runs, and its keys fill the caches; from then on every new token attends through them.
Both runs draw their tokens with the same seed, so texts differ only where attention does. Needs the extra `hf`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pyramidbench import PyramidCache
from pyramidbench.model_files import find_model, import_transformers, load_model
from pyramidbench.texts import read_passage

INTERFACE = "pyramidbench_generate"


class Cache(Protocol):
    """What one layer needs."""

    def append(self, k: Tensor, v: Tensor) -> None: ...

    def attend(self, q: Tensor) -> Tensor: ...


Make = Callable[[Tensor, float], Cache]
"""A layer's cache, by its keys [1, G, T, D] and its softmax scale."""


class DenseCache:
    """Keys and values of one sequence, and dense attention to all of them."""

    def __init__(self, like: Tensor, scale: float, max_len: int) -> None:
        """like: keys [1, G, T, D], whose heads, dtype and device the cache takes."""
        self.k, self.v = (like.new_empty(1, like.shape[1], max_len, like.shape[3]) for _ in range(2))
        self.scale, self.length = scale, 0

    def append(self, k: Tensor, v: Tensor) -> None:
        end = self.length + k.shape[2]
        self.k[:, :, self.length : end], self.v[:, :, self.length : end] = k, v
        self.length = end

    def attend(self, q: Tensor) -> Tensor:
        # Every key is seen: the one query is the newest token.
        return _dense(q, self.k[:, :, : self.length], self.v[:, :, : self.length], self.scale, is_causal=False)


def _dense(q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )


@dataclass
class Layers:
    """The caches of a model's layers, made when a layer first shows its keys."""

    make: Make
    caches: dict[int, Cache] = field(default_factory=dict)

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _mask: Tensor | None,
        scaling: float,
        **_others: object,
    ) -> tuple[Tensor, None]:
        """transformers' interface: query [1, H, M, D], key and value [1, G, M, D] of the new tokens; returns [1, M, H, D]."""
        is_prompt = module.layer_idx not in self.caches
        if is_prompt:
            self.caches[module.layer_idx] = self.make(key, scaling)
        cache = self.caches[module.layer_idx]
        cache.append(key, value)
        output = _dense(query, key, value, scaling, is_causal=True) if is_prompt else cache.attend(query)
        return output.transpose(1, 2).contiguous(), None


@dataclass(frozen=True)
class Generated:
    """The new tokens, seconds for the prompt, and seconds for all tokens behind the first, which the prompt's pass gives."""

    tokens: list[int]
    prompt_s: float
    decode_s: float

    @property
    def tokens_per_s(self) -> float:
        return (len(self.tokens) - 1) / self.decode_s


def generate(network: Any, prompt: list[int], count: int, make: Make, *, seed: int, temperature: float) -> Generated:
    """Draw `count` tokens behind the prompt, one at a time, through a cache in each layer."""
    transformers = import_transformers()
    from transformers.masking_utils import sdpa_mask

    layers = Layers(make)
    transformers.AttentionInterface.register(INTERFACE, layers.attend)
    transformers.AttentionMaskInterface.register(INTERFACE, sdpa_mask)
    network.set_attn_implementation(INTERFACE)
    device = network.device
    generator = torch.Generator(device=device).manual_seed(seed)
    tokens: list[int] = []
    feed, position, began = torch.tensor([prompt], device=device), 0, time.perf_counter()
    prompt_s = 0.0
    with torch.inference_mode():
        for _ in range(count):
            place = torch.arange(position, position + feed.shape[1], device=device)[None]
            logits = (
                network(input_ids=feed, position_ids=place, use_cache=False, logits_to_keep=1).logits[0, -1].float()
            )
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            position += feed.shape[1]
            feed = drawn[None]
            tokens.append(int(drawn))
            if len(tokens) == 1:
                prompt_s, began = time.perf_counter() - began, time.perf_counter()
    return Generated(tokens, prompt_s, time.perf_counter() - began)


def makers(max_len: int, top_k: int) -> dict[str, Make]:
    """The two caches, by name; each is made for a layer's keys."""

    def pyramid(k: Tensor, scale: float) -> Cache:
        return PyramidCache(
            1, k.shape[1], k.shape[3], max_len, dtype=k.dtype, device=k.device, scale=scale, top_k=top_k
        )

    return {"dense": lambda k, scale: DenseCache(k, scale, max_len), "pyramid": pyramid}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, a GGUF file, a folder, or a Hugging Face name")
    parser.add_argument("--text", type=Path, help="the prompt's text (default: source of Python's standard library)")
    parser.add_argument("--prompt-tokens", type=int, default=2048, help="tokens of the text that are the prompt")
    parser.add_argument("--tokens", type=int, default=48, help="tokens to generate")
    parser.add_argument(
        "--top-k", type=int, default=8, help="blocks of 64 tokens by rank, besides the first and the last two"
    )
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    network, tokenizer = load_model(
        find_model(asked.model, None, print), "cuda" if torch.cuda.is_available() else "cpu"
    )
    passage = read_passage(asked.text)
    ids = tokenizer(passage.text[: 32 * asked.prompt_tokens], verbose=False).input_ids[: asked.prompt_tokens]
    print(
        f"{asked.model} on {network.device}, {len(ids)} tokens of {passage.label}, then {asked.tokens}; seed {asked.seed}"
    )
    results = {}
    for name, make in makers(len(ids) + asked.tokens, asked.top_k).items():
        sampling = {"seed": asked.seed, "temperature": asked.temperature}
        made = results[name] = generate(network, ids, asked.tokens, make, **sampling)
        print(f"\n== {name}: {made.tokens_per_s:.1f} tokens/s (prompt {made.prompt_s:.1f} s)")
        print(tokenizer.decode(made.tokens))
    same = [one == other for one, other in zip(results["dense"].tokens, results["pyramid"].tokens)]
    shared = same.index(False) if False in same else len(same)
    print(f"\nThe first {shared} of {len(same)} tokens are the same.")


if __name__ == "__main__":
    main()

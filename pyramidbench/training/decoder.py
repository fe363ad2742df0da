"""Decoder: a small causal language model whose attention is an argument of the call; its weights do not depend on it.

RMSNorm before each part, rotary positions, grouped key/value heads, SwiGLU, tied embedding (as Llama, arXiv 2302.13971).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pyramidbench.training.corpus import VOCABULARY

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention: q [B, H, N, D], k and v [B, G, N, D] to [B, H, N, D]."""
ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class Size:
    """Sizes of a decoder; the default has 14 million parameters."""

    layers: int = 8
    width: int = 384
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    hidden: int = 1024


class Decoder(nn.Module):
    """Next-token logits over VOCABULARY."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.apply(_initialise)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            for last in (layer.out, layer.down):
                nn.init.normal_(last.weight, std=0.02 / (2 * size.layers) ** 0.5)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        """tokens: int64 [B, N]. Returns the last states [B, N, width], for `logits`."""
        cosine, sine = rotation(tokens.shape[1], self.size.head_dim, tokens.device)
        states = self.embedding(tokens)
        for layer in self.layers:
            states = layer(states, cosine, sine, attend)
        return self.norm(states)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., VOCABULARY] of some states."""
        return nn.functional.linear(states, self.embedding.weight)


class Layer(nn.Module):
    """Attention, then a gated perceptron, each after a norm and added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.before, self.between = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        inner = size.heads * size.head_dim
        self.qkv = nn.Linear(size.width, inner + 2 * size.kv_heads * size.head_dim, bias=False)
        self.out = nn.Linear(inner, size.width, bias=False)
        self.gate = nn.Linear(size.width, 2 * size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, attend: Attend) -> Tensor:
        heads, kv_heads = self.size.heads, self.size.kv_heads
        parts = self.qkv(self.before(x)).unflatten(-1, (-1, self.size.head_dim)).transpose(1, 2)
        q, k, v = parts.split([heads, kv_heads, kv_heads], dim=1)
        attended = attend(rotated(q, cosine, sine), rotated(k, cosine, sine), v.contiguous())
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, value = self.gate(self.between(x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * value)


def rotation(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary encoding (arXiv 2104.09864), fp32 [N, D/2]."""
    frequency = ROPE_THETA ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angle = torch.arange(length, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x [B, heads, N, D] turned by its position, in x's dtype; the halves of D are pairs."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1).to(x.dtype)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)

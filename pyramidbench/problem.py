"""Problem: the sizes of one attention call. Everything that a method may depend on besides the tensors themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Pass = Literal["forward", "backward", "train", "decode"]
PASSES: tuple[Pass, ...] = get_args(Pass)
"""What a call does: the output; the gradients of q, k and v alone; both; or one step of generation: append, and attend."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Problem:
    """Sizes of one attention call; lengths in tokens, `scale` multiplies the logits (softmax scale).

    `direction` is the pass that is measured: "forward", "backward" (the gradients alone), "train" (both), or "decode": the
    queries are the newest tokens of sequences that are held already.
    """

    batch: int
    heads: int
    kv_heads: int
    seq_len_q: int
    seq_len_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool
    scale: float
    device: str = "cpu"
    direction: Pass = "forward"

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.heads // self.kv_heads

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def io_bytes(self) -> int:
        """Bytes of q, k, v and the output."""
        queries = self.batch * self.heads * self.seq_len_q * (self.head_dim + self.head_dim_v)
        keys = self.batch * self.kv_heads * self.seq_len_kv * (self.head_dim + self.head_dim_v)
        return self.itemsize * (queries + keys)

    @property
    def needs_gradients(self) -> bool:
        """Whether the pass computes gradients of q, k and v."""
        return self.direction in ("backward", "train")

    @property
    def output_bytes(self) -> int:
        """Bytes of the output, and so of the gradient that comes back to it."""
        return self.itemsize * self.batch * self.heads * self.seq_len_q * self.head_dim_v

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor | None = None, *, causal: bool, scale: float | None) -> Problem:
        """The problem that these tensors pose ([B, H, M, D], [B, G, N, D], [B, G, N, Dv]).

        Raises:
            ValueError: shapes, dtypes or devices that do not fit together; the message says which and what is accepted.
        """
        check_tensors(q, k, v)
        return cls(
            batch=q.shape[0],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            seq_len_q=q.shape[2],
            seq_len_kv=k.shape[2],
            head_dim=q.shape[3],
            head_dim_v=q.shape[3] if v is None else v.shape[3],
            dtype=str(q.dtype).removeprefix("torch."),
            causal=causal,
            scale=q.shape[3] ** -0.5 if scale is None else scale,
            device=q.device.type,
        )


def check_tensors(q: Tensor, k: Tensor, v: Tensor | None = None) -> None:
    """Raise ValueError unless q, k (and v) form one attention call."""
    named = {"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v}
    for name, tensor in named.items():
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; accepted: [batch, heads, sequence, head_dim]")
        if 0 in tensor.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; every size must be at least 1")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device} and q is {q.dtype} on {q.device}; "
                "give all tensors one dtype and one device"
            )
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"{name} is not contiguous in its last dimension; call .contiguous() on it first")
    if q.dtype not in DTYPES.values():
        raise ValueError(f"dtype {q.dtype} is not supported; accepted: {', '.join(DTYPES)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} differ in batch or head_dim")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot be shared by {k.shape[1]} key/value heads: not a multiple")
    if v is not None and v.shape[:3] != k.shape[:3]:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} differ in batch, heads or sequence")

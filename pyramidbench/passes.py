"""The passes with gradients: what one call of "backward" and of "train" does, and what it costs.

Blocks are constants: they are chosen without a graph, and gradients flow through the attention over them alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyramidbench.cost import Cost, StageCost
from pyramidbench.errors import UserError
from pyramidbench.method import BlockMethod, Method
from pyramidbench.problem import DTYPES, Pass, Problem
from pyramidbench.selection import BlockSelection, frozen

ATTENTION_WORK: dict[Pass, float] = {"forward": 1.0, "backward": 2.5, "train": 3.5}
"""Operations on attended pairs, in units of the forward's: it has two matrix products, and the backward five."""
SEED = 3
Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Training:
    """A method on tensors that want gradients: `leaves` are q, k and v, and `d_out` is what comes back to the output."""

    method: Method
    leaves: Gradients
    d_out: Tensor
    problem: Problem

    @classmethod
    def of(cls, method: Method, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Training:
        """Leaves that share the tensors' memory, and a seeded normal d_out [B, H, M, Dv]."""
        generator = torch.Generator(device=q.device).manual_seed(SEED)
        shape = (problem.batch, problem.heads, problem.seq_len_q, problem.head_dim_v)
        d_out = torch.randn(shape, generator=generator, device=q.device).to(DTYPES[problem.dtype])
        return cls(method, (_leaf(q), _leaf(k), _leaf(v)), d_out, problem)

    def select(self) -> BlockSelection | None:
        """The method's blocks, chosen without a graph; None where it chooses inside its attention."""
        if self.method.chooses_inside:
            return None
        q, k, _ = (leaf.detach() for leaf in self.leaves)
        with frozen(q.device):
            return self.method.select(q, k, self.problem)

    def attend(self, selection: BlockSelection | None) -> Tensor:
        """Attention over a selection, with the graph that its gradients need.

        Raises:
            UserError: the method's attention leaves no graph.
        """
        with torch.enable_grad():
            output = self.method.attend(*self.leaves, selection, self.problem)
        if not output.requires_grad:
            raise UserError(f"the attention of '{self.method.name}' passes no gradient; accepted: --pass forward")
        return output

    def backward(self, output: Tensor, d_out: Tensor | None = None) -> Gradients:
        """Gradients of q, k and v; the graph stays, so that this can be repeated."""
        upstream = self.d_out if d_out is None else d_out
        d_q, d_k, d_v = torch.autograd.grad(output, self.leaves, upstream, retain_graph=True)
        return d_q, d_k, d_v

    def train(self) -> Gradients:
        """Choose, attend and go back: one whole call, whose graph ends with it."""
        output = self.attend(self.select())
        d_q, d_k, d_v = torch.autograd.grad(output, self.leaves, self.d_out)
        return d_q, d_k, d_v


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def pass_cost(method: Method, problem: Problem) -> Cost:
    """Predicted operations and bytes of one call of the problem's pass, stage by stage.

    The backward reads the listed keys and values for the gradient of q, and the queries and gradients that list a block
    for those of k and v. Of pass backward it is the only stage, but memory holds what the forward before it left.
    """
    cost = method.cost(problem)
    if not problem.needs_gradients:
        return cost
    attend = cost.stage("attend")
    traffic = 2 * attend.bytes + _gradient_bytes(problem)
    backward = StageCost("backward", ATTENTION_WORK["backward"] * attend.flops, traffic)
    stages = (*cost.stages, backward) if problem.direction == "train" else (backward,)
    held = cost.workspace_bytes + _gradient_bytes(problem) + saved_bytes(method, problem)
    return Cost(stages, held, cost.pyramid_bytes, cost.lists_bytes)


def _gradient_bytes(problem: Problem) -> float:
    """Bytes of the gradients of q, k and v: as many as these have themselves."""
    return float(problem.io_bytes - problem.output_bytes)


def saved_bytes(method: Method, problem: Problem) -> float:
    """What lives from forward to backward besides inputs and output: two fp32 numbers a row (log-sum-exp, and the product of
    output and its gradient), and the lists with their transposition, int32 each."""
    rows = 8.0 * problem.batch * problem.heads * problem.seq_len_q
    listed = method.planned(problem).listed if isinstance(method, BlockMethod) else 0
    return rows + 8.0 * problem.batch * problem.kv_heads * listed

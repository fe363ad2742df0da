"""The call that is profiled: one cell's pass, with its outermost stages marked."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyramidbench.cell import Cell
from pyramidbench.cost import Cost
from pyramidbench.errors import UserError
from pyramidbench.gate import check_call
from pyramidbench.judging import Loaded
from pyramidbench.method import Method
from pyramidbench.passes import Training, pass_cost
from pyramidbench.problem import Problem
from pyramidbench.profiling.spans import SELECT, Spans
from pyramidbench.selection import frozen


@dataclass(frozen=True)
class ProfiledCall:
    """A cell's method on its tensors. Calling it with spans runs the pass once, stage by stage."""

    cell: Cell
    method: Method
    tensors: tuple[Tensor, Tensor, Tensor]
    problem: Problem
    training: Training | None

    @classmethod
    def of(cls, cell: Cell, device: torch.device) -> ProfiledCall:
        """Loads the tensors, and checks the method's result on them, which also compiles what it needs.

        Raises:
            UserError: the method cannot run here or cannot do the problem.
            GateFailure: its output or its blocks are wrong; a wrong result has no speed.
        """
        method, problem = cell.make_method(), cell.problem(device.type)
        reason = method.unavailable() or method.unsupported(problem)
        if reason is not None:
            raise UserError(f"'{cell.method}' cannot be profiled here: {reason}.")
        loaded = Loaded.of(cell, device)
        q, k, v = loaded.q, loaded.k, loaded.v
        check_call(method, q, k, v, problem)
        return cls(
            cell, method, (q, k, v), problem, Training.of(method, q, k, v, problem) if problem.needs_gradients else None
        )

    def __call__(self, spans: Spans) -> object:
        q, k, v = self.tensors
        with frozen(q.device), spans(SELECT):
            selection = self.method.select(q, k, self.problem)
        with spans("attend"):
            if self.training is None:
                return self.method.attend(q, k, v, selection, self.problem)
            output = self.training.attend(selection)
        with spans("backward"):
            return self.training.backward(output)

    def whole(self) -> object:
        """The pass once, with nothing marked; of pass backward too, the forward and its backward."""
        if self.training is not None:
            return self.training.train()
        return self.method(*self.tensors, self.problem)

    @property
    def cost(self) -> Cost:
        """Operations and bytes by the method's formulas."""
        problem = replace(self.problem, direction="train") if self.training else self.problem
        return pass_cost(self.method, problem)

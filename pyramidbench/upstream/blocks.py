"""FedBlocks: a method whose attention is another package's kernel and whose blocks are chosen by a method of ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import AfterValidator
from torch import Tensor

from pyramidbench.cost import Cost
from pyramidbench.errors import UserError
from pyramidbench.method import BlockMethod
from pyramidbench.problem import Problem
from pyramidbench.registry import create, method_class, split_spec
from pyramidbench.selection import BlockSelection

SHARED = ("top_k", "block_size", "query_tile", "sink_blocks", "local_blocks", "forced_in_budget", "implementation")


def _is_a_rule(spec: str) -> str:
    cls = method_class(split_spec(spec)[0])
    if not issubclass(cls, BlockMethod) or issubclass(cls, FedBlocks) or cls.chooses_inside:
        raise UserError(f"'{spec}' gives no lists; accepted: a block method with a selection of its own, such as flat")
    return spec


Rule = Annotated[str, AfterValidator(_is_a_rule)]


@dataclass(frozen=True)
class FedBlocks(BlockMethod):
    """What adapters of block-sparse kernels share: `rule` names the method ("name" or "name:preset") whose lists they attend
    to, under the budget that all block methods have. With the same rule, two of them differ in the kernel alone.

    A subclass gives `kernel` (what the row calls it), `gap`, `limit` and `attend`.
    """

    kernel: ClassVar[str] = ""
    selection_cost: ClassVar[str] = "as its rule"

    rule: Rule = "flat"

    def chooser(self) -> BlockMethod:
        """The method that chooses, with this one's budget."""
        made = create(self.rule, {name: getattr(self, name) for name in SHARED})
        assert isinstance(made, BlockMethod)
        return made

    @property
    def adaptive(self) -> bool:
        """As the rule: where that keeps as much as it needs, K has no part in it."""
        return self.chooser().adaptive

    def walked_levels(self, problem: Problem) -> int:
        return self.chooser().walked_levels(problem)

    def gap(self) -> str | None:
        """Why the kernel is not on this machine and what to do about it, in one line; None where it is."""
        raise NotImplementedError

    def limit(self, problem: Problem) -> str | None:
        """Why the kernel cannot do a problem with these blocks, or None."""
        raise NotImplementedError

    def unavailable(self) -> str | None:
        return self.gap() or self.chooser().unavailable()

    def unsupported(self, problem: Problem) -> str | None:
        return super().unsupported(problem) or self.limit(problem) or self.chooser().unsupported(problem)

    def backend(self, problem: Problem) -> str:
        return f"{self.chooser().backend(problem).partition('+')[0]}+{self.kernel}"

    def select(self, q: Tensor, k: Tensor, problem: Problem) -> BlockSelection | None:
        return self.chooser().select(q, k, problem)

    def cost(self, problem: Problem) -> Cost:
        return self.chooser().cost(problem)

    def sizes_limit(self, block_size: int, query_tile: int) -> str | None:
        """Why a kernel for one size of block and tile cannot attend to these lists, or None."""
        if (self.block_size, self.query_tile) == (block_size, query_tile):
            return None
        return (
            f"{self.kernel} attends to blocks of {block_size} keys for {query_tile} queries, not to blocks of "
            f"{self.block_size} for {self.query_tile}; give --block-size {block_size} --query-tile {query_tile}"
        )

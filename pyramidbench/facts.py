"""What one wants to know of a method before trying it: what it keeps, how its cost grows, which passes it has, whether it runs
here. Read off the method itself where that is possible, so that it cannot be out of date."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import product

from pydantic import BaseModel

from pyramidbench.cost import Cost
from pyramidbench.method import BlockMethod, Method
from pyramidbench.problem import Pass, Problem
from pyramidbench.registry import create, method_names, preset_names
from pyramidbench.units import one_line

SHORT = 1 << 20
"""Length between which and four times which the growth of a cost is read off, tokens: K blocks are few of all, and what is
quadratic outweighs the rest."""
BY_TOKEN = 64
"""How much shorter that is where every token has its own blocks, which take their time to be counted."""
GROWTH = ((1.5, "O(1)"), (4.2, "O(N)"), (6.0, "O(N log N)"), (float("inf"), "O(N²)"))
"""Names by how much four times the length costs: two levels more make some five times of four."""
NOTHING = 4.0
"""Operations and bytes per query up to which choosing costs nothing: a window's lists are written, and no score is."""


class Facts(BaseModel):
    """One row of `pyramidbench list methods`. `unavailable` says why it cannot run here, in one line."""

    name: str
    kind: str
    granularity: str
    selection_cost: str
    forward: bool
    backward: bool
    decode: bool
    text: str
    presets: tuple[str, ...]
    unavailable: str | None = None

    @property
    def summary(self) -> str:
        """What it is, in a sentence: the first line of its description."""
        return self.text.partition("\n")[0]

    @property
    def passes(self) -> str:
        """F, B and D for the passes that there are, such as "F B D" or "F – D"."""
        return " ".join(
            letter if has else "–" for letter, has in zip("FBD", (self.forward, self.backward, self.decode))
        )


def facts(name: str) -> Facts:
    """The facts of a method by name, with its default preset. Of a plug-in that fails when asked, that it does."""
    if name in method_names():
        return _facts(name)
    try:
        return _facts(name)
    except Exception as error:  # what a plug-in does wrong must not stop the list
        fault = f"method '{name}' is broken: {one_line(f'{type(error).__name__}: {error}')}"
        unknown = {"kind": "selection", "granularity": "unknown", "selection_cost": "unknown"}
        return Facts(
            name=name, **unknown, forward=False, backward=False, decode=False, text=fault, presets=(), unavailable=fault
        )


def _facts(name: str) -> Facts:
    method = create(name)
    return Facts(
        name=name,
        kind=method.kind,
        granularity=method.granularity,
        selection_cost=method.selection_cost or selection_growth(method),
        forward=can(method, "forward"),
        backward=can(method, "train"),
        decode=can(_by_token(method), "decode"),
        text=inspect.getdoc(type(method)) or "",
        presets=preset_names(name),
        unavailable=method.unavailable(),
    )


def can(method: Method, direction: Pass) -> bool:
    """Whether a method can do a pass on some ordinary problem of some device, whatever is installed here."""
    return ordinary_problem(method, direction) is not None


def ordinary_problem(method: Method, direction: Pass = "forward", *, length: int = SHORT) -> Problem | None:
    """The first ordinary problem that a method can do: on either device, causal or not, with grouped heads or without; a
    single query at the end of its keys in pass decode."""
    for device, causal, kv_heads in product(("cuda", "cpu"), (True, False), (16, 1)):
        dtype = "bfloat16" if device == "cuda" else "float32"
        queries = 1 if direction == "decode" else length
        problem = Problem(1, 16, kv_heads, queries, length, 64, 64, dtype, causal, 0.125, device, direction)
        if method.unsupported(problem) is None:
            return problem
    return None


def selection_growth(method: Method) -> str:
    """How the cost of choosing grows with the length, by the method's own formula: "none", "O(N)", "O(N log N)", "O(N²)"."""
    method = _in_tiles(method)
    by_token = isinstance(method, BlockMethod) and method.query_tile == 1
    length = SHORT // BY_TOKEN if by_token else SHORT
    problem = ordinary_problem(method, length=length)
    if problem is None:
        return "unknown"
    longer = replace(problem, seq_len_q=4 * length, seq_len_kv=4 * length)
    short, long = _choosing(method.cost(problem)), _choosing(method.cost(longer))
    if short <= NOTHING * problem.batch * problem.heads * problem.seq_len_q:
        return "none"
    return next(name for limit, name in GROWTH if long / short < limit)


def _by_token(method: Method) -> Method:
    """The method as a sweep decodes with it: every new token has a set of its own."""
    return replace(method, query_tile=1) if isinstance(method, BlockMethod) else method


def _in_tiles(method: Method) -> Method:
    """The method with tiles of 64 where it takes them: growth is the same, and counted the sooner."""
    if not isinstance(method, BlockMethod):
        return method
    tiled = replace(method, query_tile=64)
    return method if ordinary_problem(tiled) is None else tiled


def _choosing(cost: Cost) -> float:
    """Operations of all stages but the attention."""
    return sum(stage.flops for stage in cost.stages if stage.stage not in ("attend", "backward"))

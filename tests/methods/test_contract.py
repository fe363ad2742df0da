"""What every registered method promises, whatever it is: no test file of its own is needed."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pyramidbench.cost import planned_blocks
from pyramidbench.facts import facts, ordinary_problem, selection_growth
from pyramidbench.method import BlockMethod, Method
from pyramidbench.problem import Problem
from pyramidbench.rates import work
from pyramidbench.registry import create, method_class, method_names, preset_names
from pyramidbench.selection import BlockSelection
from pyramidbench.upstream.blocks import FedBlocks

QKV = tuple[Tensor, Tensor, Tensor]
MakeTensors = Callable[..., QKV]
MaskedDense = Callable[..., tuple[Tensor, Tensor]]
CausalMask = Callable[[int, int], Tensor]

PLAIN = Problem(1, 2, 1, 64, 64, 8, 8, "float32", True, 1.0)
OWN = os.environ.get("PYRAMIDBENCH_CONTRACT")
"""The path of a method file of one's own, to be tested in place of the methods here."""
NAMES = (OWN,) if OWN else method_names()
ALL_SPECS = [f"{name}:{preset}" if preset != "default" else name for name in NAMES for preset in preset_names(name)]
PROBES = {"probe_rows": 4, "probe_every": 16}
SMALL: dict[str, dict[str, object]] = {
    "xattention": {"stride": 4},
    "vertical_slash": PROBES,
    "flexprefill": PROBES | {"min_budget": 0},
    "spargeattn": {"similarity": 0.0},
}
"""Parameters that are sizes in tokens, where the defaults are longer than the tensors here; and the demand that a block's keys
be alike, which random ones never meet, so that everything would be kept."""


def small(spec: str, tile: int, top_k: int = 3, block_size: int = 8, **parameters: object) -> Method:
    """The method of a spec, with blocks and tiles small enough for a test."""
    name = spec.partition(":")[0]
    if issubclass(method_class(name), BlockMethod):
        parameters |= {"top_k": top_k, "block_size": block_size, "query_tile": tile, **SMALL.get(name, {})}
    return create(spec, parameters)


def able() -> list[str]:
    """Every method and preset that can do a plain problem here; presets that differ in these sizes alone count once."""
    able: dict[tuple[str, str], str] = {}
    for spec in ALL_SPECS:
        method = create(spec)
        if method.unavailable() is None and method.unsupported(PLAIN) is None:
            able.setdefault((method.name, repr(small(spec, 4))), spec)
    return list(able.values())


SPECS = able()
BLOCK_SPECS = [spec for spec in SPECS if issubclass(method_class(spec.partition(":")[0]), BlockMethod)]
ADAPTIVE = [spec for spec in BLOCK_SPECS if getattr(create(spec), "adaptive", False)]
BUDGETED = [spec for spec in BLOCK_SPECS if spec not in ADAPTIVE]
TILES = [1, 12]


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> str:
    """Every method and preset that can do a plain problem here."""
    return str(request.param)


def whole(spec: str, tile: int) -> Method:
    """The method with a budget that leaves nothing out: K of all blocks, or p of all attention."""
    return small(spec, tile, top_k=16, **({"top_p": 1.0} if spec in ADAPTIVE else {}))


def problem_of(method: Method, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Problem:
    """The problem, or a skip with the method's own words where it says that it cannot do it."""
    problem = Problem.of(q, k, v, causal=causal, scale=None)
    reason = method.unsupported(problem)
    if reason is not None:
        pytest.skip(reason)
    return problem


def training_of(method: Method, q: Tensor, k: Tensor, v: Tensor) -> Problem:
    """The problem in a pass with gradients, or a skip where the method has none."""
    problem = replace(Problem.of(q, k, v, causal=True, scale=None), direction="train")
    reason = method.unsupported(problem)
    if reason is not None:
        pytest.skip(reason)
    return problem


def selected(method: BlockMethod, q: Tensor, k: Tensor, problem: Problem) -> BlockSelection:
    """The selection, checked."""
    selection = method.select(q, k, problem)
    assert selection is not None
    selection.check()
    assert selection.tiling == method.tiling(problem)
    return selection


def reach(selection: BlockSelection | None, problem: Problem, mask: Tensor) -> Tensor:
    """bool [B, H, M, N]: what attention over the selection sees."""
    if selection is None:
        return mask.expand(problem.batch, problem.heads, -1, -1)
    blocks = selection.mask().repeat_interleave(problem.heads // selection.indices.shape[1], 1)
    rows = blocks.repeat_interleave(selection.query_tile, 2)[:, :, : problem.seq_len_q]
    return rows.repeat_interleave(selection.block_size, 3)[..., : problem.seq_len_kv] & mask


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_a_method_that_cannot_run_here_says_why(spec: str) -> None:
    reason = create(spec).unavailable() or create(spec).unsupported(PLAIN)
    assert reason is None or len(reason.split()) >= 4


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_it_says_what_it_keeps_and_where_it_is_from(spec: str) -> None:
    cls = method_class(spec.partition(":")[0])
    assert cls.__doc__
    assert not cls.__doc__.startswith(f"{cls.__name__}("), "the docstring is the one that dataclass makes"
    assert "Cost:" in cls.__doc__ or "cost" in cls.__doc__.lower()
    assert cls.source
    assert cls.kind in ("dense", "selection", "bound")
    module = inspect.getmodule(cls)
    assert module is not None
    assert module.__doc__


NAMED_GROWTH = {"none": "none", "O(N)": "O(N)", "O(N log N)": "O(N log N)"}


@pytest.mark.parametrize("name", NAMES)
def test_what_it_says_of_itself_is_so(name: str) -> None:
    """Its cost of choosing grows as it says, and it takes the tiles and blocks that its granularity names, and no others."""
    method, told = create(name), facts(name)
    assert told.kind in ("dense", "selection", "bound")
    assert told.forward, "there is no ordinary problem that it can do"
    if told.selection_cost != "as its rule":
        # A growth with a block size in it, such as O(N²/C), is one in N² by the formula.
        assert NAMED_GROWTH.get(told.selection_cost, "O(N²)") == selection_growth(method)
    tile, _, block = told.granularity.partition(" × ")
    if not isinstance(method, BlockMethod):
        assert told.granularity == "all keys"
        return
    problem = ordinary_problem(method)
    assert problem is not None
    for parameter, size, odd in (("query_tile", tile, 48), ("block_size", block, 80)):
        assert size == "any" or re.fullmatch(r"\d+s?", size)
        other = odd if size == "any" else int(size.rstrip("s")) + 1
        said = create(name, {parameter: other}).unsupported(problem)
        if size != "any":
            assert said is not None, f"{parameter} = {other} is accepted"
            assert getattr(method, parameter) % int(size.rstrip("s")) == 0
        elif name not in POWERS_OF_TWO:
            assert said is None, said


POWERS_OF_TWO = ("fla_nsa",)
"""Methods that take any size of block that is a power of two."""


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_parameters_survive_json(spec: str) -> None:
    method = create(spec)
    values = json.loads(json.dumps(dataclasses.asdict(method)))
    assert create(spec.partition(":")[0], values) == method


SIZES = {
    "square": (50, 50, True),
    "ragged": (75, 75, True),
    "below-a-block": (7, 7, True),
    "a-block": (8, 8, True),
    "above-a-block": (9, 9, True),
    "two-blocks-and-17": (33, 33, True),
    "one-query": (1, 100, True),
    "more-keys": (30, 100, True),
    "more-queries": (60, 25, True),
    "full": (50, 50, False),
    "full-uneven": (30, 75, False),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("tile", "heads"), [(1, (3, 1)), (12, (4, 2))], ids=["token-3:1", "tile-4:2"])
def test_output_is_exact_attention_over_what_was_selected(
    spec: str,
    tile: int,
    size: str,
    heads: tuple[int, int],
    tensors: MakeTensors,
    masked_dense: MaskedDense,
    causal_mask: CausalMask,
) -> None:
    queries, keys, causal = SIZES[size]
    q, k, v = tensors(queries=queries, keys=keys, batch=2, heads=heads[0], kv_heads=heads[1])
    before = [x.clone() for x in (q, k, v)]
    method = small(spec, tile)
    problem = problem_of(method, q, k, v, causal)
    selection = method.select(q, k, problem)
    output = method.attend(q, k, v, selection, problem)
    mask = causal_mask(queries, keys) if causal else torch.ones(queries, keys, dtype=torch.bool)
    expected, _ = masked_dense(q, k, v, reach(selection, problem, mask))
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(method(q, k, v, problem), output)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True)), "an input was modified"


@pytest.mark.parametrize("size", ["square", "ragged", "one-query", "more-keys", "more-queries", "full", "full-uneven"])
@pytest.mark.parametrize("tile", TILES)
def test_a_full_budget_is_dense_attention(
    spec: str, tile: int, size: str, tensors: MakeTensors, masked_dense: MaskedDense, causal_mask: CausalMask
) -> None:
    queries, keys, causal = SIZES[size]
    q, k, v = tensors(queries=queries, keys=keys, heads=4, kv_heads=2)
    method = whole(spec, tile)
    problem = problem_of(method, q, k, v, causal)
    mask = causal_mask(queries, keys) if causal else torch.ones(queries, keys, dtype=torch.bool)
    expected, _ = masked_dense(q, k, v, mask)
    torch.testing.assert_close(method(q, k, v, problem), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("dtype", "changed"),
    [(torch.float32, 5), (torch.float32, 48), (torch.float32, 61), (torch.float64, 48)],
    ids=["float32-5", "float32-48", "float32-61", "float64-48"],
)
def test_the_future_changes_nothing(
    spec: str, tile: int, dtype: torch.dtype, changed: int, tensors: MakeTensors
) -> None:
    """Rows before a changed key and value choose and attend as they did, bit for bit.

    Two steps, since a row's last bit may depend on the blocks of the rows after it: the twin gathers neighbours' blocks once
    for all of them, and where later rows choose others, the same products are added up in another order.
    """
    q, k, v = tensors(queries=100, heads=4, kv_heads=2, dtype=dtype)
    method = small(spec, tile)
    problem = problem_of(method, q, k, v)
    generator = torch.Generator().manual_seed(1)
    far_k, far_v = k.clone(), v.clone()
    for x in (far_k, far_v):
        x[:, :, changed:] = 1e4 * torch.randn(x[:, :, changed:].shape, generator=generator, dtype=dtype)
    selection, far_selection = (method.select(q, x, problem) for x in (k, far_k))
    first, second = method.attend(q, k, v, selection, problem), method.attend(q, far_k, far_v, selection, problem)
    assert torch.equal(first[:, :, :changed], second[:, :, :changed])
    assert not torch.equal(first[:, :, changed:], second[:, :, changed:])
    # A bound may look at a tile's whole attention: it is causal by tiles.
    rows = changed // tile * tile if method.kind == "bound" else changed
    if selection is not None and far_selection is not None:
        tiles = -(-rows // tile)
        assert torch.equal(selection.mask()[:, :, :tiles], far_selection.mask()[:, :, :tiles])
    again = method(q, far_k, far_v, problem)[:, :, :rows]
    torch.testing.assert_close(
        again, first[:, :, :rows], rtol=0, atol=8 * torch.finfo(dtype).eps * float(v.abs().max())
    )


@pytest.mark.parametrize("tile", TILES)
def test_permuting_the_heads_of_a_group_permutes_the_output(spec: str, tile: int, tensors: MakeTensors) -> None:
    q, k, v = tensors(queries=80, heads=6, kv_heads=2)
    order = torch.tensor([1, 2, 0, 5, 3, 4])
    method = small(spec, tile)
    problem = problem_of(method, q, k, v)
    torch.testing.assert_close(method(q[:, order], k, v, problem), method(q, k, v, problem)[:, order])


@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
def test_a_query_head_reads_its_own_key_value_head(spec: str, group: int, tensors: MakeTensors) -> None:
    q, k, v = tensors(queries=40, heads=2 * group, kv_heads=2)
    v = torch.tensor([3.0, 5.0], dtype=v.dtype)[None, :, None, None].expand_as(v).contiguous()
    method = small(spec, 4)
    output = method(q, k, v, problem_of(method, q, k, v))
    torch.testing.assert_close(output[:, :group], torch.full_like(output[:, :group], 3))
    torch.testing.assert_close(output[:, group:], torch.full_like(output[:, group:], 5))


def test_transposed_views_and_wider_values(spec: str, tensors: MakeTensors) -> None:
    """[B, S, H, D] tensors seen as [B, H, S, D], with N ≠ H and Dv ≠ D."""
    q, k, v = tensors(queries=45, heads=4, kv_heads=2, dim=8, dim_v=12)
    method = small(spec, 4)
    problem = problem_of(method, q, k, v)
    q2, k2, v2 = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    torch.testing.assert_close(method(q2, k2, v2, problem), method(q, k, v, problem))


@pytest.mark.parametrize("in_budget", [False, True], ids=["forced-on-top", "forced-in-budget"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("budgeted", BUDGETED)
def test_the_planned_blocks_are_selected(budgeted: str, in_budget: bool, tile: int, tensors: MakeTensors) -> None:
    """At one budget all methods list the same number of blocks in every row, and the cost counts their pairs."""
    q, k, v = tensors(queries=100, heads=4, kv_heads=2)
    for top_k in (0, 1, 2, 3, 5, 7, 17):
        method = small(budgeted, tile, top_k, forced_in_budget=in_budget)
        assert isinstance(method, BlockMethod)
        problem = problem_of(method, q, k, v)
        selection, planned = selected(method, q, k, problem), method.planned(problem)
        tiling, tiles = method.tiling(problem), torch.arange(method.tiling(problem).tiles)
        forced = tiling.forced(tiles, method.sinks(problem), method.locals(problem))
        ranked = (top_k - forced.count()).clamp(min=0) if in_budget else torch.full_like(tiles, top_k)
        expected = forced.count() + torch.minimum(ranked, tiling.eligible(tiles, forced))
        assert torch.equal(selection.counts.long(), expected.expand_as(selection.counts)), f"top_k = {top_k}"
        assert planned.listed == int(expected.sum())
        assert (selection.pairs() == planned.pairs).all()
        assert selection.density() == pytest.approx(planned.pairs / tiling.visible_pairs())


@pytest.mark.parametrize("tile", [1, 64, 128])
@pytest.mark.parametrize("name", [spec for spec in BUDGETED if ":" not in spec])
def test_at_one_budget_all_keep_as_many_blocks(name: str, tile: int) -> None:
    """However a rule counts: K ranked blocks beside one sink and two local ones; presets may have a window of their own."""
    problem = replace(PLAIN, seq_len_q=4096, seq_len_kv=4096)
    method = create(name, {"query_tile": tile})
    assert isinstance(method, BlockMethod)
    method = replace(method, top_k=method.own_top_k(8, problem))
    assert method.shared_top_k(problem) == 8
    shared = planned_blocks(method.tiling(problem), 8, 1, 2)
    assert (method.planned(problem).listed, method.planned(problem).pairs) == (shared.listed, shared.pairs)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("adaptive", ADAPTIVE)
def test_an_adaptive_method_chooses_its_own_budget(adaptive: str, tile: int, tensors: MakeTensors) -> None:
    """A larger p never keeps less, nothing is kept twice, K has no part in it, and the plan is what it keeps at most."""
    q, k, v = tensors(queries=100, heads=4, kv_heads=2)
    found = []
    for top_p in (0.0, 0.3, 0.7, 0.95, 1.0):
        method, other = small(adaptive, tile, top_p=top_p), small(adaptive, tile, 9, top_p=top_p)
        assert isinstance(method, BlockMethod)
        assert isinstance(other, BlockMethod)
        problem = problem_of(method, q, k, v)
        selection = selected(method, q, k, problem)
        tiling, tiles = method.tiling(problem), torch.arange(method.tiling(problem).tiles)
        forced = tiling.forced(tiles, 1, 2)
        assert bool((selection.counts >= forced.count()).all())
        assert int(selection.counts[0, 0].sum()) <= method.planned(problem).listed
        assert torch.equal(selected(other, q, k, problem).indices, selection.indices)
        found.append(selection.counts)
    assert all(bool((more >= less).all()) for less, more in itertools.pairwise(found))
    assert torch.equal(found[-1].long(), (forced.count() + tiling.eligible(tiles, forced)).expand_as(found[-1]))
    assert bool((found[0] < found[-1]).any()), "p decides nothing"


@pytest.mark.parametrize("block_spec", BLOCK_SPECS)
def test_the_row_tells_what_was_selected(block_spec: str, tensors: MakeTensors) -> None:
    q, k, v = tensors(queries=100, heads=4, kv_heads=2)
    method = small(block_spec, 12)
    assert isinstance(method, BlockMethod)
    problem = problem_of(method, q, k, v)
    selection = selected(method, q, k, problem)
    told = work(method, problem, selection)
    attended = reach(selection, problem, torch.ones(100, 100, dtype=torch.bool).tril()).sum()
    assert told["density"] == pytest.approx(float(attended) / (4 * 100 * 101 / 2))
    assert told["selected_blocks"] == pytest.approx(float((selection.indices >= 0).sum(-1).double().mean()))


@pytest.mark.parametrize("size", ["ragged", "below-a-block", "more-keys", "more-queries", "full", "full-uneven"])
@pytest.mark.parametrize("tile", TILES)
def test_the_cost_of_attention_is_that_of_the_attended_pairs(
    spec: str, size: str, tile: int, tensors: MakeTensors
) -> None:
    queries, keys, causal = SIZES[size]
    q, k, v = tensors(queries=queries, keys=keys, batch=2, heads=4, kv_heads=2, dim=8)
    method = small(spec, tile)
    problem = problem_of(method, q, k, v, causal)
    selection = method.select(q, k, problem)
    if selection is None:
        seen = sum(min(keys, max(0, i + keys - queries + 1)) if causal else keys for i in range(queries))
        pairs = 8 * seen
    else:
        pairs = int(selection.pairs().sum()) * 4 * 2 // selection.counts.shape[1] // 2
    planned = method.cost(problem).stage("attend").flops
    if spec in ADAPTIVE:
        assert planned >= 4 * 8 * pairs
    elif causal or keys % 8 == 0 or selection is None:
        assert planned == 4 * 8 * pairs
    else:
        # The ragged last block may be among the kept ones: then the plan is that much too high.
        assert 0 <= planned - 4 * 8 * pairs <= 4 * 8 * 8 * queries * (8 - keys % 8)


def test_costs_are_positive_and_grow_with_the_length(spec: str, tensors: MakeTensors) -> None:
    method = create(spec)
    short, long = (
        method.cost(problem_of(method, *tensors(queries=n, dim=64, dtype=torch.float32))) for n in (1024, 4096)
    )
    assert 0 < short.flops < long.flops
    assert 0 < short.bytes < long.bytes
    assert 0 <= short.workspace_bytes <= long.workspace_bytes
    assert all(stage.flops >= 0 and stage.bytes >= 0 for stage in long.stages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_the_error_is_that_of_the_dtype(
    spec: str,
    dtype: torch.dtype,
    tile: int,
    tensors: MakeTensors,
    masked_dense: MaskedDense,
    causal_mask: CausalMask,
) -> None:
    q, k, v = tensors(queries=100, heads=4, kv_heads=2, dim=16, dtype=dtype)
    method = small(spec, tile)
    problem = problem_of(method, q, k, v)
    selection = method.select(q, k, problem)
    output = method.attend(q, k, v, selection, problem)
    assert output.dtype == dtype
    mask = reach(selection, problem, causal_mask(100, 100))
    expected, _ = masked_dense(q, k, v, mask)
    wide_k, wide_v = (x.repeat_interleave(2, 1) for x in (k, v))
    plain = (q @ wide_k.mT * 0.25).masked_fill(~mask, -torch.inf).softmax(-1) @ wide_v
    allowed = 2 * (
        float((plain.double() - expected).abs().max()) + torch.finfo(dtype).eps * float(expected.abs().max())
    )
    assert float((output.double() - expected).abs().max()) <= allowed


@pytest.mark.parametrize("tile", TILES)
def test_gradients_are_those_of_the_frozen_selection(
    spec: str, tile: int, tensors: MakeTensors, masked_dense: MaskedDense, causal_mask: CausalMask
) -> None:
    q, k, v = tensors(queries=60, heads=4, kv_heads=2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    method = small(spec, tile)
    problem = training_of(method, q, k, v)
    output = method(q, k, v, problem)
    with torch.no_grad():
        selection = method.select(q, k, problem)
    expected, _ = masked_dense(q, k, v, reach(selection, problem, causal_mask(60, 60)))
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    ours, theirs = (torch.autograd.grad(x, leaves, upstream) for x in (output, expected))
    for one, other in zip(ours, theirs, strict=True):
        assert one.isfinite().all()
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("changed", [5, 48])
def test_no_gradient_comes_from_the_future(spec: str, tile: int, changed: int, tensors: MakeTensors) -> None:
    """Later keys and values change no bit of an earlier query's gradient, and get exactly nothing from earlier outputs."""
    q, k, v = tensors(queries=60, heads=4, kv_heads=2)
    method = small(spec, tile)
    problem = training_of(method, q, k, v)
    rows = changed // tile * tile if method.kind == "bound" else changed
    found = []
    for factor in (1, 1e3):
        later = torch.ones(60, 1, dtype=q.dtype)
        later[changed:] = factor
        leaves = [x.clone().requires_grad_() for x in (q, k * later, v * later)]
        output = method(*leaves, problem)
        found.append(torch.autograd.grad(output[:, :, :rows].square().sum(), leaves))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert all(bool((gradient[:, :, changed:] == 0).all()) for gradient in found[0])


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_one_input_alone_can_require_a_gradient(spec: str, wanted: str, tensors: MakeTensors) -> None:
    inputs = dict(zip("qkv", tensors(queries=60, heads=4, kv_heads=2), strict=True))
    method = small(spec, 12)
    problem = training_of(method, *inputs.values())
    every = [x.clone().requires_grad_() for x in inputs.values()]
    expected = dict(zip("qkv", torch.autograd.grad(method(*every, problem).square().sum(), every), strict=True))
    leaf = inputs[wanted].requires_grad_()
    (found,) = torch.autograd.grad(method(*inputs.values(), problem).square().sum(), leaf)
    torch.testing.assert_close(found, expected[wanted])


@pytest.mark.parametrize("budgeted", BUDGETED)
def test_a_choice_is_a_constant_to_gradients(budgeted: str, tensors: MakeTensors) -> None:
    """What the choice computes is not kept for the backward, and autocast does not move it."""
    q, k, v = (x.requires_grad_() for x in tensors(queries=60, heads=4, kv_heads=2, dtype=torch.float32))
    method = small(budgeted, 12)
    if isinstance(method, FedBlocks):
        pytest.skip("the attention is another package's, which keeps for its backward what it likes")
    problem = training_of(method, q, k, v)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        method(q, k, v, problem)
    selection = method.select(q.detach(), k.detach(), problem)
    assert selection is not None
    lists = selection.indices.numel() + selection.counts.numel()
    assert sum(kept) == 2 * q.numel() + k.numel() + v.numel() + q[..., 0].numel() + lists
    attend, seen = method.attend, []
    object.__setattr__(method, "attend", lambda *given: seen.append(given[3]) or attend(*given))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        method(q, k, v, problem)
    assert torch.equal(seen[0].indices, selection.indices)


def test_the_same_call_gives_the_same_bits(spec: str, tensors: MakeTensors) -> None:
    q, k, v = tensors(queries=100, heads=4, kv_heads=2, dtype=torch.float32)
    method = small(spec, 12)
    problem = problem_of(method, q, k, v)
    assert torch.equal(method(q, k, v, problem), method(q, k, v, problem))


def test_it_names_the_implementation_that_runs(spec: str, tensors: MakeTensors) -> None:
    method = small(spec, 4)
    assert method.backend(problem_of(method, *tensors(queries=8)))

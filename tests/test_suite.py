"""Suites: TOML and flags to cells, and what their messages say."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pyramidbench.capture_file import InputDescription
from pyramidbench.cell import Cell
from pyramidbench.errors import UserError
from pyramidbench.registry import method_class, method_names, parameter_names, split_spec
from pyramidbench.suite import Suite, choose_suite, load_suite, suite_from_flags, suite_names

FILE = "model.safetensors"
Describe = Callable[[str], InputDescription | None]


@pytest.fixture
def describe() -> Describe:
    """A capture of 8192 tokens, 9 heads on 3, in five layers; every other input is synthetic."""
    held = SimpleNamespace(
        batch=2, heads=9, kv_heads=3, head_dim=64, head_dim_v=32, seq_len=8192, layers=(0, 7, 13, 20, 27)
    )
    return lambda name: cast(InputDescription, held) if name == FILE else None


def write(folder: Path, grids: str, head: str = 'name = "mine"') -> str:
    path = folder / "mine.toml"
    path.write_text(f"{head}\n{grids}")
    return str(path)


def one_grid(**keys: Any) -> Suite:
    return Suite.model_validate({"name": "mine", "grid": [{"seq": "1k", "methods": ["dense"], **keys}]})


def shown(cells: Sequence[Cell]) -> list[tuple[str, dict[str, object]]]:
    return [(cell.method, cell.parameters) for cell in cells]


@pytest.mark.parametrize("name", suite_names())
def test_a_packaged_suite_loads_and_has_only_sound_cells(name: str, describe: Describe) -> None:
    suite = load_suite(name)
    asks = any("capture" in grid.input for grid in suite.grids)
    cells = suite.cells(describe, capture=FILE if asks else None)
    assert suite.name == name
    assert suite.description
    assert len({cell.identity for cell in cells}) == len(cells) > 0
    for cell in cells:
        assert set(cell.parameters) <= set(parameter_names(split_spec(cell.method)[0]))
        assert json.loads(json.dumps(cell.parameters)) == cell.parameters


def test_the_packaged_suites_are_found() -> None:
    assert {"demo", "smoke"} <= set(suite_names())


def test_smoke_has_every_method() -> None:
    cells = load_suite("smoke").cells()
    assert {split_spec(cell.method)[0] for cell in cells} == set(method_names())
    assert {cell.seq_len for cell in cells} == {512, 1024}


def test_a_file_says_everything_that_a_cell_holds(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
[[grid]]
seq = "1k"
seq_kv = "2k"
input = "normal"
heads = "4:2"
head_dim = 32
batch = 3
dtype = "bfloat16"
causal = false
block_size = 32
query_tile = 16
top_k = 4
levels = "full"
timed = false
seed = 5
pass = "forward"
methods = [{method = "pyramid:paper", beam = 2}]
""",
    )
    (cell,) = load_suite(path).cells()
    assert cell == Cell(
        method="pyramid:paper",
        parameters={"beam": 2.0, "block_size": 32, "query_tile": 16, "levels": "full", "top_k": 4},
        batch=3,
        heads=4,
        kv_heads=2,
        seq_len=1024,
        seq_len_kv=2048,
        head_dim=32,
        head_dim_v=32,
        dtype="bfloat16",
        causal=False,
        input="normal",
        seed=5,
        budget="top_k=4",
        timed=False,
    )


def test_an_axis_adds_cells_only_to_methods_that_have_it() -> None:
    cells = one_grid(
        methods=["flat", "dense", "pyramid"], block_size=32, query_tile=[64, 16], top_k=8, levels=[1, "full"]
    ).cells()
    assert shown(cells) == [
        ("dense", {}),
        ("flat", {"block_size": 32, "query_tile": 64, "top_k": 8}),
        ("pyramid", {"block_size": 32, "query_tile": 64, "levels": 1, "top_k": 8}),
        ("pyramid", {"block_size": 32, "query_tile": 64, "levels": "full", "top_k": 8}),
        ("flat", {"block_size": 32, "query_tile": 16, "top_k": 8}),
        ("pyramid", {"block_size": 32, "query_tile": 16, "levels": 1, "top_k": 8}),
        ("pyramid", {"block_size": 32, "query_tile": 16, "levels": "full", "top_k": 8}),
    ]


def test_an_axis_wins_over_a_preset_and_a_methods_own_parameter_over_the_axis() -> None:
    cells = one_grid(methods=["pyramid:fast", {"method": "pyramid:fast", "query_tile": 32, "top_k": 2}], query_tile=16)
    made = {cell.make_method().query_tile: cell for cell in cells.cells()}  # type: ignore[attr-defined]
    assert set(made) == {16, 32}
    assert made[32].budget == "top_k=2"
    assert made[32].parameters["top_k"] == 2


def test_without_the_axis_a_preset_stands_and_the_budget_is_sixteen_blocks() -> None:
    (cell,) = one_grid(methods=["pyramid:fast"]).cells()
    assert cell.parameters == {"top_k": 16}
    assert cell.budget == "top_k=16"
    assert cell.make_method().query_tile == 128  # type: ignore[attr-defined]


def test_budgets_become_blocks_and_keep_their_text() -> None:
    methods = ["dense", "flat", {"method": "flat", "block_size": 32}]
    cells = one_grid(methods=methods, keep=["512tok", "25%"]).cells()
    assert [(cell.parameters.get("top_k"), cell.budget) for cell in cells] == [
        (None, None),
        (16, "keep=512tok"),
        (8, "keep=25%"),
        (8, "keep=512tok"),
        (4, "keep=25%"),
    ]
    (sparse,) = one_grid(methods=["flat"], sparsity=0.5).cells()
    assert sparse.budget == "sparsity=0.5"
    assert 0 < sparse.parameters["top_k"] < 16


def test_a_method_that_chooses_its_own_budget_has_one_cell_whatever_the_budgets() -> None:
    suite = suite_from_flags(seq="1k", method=["xattention,xattention:top_k"], top_k="4,8")
    cells = {(cell.method, cell.parameters.get("top_k"), cell.budget) for cell in suite.cells()}
    assert cells == {("xattention", None, None), ("xattention:top_k", 4, "top_k=4"), ("xattention:top_k", 8, "top_k=8")}


def test_cells_of_the_same_tensors_are_neighbours_and_dense_leads() -> None:
    suite = Suite.model_validate(
        {
            "name": "mine",
            "grid": [
                {"seq": "1k..2k", "methods": ["flat", "dense"]},
                {"seq": "2k,1k", "methods": ["pyramid"], "timed": False},
            ],
        }
    )
    cells = suite.cells()
    groups = [cell.group for cell in cells]
    assert [(cell.seq_len, cell.method) for cell in cells] == [
        (length, method) for length in (1024, 2048) for method in ("dense", "flat", "pyramid")
    ]
    assert len(set(groups)) == 2
    assert groups == sorted(groups, key=groups.index)


def test_equal_cells_appear_once_and_a_timed_one_stands_for_an_untimed_one() -> None:
    grid = {"seq": "1k", "methods": ["flat", "flat"], "top_k": 4}
    suite = Suite.model_validate({"name": "mine", "grid": [{**grid, "timed": False}, grid, {**grid, "top_k": [4, 8]}]})
    assert [(cell.parameters["top_k"], cell.timed) for cell in suite.cells()] == [(4, True), (8, True)]


def test_a_capture_brings_its_sizes_and_layers(describe: Describe) -> None:
    cells = one_grid(input="capture", seq="4k,16k").cells(describe, capture=FILE)
    assert [(cell.layer, cell.seq_len) for cell in cells] == [
        (layer, length) for layer in (0, 7, 13, 20, 27) for length in (4096, 16384)
    ]
    sizes = {(cell.batch, cell.heads, cell.kv_heads, cell.head_dim, cell.head_dim_v, cell.input) for cell in cells}
    assert sizes == {(2, 9, 3, 64, 32, FILE)}
    named = one_grid(input=FILE, seq="4k", layers=[13]).cells(describe)
    assert [cell.layer for cell in named] == [13]


def test_a_capture_that_is_missing_or_unasked_or_lacks_a_layer_is_an_error(describe: Describe) -> None:
    with pytest.raises(UserError, match=r"--input FILE\.safetensors"):
        one_grid(input="capture").cells(describe)
    with pytest.raises(UserError, match=r"layers '9': not in 'model\.safetensors'; accepted: 0, 7, 13, 20, 27"):
        one_grid(input="capture", layers=9).cells(describe, capture=FILE)
    with pytest.raises(UserError, match=r"'mine' asks for no capture: its input is topics"):
        one_grid().cells(describe, capture=FILE)
    with pytest.raises(UserError, match=r"'none\.safetensors' is not a file"):
        one_grid(input="capture").cells(capture="none.safetensors")


def test_passes_are_an_axis_and_each_has_cells_of_its_own() -> None:
    cells = one_grid(methods=["flat", "dense"], **{"pass": ["train", "forward"]}).cells()
    assert [(cell.direction, cell.method) for cell in cells] == [
        ("train", "dense"), ("train", "flat"), ("forward", "dense"), ("forward", "flat"),
    ]  # fmt: skip
    assert len({cell.group for cell in cells}) == 2
    assert [cell.problem("cpu").direction for cell in cells] == ["train", "train", "forward", "forward"]
    assert suite_from_flags(seq="1k", method=["flat,dense"], pass_="train,forward").cells() == cells
    assert {cell.direction for cell in one_grid().cells()} == {"forward"}


def test_training_measures_both_passes_at_tile_and_token_level() -> None:
    cells = load_suite("training").cells()
    assert {(cell.direction, cell.seq_len) for cell in cells if cell.heads == cell.kv_heads} == {
        (direction, length) for direction in ("train", "backward") for length in (1 << 14, 1 << 16, 1 << 18)
    }
    assert {cell.parameters["query_tile"] for cell in cells if "query_tile" in cell.parameters} == {1, 128}
    assert {cell.method for cell in cells} >= {"dense:cudnn", "dense:flash", "pyramid:fastest", "pyramid:fast"}


def test_queries_and_keys_are_paired() -> None:
    lengths = [(cell.seq_len, cell.seq_len_kv) for cell in one_grid(seq="1k,2k", seq_kv="4k,8k").cells()]
    assert lengths == [(1024, 4096), (2048, 8192)]
    lengths = [(cell.seq_len, cell.seq_len_kv) for cell in one_grid(seq="128", seq_kv="4k,8k").cells()]
    assert lengths == [(128, 4096), (128, 8192)]


def test_a_suite_reads_back_from_what_it_writes() -> None:
    suite = load_suite("demo")
    written = json.loads(json.dumps(suite.model_dump(mode="json", by_alias=True, exclude_unset=True)))
    assert Suite.model_validate(written) == suite


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ('sec = 1\nmethods = ["dense"]', "grid 1: unknown key 'sec'. Did you mean 'seq'?"),
        ('methods = ["dense"]', "grid 1: seq is missing; give the lengths"),
        ("seq = 1", "grid 1: methods is missing; give a list"),
        ("seq = 1\nmethods = []", "grid 1: methods = []: not a list with something in it"),
        ('seq = 1\nmethods = "dense"', "grid 1: methods = 'dense': not a list"),
        ('seq = 1\nmethods = ["piramid"]', "grid 1: unknown method 'piramid'. Did you mean 'pyramid'?"),
        ('seq = 1\nmethods = ["pyramid:fst"]', "unknown preset of method 'pyramid': 'fst'. Did you mean 'fast'?"),
        ('seq = 1\nmethods = [{method = "flat", beam = 2}]', "unknown parameter of method 'flat': 'beam'"),
        ('seq = 1\nmethods = [{method = "pyramid", beam = 0}]', "method 'pyramid': beam = 0: input should be greater"),
        ('seq = 1\nmethods = [{method = "pyramid", beam = inf}]', "method 'pyramid': beam = inf: not a finite number"),
        ("seq = 1\nmethods = [3]", 'methods 3: accepted: "name", "name:preset"'),
        ('seq = "8k..4k"\nmethods = ["dense"]', "seq '8k..4k': the range is reversed; accepted: "),
        ('seq = 1\nmethods = ["flat"]\ntop_k = -1', "top_k '-1': -1 is below 0"),
        ('seq = 1\nmethods = ["flat"]\nblock_size = 0', "block_size '0': 0 is below 1"),
        ('seq = 1\nmethods = ["flat"]\ntop_k = 1\nkeep = "5%"', "top_k and keep each set the budget"),
        ('seq = 1\nmethods = ["flat"]\nkeep = "100tok"', "keep '100tok': not a whole number of blocks of 64 keys"),
        ('seq = 1\nmethods = ["flat"]\nlevels = "ful"', "levels 'ful': not a known word"),
        ('seq = 1\nmethods = ["flat"]\nheads = "9:2"', "heads '9:2': 9 query heads cannot be shared evenly by 2"),
        ('seq = 1\nmethods = ["flat"]\ndtype = "bf16"', "unknown dtype 'bf16'. Did you mean 'bfloat16'?"),
        ('seq = 1\nmethods = ["flat"]\npass = "backwards"', "unknown pass 'backwards'. Did you mean 'backward'?"),
        ('seq = 1\nmethods = ["flat"]\ninput = "topic"', "unknown input 'topic'. Did you mean 'topics'?"),
        ('seq = 1\nmethods = ["flat"]\nlayers = 1', "layers: topics has no layers; only a capture has them"),
        ('seq = 1\nmethods = ["flat"]\ninput = "capture"\nheads = 4', "heads: a capture brings its own heads"),
        ('seq = "1,2,3"\nseq_kv = [3, 4]\nmethods = ["flat"]', "seq has 3 lengths and seq_kv has 2"),
        ('seq = 1\nmethods = ["flat"]\ncausal = "maybe"', "causal = 'maybe': input should be a valid boolean"),
        ('seq = 1\nmethods = ["flat"]\n[[grid]]\nseq = 0\nmethods = ["flat"]', "grid 2: seq '0': 0 is below 1"),
    ],
)
def test_a_message_names_file_grid_key_value_and_what_is_accepted(tmp_path: Path, grid: str, message: str) -> None:
    path = write(tmp_path, f"[[grid]]\n{grid}")
    with pytest.raises(UserError) as caught:
        load_suite(path)
    assert str(caught.value).startswith(f"suite {path}, grid ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("head", "grids", "message"),
    [
        ('name = "a"', "", "grid is missing; give at least one [[grid]]"),
        ('name = "a"', '[grid]\nseq = 1\nmethods = ["dense"]', "not a list with something in it; give at least one"),
        ("", '[[grid]]\nseq = 1\nmethods = ["dense"]', "name is missing"),
        ("name = 3", '[[grid]]\nseq = 1\nmethods = ["dense"]', "name = 3: input should be a valid string"),
        ('name = "a"\ngird = 1', '[[grid]]\nseq = 1\nmethods = ["dense"]', "unknown key 'gird'. Did you mean 'grid'?"),
        ("name = ", "", "is not valid TOML"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, head: str, grids: str, message: str) -> None:
    path = write(tmp_path, grids, head)
    with pytest.raises(UserError) as caught:
        load_suite(path)
    assert str(caught.value).startswith(f"suite {path}")
    assert message in str(caught.value)


def test_an_unknown_or_unreadable_suite_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown suite 'dmeo'\. Did you mean 'demo'\?"):
        load_suite("dmeo")
    with pytest.raises(UserError, match=r"nothere\.toml' cannot be read: No such file"):
        load_suite(str(tmp_path / "nothere.toml"))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not valid TOML"):
        load_suite(str(binary))


def test_flags_make_the_same_cells_as_a_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
[[grid]]
seq = "1k..2k"
heads = ["4:2", "8:8"]
dtype = ["float32", "bfloat16"]
query_tile = [1, 64]
block_size = 32
keep = ["5%", "64blk"]
levels = [1, "full"]
input = ["normal", "needles"]
methods = ["dense", "pyramid:fast", "flat"]
seed = 3
""",
    )
    flags = suite_from_flags(
        seq="1k..2k",
        heads="4:2,8:8",
        dtype="float32,bfloat16",
        query_tile="1,64",
        block_size="32",
        keep="5%,64blk",
        levels="1,full",
        input="normal,needles",
        method=["dense,pyramid:fast", "flat"],
        seed=3,
    )
    assert flags.cells() == load_suite(path).cells()


def test_flags_without_methods_compare_dense_pyramid_and_flat() -> None:
    assert [cell.method for cell in suite_from_flags(seq="1k").cells()] == ["dense", "pyramid", "flat"]
    assert [cell.method for cell in suite_from_flags(seq="1k", method="flat").cells()] == ["flat"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "--seq is missing; give the lengths"),
        ({"seq": "8k..4k"}, "--seq '8k..4k': the range is reversed"),
        ({"seq": "1k", "query_tile": "0"}, "--query-tile '0': 0 is below 1"),
        ({"seq": "1k", "top_k": "8", "sparsity": "0.9"}, "--top-k and --sparsity each set the budget"),
        ({"seq": "1k", "head_dim": "x"}, "--head-dim 'x'"),
        ({"seq": "1k", "pass_": "generate"}, "unknown --pass 'generate'. Accepted: backward, decode, forward, train."),
        ({"seq": "1k", "method": ["dense", "falt"]}, "unknown method 'falt'. Did you mean 'flat'?"),
        ({"seq": "1k", "seed": -1}, "--seed = -1"),
    ],
)
def test_messages_call_a_flag_by_its_name(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        suite_from_flags(**flags)
    assert str(caught.value).startswith(message)


def test_a_method_of_the_users_own_takes_the_axes_that_it_has(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from dataclasses import dataclass\n"
        "from pyramidbench.methods.dense import Dense\n"
        "@dataclass(frozen=True)\n"
        "class Own(Dense):\n"
        '    """Has one axis."""\n'
        "    query_tile: int = 1\n"
    )
    cells = one_grid(methods=[str(own)], query_tile=[8, 16], block_size=32, top_k=[1, 2]).cells()
    assert [(cell.parameters, cell.budget) for cell in cells] == [({"query_tile": 8}, None), ({"query_tile": 16}, None)]
    assert method_class(str(own)).name == "own"


def test_seq_picks_lengths_of_a_suite(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[[grid]]\nseq = "1k, 2k, 4k"\nmethods = ["dense", "flat"]\n'
        '[[grid]]\nseq = "2k"\nmethods = ["pyramid"]\n'
        '[[grid]]\nseq = "1k, 4k"\nseq_kv = "2k, 8k"\nmethods = ["quest"]\n'
        '[[grid]]\nseq = "4k"\nseq_kv = "8k, 16k"\nmethods = ["hisa"]\n',
    )
    whole = load_suite(path)
    picked = choose(path, {"seq": "4k"})
    found = {(cell.method, cell.seq_len, cell.seq_len_kv) for cell in picked.cells()}
    assert found == {("dense", 4096, 4096), ("flat", 4096, 4096), ("quest", 4096, 8192), ("hisa", 4096, 8192),
                     ("hisa", 4096, 16384)}  # fmt: skip
    identities = {cell.identity for cell in whole.cells()}
    assert {cell.identity for cell in picked.cells()} < identities
    assert {cell.identity for cell in choose(whole, {"seq": "1k,2k,4k"}).cells()} == identities
    assert choose(path, {"seq": None}) == whole


def test_a_length_that_a_suite_lacks_is_an_error() -> None:
    with pytest.raises(UserError, match=r"'methods' has no length of 32k; accepted with --seq: 16k, 64k, 256k"):
        choose("methods", {"seq": "16k..64k"})
    with pytest.raises(UserError, match="leave out --top-k, or leave out the suite"):
        choose("methods", {"seq": "16k", "top_k": "8"})


def choose(suite: str | Suite, axes: dict[str, str | None]) -> Suite:
    return choose_suite(suite, axes, input=None, causal=True, seed=0, timed=True)


def test_the_suite_of_methods_holds_all_that_can_run_on_a_captured_layer(describe: Describe) -> None:
    """Every method of here at three lengths and two budgets; what is left out cannot do such a layer, or is no wheel."""
    cells = load_suite("methods").cells(describe, capture=FILE)
    left_out = {
        "fla_nsa": "groups of 16 query heads",
        "fla_moba": "the package flash-attn, which is built on installation",
        "fastvideo_vsa": "no causal mask",
        "llsa": "no causal mask",
        "flash_moba": "a build from its repository",
        "block_sparse_attn": "a build from its repository",
    }
    by_method: dict[str, set[tuple[int, object]]] = {}
    for cell in cells:
        budget = cell.budget or cell.parameters.get("top_p") or cell.parameters.get("kernel")
        by_method.setdefault(cell.method.partition(":")[0], set()).add((cell.seq_len, budget))
    assert set(by_method) == set(method_names()) - set(left_out)
    for name, points in by_method.items():
        assert {length for length, _ in points} == {1 << 14, 1 << 16, 1 << 18}, name
        budgets = {budget for length, budget in points if length == 1 << 18}
        assert len(budgets) >= 2 or name == "dense", name

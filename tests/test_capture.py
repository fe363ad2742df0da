"""Capture: what is written is what the model's attention sees, whole or not at all, and mistakes are named."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pyramidbench
from pyramidbench import cli
from pyramidbench.capture import CaptureReport, capture
from pyramidbench.capture_file import describe_capture, read_layer
from pyramidbench.catalogue import describe_one
from pyramidbench.cell import Cell
from pyramidbench.errors import UserError
from pyramidbench.inputs import input_label, load_inputs, quality_source
from pyramidbench.model_files import find_model, load_model, silent
from pyramidbench.plan import Estimator, Rates, plan
from pyramidbench.rope_scaling import RopeScaling
from pyramidbench.texts import stdlib_text

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
TOKENS = 48
LAYERS = 3
POSITIONS = 64


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama: 3 layers, 4 query heads on 2 key/value heads of dimension 16, 64 positions; one token per byte."""
    return save_model(tmp_path_factory.mktemp("models") / "Tiny-Llama", transformers.LlamaConfig, {})


def save_model(folder: Path, config_class: Any, extra: dict[str, object]) -> Path:
    config = config_class(
        vocab_size=260, hidden_size=48, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=POSITIONS, bos_token_id=None, eos_token_id=None,
        pad_token_id=None, **extra,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "essay.txt"
    path.write_text("It is a truth universally acknowledged, that a single man in possession\n", encoding="utf-8")
    return path


def run(tiny: Path, text: Path, out: Path, **changes: Any) -> CaptureReport:
    return capture(str(tiny), text, out, **{"tokens": TOKENS, "dtype": "float32", **changes})


def test_the_captured_tensors_reproduce_each_layers_attention(tiny: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "tiny.safetensors"
    run(tiny, text, out, layers=[0, 1, 2])
    model, tokenizer = load_model(find_model(str(tiny), None, silent), "cpu")
    attended: dict[int, Tensor] = {}
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _module, args, i=i: attended.update({i: args[0]}))
    ids = tokenizer(text.read_text()).input_ids[:TOKENS]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for layer in range(LAYERS):
        q, k, v = read_layer(out, layer, TOKENS, TOKENS)
        output = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(output.transpose(1, 2).flatten(2), attended[layer], rtol=1e-4, atol=1e-5)


def test_q_and_k_bear_the_position_encoding_and_v_does_not(tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "same.txt"
    text.write_text("a" * TOKENS)
    out = tmp_path / "same.safetensors"
    run(tiny, text, out, layers=[0])
    q, k, v = read_layer(out, 0, TOKENS, TOKENS)
    torch.testing.assert_close(v, v[:, :, :1].expand_as(v))
    for tensor in (q, k):
        assert not torch.allclose(tensor[:, :, 0], tensor[:, :, 1], atol=1e-3)
    # Equal tokens: after rotation a logit depends on the distance alone.
    logits = q[0, 0] @ k[0, 0].mT
    torch.testing.assert_close(logits[1:, 1:], logits[:-1, :-1], rtol=1e-3, atol=1e-4)


def test_the_file_says_what_it_holds(tiny: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "tiny.safetensors"
    lines: list[str] = []
    report = run(tiny, text, out, layers=[2, 0], dtype="float16", progress=lines.append)
    description = describe_capture(out)
    metadata = description.metadata
    assert report.metadata == metadata
    assert report.size_bytes == out.stat().st_size
    assert description.label == "tiny-llama:essay"
    assert (description.heads, description.kv_heads, description.head_dim, description.head_dim_v) == (4, 2, 16, 16)
    assert (description.seq_len, description.layers, description.dtype) == (TOKENS, (0, 2), "float16")
    assert (metadata.scale, metadata.rope_theta) == (0.25, 10000.0)
    assert metadata.text_sha256 == hashlib.sha256(text.read_bytes()).hexdigest()
    assert metadata.model_sha256 == hashlib.sha256((tiny / "model.safetensors").read_bytes()).hexdigest()
    assert re.fullmatch(r"pyramidbench \S+, transformers \S+, float32 on cpu", metadata.created_by)
    assert [line for line in lines if "written" in line] == ["layer 0 written (1 of 2)", "layer 2 written (2 of 2)"]


def test_a_capture_feeds_a_cell(tiny: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "tiny.safetensors"
    run(tiny, text, out, layers=[1])
    cell = Cell(
        method="dense", input=str(out), heads=4, kv_heads=2, head_dim=16, head_dim_v=16, seq_len=4, seq_len_kv=20
    )
    q, k, v = load_inputs(cell, torch.device("cpu"))
    assert (q.shape, k.shape, v.shape) == ((1, 4, 4, 16), (1, 2, 20, 16), (1, 2, 20, 16))


def test_the_command_needs_no_installed_package(
    tiny: Path, text: Path, tmp_path: Path, from_a_folder: None, monkeypatch: pytest.MonkeyPatch  # noqa: ARG001
) -> None:  # fmt: skip
    out = str(tmp_path / "tiny.safetensors")
    flags = ["--text", str(text), "--tokens", "20", "--layers", "1", "--device", "cpu", "--out", out]
    monkeypatch.setattr("sys.argv", ["pyramidbench", "capture", str(tiny), *flags])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (None, 0)
    made_by = describe_capture(Path(out)).metadata.created_by
    assert made_by.startswith(f"pyramidbench {pyramidbench.__version__}, transformers {transformers.__version__}")


def test_layers_are_evenly_spaced_by_default(tiny: Path, text: Path, tmp_path: Path) -> None:
    assert run(tiny, text, tmp_path / "tiny.safetensors").metadata.layers == (0, 1, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": [0, 3]}, r"layer 3 given; the model has layers 0 to 2"),
        ({"layers": []}, r"no layer given"),
        (
            {"tokens": 65},
            r"65 tokens are more than the model's 64 positions; ask for at most 64, or .* --rope-scaling yarn",
        ),
        ({"tokens": 1}, r"at least 2 tokens, given 1"),
        ({"dtype": "float61"}, r"unknown capture dtype 'float61'\. Did you mean 'float16'"),
    ],
)
def test_a_request_that_the_model_cannot_meet(
    tiny: Path, text: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run(tiny, text, tmp_path / "tiny.safetensors", **changes)
    assert [path.name for path in tmp_path.iterdir()] == ["essay.txt"]


@pytest.mark.parametrize("asked", ["yarn", "linear:4", "dynamic", "yarn:8"])
def test_a_context_beyond_the_trained_one_says_so(tiny: Path, tmp_path: Path, asked: str) -> None:
    """The file holds what transformers computes under that scaling, and says that it was scaled and how."""
    kind, _, given = asked.partition(":")
    factor = float(given or {"dynamic": 1.0}.get(kind, 2.0))
    text = tmp_path / "long.txt"
    text.write_text("It is a truth universally acknowledged. " * 8, encoding="utf-8")
    out = tmp_path / "long.safetensors"
    metadata = run(tiny, text, out, tokens=2 * POSITIONS, layers=[1], rope_scaling=asked).metadata
    assert metadata.rope_scaling == RopeScaling(kind, factor, POSITIONS)
    assert describe_capture(out).metadata == metadata
    assert input_label(str(out)) == f"tiny-llama+{kind}-x{factor:g}:long"
    assert quality_source(str(out)) == f"captured, positions scaled by {kind} {factor:g}, trained on {POSITIONS}"
    summary = describe_one("inputs", str(out))
    assert "a context 2 times as long as the trained one" in summary
    assert quality_source(str(out)) in summary
    config = transformers.AutoConfig.from_pretrained(tiny)
    config.rope_parameters = {"rope_theta": 1e4, "rope_type": kind, "factor": factor}
    if kind == "yarn":
        config.rope_parameters["original_max_position_embeddings"] = POSITIONS
    keys = keys_of_layer(tiny, text, 2 * POSITIONS, 1, config)
    torch.testing.assert_close(read_layer(out, 1, 1, 2 * POSITIONS)[1], keys)


def keys_of_layer(tiny: Path, text: Path, tokens: int, layer: int, config: Any) -> Tensor:
    """Keys [1, G, N, D] after the position encoding, from transformers' own cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, config=config).eval()
    ids = byte_tokenizer()(text.read_text(encoding="utf-8")).input_ids[:tokens]
    with torch.no_grad():
        held: Tensor = model(torch.tensor([ids])).past_key_values.layers[layer].keys
    return held


@pytest.mark.parametrize(("asked", "stands"), [("yarn:4", True), ("linear:4", True), ("dynamic", False)])
def test_a_prefix_is_a_capture_of_its_own_where_the_scaling_allows(
    tiny: Path, tmp_path: Path, asked: str, stands: bool
) -> None:
    """The first tokens of a long capture are the capture of so many tokens; under dynamic scaling they are not."""
    text = tmp_path / "long.txt"
    text.write_text("It is a truth universally acknowledged. " * 8, encoding="utf-8")
    long, short = tmp_path / "long.safetensors", tmp_path / "short.safetensors"
    run(tiny, text, long, tokens=4 * POSITIONS, layers=[1], rope_scaling=asked)
    run(tiny, text, short, tokens=2 * POSITIONS, layers=[1], rope_scaling=asked)
    length = 2 * POSITIONS
    same = [
        torch.allclose(a, b, atol=1e-4)
        for a, b in zip(read_layer(long, 1, length, length), read_layer(short, 1, length, length))
    ]
    assert all(same) == stands
    cell = Cell(
        method="dense",
        input=str(long),
        heads=4,
        kv_heads=2,
        head_dim=16,
        head_dim_v=16,
        seq_len=length,
        seq_len_kv=length,
    )
    (planned,) = plan([cell], Estimator(Rates(1e9, 1e9), "cpu", 1.0), budget_s=60, memory_bytes=1e9)
    assert planned.verdict == ("run" if stands else "unsupported")
    if stands:
        load_inputs(cell, torch.device("cpu"))
        return
    assert "depends on their number" in str(planned.reason)
    with pytest.raises(UserError, match="ask for 256, or capture that length"):
        load_inputs(cell, torch.device("cpu"))


@pytest.mark.parametrize(
    ("asked", "tokens", "message"),
    [
        ("yorn", 128, r"unknown --rope-scaling 'yorn'\. Did you mean 'yarn'"),
        (
            "yarn:half",
            128,
            r"--rope-scaling 'yarn:half': accepted is a factor of at least 1 after the colon, as yarn:8",
        ),
        ("linear:0.5", 128, r"--rope-scaling 'linear:0\.5': accepted is a factor"),
        ("yarn:2", 200, r"200 tokens on 64 positions give the factor 3\.125; give one above 1 that is at least that"),
        ("yarn", 48, r"give the factor 0\.75; .*or leave --rope-scaling out where the tokens fit"),
        ("dynamic", 64, r"64 tokens fit in the 64 positions; leave --rope-scaling out"),
    ],
)
def test_a_scaling_that_does_not_fit(
    tiny: Path, text: Path, tmp_path: Path, asked: str, tokens: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run(tiny, text, tmp_path / "tiny.safetensors", tokens=tokens, rope_scaling=asked)


def test_a_model_that_scales_its_positions_already(text: Path, tmp_path: Path) -> None:
    scaled = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    folder = save_model(tmp_path / "scaled", transformers.LlamaConfig, scaled)
    with pytest.raises(UserError, match="needs a model with plain rotary positions; this one has: linear"):
        run(folder, text, tmp_path / "scaled.safetensors", tokens=70, rope_scaling="yarn")


def test_a_text_that_is_too_short(tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("twelve bytes")
    with pytest.raises(UserError, match=r"text 'short' has 12 tokens, 48 were asked for; ask for at most 12"):
        run(tiny, text, tmp_path / "tiny.safetensors")


def test_texts_that_cannot_be_read(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"text '.*absent\.txt' cannot be read: No such file"):
        run(tiny, tmp_path / "absent.txt", tmp_path / "tiny.safetensors")
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"abc\xff")
    with pytest.raises(UserError, match=r"is not UTF-8 at byte 3"):
        run(tiny, binary, tmp_path / "tiny.safetensors")


def test_an_output_that_cannot_be_written(tiny: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ending in \.safetensors, given '.*tiny\.pt'"):
        run(tiny, text, tmp_path / "tiny.pt")
    with pytest.raises(UserError, match="cannot be written"):
        run(tiny, text, text / "tiny.safetensors")


def test_a_failed_capture_leaves_the_old_file_and_no_other(tiny: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "tiny.safetensors"
    run(tiny, text, out, layers=[0, 1])
    before = out.read_bytes()

    def fail(line: str) -> None:
        if line.startswith("layer 0 written"):
            assert out.read_bytes() == before
            raise RuntimeError("the power is gone")

    with pytest.raises(RuntimeError, match="the power is gone"):
        run(tiny, text, out, layers=[0, 2], progress=fail)
    assert out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["essay.txt", "tiny.safetensors"]


def test_values_beyond_float16_are_named(text: Path, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "large", transformers.LlamaConfig, {})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[1].self_attn.k_proj.weight.data *= 1e6
    model.save_pretrained(folder)
    with pytest.raises(UserError, match=r"layer 1, k holds inf in \d+ of 1536 entries as float16; use a wider dtype"):
        run(folder, text, tmp_path / "large.safetensors", layers=[1], dtype="float16")


def test_a_sliding_window_is_refused_and_computed_right_elsewhere(text: Path, tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    window = {"layer_types": kinds, "sliding_window": 8, "use_sliding_window": True}
    folder = save_model(tmp_path / "window", transformers.Qwen2Config, window)
    out = tmp_path / "window.safetensors"
    assert run(folder, text, out).metadata.layers == (1,)
    model, tokenizer = load_model(find_model(str(folder), None, silent), "cpu")
    values: list[Tensor] = []
    model.model.layers[1].self_attn.v_proj.register_forward_hook(lambda _module, _args, output: values.append(output))
    with torch.no_grad():
        model(torch.tensor([tokenizer(text.read_text()).input_ids[:TOKENS]]))
    _, _, v = read_layer(out, 1, TOKENS, TOKENS)
    torch.testing.assert_close(v.transpose(1, 2).flatten(2), values[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="layer 2 does not see all earlier tokens"):
        run(folder, text, out, layers=[2])


def test_a_model_outside_the_attention_interface(text: Path, tmp_path: Path) -> None:
    config = transformers.BloomConfig(vocab_size=260, hidden_size=32, n_layer=1, n_head=2)
    folder = tmp_path / "bloom"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    with pytest.raises(UserError, match=r"BloomForCausalLM does not go through transformers' attention interface"):
        run(folder, text, tmp_path / "bloom.safetensors")


def test_the_built_in_text_is_the_standard_library() -> None:
    assert stdlib_text().startswith("# Author: Steven J. Bethard")
    assert len(stdlib_text()) > 1_000_000

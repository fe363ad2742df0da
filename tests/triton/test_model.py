"""A model of transformers on a real device: its attention runs by the kernels, in every dtype, as dense attention does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import pyramidbench.transformers as sparse
from pyramidbench.evaluation.attention import Attention
from pyramidbench.evaluation.language_model import LanguageModel
from pyramidbench.model_files import ModelSource

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
DEVICE, KERNELS = torch.device("cuda"), "triton"
TOKENS = 1000
SPECS = (
    "pyramid", "pyramid:paper", "pyramid:fast", "flat", "flat:exact", "exact_topk", "sliding_window", "random_blocks",
)  # fmt: skip
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 8e-2}
"""Largest error of a state, whose size is 1 (the last norm sees to it): some units in the last place of each layer."""


@pytest.fixture(scope="module")
def network() -> Any:
    """Two layers with the heads of SmolLM2: 9 on 3 of dimension 64."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=144, intermediate_size=64, num_hidden_layers=2, num_attention_heads=9, head_dim=64,
        num_key_value_heads=3, max_position_embeddings=2048, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval().to(DEVICE)


def model_in(dtype: str, network: Any) -> LanguageModel:
    return LanguageModel(
        ModelSource("tiny", "", None), network.to(getattr(torch, dtype)), SimpleNamespace(eos_token_id=None), DEVICE
    )


def ids(rows: int, length: int = TOKENS) -> Tensor:
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def states(model: LanguageModel, tokens: Tensor, **others: Any) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model.network.base_model(input_ids=tokens, use_cache=False, **others).last_hidden_state
    return found.float()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("spec", SPECS)
def test_a_full_budget_is_dense_attention_by_the_kernels(network: Any, spec: str, dtype: str) -> None:
    model, tokens = model_in(dtype, network), ids(2)
    model.use(Attention("dense", None, "{}"))
    expected = states(model, tokens)
    model.use(Attention(spec, None, '{"top_k": 16}'))
    sparse.reset_usage()
    found = states(model, tokens)
    used = sparse.usage()
    assert (found - expected).abs().max() <= TOLERANCES[dtype]
    assert used.sparse_calls == 2
    assert (used.density, used.choice_share) == (1, 0)
    (backend,) = used.backends
    assert backend.rpartition("+")[2] == KERNELS


@pytest.mark.parametrize("spec", SPECS)
def test_cached_prefill_decoding_and_padding_choose_and_stay_finite(network: Any, spec: str) -> None:
    model = model_in("float16", network)
    model.use(Attention(spec, None, '{"top_k": 3}'))
    sparse.reset_usage()
    prefix, asked = ids(1)[0].tolist(), [([1, 2], [3, 4]), ([5], [6, 7, 8]), ([9], [10])]
    alone = [model.judge(prefix, *one) for one in asked]
    together = model.judge_all(prefix, asked)
    for one, other in zip(alone, together, strict=True):
        assert other.log_prob == pytest.approx(one.log_prob, rel=2e-2)
    assert len(model.generate(prefix, 4)) == 4
    mask = torch.ones(2, TOKENS, dtype=torch.long, device=DEVICE)
    mask[0, :333] = 0
    padded = states(model, ids(2), attention_mask=mask)
    short = states(model, ids(2)[:1, 333:], position_ids=torch.arange(333, TOKENS, device=DEVICE)[None])
    assert padded.isfinite().all()
    if spec != "random_blocks":  # whose draw is another one for another length
        assert (padded[0, 333:] - short[0]).abs().max() <= TOLERANCES["float16"]
    used = sparse.usage()
    assert used.queries_with_choice > 0
    assert all(backend.rpartition("+")[2] == KERNELS for backend in used.backends)


def test_losses_in_float32_are_those_of_the_cpu(network: Any) -> None:
    """Of dense attention, and of a pyramid up to blocks whose scores nearly tie."""
    model, tokens = model_in("float32", network), ids(1)[0].tolist()
    found = []
    for place in (DEVICE, torch.device("cpu")):
        model.network.to(place)
        model.device = place
        for attention in (Attention("dense", None, "{}"), Attention("pyramid", None, '{"top_k": 3}')):
            model.use(attention)
            found.append(float(model.token_losses(tokens).mean()))
    network.to(DEVICE)
    assert found[0] == pytest.approx(found[2], abs=1e-4)
    assert found[1] == pytest.approx(found[3], abs=1e-3)

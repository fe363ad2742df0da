"""The example of docs/decode: text from a tiny random model, through both caches."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "docs" / "decode" / "generate.py"
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """docs/decode/generate.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("generate", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def network() -> Any:
    """A random model of two layers, four heads on two key/value heads."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


PROMPT = torch.randint(0, 64, (700,), generator=torch.Generator().manual_seed(1)).tolist()
SAMPLING: dict[str, Any] = {"seed": 3, "temperature": 0.7}


def test_dense_through_the_caches_is_the_models_own_attention(script: ModuleType, network: Any) -> None:
    made = script.generate(network, PROMPT[:50], 6, script.makers(56, 8)["dense"], **SAMPLING)
    network.set_attn_implementation("sdpa")
    generator, ids = torch.Generator().manual_seed(3), list(PROMPT[:50])
    with torch.inference_mode():
        for _ in range(6):
            logits = network(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(torch.multinomial((logits / 0.7).softmax(-1), 1, generator=generator)))
    assert made.tokens == ids[50:]
    assert made.tokens_per_s > 0


def test_a_pyramid_that_keeps_all_blocks_writes_the_same_text(script: ModuleType, network: Any) -> None:
    texts = {
        name: script.generate(network, PROMPT, 12, make, **SAMPLING).tokens
        for name, make in script.makers(712, 12).items()
    }
    assert texts["pyramid"] == texts["dense"]


def test_a_small_budget_attends_to_a_few_blocks(script: ModuleType, network: Any) -> None:
    made: list[Any] = []

    def noted(k: torch.Tensor, scale: float) -> Any:
        made.append(script.makers(712, 1)["pyramid"](k, scale))
        return made[-1]

    script.generate(network, PROMPT, 5, noted, **SAMPLING)
    assert [cache.lengths.tolist() for cache in made] == [[704], [704]]
    assert int((made[0].select(torch.zeros(1, 4, 1, 8)) >= 0).sum(-1).max()) == 4

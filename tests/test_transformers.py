"""Methods as attention of Hugging Face models: exact where they must be, sparse where they should, and never silent."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import pyramidbench.transformers as sparse
from pyramidbench.errors import UserError
from pyramidbench.spans import Spans

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
TOKENS, LAYERS = 96, 3
FULL: dict[str, Any] = {"top_k": 64, "block_size": 16, "query_tile": 16}
SMALL: dict[str, Any] = {"top_k": 1, "block_size": 8, "query_tile": 8}


def tiny(config_class: Any = None, **extra: object) -> Any:
    """A random model, 4 query heads on 2 key/value heads."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": None,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    config = (config_class or transformers.LlamaConfig)(**sizes, **extra)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            torch.nn.init.normal_(weight, std=0.5)
    return model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(64, (2, TOKENS), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    sparse.reset_usage()
    with torch.no_grad():
        yield


def left(padding: int) -> Tensor:
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :padding] = 0
    return mask


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_a_full_budget_is_dense_attention(ids: Tensor, side: str) -> None:
    model = tiny()
    mask = {"none": torch.ones_like(ids), "left": left(21), "right": left(21).flip(1)}[side]
    expected = model(ids, attention_mask=mask).logits
    sparse.use(model, "pyramid", **FULL)
    found = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)
    used = sparse.usage()
    assert used.sparse_calls == LAYERS * (1 if side == "none" else 2)
    assert used.queries == LAYERS * int(mask.sum())
    assert used.queries_with_choice == 0
    assert used.density == 1


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("padding", [5, 8, 21])
def test_padding_changes_nothing_that_a_sequence_sees(ids: Tensor, padding: int, side: str) -> None:
    model = tiny()
    sparse.use(model, "pyramid", **SMALL)
    mask = left(padding) if side == "left" else left(padding).flip(1)
    seen = mask[0].bool()
    alone = model(ids[:1, seen]).logits
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    batched = model(ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(batched[:1, seen], alone, rtol=1e-4, atol=1e-5)
    assert 0 < (sparse.usage().choice_share or 0) < 1


def test_packed_sequences_do_not_see_one_another(ids: Tensor) -> None:
    model = tiny()
    sparse.use(model, "pyramid", **SMALL)
    cuts = (37, TOKENS - 37)
    alone = torch.cat([model(part).logits for part in ids[:1].split(cuts, dim=1)], dim=1)
    positions = torch.cat([torch.arange(cut) for cut in cuts])[None]
    packed = model(ids[:1], position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_packed_sequences_with_a_cache_are_refused(ids: Tensor) -> None:
    model = tiny()
    sparse.use(model, "pyramid", **SMALL)
    positions = torch.cat([torch.arange(40), torch.arange(TOKENS - 40)])[None]
    with pytest.raises(UserError, match="packed sequences need use_cache=False"):
        model(ids[:1], position_ids=positions, use_cache=True)


@pytest.mark.parametrize("padding", [0, 13])
def test_cached_decoding_equals_the_whole_at_a_full_budget(ids: Tensor, padding: int) -> None:
    model = tiny()
    settings = {"attention_mask": left(padding), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **settings)
    sparse.use(model, "pyramid:fast", top_k=64, block_size=16)
    assert torch.equal(model.generate(ids, **settings), expected)
    assert sparse.usage().sparse_calls >= 4 * LAYERS


def test_a_decoded_token_chooses_among_the_cached_blocks(ids: Tensor) -> None:
    model = tiny()
    sparse.use(model, "pyramid", **SMALL)
    settings = {"attention_mask": torch.ones_like(ids[:1]), "do_sample": False, "pad_token_id": 0}
    model.generate(ids[:1], max_new_tokens=3, **settings)
    before = sparse.usage()
    model.generate(ids[:1], max_new_tokens=4, **settings)
    more = sparse.usage() - before - before
    assert (more.queries, more.queries_with_choice) == (LAYERS, LAYERS)


@pytest.mark.parametrize(("dense_layers", "sparse_calls"), [(2, 1), ([0, 2], 1), (0, 3), (3, 0)])
def test_layers_that_keep_dense_attention(ids: Tensor, dense_layers: int | list[int], sparse_calls: int) -> None:
    model = tiny()
    expected = model(ids).logits
    sparse.use(model, "pyramid", dense_layers=dense_layers, **SMALL)
    found = model(ids).logits
    assert (sparse.usage().sparse_calls, sparse.usage().dense_calls) == (sparse_calls, LAYERS - sparse_calls)
    assert torch.allclose(found, expected, atol=1e-5) == (sparse_calls == 0)


def test_every_name_is_registered_and_reads_the_model_s_config(ids: Tensor) -> None:
    names = sparse.register(top_k=1, block_size=8, query_tile=8)
    assert {"pyramidbench:pyramid", "pyramidbench:flat", "pyramidbench:pyramid:paper", "pyramidbench:dense"} <= set(
        names
    )
    config = tiny().config
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="pyramidbench:pyramid").eval()
    model(ids)
    by_keyword = sparse.usage()
    assert by_keyword.queries_with_choice > 0
    model.config.pyramidbench = {"top_k": 64, "block_size": 8, "query_tile": 8}
    model(ids)
    assert (sparse.usage() - by_keyword).queries_with_choice == 0


def test_gradients_reach_the_weights(ids: Tensor) -> None:
    model = tiny()
    sparse.use(model, "pyramid", **SMALL)
    with torch.enable_grad():
        model(ids, labels=ids).loss.backward()
    assert all(bool(layer.self_attn.k_proj.weight.grad.abs().max() > 0) for layer in model.model.layers)


def test_a_window_is_refused_unless_its_layers_stay_dense(ids: Tensor) -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    model = tiny(transformers.Qwen2Config, layer_types=kinds, sliding_window=16, use_sliding_window=True)
    expected = model(ids).logits
    sparse.use(model, "pyramid", **FULL)
    with pytest.raises(UserError, match=r"sliding window .* list the others in dense_layers"):
        model(ids)
    sparse.use(model, "pyramid", dense_layers=[1], **FULL)
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_masks_of_the_caller(ids: Tensor) -> None:
    model = tiny()
    sparse.use(model, "pyramid", **FULL)
    causal = torch.ones(TOKENS, TOKENS).tril().bool()[None, None]
    torch.testing.assert_close(
        model(ids[:1], attention_mask=causal).logits, model(ids[:1]).logits, rtol=1e-4, atol=1e-5
    )
    holes = causal.clone()
    holes[..., 3] = False
    with pytest.raises(UserError, match="leaves out keys between visible ones"):
        model(ids[:1], attention_mask=holes)
    with pytest.raises(UserError, match="shows a query later keys than its own"):
        model(ids[:1], attention_mask=torch.ones_like(causal))


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("pyramids", {}, "unknown method 'pyramids'. Did you mean 'pyramid'"),
        ("pyramid", {"topk": 3}, "unknown parameter of method 'pyramid': 'topk'. Did you mean 'top_k'"),
        ("pyramid", {"dense_layers": -1}, "dense_layers -1 is not accepted"),
        ("pyramid", {"top_k": "many"}, "top_k = 'many'"),
    ],
)
def test_wrong_settings(method: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sparse.use(tiny(), method, **settings)


def test_models_that_cannot() -> None:
    bloom = transformers.AutoModelForCausalLM.from_config(
        transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    )
    with pytest.raises(UserError, match="BloomForCausalLM does not go through transformers' attention interface"):
        sparse.use(bloom, "pyramid")
    model = tiny(attention_dropout=0.1).train()
    sparse.use(model, "pyramid")
    with pytest.raises(UserError, match=r"attention dropout 0.1 is not supported"):
        model(torch.zeros(1, 4, dtype=torch.long))
    capped = tiny(transformers.Gemma2Config, layer_types=["full_attention"] * LAYERS, attn_logit_softcapping=50.0)
    sparse.use(capped, "pyramid")
    with pytest.raises(UserError, match="attention uses softcap, which is no plain softmax over keys"):
        capped(torch.zeros(1, 4, dtype=torch.long))
    model = tiny()
    sparse.use(model, "pyramid")
    with pytest.raises(UserError, match="has no matrix of weights; call the model without output_attentions"):
        model(torch.zeros(1, 4, dtype=torch.long), output_attentions=True)


def test_spans_split_a_mask_into_its_sequences() -> None:
    seen = torch.zeros(1, 9, 9, dtype=torch.bool)
    for start, end in ((2, 5), (5, 9)):
        seen[0, start:end, start:end] = torch.ones(end - start, end - start).tril().bool()
    spans = Spans.read(lambda start, end: seen[:, start:end], 9, 9, torch.arange(9))
    assert [(part.rows, part.keys) for part in spans.sequences()] == [
        (slice(2, 5), slice(2, 5)),
        (slice(5, 9), slice(5, 9)),
    ]
    assert torch.equal(spans.mask(9)[0, 0, 2:], seen[0, 2:])


STEPPING = ("pyramid", "pyramid:fast", "pyramid:paper", "flat", "flat:exact", "quest", "moba", "block_mean", "hisa",
            "sliding_window")  # fmt: skip
BUDGET: dict[str, Any] = {"top_k": 1, "block_size": 8}
NEW_TOKENS = 11


def generated(model: Any, ids: Tensor, cache: Any = None, **settings: object) -> tuple[Tensor, Tensor, Any]:
    """Tokens, the logits of the new ones, and what the attention did; `cache` in place of the model's own."""
    sparse.reset_usage()
    name = "cache" if "cache" in inspect.signature(model.model.forward).parameters else "past_key_values"
    given = {} if cache is None else {name: cache}
    usual = {
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids),
    }
    told = model.generate(ids, **{**usual, **settings}, **given, output_logits=True, return_dict_in_generate=True)
    return told.sequences, torch.stack(told.logits), sparse.usage()


@pytest.mark.parametrize("method", [*STEPPING, "dense", "random_blocks"])
def test_steps_of_a_decoder_give_what_a_whole_selection_gives(ids: Tensor, method: str) -> None:
    model = tiny()
    sparse.use(model, method, **({} if method == "dense" else BUDGET))
    tokens, logits, plain = generated(model, ids)
    stepped_tokens, stepped_logits, stepped = generated(model, ids, sparse.decoding_cache(model, 128))
    assert torch.equal(stepped_tokens, tokens)
    torch.testing.assert_close(stepped_logits, logits, rtol=1e-4, atol=1e-5)
    own = method in STEPPING
    assert stepped.step_calls == (LAYERS * (NEW_TOKENS - 1) if own else 0)
    assert plain.step_calls == 0
    # The same blocks, counted the same way: only who chose them differs.
    assert dataclasses.replace(stepped, step_calls=0, backends=()) == dataclasses.replace(plain, backends=())
    assert (stepped.choice_share is None) == (method == "dense")


def test_dense_layers_do_not_step(ids: Tensor) -> None:
    model = tiny()
    sparse.use(model, "pyramid", dense_layers=[1], **SMALL)
    _, logits, _ = generated(model, ids)
    _, stepped, used = generated(model, ids, sparse.decoding_cache(model, 128))
    torch.testing.assert_close(stepped, logits, rtol=1e-4, atol=1e-5)
    assert (used.step_calls, used.dense_calls) == (2 * (NEW_TOKENS - 1), NEW_TOKENS)


def test_a_window_that_steps_outgrow_is_refused_unless_its_layers_stay_dense(ids: Tensor) -> None:
    """With a decoding cache the layer holds all keys, and the model's mask hides those before its window."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    model = tiny(transformers.Qwen2Config, layer_types=kinds, sliding_window=16, use_sliding_window=True)
    sparse.use(model, "pyramid", **SMALL)
    with pytest.raises(UserError, match=r"the layer has a sliding window.* list layers with a window in dense_layers"):
        generated(model, ids[:, :12], sparse.decoding_cache(model, 128))
    sparse.use(model, "pyramid", dense_layers=[1], **SMALL)
    _, logits, _ = generated(model, ids)
    _, stepped, used = generated(model, ids, sparse.decoding_cache(model, 128))
    torch.testing.assert_close(stepped, logits, rtol=1e-4, atol=1e-5)
    assert used.step_calls == 2 * (NEW_TOKENS - 1)


def test_beams_reorder_the_decoders(ids: Tensor) -> None:
    model = tiny()
    sparse.use(model, "pyramid", **SMALL)
    beams, _, _ = generated(model, ids, num_beams=3)
    stepped, _, used = generated(model, ids, sparse.decoding_cache(model, 128), num_beams=3)
    assert torch.equal(stepped, beams)
    assert used.step_calls == LAYERS * (NEW_TOKENS - 1)


CHANGES = {
    "copied": copy.deepcopy,
    "cropped": lambda cache: cache.crop(-5),
    "repeated": lambda cache: cache.batch_repeat_interleave(2),
    "selected": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_cache_that_was_changed_goes_on_right(ids: Tensor, change: str) -> None:
    model = tiny()
    sparse.use(model, "pyramid", **SMALL)
    name = "cache" if "cache" in inspect.signature(model.model.forward).parameters else "past_key_values"
    stepping, plain = sparse.decoding_cache(model, 128), transformers.DynamicCache()
    for part in ids[:, :82].split([80, 1, 1], dim=1):
        for cache in (stepping, plain):
            model(part, use_cache=True, **{name: cache})
    stepping = CHANGES[change](stepping) or stepping
    plain = transformers.DynamicCache() if change == "reset" else CHANGES[change](plain) or plain
    rows = {"repeated": 4, "selected": 1}.get(change, 2)
    assert stepping.get_seq_length() == {"cropped": 77, "reset": 0}.get(change, 82)
    sparse.reset_usage()
    for token in torch.randint(64, (rows, 3), generator=torch.Generator().manual_seed(7)).split(1, dim=1):
        found, expected = (model(token, use_cache=True, **{name: one}).logits for one in (stepping, plain))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert sparse.usage().step_calls == 3 * LAYERS


def test_what_a_decoding_cache_refuses(ids: Tensor) -> None:
    model = tiny()
    sparse.use(model, "pyramid", **SMALL)
    with pytest.raises(
        UserError, match=r"the sequences are padded, or .* give prompts of one length, .* or generate without"
    ):
        generated(model, ids, sparse.decoding_cache(model, 128), attention_mask=left(13))
    with pytest.raises(UserError, match=r"the cache is full: .* would hold 97 tokens, and there is room for 96"):
        generated(model, ids, sparse.decoding_cache(model, TOKENS))
    with pytest.raises(UserError, match="max_len = 0: accepted"):
        sparse.decoding_cache(model, 0)

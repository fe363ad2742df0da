"""LanguageModel: a causal language model with one attention at a time, and the three things that tasks ask of it."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import pyramidbench.transformers as attention_interface
from pyramidbench.device import synchronize
from pyramidbench.errors import UserError
from pyramidbench.evaluation.attention import Attention
from pyramidbench.method import BlockMethod
from pyramidbench.model_files import ModelSource, Say, find_model, load_model

ODD_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings under which logits are no plain product with the output embedding, as they are computed here."""
LOGIT_ROWS = 512
"""Rows of logits held at a time: 100 MB in fp32 at a vocabulary of 49 152."""
SIDE_BY_SIDE = 8
"""Continuations of one prefix that are judged in one call on a GPU, each with a copy of the prefix's keys."""
STEP_ROOM = 8192
"""A cache for answers has room for a multiple of so many tokens. The kernels of a step are compiled for a room: so they are
not compiled anew at every length."""
Stop = Callable[[str], bool]
"""Whether an answer so far is all that a task wants to know."""


@dataclass(frozen=True)
class Judged:
    """Log-probability of a continuation, in nats, and whether each of its tokens was the likeliest one."""

    log_prob: float
    greedy: bool


class LanguageModel:
    """A model on one device. `limit`: positions that it was made for, None where it does not say.

    dtype: of its weights and activations. busy_s: seconds that it has computed for, without what tasks do before and after.
    side_by_side: continuations that `judge_all` computes at a time.
    """

    def __init__(self, source: ModelSource, network: Any, tokenizer: Any, device: torch.device) -> None:
        self.source, self.network, self.tokenizer, self.device = source, network, tokenizer, device
        config = network.config.get_text_config()
        odd = [name for name in ODD_LOGITS if getattr(config, name, None) not in (None, 1, 1.0)]
        if odd:
            raise UserError(f"model {source.name} has {odd[0]}: its logits are no plain product; use another model.")
        self._head = network.get_output_embeddings()
        self.dtype = str(network.dtype).removeprefix("torch.")
        self.busy_s = 0.0
        self.side_by_side = SIDE_BY_SIDE if device.type == "cuda" else 1
        self.limit: int | None = getattr(config, "max_position_embeddings", None)
        # Newer versions of transformers call the cached keys and values `cache`.
        accepted = inspect.signature(network.base_model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._prefix: tuple[tuple[int, ...], Any] | None = None

    @classmethod
    def load(
        cls, model: str, gguf_file: str | None, device: torch.device, say: Say, dtype: str = "auto"
    ) -> LanguageModel:
        """Find and load a model, as `capture` does. float32 means float32 here: products in TF32 are turned off.

        Raises:
            UserError: it cannot be found or loaded.
        """
        source = find_model(model, gguf_file, say)
        torch.set_float32_matmul_precision("highest")
        network, tokenizer = load_model(source, device.type, dtype=None if dtype == "auto" else dtype)
        return cls(source, network, tokenizer, device)

    def use(self, attention: Attention) -> None:
        """Swap the attention; what was cached under the other one is dropped. On a GPU blocks are attended to by Triton's
        kernels, or the call fails with the reason."""
        self._prefix = None
        given = attention.given
        if self.device.type == "cuda" and isinstance(attention.made, BlockMethod):
            given.setdefault("implementation", "triton")
        attention_interface.use(self.network, attention.method, dense_layers=list(attention.dense_layers), **given)

    def ids(self, text: str) -> list[int]:
        """Tokens of a text, without any special ones added."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def chat(self, text: str) -> list[int]:
        """Tokens of a user's message up to where the answer starts; a model without a chat template gets the text alone."""
        if not getattr(self.tokenizer, "chat_template", None):
            return self.ids(text + "\n")
        turns = [{"role": "user", "content": text}]
        return self.ids(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    def text(self, ids: Sequence[int]) -> str:
        """The text of some tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def check_length(self, tokens: int) -> None:
        """Raise UserError where a context is longer than the model's positions."""
        if self.limit is not None and tokens > self.limit:
            raise UserError(
                f"{tokens} tokens are more than the {self.limit} positions of {self.source.name}; "
                f"ask for at most {self.limit}, the answer included."
            )

    @torch.inference_mode()
    def token_losses(self, ids: Sequence[int]) -> Tensor:
        """Loss of each token but the first given those before it, in nats, fp64 [N - 1]."""
        self.check_length(len(ids))
        with self._computing():
            tokens = torch.tensor([list(ids)], device=self.device)
            states = self.network.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0, :-1]
            return self._finite(self._losses(states, tokens[0, 1:]))

    @torch.inference_mode()
    def generate(self, ids: Sequence[int], new_tokens: int, stop: Stop | None = None) -> list[int]:
        """The likeliest next tokens, one after another with cached keys, up to an end-of-text token. After the prompt each is
        a step of the method's decoder, where it has one and all layers of the model hold keys.

        stop: asked after every token, with the text so far; the rest is not generated where it says so.
        """
        self.check_length(len(ids) + new_tokens)
        with self._computing():
            return self._generated(list(ids), new_tokens, stop)

    def _generated(self, ids: list[int], new_tokens: int, stop: Stop | None) -> list[int]:
        stops = self._stops()
        room = -(-(len(ids) + new_tokens) // STEP_ROOM) * STEP_ROOM
        own = attention_interface.layers_without_keys(self.network)
        states, cache = self._step([ids], None if own else attention_interface.decoding_cache(self.network, room))
        made: list[int] = []
        while True:
            token = int(self._finite(self._head(states[0, -1])).argmax())
            if token in stops:
                return made
            made.append(token)
            if len(made) == new_tokens or (stop is not None and stop(self.text(made))):
                return made
            states, cache = self._step([[token]], cache)

    def judge(self, prefix: Sequence[int], middle: Sequence[int], continuation: Sequence[int]) -> Judged:
        """How likely `continuation` is after `prefix` and `middle`; the keys of the last prefix are kept for the next call."""
        (judged,) = self.judge_all(prefix, [(middle, continuation)])
        return judged

    @torch.inference_mode()
    def judge_all(self, prefix: Sequence[int], asked: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Judged]:
        """`judge` for several (middle, continuation) after one prefix.

        On a GPU, where a short call costs what its launches cost, those of equal length are computed side by side: they are
        rows of a batch without padding, each with a choice of blocks of its own.
        """
        longest = max(len(middle) + len(continuation) for middle, continuation in asked)
        self.check_length(len(prefix) + longest)
        judged: list[Judged | None] = [None] * len(asked)
        with self._computing():
            for group in self._side_by_side(asked):
                rows = [[*asked[at][0], *asked[at][1]] for at in group]
                states, _ = self._step(rows, self._cached(tuple(prefix), len(rows)))
                for at, row in zip(group, states):
                    judged[at] = self._judged(row, asked[at][1])
        return [one for one in judged if one is not None]

    def _side_by_side(self, asked: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[list[int]]:
        """Numbers of what is asked, in the groups that are computed together."""
        by_length: dict[int, list[int]] = {}
        for at, (middle, continuation) in enumerate(asked):
            by_length.setdefault(len(middle) + len(continuation), []).append(at)
        for alike in by_length.values():
            yield from (alike[at : at + self.side_by_side] for at in range(0, len(alike), self.side_by_side))

    def _judged(self, states: Tensor, continuation: Sequence[int]) -> Judged:
        """states: [M, width], the last of them those of the continuation."""
        asked = torch.tensor(list(continuation), device=self.device)
        logits = self._finite(self._head(states[-len(continuation) - 1 : -1]).double())
        loss = torch.nn.functional.cross_entropy(logits, asked, reduction="sum")
        return Judged(-float(loss), bool((logits.argmax(-1) == asked).all()))

    @contextmanager
    def _computing(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        synchronize(self.device)
        self.busy_s += time.perf_counter() - started

    def _finite(self, values: Tensor) -> Tensor:
        if not bool(values.isfinite().all()):
            raise UserError(f"{self.source.name} overflows in {self.dtype}; give another --dtype, such as float32.")
        return values

    def _step(self, ids: list[list[int]], cache: Any) -> tuple[Tensor, Any]:
        """Run some tokens on top of a cache: their last states [B, M, width], and the cache with them."""
        tokens = torch.tensor(ids, device=self.device)
        output = self.network.base_model(input_ids=tokens, use_cache=True, **{self._cache_name: cache})
        return output.last_hidden_state, output[self._cache_name]

    def _cached(self, prefix: tuple[int, ...], rows: int) -> Any:
        """The prefix's keys and values once for each row, which the caller may extend; None for an empty prefix."""
        if not prefix:
            return None
        if self._prefix is None or self._prefix[0] != prefix:
            self._prefix = None
            self._prefix = (prefix, self._step([list(prefix)], None)[1])
        cache = copy.deepcopy(self._prefix[1])
        if rows > 1:
            cache.batch_repeat_interleave(rows)
        return cache

    def _losses(self, states: Tensor, targets: Tensor) -> Tensor:
        parts = []
        for start in range(0, len(states), LOGIT_ROWS):
            logits = self._head(states[start : start + LOGIT_ROWS]).double()
            parts.append(
                torch.nn.functional.cross_entropy(logits, targets[start : start + LOGIT_ROWS], reduction="none")
            )
        return torch.cat(parts) if parts else states.new_zeros(0, dtype=torch.float64)

    def _stops(self) -> set[int]:
        config = self.network.generation_config.eos_token_id
        listed = config if isinstance(config, list) else [config]
        return {token for token in (*listed, self.tokenizer.eos_token_id) if token is not None}

"""A model class for EleutherAI's lm-eval: any of its tasks with any method as attention. Imports lm-eval (extra `hf`)."""

from __future__ import annotations

import re
from typing import Any

from lm_eval.api.model import LM

from pyramidbench.evaluation.language_model import LanguageModel

NEW_TOKENS = 256
"""What a task gets that names no limit of its own."""


class HarnessModel(LM):  # type: ignore[misc]  # lm-eval has no types
    """lm-eval's three requests, answered by a LanguageModel with the attention that is in force.

    To use lm-eval itself: `lm_eval.simple_evaluate(model=HarnessModel(model), tasks=[…])` after `model.use(attention)`.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation after its context, in nats, and whether it is the greedy one."""
        return [self._judged(*request.args) for request in requests]

    def _judged(self, context: str, continuation: str) -> tuple[float, bool]:
        # Blanks at the end of a context belong to the continuation: tokens start with their blank.
        blanks = len(context) - len(context.rstrip())
        if blanks:
            context, continuation = context[:-blanks], context[-blanks:] + continuation
        before = self.model.ids(context) or self._start()
        whole = self.model.ids(context + continuation) if context else before + self.model.ids(continuation)
        judged = self.model.judge((), whole[: len(before)], whole[len(before) :])
        return judged.log_prob, judged.greedy

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Log-probability of each whole text, in nats, in windows of the model's positions."""
        return [self._rolled(self.model.ids(request.args[0])) for request in requests]

    def _rolled(self, ids: list[int]) -> float:
        window = (self.model.limit or len(ids) + 1) - 1
        total, before = 0.0, self._start()
        for start in range(0, len(ids), window):
            part = ids[start : start + window]
            total -= float(self.model.token_losses([*before, *part]).sum())
            before = part[-1:]
        return total

    def generate_until(self, requests: list[Any]) -> list[str]:
        """The greedy continuation of each context, up to the first of the task's stop texts."""
        return [self._generated(*request.args) for request in requests]

    def _generated(self, context: str, how: dict[str, Any]) -> str:
        stops = how.get("until") or []
        limit = int(how.get("max_gen_toks") or NEW_TOKENS)
        listed = [stops] if isinstance(stops, str) else list(stops)
        made = self.model.generate(self.model.ids(context), limit, lambda said: any(stop in said for stop in listed))
        said = self.model.text(made)
        return re.split("|".join(map(re.escape, listed)), said, maxsplit=1)[0] if listed else said

    def _start(self) -> list[int]:
        """What stands before the first token of a text: the model's own start or end token, or a line break."""
        tokenizer = self.model.tokenizer
        token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        return self.model.ids("\n") if token is None else [token]

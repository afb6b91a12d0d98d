"""Intake: what a prompt must be to be served. Decided from the tokenizer and the model's shape, before weights exist.

So a program that has its prompts when it starts is refused in the first second (`build_engine`'s `before_weights`), by
the same checks that every request goes through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freight.errors import RequestError
from freight.sampling import SamplingParams
from freight.tokenizer import Tokenizer


@dataclass(frozen=True)
class Intake:
    """A model as its prompts see it. `tokenizer` is None when prompts are token ids only."""

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int

    def accept(self, prompt: str | Sequence[int], params: SamplingParams) -> tuple[str | None, list[int]]:
        """(text or None, token ids) of a prompt. Raises RequestError for one that cannot be served with `params`."""
        text, token_ids = self._encode(prompt)
        for token in token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise RequestError(f"prompt token id {token!r} is outside the vocabulary (0 to {self.vocab_size - 1})")
        if len(token_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, and max_model_len {self.max_model_len} leaves room for "
                f"{self.max_model_len - 1} besides one new token; shorten it or raise max_model_len"
            )
        params.check_vocabulary(self.vocab_size)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; without one (skip_tokenizer_init) use stop_token_ids")
        return text, token_ids

    def _encode(self, prompt: str | Sequence[int]) -> tuple[str | None, list[int]]:
        if len(prompt) == 0:
            raise RequestError("the prompt is empty; give at least one character or token id")
        if not isinstance(prompt, str):
            return None, list(prompt)
        if self.tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer; without one (skip_tokenizer_init) pass token ids")
        return prompt, self.tokenizer.encode(prompt)

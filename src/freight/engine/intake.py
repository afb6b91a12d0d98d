"""Intake: what a prompt must be to be served. Decided from the tokenizer and the model's shape, before weights exist.

So a program that has its prompts when it starts is refused in the first second (`build_engine`'s `before_weights`), by
the same checks that every request goes through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from freight.engine.grammar import Grammars
from freight.engine.request import check_length
from freight.errors import RequestError
from freight.sampling import SamplingParams
from freight.structured import StructuredOutputs
from freight.tokenizer import Tokenizer


@dataclass(frozen=True)
class AcceptedPrompt:
    """A prompt that can be served. `text` is None when token ids were given."""

    text: str | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Intake:
    """A model as its prompts see it. `tokenizer` is None when prompts are token ids only."""

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int

    def accept(self, prompt: str | Sequence[int], params: SamplingParams) -> AcceptedPrompt:
        """Tokenize and check a prompt, text or token ids. Raises RequestError when `params` cannot be served for it."""
        if isinstance(prompt, bytes | bytearray):
            raise RequestError(f"the prompt is {type(prompt).__name__}; decode it to a string, or give token ids")
        if len(prompt) == 0:
            raise RequestError("the prompt is empty; give at least one character or token id")
        text = prompt if isinstance(prompt, str) else None
        token_ids = self._encode(prompt) if isinstance(prompt, str) else self._checked(prompt)
        check_length(len(token_ids), params.max_tokens, self.max_model_len)
        params.check_vocabulary(self.vocab_size)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; without one (skip_tokenizer_init) use stop_token_ids")
        if params.structured_outputs is not None and self.tokenizer is None:
            raise RequestError("structured_outputs needs a tokenizer; without one (skip_tokenizer_init) leave it out")
        return AcceptedPrompt(text, token_ids)

    def check_form(self, outputs: StructuredOutputs) -> None:
        """Raises RequestError for a form that cannot be compiled. An engine compiles it again."""
        if self.tokenizer is not None:
            Grammars(self.tokenizer, self.vocab_size, ()).check(outputs)

    def _encode(self, text: str) -> tuple[int, ...]:
        if self.tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer; without one (skip_tokenizer_init) pass token ids")
        return self._checked(self.tokenizer.encode(text))

    def _checked(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        ids: list[int] = []
        for position, token in enumerate(token_ids):
            if isinstance(token, bool) or not isinstance(token, Integral):  # NumPy's integers are Integral
                raise RequestError(
                    f"prompt token {position} is {token!r:.60}, a {type(token).__name__}; token ids are integers, "
                    f"here 0 to {self.vocab_size - 1}"
                )
            if not 0 <= token < self.vocab_size:
                raise RequestError(f"prompt token id {token} is outside the vocabulary (0 to {self.vocab_size - 1})")
            ids.append(int(token))
        return tuple(ids)

"""Intake: what a prompt must be to be served. Decided from the tokenizer and the model's shape,
before weights exist.

So a program that has its prompts when it starts is refused in the first second (`start_engine`'s
`before_weights`), by the same checks that every request goes through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from freight.engine.bad_words import BadWords, read_bad_words
from freight.engine.drafts import LONGEST_TEXT
from freight.engine.grammar import Grammars
from freight.engine.request import check_length
from freight.engine.thinking import TagTokens, read_tags
from freight.errors import RequestError, choices
from freight.model.config.pooling import PoolingConfig
from freight.pooling import PoolingParams, PoolingTask
from freight.sampling import SamplingParams
from freight.structured import StructuredOutputs
from freight.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class AcceptedPrompt:
    """A prompt that can be served. `text` is None when token ids were given."""

    text: str | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Intake:
    """A model as its prompts see it. `tokenizer` is None when prompts are token ids only.

    pooling    how it makes a vector of a prompt; None: it only generates
    generates  whether text may be asked of it
    priorities whether requests may have a priority
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    pooling: PoolingConfig | None = None
    generates: bool = True
    priorities: bool = False

    def accept(
        self, prompt: str | Sequence[int], params: SamplingParams, add_special_tokens: bool = True
    ) -> AcceptedPrompt:
        """Tokenize and check a prompt, text or token ids. Raises RequestError when `params` cannot
        be served for it.

        add_special_tokens: to a text what the tokenizer adds, such as BOS.
        """
        self.check_task(params.pooling)
        if params.priority and not self.priorities:
            raise RequestError(
                f"priority is {params.priority}, and requests run in the order of arrival here; leave it out, or "
                "start the engine with --scheduling-policy priority"
            )
        if isinstance(prompt, bytes | bytearray):
            raise RequestError(
                f"the prompt is {type(prompt).__name__}; decode it to a string, or give token ids"
            )
        if len(prompt) == 0:
            if self.tokenizer is None or not isinstance(prompt, str):
                raise RequestError("the prompt is empty; give at least one character or token id")
            self.tokenizer.check_empty(add_special_tokens)
        text: str | None = None
        if isinstance(prompt, str):
            text = prompt
            ids: Sequence[int] = self._encode(prompt, add_special_tokens)
        else:
            ids = prompt
        token_ids = self.checked(self.cut(ids, params))
        check_length(len(token_ids), params.max_tokens, self.max_model_len)
        params.check_vocabulary(self.vocab_size)
        if params.stop and self.tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer; without one (skip_tokenizer_init) use stop_token_ids"
            )
        if params.structured_outputs is not None and self.tokenizer is None:
            raise RequestError(
                "structured_outputs needs a tokenizer; without one (skip_tokenizer_init) leave it out"
            )
        self.bad_words(params)
        self.thinking_tags(params)
        if self.tokenizer is None:
            self.predicted(params)
        return AcceptedPrompt(text, token_ids)

    def check_task(self, params: PoolingParams | None) -> None:
        """Raise RequestError where the model does not do what is asked."""
        pooling = self.pooling
        if params is None:
            if pooling is not None and not self.generates:
                raise RequestError(
                    f"this model gives {_RESULTS[pooling.task]} and no text ({pooling.source}); {_ASK[pooling.task]}, "
                    "or start it with --pooling none if it can generate"
                )
            return
        if pooling is None:
            raise RequestError(
                f"this model generates text and declares no pooling, so it gives no {_RESULTS[params.task]}; start it "
                "with --pooling last, mean or cls to pool its final states, or serve an embedding model"
            )
        if params.task is not pooling.task:
            raise RequestError(
                f"this model gives {_RESULTS[pooling.task]} and no {_RESULTS[params.task]} ({pooling.source}); "
                f"{_ASK[pooling.task]}"
            )
        if params.first_segment is not None and pooling.token_types < 2:
            raise RequestError(
                f"first_segment is {params.first_segment}; this model has no token type for a second text; leave it "
                "out"
            )
        dimensions = params.dimensions
        if dimensions is None:
            return
        if dimensions > pooling.size:
            raise RequestError(
                f"dimensions is {dimensions}; the embeddings of this model have {pooling.size}"
            )
        if pooling.dimensions and dimensions not in (*pooling.dimensions, pooling.size):
            trained = choices(map(str, pooling.dimensions))
            raise RequestError(
                f"dimensions is {dimensions}; this model was trained to be cut to {trained}"
            )

    def cut(self, token_ids: Sequence[int], params: SamplingParams) -> Sequence[int]:
        """Return the last of a prompt's tokens, as many as `truncate_prompt_tokens` says. To cut
        twice is to cut once.

        Of a prompt that is pooled the first ones are kept, as sentence-transformers does, and the special
        tokens at its end: a model may pool the state of the token that ends it.

        Raises RequestError for -1 where max_tokens leave nothing of the context.
        """
        most = params.truncate_prompt_tokens
        if most is None:
            return token_ids
        if most == -1:
            answer = params.max_tokens
            if answer is None:
                answer = 1
            most = self.max_model_len - answer
            if most < 1:
                raise RequestError(
                    f"truncate_prompt_tokens is -1, and {answer} tokens of an answer leave nothing of max_model_len "
                    f"{self.max_model_len} to a prompt; ask for fewer"
                )
        if params.pooling is None:
            return token_ids[-most:]
        if len(token_ids) <= most:
            return token_ids
        behind = 0
        if self.tokenizer is not None:
            special = self.tokenizer.special_token_ids
            while behind < most and token_ids[-1 - behind] in special:
                behind += 1
        return [*token_ids[: most - behind], *token_ids[len(token_ids) - behind :]]

    def bad_words(self, params: SamplingParams) -> BadWords | None:
        """Return the tokens of `bad_words`; None without any. Raises RequestError."""
        if not params.bad_words:
            return None
        if self.tokenizer is None:
            raise RequestError(
                "bad_words needs a tokenizer; without one (skip_tokenizer_init) use logit_bias"
            )
        return read_bad_words(params.bad_words, self.tokenizer, self.vocab_size)

    def thinking_tags(self, params: SamplingParams) -> TagTokens | None:
        """Return the tags of thoughts, where these have a budget; None: they have none. Raises
        RequestError.
        """
        if params.thinking_token_budget is None:
            return None
        return read_tags(params, self.tokenizer, self.vocab_size)

    def predicted(self, params: SamplingParams) -> Sequence[int]:
        """Return the tokens of `prediction` that can be drafted; none without. Raises RequestError.

        Ids that the tokenizer has beyond the vocabulary are left out: no draw gives one, and the
        embedding has no row for it.
        """
        if not params.prediction:
            return ()
        if self.tokenizer is None:
            raise RequestError(
                "prediction needs a tokenizer; without one (skip_tokenizer_init) leave it out"
            )
        text = params.prediction[:LONGEST_TEXT]
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return [token for token in tokens if token < self.vocab_size]

    def check_form(self, outputs: StructuredOutputs) -> None:
        """Raises RequestError for a form that cannot be compiled. An engine compiles it again."""
        if self.tokenizer is not None:
            Grammars(self.tokenizer, self.vocab_size, ()).check(outputs)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise RequestError(
                "a text prompt needs a tokenizer; without one (skip_tokenizer_init) pass token ids"
            )
        return self.tokenizer.encode(text, add_special_tokens)

    def checked(self, token_ids: Sequence[int], what: str = "prompt") -> tuple[int, ...]:
        """Return token ids as a tuple. Raises RequestError for one that is not in the vocabulary."""
        known = tuple(token_ids)
        # most prompts: ten times as fast as one id after the other, which finds what is wrong
        if set(map(type, known)) == {int} and min(known) >= 0 and max(known) < self.vocab_size:
            return known
        ids: list[int] = []
        for position, token in enumerate(token_ids):
            # NumPy's integers are Integral
            if isinstance(token, bool) or not isinstance(token, Integral):
                raise RequestError(
                    f"{what} token {position} is {token!r:.60}, a {type(token).__name__}; token ids are integers, "
                    f"here 0 to {self.vocab_size - 1}"
                )
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"{what} token id {token} is outside the vocabulary (0 to {self.vocab_size - 1})"
                )
            ids.append(int(token))
        return tuple(ids)


_RESULTS = {PoolingTask.EMBED: "embeddings", PoolingTask.CLASSIFY: "scores"}
_ASK = {
    PoolingTask.EMBED: "use LLM.embed or /v1/embeddings",
    PoolingTask.CLASSIFY: "use LLM.classify, LLM.score, /classify, /score or /rerank",
}

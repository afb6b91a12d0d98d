"""The answer to a completion, streamed or complete, from the deltas of its requests.

Each prompt is one request. A prompt that is echoed with log-probabilities is scored once. Its
choices wait for the scores: each begins with the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from freight.base.fields import JsonDict
from freight.outputs import CompletionDelta, RequestDelta, Scores
from freight.serve.call import ReplyHead, Served, TokenizedWork
from freight.serve.openai.logprobs import PromptLogprobs, TextLogprobs
from freight.serve.openai.stream import (
    AnswerOptions,
    Chunks,
    Usage,
    check_ending,
    common_fields,
    failure_events,
)
from freight.serve.transport.errors import ApiError

# Prompt tokens with log-probabilities in one chunk: writing more at once delays other requests.
_TOKENS_OF_CHUNK = 1024


@dataclass(eq=False, slots=True)
class _Choice:
    """One completion so far."""

    index: int
    logprobs: TextLogprobs | None
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    begun: bool = False  # its first chunk was sent
    length: int = 0  # of the text in its chunks


@dataclass(eq=False, slots=True)
class _Prompt:
    """One prompt with its choices. `held`: deltas that wait until the prompt is scored."""

    work: TokenizedWork
    choices: list[_Choice]
    waits: bool
    scores: list[Scores] = field(default_factory=list)
    num_scored: int = 1  # nothing precedes the first token
    held: list[CompletionDelta] = field(default_factory=list)
    cached: int = 0


class CompletionReply:
    """A `Reply`: see `freight.serve.call`."""

    def __init__(
        self,
        head: ReplyHead,
        served: Served,
        work: Sequence[TokenizedWork],
        options: AnswerOptions,
        echo: bool,
    ) -> None:
        """Start with no tokens. echo: the text of each choice begins with its prompt."""
        self._head = head
        self._options = options
        self._echo = echo
        self._tokenizer = served.tokenizer
        self._prompts: list[_Prompt] = []
        count = 0
        for item in work:
            choices = [self._choice(count + index, item) for index in range(item.params.n)]
            self._prompts.append(
                _Prompt(item, choices, waits=echo and item.params.logprobs is not None)
            )
            count += item.params.n
        self._usage = Usage(sum(len(item.token_ids) for item in work))
        self._chunks = Chunks(common_fields(head, "cmpl", "text_completion"), options, self._usage)
        if echo:
            for prompt in self._prompts:
                text = self._prompt_text(prompt.work)
                for choice in prompt.choices:
                    choice.text.append(text)

    def _choice(self, index: int, work: TokenizedWork) -> _Choice:
        if work.params.logprobs is None:
            return _Choice(index, None)
        logprobs = TextLogprobs(
            self._tokenizer,
            work.token_ids,
            work.params.skip_special_tokens,
            self._options.tokens_as_ids,
        )
        return _Choice(index, logprobs)

    def _prompt_text(self, work: TokenizedWork) -> str:
        if work.text is not None:
            return work.text
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(work.token_ids, work.params.skip_special_tokens)

    def start(self) -> bytes:
        """Return the prompts that are echoed without scores."""
        chunks: list[str] = []
        for prompt in self._prompts:
            if self._echo and not prompt.waits:
                self._send_prompt(prompt, chunks)
        return "".join(chunks).encode("ascii")

    def _send_prompt(self, prompt: _Prompt, chunks: list[str]) -> None:
        """Add the chunks of a prompt: its text, then its log-probabilities, in several chunks if
        they are many.
        """
        for choice in prompt.choices:
            chunks.append(self._chunk(prompt, choice, choice.text[0], most=_TOKENS_OF_CHUNK))
            while choice.logprobs is not None and choice.logprobs.has_more:
                chunks.append(self._chunk(prompt, choice, "", most=_TOKENS_OF_CHUNK))

    def advance(self, index: int, delta: RequestDelta) -> bytes:
        prompt = self._prompts[index]
        chunks: list[str] = []
        self._usage.cached += max(0, delta.num_cached_tokens - prompt.cached)
        prompt.cached = max(prompt.cached, delta.num_cached_tokens)
        if delta.scores is not None:
            prompt.scores.append(delta.scores)
            prompt.num_scored += len(delta.scores)
        outputs: Sequence[CompletionDelta] = delta.outputs
        for output in outputs:
            check_ending(output)
        if prompt.waits:
            prompt.held += outputs
            if prompt.num_scored < len(prompt.work.token_ids):
                return b""
            prompt.waits = False
            outputs = prompt.held
            prompt.held = []
            for choice in prompt.choices:
                if choice.logprobs is not None:
                    choice.logprobs.add_prompt(prompt.work.token_ids, prompt.scores, choice.text[0])
            self._send_prompt(prompt, chunks)
        for output in outputs:
            self._advance(prompt, prompt.choices[output.index], output, chunks)
        return "".join(chunks).encode("ascii")

    def _advance(
        self, prompt: _Prompt, choice: _Choice, output: CompletionDelta, chunks: list[str]
    ) -> None:
        self._usage.completion += len(output.token_ids)
        choice.token_ids += output.token_ids
        if choice.logprobs is not None and output.logprobs:
            choice.logprobs.add(output.token_ids, output.logprobs)
        if output.text:
            choice.text.append(output.text)
        if output.finish_reason is not None:
            choice.finish_reason = output.finish_reason.value
            choice.stop_reason = output.stop_reason
        options = self._options
        if (
            output.text
            or output.finish_reason is not None
            or options.token_ids
            or options.continuous_usage
        ):
            chunks.append(self._chunk(prompt, choice, output.text, output.token_ids))

    def _chunk(
        self,
        prompt: _Prompt,
        choice: _Choice,
        text: str,
        token_ids: Sequence[int] = (),
        most: int | None = None,
    ) -> str:
        """Return a chunk with the log-probabilities not sent yet, of `most` tokens at most."""
        choice.length += len(text)
        ended = choice.finish_reason is not None
        logprobs = "null"
        if choice.logprobs is not None:
            logprobs = json.dumps(choice.logprobs.take(choice.length, ended, most))
        more = f', "token_ids": {json.dumps(list(token_ids))}' if self._options.token_ids else ""
        if self._options.token_ids and not choice.begun:
            more += f', "prompt_token_ids": {json.dumps(list(prompt.work.token_ids))}'
        if ended:
            more += f', "stop_reason": {json.dumps(choice.stop_reason)}'
        choice.begun = True
        return self._chunks.chunk(
            f'{{"index": {choice.index}, "text": {json.dumps(text)}, "logprobs": {logprobs}, '
            f'"finish_reason": {json.dumps(choice.finish_reason)}{more}}}'
        )

    def end(self) -> bytes:
        return self._chunks.end()

    def body(self) -> JsonDict:
        body = common_fields(self._head, "cmpl", "text_completion")
        body["choices"] = [
            self._choice_body(prompt, choice)
            for prompt in self._prompts
            for choice in prompt.choices
        ]
        body["usage"] = self._usage.body()
        return body

    def _choice_body(self, prompt: _Prompt, choice: _Choice) -> JsonDict:
        text = "".join(choice.text)
        result: JsonDict = {
            "index": choice.index,
            "text": text,
            "logprobs": choice.logprobs.body(len(text)) if choice.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._options.prompt_logprobs:
            result["prompt_logprobs"] = PromptLogprobs(prompt.scores, self._tokenizer)
        if self._options.token_ids:
            result |= {
                "prompt_token_ids": list(prompt.work.token_ids),
                "token_ids": choice.token_ids,
            }
        return result

    def failure(self, error: ApiError) -> bytes:
        return failure_events(error)

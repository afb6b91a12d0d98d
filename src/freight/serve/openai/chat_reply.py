"""The answer to a chat completion, streamed or complete, from the deltas of its request.

Both come from the same state, so they cannot differ. A chunk costs one `json.dumps` of its delta;
the rest of it is text that is prepared once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from freight.base.fields import JsonDict, JsonObject
from freight.outputs import CompletionDelta, RequestDelta, Scores
from freight.serve.answers.pieces import MessagePieces, Piece, PieceKind
from freight.serve.call import ReplyHead, Served, TokenizedWork
from freight.serve.openai.logprobs import PromptLogprobs, chat_entries
from freight.serve.openai.stream import (
    AnswerOptions,
    Chunks,
    Usage,
    check_ending,
    common_fields,
    failure_events,
)
from freight.serve.transport.errors import ApiError


@dataclass(eq=False, slots=True)
class _Choice:
    """One completion so far. Log-probabilities and ids wait for the next chunk: a token may add no
    text by itself.
    """

    index: int
    pieces: MessagePieces
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[JsonDict] = field(default_factory=list)
    logprobs: list[JsonDict] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs_sent: int = 0
    tokens_sent: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatReply:
    """A `Reply`: see `freight.serve.call`."""

    def __init__(
        self,
        head: ReplyHead,
        served: Served,
        work: TokenizedWork,
        options: AnswerOptions,
        tools: Sequence[JsonObject] = (),
        parallel: bool = True,
    ) -> None:
        """Start with no tokens. parallel: whether an answer may have several tool calls; else those
        after the first are dropped.
        """
        self._head = head
        self._options = options
        self._work = work
        self._tokenizer = served.tokenizer
        self._choices: list[_Choice] = []
        for index in range(work.params.n):
            parser = served.parser_of(work.text, tools) if served.parser_of else None
            self._choices.append(_Choice(index, MessagePieces(parser, bool(tools), parallel)))
        predicted = work.params.prediction is not None
        self._usage = Usage(len(work.token_ids), predicted=predicted)
        self._scores: list[Scores] = []
        self._chunks = Chunks(
            common_fields(head, "chatcmpl", "chat.completion.chunk"), options, self._usage
        )

    def start(self) -> bytes:
        """Return the role of every choice, in order: clients create a choice when they first see
        its index.
        """
        role = '{"role": "assistant", "content": ""}'
        return "".join(self._chunk(choice, role) for choice in self._choices).encode("ascii")

    def advance(self, index: int, delta: RequestDelta) -> bytes:
        self._usage.cached = max(self._usage.cached, delta.num_cached_tokens)
        self._usage.count_drafts(delta.times)
        if delta.scores is not None and self._options.prompt_logprobs:
            self._scores.append(delta.scores)
        chunks: list[str] = []
        for output in delta.outputs:
            self._advance(self._choices[output.index], output, chunks)
        return "".join(chunks).encode("ascii")

    def _advance(self, choice: _Choice, output: CompletionDelta, chunks: list[str]) -> None:
        check_ending(output)
        self._usage.completion += len(output.token_ids)
        if self._options.token_ids:
            choice.token_ids += output.token_ids
        if output.logprobs:
            asked = self._work.params.logprobs or 0
            as_ids = self._options.tokens_as_ids
            choice.logprobs += chat_entries(
                output.token_ids, output.logprobs, asked, self._tokenizer, as_ids
            )
        for piece in choice.pieces.of(output):
            chunks.append(self._chunk(choice, self._take(choice, piece)))
        if output.finish_reason is not None:
            self._usage.count_reasoning(self._tokenizer, choice.reasoning)
            choice.finish_reason = output.finish_reason.value
            if choice.pieces.called:
                choice.finish_reason = "tool_calls"
            choice.stop_reason = output.stop_reason
            chunks.append(self._chunk(choice, "{}"))

    def _take(self, choice: _Choice, piece: Piece) -> str:
        """Add a piece to the message; returns it as a delta, JSON."""
        if piece.kind is PieceKind.TOOL_CALL:
            call = {
                "id": self._call_id(choice),
                "type": "function",
                "function": {"name": piece.name, "arguments": piece.text},
            }
            choice.calls.append(call)
            return json.dumps({"tool_calls": [{"index": len(choice.calls) - 1, **call}]})
        if piece.kind is PieceKind.REASONING:
            choice.reasoning.append(piece.text)
            # Clients read one field or the other.
            return json.dumps({"reasoning": piece.text, "reasoning_content": piece.text})
        choice.content.append(piece.text)
        return f'{{"content": {json.dumps(piece.text)}}}'

    def _call_id(self, choice: _Choice) -> str:
        """Return an id that is unique over all calls of all requests: the next request's messages
        refer to it.
        """
        name = f"{self._head.request_id}/{choice.index}/{len(choice.calls)}"
        return "call_" + hashlib.sha256(name.encode()).hexdigest()[:24]

    def _chunk(self, choice: _Choice, delta: str) -> str:
        """Return the chunk of a delta, given as JSON, with pending log-probabilities and ids."""
        logprobs = "null"
        if len(choice.logprobs) > choice.logprobs_sent:
            logprobs = json.dumps({"content": choice.logprobs[choice.logprobs_sent :]})
            choice.logprobs_sent = len(choice.logprobs)
        ending = '"finish_reason": null'
        if choice.finish_reason is not None:
            reasons = choice.finish_reason, choice.stop_reason
            ending = '"finish_reason": {}, "stop_reason": {}'.format(*map(json.dumps, reasons))
        ids = prompt_ids = ""
        if self._options.token_ids:
            if delta.startswith('{"role"'):
                prompt_ids = f', "prompt_token_ids": {json.dumps(list(self._work.token_ids))}'
            ids = f', "token_ids": {json.dumps(choice.token_ids[choice.tokens_sent :])}'
            choice.tokens_sent = len(choice.token_ids)
        return self._chunks.chunk(
            f'{{"index": {choice.index}, "delta": {delta}, "logprobs": {logprobs}, {ending}{ids}}}',
            prompt_ids,
        )

    def end(self) -> bytes:
        return self._chunks.end()

    def body(self) -> JsonDict:
        body = common_fields(self._head, "chatcmpl", "chat.completion")
        body["choices"] = [self._choice_body(choice) for choice in self._choices]
        body["usage"] = self._usage.body()
        if self._options.prompt_logprobs:
            body["prompt_logprobs"] = PromptLogprobs(self._scores, self._tokenizer)
        if self._options.token_ids:
            body["prompt_token_ids"] = list(self._work.token_ids)
        return body

    def _choice_body(self, choice: _Choice) -> JsonDict:
        content = "".join(choice.content)
        message: JsonDict = {
            "role": "assistant",
            "content": content if content or not choice.calls else None,
            "refusal": None,
        }
        if choice.calls:
            message["tool_calls"] = choice.calls
        if choice.reasoning:
            message["reasoning"] = message["reasoning_content"] = "".join(choice.reasoning)
        result = {
            "index": choice.index,
            "message": message,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._work.params.logprobs is not None:
            result["logprobs"] = {"content": choice.logprobs}
        if self._options.token_ids:
            result["token_ids"] = choice.token_ids
        return result

    def failure(self, error: ApiError) -> bytes:
        return failure_events(error)

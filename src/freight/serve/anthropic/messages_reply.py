"""The answer of `/v1/messages`, streamed or complete, from the deltas of its request.

Each block of the answer is one block of `content`. In a stream the final usage is in
`message_delta`, near the end; `message_start` has the usage known by then.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from freight.base.fields import JsonDict, JsonObject
from freight.outputs import FinishReason, RequestDelta
from freight.serve.answers.blocks import Block, Blocks, Step, StepKind, sse
from freight.serve.answers.pieces import PieceKind
from freight.serve.anthropic.errors import error_body
from freight.serve.call import ReplyHead, Served, TokenizedWork
from freight.serve.transport.errors import ApiError

_DELTA = {
    PieceKind.CONTENT: ("text_delta", "text"),
    PieceKind.REASONING: ("thinking_delta", "thinking"),
    PieceKind.TOOL_CALL: ("input_json_delta", "partial_json"),
}


class MessagesReply:
    """A `Reply`: see `freight.serve.call`."""

    def __init__(
        self,
        head: ReplyHead,
        served: Served,
        work: TokenizedWork,
        tools: Sequence[JsonObject],
        parallel: bool,
    ) -> None:
        self._head = head
        self._work = work
        self._blocks = Blocks(served, work, tools, parallel)

    def start(self) -> bytes:
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None}
        message["usage"] = self._usage() | {"output_tokens": 0}
        return _event("message_start", {"message": message})

    def advance(self, index: int, delta: RequestDelta) -> bytes:
        return b"".join(self._step(step) for step in self._blocks.advance(delta))

    def end(self) -> bytes:
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence}
        return _event("message_delta", {"delta": delta, "usage": self._usage()}) + _event(
            "message_stop", {}
        )

    def body(self) -> JsonDict:
        return self._message([self._content(block) for block in self._blocks.all])

    def failure(self, error: ApiError) -> bytes:
        return sse("error", error_body(error))

    def _message(self, content: list[JsonDict]) -> JsonDict:
        return {
            "id": f"msg_{self._head.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": self._stop_reason(),
            "stop_sequence": self._stop_sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> JsonDict:
        """Return the tokens so far. Those of the prompt are split into computed and found in the
        cache.
        """
        usage = self._blocks.usage
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
            "output_tokens_details": {"thinking_tokens": usage.reasoning},
        }

    @property
    def _stop_sequence(self) -> str | None:
        reason = self._blocks.stop_reason
        return reason if isinstance(reason, str) else None

    def _stop_reason(self) -> str:
        blocks = self._blocks
        if blocks.called:
            return "tool_use"
        if blocks.finish_reason is FinishReason.LENGTH:
            most = self._work.params.max_tokens
            # The context may be full first: max_tokens need not fit into it.
            if most is None or blocks.usage.completion >= most:
                return "max_tokens"
            return "model_context_window_exceeded"
        return "end_turn" if self._stop_sequence is None else "stop_sequence"

    def _content(self, block: Block) -> JsonDict:
        if block.kind is PieceKind.TOOL_CALL:
            return self._empty(block) | {"input": json.loads(block.text or "{}")}
        _, name = _DELTA[block.kind]
        return self._empty(block) | {name: block.text}

    def _empty(self, block: Block) -> JsonDict:
        """Return the block as it is before it has any text."""
        if block.kind is PieceKind.TOOL_CALL:
            return {
                "type": "tool_use",
                "id": block.id("toolu", self._head.request_id),
                "name": block.name,
                "input": {},
            }
        if block.kind is PieceKind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "text", "text": ""}

    def _step(self, step: Step) -> bytes:
        block = step.block
        if step.kind is StepKind.OPEN:
            return _event(
                "content_block_start", {"index": block.index, "content_block": self._empty(block)}
            )
        if step.kind is StepKind.CLOSE:
            return _event("content_block_stop", {"index": block.index})
        kind, name = _DELTA[block.kind]
        return _event(
            "content_block_delta", {"index": block.index, "delta": {"type": kind, name: step.text}}
        )


def _event(name: str, fields: JsonObject) -> bytes:
    return sse(name, {"type": name, **fields})

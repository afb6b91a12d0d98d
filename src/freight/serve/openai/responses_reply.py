"""The answer of `/v1/responses`, streamed or complete, from the deltas of its request.

Each block of the answer is one item of `output`. Events are numbered from 0 without gaps; the first
two are those of `start`, even if a delta was taken before it. The stream has no `[DONE]`: its last
event has the complete response.
"""

from __future__ import annotations

from collections.abc import Sequence

from freight.base.fields import JsonDict, JsonObject
from freight.outputs import FinishReason, RequestDelta
from freight.serve.answers.blocks import Block, Blocks, Step, StepKind, sse
from freight.serve.answers.pieces import PieceKind
from freight.serve.call import ReplyHead, Served, TokenizedWork
from freight.serve.transport.errors import ApiError

Item = JsonDict

_PART = {PieceKind.CONTENT: "output_text", PieceKind.REASONING: "reasoning_text"}
_PREFIX = {PieceKind.CONTENT: "msg", PieceKind.REASONING: "rs", PieceKind.TOOL_CALL: "fc"}


class ResponsesReply:
    """A `Reply`: see `freight.serve.call`."""

    def __init__(
        self,
        head: ReplyHead,
        served: Served,
        work: TokenizedWork,
        tools: Sequence[JsonObject],
        parallel: bool,
        echo: JsonObject,
    ) -> None:
        """Start with no tokens. echo: fields of the request that every response object repeats."""
        self._head = head
        self._echo = echo
        self._blocks = Blocks(served, work, tools, parallel)
        self._next = 2  # the number of the next event; those of `start` are 0 and 1

    def start(self) -> bytes:
        begun = self._response("in_progress", [])
        return b"".join(
            sse(name, {"type": name, "sequence_number": number, "response": begun})
            for number, name in enumerate(("response.created", "response.in_progress"))
        )

    def advance(self, index: int, delta: RequestDelta) -> bytes:
        steps = self._blocks.advance(delta)
        if self._blocks.finish_reason is not None and not self._blocks.all:
            steps += self._blocks.empty()  # an answer has at least one item
        return b"".join(data for step in steps for data in self._events(step))

    def end(self) -> bytes:
        body = self.body()
        return self._event(f"response.{body['status']}", {"response": body})

    def body(self) -> JsonDict:
        status = "incomplete" if self._blocks.finish_reason is FinishReason.LENGTH else "completed"
        return self._response(status, self._items())

    def failure(self, error: ApiError) -> bytes:
        response = self._response("failed", self._items())
        response["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", {"response": response})

    def _items(self) -> list[Item]:
        return [
            self._item(block, "completed" if block.complete else "incomplete")
            for block in self._blocks.all
        ]

    def _response(self, status: str, output: list[Item]) -> JsonDict:
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{self._head.request_id}",
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "stop_reason": self._blocks.stop_reason,
            "model": self._head.model,
            "output": output,
            **self._echo,
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _usage(self) -> JsonDict:
        usage = self._blocks.usage
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }

    def _item(self, block: Block, status: str, empty: bool = False) -> Item:
        """Return the item of a block. empty: before it has any text."""
        request_id = self._head.request_id
        item: Item = {"id": block.id(_PREFIX[block.kind], request_id), "status": status}
        if block.kind is PieceKind.TOOL_CALL:
            arguments = "" if empty else block.text
            call_id = block.id("call", request_id)
            return item | {
                "type": "function_call",
                "call_id": call_id,
                "name": block.name,
                "arguments": arguments,
            }
        content = [] if empty else [_part(block.kind, block.text)]
        if block.kind is PieceKind.REASONING:
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "message", "role": "assistant", "content": content}

    def _events(self, step: Step) -> list[bytes]:
        block = step.block
        if step.kind is StepKind.OPEN:
            item = self._item(block, "in_progress", empty=True)
            events = [
                self._event(
                    "response.output_item.added", {"output_index": block.index, "item": item}
                )
            ]
            if block.kind is not PieceKind.TOOL_CALL:
                events.append(
                    self._of(block, "response.content_part.added", {"part": _part(block.kind, "")})
                )
            return events
        if block.kind is PieceKind.TOOL_CALL:
            name = "response.function_call_arguments"
            text = "arguments"
        else:
            name = f"response.{_PART[block.kind]}"
            text = "text"
        more: JsonDict = {"logprobs": []} if block.kind is PieceKind.CONTENT else {}
        if step.kind is StepKind.TEXT:
            return [self._of(block, f"{name}.delta", {"delta": step.text, **more})]
        if block.kind is PieceKind.TOOL_CALL:
            more = {"name": block.name}
        events = [self._of(block, f"{name}.done", {text: block.text, **more})]
        if block.kind is not PieceKind.TOOL_CALL:
            events.append(
                self._of(
                    block, "response.content_part.done", {"part": _part(block.kind, block.text)}
                )
            )
        item = self._item(block, "completed" if block.complete else "incomplete")
        return [
            *events,
            self._event("response.output_item.done", {"output_index": block.index, "item": item}),
        ]

    def _of(self, block: Block, name: str, fields: JsonObject) -> bytes:
        """Return an event within the item of `block`."""
        where: JsonDict = {
            "item_id": block.id(_PREFIX[block.kind], self._head.request_id),
            "output_index": block.index,
        }
        if block.kind is not PieceKind.TOOL_CALL:
            where["content_index"] = 0
        return self._event(name, {**where, **fields})

    def _event(self, name: str, fields: JsonObject) -> bytes:
        number = self._next
        self._next += 1
        return sse(name, {"type": name, "sequence_number": number, **fields})


def _part(kind: PieceKind, text: str) -> JsonDict:
    part: JsonDict = {"type": _PART[kind], "text": text}
    return part | {"annotations": [], "logprobs": []} if kind is PieceKind.CONTENT else part

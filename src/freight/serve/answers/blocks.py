"""A completion as blocks in order: reasoning, text, tool calls. For APIs whose answers are lists.

Guarantees: a block is opened, grows, and is closed before the next one opens; only the last block
may be open; all are closed once the completion has ended. A stream of these steps and a body that
lists the blocks cannot differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from freight.base.fields import JsonObject
from freight.outputs import CompletionDelta, FinishReason, RequestDelta
from freight.serve.answers.pieces import Piece, PieceKind
from freight.serve.call import Served, TokenizedWork
from freight.serve.openai.stream import Usage, check_ending


@dataclass(eq=False, slots=True)
class Block:
    """One part of an answer.

    parts     its text so far: reasoning, content, or the arguments of a call, as JSON
    name      of the called function
    complete  whether it ended by itself; False while it is open, and if the length limit cut it
    """

    index: int
    kind: PieceKind
    name: str = ""
    parts: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def id(self, prefix: str, request_id: str) -> str:
        """Return an id that is unique over all blocks of all requests: the next request's messages
        refer to it.
        """
        return f"{prefix}_{hashlib.sha256(f'{request_id}/{self.index}'.encode()).hexdigest()[:24]}"


class StepKind(StrEnum):
    OPEN = "open"
    TEXT = "text"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class Step:
    """An event of a block. `text`: the text that a TEXT step adds."""

    kind: StepKind
    block: Block
    text: str = ""


class Blocks:
    """The blocks of a completion in progress.

    called         whether the answer ended in tool calls: the model stopped by itself, and every
                   call is complete
    finish_reason  None until the completion has ended
    stop_reason    the stop string or the id of the request's stop_token_ids that ended it, if one did
    """

    def __init__(
        self,
        served: Served,
        work: TokenizedWork,
        tools: Sequence[JsonObject] = (),
        parallel: bool = True,
    ) -> None:
        """Start without blocks. parallel: whether an answer may have several tool calls; else those
        after the first are dropped.
        """
        self.all: list[Block] = []
        self.usage = Usage(len(work.token_ids))
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.called = False
        self._parser = served.parser_of(work.text, tools) if served.parser_of else None
        self._has_tools = bool(tools)
        self._parallel = parallel
        self._tokenizer = served.tokenizer

    def advance(self, delta: RequestDelta) -> list[Step]:
        """Take a delta; returns its steps. Raises ApiError for a completion that ended by error or
        timeout.
        """
        self.usage.cached = max(self.usage.cached, delta.num_cached_tokens)
        steps: list[Step] = []
        for output in delta.outputs:
            self._advance(output, steps)
        return steps

    def empty(self) -> list[Step]:
        """Open and close a block of content without text, for an answer without any text."""
        block = Block(
            len(self.all), PieceKind.CONTENT, complete=self.finish_reason is FinishReason.STOP
        )
        self.all.append(block)
        return [Step(StepKind.OPEN, block), Step(StepKind.CLOSE, block)]

    def _advance(self, output: CompletionDelta, steps: list[Step]) -> None:
        check_ending(output)
        self.usage.completion += len(output.token_ids)
        pieces, cut = self._pieces(output)
        for piece in pieces:
            self._take(piece, steps)
        if output.finish_reason is not None:
            stopped = output.finish_reason is FinishReason.STOP
            self.finish_reason = output.finish_reason
            self.stop_reason = output.stop_reason
            self.called = stopped and not cut and self._has_call()
            self._close(steps, stopped)
            reasoning = [block.text for block in self.all if block.kind is PieceKind.REASONING]
            self.usage.count_reasoning(self._tokenizer, reasoning)

    def _pieces(self, output: CompletionDelta) -> tuple[list[Piece], bool]:
        """Return the pieces of a delta, and whether the answer ended in text that could have become
        a call.
        """
        if self._parser is None:
            return [Piece(PieceKind.CONTENT, output.text)] if output.text else [], False
        pieces = self._parser.feed(output.text) if output.text else []
        if output.finish_reason is None:
            return pieces, False
        last_pieces = self._parser.finish(output.finish_reason is FinishReason.STOP)
        cut = any(
            piece.kind is PieceKind.CONTENT and not piece.text.isspace() for piece in last_pieces
        )
        return pieces + last_pieces, cut

    def _take(self, piece: Piece, steps: list[Step]) -> None:
        kind = piece.kind
        text = piece.text
        if kind is PieceKind.TOOL_CALL and not self._has_tools:  # a call, without any tools
            kind = PieceKind.CONTENT
            text = f'{{"name": {json.dumps(piece.name)}, "arguments": {text}}}'
        is_call = kind is PieceKind.TOOL_CALL
        if is_call and not self._parallel and self._has_call():
            return
        if not text and not is_call:
            return
        if is_call or not self.all or self.all[-1].kind is not kind:
            self._close(steps, True)
            self.all.append(Block(len(self.all), kind, piece.name if is_call else ""))
            steps.append(Step(StepKind.OPEN, self.all[-1]))
        self.all[-1].parts.append(text)
        steps.append(Step(StepKind.TEXT, self.all[-1], text))
        if is_call:
            self._close(steps, True)

    def _has_call(self) -> bool:
        return any(block.kind is PieceKind.TOOL_CALL for block in self.all)

    def _close(self, steps: list[Step], complete: bool) -> None:
        """Close the block that is open, if one is."""
        if self.all and not self.all[-1].complete:
            self.all[-1].complete = complete
            steps.append(Step(StepKind.CLOSE, self.all[-1]))


def sse(name: str, data: JsonObject) -> bytes:
    """Return one named server-sent event. It is ASCII, so that no character can be read as a line
    end.
    """
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode("ascii")

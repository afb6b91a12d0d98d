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
from freight.serve.answers.pieces import MessagePieces, Piece, PieceKind
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

    called         whether the answer ended in tool calls, all of which are complete
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
        parser = served.parser_of(work.text, tools) if served.parser_of else None
        self._pieces = MessagePieces(parser, bool(tools), parallel)
        self._tokenizer = served.tokenizer

    @property
    def called(self) -> bool:
        return self._pieces.called

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
        for piece in self._pieces.of(output):
            self._take(piece, steps)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.stop_reason = output.stop_reason
            self._close(steps, output.finish_reason is FinishReason.STOP)
            reasoning = [block.text for block in self.all if block.kind is PieceKind.REASONING]
            self.usage.count_reasoning(self._tokenizer, reasoning)

    def _take(self, piece: Piece, steps: list[Step]) -> None:
        is_call = piece.kind is PieceKind.TOOL_CALL
        if is_call or not self.all or self.all[-1].kind is not piece.kind:
            self._close(steps, True)
            self.all.append(Block(len(self.all), piece.kind, piece.name))
            steps.append(Step(StepKind.OPEN, self.all[-1]))
        self.all[-1].parts.append(piece.text)
        steps.append(Step(StepKind.TEXT, self.all[-1], piece.text))
        if is_call:
            self._close(steps, True)

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

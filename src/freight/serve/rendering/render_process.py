"""The process that renders chat templates, tries grammars and tokenizes what is long.

Run as `python -m freight.serve.rendering.render_process FD`. A template is a program that comes
with a model, and a grammar is one that comes with a request. Either may loop for ever, take all
memory or crash the library that reads it. A library that tokenizes a long text holds the interpreter
for seconds. Only a separate process can then be killed without harm
to other requests. So this one holds nothing but a tokenizer, and answers one message after another
over the socket FD (`renderer.py` has the other end). It limits its own memory, ends with its
parent, and keeps no request.
"""

from __future__ import annotations

from freight.base.descent import ENDING, end_with_parent
from freight.base.fields import JsonDict, JsonObject

if __name__ == "__main__":
    end_with_parent()  # before imports that take long

import contextlib
import gc
import importlib
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from freight.errors import FreightError
from freight.serve.processes import frames
from freight.text.chat_text import ChatText
from freight.text.pooling_inputs import PairTokens
from freight.text.tokenizer import Tokenizer

CAP = 64 << 20  # bytes of a frame: LONGEST_TEXT with 12 bytes per character (a surrogate pair)
LONGEST_TEXT = 4 << 20  # characters of a rendered conversation
_PART = 1 << 13  # entries of a list, in one message
_LONGEST_REASON = 500  # characters of an error's message
# Parameters of Tokenizer.render_chat, which template values must not replace.
_OWN_NAMES = ("self", "messages", "add_generation_prompt", "continue_final_message")
_PAGE = resource.getpagesize()


class Answers:
    """The requests that this process answers, with {"value": ...} or {"refused": why}. Messages with
    {"part": ...} may come before: what is long comes in parts, each of which is read in a moment.

    An answer with "last": True is the last one: memory ran out, and the process ends after it.
    """

    def __init__(self, settings: JsonObject) -> None:
        """Load the tokenizer. Raises CheckpointError if there is none in the folder."""
        self._settings = settings
        self._tokenizer = Tokenizer.load(settings["folder"])
        if settings["chat_template"] is not None:
            self._tokenizer = self._tokenizer.with_chat_template(settings["chat_template"])
        self._tokenizer.prepare_chat()
        self._check: Callable[[JsonObject], None] | None = None  # made for the first grammar

    def answer(self, request: JsonObject) -> Iterator[JsonDict]:
        """Yield the messages of an answer."""
        try:
            yield from self._answered(request)
        except FreightError as error:
            if isinstance(error.__cause__, MemoryError):
                yield {
                    "refused": "the model's chat template takes too much memory for these messages",
                    "last": True,
                }
            else:
                yield {"refused": _presentable(error)}
        except MemoryError:
            yield {"refused": "it takes too much memory", "last": True}

    def _answered(self, request: JsonObject) -> Iterator[JsonDict]:
        if "conversation" in request:
            chat = self._render(request["conversation"])
            yield from _parts(chat.plain)
            yield {"value": chat.text}
        elif "encode" in request:
            asked = request["encode"]
            token_ids = self._tokenizer.encode(_prompt(asked), asked["add_special_tokens"])
            last = request["last"]
            yield from _parts(
                token_ids if last is None else token_ids[max(len(token_ids) - last, 0) :]
            )
            yield {"value": len(token_ids)}
        elif "pair" in request:
            pair = self._pair(**request["pair"])
            yield from _parts(pair.token_ids)
            yield {"value": pair.first_segment}
        elif "tokenize" in request:
            for part in self._tokenized(request["tokenize"]):
                yield {"part": part.decode()}
            yield {"value": None}
        else:
            self._check_grammar(request["grammar"])
            yield {"value": None}

    def _render(self, conversation: JsonObject) -> ChatText:
        values = conversation["template_values"]
        for name in _OWN_NAMES:
            if name in values:
                raise FreightError(f"{name} is not a value for the chat template")
        chat = self._tokenizer.render_chat(
            conversation["messages"],
            conversation["add_generation_prompt"],
            conversation["continue_final_message"],
            **values,
        )
        if len(chat.text) > LONGEST_TEXT:
            raise FreightError(
                f"the conversation has {len(chat.text)} characters as text; at most {LONGEST_TEXT} are read"
            )
        return chat

    def _tokenized(self, request: JsonObject) -> Iterator[bytes]:
        """Yield the answer of /tokenize, in parts."""
        from freight.serve.tokens import Tokenize  # most of these processes never need it

        tokenize = Tokenize("", **request["asked"])
        return tokenize.parts(_prompt(request), self._tokenizer, request["max_model_len"])

    def _pair(self, most: int | None, pooling: JsonObject, **pair: Any) -> PairTokens:
        """Return the tokens of a pair of texts."""
        # most of these processes never need them
        from freight.serve.call import Pair
        from freight.serve.pooling.pairs import read_pair
        from freight.serve.processes.wire import pooling_from_json

        return read_pair(self._tokenizer, pooling_from_json(pooling), Pair(**pair), most)

    def _check_grammar(self, outputs: JsonObject) -> None:
        if self._check is None:
            settings = self._settings
            module, name = settings["grammar_checker"].split(":")
            make = getattr(importlib.import_module(module), name)
            self._check = make(
                self._tokenizer, settings["vocab_size"], frozenset(settings["stop_token_ids"])
            )
        assert self._check is not None
        self._check(outputs)


def _prompt(request: JsonObject) -> str | ChatText:
    """Return the text of a request, or with `plain` the rendered conversation."""
    if request["plain"] is None:
        return str(request["text"])
    return ChatText(request["text"], tuple((begin, end) for begin, end in request["plain"]))


def _parts(entries: Sequence[Any]) -> Iterator[JsonDict]:
    for begin in range(0, len(entries), _PART):
        yield {"part": entries[begin : begin + _PART]}


def _presentable(error: Exception) -> str:
    """Return the message of an error, shortened and without addresses."""
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", str(error))
    return text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + "..."


def _limit_memory(more: int) -> None:
    """Limit the address space to `more` bytes above the present use. Also disable core files, which
    would hold prompts.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Only Linux reports the present use and honours the limit.
    with contextlib.suppress(OSError, ValueError):
        now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * _PAGE
        resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))


def serve(connection: socket.socket) -> None:
    """Answer messages until the connection ends. The first message has the settings."""
    messages = frames.receive(connection, CAP)
    settings = next(messages, None)
    if settings is None:
        return
    try:
        answers = Answers(settings)
    except FreightError as error:
        frames.send(connection, {"failed": str(error)})
        return
    gc.collect()
    gc.freeze()
    _limit_memory(settings["memory"])
    os.nice(settings["niceness"])
    frames.send(connection, {"ready": True})
    for request in messages:
        for reply in answers.answer(request):
            frames.send(connection, reply, CAP)
            if reply.get("last"):
                return


def main() -> None:
    for number in ENDING:  # Ctrl-C reaches all processes of a terminal; the parent ends this one
        signal.signal(number, signal.SIG_IGN)
    with (
        socket.socket(fileno=int(sys.argv[1])) as connection,
        contextlib.suppress(OSError, frames.FrameError),
    ):
        serve(connection)


if __name__ == "__main__":
    main()

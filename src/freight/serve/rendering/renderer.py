"""`Renderer`: chat templates, grammars and long texts, in a separate process that is killed at a
deadline.

Guarantees: a request whose template or grammar loops, takes too much memory or crashes gets an
error, no other request fails, and the next one gets a fresh process. The process handles one
request at a time, of each key in turn; when too many wait, the answer is 429. It is started at the first use, or by
`start`, with an environment without secrets, and it ends with this process. Messages are JSON, not
pickle.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from freight.base.fields import JsonDict, JsonObject
from freight.model.config.pooling import PoolingConfig
from freight.serve.call import Conversation, Pair
from freight.serve.processes import frames
from freight.serve.processes.children import spawn
from freight.serve.processes.frames import FrameError
from freight.serve.rendering.render_process import CAP
from freight.serve.rendering.turns import NoTurnError, Turns
from freight.serve.tokens import Tokenize
from freight.serve.transport.errors import ApiError
from freight.serve.transport.slices import is_large
from freight.text.chat_text import ChatText
from freight.text.pooling_inputs import PairTokens

logger = logging.getLogger("freight")

GRAMMAR_CHECKER = "freight.engine.grammar:grammar_checker"
_PASSED_ON = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "PYTHONPATH",
    "PYTHONHOME",
    "LD_LIBRARY_PATH",
)
_CRASHES = (  # exit statuses of a library that crashed on its input
    -signal.SIGSEGV,
    -signal.SIGABRT,
    -signal.SIGBUS,
    -signal.SIGILL,
)

MAX_WAITING = 64  # requests that wait for the process at most


class Renderer:
    """Renders conversations and checks grammars. For use within one event loop."""

    def __init__(
        self,
        folder: str | Path,
        vocab_size: int,
        stop_token_ids: Iterable[int] = (),
        *,
        deadline_s: float = 10.0,
        start_deadline_s: float = 60.0,
        max_waiting: int = MAX_WAITING,
        memory: int = 2 << 30,
        niceness: int = 0,
        grammar_checker: str = GRAMMAR_CHECKER,
        chat_template: str | None = None,
    ) -> None:
        """Keep the settings; the process is not started yet.

        folder           the folder of the tokenizer
        vocab_size       of the model; grammars are compiled for it
        stop_token_ids   of the model; grammars are compiled for them
        deadline_s       seconds for one request, from when the process takes it
        max_waiting      requests that wait for the process at most
        memory           bytes of address space for one request
        niceness         added to the process's: the more, the later it runs where cores are few
        grammar_checker  "module:function": called with tokenizer, vocab_size and stop_token_ids, it
                         returns a function that raises RequestError for a grammar that cannot be
                         used
        chat_template    replaces the model's template
        """
        self._settings = {
            "folder": str(folder),
            "vocab_size": vocab_size,
            "stop_token_ids": sorted(stop_token_ids),
            "memory": memory,
            "niceness": niceness,
            "grammar_checker": grammar_checker,
            "chat_template": chat_template,
        }
        self.deadline_s = deadline_s
        self._start_deadline_s = start_deadline_s
        self._turns = Turns(max_waiting)
        self._process: _Process | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Id of the render process; None before it starts."""
        return self._process.popen.pid if self._process else None

    async def start(self) -> None:
        """Start the process before the first request. Raises ApiError if that fails."""
        await self._turns.acquire()
        try:
            await self._ready()
        finally:
            self._turns.release()

    async def close(self) -> None:
        """End the process. Requests that wait fail."""
        self._is_closed = True
        if self._process is not None:
            await self._end(self._process)

    async def render(self, conversation: Conversation, key: str | None = None) -> ChatText:
        """Render `conversation` to the text for `Tokenizer.encode_chat`, special tokens included.
        `key`: the name of the key that asks.

        Raises ApiError: 400 for a conversation that the template refuses, 429 if too many requests
        wait, 500 if the template did not end in time.
        """
        request = {
            "conversation": {
                "messages": list(conversation.messages),
                "add_generation_prompt": conversation.add_generation_prompt,
                "continue_final_message": conversation.continue_final_message,
                "template_values": dict(conversation.template_values),
            }
        }
        plain: list[tuple[int, int]] = []
        try:
            text = await self._ask(
                request, "messages", key, lambda part: plain.extend(map(tuple, part))
            )
        except TimeoutError:
            raise ApiError(
                500,
                f"the model's chat template did not end within {self.deadline_s:g} s for these messages",
                code="template_error",
            ) from None
        except _EndedError:
            raise ApiError(
                500,
                "the process that renders chat templates ended on these messages",
                code="template_error",
            ) from None
        return ChatText(text, tuple(plain))

    async def encode(
        self, text: str | ChatText, add_special_tokens: bool, last: int | None, key: str | None
    ) -> tuple[list[int], int]:
        """Return the token ids of a text or a rendered conversation, the `last` of them (None: all),
        and the number of all.

        Raises ApiError: 400 for a text that the tokenizer refuses, or that it did not read in time,
        429 if too many requests wait.
        """
        request = {"encode": _written(text) | {"add_special_tokens": add_special_tokens}}
        token_ids: list[int] = []
        count = await self._read(request | {"last": last}, text, key, token_ids.extend)
        return token_ids, count

    async def read_pair(
        self,
        pair: Pair,
        pooling: PoolingConfig,
        most: int | None,
        where: str,
        key: str | None,
    ) -> PairTokens:
        """Return the tokens of a pair (`serve.pooling.pairs`), which a chat template may put.

        where  the request's field, for errors

        Raises ApiError as `render`.
        """
        asked = asdict(pair) | {"most": most, "pooling": asdict(replace(pooling, layers=()))}
        token_ids: list[int] = []
        try:
            first_segment = await self._ask({"pair": asked}, where, key, token_ids.extend)
        except TimeoutError:
            raise ApiError(
                500,
                f"{where} was not put as a pair and tokenized within {self.deadline_s:g} s; send shorter texts",
                param=where,
                code="template_error",
            ) from None
        except _EndedError:
            raise ApiError(
                500,
                f"the process that renders chat templates ended on {where}",
                param=where,
                code="template_error",
            ) from None
        return PairTokens(token_ids, first_segment)

    async def tokenized(
        self, text: str | ChatText, asked: Tokenize, max_model_len: int, key: str | None
    ) -> list[bytes]:
        """Return the answer of /tokenize, JSON in parts. Raises as `encode`."""
        options = {
            "add_special_tokens": asked.add_special_tokens,
            "with_texts": asked.with_texts,
            "with_offsets": asked.with_offsets,
        }
        request = {"tokenize": _written(text) | {"asked": options, "max_model_len": max_model_len}}
        parts: list[bytes] = []
        await self._read(request, text, key, lambda part: parts.append(part.encode()))
        return parts

    async def _read(
        self,
        request: object,
        text: str | ChatText,
        key: str | None,
        take: Callable[[Any], None],
    ) -> Any:
        """Ask for something about a text."""
        characters = len(text.text if isinstance(text, ChatText) else text)
        param = "messages" if isinstance(text, ChatText) else "prompt"
        try:
            return await self._ask(request, param, key, take)
        except (TimeoutError, _EndedError) as error:
            if isinstance(error, _EndedError) and error.status not in _CRASHES:
                raise ApiError(
                    500, "the process that tokenizes long texts ended on this one"
                ) from None
            raise ApiError(
                400,
                f"the text of {characters} characters was not tokenized within {self.deadline_s:g} s and "
                f"{self._settings['memory']} bytes; send a shorter one",
                param=param,
            ) from None

    async def check_grammar(self, outputs: JsonObject, key: str | None = None) -> None:
        """Compile a grammar (`SamplingParams.structured_outputs`) and drop it.

        Raises ApiError: 400 for a grammar that cannot be used, or is too large to compile within
        the deadline; 429 if too many requests wait, 500 if the process was killed from outside.
        """
        too_large = ApiError(
            400,
            f"the grammar is too large: it was not compiled within {self.deadline_s:g} s and "
            f"{self._settings['memory']} bytes; make it smaller",
            param="structured_outputs",
            code="invalid_grammar",
        )
        try:
            await self._ask({"grammar": dict(outputs)}, "structured_outputs", key)
        except TimeoutError:
            raise too_large from None
        except _EndedError as error:
            if error.status in _CRASHES:
                raise too_large from None
            raise ApiError(
                500, "the process that compiles grammars ended on this one", code="grammar_error"
            ) from None

    async def _ask(
        self,
        request: object,
        param: str,
        key: str | None,
        take: Callable[[Any], None] = lambda part: None,
    ) -> Any:
        """Return the value that the process answers; `take` gets the parts before it. Raises
        ApiError, TimeoutError, _EndedError.
        """
        try:
            if is_large(request):
                frame = await asyncio.to_thread(frames.encode_in_pieces, request, CAP)
            else:
                frame = frames.encode(request, CAP)
        except (FrameError, TypeError, ValueError, RecursionError) as error:
            raise ApiError(
                400, f"{param} cannot be written as JSON: {error}", param=param
            ) from None
        try:
            await self._turns.acquire(key)
        except NoTurnError as error:
            raise ApiError(
                429,
                f"{error.num_waiting} requests wait for the chat template; try again",
                headers={"Retry-After": "1"},
            ) from None
        # An exchange goes on if its caller is cancelled: the process has the request, and its
        # answer must not be taken for that of the next request.
        exchange = asyncio.create_task(self._exchange(frame, take))
        exchange.add_done_callback(self._exchanged)
        reply = await asyncio.shield(exchange)
        if "refused" in reply:
            raise ApiError(400, reply["refused"], param=param)
        return reply["value"]

    def _exchanged(self, exchange: asyncio.Task[JsonDict]) -> None:
        self._turns.release()
        if not exchange.cancelled():
            exchange.exception()  # marks it as retrieved: there may be no waiter any more

    async def _exchange(self, frame: bytes, take: Callable[[Any], None]) -> JsonDict:
        process = await self._ready()
        try:
            async with asyncio.timeout(self.deadline_s):
                reply = await process.ask(frame, take)
        except TimeoutError:
            logger.warning(
                "a chat template or a grammar took longer than %g s; its process is killed",
                self.deadline_s,
            )
            await self._end(process)
            raise
        except (OSError, FrameError):
            status = await self._end(process)
            logger.warning(
                "the process for chat templates and grammars ended with status %d", status
            )
            raise _EndedError(status) from None
        if reply.get("last"):
            await self._end(process)
        return reply

    async def _ready(self) -> _Process:
        """Return the process, started if none runs. Raises ApiError."""
        if self._is_closed:
            raise ApiError(
                503,
                "the process for chat templates and grammars was ended; try again",
                headers={"Retry-After": "1"},
            )
        if self._process is not None and self._process.has_ended:
            await self._end(self._process)
        if self._process is None:
            self._process = process = await _Process.start()
            try:
                async with asyncio.timeout(self._start_deadline_s):
                    reply = await process.ask(frames.encode(self._settings))
            except (TimeoutError, OSError, FrameError) as error:
                reply = {"failed": repr(error)}
            if "ready" not in reply:
                await self._end(process)
                logger.error(
                    "the process for chat templates and grammars did not start: %s", reply["failed"]
                )
                raise ApiError(
                    500,
                    "the process that renders chat templates did not start",
                    code="template_error",
                )
        return self._process

    async def _end(self, process: _Process) -> int:
        if self._process is process:
            self._process = None
        return await process.end()


def _written(text: str | ChatText) -> JsonDict:
    if isinstance(text, ChatText):
        return {"text": text.text, "plain": text.plain}
    return {"text": text, "plain": None}


class _EndedError(Exception):
    """The process exited during a request, with this status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class _Process:
    """The running process and this end of its socket."""

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.popen = popen
        self._reader = reader
        self._messages = frames.messages(reader, CAP)
        self._writer = writer

    @property
    def has_ended(self) -> bool:
        """True once the process is ending. Its socket closes before its exit: freeing its memory
        takes a moment.
        """
        return self._reader.at_eof() or self.popen.poll() is not None

    @classmethod
    async def start(cls) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs:
            # -P: nothing is imported from the working directory.
            command = [
                sys.executable,
                "-P",
                "-m",
                "freight.serve.rendering.render_process",
                str(theirs.fileno()),
            ]
            environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
            popen = spawn(
                command,
                env=environment
                | {"USE_TORCH": "0", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(popen, reader, writer)

    async def ask(self, frame: bytes, take: Callable[[Any], None] = lambda part: None) -> JsonDict:
        """Send a frame; returns the reply, after `take` got the parts that came before it. Raises
        FrameError, and OSError if the process ended.
        """
        self._writer.write(frame)
        await self._writer.drain()
        while True:
            reply: JsonDict | None = await anext(self._messages, None)
            if reply is None:
                raise ConnectionResetError("the process ended")
            if "part" not in reply:
                return reply
            take(reply["part"])
            await asyncio.sleep(0)  # parts may come faster than other requests get a turn

    async def end(self) -> int:
        """Kill the process; returns its exit status, which is from before the kill if it had
        already exited.
        """
        self.popen.kill()
        self._writer.close()
        return await asyncio.to_thread(self.popen.wait)  # freeing gigabytes takes a moment

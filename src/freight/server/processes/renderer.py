"""`Renderer`: chat templates and grammars, run in a separate process that is killed at a deadline.

Guarantees: a request whose template or grammar loops, takes too much memory or crashes gets an
error, no other request fails, and the next one gets a fresh process. The process handles one
request at a time; when too many wait, the answer is 429. It is started at the first use, or by
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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from freight.processes import frames
from freight.processes.children import spawn
from freight.processes.frames import FrameError
from freight.server.call import Conversation
from freight.server.processes.render_process import CAP
from freight.server.transport.errors import ApiError
from freight.text.chat_text import ChatText

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
        max_waiting: int = 64,
        memory: int = 2 << 30,
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
            "grammar_checker": grammar_checker,
            "chat_template": chat_template,
        }
        self._deadline_s = deadline_s
        self._start_deadline_s = start_deadline_s
        self._max_waiting = max_waiting
        self._waiting = 0
        self._turn = asyncio.Lock()
        self._process: _Process | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Id of the render process; None before it starts."""
        return self._process.popen.pid if self._process else None

    async def start(self) -> None:
        """Start the process before the first request. Raises ApiError if that fails."""
        async with self._turn:
            await self._ready()

    async def close(self) -> None:
        """End the process. Requests that wait fail."""
        self._is_closed = True
        if self._process is not None:
            await self._end(self._process)

    async def render(self, conversation: Conversation) -> ChatText:
        """Render `conversation` to the text for `Tokenizer.encode_chat`, special tokens included.

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
        try:
            text, plain = await self._ask(request, "messages")
        except TimeoutError:
            raise ApiError(
                500,
                f"the model's chat template did not end within {self._deadline_s:g} s for these messages",
                code="template_error",
            ) from None
        except _EndedError:
            raise ApiError(
                500,
                "the process that renders chat templates ended on these messages",
                code="template_error",
            ) from None
        return ChatText(text, tuple((begin, end) for begin, end in plain))

    async def check_grammar(self, outputs: Mapping[str, Any]) -> None:
        """Compile a grammar (`SamplingParams.structured_outputs`) and drop it.

        Raises ApiError: 400 for a grammar that cannot be used, or is too large to compile within
        the deadline; 429 if too many requests wait, 500 if the process was killed from outside.
        """
        too_large = ApiError(
            400,
            f"the grammar is too large: it was not compiled within {self._deadline_s:g} s and "
            f"{self._settings['memory']} bytes; make it smaller",
            param="structured_outputs",
            code="invalid_grammar",
        )
        try:
            await self._ask({"grammar": dict(outputs)}, "structured_outputs")
        except TimeoutError:
            raise too_large from None
        except _EndedError as error:
            if error.status in _CRASHES:
                raise too_large from None
            raise ApiError(
                500, "the process that compiles grammars ended on this one", code="grammar_error"
            ) from None

    async def _ask(self, request: object, param: str) -> Any:
        """Return the value that the process answers. Raises ApiError, TimeoutError, _EndedError."""
        try:
            frame = frames.encode(request, CAP)
        except (FrameError, TypeError, ValueError, RecursionError) as error:
            raise ApiError(
                400, f"{param} cannot be written as JSON: {error}", param=param
            ) from None
        if self._waiting >= self._max_waiting:
            raise ApiError(
                429,
                f"{self._waiting} requests wait for the chat template; try again",
                headers={"Retry-After": "1"},
            )
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        # An exchange goes on if its caller is cancelled: the process has the request, and its
        # answer must not be taken for that of the next request.
        exchange = asyncio.create_task(self._exchange(frame))
        exchange.add_done_callback(self._exchanged)
        reply = await asyncio.shield(exchange)
        if "refused" in reply:
            raise ApiError(400, reply["refused"], param=param)
        return reply["value"]

    def _exchanged(self, exchange: asyncio.Task[dict[str, Any]]) -> None:
        self._turn.release()
        if not exchange.cancelled():
            exchange.exception()  # marks it as retrieved: there may be no waiter any more

    async def _exchange(self, frame: bytes) -> dict[str, Any]:
        process = await self._ready()
        try:
            async with asyncio.timeout(self._deadline_s):
                reply = await process.ask(frame)
        except TimeoutError:
            logger.warning(
                "a chat template or a grammar took longer than %g s; its process is killed",
                self._deadline_s,
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
                "freight.server.processes.render_process",
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

    async def ask(self, frame: bytes) -> dict[str, Any]:
        """Send a frame; returns the reply. Raises FrameError, and OSError if the process ended."""
        self._writer.write(frame)
        await self._writer.drain()
        reply: dict[str, Any] | None = await anext(self._messages, None)
        if reply is None:
            raise ConnectionResetError("the process ended")
        return reply

    async def end(self) -> int:
        """Kill the process; returns its exit status, which is from before the kill if it had
        already exited.
        """
        self.popen.kill()
        self._writer.close()
        return await asyncio.to_thread(self.popen.wait)  # freeing gigabytes takes a moment

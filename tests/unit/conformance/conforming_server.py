"""A server that writes OpenAI's shapes over letters instead of a model, and can break one rule of a
stream on demand.

The conformance suite is proved with it: it passes as it is, and fails the right test with each rule
broken.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HEAD = {"created": 1, "model": "letters", "system_fingerprint": "fp"}


def letters(prompt: str, count: int, start: int) -> str:
    """`count` letters that follow from the prompt."""
    begin = sum(map(ord, prompt)) + start
    return "".join(chr(97 + (begin + 5 * i) % 26) for i in range(count))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one write for an answer
    disable_nagle_algorithm = True
    broken = ""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
        self.answer(status, error if self.broken == "envelope" else {"error": error})

    def do_GET(self) -> None:
        model = {
            "id": "letters",
            "object": "model",
            "created": 1,
            "owned_by": "x",
            "root": "x",
            "max_model_len": 256,
        }
        if self.path in ("/v1/models", "/v1/models/letters"):
            self.answer(
                200, {"object": "list", "data": [model]} if self.path == "/v1/models" else model
            )
        else:
            self.refuse(404, "no such path or model")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = {name: value for name, value in body.items() if value is not None}
        if body.get("model", "") not in ("", "letters", "dummy", "tgi"):
            self.refuse(404, "the model is letters", "model", "model_not_found")
        elif not 0 <= body.get("temperature", 1) <= 2:
            self.refuse(400, "temperature is outside [0, 2]", "temperature")
        else:
            self.generate(body, self.path.endswith("chat/completions"))

    def generate(self, body: dict[str, Any], is_chat: bool) -> None:
        if is_chat:
            prompts = ["".join(f"{m['role']}: {m['content']}" for m in body["messages"])]
        else:
            prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        count = body.get("max_completion_tokens", body.get("max_tokens", 16))
        texts = [letters(prompt, count, 0) for prompt in prompts for _ in range(body.get("n", 1))]
        reasons = ["length"] * len(texts)
        for stop in body.get("stop", []):
            for index, text in enumerate(texts):
                if stop in text:
                    texts[index], reasons[index] = text[: text.index(stop)], "stop"
        num_prompt, num_tokens = sum(map(len, prompts)), sum(map(len, texts))
        if body.get("stream"):
            self.stream(body, is_chat, texts, reasons, num_prompt)
            return
        choices = [
            self.whole(is_chat, i, *one) for i, one in enumerate(zip(texts, reasons, strict=True))
        ]
        kind = "chat.completion" if is_chat else "text_completion"
        usage = self.usage(num_prompt, num_tokens)
        self.answer(
            200,
            {"id": self.id(is_chat), "object": kind, **HEAD, "choices": choices, "usage": usage},
        )

    def id(self, is_chat: bool) -> str:
        return "chatcmpl-1" if is_chat else "cmpl-1"

    def usage(self, num_prompt: int, num_tokens: int) -> dict[str, Any]:
        counts = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt + num_tokens,
        }
        details = {
            "completion_tokens_details": {"reasoning_tokens": 0},
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        return counts | details

    def whole(self, is_chat: bool, index: int, text: str, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "logprobs": None, "finish_reason": reason} | (
            {"message": message} if is_chat else {"text": text}
        )

    def stream(
        self,
        body: dict[str, Any],
        is_chat: bool,
        texts: list[str],
        reasons: list[str],
        num_prompt: int,
    ) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        options, kind = (
            body.get("stream_options", {}),
            "chat.completion.chunk" if is_chat else "text_completion",
        )
        if self.broken == "object" and is_chat:
            kind = "chat.completion"
        sent = 0

        def send(choices: list[Any], usage: bool = False) -> None:
            chunk = {"id": self.id(is_chat), "object": kind, **HEAD, "choices": choices}
            if usage or options.get("continuous_usage_stats"):
                chunk["usage"] = self.usage(num_prompt, sent)
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

        def part(
            index: int, text: str | None, reason: str | None = None, **delta: Any
        ) -> dict[str, Any]:
            content = {} if text is None else {"content": text}
            own = {"delta": delta | content} if is_chat else {"text": text or ""}
            return {"index": index, "finish_reason": reason} | own

        order = list(enumerate(texts))
        if is_chat:
            for index, _ in reversed(order) if self.broken == "roles" else order:
                send([part(index, "", role="assistant")])
        for index, text in order:
            for letter in text:
                sent += 1
                send([part(index, letter)])
            for _ in range(2 if self.broken == "two-ends" else 1):
                send([part(index, None, reasons[index])])
        if options.get("include_usage") and self.broken != "no-usage":
            send([], usage=True)
        if self.broken != "no-done":
            self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True


@contextmanager
def serving(broken: str = "") -> Iterator[str]:
    """The URL of a server that breaks a rule, none if it has no name."""
    handler = type("BreakingHandler", (Handler,), {"broken": broken})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()

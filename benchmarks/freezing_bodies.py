"""Does one request hold up the others? Sends bodies of 4 MB to every endpoint that reads one, and
measures meanwhile, with another key, how long /health takes and how long a stream stands still.

    python benchmarks/freezing_bodies.py [--only TEXT] [--megabytes 4]

Prints a line for each body: its answer's status, the seconds it took, the longest /health and the
longest gap of the stream, in brackets the same two for as long without the body, and the load average.
Exits with 1 if one of them is above the limits (0.2 and 0.3 s, plus what they were without the body).
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

HEALTH_LIMIT = 0.2  # seconds
GAP_LIMIT = 0.3
_LEAST_ALONE = 1.0  # seconds that are measured without a body after each, if it took less
_SETTLING = 0.2  # seconds between the two
_TIMEOUT = 300.0
_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.role }}: {{ message.content }}\n{% endfor %}"


def texts(size: int) -> dict[str, str]:
    """Return texts of `size` bytes."""
    rng = random.Random(0)
    words = "The quick brown fox jumps over the lazy dog. "
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    return {
        "words": words * (size // len(words)),
        "one letter": "a" * size,
        "spaces": " " * size,
        "base64": "".join(rng.choices(alphabet, k=size)),
        "unicode": "𓀀漢é" * (size // 9),
        "newlines": "\n" * (size // 2),
        "control tokens": "<|im_start|>a</s>" * (size // 17),
    }


def lists(size: int) -> dict[str, str]:
    """Return JSON values of `size` bytes that are no text."""

    def repeated(entry: str) -> str:
        return "[" + ",".join([entry] * (size // (len(entry) + 1))) + "]"

    return {
        "ids": repeated("7"),
        "larger ids": repeated("1234"),
        "numbers": repeated("1e101"),
        "empty strings": repeated('""'),
        "strings": repeated('"ab cd"'),
        "nulls": repeated("null"),
        "objects": repeated('{"role":"user","content":"hello hello hello"}'),
        "nested": "[" + ",".join(["[" * 60 + "1" * 2500 + "]" * 60] * (size // 2621)) + "]",
        "pairs of surrogates": repeated('"\\ud83d\\ude00"'),
        "keys": "{" + ",".join(f'"{number:x}":1' for number in range(size // 10)) + "}",
    }


def bodies(size: int) -> Iterator[tuple[str, str, str]]:
    """Yield (what, path, body)."""
    room = size - 300
    yield from list_bodies(room)
    for name, text in texts(room).items():
        value = json.dumps(text, ensure_ascii=False)
        if len(value.encode()) > room:
            value = json.dumps(text[: len(text) // 2], ensure_ascii=False)
        message = f'[{{"role":"user","content":{value}}}]'
        parts = f'[{{"role":"user","content":[{{"type":"text","text":{value}}}]}}]'
        for path, fields in (
            ("/tokenize", f'"prompt":{value}'),
            ("/tokenize", f'"prompt":{value},"return_token_strs":true'),
            ("/tokenize", f'"inputs":{value}'),
            ("/tokenize", f'"messages":{message}'),
            ("/v1/completions", f'"prompt":{value}'),
            ("/v1/completions", f'"prompt":{value},"truncate_prompt_tokens":8,"max_tokens":2'),
            ("/v1/chat/completions", f'"messages":{parts}'),
            ("/v1/responses", f'"input":{value}'),
            ("/v1/messages", f'"max_tokens":2,"messages":{message}'),
            ("/v1/messages/count_tokens", f'"messages":{message}'),
            ("/generate", f'"inputs":{value},"parameters":{{"truncate":8,"max_new_tokens":2}}'),
        ):
            others = re.sub(r'(^|,)"[a-z_]+":(\[|").*', "", fields)
            yield f"{name} as {fields.split(':')[0]} {others}", path, f"{{{fields}}}"


def list_bodies(room: int) -> Iterator[tuple[str, str, str]]:
    """Yield bodies whose bytes are no text."""
    for name, value in lists(room).items():
        for path, field in (
            ("/detokenize", "tokens"),
            ("/tokenize", "messages"),
            ("/v1/completions", "prompt"),
            ("/v1/completions", "stop_token_ids"),
            ("/v1/completions", "logit_bias"),
            ("/v1/completions", "stop"),
            ("/v1/completions", "unknown"),
            ("/v1/chat/completions", "messages"),
            ("/v1/chat/completions", "tools"),
            ("/v1/chat/completions", "chat_template_kwargs"),
            ("/v1/responses", "input"),
            ("/v1/messages", "messages"),
            ("/v1/messages/count_tokens", "messages"),
            ("/generate", "inputs"),
        ):
            more = (
                ""
                if field in ("messages", "input", "tokens", "inputs", "prompt")
                else ',"prompt":"a"'
            )
            if path == "/v1/chat/completions" and field != "messages":
                more = ',"messages":[{"role":"user","content":"a"}]'
            yield f"{name} as {field}", path, f'{{"{field}":{value}{more}}}'


class Watch:
    """Another key's stream and /health, while the body is processed."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._is_over = threading.Event()
        self._health = self._gap = 0.0
        self._threads = [
            threading.Thread(target=self._ask_health, daemon=True),
            threading.Thread(target=self._stream, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def longest(self, of: Callable[[], object]) -> tuple[object, float, float]:
        """Return what `of` returns, the longest /health and the longest gap meanwhile, in seconds."""
        self._health = self._gap = 0.0
        value = of()
        return value, self._health, self._gap

    def end(self) -> None:
        self._is_over.set()

    def _ask_health(self) -> None:
        connection = http.client.HTTPConnection(self._host, timeout=_TIMEOUT)
        while not self._is_over.is_set():
            begun = time.perf_counter()
            connection.request("GET", "/health")
            assert connection.getresponse().read()
            self._health = max(self._health, time.perf_counter() - begun)
            time.sleep(0.02)

    def _stream(self) -> None:
        body = {"prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True}
        last = time.perf_counter()
        connection = http.client.HTTPConnection(self._host, timeout=_TIMEOUT)
        while not self._is_over.is_set():
            headers = {"Authorization": "Bearer other", "Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            while answer.readline():
                now = time.perf_counter()
                self._gap = max(self._gap, now - last)
                last = now


def ask(host: str, path: str, body: bytes) -> int:
    """Return the status of an answer, once it has been read."""
    connection = http.client.HTTPConnection(host, timeout=_TIMEOUT)
    headers = {"Authorization": "Bearer large", "Content-Type": "application/json"}
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    while answer.read(1 << 16):
        pass
    connection.close()
    return answer.status


def _processor() -> str:
    with Path("/proc/cpuinfo").open() as info:
        return next((line.split(":")[1].strip() for line in info if "model name" in line), "?")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="bodies whose line contains this")
    parser.add_argument("--megabytes", type=float, default=4.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(_TEMPLATE)
        num_late = measure(template, options.only, int(options.megabytes * (1 << 20)))
    print(f"{num_late} late")
    return int(num_late > 0)


def measure(template: Path, only: str, size: int) -> int:
    """Print a line for each body; returns how many held up the others."""
    command = [sys.executable, "-m", "freight", "serve", "demo", "--port", "0"]
    command += ["--chat-template", str(template)]
    command += ["--api-key", "large:large", "--api-key", "other:other"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    host = ""
    for line in server.stderr:
        if "listening on" in line:
            host = urlsplit(line.split()[-1]).netloc
        if "ready" in line:
            break
    threading.Thread(target=server.stderr.read, daemon=True).start()
    num_late = 0
    print(f"{os.cpu_count()} cores, {_processor()}", flush=True)
    watch = Watch(host)
    try:
        for what, path, body in bodies(size):
            if only not in f"{path} {what}":
                continue
            raw = body.encode()
            begun = time.perf_counter()
            status, health, gap = watch.longest(lambda p=path, r=raw: ask(host, p, r))  # type: ignore[misc]
            seconds = time.perf_counter() - begun
            time.sleep(_SETTLING)
            as_long = max(seconds, _LEAST_ALONE)
            _, health_alone, gap_alone = watch.longest(lambda s=as_long: time.sleep(s))  # type: ignore[misc]
            is_late = health > HEALTH_LIMIT + health_alone or gap > GAP_LIMIT + gap_alone
            num_late += is_late
            print(
                f"{path:26} {what:44.44} {len(raw):8} {status} {seconds:6.2f} s  "
                f"/health {health:.3f} ({health_alone:.3f})  gap {gap:.3f} ({gap_alone:.3f})"
                f"  load {os.getloadavg()[0]:.1f}{'  LATE' if is_late else ''}",
                flush=True,
            )
    finally:
        watch.end()
        server.terminate()
        server.wait()
    return num_late


if __name__ == "__main__":
    sys.exit(main())

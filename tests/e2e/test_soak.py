"""64 clients at once, for minutes: everything that clients do, on a cache too small for it, and
nothing that is left.

Some seconds of it run with the other tests. FREIGHT_SOAK_SECONDS=300 is what `make soak` runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.asking import Server
from tests.demo_chat import demo_with_chat_template
from tests.serving import ServeProcess

from freight.lab.bench.http_stream import Address, Connection, EventReader, StreamError

SECONDS = float(os.environ.get("FREIGHT_SOAK_SECONDS", "4"))
WARM = 60.0 if SECONDS >= 180 else 2.0  # until then memory may grow
MOST = SECONDS + 240.0  # a slow machine needs longer until enough has happened
PATIENCE = 300.0  # seconds: what takes longer will never be answered
NUM_CLIENTS = 64
OPTIONS = ["--kv-cache-dtype", "fp8", "--kv-cache-memory", "1MiB", "--max-num-seqs", "32"]
OPTIONS += ["--max-queue", "128", "--max-num-batched-tokens", "256"]
WORDS = ("def", "class", "import", "return", "self", "value", "index")
WORDS += ("name", "list", "for", "while", "range", "print")
JSON = {"Content-Type": "application/json"}
TAGGED = [  # each with a prompt of its own; what comes for it belongs to no other
    {
        "prompt": f"# {i}: {WORDS[i % len(WORDS)]} {WORDS[i * 7 % len(WORDS)]}\ndef f{i}(",
        "max_tokens": 8 + i % 5 * 8,
        "ignore_eos": True,
        **({"temperature": 0.9, "seed": i} if i % 2 else {"temperature": 0}),
    }
    for i in range(NUM_CLIENTS)
]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
MALFORMED = (
    b"", b"{", b"[]", b'{"prompt": 1}', b'{"prompt": "x", "n": 0}', b'{"prompt": "\\ud800"}', b"\xff", b"[" * 100_000
)  # fmt: skip


@dataclass
class Seen:
    """What clients got."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    left: int = 0
    compared: int = 0

    def enough(self) -> bool:
        least = SECONDS / 4
        return self.statuses[200] > 8 * least and self.compared > 2 * least and self.left > least


class Client:
    """One of the clients: a connection of its own, opened again where the last one ended."""

    def __init__(self, url: str, seed: int, seen: Seen, alone: list[str]) -> None:
        self._address = Address.parse(url)
        self._random = random.Random(seed)
        self._seen = seen
        self._alone = alone
        self._connection: Connection | None = None

    async def run(self, begun: float) -> None:
        """Until the time has passed and enough has been seen."""
        weights = {self.tagged: 30, self.leave: 20, self.free: 20, self.others: 10}
        weights |= {self.too_long: 5, self.malformed: 8, self.structured: 7}
        while (passed := time.monotonic() - begun) < SECONDS or (
            passed < MOST and not self._seen.enough()
        ):
            (act,) = self._random.choices([*weights], [*weights.values()])
            try:
                await asyncio.wait_for(act(), PATIENCE)
            except TimeoutError:
                self._seen.wrong.append(f"{act.__name__} had no answer within {PATIENCE:g} s")
        if self._connection is not None:
            self._connection.close()

    async def tagged(self) -> None:
        """A known answer, streamed or not, under all this load."""
        index = self._random.randrange(len(TAGGED))
        stream = self._random.random() < 0.7
        status, raw = await self._ask("/v1/completions", {**TAGGED[index], "stream": stream})
        if status == 200:
            self._seen.compared += 1
            text = text_of(raw, stream)
            alone = self._alone[index]
            if text != alone:
                self._seen.wrong.append(f"prompt {index}: {text!r} instead of {alone!r}")

    async def leave(self) -> None:
        """Leave after a random time, a stream or a whole answer of one or more completions."""
        body = {"prompt": self._text(60), "max_tokens": 200, "stream": self._random.random() < 0.7}
        body["n"] = self._random.choice((1, 1, 2, 4))
        try:
            async with asyncio.timeout(self._random.uniform(0, 2.0)):
                await self._ask("/v1/completions", body)
        except TimeoutError:
            self._seen.left += 1

    async def free(self) -> None:
        body = {
            "prompt": self._text(self._random.randint(1, 120)),
            "max_tokens": self._random.randint(1, 96),
            "temperature": self._random.choice((0, 0.7, 1.2)),
            "n": self._random.choice((1, 1, 2, 3)),
            "stream": self._random.random() < 0.5,
        }
        await self._ask("/v1/completions", body)

    async def too_long(self) -> None:
        body: dict[str, Any] = {"prompt": [5] * self._random.choice((1025, 5000, 100_000))}
        if self._random.random() < 0.5:
            body = {"prompt": "x", "max_tokens": 10**6}
        self._expect(400, await self._ask("/v1/completions", body), body)

    async def malformed(self) -> None:
        raw = self._random.choice(MALFORMED)
        self._expect(400, await self._ask("/v1/completions", raw), raw)

    async def structured(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        body = {"prompt": self._text(8), "max_tokens": 64, "response_format": form, "stream": False}
        status, raw = await self._ask("/v1/completions", body)
        if status == 200:
            choice = json.loads(raw)["choices"][0]
            if choice["finish_reason"] == "stop" and set(json.loads(choice["text"])) != {"a", "b"}:
                self._seen.wrong.append(f"not of the schema: {choice['text']!r}")

    async def others(self) -> None:
        chat = {"messages": [{"role": "user", "content": self._text(10)}], "max_tokens": 32}
        generate = {"inputs": self._text(20), "parameters": {"max_new_tokens": 32}}
        path, body = self._random.choice(
            (
                ("/v1/chat/completions", {**chat, "stream": True}),
                ("/v1/chat/completions", chat),
                ("/generate", generate),
                ("/generate_stream", generate),
                ("/tokenize", {"prompt": self._text(50)}),
            )
        )
        await self._ask(path, body)

    def _text(self, words: int) -> str:
        return " ".join(self._random.choices(WORDS, k=words))

    def _expect(self, status: int, got: tuple[int, bytes], what: object) -> None:
        if got[0] != status:
            wrong = f"{got[0]} instead of {status} for {what!r:.80}: {got[1]!r:.200}"
            self._seen.wrong.append(wrong)

    async def _ask(self, path: str, body: object) -> tuple[int, bytes]:
        """Status and body."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        if self._connection is None or not self._connection.reusable:
            self._connection = await Connection.open(self._address)
        pieces: list[bytes] = []
        try:
            reader = await self._connection.send(
                self._address.head("POST", path, len(raw), JSON) + raw,
                lambda data, now: pieces.append(data),
            )
        except StreamError as error:
            self._seen.wrong.append(f"{path} {raw!r:.80}: {error}")
            return 0, b""
        self._seen.statuses[reader.status] += 1
        return reader.status, b"".join(pieces)


def text_of(raw: bytes, stream: bool) -> str:
    """The text of a completion."""
    if not stream:
        return str(json.loads(raw)["choices"][0]["text"])
    events = EventReader().feed(raw)
    if events[-1] != b"[DONE]":
        return f"a stream without an end: {raw[-300:]!r}"
    found = [json.loads(event) for event in events[:-1]]
    return "".join(one["choices"][0]["text"] if "choices" in one else f"({one})" for one in found)


def answers_alone(server: Server, every: int = 1) -> list[str]:
    return [
        server.ask("/v1/completions", body).body["choices"][0]["text"] for body in TAGGED[::every]
    ]


@dataclass(frozen=True)
class Use:
    """What a process has: resident memory in bytes, and open files."""

    memory: int
    files: int

    @staticmethod
    def of(pid: int) -> Use:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return Use(pages * os.sysconf("SC_PAGE_SIZE"), len(list(Path(f"/proc/{pid}/fd").iterdir())))


async def load(
    url: str, seen: Seen, alone: list[str], pids: dict[str, int]
) -> list[dict[str, Use]]:
    """Run all clients; what the processes used, every two seconds, once they are warm."""
    begun = time.monotonic()
    clients = [Client(url, seed, seen, alone) for seed in range(NUM_CLIENTS)]
    running = asyncio.gather(*(client.run(begun) for client in clients))
    used = []
    while not running.done():
        await asyncio.wait([running], timeout=2)
        if time.monotonic() - begun >= WARM:
            used.append({name: Use.of(pid) for name, pid in pids.items()})
    await running
    return used


@pytest.mark.soak
def test_sixty_four_clients_that_behave_in_every_way(tmp_path: Path) -> None:
    model = demo_with_chat_template(tmp_path / "demo")
    with ServeProcess(model, OPTIONS, forked=SECONDS < 180) as process:
        server = Server(process.wait_until_healthy())
        alone = answers_alone(server)
        pids = {"server": process.process.pid, "engine": process.children()["worker"]}
        before = {name: Use.of(pid) for name, pid in pids.items()}
        seen = Seen()
        used = asyncio.run(load(server.url, seen, alone, pids))
        server.wait_for(0)
        assert not seen.wrong, seen.wrong[:5]
        assert {*seen.statuses} <= {200, 400, 422, 429}, seen.statuses
        assert seen.enough(), seen
        assert server.metric("vllm:num_preemptions_total") > 0
        assert server.metric("vllm:corrupted_requests_total") == 0
        assert answers_alone(server, 3) == alone[::3]  # greedy and seeded ones
        for name in pids:
            first, last = used[0][name].memory, max(one[name].memory for one in used[-3:])
            # 5 %; of the small process in a short run that is less than the allocator's own steps
            most = 1.05 * first if SECONDS >= 300 else max(1.05 * first, first + (8 << 20))
            assert last <= most, f"{name}: from {first >> 20} to {last >> 20} MiB"
            assert Use.of(pids[name]).files <= before[name].files + 8, name
        assert process.stop() == 0, process.said[-2000:]
        assert "Traceback" not in process.said, process.said[-4000:]

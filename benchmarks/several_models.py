"""Ten models in one server with room for three, asked by 32 clients at random, while engines are killed
and models unloaded: every answer must be the one that its model gives alone, and nothing may be left.

    python benchmarks/several_models.py [--requests 6] [--clients 32]

Prints the longest wait of a request, how often models were loaded, and what the server held before
and after: memory and descriptors of its first process, and its processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.asking import Server
from tests.changed_demos import changed_demo
from tests.serving import ServeProcess

from freight import LLM, SamplingParams

PROMPTS = ("def main(", "import os\n", "class Reader:\n    def ", "for line in ")
TOKENS = 16
OPTIONS = ("--kv-cache-memory", "16MiB", "--threads", "1", "--max-num-seqs", "8")
TURN = 2.0


def alone(folder: Path) -> list[str]:
    """The greedy completions of a model in this process."""
    llm = LLM(str(folder), kv_cache_memory="16MiB", threads=1)
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    return [output.outputs[0].text for output in llm.generate(list(PROMPTS), params)]


class Client(threading.Thread):
    """Asks for models at random, and keeps what was wrong and the seconds of each request."""

    def __init__(self, url: str, seed: int, expected: dict[str, list[str]], count: int) -> None:
        super().__init__(daemon=True)
        self.server = Server(url)
        self.random = random.Random(seed)
        self.expected = expected
        self.count = count
        self.seconds: list[float] = []
        self.wrong: list[object] = []
        self.refused: list[tuple[int, str]] = []

    def run(self) -> None:
        for _ in range(self.count):
            name = self.random.choice(sorted(self.expected))
            index = self.random.randrange(len(PROMPTS))
            body = {
                "model": name,
                "prompt": PROMPTS[index],
                "max_tokens": TOKENS,
                "temperature": 0,
            }
            begin = time.monotonic()
            answer = self.server.ask("/v1/completions", body)
            self.seconds.append(time.monotonic() - begin)
            if answer.status != 200:
                self.refused.append((answer.status, answer.error["code"]))
            elif answer.body["choices"][0]["text"] != self.expected[name][index]:
                self.wrong.append((name, index, answer.body))
            elif answer.body["model"] != name:
                self.wrong.append((name, answer.body["model"]))


def held(server: ServeProcess) -> dict[str, int]:
    """What the first process holds now."""
    pid = server.process.pid
    status = Path(f"/proc/{pid}/status").read_text()
    resident = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert resident is not None
    return {
        "resident_mib": int(resident[1]) >> 10,
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": len(list(Path(f"/proc/{pid}/task").iterdir())),
        "engines": len(server.all_of("worker")),
        "processes": len(list(server._children())),
    }


def unload_all(client: Server, names: list[str]) -> None:
    for name in names:
        assert client.ask("/models/unload", {"model": name}).status == 200
    while any(model["status"]["value"] not in ("unloaded", "failed") for model in listed(client)):
        time.sleep(0.1)


def listed(client: Server) -> list[dict[str, dict[str, str]]]:
    models: list[dict[str, dict[str, str]]] = client.ask("/v1/models").body["data"]
    return models


def disturb(server: ServeProcess, client: Server, names: list[str], done: threading.Event) -> int:
    """Kill an engine, or unload a model, every few seconds; returns how many were killed."""
    chosen = random.Random(0)
    killed = 0
    while not done.wait(7.0):
        engines = server.all_of("worker")
        if engines and chosen.random() < 0.5:
            os.kill(chosen.choice(engines), signal.SIGKILL)
            killed += 1
        else:
            client.ask("/models/unload", {"model": chosen.choice(names)})
    return killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--undisturbed", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models"
        models.mkdir()
        names = [f"m{number}" for number in range(10)]
        expected = {
            name: alone(changed_demo(models / name, seed)) for seed, name in enumerate(names)
        }
        assert len({tuple(texts) for texts in expected.values()}) == len(names)
        (models / "broken").mkdir()
        (models / "broken" / "config.json").write_text("{")
        options = ["--models", str(models), "--models-memory", "100MiB", "--models-max", "9"]
        options += ["--models-turn", str(TURN), *OPTIONS]
        with ServeProcess(None, options) as server:
            client = Server(server.url)
            for name in names[:3]:
                client.ask("/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1})
            unload_all(client, names)
            before = held(server)
            clients = [
                Client(server.url, seed, expected, given.requests) for seed in range(given.clients)
            ]
            done = threading.Event()
            killed: list[int] = []
            disturbing = threading.Thread(
                target=lambda: killed.append(disturb(server, client, names, done))
            )
            begin = time.monotonic()
            for each in clients:
                each.start()
            if not given.undisturbed:
                disturbing.start()
            most = 0
            while any(each.is_alive() for each in clients):
                most = max(most, len(server.all_of("worker")))
                time.sleep(0.2)
            done.set()
            seconds = time.monotonic() - begin
            if not given.undisturbed:
                disturbing.join()
            broken = client.ask("/v1/completions", {"model": "broken", "prompt": "a"})
            metrics = client.ask("/metrics").raw.decode()
            loads = sum(
                float(line.split()[-1])
                for line in metrics.splitlines()
                if line.startswith("freight:model_loads_total")
            )
            unload_all(client, names)
            time.sleep(1.0)
            after = held(server)
            waits = sorted(second for each in clients for second in each.seconds)
            refused = [refusal for each in clients for refusal in each.refused]
            wrong = [answer for each in clients for answer in each.wrong]
            report = {
                "requests": len(waits),
                "seconds": round(seconds, 1),
                "wrong": wrong,
                "refused": {str(kind): refused.count(kind) for kind in sorted(set(refused))},
                "wait_median_s": round(waits[len(waits) // 2], 2),
                "wait_max_s": round(waits[-1], 2),
                "loads": loads,
                "engines_at_once": most,
                "killed": sum(killed),
                "broken": broken.status,
                "before": before,
                "after": after,
            }
            print(json.dumps(report, indent=1))
            begin = time.monotonic()
            client.ask("/models/load", {"model": "m0"})
            time.sleep(0.5)
            children = [pid for _, pid in server._children()]
            print(
                "SIGTERM while loading: status",
                server.stop(),
                round(time.monotonic() - begin, 1),
                "s",
            )
            print("left:", [pid for pid in children if Path(f"/proc/{pid}").exists()])
            assert not wrong
            if "Traceback" in server.said:
                print(server.said[-6000:])


if __name__ == "__main__":
    main()

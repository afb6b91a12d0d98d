"""Two replicas on Ray Serve answer eight clients at once. Needs `pip install '.[ray]'` in the checkout.

    python examples/ray_replicas.py [MODEL]

Ray starts on this machine, and ends with the script. With RAY_ADDRESS=auto it is the cluster that
this machine belongs to, and replicas may be on any machine of it.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import ray
from freight.ray import build
from ray import serve

PORT = int(os.environ.get("PORT", "8000"))
PROMPTS = [f"def f{n}(x):\n    return" for n in range(8)]


def ask(prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


def main() -> None:
    ray.init(log_to_driver=False, include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    options = {"model": sys.argv[1] if len(sys.argv) > 1 else "demo", "num_replicas": 2}
    options |= {"kv_cache_dtype": "fp8", "kv_cache_memory": "64MiB", "num_cpus": 1, "front_cpus": 0}
    serve.run(build(options))  # returns when the replicas can answer
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        for prompt, text in zip(PROMPTS, clients.map(ask, PROMPTS), strict=True):
            print(f"{prompt!r} -> {text!r}")
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()

"""Stream a completion from `freight serve` through OpenAI's client (`pip install openai`).

    freight serve demo --kv-cache-dtype fp8 &
    python examples/stream_client.py [URL]

URL is the server's address with /v1, by default http://127.0.0.1:8000/v1. A server with keys reads
the key from OPENAI_API_KEY, as OpenAI's client does everywhere.
"""

from __future__ import annotations

import os
import sys
import time

from openai import OpenAI


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id  # a server has one model

    begin = time.perf_counter()
    first = None
    stream = client.completions.create(
        model=model,
        prompt="def main(",
        max_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for event in stream:
        for choice in event.choices:
            first = first or time.perf_counter()
            print(choice.text, end="", flush=True)
        if event.usage is not None:  # the last event, which has no choices
            print(f"\n{event.usage.completion_tokens} tokens of {model}")
    if first is None:
        raise SystemExit("the stream had no text")
    print(f"first token after {(first - begin) * 1000:.0f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Rank 0 of two for a test that kills it: `python -m tests.rank_zero MODEL OPTIONS`, options as JSON. It
says the process id of the other rank, then computes for ever, with `busy` in OPTIONS.
"""

from __future__ import annotations

import json
import sys
import time

from freight import LLM, SamplingParams
from freight.engine.leader import Leader


def main() -> None:
    _, model, text = sys.argv
    options = json.loads(text)
    busy = options.pop("busy")
    llm = LLM(model, **options)
    leading = llm.engine.runner.leader
    assert isinstance(leading, Leader)
    print(leading.pids[0], flush=True)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    while True:
        if busy:
            llm.generate([{"prompt_token_ids": [1, 2, 3]}] * 4, params)
        time.sleep(0.01)


if __name__ == "__main__":
    main()

"""Answer many prompts from an event loop, and abort one that takes too long.

    python examples/async_requests.py [MODEL]

The engine is in a process of its own, so the event loop stays free for other work.
"""

from __future__ import annotations

import asyncio
import sys

from freight import AsyncLLM, SamplingParams

PROMPTS = ["def main(", "import ", "class Reader:", "return "]


async def complete(llm: AsyncLLM, prompt: str) -> str:
    """Return the text of one completion. Each output has all that there is so far."""
    text = ""
    async for output in llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=16)):
        text = output.outputs[0].text
    return text


async def main(model: str = "demo") -> None:
    async with AsyncLLM(model=model, kv_cache_dtype="fp8", kv_cache_memory="64MiB") as llm:
        answers = await asyncio.gather(*(complete(llm, prompt) for prompt in PROMPTS))
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            print(f"{prompt!r} -> {answer!r}")

        # A task that is cancelled aborts its request, and its part of the cache is free again.
        endless = SamplingParams(max_tokens=900, ignore_eos=True)
        outputs = llm.generate("def main(", endless, request_id="long")
        async for output in outputs:
            if len(output.outputs[0].token_ids) >= 4:
                await llm.abort("long")
            if output.finished:
                print("the long request ended with", output.outputs[0].finish_reason)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

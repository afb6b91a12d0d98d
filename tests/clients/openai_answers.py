"""What OpenAI's client gets from a server or a router, chat and completions, whole and streamed, as
JSON.

Run by the clients' interpreter: openai_answers.py URL
"""

import json
import sys

from openai import BadRequestError, OpenAI

PROMPTS = ["def main(", "import", "The license applies to the", "class Widget:"]
GREEDY = {"model": "demo", "temperature": 0, "max_tokens": 12}


def main(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    texts = []
    for prompt in PROMPTS:
        whole = client.completions.create(prompt=prompt, **GREEDY)
        events = list(client.completions.create(prompt=prompt, stream=True, **GREEDY))
        pieces = [choice.text for event in events for choice in event.choices]
        texts.append(
            [whole.choices[0].text, "".join(pieces), whole.usage.completion_tokens, len(events) > 1]
        )
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        whole = client.chat.completions.create(messages=messages, **GREEDY)
        events = list(client.chat.completions.create(messages=messages, stream=True, **GREEDY))
        pieces = [choice.delta.content or "" for event in events for choice in event.choices]
        reason = [choice.finish_reason for event in events for choice in event.choices][-1]
        texts.append(
            [
                whole.choices[0].message.content,
                "".join(pieces),
                whole.usage.completion_tokens,
                reason,
            ]
        )
    try:
        client.chat.completions.create(
            messages=[{"role": "user", "content": "x"}], **GREEDY | {"max_tokens": 5000}
        )
    except BadRequestError as error:
        texts.append(error.body.get("param"))
    print(json.dumps(texts))


main(sys.argv[1])

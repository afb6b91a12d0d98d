"""Fields of vLLM's API over HTTP: against the answer without them, whole and streamed, alone and
beside others.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.e2e.conftest import DemoServer
from tests.refusals import assert_names

from freight.llm import LLM
from freight.sampling import SamplingParams

PROMPT = "def main("
GREEDY = {"temperature": 0.0, "max_tokens": 24}
HELLO = [{"role": "user", "content": "def main("}]


def post(server: DemoServer, path: str, body: Mapping[str, Any]) -> tuple[int, str]:
    parts = urlsplit(server.url)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.key}"}
    with closing(
        http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
    ) as connection:
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def complete(server: DemoServer, **body: Any) -> dict[str, Any]:
    """The first choice."""
    status, answer = post(server, "/v1/completions", {"prompt": PROMPT, **GREEDY, **body})
    assert status == 200, answer
    return json.loads(answer)["choices"][0]


def chat(server: DemoServer, **body: Any) -> str:
    """The text of the first choice."""
    status, answer = post(server, "/v1/chat/completions", {"messages": HELLO, **GREEDY, **body})
    assert status == 200, answer
    return json.loads(answer)["choices"][0]["message"]["content"]


def streamed(server: DemoServer, path: str, body: Mapping[str, Any]) -> list[str]:
    """The texts of a stream's events."""
    status, answer = post(server, path, {**GREEDY, **body, "stream": True})
    assert status == 200, answer
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events]
    return [
        choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        for choice in choices
    ]


def prompt_ids(server: DemoServer, path: str, **body: Any) -> list[int]:
    status, answer = post(
        server, path, {"temperature": 0.0, "max_tokens": 1, "return_token_ids": True, **body}
    )
    assert status == 200, answer
    said = json.loads(answer)
    found: list[int] = said.get("prompt_token_ids") or said["choices"][0]["prompt_token_ids"]
    return found


def test_a_stop_string_stays_where_that_is_asked_for(demo_server: DemoServer) -> None:
    plain = complete(demo_server)["text"]
    stop = plain[7:11]
    end = plain.index(stop) + len(stop)
    assert complete(demo_server, stop=stop)["text"] == plain[: end - len(stop)]
    included = {"prompt": PROMPT, "stop": stop, "include_stop_str_in_output": True}
    choice = complete(demo_server, **included)
    assert (choice["text"], choice["finish_reason"]) == (plain[:end], "stop")
    assert "".join(streamed(demo_server, "/v1/completions", included)) == plain[:end]
    said = chat(demo_server)
    stop = said[3:7]
    end = said.index(stop) + len(stop)
    included = {"messages": HELLO, "stop": stop, "include_stop_str_in_output": True}
    assert chat(demo_server, **included) == said[:end]
    assert "".join(streamed(demo_server, "/v1/chat/completions", included)) == said[:end]


def test_a_stop_id_s_text_stays_where_that_is_asked_for(
    demo_server: DemoServer, served_llm: LLM
) -> None:
    tokenizer = served_llm.engine.tokenizer
    assert tokenizer is not None
    ids = complete(demo_server, return_token_ids=True)["token_ids"]
    first = next(at for at, token in enumerate(ids) if at > 3 and token not in ids[:at])
    ends = {"stop_token_ids": [ids[first]]}
    assert complete(demo_server, **ends)["text"] == tokenizer.decode(ids[:first])
    assert complete(demo_server, **ends, include_stop_str_in_output=True)[
        "text"
    ] == tokenizer.decode(ids[: first + 1])
    # the end of text is a special token
    (end,) = (tokenizer.special_tokens[name] for name in ("eos_token",))
    forced = {
        "allowed_token_ids": tokenizer.encode(end, add_special_tokens=False),
        "include_stop_str_in_output": True,
    }
    assert complete(demo_server, **forced)["text"] == ""
    assert complete(demo_server, **forced, skip_special_tokens=False)["text"] == end
    assert (
        chat(demo_server, **forced) == ""
    )  # who reads reasoning and calls gives no special token out


def test_prompts_are_cut(demo_server: DemoServer) -> None:
    whole = prompt_ids(demo_server, "/v1/completions", prompt=PROMPT)
    for prompt in (PROMPT, whole):
        assert (
            prompt_ids(demo_server, "/v1/completions", prompt=prompt, truncate_prompt_tokens=2)
            == whole[-2:]
        )
    echoed = complete(demo_server, truncate_prompt_tokens=2, echo=True, logprobs=1, max_tokens=2)
    assert echoed["text"] == "".join(echoed["logprobs"]["tokens"])
    for prompt in ("x " * 3000, [5] * 3000):
        long = {"prompt": prompt, "max_tokens": 1000, "allowed_token_ids": [1]}  # the end at once
        assert post(demo_server, "/v1/completions", long)[0] == 400
        assert (
            len(prompt_ids(demo_server, "/v1/completions", **long, truncate_prompt_tokens=-1))
            == 1024 - 1000
        )
    chat_ids = prompt_ids(demo_server, "/v1/chat/completions", messages=HELLO)
    cut = {"messages": HELLO, "truncate_prompt_tokens": 4}
    assert prompt_ids(demo_server, "/v1/chat/completions", **cut) == chat_ids[-4:]
    body = {"input": "x", "max_output_tokens": 1, "truncate_prompt_tokens": 4}
    status, answer = post(demo_server, "/v1/responses", body)
    assert (status, json.loads(answer)["usage"]["input_tokens"]) == (200, 4)
    body = {"messages": HELLO, "max_tokens": 1, "truncate_prompt_tokens": 4}
    status, answer = post(demo_server, "/v1/messages", body)
    assert (status, json.loads(answer)["usage"]["input_tokens"]) == (200, 4)


def test_special_tokens_are_added_or_not(demo_server: DemoServer, served_llm: LLM) -> None:
    assert served_llm.engine.tokenizer is not None
    [bos, *rest] = served_llm.engine.tokenizer.encode(PROMPT)
    assert prompt_ids(demo_server, "/v1/completions", prompt=PROMPT) == [bos, *rest]
    assert (
        prompt_ids(demo_server, "/v1/completions", prompt=PROMPT, add_special_tokens=False) == rest
    )
    [first, *others] = prompt_ids(demo_server, "/v1/chat/completions", messages=HELLO)
    assert first == bos  # the template writes one
    added = {"messages": HELLO, "add_special_tokens": True}
    assert prompt_ids(demo_server, "/v1/chat/completions", **added) == [bos, bos, *others]
    answers = served_llm.chat(
        HELLO,
        SamplingParams(max_tokens=1),
        tokenization_kwargs={"add_special_tokens": True, "truncate_prompt_tokens": 99},
    )
    assert answers[0].prompt_token_ids == [bos, bos, *others]


def test_tokens_of_log_probabilities_are_told_by_their_ids(demo_server: DemoServer) -> None:
    body = {"logprobs": 2, "return_token_ids": True, "max_tokens": 4}
    plain, by_id = (
        complete(demo_server, **body),
        complete(demo_server, **body, return_tokens_as_token_ids=True),
    )
    names = [f"token_id:{token}" for token in plain["token_ids"]]
    assert by_id["logprobs"]["tokens"] == names
    assert by_id["logprobs"]["token_logprobs"] == plain["logprobs"]["token_logprobs"]
    assert by_id["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
    assert all(
        name in top for name, top in zip(names, by_id["logprobs"]["top_logprobs"], strict=True)
    )
    body = {
        "messages": HELLO,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
        **GREEDY,
    }
    answers = [
        json.loads(post(demo_server, "/v1/chat/completions", body | more)[1])["choices"][0]
        for more in ({}, {"return_tokens_as_token_ids": True})
    ]
    (texts, ids) = (answer["logprobs"]["content"] for answer in answers)
    assert [one["token"] for one in ids] == [
        f"token_id:{token}" for token in answers[0]["token_ids"]
    ]
    assert [one["bytes"] for one in ids] == [one["bytes"] for one in texts]
    assert all(top["token"].startswith("token_id:") for one in ids for top in one["top_logprobs"])


def test_bad_words_are_not_written(demo_server: DemoServer) -> None:
    plain = complete(demo_server)["text"]
    bad = re.findall(r"[a-z]{4,}", plain)[1:3]  # of what these kernels write
    assert len(bad) == 2, plain
    text = complete(demo_server, bad_words=bad)["text"]
    assert not any(word in text for word in bad)
    assert (
        "".join(streamed(demo_server, "/v1/completions", {"prompt": PROMPT, "bad_words": bad}))
        == text
    )
    word = ","
    for path, body in (
        ("/v1/responses", {"input": "def main(", "max_output_tokens": 12}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 12}),
    ):
        for more, has in (({}, True), ({"bad_words": [word]}, False)):
            status, answer = post(demo_server, path, {**body, "temperature": 0.0, **more})
            assert status == 200, answer
            said = json.loads(answer)
            content = said["content"] if "content" in said else said["output"][0]["content"]
            assert (word in content[0]["text"]) is has


def test_a_request_whose_fields_leave_no_token_fails_alone(demo_server: DemoServer) -> None:
    (token,) = complete(demo_server, max_tokens=1, return_token_ids=True)["token_ids"]
    text = complete(demo_server, max_tokens=1)["text"]
    alone = complete(demo_server)["text"]
    nothing = {"prompt": PROMPT, **GREEDY, "allowed_token_ids": [token], "bad_words": [text]}
    with ThreadPoolExecutor(4) as pool:
        good = [pool.submit(complete, demo_server) for _ in range(2)]
        bad = [pool.submit(post, demo_server, "/v1/completions", nothing) for _ in range(2)]
        assert [one.result()["text"] for one in good] == [alone] * 2
        for one in bad:
            status, answer = one.result()
            error = json.loads(answer)["error"]
            assert (status, error["code"]) == (
                400,
                "no_token_left",
            )  # clients ask again after a 500
            assert_names(error["message"], "allowed_token_ids", "bad_words")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"bad_words": ["x", " "]}, "bad_words[1] is ' ', which has no token"),
        (
            {"allowed_token_ids": [4096]},
            "allowed_token_ids names token id 4096; the vocabulary has 0 to 4095",
        ),
        ({"allowed_token_ids": []}, "allowed_token_ids is []"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
        (
            {"no_stop_trim": True},
            "no_stop_trim is True; only false is possible: use include_stop_str_in_output",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(
    demo_server: DemoServer, body: dict[str, Any], says: str
) -> None:
    for path, more in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": HELLO}),
    ):
        status, answer = post(demo_server, path, {**more, **body})
        error = json.loads(answer)["error"]
        assert (status, error["param"].split("[")[0]) == (400, next(iter(body)))
        assert says in error["message"]

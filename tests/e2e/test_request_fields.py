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
from functools import partial
from typing import Any
from urllib.parse import urlsplit

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


def ask(server: DemoServer, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    status, answer = post(server, path, {"temperature": 0.0, **body})
    assert status == 200, answer
    answered: dict[str, Any] = json.loads(answer)
    return answered


def complete(server: DemoServer, **body: Any) -> dict[str, Any]:
    """The first choice."""
    asked = {"prompt": PROMPT, **GREEDY, **body}
    choice: dict[str, Any] = ask(server, "/v1/completions", asked)["choices"][0]
    return choice


def chat(server: DemoServer, **body: Any) -> dict[str, Any]:
    """The first choice."""
    asked = {"messages": HELLO, **GREEDY, **body}
    choice: dict[str, Any] = ask(server, "/v1/chat/completions", asked)["choices"][0]
    return choice


def text_of(choice: Mapping[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def streamed(server: DemoServer, path: str, body: Mapping[str, Any]) -> str:
    """The text of a stream's events."""
    status, answer = post(server, path, {**GREEDY, **body, "stream": True})
    assert status == 200, answer
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events]
    texts = [one["text"] if "text" in one else one["delta"].get("content") or "" for one in choices]
    return "".join(texts)


def prompt_ids(server: DemoServer, path: str, **body: Any) -> list[int]:
    said = ask(server, path, {"max_tokens": 1, "return_token_ids": True, **body})
    ids: list[int] = said.get("prompt_token_ids") or said["choices"][0]["prompt_token_ids"]
    return ids


def test_a_stop_string_stays_where_that_is_asked_for(demo_server: DemoServer) -> None:
    for path, of, prompt, start in (
        ("/v1/completions", complete, {"prompt": PROMPT}, 7),
        ("/v1/chat/completions", chat, {"messages": HELLO}, 3),
    ):
        plain = text_of(of(demo_server))
        stop = plain[start : start + 4]
        begin = plain.index(stop)
        assert text_of(of(demo_server, stop=stop)) == plain[:begin]
        included = {**prompt, "stop": stop, "include_stop_str_in_output": True}
        choice = of(demo_server, **included)
        assert (text_of(choice), choice["finish_reason"]) == (plain[:begin] + stop, "stop")
        assert streamed(demo_server, path, included) == plain[:begin] + stop


def test_a_stop_id_s_text_stays_where_that_is_asked_for(
    demo_server: DemoServer, served_llm: LLM
) -> None:
    tokenizer = served_llm.engine.tokenizer
    assert tokenizer is not None
    ids = complete(demo_server, return_token_ids=True)["token_ids"]
    first = next(at for at, token in enumerate(ids) if at > 3 and token not in ids[:at])
    for included in (False, True):
        ends = {"stop_token_ids": [ids[first]], "include_stop_str_in_output": included}
        assert complete(demo_server, **ends)["text"] == tokenizer.decode(ids[: first + included])
    # the end of text is a special token
    end = tokenizer.special_tokens["eos_token"]
    forced = {
        "allowed_token_ids": tokenizer.encode(end, add_special_tokens=False),
        "include_stop_str_in_output": True,
    }
    assert complete(demo_server, **forced)["text"] == ""
    assert complete(demo_server, **forced, skip_special_tokens=False)["text"] == end
    # who reads reasoning and calls gives no special token out
    assert text_of(chat(demo_server, **forced)) == ""


def test_prompts_are_cut(demo_server: DemoServer) -> None:
    ids_of = partial(prompt_ids, demo_server, "/v1/completions")
    whole = ids_of(prompt=PROMPT)
    for prompt in (PROMPT, whole):
        assert ids_of(prompt=prompt, truncate_prompt_tokens=2) == whole[-2:]
    echoed = complete(demo_server, truncate_prompt_tokens=2, echo=True, logprobs=1, max_tokens=2)
    assert echoed["text"] == "".join(echoed["logprobs"]["tokens"])
    for prompt in ("x " * 3000, [5] * 3000):
        long = {"prompt": prompt, "max_tokens": 1000, "allowed_token_ids": [1]}  # the end at once
        assert post(demo_server, "/v1/completions", long)[0] == 400
        assert len(ids_of(**long, truncate_prompt_tokens=-1)) == 1024 - 1000
    chat_ids = prompt_ids(demo_server, "/v1/chat/completions", messages=HELLO)
    cut = {"messages": HELLO, "truncate_prompt_tokens": 4}
    assert prompt_ids(demo_server, "/v1/chat/completions", **cut) == chat_ids[-4:]
    response = {"input": "x", "max_output_tokens": 1, "truncate_prompt_tokens": 4}
    for path, body in (("/v1/responses", response), ("/v1/messages", cut | {"max_tokens": 1})):
        assert ask(demo_server, path, body)["usage"]["input_tokens"] == 4


def test_special_tokens_are_added_or_not(demo_server: DemoServer, served_llm: LLM) -> None:
    assert served_llm.engine.tokenizer is not None
    [bos, *rest] = served_llm.engine.tokenizer.encode(PROMPT)
    ids_of = partial(prompt_ids, demo_server, "/v1/completions", prompt=PROMPT)
    assert ids_of() == [bos, *rest]
    assert ids_of(add_special_tokens=False) == rest
    ids_of = partial(prompt_ids, demo_server, "/v1/chat/completions", messages=HELLO)
    [first, *others] = ids_of()
    assert first == bos  # the template writes one
    assert ids_of(add_special_tokens=True) == [bos, bos, *others]
    added = {"add_special_tokens": True, "truncate_prompt_tokens": 99}
    answers = served_llm.chat(HELLO, SamplingParams(max_tokens=1), tokenization_kwargs=added)
    assert answers[0].prompt_token_ids == [bos, bos, *others]


def test_tokens_of_log_probabilities_are_told_by_their_ids(demo_server: DemoServer) -> None:
    as_ids = {"return_tokens_as_token_ids": True}
    body: dict[str, Any] = {"logprobs": 2, "return_token_ids": True, "max_tokens": 4}
    plain, by_id = (complete(demo_server, **body, **more) for more in ({}, as_ids))
    names, logprobs = [f"token_id:{token}" for token in plain["token_ids"]], by_id["logprobs"]
    assert logprobs["tokens"] == names
    for same in ("token_logprobs", "text_offset"):
        assert logprobs[same] == plain["logprobs"][same]
    for name, top in zip(names, logprobs["top_logprobs"], strict=True):
        assert name in top
    body = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    plain, by_id = (chat(demo_server, **body, **more) for more in ({}, as_ids))
    texts, ids = (answer["logprobs"]["content"] for answer in (plain, by_id))
    assert [one["token"] for one in ids] == [f"token_id:{token}" for token in plain["token_ids"]]
    assert [one["bytes"] for one in ids] == [one["bytes"] for one in texts]
    assert all(top["token"].startswith("token_id:") for one in ids for top in one["top_logprobs"])


def test_bad_words_are_not_written(demo_server: DemoServer) -> None:
    plain = complete(demo_server)["text"]
    bad = re.findall(r"[a-z]{4,}", plain)[1:3]  # of what these kernels write
    assert len(bad) == 2, plain
    text = complete(demo_server, bad_words=bad)["text"]
    assert not any(word in text for word in bad)
    body: dict[str, Any] = {"prompt": PROMPT, "bad_words": bad}
    assert streamed(demo_server, "/v1/completions", body) == text
    for path, body in (
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": 12}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 12}),
    ):
        for more, has in (({}, True), ({"bad_words": [","]}, False)):
            said = ask(demo_server, path, {**body, **more})
            content = said["content"] if "content" in said else said["output"][0]["content"]
            assert ("," in content[0]["text"]) is has


def test_a_request_whose_fields_leave_no_token_fails_alone(demo_server: DemoServer) -> None:
    first, alone = complete(demo_server, max_tokens=1, return_token_ids=True), complete(demo_server)
    nothing = {"allowed_token_ids": first["token_ids"], "bad_words": [first["text"]]}
    asked = {"prompt": PROMPT, **GREEDY, **nothing}
    with ThreadPoolExecutor(4) as pool:
        good = [pool.submit(complete, demo_server) for _ in range(2)]
        bad = [pool.submit(post, demo_server, "/v1/completions", asked) for _ in range(2)]
        assert [answer.result()["text"] for answer in good] == [alone["text"]] * 2
        for failed in bad:
            status, answer = failed.result()
            error = json.loads(answer)["error"]
            assert (status, error["code"]) == (
                400,
                "no_token_left",
            )  # after a 500 clients ask again
            assert_names(error["message"], "allowed_token_ids", "bad_words")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"bad_words": ["x", " "]}, "bad_words[1] is ' ', which has no token"),
    ({"allowed_token_ids": [4096]}, "names token id 4096; the vocabulary has 0 to 4095"),
    ({"allowed_token_ids": []}, "allowed_token_ids is []"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
    ({"no_stop_trim": True}, "only false is possible: use include_stop_str_in_output"),
]


def test_what_cannot_be_served_is_refused(demo_server: DemoServer) -> None:
    paths = {"/v1/completions": {"prompt": PROMPT}, "/v1/chat/completions": {"messages": HELLO}}
    for body, says in REFUSED:
        for path, prompt in paths.items():
            status, answer = post(demo_server, path, {**prompt, **body})
            error = json.loads(answer)["error"]
            assert (status, error["param"].split("[")[0]) == (400, next(iter(body)))
            assert says in error["message"]

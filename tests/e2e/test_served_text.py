"""A served answer is that of `LLM.generate`, to the character: in one piece, and as the pieces of a
stream joined.

It holds for every API that completes text, greedy and seeded, beside other requests, and with a
cold and a warm prefix cache: what is served goes through the same engine, and a stream goes through
the same text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.asking import Answered, Server
from tests.e2e.conftest import DemoServer

from freight import SamplingParams
from freight.llm import LLM

PROMPTS = [
    "def main(",
    "The license applies to the",
    "    for name in names:\n",
    "import",
    "é€漢😀 → ",
]
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3}
FORMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7, "top_p": 0.95},
    {"temperature": 0.9, "seed": 8, "top_k": 50, "min_p": 0.01, **PENALTIES},
    {"temperature": 1.1, "seed": 9, "repetition_penalty": 1.2},
]
few = settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass(frozen=True)
class Texts:
    """The texts of one answer, choice by choice, with why each ended."""

    texts: list[str]
    reasons: list[str]


def asked(server: DemoServer, path: str, body: Mapping[str, Any]) -> Answered:
    answer = Server(server.url, {"Authorization": f"Bearer {server.key}"}).ask(path, body)
    assert answer.status == 200, answer.raw
    return answer


def streamed(server: DemoServer, path: str, body: Mapping[str, Any]) -> list[Any]:
    """The events of a stream of OpenAI's API, without [DONE]."""
    *events, done = asked(server, path, {**body, "stream": True}).events
    assert done == "[DONE]"
    return events


def joined(events: list[Any], count: int) -> Texts:
    """What the chunks of OpenAI's API add up to. No piece has part of a character, which would show
    as U+FFFD.
    """
    texts, reasons = [""] * count, [""] * count
    for choice in (choice for event in events for choice in event["choices"]):
        index = choice["index"]
        assert not reasons[index], "a chunk after the last of its choice"
        texts[index] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        reasons[index] = choice["finish_reason"] or ""
    return Texts(texts, reasons)


def whole(body: Any) -> Texts:
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    texts = [
        choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices
    ]
    return Texts(texts, [choice["finish_reason"] for choice in choices])


def expected(
    llm: LLM, prompt: str | list[int], params: Mapping[str, Any], before: str = ""
) -> Texts:
    """What LLM.generate says."""
    outputs = llm.generate([prompt], SamplingParams(**params))[0].outputs
    return Texts(
        [before + output.text for output in outputs],
        [str(output.finish_reason) for output in outputs],
    )


def check_completion(
    server: DemoServer, llm: LLM, prompt: str, params: Mapping[str, Any], **fields: Any
) -> Texts:
    """LLM.generate = the whole answer = the joined stream; returns it."""
    wanted = expected(llm, prompt, params, prompt if fields.get("echo") else "")
    check_both(server, "/v1/completions", {"prompt": prompt, **as_json(params), **fields}, wanted)
    return wanted


def check_both(server: DemoServer, path: str, body: Mapping[str, Any], wanted: Texts) -> None:
    """Ask for a stream and for a whole answer at the same time."""
    with ThreadPoolExecutor() as pool:
        stream, answer = (
            pool.submit(streamed, server, path, body),
            pool.submit(asked, server, path, body),
        )
        assert joined(stream.result(), len(wanted.texts)) == wanted
        assert whole(answer.result().body) == wanted


def as_json(params: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(params))  # type: ignore[no-any-return]  # keys of logit_bias become strings


def test_completions(demo_server: DemoServer, served_llm: LLM) -> None:
    @few
    @given(
        st.sampled_from(PROMPTS),
        st.sampled_from(FORMS),
        st.sampled_from([1, 3]),
        st.integers(1, 16),
        st.booleans(),
        st.booleans(),
    )
    @example(PROMPTS[0], FORMS[0], 1, 1, True, False)  # all of a stream at once
    def check(
        prompt: str, form: dict[str, Any], n: int, max_tokens: int, echo: bool, skip: bool
    ) -> None:
        params = {**form, "n": n, "max_tokens": max_tokens, "skip_special_tokens": skip}
        check_completion(demo_server, served_llm, prompt, params, echo=echo)

    check()


def test_stop_strings_across_chunks(demo_server: DemoServer, served_llm: LLM) -> None:
    """Each is a part of what the model says, and begins and ends anywhere within tokens."""

    @few
    @given(st.sampled_from(PROMPTS[:4]), st.sampled_from(FORMS), st.data())
    def check(prompt: str, form: dict[str, Any], data: st.DataObject) -> None:
        params = {**form, "max_tokens": 20}
        (text,) = expected(served_llm, prompt, params).texts
        start = data.draw(st.integers(0, max(0, len(text) - 6)))
        stop = text[start : start + data.draw(st.integers(1, 8))]
        if not stop:
            return
        params["stop"] = [stop, "never said"]
        (cut,) = check_completion(demo_server, served_llm, prompt, params).texts
        assert cut == text[: text.index(stop)]

    check()


@pytest.mark.parametrize("form", FORMS[:2])
def test_characters_of_several_tokens(
    form: dict[str, Any], demo_server: DemoServer, served_llm: LLM
) -> None:
    """Every character here takes two to four tokens of one byte; no chunk may have a part of one."""
    params = {**form, "max_tokens": 40, "structured_outputs": {"regex": "[éß€漢字😀]{9}"}}
    (text,) = check_completion(demo_server, served_llm, "x", params, echo=True).texts
    assert set(text[1:]) <= set("éß€漢字😀")
    assert len(text) == 10


def test_bytes_that_are_no_character(demo_server: DemoServer, served_llm: LLM) -> None:
    """Only the bytes of € are drawn, in any order: some are a character, and each of the others
    shows as U+FFFD. The seed is the first whose text has both.
    """
    tokenizer = served_llm.engine.tokenizer
    assert tokenizer is not None
    euro = dict.fromkeys(tokenizer.encode("€", add_special_tokens=False), 100)
    assert len(euro) == 3
    params = {"temperature": 2.0, "frequency_penalty": 1.0, "max_tokens": 40, "logit_bias": euro}
    seeded = ({**params, "seed": seed} for seed in range(100))
    both = next(
        params
        for params in seeded
        if {"€", "\N{REPLACEMENT CHARACTER}"} <= set(*expected(served_llm, "x", params).texts)
    )
    check_completion(demo_server, served_llm, "x", both)


def test_chat(demo_server: DemoServer, served_llm: LLM) -> None:
    @few
    @given(
        st.sampled_from(PROMPTS),
        st.sampled_from(FORMS),
        st.sampled_from([1, 3]),
        st.integers(1, 16),
    )
    def check(prompt: str, form: dict[str, Any], n: int, max_tokens: int) -> None:
        messages = [{"role": "system", "content": "Write."}, {"role": "user", "content": prompt}]
        params = {**form, "n": n, "max_tokens": max_tokens}
        wanted = expected(served_llm, served_llm.chat_prompt(messages), params)
        check_both(demo_server, "/v1/chat/completions", {"messages": messages, **params}, wanted)

    check()


def test_tgi(demo_server: DemoServer, served_llm: LLM) -> None:
    @few
    @given(st.sampled_from(PROMPTS), st.sampled_from(FORMS[:2]), st.integers(1, 16), st.booleans())
    @example("The license applies to", FORMS[1], 24, True)
    def check(prompt: str, form: dict[str, Any], max_tokens: int, stops: bool) -> None:
        params = {**form, "max_tokens": max_tokens, "stop": [" ", "e"] if stops else []}
        scored = SamplingParams(**params, logprobs=0, prompt_logprobs=0)
        (output,) = served_llm.generate([prompt], scored)[0].outputs
        wanted = output.text + (output.stop_reason if isinstance(output.stop_reason, str) else "")
        drawn = {} if form["temperature"] == 0 else {**form, "do_sample": True}
        sent = {**drawn, "max_new_tokens": max_tokens, "stop": params["stop"], "details": True}
        shown = {"decoder_input_details": True, "top_n_tokens": 3}
        whole = {"inputs": prompt, "parameters": sent | shown}
        body = asked(demo_server, "/generate", whole).body
        assert body["generated_text"] == wanted
        tokens = body["details"]["tokens"]
        assert "".join(token["text"] for token in tokens) == wanted
        assert [token["id"] for token in tokens] == output.token_ids
        assert output.logprobs is not None
        pairs = zip(output.logprobs, output.token_ids, strict=True)
        assert [token["logprob"] for token in tokens] == [at[token].logprob for at, token in pairs]
        count = len(served_llm.engine.accept(prompt, scored).token_ids)
        assert len(body["details"]["prefill"]) == count
        answer = asked(demo_server, "/generate_stream", {"inputs": prompt, "parameters": sent})
        lines = answer.raw.decode().split("\n\n")
        events = [json.loads(line[5:]) for line in lines if line.startswith("data:")]
        assert events[-1]["generated_text"] == wanted
        assert [event["token"] for event in events] == tokens

    check()


@contextmanager
def other_load(server: DemoServer) -> Iterator[None]:
    """Long streams beside whatever runs within."""
    asking = Server(server.url, {"Authorization": f"Bearer {server.key}"})
    with ExitStack() as stack:
        for number in range(3):
            body = {"prompt": f"{number} is", "max_tokens": 900, "ignore_eos": True}
            stack.enter_context(asking.streaming(body))
        yield


def test_beside_other_requests_and_from_a_warm_prefix_cache(
    demo_server: DemoServer, served_llm: LLM
) -> None:
    prompt = "The license applies to what follows. " * 9
    body: dict[str, Any] = {"prompt": prompt, "cache_salt": "of this test"}
    body["stream_options"] = {"include_usage": True}
    for number, form in enumerate(FORMS[:3]):
        params = {**form, "n": 2, "max_tokens": 16}
        wanted = expected(served_llm, prompt, params)
        with other_load(demo_server):
            for turn in range(2):
                events = streamed(demo_server, "/v1/completions", {**body, **params})
                assert joined(events, 2) == wanted
                cached = events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert (cached == 0) == (number == turn == 0)

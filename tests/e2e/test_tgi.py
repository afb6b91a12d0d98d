"""TGI's answers from a real engine: the stream, the body and LLM.generate have the same text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import freight
from freight.llm import LLM
from freight.sampling import SamplingLimits, SamplingParams
from freight.serve.call import ReplyHead, Served, TokenizedWork
from freight.serve.tgi.request import parse_generate

DEMO = Path(freight.__file__).parent / "demo"
PROMPT = "The license applies to"


@pytest.fixture(scope="module")
def llm():
    return LLM(str(DEMO), kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    "parameters",
    [
        {"decoder_input_details": True},
        {"do_sample": True, "temperature": 0.9, "seed": 7, "top_n_tokens": 3},
        {"stop": ["\0"], "max_new_tokens": 24},  # and a part of its own text
    ],
)
def test_stream_body_and_generate_agree(llm, parameters):
    engine = llm.engine
    served = Served(("demo",), engine.tokenizer, engine.tokenizer.vocab_size, 512, {}, "fp")
    given = {"max_new_tokens": 24, **parameters, "details": True}
    if "stop" in given:
        free = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=24))[0].outputs[0]
        given["stop"] = [*given["stop"], free.text[9:12]]
    call = parse_generate(
        {"inputs": PROMPT, "parameters": given}, served, SamplingLimits(), stream=False
    )
    streamed = parse_generate(
        {"inputs": PROMPT, "parameters": given | {"decoder_input_details": False}},
        served,
        SamplingLimits(),
        stream=True,
    )
    params = call.work[0].params
    accepted = engine.accept(PROMPT, params)
    work = [TokenizedWork(PROMPT, accepted.token_ids, params)]
    head = ReplyHead("1", 0, "demo", "fp")
    replies = [one.reply(head, served, work) for one in (call, streamed)]
    engine.add("tgi", accepted, params)
    stream = b""
    while not engine.is_finished("tgi"):
        for delta in engine.step():
            replies[0].advance(0, delta)
            stream += replies[1].advance(0, delta)
    engine.release("tgi")
    body = replies[0].body()
    events = [
        json.loads(event.removeprefix("data:")) for event in stream.decode().split("\n\n")[:-1]
    ]

    (output,) = llm.generate([PROMPT], params)[0].outputs
    stop = output.stop_reason if isinstance(output.stop_reason, str) else ""
    assert body["generated_text"] == output.text + stop
    assert bool(stop) == ("stop" in parameters)
    details = body["details"]
    assert [token["id"] for token in details["tokens"]] == output.token_ids
    assert "".join(token["text"] for token in details["tokens"]) == body["generated_text"]
    own = [
        entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)
    ]
    assert [token["logprob"] for token in details["tokens"]] == own
    assert [event["token"] for event in events] == details["tokens"]
    assert events[-1]["generated_text"] == body["generated_text"]
    assert len(details["prefill"]) == (
        len(accepted.token_ids) if params.prompt_logprobs is not None else 0
    )

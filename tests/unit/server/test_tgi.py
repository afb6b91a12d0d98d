"""TGI's API: what its client sends and reads, and that a stream says the same as one body, however
deltas are cut.
"""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from huggingface_hub import TextGenerationOutput, TextGenerationStreamOutput
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.server.openai_cases import as_scores

import freight
from freight.outputs import CompletionDelta, FinishReason, Logprob, RequestDelta
from freight.sampling import SamplingLimits, SamplingParams
from freight.serve.call import ReplyHead, Served, TokenizedWork
from freight.serve.tgi.request import ServerFacts, as_tgi_error, info, parse_generate
from freight.serve.transport.errors import ApiError
from freight.serve.transport.middleware import error_body
from freight.text.detokenizer import Detokenizer
from freight.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(Path(freight.__file__).parent / "demo")
SERVED = Served(("demo",), TOKENIZER, TOKENIZER.vocab_size, 512, {"temperature": 0.6}, "fp-1")
LIMITS = SamplingLimits(stop=4)
HEAD = ReplyHead("1", 0, "demo", "fp-1")
PROMPT = "Ein Wort"
PROMPT_IDS = tuple(TOKENIZER.encode(PROMPT))
EOS = TOKENIZER.eos_token_id


def parse(parameters=None, stream=False, served=SERVED, **body):
    given = {"inputs": PROMPT, **body} | ({} if parameters is None else {"parameters": parameters})
    return parse_generate(given, served, LIMITS, stream)


def params_of(**parameters):
    return parse(parameters).work[0].params


def logprobs_of(token):
    """Three most likely tokens, and the token itself as the fifth."""
    return {
        7: Logprob(-0.5, 1),
        8: Logprob(-1.0, 2),
        9: Logprob(-math.inf, 3),
        token: Logprob(-2.0, 5),
    }


def run(tokens, params, finish=FinishReason.LENGTH, cuts=(), scores=None):
    """Deltas as an engine gives them for `tokens`, in pieces that end at `cuts`; a stop string ends
    them early.
    """
    detokenizer = Detokenizer(TOKENIZER, params, PROMPT_IDS)
    pieces = []  # of text, by token
    for number, token in enumerate(tokens, 1):
        by_id = finish is FinishReason.STOP and number == len(tokens)
        pieces.append("" if by_id else detokenizer.append([token]))
        if detokenizer.stop_reason is not None:
            finish = FinishReason.STOP
            break
    pieces[-1] += detokenizer.finish()
    count, deltas, begin = len(pieces), [], 0
    for end in [*sorted(cut for cut in set(cuts) if 0 < cut < count), count]:
        new, last = list(tokens[begin:end]), end == count
        completion = CompletionDelta(
            index=0,
            token_ids=new,
            text="".join(pieces[begin:end]),
            logprobs=[logprobs_of(token) for token in new],
            finish_reason=finish if last else None,
            stop_reason=detokenizer.stop_reason if last else None,
            error=None,
        )
        deltas.append(RequestDelta("1", [completion], last, scores if begin == 0 else None))
        begin = end
    return deltas


def reply_of(call):
    return call.reply(HEAD, SERVED, [TokenizedWork(PROMPT, PROMPT_IDS, call.work[0].params)])


def body_of(call, deltas):
    reply = reply_of(call)
    assert not any(reply.advance(0, delta) for delta in deltas)
    return json.loads(json.dumps(reply.body()))


def events_of(call, deltas):
    reply = reply_of(call)
    stream = reply.start() + b"".join(reply.advance(0, delta) for delta in deltas) + reply.end()
    *events, rest = stream.decode().split("\n\n")
    assert not rest
    assert all(event.startswith("data:") for event in events)
    return [json.loads(event.removeprefix("data:")) for event in events]


WORDS = TOKENIZER.encode(" das Haus und 😀 — der Weg", add_special_tokens=False)


def test_a_body_as_huggingface_hub_reads_it():
    call = parse(
        {
            "details": True,
            "top_n_tokens": 2,
            "decoder_input_details": True,
            "max_new_tokens": len(WORDS),
        }
    )
    scores = as_scores(PROMPT_IDS[1:], [logprobs_of(token) for token in PROMPT_IDS[1:]])
    body = body_of(call, run(WORDS, call.work[0].params, scores=scores))
    output = TextGenerationOutput.parse_obj_as_instance(body)
    assert output.generated_text == " das Haus und 😀 — der Weg"
    assert output.details.finish_reason == "length"
    assert output.details.generated_tokens == len(WORDS)
    assert output.details.seed is None
    assert [token.id for token in output.details.prefill] == list(PROMPT_IDS)
    assert [token.logprob for token in output.details.prefill] == [None] + [-2.0] * (
        len(PROMPT_IDS) - 1
    )
    assert output.details.prefill[-1].text == TOKENIZER.token_text(PROMPT_IDS[-1])
    assert [token.id for token in output.details.tokens] == WORDS
    assert {token.logprob for token in output.details.tokens} == {-2.0}
    top = output.details.top_tokens[0]
    assert [(token["id"], token["logprob"]) for token in top] == [(7, -0.5), (8, -1.0)]
    assert top[0]["text"] == TOKENIZER.token_text(7)


def test_minus_infinity_is_a_number():
    call = parse({"details": True, "top_n_tokens": 3})
    body = body_of(call, run(WORDS, call.work[0].params))
    assert body["details"]["top_tokens"][0][2]["logprob"] == -9999.0


def test_a_body_without_details():
    call = parse({"return_full_text": True})
    assert body_of(call, run(WORDS, call.work[0].params)) == {
        "generated_text": PROMPT + " das Haus und 😀 — der Weg"
    }
    call = parse(None, stream=None)
    assert body_of(call, run(WORDS, call.work[0].params)) == [
        {"generated_text": " das Haus und 😀 — der Weg"}
    ]


def test_a_stream_as_huggingface_hub_reads_it():
    call = parse({"details": True, "seed": 5, "do_sample": True}, stream=True)
    events = events_of(call, run([*WORDS, EOS], call.work[0].params, FinishReason.STOP))
    outputs = [TextGenerationStreamOutput.parse_obj_as_instance(event) for event in events]
    assert [output.index for output in outputs] == list(range(1, len(WORDS) + 2))
    assert all(output.generated_text is None and output.details is None for output in outputs[:-1])
    last = outputs[-1]
    assert last.generated_text == " das Haus und 😀 — der Weg"
    assert dataclasses.asdict(last.details) == {
        "finish_reason": "eos_token",
        "generated_tokens": len(WORDS) + 1,
        "input_length": len(PROMPT_IDS),
        "seed": 5,
    }
    assert (last.token.id, last.token.special, last.token.text) == (EOS, True, "")
    assert "top_tokens" not in events[0]


def test_without_details_the_last_event_still_has_the_text():
    call = parse(None, stream=True)
    events = events_of(call, run(WORDS, call.work[0].params))
    assert events[-1]["details"] is None
    assert events[-1]["generated_text"] == " das Haus und 😀 — der Weg"


def test_the_stop_string_is_in_the_text_and_nothing_behind_it():
    call = parse({"stop": ["Hau"], "details": True})
    body = body_of(call, run(WORDS, call.work[0].params))
    assert body["generated_text"] == " das Hau"
    assert body["details"]["finish_reason"] == "stop_sequence"
    assert "".join(token["text"] for token in body["details"]["tokens"]) == " das Hau"


@given(
    tokens=st.lists(st.sampled_from(range(TOKENIZER.vocab_size)), min_size=1, max_size=12),
    stop=st.sampled_from([None, ["e"], [" d", "ein"], ["\n"]]),
    by_eos=st.booleans(),
    data=st.data(),
)
def test_a_stream_says_the_same_as_a_body_however_deltas_are_cut(tokens, stop, by_eos, data):
    parameters = {"details": True, "top_n_tokens": 2, "stop": stop}
    finish = FinishReason.STOP if by_eos else FinishReason.LENGTH
    if finish is FinishReason.STOP:
        tokens = [*tokens, EOS]
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=6))
    call, streamed = parse(parameters), parse(parameters, stream=True)
    params = call.work[0].params
    one_by_one = run(tokens, params, finish, range(len(tokens)))
    body = body_of(call, one_by_one)
    details = body["details"]
    assert [token["id"] for token in details["tokens"]] == tokens[: len(one_by_one)]
    assert "".join(token["text"] for token in details["tokens"]) == body["generated_text"]
    cut = run(tokens, params, finish, cuts)
    assert body_of(call, cut) == body
    events = events_of(streamed, cut)
    assert [event["token"] for event in events] == details["tokens"]
    assert [event["top_tokens"] for event in events] == details["top_tokens"]
    assert [event["generated_text"] for event in events] == [None] * (len(events) - 1) + [
        body["generated_text"]
    ]
    assert events[-1]["details"]["finish_reason"] == details["finish_reason"]


def test_only_what_is_no_text_is_special():
    call = parse({"details": True})
    (whole,) = run(WORDS, call.work[0].params)
    ended = dataclasses.replace(
        whole, outputs=[dataclasses.replace(whole.outputs[0], finish_reason=FinishReason.STOP)]
    )
    for stops, last in (
        ((), False),
        (WORDS[-1:], True),
    ):  # a grammar's end is text, a token that ends the model is not
        served = dataclasses.replace(SERVED, stop_token_ids=frozenset(stops))
        reply = call.reply(HEAD, served, [TokenizedWork(PROMPT, PROMPT_IDS, call.work[0].params)])
        reply.advance(0, ended)
        tokens = reply.body()["details"]["tokens"]
        assert [token["special"] for token in tokens] == [False] * (len(WORDS) - 1) + [last]


def test_an_end_without_a_token_has_an_event():
    call = parse({"details": True}, stream=True)
    (whole,) = run(WORDS, call.work[0].params)
    (completion,) = whole.outputs
    first = dataclasses.replace(completion, finish_reason=None, text=completion.text[:-2])
    rest = CompletionDelta(0, [], completion.text[-2:], [], FinishReason.LENGTH, None, None)
    events = events_of(call, [dataclasses.replace(whole, outputs=[part]) for part in (first, rest)])
    assert events[-1]["generated_text"] == completion.text
    assert events[-1]["details"]["generated_tokens"] == len(WORDS)
    assert events[-2]["generated_text"] is None


@pytest.mark.parametrize(
    ("parameters", "fields"),
    [
        (
            {},
            {
                "temperature": 0.0,
                "max_tokens": 100,
                "logprobs": 0,
                "prompt_logprobs": None,
                "stop": (),
            },
        ),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),  # not generation_config's
        ({"temperature": 0.7, "do_sample": False}, {"temperature": 0.7}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}),
        ({"top_k": 5, "seed": 3}, {"temperature": 1.0, "top_k": 5, "seed": 3}),
        (
            {"max_new_tokens": 7, "stop": ["a"], "top_n_tokens": 2},
            {"max_tokens": 7, "stop": ("a",), "logprobs": 2},
        ),
        ({"decoder_input_details": True}, {"prompt_logprobs": 0}),
    ],
)
def test_parameters(parameters, fields):
    params = params_of(**parameters)
    assert {name: getattr(params, name) for name in fields} == fields


def test_what_is_drawn_without_a_seed_gets_one_that_is_told():
    call = parse({"do_sample": True, "details": True})
    seed = call.work[0].params.seed
    assert 0 <= seed < 2**53
    assert parse({"do_sample": True}).work[0].params.seed != seed
    assert body_of(call, run(WORDS, call.work[0].params))["details"]["seed"] == seed


def test_a_bare_url_decides_by_stream():
    assert parse(stream=None).stream is False
    body = {"inputs": "a", "stream": True}
    assert parse_generate(body, SERVED, LIMITS, None).stream is True
    assert parse_generate(body, SERVED, LIMITS, False).stream is False


@pytest.mark.parametrize(
    ("grammar", "outputs"),
    [
        ({"type": "json", "value": {"type": "object"}}, {"json": {"type": "object"}}),
        ({"type": "json", "value": '{"type": "object"}'}, {"json": {"type": "object"}}),
        (
            {"type": "json", "value": {"properties": {}}},
            {"json": {"type": "object", "properties": {}}},
        ),
        (
            {"type": "json_schema", "value": {"name": "x", "schema": {"type": "object"}}},
            {"json": {"type": "object"}},
        ),
        ({"type": "regex", "value": "a+"}, {"regex": "a+"}),
    ],
)
def test_a_grammar(grammar, outputs, monkeypatch):
    seen = {}

    def stand_in(**fields):
        seen.update(fields)
        return SamplingParams(
            **{name: value for name, value in fields.items() if name != "structured_outputs"}
        )

    monkeypatch.setattr("freight.serve.tgi.request.SamplingParams", stand_in)
    parse({"grammar": grammar})
    assert seen["structured_outputs"] == outputs


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"inputs": None}, "inputs must be a string"),
        ({"inputs": [1]}, "inputs must be a string"),
        ({"parameters": []}, "parameters must be an object"),
        ({"input": "a"}, "did you mean inputs"),
        ({"parameters": {"max_tokens": 5}}, "did you mean max_new_tokens"),
        ({"parameters": {"stop_sequences": ["a"]}}, "did you mean stop"),
        ({"parameters": {"max_new_tokens": 0}}, "max_new_tokens must be"),
        ({"parameters": {"temperature": 0, "do_sample": True}}, "temperature is 0"),
        ({"parameters": {"stop": ["a"] * 5}}, "stop has 5 entries"),
        ({"parameters": {"top_n_tokens": 21}}, "top_n_tokens is 21"),
        ({"parameters": {"truncate": 0}}, "truncate must be"),
        ({"parameters": {"truncate": 513}}, "truncate must be .* 1 to 512"),
        ({"parameters": {"watermark": 1}}, "watermark must be true or false"),
        ({"stream": 1}, "stream must be"),
        ({"parameters": {"grammar": "a"}}, "grammar must be an object"),
        ({"parameters": {"grammar": {"type": "xml", "value": "a"}}}, "grammar.type"),
        ({"parameters": {"grammar": {"type": "regex", "value": {}}}}, "must be a string"),
        ({"parameters": {"grammar": {"type": "json", "value": "{"}}}, "JSON schema"),
        ({"parameters": {"grammar": {"type": "json", "value": '{"a": 1, "a": 2}'}}}, "'a' twice"),
        ({"parameters": {"grammar": {"type": "json", "value": 1}}}, "JSON schema"),
        (
            {"parameters": {"grammar": {"type": "json_schema", "value": {"name": "x"}}}},
            "JSON schema",
        ),
    ],
)
def test_refused(body, says):
    with pytest.raises(ApiError, match=says) as caught:
        parse_generate({"inputs": "a", **body}, SERVED, LIMITS, stream=None)
    assert caught.value.status == 422


def test_a_stream_has_no_prefill():
    with pytest.raises(ApiError, match="decoder_input_details"):
        parse({"decoder_input_details": True}, stream=True)


def test_what_is_ignored_is_named():
    assert parse(options={"use_cache": True}, model="x").ignored == ("options", "model")
    lax = dataclasses.replace(SERVED, unknown_fields="ignore")
    assert parse({"min_p": 1, "top_h": None}, served=lax, other=1).ignored == (
        "other",
        "parameters.min_p",
    )
    assert parse(served=lax, **{"日本": 1, "a\r\nb: c": 1}).ignored == (
        "?",
        "?",
    )  # no header can have them


def test_without_a_tokenizer_there_is_no_text():
    with pytest.raises(ApiError, match="no tokenizer"):
        parse(served=dataclasses.replace(SERVED, tokenizer=None))


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ApiError(400, "m"), 422, "validation"),
        (ApiError(422, "m"), 422, "validation"),
        (ApiError(401, "m"), 401, "authentication"),
        (ApiError(404, "m"), 404, "not_found"),
        (ApiError(405, "m"), 405, "validation"),
        (ApiError(429, "m", headers={"Retry-After": "3"}), 429, "overloaded"),
        (ApiError(503, "m"), 503, "overloaded"),
        (ApiError(500, "m"), 424, "generation"),
        (ApiError(424, "m", code="incomplete_generation"), 424, "incomplete_generation"),
    ],
)
def test_errors(error, status, kind):
    told = as_tgi_error(error)
    assert (told.status, told.headers.get("Retry-After")) == (
        status,
        error.headers.get("Retry-After"),
    )
    assert parse().failure_body(told) == {"error": "m", "error_type": kind}
    assert error_body("/generate", told) == {
        "error": "m",
        "error_type": kind,
    }  # before the body was understood
    event = reply_of(parse(stream=True)).failure(told)
    assert json.loads(event.removeprefix(b"data:")) == {"error": "m", "error_type": kind}


@pytest.mark.parametrize(
    ("reason", "says", "kind"),
    [
        (FinishReason.ERROR, "NaN", "generation"),
        (FinishReason.TIMEOUT, "too long", "incomplete_generation"),
        (FinishReason.ABORT, "aborted", "incomplete_generation"),
    ],
)
def test_a_completion_that_failed(reason, says, kind):
    call = parse()
    failed = CompletionDelta(
        0, [], "", [], reason, None, "NaN" if reason is FinishReason.ERROR else None
    )
    with pytest.raises(ApiError, match=says) as caught:
        reply_of(call).advance(0, RequestDelta("1", [failed], True))
    assert caught.value.status == 424
    assert call.failure_body(caught.value)["error_type"] == kind


def test_info():
    facts = ServerFacts("1.2", 256, 64, {"dtype": "fp8_e4m3"}, "cpu-avx2")
    answer = info(SERVED, LIMITS, facts)
    assert json.loads(json.dumps(answer)) == {
        "model_id": "demo",
        "model_sha": None,
        "vocab_size": SERVED.vocab_size,
        "max_concurrent_requests": 256,
        "max_best_of": 1,
        "max_stop_sequences": 4,
        "max_input_tokens": 511,
        "max_total_tokens": 512,
        "max_client_batch_size": 64,
        "router": "freight",
        "version": "1.2",
        "chat": False,
        "defaults": {"temperature": 0.6},
        "kv_cache": {"dtype": "fp8_e4m3"},
        "kernels": "cpu-avx2",
        "fingerprint": "fp-1",
    }

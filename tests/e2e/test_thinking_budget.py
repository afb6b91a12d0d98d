"""`thinking_token_budget`: no thought has more tokens, and no token before its end is another one.

Random requests of the demo, whose tags are two of its own tokens, or words that it often writes: in
one engine with drafts, few blocks and short chunks, and one at a time without any of that. What a
thought is, is found anew here from the text of all tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.asking import Server
from tests.demo_chat import TEMPLATE, demo_with_tokens
from tests.serving import freight_serve

from freight import LLM, SamplingParams
from freight.outputs import CompletionOutput, FinishReason
from freight.structured import StructuredOutputs

OPEN, CLOSE = 4094, 4095  # of the demo's tokens, two of which no other is made
TAGS = {OPEN: "<think>", CLOSE: "</think>"}
THINKS = TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
PROMPTS = (
    "Once upon a time",
    "def first(values):\n    return values[0]\n\n\n",
    "import os\nimport sys\n\n\ndef main():\n    path = os.path.join(",
    "<think>",
    "Is <think>this</think> a thought?",
    "Is <think>this a thought? ",
)
WORDS = ((" the", "."), ("(", "self)"), (" a", " is the"), ("\n", "\n    return"))
OPTIONS: dict[str, Any] = {"kv_cache_dtype": "fp8", "kv_scales": "dynamic", "max_model_len": 192}
OPTIONS["threads"] = 1
FORMS = (
    StructuredOutputs(regex=r"[a-z ]{0,40}</think>[a-z ]{3,20}"),
    StructuredOutputs(regex=r"(<think>[a-z .,]{0,30}</think>)?[a-z ]{3,20}"),
    StructuredOutputs(regex=r"[a-z .,()]{3,60}"),
    StructuredOutputs(
        grammar="start: <[4094]> thought\nthought: T <[4095]> /[a-z]{2,9}/\nT: /(?s:.*)/"
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"chat_template": THINKS}
    return demo_with_tokens(
        tmp_path_factory.mktemp("m") / "demo", TAGS, special=False, config=config
    )


@pytest.fixture(scope="module")
def crowded(folder: Path) -> LLM:
    """A cache of few blocks: requests are preempted, and find each other's prefixes."""
    return LLM(
        str(folder),
        **OPTIONS,
        kv_cache_memory="360KiB",
        max_num_seqs=8,
        max_num_batched_tokens=24,
        speculate=8,
    )


@pytest.fixture(scope="module")
def alone(folder: Path) -> LLM:
    return LLM(str(folder), **OPTIONS, max_num_seqs=1, enable_prefix_caching=False, speculate=0)


def random_request(rng: Random) -> tuple[str, SamplingParams]:
    """A prompt, and parameters with a budget."""
    form = rng.choice(FORMS) if rng.random() < 0.25 else None
    words = form is None and rng.random() < 0.5
    max_tokens = rng.randint(1, 70)
    bias = {} if words else {OPEN: rng.choice([0, 5, 9]), CLOSE: rng.choice([-3, 0, 4])}
    params = SamplingParams(
        thinking_token_budget=rng.choice([0, 1, 2, 3, rng.randint(0, 64), rng.randint(0, 20)]),
        thinking_tags=rng.choice(WORDS) if words else None,
        temperature=rng.choice([0.0, 0.7, 1.0]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 0, 20]),
        seed=rng.randrange(100),
        n=rng.choice([1, 1, 1, 2, 3]),
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, 0, 3]),
        stop=rng.choice([(), (), "\n\n", ("self", "return x"), "</think>", "nk>"]),
        stop_token_ids=rng.choice([(), (), (CLOSE,)]),
        logit_bias=bias,
        bad_words=rng.choice([(), (), ("</think>", " the")]),
        allowed_token_ids=rng.choice([None, None, None, range(300, 4095)]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        structured_outputs=form,
    )
    if form is not None:
        params = replace(params, allowed_token_ids=None, bad_words=())
    return rng.choice(PROMPTS), params


@dataclass
class Reading:
    """The thoughts in the first tokens of an answer, found in all of their text.

    within     tokens of each closed thought
    unclosed   tokens since the last opening tag; None: no thought is open
    """

    within: list[int]
    unclosed: int | None
    rest: str = ""


def read(prompt: str, pieces: Sequence[str], tags: Sequence[str]) -> Reading:
    """What thoughts there are, from the text alone: a tag ends with the token that completes it."""
    opening, closing = tags
    text = prompt + "".join(pieces)
    ends = [len(prompt), *itertools.accumulate(map(len, pieces), initial=len(prompt))][1:]
    inside = prompt.rfind(opening) > prompt.rfind(closing)
    begin = len(prompt)
    if not inside:
        last = prompt.rfind(closing)
        begin = last + len(closing) if last >= 0 else 0
    within: list[int] = []
    while True:
        place = text.find(closing if inside else opening, begin)
        if place < 0:
            break
        end = place + len(closing if inside else opening)
        if inside:  # tokens that begin within the thought
            starts = ends[:-1]
            within.append(sum(begin <= start < place for start in starts))
        begin = next(stop for stop in ends if stop >= end)
        inside = not inside
    unclosed = None
    if inside:
        unclosed = sum(begin <= start for start in ends[:-1])
    return Reading(within, unclosed, text[begin:])


def pieces_of(llm: LLM, token_ids: Sequence[int]) -> list[str]:
    """Characters of one byte each: a token may have a part of a character."""
    pieces = llm.engine.tokenizer.pieces(skip_special_tokens=False)
    texts = []
    for token in token_ids:
        piece = pieces[token] or ""
        data = piece.encode() if isinstance(piece, str) else piece
        texts.append(data.decode("latin-1"))
    return texts


def check(
    llm: LLM, prompt: str, params: SamplingParams, free: CompletionOutput, ended: CompletionOutput
) -> bool:
    """Whether a thought was ended. `free`: the same completion without a budget."""
    budget = params.thinking_token_budget
    assert budget is not None
    tags = params.thinking_tags or tuple(TAGS.values())
    tokens = ended.token_ids
    pieces = pieces_of(llm, tokens)
    equal = 0
    for one, other in zip(free.token_ids, tokens, strict=False):
        if one != other:
            break
        equal += 1
    begun = prompt.encode().decode("latin-1")
    if params.structured_outputs is not None:
        return equal < len(tokens)
    if equal == len(tokens):  # it ended where the other did, or a stop string did by the forced tag
        differs = len(free.token_ids) > equal
    else:
        differs = True
        at = read(begun, pieces[:equal], tags)
        assert at.unclosed is not None, (tags, pieces[:equal])
        assert sum(at.within) + at.unclosed >= budget, "a token was forced too soon"
    for length in range(len(tokens) + 1):
        reading = read(begun, pieces[:length], tags)
        used = sum(reading.within)
        assert used <= budget, (tags, budget, pieces[:length])
        if reading.unclosed is not None and used + reading.unclosed > budget:
            over = used + reading.unclosed - budget
            tail = "".join(pieces[length - over : length])
            whole = "".join(pieces[:length])
            starts = (
                whole.endswith(tags[1][:k]) and k >= len(tail.lstrip()) for k in range(len(tags[1]))
            )
            assert any(starts), (tags, budget, pieces[:length])
    return differs


def check_some(crowded: LLM, alone: LLM, rng: Random, count: int) -> int:
    """Check that many requests; returns how many completions had a thought that was ended."""
    requests = [random_request(rng) for _ in range(count)]
    prompts = [prompt for prompt, _ in requests]
    limited = [params for _, params in requests]
    without = [replace(params, thinking_token_budget=None) for params in limited]
    # together: each finds the other's blocks
    both = crowded.generate([*prompts, *prompts], [*limited, *without])
    num_ended = 0
    for index, (prompt, params) in enumerate(requests):
        ended, free = both[index], both[count + index]
        again = alone.generate([prompt], [params])[0]
        assert [one.token_ids for one in again.outputs] == [one.token_ids for one in ended.outputs]
        assert again.outputs == ended.outputs
        for one, other in zip(free.outputs, ended.outputs, strict=True):
            if FinishReason.ERROR in (one.finish_reason, other.finish_reason):
                assert one.error == other.error, (params, one.error, other.error)
                continue
            num_ended += check(alone, prompt, params, one, other)
        _check_redraw(alone, prompt, params, [one.token_ids for one in ended.outputs])
    return num_ended


def _check_redraw(
    llm: LLM, prompt: str, params: SamplingParams, answers: Sequence[Sequence[int]]
) -> None:
    """Each token is drawn again as it is stated, from one prefill."""
    engine = llm.engine
    engine.redraw("again", engine.accept(prompt, params), params, answers)
    while not engine.is_finished("again"):
        engine.step()
    redrawn = engine.redrawn("again")
    engine.release("again")
    assert redrawn.mismatches == (None,) * params.n, params


def test_random_requests(crowded: LLM, alone: LLM) -> None:
    assert check_some(crowded, alone, Random(5), 60) > 20


def test_over_http(folder: Path) -> None:
    """Whole and streamed answers, the server's default, a form after reasoning, and refusals."""
    options = ["--kv-cache-memory", "8MiB", "--reasoning-budget", "6"]
    with freight_serve(folder, [*options, "--scheduling-policy", "priority"]) as url:
        server = Server(url)
        choice = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a"]}}}
        for fields, most in (
            ({}, 6),
            ({"thinking_token_budget": 3, "priority": 5}, 3),
            ({"reasoning_budget": 0}, 0),
            ({"reasoning_budget_tokens": 2, "response_format": choice}, 2),
            ({"thinking_token_budget": -1}, 30),
        ):
            messages = [{"role": "user", "content": "How is the weather?"}]
            body = {"messages": messages, "max_tokens": 30, "seed": 1, **fields}
            answer = server.ask("/v1/chat/completions", body)
            assert answer.status == 200, answer.body
            message = answer.body["choices"][0]["message"]
            used = answer.body["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert used <= most
            if "response_format" in fields:
                assert message["content"] == '"a"'
        refused = server.ask("/v1/chat/completions", {**body, "thinking_token_budget": -5})
        assert (refused.status, refused.error["param"]) == (400, "thinking_token_budget")

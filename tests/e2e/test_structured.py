"""Structured outputs through LLM, with the model that ships: every answer has its form, whatever
happens around it.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.refusals import assert_names

from freight import LLM, RequestError, SamplingParams, StructuredOutputs
from freight.checkpoint.reader import resolve_model
from freight.engine.grammar import Matcher
from freight.outputs import CompletionOutput, FinishReason
from freight.text.tokenizer import Tokenizer

BASE = Path(__file__).parents[1] / "fixtures" / "base_bf16"
BLANKS = 16 + 1  # the most in one place, and the character behind them
SIZE = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "sizes": {"type": "array", "items": SIZE, "maxItems": 3},
        "kind": {"enum": ["file", "folder", None]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
REGEX, CHOICES = "[a-f]{2,9}(-[0-9]{1,3})?", ["yes", "yes, but", "no\n"]
GRAMMAR = 'start: "x" | "(" inner ")"\ninner: "y" ~ 1..3'
FORMS: list[tuple[dict[str, Any], Callable[[str], object]]] = [
    ({"json": SCHEMA}, lambda text: jsonschema_rs.is_valid(SCHEMA, json.loads(text))),
    ({"regex": REGEX}, partial(re.fullmatch, REGEX)),
    ({"choice": CHOICES}, CHOICES.__contains__),
    ({"grammar": GRAMMAR}, partial(re.fullmatch, r"x|\(y{1,3}\)")),
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", kv_cache_memory="24MiB")


def params(outputs: dict[str, Any], seed: int = 0, **others: Any) -> SamplingParams:
    own = {"max_tokens": 400, "seed": seed, "structured_outputs": outputs}
    return SamplingParams(**own | others)


def one(llm: LLM, prompt: str, given: SamplingParams) -> CompletionOutput:
    return llm.generate(prompt, given)[0].outputs[0]


def between(bounds: list[int]) -> dict[str, Any]:
    return {"type": "integer", "minimum": min(bounds), "maximum": max(bounds)}


def scalars() -> st.SearchStrategy[dict[str, Any]]:
    integers = st.lists(st.integers(-500, 1000), min_size=2, max_size=2).map(between)
    texts = st.integers(0, 6).map(lambda most: {"type": "string", "maxLength": most})
    values = st.none() | st.booleans() | st.integers(-99, 99) | st.text('ab"\\é \n{', max_size=4)
    enums = st.lists(values, min_size=1, max_size=4).map(lambda entries: {"enum": entries})
    numbers = st.just({"type": "number", "minimum": -1, "maximum": 1})
    plain = st.sampled_from([{"type": "boolean"}, {"type": "null"}])
    return integers | texts | enums | numbers | plain


def schemas(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.fixed_dictionaries(
        {"items": inner, "minItems": st.integers(0, 1), "maxItems": st.integers(1, 2)}
    ).map(lambda fields: {"type": "array", **fields})
    names = st.sampled_from(["a", "b c", "é", "$ref", 'q"'])
    members = st.dictionaries(names, inner, min_size=1, max_size=2)
    closed = {"type": "object", "additionalProperties": False}
    objects = st.tuples(members, st.booleans()).map(
        lambda made: {**closed, "properties": made[0], "required": [*made[0]] if made[1] else []}
    )
    branches = st.lists(inner, min_size=1, max_size=2)
    return arrays | objects | branches.map(lambda branches: {"anyOf": branches})


def longest(schema: dict[str, Any]) -> float:
    """Bytes, and so tokens, that a text of `schema` has at most; infinite for a number with a
    fraction.
    """
    if "enum" in schema:
        return max(len(json.dumps(value)) for value in schema["enum"])
    if "anyOf" in schema:
        return max(map(longest, schema["anyOf"]))
    kind = schema["type"]
    if kind == "array":
        return 2 * BLANKS + schema["maxItems"] * (longest(schema["items"]) + 2 * BLANKS)
    if kind == "object":
        members = schema["properties"]
        names = sum(len(json.dumps(name)) + 4 * BLANKS for name in members)
        return 2 * BLANKS + names + sum(map(longest, members.values()))
    return {"number": math.inf, "string": 2 + 6 * schema.get("maxLength", 0)}.get(kind, 5)


MOST = 160  # tokens of an answer
BATCHES = st.lists(schemas(scalars()) | schemas(schemas(scalars())), min_size=6, max_size=10)


@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(batch=BATCHES, seed=st.integers(0, 9))
def test_every_answer_to_a_schema_is_valid_and_ends(
    llm: LLM, batch: list[dict[str, Any]], seed: int
):
    asked = [params({"json": schema}, seed, max_tokens=MOST) for schema in batch]
    for schema, output in zip(batch, llm.generate(["x = "] * len(batch), asked), strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason is FinishReason.STOP or longest(schema) + 1 > MOST
        if answer.finish_reason is FinishReason.STOP:
            assert jsonschema_rs.is_valid(schema, json.loads(answer.text)), answer.text
            assert len(answer.token_ids) <= longest(schema) + 1


@pytest.mark.parametrize(
    "others", [{}, {"temperature": 0.0}, {"ignore_eos": True}, {"min_tokens": 60}], ids=str
)
def test_every_form_is_kept(llm: LLM, others: dict[str, Any]):
    asked = [params(form, seed, **others) for form, _ in FORMS for seed in (1, 2)]
    answers = llm.generate(["def f("] * len(asked), asked)
    for output, (_, fits) in zip(answers, [form for form in FORMS for _ in range(2)], strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason is FinishReason.STOP
        assert answer.stop_reason is None
        assert fits(answer.text), answer.text


def test_json_object_is_an_object(llm: LLM):
    for outputs in ({"json_object": True}, {"json": "{}"}):
        answer = one(llm, "d = ", params(outputs, 3, max_tokens=60))
        assert answer.text.startswith("{")
        if answer.finish_reason is not FinishReason.LENGTH:
            assert isinstance(json.loads(answer.text), dict)


def test_several_completions_have_a_grammar_each(llm: LLM):
    outputs = llm.generate("x", params(FORMS[1][0], n=4))[0].outputs
    assert all(FORMS[1][1](answer.text) for answer in outputs)
    assert len({answer.text for answer in outputs}) > 1


def test_the_text_is_whole_when_its_last_token_reaches_max_tokens(llm: LLM):
    form = {"choice": ["a short answer."]}
    whole = one(llm, "x", params(form, temperature=0.0))
    assert whole.text == "a short answer."
    again = one(llm, "x", params(form, temperature=0.0, max_tokens=len(whole.token_ids)))
    assert (again.text, again.finish_reason) == (whole.text, FinishReason.STOP)
    cut = one(llm, "x", params(form, temperature=0.0, max_tokens=len(whole.token_ids) - 1))
    assert cut.finish_reason is FinishReason.LENGTH
    assert whole.text.startswith(cut.text)


def test_a_stop_string_ends_a_text_before_its_grammar_does(llm: LLM):
    answer = one(llm, "x", params({"choice": ["one two three"]}, stop=[" two"]))
    assert (answer.text, answer.stop_reason) == ("one", " two")
    assert answer.finish_reason is FinishReason.STOP


def test_a_stop_id_of_the_request_is_told_and_the_models_own_is_not(llm: LLM):
    """Only so can a text that was cut be told from a complete one: both have "stop"."""
    form = {"choice": ["one two three"]}
    whole = one(llm, "x", params(form, temperature=0.0))
    cut = one(llm, "x", params(form, temperature=0.0, stop_token_ids=[whole.token_ids[1]]))
    assert (cut.finish_reason, cut.stop_reason) == (FinishReason.STOP, whole.token_ids[1])
    assert whole.text.startswith(cut.text)
    assert cut.text != whole.text
    end = Tokenizer.load(resolve_model("demo")).eos_token_id
    assert end is not None
    named = one(llm, "x", params(form, stop_token_ids=[end]))
    assert (named.text, named.stop_reason) == ("one two three", None)


def test_streamed_as_generated(llm: LLM):
    asked = params(FORMS[0][0], 5)
    assert list(llm.stream("def f(", asked))[-1].outputs[0].text == one(llm, "def f(", asked).text


def test_other_requests_and_log_probabilities_are_not_changed(llm: LLM):
    plain = [SamplingParams(max_tokens=12, seed=seed, logprobs=1) for seed in range(3)]
    alone = [one(llm, "def f(", given) for given in plain]
    mixed = [params(FORMS[0][0]), plain[0], params(FORMS[1][0]), plain[1], plain[2]]
    together = llm.generate(["def f("] * 5, mixed)
    assert [together[index].outputs[0] for index in (1, 3, 4)] == alone
    greedy = params({"regex": ".{1,9}"}, max_tokens=1, logprobs=1, temperature=0.0)
    first = one(llm, "def f(", greedy)
    assert first.logprobs is not None
    assert alone[0].logprobs is not None
    top = min(alone[0].logprobs[0].items(), key=lambda entry: entry[1].rank)
    assert first.logprobs[0][top[0]].logprob == top[1].logprob


def test_preemption_keeps_the_place_in_the_grammar(llm: LLM):
    sizes = {"max_model_len": 120, "max_num_seqs": 8}
    small = LLM("demo", kv_cache_memory="480KiB", enable_prefix_caching=False, **sizes)
    form = {"regex": "([a-f]{2}-[0-9]{2};){99}"}  # longer than 60 tokens, whichever are drawn
    asked = [params(form, seed, max_tokens=60) for seed in range(6)]
    prompts = [f"size_{index} = " for index in range(len(asked))]
    expected = [output.outputs[0] for output in llm.generate(prompts, asked)]
    assert [output.outputs[0] for output in small.generate(prompts, asked)] == expected
    assert small.engine.scheduler.totals.preemptions > 0


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("seed", range(2))
def test_interrupts_and_aborts_keep_the_place_in_the_grammar(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, seed: int
):
    asked = [params(form, seed) for form, _ in FORMS]
    expected = [one(llm, "def f(", given) for given in asked]
    rng, ended = random.Random(seed), Matcher.ended

    def interrupted(self: Matcher, output: list[int]) -> bool:
        before, after = rng.random() < 0.15, rng.random() < 0.15
        if before:
            raise Interrupted
        result = ended(self, output)
        if after:
            raise Interrupted
        return result

    monkeypatch.setattr(Matcher, "ended", interrupted)
    engine, names = llm.engine, [f"form {index}" for index in range(len(asked))]
    for name, wanted in zip([*names, "aborted"], [*asked, asked[0]], strict=True):
        engine.add(name, engine.accept("def f(", wanted), wanted)
    num_interrupts = 0
    while engine.has_unfinished:
        try:
            engine.step()
            engine.abort("aborted")
        except Interrupted:
            num_interrupts += 1
    assert num_interrupts > 0
    monkeypatch.setattr(Matcher, "ended", ended)
    assert [engine.output(name).outputs[0] for name in names] == expected
    for name in [*names, "aborted"]:
        engine.release(name)


def test_a_failing_grammar_fails_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    good = [SamplingParams(max_tokens=8, seed=1), params(FORMS[1][0])]
    long = {"regex": "[a-z]{99}"}  # no two tokens are its whole text
    expected = [one(llm, "def f(", given) for given in good]
    permitted = Matcher.permitted

    def failing(self: Matcher, output: list[int], *barred: Any) -> Any:
        if len(output) == 2 and self.marked:  # type: ignore[attr-defined]
            self._fail("step fuel exhausted")
        return permitted(self, output, *barred)

    monkeypatch.setattr(
        Matcher, "marked", property(lambda self: self._start is marked._start), raising=False
    )
    assert llm.engine.grammars is not None
    marked = llm.engine.grammars.matcher(StructuredOutputs(**long))
    monkeypatch.setattr(Matcher, "permitted", failing)
    outputs = llm.generate(["def f("] * 3, [good[0], params(long), good[1]], on_error="return")
    assert [outputs[index].outputs[0] for index in (0, 2)] == expected
    failed = outputs[1].outputs[0]
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error is not None
    assert_names(failed.error, "structured output", "too large")
    assert llm.engine.cache.num_held == 0


def test_what_does_not_compile_is_refused_before_anything_is_computed(llm: LLM):
    computed = llm.engine.num_computed_tokens
    with pytest.raises(RequestError, match="not is not supported"):
        llm.generate(["a", "b"], [SamplingParams(), params({"json": {"not": {}}})])
    assert llm.engine.num_computed_tokens == computed
    assert not llm.engine.has_unfinished


def test_without_a_tokenizer_it_is_refused():
    model = LLM(str(BASE), skip_tokenizer_init=True, kv_cache_memory="88KiB", max_model_len=40)
    with pytest.raises(RequestError, match="structured_outputs needs a tokenizer"):
        model.generate([3, 4], params({"regex": "a"}, max_tokens=4))

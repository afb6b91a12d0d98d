"""What goes between the server's processes arrives as it was."""

from __future__ import annotations

import json
from array import array
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from freight.engine.adapters import LoadedAdapter, LoRARequest
from freight.outputs import (
    CompletionDelta,
    EngineStats,
    FinishReason,
    Logprob,
    RequestDelta,
    RequestTimes,
    Scores,
    StoreStats,
)
from freight.sampling import SamplingParams
from freight.serve.processes import wire
from freight.structured import StructuredOutputs

SECONDS = st.floats(0, 1e6)
ENTRY = st.dictionaries(
    st.integers(0, 2**31),
    st.builds(
        Logprob,
        st.floats(max_value=0, allow_nan=False),
        st.integers(1, 9),
        st.none() | st.text(max_size=3),
    ),
    max_size=3,
)
COMPLETION = st.builds(
    CompletionDelta,
    st.integers(0, 15),
    st.lists(st.integers(0, 2**31), max_size=4),
    st.text(max_size=9),
    st.none() | st.lists(ENTRY, max_size=3),
    st.none() | st.sampled_from(FinishReason),
    st.none() | st.integers(0, 9) | st.text(max_size=4),
    st.none() | st.text(max_size=9),
)


@st.composite
def scores(draw: st.DrawFn, width: int = 3) -> Scores:
    """Of 0 to 5 tokens, each with two likely ones."""
    count = draw(st.integers(0, 5))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=count * width, max_size=count * width))
    logprob = st.floats(max_value=0, allow_nan=False, width=32)
    logprobs = draw(st.lists(logprob, min_size=count * width, max_size=count * width))
    ranks = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    return Scores(width, array("i", ids), array("f", logprobs), array("i", ranks))


DELTA = st.builds(
    RequestDelta,
    st.text(min_size=1, max_size=9),
    st.lists(COMPLETION, max_size=3),
    st.booleans(),
    st.none() | scores(),
    st.integers(0, 99),
    st.none() | st.builds(RequestTimes, SECONDS, SECONDS, SECONDS, st.integers(0, 9)),
)


def sent(value: Any) -> Any:
    return json.loads(json.dumps(value))


@given(DELTA)
@example(RequestDelta("1", [CompletionDelta(0, [5, 6], "ab", None, None, None, None)], False))
@example(RequestDelta("1", [CompletionDelta(1, [5, 6], "ab", None, None, None, None)], False))
@example(RequestDelta("1", [CompletionDelta(0, [5], "a", None, None, "b", None)], False))
def test_a_delta_arrives_as_it_was(delta: RequestDelta) -> None:
    assert wire.delta_from_json(sent(wire.delta_to_json(delta))) == delta


def test_stats_arrive_as_they_were() -> None:
    plain = EngineStats(*range(15))  # the counts
    stored = replace(plain, store=StoreStats(*range(30, 30 + len(fields(StoreStats)))))
    named = replace(stored, running_adapters=("a", "é"), waiting_adapters=("b",))
    drafted = replace(named, drafted_by={"text": 9, "mtp": 5}, accepted_by={"text": 7, "mtp": 2})
    for stats in (plain, stored, named, drafted):
        assert wire.stats_from_json(sent(wire.stats_to_json(stats))) == stats


PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 4),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.1, 1),
    top_k=st.integers(-1, 50),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    max_tokens=st.none() | st.integers(5, 99),
    min_tokens=st.integers(0, 5),
    stop=st.lists(st.text(min_size=1, max_size=4), max_size=3),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=3),
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-9, 9), max_size=3),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=3),
    bad_words=st.lists(st.text(min_size=1, max_size=4), max_size=3),
    include_stop_str_in_output=st.booleans(),
    truncate_prompt_tokens=st.none() | st.just(-1) | st.integers(1, 99),
    logprobs=st.none() | st.integers(0, 5),
    cache_salt=st.none() | st.text(min_size=1, max_size=5),
    timeout_s=st.none() | st.floats(0.1, 9),
)


@given(PARAMS)
def test_parameters_arrive_as_they_were(params: SamplingParams) -> None:
    value = sent(wire.params_to_json(params))
    assert wire.params_from_json(value) == params
    assert wire.params_to_json(SamplingParams()) == {}


def test_facts_arrive_as_they_were() -> None:
    facts = wire.EngineFacts(
        "folder", 9, 8, (1, 2), {"top_k": 5}, {"dtype": "fp8_e4m3fn"}, "cpu-avx2", "fp_0", True
    )
    loaded = (LoadedAdapter("é", "folder", "ab12", 0), LoadedAdapter("b", "owner/name", "cd", 3))
    for known in (facts, replace(facts, max_adapters=4, adapters=loaded)):
        assert wire.facts_from_json(sent(wire.facts_to_json(known))) == known


@pytest.mark.parametrize("adapter", [None, LoRARequest("é"), LoRARequest("a", 0, "folder")])
def test_the_adapter_of_a_request_arrives_as_it_was(adapter: LoRARequest | None) -> None:
    assert wire.request_from_json(sent(wire.request_to_json(adapter))) == adapter


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"type": "object", "properties": {"é": {"type": "integer"}}}},
        {"json": {}},
        {"json": '{"type":"array"}'},
        {"json_object": True},
        {"regex": "a+"},
        {"choice": ["a", "b"]},
        {"grammar": 'start: "a"'},
        {
            "grammar": "start: @a @b",
            "parts": {"a": {"regex": "x"}, "b": {"json": {"type": "null"}}},
        },
    ],
)
def test_every_form_arrives_as_it_was(form: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(**form))
    arrived = wire.params_from_json(sent(wire.params_to_json(params)))
    assert arrived == params
    assert isinstance(arrived.structured_outputs, StructuredOutputs)
    assert params.structured_outputs is not None
    assert arrived.structured_outputs.key() == params.structured_outputs.key()

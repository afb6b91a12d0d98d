"""SamplingParams: what is accepted, what is refused and with which words."""

from __future__ import annotations

import copy
import dataclasses
import fractions
import itertools
import math
import pickle

import numpy as np
import pytest
from tests.clock import takes_less
from tests.refusals import refuses

from freight.errors import RequestError
from freight.sampling import SamplingLimits, SamplingParams, check_limits


def test_defaults_are_those_of_vllm():
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "allowed_token_ids": None,
        "bad_words": (),
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "truncate_prompt_tokens": None,
        "cache_salt": None,
        "timeout_s": None,
        "priority": 0,
        "thinking_token_budget": None,
        "thinking_tags": None,
        "structured_outputs": None,
        "prediction": None,
        "pooling": None,
    }


def test_values_are_brought_into_one_form():
    params = SamplingParams(
        n=np.int64(2),
        temperature=np.float32(0.5),
        top_k=-1,
        stop="end",
        stop_token_ids=[3, 4],
        logit_bias={np.int32(7): 1},
    )
    assert (params.n, params.temperature, params.top_k) == (2, 0.5, 0)
    assert type(params.n) is int
    assert type(params.temperature) is float
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert params.logit_bias == {7: 1.0}
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_a_copy_is_equal_and_the_callers_dict_is_not_kept():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias, stop="x", seed=2**64 - 1)
    bias[1] = 3.0
    assert params.logit_bias == {1: 2.0}
    assert (
        pickle.loads(pickle.dumps(params))
        == copy.deepcopy(params)
        == dataclasses.replace(params)
        == params
    )
    assert hash(params) == hash(dataclasses.replace(params))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("n", value) for value in (0, -1, 129, 1.0, True, "1", None)],
        *[
            ("temperature", value)
            for value in (-1, -1e-9, math.nan, math.inf, 10**400, "1", None, True)
        ],
        *[("top_p", value) for value in (0, -0.1, 1.0001, math.nan, None)],
        *[("top_k", value) for value in (-2, 1.5, True, None)],
        *[("min_p", value) for value in (-0.1, 1.1, math.nan)],
        *[("seed", value) for value in (2**64, -(2**63) - 1, 1.5, True)],
        *[("max_tokens", value) for value in (0, -1, 1.5, True, 2**63)],
        *[("min_tokens", value) for value in (-1, True, None)],
        *[("stop", value) for value in ("", ["a", ""], [1], 1, b"a", {"a": 1})],
        *[("stop_token_ids", value) for value in ([-1], [1.0], 3, "3", [True])],
        *[("ignore_eos", value) for value in (1, None)],
        *[("presence_penalty", value) for value in (2.1, -2.1, math.nan)],
        *[("frequency_penalty", value) for value in (2.1, -2.1, math.inf)],
        *[("repetition_penalty", value) for value in (0, -1, math.nan, math.inf)],
        *[
            ("logit_bias", value)
            for value in ({1: math.nan}, {1: math.inf}, {-1: 1}, {"1": 1}, {1: 1e10}, [1])
        ],
        *[("logprobs", value) for value in (-1, 21, True)],
        *[("prompt_logprobs", value) for value in (-1, 21, 1.0)],
        *[("detokenize", value) for value in (0, None)],
        *[("skip_special_tokens", value) for value in (0, "yes")],
        *[("cache_salt", value) for value in ("", 1, "x" * 1025)],
        *[("timeout_s", value) for value in (0, -1, math.nan, math.inf, 10**10, "1", True)],
    ],
)
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})


def test_the_message_has_field_value_and_range():
    with refuses(RequestError, "temperature is -1", "0 to 1000000000", "0 is greedy"):
        SamplingParams(temperature=-1)
    with refuses(RequestError, "n is 129", "1 to 128"):
        SamplingParams(n=129)


def test_a_whole_number_without_a_practical_limit_names_it_only_beyond_it():
    with refuses(RequestError, "max_tokens is -1", "0 or more"):
        SamplingParams(max_tokens=-1)
    with pytest.raises(
        RequestError, match=r"^max_tokens is 9223372036854775808; .*, 0 to 9223372036854775807$"
    ):
        SamplingParams(max_tokens=2**63)


def test_contradictions_are_refused():
    with refuses(RequestError, "min_tokens is 5", "max_tokens", "4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5
    with pytest.raises(RequestError, match="stop_token_ids"):
        SamplingParams(stop="x", detokenize=False)


def test_no_token_is_generated_only_to_score_the_prompt():
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    assert (params.max_tokens, params.prompt_logprobs) == (0, 0)
    with refuses(RequestError, "max_tokens is 0", "prompt_logprobs None", "set prompt_logprobs"):
        SamplingParams(max_tokens=0)
    with refuses(RequestError, "min_tokens is 1", "max_tokens", "0"):
        SamplingParams(max_tokens=0, prompt_logprobs=0, min_tokens=1)
    with pytest.raises(RequestError, match="n is 2 and max_tokens 0"):
        SamplingParams(max_tokens=0, prompt_logprobs=0, n=2)


AT_THE_LIMIT = {
    "n": 128,
    "temperature": 10**9,
    "logprobs": 20,
    "prompt_logprobs": 20,
    "timeout_s": 10**9,
    "stop": ["x" * 256] * 16,
    "stop_token_ids": range(1024),
    "logit_bias": dict.fromkeys(range(1024), 1.0),
    "allowed_token_ids": range(2**20),
    "bad_words": ["x" * 256] * 1024,
    "cache_salt": "x" * 1024,
}


@pytest.fixture(scope="module")
def at_the_limit() -> SamplingParams:
    return SamplingParams(**AT_THE_LIMIT)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"n": 16}, "n is 128; it must be a whole number, 1 to 16"),
        (
            {"temperature": 2.0},
            "temperature is 1000000000.0; it must be a finite number, 0 to 2.0; 0 is greedy",
        ),
        ({"logprobs": 5}, "logprobs is 20; it must be a whole number, 0 to 5"),
        ({"prompt_logprobs": 5}, "prompt_logprobs is 20; it must be a whole number, 0 to 5"),
        (
            {"timeout_s": 60},
            "timeout_s is 1000000000.0; it must be a finite number, greater than 0 and at most 60",
        ),
        ({"stop": 4}, "stop has 16 entries; at most 4 are allowed"),
        (
            {"stop_length": 70},
            f"stop[0] is '{'x' * 60}'... (256 characters); it must be a string of 1 to 70 characters",
        ),
        ({"stop_token_ids": 1023}, "stop_token_ids has 1024 entries; at most 1023 are allowed"),
        (
            {"allowed_token_ids": 2**16},
            "allowed_token_ids has 1048576 entries; at most 65536 are allowed",
        ),
        ({"bad_words": 9}, "bad_words has 1024 entries; at most 9 are allowed"),
        ({"logit_bias": 300}, "logit_bias has 1024 entries; at most 300 are allowed"),
        (
            {"cache_salt": 64},
            f"cache_salt is '{'x' * 60}'... (1024 characters); it must be a string of 1 to 64 characters",
        ),
    ],
)
def test_a_server_s_limits_may_be_lower(at_the_limit, limits, message):
    check_limits(at_the_limit, SamplingLimits())
    with pytest.raises(RequestError) as refused:
        check_limits(at_the_limit, SamplingLimits(**limits))
    assert str(refused.value) == message


def test_every_limit_can_be_lowered():
    assert {f.name for f in dataclasses.fields(SamplingLimits)} == {*AT_THE_LIMIT, "stop_length"}


HUGE = 10**200_000  # more digits than Python prints


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        *[
            (name, HUGE, "bits")
            for name in ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "stop")
        ],
        *[
            (name, -HUGE, "bits")
            for name in ("temperature", "top_p", "presence_penalty", "timeout_s", "detokenize")
        ],
        ("temperature", fractions.Fraction(HUGE, 7), "inf"),
        ("stop", "x" * 10**7, "stop[0] is 'xxx"),
        ("stop", ["x", b"x" * 10**7], "stop[1] is b'xxx"),
        ("stop", ["x"] * 10**6, "stop has 1000000 entries; at most 16"),
        ("stop", itertools.repeat("x"), "stop has more than 16 entries"),
        ("stop", ["x"] * 17, "stop has 17 entries; at most 16"),
        ("stop", "x" * 257, "(257 characters); it must be a string of 1 to 256 characters"),
        ("stop_token_ids", range(10**7), "stop_token_ids has 10000000 entries; at most 1024"),
        ("stop_token_ids", [1, HUGE], "stop_token_ids[1] is a whole number of"),
        ("stop_token_ids", [[1] * 10**6], "stop_token_ids[0] is a list of length 1000000"),
        (
            "allowed_token_ids",
            range(10**7),
            "allowed_token_ids has 10000000 entries; at most 1048576",
        ),
        ("allowed_token_ids", [1, HUGE], "allowed_token_ids[1] is a whole number of"),
        ("bad_words", ["x" * 10**7], "bad_words[0] is 'xxx"),
        ("bad_words", itertools.repeat("x"), "bad_words has more than 1024 entries"),
        ("truncate_prompt_tokens", HUGE, "truncate_prompt_tokens is a whole number of"),
        (
            "logit_bias",
            dict.fromkeys(range(10**5), 1),
            "logit_bias has 100000 entries; at most 1024",
        ),
        ("logit_bias", {HUGE: 1}, "logit_bias key is a whole number of"),
        ("logit_bias", {"x" * 10**7: 1}, "logit_bias key is 'xxx"),
        ("logit_bias", {1: HUGE}, "logit_bias[1] is a whole number of"),
        ("logit_bias", [1] * 10**6, "logit_bias is a list of length 1000000"),
        ("ignore_eos", [1] * 10**6, "ignore_eos is a list of length 1000000"),
        ("cache_salt", "x" * 10**7, "cache_salt is 'xxx"),
        ("cache_salt", {1: [1] * 10**6}, "cache_salt is a dict of length 1"),
        ("x" * 10**6, 1, "no field 'xxx"),
    ],
    ids=lambda value: (
        str(value)[:40] if isinstance(value, str) and len(value) < 40 else type(value).__name__
    ),
)
def test_a_huge_value_is_refused_at_once_and_not_repeated(field, value, says):
    def refused() -> None:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{field: value})
        assert says in str(caught.value)
        assert len(str(caught.value)) < 600

    assert takes_less(0.05, refused)


@pytest.mark.parametrize(
    ("unknown", "suggestion"),
    [
        ("max_new_tokens", "max_tokens"),
        ("stop_sequences", "stop"),
        ("do_sample", "temperature"),
        ("best_of", "n"),
        ("max_time", "timeout_s"),
        ("timeout", "timeout_s"),
        ("use_beam_search", "n"),
        ("temperture", "temperature"),
        ("repitition_penalty", "repetition_penalty"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(unknown, suggestion):
    with pytest.raises(
        RequestError, match=rf"no field '{unknown}' \(did you mean {suggestion}\?\)"
    ):
        SamplingParams(**{unknown: 1})


def test_a_hopeless_name_lists_what_there_is():
    with refuses(RequestError, "'zzzz'", "n, temperature", "thinking_tags, structured_outputs"):
        SamplingParams(zzzz=1)


def test_a_budget_of_thoughts_is_a_count_or_no_limit():
    assert SamplingParams(thinking_token_budget=0).thinking_token_budget == 0
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    with refuses(RequestError, "thinking_token_budget is -2", "-1 is no limit"):
        SamplingParams(thinking_token_budget=-2)
    with refuses(RequestError, "reasoning_budget", "thinking_token_budget"):
        SamplingParams(reasoning_budget=5)


def test_tags_of_thoughts_are_two_texts():
    assert SamplingParams(thinking_tags=["<a>", "</a>"]).thinking_tags == ("<a>", "</a>")
    for tags in ("<a>", ["<a>"], ["<a>", "</a>", "x"], ["<a>", ""], ["<a>", 5], ["a", "\ud800"]):
        with refuses(RequestError, "thinking_tags"):
            SamplingParams(thinking_tags=tags)


def test_greedy_is_temperature_zero_and_what_is_too_small_to_divide_by():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_token_ids_are_checked_against_the_vocabulary():
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[9]).check_vocabulary(10)
    with refuses(RequestError, "logit_bias", "token id 10", "0 to 9"):
        SamplingParams(logit_bias={10: 1.0}).check_vocabulary(10)
    with refuses(RequestError, "stop_token_ids", "token id 11"):
        SamplingParams(stop_token_ids=[1, 11]).check_vocabulary(10)

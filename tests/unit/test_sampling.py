"""SamplingParams: what is accepted, what is refused and with which words."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest

from freight.errors import RequestError
from freight.sampling import SamplingParams


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
        "ignore_eos": False,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "cache_salt": None,
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
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == dataclasses.replace(params) == params
    assert hash(params) == hash(dataclasses.replace(params))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("n", value) for value in (0, -1, 129, 1.0, True, "1", None)],
        *[("temperature", value) for value in (-1, -1e-9, math.nan, math.inf, 10**400, "1", None, True)],
        *[("top_p", value) for value in (0, -0.1, 1.0001, math.nan, None)],
        *[("top_k", value) for value in (-2, 1.5, True, None)],
        *[("min_p", value) for value in (-0.1, 1.1, math.nan)],
        *[("seed", value) for value in (2**64, -(2**63) - 1, 1.5, True)],
        *[("max_tokens", value) for value in (0, -1, 1.5, True)],
        *[("min_tokens", value) for value in (-1, True, None)],
        *[("stop", value) for value in ("", ["a", ""], [1], 1, b"a", {"a": 1})],
        *[("stop_token_ids", value) for value in ([-1], [1.0], 3, "3", [True])],
        *[("ignore_eos", value) for value in (1, None)],
        *[("presence_penalty", value) for value in (2.1, -2.1, math.nan)],
        *[("frequency_penalty", value) for value in (2.1, -2.1, math.inf)],
        *[("repetition_penalty", value) for value in (0, -1, math.nan, math.inf)],
        *[("logit_bias", value) for value in ({1: math.nan}, {1: math.inf}, {-1: 1}, {"1": 1}, {1: 1e10}, [1])],
        *[("logprobs", value) for value in (-1, 21, True)],
        *[("prompt_logprobs", value) for value in (-1, 21, 1.0)],
        *[("detokenize", value) for value in (0, None)],
        *[("skip_special_tokens", value) for value in (0, "yes")],
        *[("cache_salt", value) for value in ("", 1, "x" * 1025)],
    ],
)
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})


def test_the_message_has_field_value_and_range():
    with pytest.raises(
        RequestError, match=r"^temperature is -1; it must be a finite number, 0 to 1000000000; 0 is greedy$"
    ):
        SamplingParams(temperature=-1)
    with pytest.raises(RequestError, match=r"^max_tokens is 0; it must be a whole number, 1 or more$"):
        SamplingParams(max_tokens=0)


def test_contradictions_are_refused():
    with pytest.raises(RequestError, match="min_tokens is 5, more than max_tokens, which is 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5
    with pytest.raises(RequestError, match="stop_token_ids"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize(
    ("unknown", "suggestion"),
    [
        ("max_new_tokens", "max_tokens"),
        ("stop_sequences", "stop"),
        ("do_sample", "temperature"),
        ("best_of", "n"),
        ("use_beam_search", "n"),
        ("temperture", "temperature"),
        ("repitition_penalty", "repetition_penalty"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(unknown, suggestion):
    with pytest.raises(RequestError, match=rf"no field '{unknown}' \(did you mean {suggestion}\?\)"):
        SamplingParams(**{unknown: 1})


def test_a_hopeless_name_lists_what_there_is():
    with pytest.raises(RequestError, match=r"no field 'zzzz'; it has n, temperature, .*cache_salt"):
        SamplingParams(zzzz=1)


def test_greedy_is_temperature_zero_and_what_is_too_small_to_divide_by():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_token_ids_are_checked_against_the_vocabulary():
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[9]).check_vocabulary(10)
    with pytest.raises(RequestError, match="logit_bias names token id 10; the vocabulary has 0 to 9"):
        SamplingParams(logit_bias={10: 1.0}).check_vocabulary(10)
    with pytest.raises(RequestError, match="stop_token_ids names token id 11"):
        SamplingParams(stop_token_ids=[1, 11]).check_vocabulary(10)

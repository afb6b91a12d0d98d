"""What one request may ask of the server: nesting, text, and the length of prompt and answer."""

from __future__ import annotations

import json

import pytest

from freight.outputs import CompletionDelta, FinishReason
from freight.sampling import NO_TOKEN_LEFT
from freight.serve.limits import ServingLimits, check_body, check_context
from freight.serve.openai.stream import check_ending
from freight.serve.transport.errors import ApiError
from freight.structured import CANNOT_GO_ON

LIMITS = ServingLimits()


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_nesting_has_a_limit(opening, closing):
    def body(depth):
        return {"x": json.loads(opening * depth + "1" + closing * depth)}

    assert check_body(body(LIMITS.nesting), LIMITS) == body(LIMITS.nesting)
    with pytest.raises(ApiError, match="more than 96 levels") as error:
        check_body(body(LIMITS.nesting + 1), LIMITS)
    assert (error.value.status, error.value.param) == (400, "x")


def test_nesting_of_any_depth_exhausts_no_stack():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ApiError, match="levels"):
        check_body({"x": nested}, LIMITS)


@pytest.mark.parametrize("value", ["\ud800", ["é", "\udfff"], {"a": {"\ud800": 1}}])
def test_text_that_is_not_unicode_is_refused(value):
    with pytest.raises(ApiError, match="not Unicode") as error:
        check_body({"x": value}, LIMITS)
    assert (error.value.status, error.value.param) == (400, "x")
    with pytest.raises(ApiError, match="not Unicode"):
        check_body({"\ud800": 1}, LIMITS)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "fits"),
    [
        (10, None, False),
        (9, None, True),
        (9, 2, False),
        (8, 2, True),
        (10, 0, True),
        (11, 0, False),
        (1, 2**63 - 1, False),
    ],
)
def test_prompt_and_answer_fit_into_the_context(num_prompt, max_tokens, fits):
    if fits:
        check_context(num_prompt, max_tokens, 10)
        return
    with pytest.raises(ApiError) as error:
        check_context(num_prompt, max_tokens, 10, "prompt")
    assert (error.value.status, error.value.code, error.value.param) == (
        400,
        "context_length_exceeded",
        "prompt",
    )
    numbers = [num_prompt, 10] if max_tokens is None else [num_prompt, max_tokens, 10]
    assert all(str(number) in error.value.message for number in numbers)


def test_a_grammar_that_gives_up_is_the_request_s_own_fault() -> None:
    def ended(error: str) -> ApiError:
        with pytest.raises(ApiError) as raised:
            check_ending(CompletionDelta(0, [], "", None, FinishReason.ERROR, None, error))
        return raised.value

    gave_up = ended(f"{CANNOT_GO_ON}: it is too large or too ambiguous")
    assert (gave_up.status, gave_up.code) == (400, "invalid_grammar")
    nothing = ended(f"{NO_TOKEN_LEFT} after 0 output tokens: each is barred by allowed_token_ids")
    assert (nothing.status, nothing.code) == (400, "no_token_left")
    assert ended("a step failed").status == 500

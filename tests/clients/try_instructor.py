"""instructor in every mode that reaches OpenAI's and Anthropic's APIs. Run as: try_instructor.py
URL
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import instructor
from anthropic import Anthropic
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException
from openai import OpenAI
from pydantic import ValidationError
from wanted import LENGTH, MESSAGES, Order, Plain, Weather, is_order, raises, tell

URL = sys.argv[1]
MODE = instructor.Mode
ASKED: dict[str, Any] = {
    "messages": MESSAGES,
    "max_retries": 0,
    "max_tokens": LENGTH,
}  # the server is greedy


def ours(mode: instructor.Mode) -> Any:
    return instructor.from_openai(
        OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=100),
        mode=mode,
        model="demo",
    )


def theirs(mode: instructor.Mode) -> Any:
    return instructor.from_anthropic(
        Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=100), mode=mode, model="demo"
    )


def order(
    client: Callable[[instructor.Mode], Any], mode: instructor.Mode, **more: Any
) -> Callable[[], None]:
    def case() -> None:
        is_order(client(mode).create(response_model=Order, **ASKED | more))

    case.__name__ = f"{client.__name__}_{mode.name}"
    return case


def order_raw(mode: instructor.Mode) -> None:
    is_order(
        ours(mode).create(
            response_model=Order, messages=MESSAGES, max_retries=0, max_output_tokens=LENGTH
        )
    )


def responses_tools() -> None:
    order_raw(MODE.RESPONSES_TOOLS)


def responses_tools_with_inbuilt_tools() -> None:
    order_raw(MODE.RESPONSES_TOOLS_WITH_INBUILT_TOOLS)


def json_object() -> None:
    """This mode asks for any object and has the schema in the prompt only: a model that cannot read
    gives another.
    """
    raises(
        InstructorRetryException,
        lambda: ours(MODE.JSON).create(response_model=Order, **ASKED),
        "Field required",
    )


def parallel_tools() -> None:
    """This mode leaves the choice to the model (`"auto"`), and this one calls nothing."""
    asked = {"response_model": Iterable[Plain | Weather], **ASKED}
    raises(
        InstructorRetryException,
        lambda: list(ours(MODE.PARALLEL_TOOLS).create(**asked)),
        "No tool calls",
    )


def anthropic_parallel_tools() -> None:
    calls = list(
        theirs(MODE.ANTHROPIC_PARALLEL_TOOLS).create(
            response_model=Iterable[Plain | Weather], **ASKED
        )
    )
    assert all(isinstance(call, Plain | Weather) for call in calls)


def partial() -> None:
    """Partial objects grow to a whole one. A call comes in one piece, text as it is written."""
    for mode, least in ((MODE.TOOLS, 1), (MODE.JSON_SCHEMA, 2)):
        grown = list(ours(mode).create_partial(response_model=Plain, **ASKED))
        Plain.model_validate(grown[-1].model_dump())
        assert len(grown) >= least, grown
        assert all(
            before.name is None or after.name.startswith(before.name)
            for before, after in pairwise(grown)
        )


def several() -> None:
    """The list that instructor asks for may be missing, and then it takes the empty object for its
    one element.
    """
    found: list[Any] = []
    try:
        found += ours(MODE.TOOLS).create_iterable(response_model=Plain, **ASKED)
    except ValidationError as error:
        found += [fault["input"] for fault in error.errors()]
    assert all(isinstance(each, Plain) or each == {} for each in found), found


def with_completion() -> None:
    parsed, raw = ours(MODE.TOOLS).create_with_completion(response_model=Plain, **ASKED)
    assert isinstance(parsed, Plain)
    assert raw.usage.completion_tokens > 0


def failures() -> None:
    cut = ASKED | {"max_tokens": 3}
    raises(IncompleteOutputException, lambda: ours(MODE.TOOLS).create(response_model=Plain, **cut))
    long = ASKED | {"max_tokens": 50_000}
    raises(
        InstructorRetryException,
        lambda: ours(MODE.TOOLS).create(response_model=Plain, **long),
        "50000",
    )


# modes that do not force the schema: the server is asked to, in the words of each API
GUIDED = {"extra_body": {"guided_json": Order.model_json_schema()}}
FORMAT = {
    "extra_body": {
        "output_config": {"format": {"type": "json_schema", "schema": Order.model_json_schema()}}
    }
}

tell(
    [
        order(ours, MODE.TOOLS),
        order(ours, MODE.TOOLS_STRICT),
        json_object,
        order(ours, MODE.JSON_O1),
        order(ours, MODE.JSON_SCHEMA),
        order(ours, MODE.MD_JSON, **GUIDED),
        parallel_tools,
        responses_tools,
        responses_tools_with_inbuilt_tools,
        order(theirs, MODE.ANTHROPIC_TOOLS),
        order(theirs, MODE.ANTHROPIC_JSON, **FORMAT),
        order(theirs, MODE.ANTHROPIC_REASONING_TOOLS),
        anthropic_parallel_tools,
        partial,
        several,
        with_completion,
        failures,
    ]
)

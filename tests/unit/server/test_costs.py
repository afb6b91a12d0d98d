"""What a request that is refused costs the server: processor time, in which everybody else waits."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.refusals import refuses
from tests.unit.server.raw_http import Echo, post, running

from freight.sampling import SamplingParams
from freight.serve.call import Served, Work
from freight.serve.limits import ServingLimits
from freight.serve.observe.metrics import Metrics
from freight.serve.openai.chat_request import parse_chat
from freight.serve.openai.completion_request import parse_completion
from freight.serve.processes.client import EngineState
from freight.serve.service import Service
from freight.serve.transport.auth import Keys
from freight.serve.transport.body import parse_object
from freight.serve.transport.errors import ApiError
from freight.serve.transport.http_limits import HttpLimits

SERVED = Served(("demo",), None, 4096, 1024, {}, "fp_0")
MANY = 10**5
NAMES = 16_000  # an object of more is refused before a field is looked at
SMALL_CALL = {"messages": [{"role": "user", "content": "x"}]}
TOOL = {"type": "function", "function": {"name": "f"}}
TOO_MUCH: dict[str, tuple[dict[str, Any], str]] = {  # with the field that is at fault
    "ids": ({"prompt": [5] * 8 * MANY}, "prompt"),
    "ids of one prompt": ({"prompt": [[5], [5] * 8 * MANY]}, "prompt[1]"),
    "prompts": ({"prompt": ["x"] * MANY}, "prompt"),
    "completions": ({"prompt": "x", "n": 10**6}, "n"),
    "stop strings": ({"prompt": "x", "stop": ["x"] * MANY}, "stop"),
    "stop token ids": ({"prompt": "x", "stop_token_ids": [5] * MANY}, "stop_token_ids"),
    "biases": ({"prompt": "x", "logit_bias": {str(i): 1 for i in range(NAMES)}}, "logit_bias"),
    "choices": (
        {"prompt": "x", "structured_outputs": {"choice": ["x"] * MANY}},
        "structured_outputs.choice",
    ),
    "messages": ({"messages": SMALL_CALL["messages"] * (MANY // 2)}, "messages"),
    "tools": ({**SMALL_CALL, "tools": [TOOL] * (MANY // 4)}, "tools"),
}


def processor_seconds(function: Callable[[], Any]) -> float:
    """The least of three, by this thread: what others compute meanwhile does not count."""
    seconds = []
    for _ in range(3):
        begun = time.thread_time()
        function()
        seconds.append(time.thread_time() - begun)
    return min(seconds)


def ratio(function: Callable[[], Any], measure: Callable[[], Any]) -> float:
    """The processor time of a function, in that of another: the median of several, in turns, for
    the speed changes.
    """
    return statistics.median(
        processor_seconds(function) / processor_seconds(measure) for _ in range(5)
    )


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_list_over_its_limit_is_refused_in_the_time_in_which_json_is_parsed(name: str) -> None:
    """… of 800,000 numbers: some 35 ms. The longest refusal takes 0.4 of that."""
    numbers = json.dumps([5] * MANY).encode()
    body, param = TOO_MUCH[name]
    parse = parse_chat if "messages" in body else parse_completion
    found = parse_object(json.dumps(body).encode(), HttpLimits())

    def refused() -> None:
        with pytest.raises(ApiError) as error:
            parse(found, SERVED, ServingLimits())
        assert (error.value.status, error.value.param) == (400, param)

    assert ratio(refused, lambda: json.loads(numbers)) < 1.5 * 8


def test_digits_cost_no_more_than_the_parser_of_json() -> None:
    body = json.dumps({"prompt": [12345678] * 350_000}).encode()
    assert ratio(lambda: parse_object(body, HttpLimits()), lambda: json.loads(body)) < 3


class Counting:
    """A tokenizer with a token for each character, which counts them."""

    def __init__(self) -> None:
        self.characters = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.characters += len(text)
        return [5] * len(text)


def test_of_a_text_that_is_far_too_long_only_the_beginning_is_tokenized() -> None:
    class Engine:
        state = EngineState.READY

    tokenizer = Counting()
    service = Service(Engine(), ServingLimits(), Keys(()), Metrics("demo"), 4)  # type: ignore[arg-type]
    service.served = replace(SERVED, tokenizer=tokenizer)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=1)
    with refuses(ApiError, "16384", "3000000 characters", "16384 tokens") as error:
        asyncio.run(service.tokenize(Work("x" * 3_000_000, params)))
    assert (error.value.status, error.value.code) == (400, "context_length_exceeded")
    assert tokenizer.characters < 20_000
    tokenized = asyncio.run(service.tokenize(Work("x" * 1000, params)))
    assert len(tokenized.token_ids) == 1000


def test_no_answer_waits_for_the_clients_acknowledgement() -> None:
    with running(Echo()) as server, server.client() as client:
        client.ask(post(b"{}"))
        (connection,) = server.server.server_state.connections
        options = connection.transport.get_extra_info("socket")
        assert options.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

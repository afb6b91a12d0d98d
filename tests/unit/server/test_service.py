"""Service: what is refused before the engine sees it, and an answer that keeps what came before it
failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refuses

import freight
from freight.engine.adapters import LoRARequest
from freight.engine.intake import AcceptedPrompt
from freight.errors import CapacityError
from freight.model.config.pooling import PoolingConfig, PoolingKind
from freight.outputs import CompletionDelta, FinishReason, RequestDelta
from freight.pooling import PoolingParams, PoolingTask
from freight.sampling import SamplingParams
from freight.serve.call import Conversation, ReplyHead, Served, TokenizedWork, Work
from freight.serve.limits import ServingLimits
from freight.serve.observe.metrics import Metrics
from freight.serve.processes.client import EngineState, Receiver, Running
from freight.serve.service import Service
from freight.serve.transport.auth import Keys
from freight.serve.transport.errors import ApiError
from freight.text.tokenizer import Tokenizer

DEMO = Path(freight.__file__).parent / "demo"
SERVED = Served(("m",), None, vocab_size=100, max_model_len=50, defaults={}, fingerprint="fp_1")
POOLS = replace(
    SERVED, pooling=PoolingConfig(PoolingTask.EMBED, PoolingKind.LAST, 4), generates=False
)
IDS = (1, 2, 3)


class FakeClient:
    """An engine that accepts everything and does nothing by itself."""

    def __init__(self) -> None:
        self.state = EngineState.READY
        self.requests: dict[str, tuple[Running, TokenizedWork]] = {}
        self.aborted: list[str] = []
        self.refuses: Exception | None = None
        self.sleep_level = 0

    @property
    def num_sequences(self) -> int:
        return sum(running.num_sequences for running, _ in self.requests.values())

    def submit(
        self,
        request_id: str,
        index: int,
        prompt: AcceptedPrompt,
        params: SamplingParams,
        receiver: Receiver,
        adapter: LoRARequest | None = None,
    ) -> Running:
        running = Running(request_id, index, params.n, receiver)
        if self.refuses is not None:
            running.fail(self.refuses)
            return running
        running.accepted.set_result(None)
        work = TokenizedWork(prompt.text, prompt.token_ids, params)
        self.requests[request_id] = running, work
        return running

    def abort(self, running: Running) -> None:
        if self.requests.pop(running.request_id, None) is not None:
            self.aborted.append(running.request_id)

    def say(self, request_id: str, text: str, reason: FinishReason | None = None) -> None:
        delta = CompletionDelta(0, [5], text, None, reason, None, None)
        running, _ = self.requests[request_id]
        if reason is not None:
            del self.requests[request_id]
        running.receiver.put(running.index, RequestDelta(request_id, [delta], reason is not None))


class TextReply:
    """Sends texts; an answer that failed is an error, as in every API."""

    def advance(self, index: int, delta: RequestDelta) -> bytes:
        if delta.outputs[0].finish_reason is FinishReason.ERROR:
            raise ApiError(500, "it failed")
        return f"{index}{delta.outputs[0].text} ".encode()


@dataclass
class FakeCall:
    work: Sequence[Work]
    model: str = "m"
    request_id: str | None = None
    heads: list[ReplyHead] = field(default_factory=list)

    def reply(self, head: ReplyHead, served: Served, work: Sequence[TokenizedWork]) -> Any:
        self.heads.append(head)
        return TextReply()


def call(*prompts: Any, **params: Any) -> Any:
    return FakeCall([Work(prompt, SamplingParams(**params)) for prompt in prompts])


def run(test: Callable[[Service, FakeClient], Any], keys: Keys | None = None) -> None:
    async def scenario() -> None:
        client: Any = FakeClient()
        service = Service(client, ServingLimits(), keys or Keys(()), Metrics("m"), max_sequences=8)
        service.served = SERVED
        await test(service, client)

    asyncio.run(scenario())


def count_of(service: Service, series: str) -> float:
    text = service.metrics.render()[0].decode()
    return float(
        next(line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(series))
    )


def test_an_answer_whose_time_has_passed_ends_also_without_its_engine() -> None:
    async def test(service: Service, client: FakeClient) -> None:
        now = 0.0
        service.clock = lambda: now
        answer = await service.begin(call([1, 2], timeout_s=5.0), "id", None)
        answer.end_if_late()
        client.say("1", "a")
        assert await answer.advance() == b"0a "
        now = 6.0
        answer.end_if_late()
        with pytest.raises(ApiError) as ended:
            await answer.advance()
        assert (ended.value.status, ended.value.code) == (504, "timeout")
        answer.close(504)

    run(test)


def test_more_log_probabilities_than_one_answer_may_have_are_refused() -> None:
    async def test(service: Service, client: FakeClient) -> None:
        service.limits = ServingLimits(scores=12)
        with refuses(ApiError, "2 prompts", "7 tokens", "14 values", "12"):
            await service.begin(call([1, 2, 3, 4], [1, 2, 3], prompt_logprobs=1), "id", None)
        answer = await service.begin(call([1, 2, 3], [1, 2, 3], prompt_logprobs=1), "id", None)
        answer.close(499)
        await service.begin(call([1] * 7), "id", None)

    run(test)


def test_what_came_before_a_failure_is_sent() -> None:
    async def test(service: Service, client: FakeClient) -> None:
        answer = await service.begin(call(IDS, IDS), "r", None)
        client.say("1", "a")
        client.say("2", "b", FinishReason.ERROR)
        client.say("1", "c")
        assert await answer.advance() == b"0ac "
        assert not answer.is_finished
        with pytest.raises(ApiError, match="it failed"):
            await answer.advance()
        answer.close(500)
        assert client.aborted == ["1"]
        assert not service.answers
        assert (
            count_of(service, 'vllm:request_success_total{engine="0",finished_reason="error"') == 2
        )

    run(test)


def test_metrics_of_several_completions_are_of_each() -> None:
    async def test(service: Service, client: FakeClient) -> None:
        service.clock = iter(range(100)).__next__
        answer = await service.begin(call(IDS, n=2), "r", None)
        running, _ = client.requests["1"]
        for counts, reason in (((1, 1), None), ((2, 1), None), ((2, 0), FinishReason.LENGTH)):
            deltas = [
                CompletionDelta(n, [5] * k, "a", None, reason, None, None)
                for n, k in enumerate(counts)
            ]
            running.receiver.put(0, RequestDelta("1", deltas, reason is not None))
            await answer.advance()
        tokens = count_of(service, "vllm:request_generation_tokens_sum")
        longest = count_of(service, "vllm:request_max_num_generation_tokens_sum")
        assert (tokens, longest) == (7, 5)
        assert count_of(service, "vllm:time_to_first_token_seconds_count") == 1
        between = count_of(service, "vllm:inter_token_latency_seconds_count")
        seconds = count_of(service, "vllm:inter_token_latency_seconds_sum")
        assert (between, seconds) == (5, 2 + 2 + 2)  # the clock is read twice for each delta

    run(test)


def test_an_answer_that_is_left_frees_what_runs() -> None:
    async def test(service: Service, client: FakeClient) -> None:
        answer = await service.begin(call(IDS, n=3), "r", None)
        client.say("1", "a")
        await answer.advance()
        answer.close(499)
        answer.close(200)
        assert client.aborted == ["1"]
        assert (
            count_of(service, 'vllm:request_success_total{engine="0",finished_reason="abort"') == 1
        )

    run(test)


@pytest.mark.parametrize(
    ("tokenizer", "says"),
    [
        (None, "--skip-tokenizer-init.*token ids to /v1/completions"),
        (
            Tokenizer.load(DEMO),
            "no chat template.*/v1/completions.*--chat-template FILE",
        ),
    ],
)
def test_a_chat_that_cannot_be_names_what_clients_can_do(
    tokenizer: Tokenizer | None, says: str
) -> None:
    async def test(service: Service, client: FakeClient) -> None:
        service.served = replace(SERVED, tokenizer=tokenizer)
        with pytest.raises(ApiError, match=says) as refused:
            await service.begin(
                call(Conversation([{"role": "user", "content": "hello"}])), "r", None
            )
        assert (refused.value.status, refused.value.code) == (400, "no_chat_template")
        assert "freight generate" not in refused.value.message

    run(test)


def test_what_the_engine_refuses_is_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "freight")

    async def test(service: Service, client: FakeClient) -> None:
        client.refuses = CapacityError("the cache holds 16 tokens")
        with pytest.raises(ApiError, match="16 tokens") as refused:
            await service.begin(call(IDS), "r", None)
        service.refused(refused.value, "r", None)
        assert (
            count_of(
                service,
                'vllm:admission_rejections_total{engine="0",model_name="m",reason="invalid"',
            )
            == 1
        )
        assert (
            count_of(service, 'vllm:request_success_total{engine="0",finished_reason="error"') == 0
        )
        assert count_of(service, "vllm:request_prompt_tokens_count") == 0
        assert not service.answers

    run(test)
    assert len(caplog.records) == 1


def test_more_than_may_wait_is_refused_with_a_time() -> None:
    async def test(service: Service, client: FakeClient) -> None:
        first = await service.begin(call(IDS, n=6), "r", None)
        with pytest.raises(ApiError) as full:
            await service.begin(call(IDS, n=3), "r", None)
        assert (full.value.status, full.value.code) == (429, "queue_full")
        assert 1 <= int(full.value.headers["Retry-After"]) <= 120
        with pytest.raises(ApiError, match="split it") as never:
            await service.begin(call(IDS, n=9), "r", None)
        assert never.value.status == 400
        first.close(499)
        (await service.begin(call(IDS, n=3), "r", None)).close(499)

    run(test)


def test_a_key_has_its_share_of_the_queue_and_what_runs_is_none_of_it() -> None:
    """Four run and four wait: of those one key may have two while nobody else waits."""

    async def test(service: Service, client: FakeClient) -> None:
        service._max_queue = 4
        answers = [await service.begin(call(IDS), "r", "ada") for _ in range(6)]
        with pytest.raises(ApiError, match="other keys need") as full:
            await service.begin(call(IDS), "r", "ada")
        assert (full.value.status, full.value.code) == (429, "queue_full")
        other = await service.begin(call(IDS), "r", "bob")
        other.close(499)
        for name in ("1", "2"):  # two end, and those that waited run
            client.say(name, "a", FinishReason.LENGTH)
        for answer in answers[:2]:
            await answer.advance()
            answer.close(200)
        for name, answer in zip(("5", "6"), answers[4:], strict=True):
            client.say(name, "a")
            await answer.advance()
        for _ in range(2):
            await service.begin(call(IDS), "r", "ada")
        with pytest.raises(ApiError, match="other keys need"):
            await service.begin(call(IDS), "r", "ada")

    run(test, Keys([("ada", "1" * 16), ("bob", "2" * 16)]))


def test_nothing_begins_while_there_is_no_engine_or_the_server_ends() -> None:
    async def test(service: Service, client: FakeClient) -> None:
        client.state = EngineState.LOADING
        with pytest.raises(ApiError) as loading:
            await service.begin(call(IDS), "r", None)
        assert (loading.value.status, loading.value.code) == (503, "loading")
        client.state = EngineState.READY
        service.draining = True
        with pytest.raises(ApiError) as draining:
            await service.begin(call(IDS), "r", None)
        assert (draining.value.status, draining.value.code) == (503, "draining")

    run(test)


@pytest.mark.parametrize(
    ("prompt", "params", "says", "code"),
    [
        (range(60), {}, "60 tokens", "context_length_exceeded"),
        ((1, 100), {}, "outside the vocabulary", None),
        ("text", {}, "needs a tokenizer", None),
        ((), {}, "is empty", None),
        (IDS, {"temperature": 3.0}, "temperature is 3.0", None),
        (IDS, {"structured_outputs": {"regex": "a"}}, "tokenizer", None),
    ],
)
def test_what_cannot_be_served_is_a_400(
    prompt: Any, params: dict[str, Any], says: str, code: str | None
) -> None:
    async def test(service: Service, client: FakeClient) -> None:
        with pytest.raises(ApiError, match=says) as refused:
            await service.begin(call(prompt, **params), "r", None)
        assert (refused.value.status, refused.value.code) == (400, code)
        assert not client.requests

    run(test)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("guided_regex", "guided_regex cannot"),
        ("structured_outputs", r"structured_outputs\.regex cannot"),
    ],
)
def test_a_grammar_that_is_refused_names_the_field_that_it_came_from(
    source: str, says: str
) -> None:
    class Refusing:
        async def check_grammar(self, outputs: Any, key: str | None = None) -> None:
            raise ApiError(
                400, "structured_outputs.regex cannot be compiled: x", param="structured_outputs"
            )

    async def test(service: Service, client: FakeClient) -> None:
        grammars: Any = Refusing()
        service.grammars = grammars
        with pytest.raises(ApiError, match=f"^{says} be compiled") as error:
            await service._check_grammar(SamplingParams(structured_outputs={"regex": "a"}), source)
        assert error.value.param == source

    run(test)


def test_only_the_last_tokens_of_a_prompt_are_kept_where_that_was_asked_for() -> None:
    async def test(service: Service, client: FakeClient) -> None:
        context, prompt = SERVED.max_model_len, tuple(range(60))
        for most, max_tokens, kept in ((4, 16, 4), (-1, 16, context - 16), (-1, None, context - 1)):
            work = Work(prompt, SamplingParams(truncate_prompt_tokens=most, max_tokens=max_tokens))
            assert (await service.tokenize(work)).token_ids == prompt[-kept:]
        with refuses(ApiError, "truncate_prompt_tokens is -1", "50 tokens") as error:
            await service.tokenize(
                Work(prompt, SamplingParams(truncate_prompt_tokens=-1, max_tokens=context))
            )
        assert (error.value.status, error.value.param) == (400, "truncate_prompt_tokens")
        with pytest.raises(ApiError, match="the prompt has 55 tokens"):
            await service.tokenize(Work(prompt, SamplingParams(truncate_prompt_tokens=55)))

    run(test)


def test_a_key_has_a_part_of_the_prefix_cache_to_itself() -> None:
    async def test(service: Service, client: FakeClient) -> None:
        salts = [
            (await service.tokenize(Work(IDS, SamplingParams()), name)).params.cache_salt
            for name in ("a", "a", "b")
        ]
        assert salts[0] == salts[1] != salts[2]

    run(test, Keys([("a", "one"), ("b", "two")]))


def test_the_shorter_of_two_time_limits_holds() -> None:
    async def test(service: Service, client: FakeClient) -> None:
        for given, kept in ((None, 5.0), (2.0, 2.0), (9.0, 5.0)):
            work = Work(IDS, SamplingParams(timeout_s=given))
            assert (await service.tokenize(work)).params.timeout_s == kept

    async def with_limit() -> None:
        client: Any = FakeClient()
        service = Service(
            client, ServingLimits(), Keys(()), Metrics("m"), max_sequences=8, request_timeout=5.0
        )
        service.served = SERVED
        await test(service, client)

    asyncio.run(with_limit())


def test_a_quiet_answer_is_woken() -> None:
    async def test(service: Service, client: FakeClient) -> None:
        answer = await service.begin(call(IDS), "r", None)
        answer.nudge_if_quiet(60)
        waiting = asyncio.create_task(answer.advance())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        answer.nudge_if_quiet(0)
        assert await waiting == b""
        answer.close(499)

    run(test)


def pool(service: Service, client: FakeClient, request_id: str) -> None:
    """Say that a prompt was pooled."""
    running, _ = client.requests.pop(request_id)
    output = CompletionDelta(0, [], "", None, FinishReason.LENGTH, None, None)
    running.receiver.put(running.index, RequestDelta(request_id, [output], True))


def embedding(count: int) -> Any:
    params = SamplingParams(max_tokens=0, pooling=PoolingParams())
    return FakeCall([Work([1, 2], params) for _ in range(count)])


def test_the_requests_of_a_long_list_follow_one_another() -> None:
    """Of 8 places 6 are to wait in: 2 run, and twice as many of a list are in the engine."""

    async def test(service: Service, client: FakeClient) -> None:
        service._max_queue = 6
        service.served = POOLS
        answer = await service.begin(embedding(7), "id", None)
        assert sorted(client.requests) == ["1", "2", "3", "4"]
        pool(service, client, "2")
        assert sorted(client.requests) == ["1", "3", "4", "5"]
        other = await service.begin(embedding(4), "other", None)
        with refuses(ApiError, "8 completions are running or waiting"):
            await service.begin(embedding(1), "third", None)
        other.close(499)
        for name in ("1", "3", "4", "5", "10", "11"):
            assert not answer.is_finished
            pool(service, client, name)
        await answer.advance()
        assert answer.is_finished
        assert not client.requests
        answer.close(200)

    run(test)


def test_nothing_of_a_long_list_follows_once_its_client_has_left() -> None:
    async def test(service: Service, client: FakeClient) -> None:
        service._max_queue = 6
        service.served = POOLS
        answer = await service.begin(embedding(7), "id", None)
        running, _ = client.requests["1"]
        answer.close(499)
        assert client.aborted == ["1", "2", "3", "4"]
        output = CompletionDelta(0, [], "", None, FinishReason.LENGTH, None, None)
        running.receiver.put(0, RequestDelta("1", [output], True))
        assert not client.requests

    run(test)


def test_a_list_whose_next_request_is_refused_fails() -> None:
    async def test(service: Service, client: FakeClient) -> None:
        service._max_queue = 6
        service.served = POOLS
        answer = await service.begin(embedding(7), "id", None)
        client.refuses = CapacityError("it does not fit")
        pool(service, client, "1")
        await answer.advance()
        with pytest.raises(ApiError) as failed:
            await answer.advance()
        assert failed.value.code == "cache_too_small"
        answer.close(400)
        assert not client.requests

    run(test)

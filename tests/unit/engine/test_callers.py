"""Several callers of one LLM, threads and streams, each get their own; and what callers may give as
prompts.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import pytest
import torch
from tests.unit.engine.fakes import check_clean, essence, params_of, prompt_of

from freight import LLM, SamplingParams
from freight.engine.prepare import SequenceSlice
from freight.errors import CapacityError, ConfigError, RequestError
from freight.outputs import RequestOutput


def texts_of(outputs: Sequence[RequestOutput]) -> list[str]:
    return [completion.text for output in outputs for completion in output.outputs]


def test_streams_side_by_side_and_beside_generate_each_deliver_all_of_theirs(
    new_llm: Callable[..., LLM],
):
    llm = new_llm()
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    prompts = [[1], [2, 2], [0, 1, 2, 0, 1]]
    expected = texts_of(llm.generate(prompts, params))
    first, second = (llm.stream(prompt, params) for prompt in prompts[:2])
    last: list[Any] = [None, None]
    for pair in zip_longest(first, second):
        last = [new or old for new, old in zip(pair, last, strict=True)]
    assert [one.finished for one in last] == [True, True]
    assert texts_of(last) == expected[:2]

    counts = []
    for output in llm.stream(prompts[0], params):
        assert texts_of(llm.generate(prompts[1:], params)) == expected[1:]
        counts.append(len(output.outputs[0].token_ids))
    assert (counts[-1], output.finished, texts_of([output])) == (9, True, expected[:1])
    abandoned = llm.stream(prompts[2], params)
    next(abandoned)
    assert texts_of(llm.generate(prompts, params)) == expected
    abandoned.close()
    check_clean(llm)


def test_a_stream_checks_its_prompt_at_once_and_queues_it_when_read(new_llm: Callable[..., LLM]):
    llm = new_llm(num_blocks=4)
    with pytest.raises(RequestError, match="empty"):
        llm.stream("")
    with pytest.raises(CapacityError, match="17 tokens"):
        llm.stream([1], SamplingParams(max_tokens=16))
    stream = llm.stream([1], SamplingParams(max_tokens=3))
    check_clean(llm)
    assert list(stream)[-1].finished
    check_clean(llm)


def test_a_stream_collected_in_the_middle_of_a_step(new_llm: Callable[..., LLM]):
    """The collector closes generators wherever it runs, also inside the engine."""
    llm = new_llm()
    runner: Any = llm.engine.runner
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    expected = texts_of(llm.generate([[1], [2]], params))

    def cycle() -> None:
        stream = llm.stream([0, 1], params)
        next(stream)
        holder: list[Any] = [stream]
        holder.append(holder)

    gc.disable()
    try:
        cycle()
        assert len(llm.engine.groups) == 1
        runner.fails = lambda slices: gc.collect() if len(slices) == 3 else None
        assert texts_of(llm.generate([[1], [2]], params)) == expected
    finally:
        gc.enable()
    check_clean(llm)


def test_threads_are_served_together_and_each_gets_its_own(new_llm: Callable[..., LLM]):
    llm = new_llm(num_blocks=60, max_num_seqs=8, budget=32)
    rng = random.Random(13)
    work = [
        ([prompt_of(rng) for _ in range(3)], [params_of(rng) for _ in range(3)]) for _ in range(6)
    ]
    expected = [essence(llm.generate(*one)) for one in work]
    got: list[Any] = [None] * 6
    runner: Any = llm.engine.runner
    runner.sizes.clear()

    def call(index: int) -> None:
        if index % 2:
            got[index] = essence(llm.generate(*work[index]))
        else:
            got[index] = essence(
                [list(llm.stream(*one))[-1] for one in zip(*work[index], strict=True)]
            )

    threads = [threading.Thread(target=call, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert got == expected
    assert max(runner.sizes) > 3  # more than one call at a time
    check_clean(llm)


def test_a_waiting_thread_has_its_turn_within_a_step(new_llm: Callable[..., LLM]):
    """A thread that steps on and on does not keep others out: turns go by arrival."""
    llm = new_llm()
    turns = llm._turns
    order: list[str] = []
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        done.wait(300)

    def keep_on() -> None:
        turns.run(hold)
        for _ in range(3):
            turns.run(lambda: order.append("again"))

    def once() -> None:
        turns.run(lambda: order.append("other"))

    first = threading.Thread(target=keep_on)
    first.start()
    assert inside.wait(300)
    second = threading.Thread(target=once)
    second.start()
    while len(turns._queue) < 2:
        pass
    done.set()
    first.join(300)
    second.join(300)
    assert order[0] == "other"
    assert order.count("again") == 3


def test_calling_again_from_within_a_step_is_refused(new_llm: Callable[..., LLM]):
    llm = new_llm()
    runner: Any = llm.engine.runner
    errors: list[str] = []

    def call_again(slices: Sequence[SequenceSlice]) -> None:
        try:
            llm.generate([1])
        except RequestError as error:
            errors.append(str(error))

    runner.fails = call_again
    llm.generate([1, 2], SamplingParams(max_tokens=1))
    assert "busy in this thread" in errors[0]
    check_clean(llm)


def numpy_like(values: list[int]) -> Iterator[Any]:
    tensor = torch.tensor(values)
    yield tensor
    yield tensor.numpy()
    yield list(tensor.numpy())
    yield {"prompt_token_ids": tensor.numpy()}


def test_arrays_and_their_numbers_are_token_ids(new_llm: Callable[..., LLM]):
    llm = new_llm()
    params = SamplingParams(max_tokens=3, temperature=0.0)
    expected = essence(llm.generate([1, 2, 0], params))
    for prompt in numpy_like([1, 2, 0]):
        assert essence(llm.generate(prompt, params)) == expected
    assert essence(llm.generate(torch.tensor([[1, 2, 0]] * 2), params)) == expected * 2


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (b"hello", "bytes; decode it"),
        ([b"hello"], "bytes; decode it"),
        ({"prompt_token_ids": b"hello"}, "bytes; decode it"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids is 'abc'.*list"),
        ({"prompt_token_ids": 7}, "prompt_token_ids is 7.*list"),
        ([[1.0, 2.0]], "1.0, a float"),
        ([[True]], "True, a bool"),
        ([[1, 61]], "61 is outside the vocabulary"),
        ([[1, -1]], "-1 is outside the vocabulary"),
        (5, "not int"),
        ([None], "not NoneType"),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_kind(
    new_llm: Callable[..., LLM], prompts: Any, message: str
):
    llm = new_llm()
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts)
    check_clean(llm)


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ({"use_tqdm": False}, "'use_tqdm'.*progress"),
        ({"prompt_token_ids": [[1, 2]]}, "'prompt_token_ids'.*prompts"),
        ({"sampling_param": None}, "'sampling_param'.*prompts, sampling_params"),
    ],
)
def test_generate_says_what_to_use_in_place_of_other_engines_names(
    new_llm: Callable[..., LLM], option: dict[str, Any], instead: str
):
    with pytest.raises(ConfigError, match=instead):
        new_llm().generate(**option)

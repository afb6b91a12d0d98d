"""Steps whose tokens every rank draws, as bytes: what comes out draws what went in."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from freight import SamplingParams
from freight.engine.sampler import Draw, draw
from freight.parallel.steps import (
    LaunchNumbers,
    SliceNumbers,
    StepReader,
    StepWriter,
)
from freight.sampling import LARGEST, LARGEST_WHOLE

PARAMS = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.floats(0, LARGEST), st.integers(0, 3)),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.one_of(st.integers(-1, 12), st.integers(-1, LARGEST_WHOLE)),
    min_p=st.floats(0, 1),
    seed=st.one_of(st.none(), st.integers(-(2**63), 2**64 - 1)),
    max_tokens=st.integers(1, 9),
    stop_token_ids=st.lists(st.integers(0, 9), max_size=2),
    ignore_eos=st.booleans(),
)
REQUESTS = st.lists(st.tuples(PARAMS, st.integers(0, 2**64 - 1)), min_size=1, max_size=4)
# which requests are in each step, of which microbatch; its first input row, and how the step follows
STEPS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 2), st.booleans()
    ),
    min_size=1,
    max_size=8,
)


def bits_of(numbers: Any) -> tuple[Any, ...]:
    """What a draw depends on; equal for equal bits alone."""
    params = numbers.params
    floats = (params.temperature, params.top_p, params.min_p)
    return (*(float(one).hex() for one in floats), params.top_k, numbers.seed, numbers.position)


@given(REQUESTS, STEPS)
def test_draws_are_read_as_they_were_written(
    requests: list[tuple[SamplingParams, int]], steps: list[tuple[list[int], int, bool]]
) -> None:
    """Requests come, go and change rows, in several microbatches. What is read draws the same tokens:
    a parameter that a draw began to read, and that is not sent, would show.
    """
    writer = StepWriter()
    reader = StepReader()
    for number, (chosen, microbatch, follows) in enumerate(steps):
        draws = []
        slices = []
        for row, index in enumerate(chosen):
            draws.append(Draw(*requests[index % len(requests)], position=number))
            table = tuple(range(number + row))
            slices.append(SliceNumbers((0,), number, (table,), row % 3, None))
        rows = [2 * row for row in range(len(chosen))] if follows else None
        found = reader.decode_launch(
            writer.encode_launch(LaunchNumbers(microbatch, slices, draws, rows))
        )
        assert (found.microbatch, found.slices, found.rows) == (microbatch, slices, rows)
        assert [*map(bits_of, found.draws)] == [*map(bits_of, draws)]
        logits = torch.randn(len(draws), 50, generator=torch.Generator().manual_seed(number))
        features = bytes(range(number % 7))
        of_head = [part._replace(start=part.start + 1) for part in slices]
        assert reader.decode_draft(writer.encode_draft(of_head, features)) == (of_head, features)
        again = [Draw(*numbers) for numbers in found.draws]
        for one, other in zip(draw(logits, draws), draw(logits, again), strict=True):
            assert torch.equal(one, other)


def launch_of(params: SamplingParams, microbatch: int, num_blocks: int) -> LaunchNumbers:
    slices = [SliceNumbers((0,), 5, (tuple(range(num_blocks)),), 1, None)]
    return LaunchNumbers(microbatch, slices, [Draw(params, 7, 2)], [0])


def test_parameters_and_tables_are_sent_once_in_each_microbatch() -> None:
    """Also where steps of two take turns."""
    writer = StepWriter()
    params = [SamplingParams(top_p=0.5), SamplingParams(top_p=0.25)]
    sizes = []
    for number in range(6):
        microbatch = number % 2
        sizes.append(len(writer.encode_launch(launch_of(params[microbatch], microbatch, 100))))
    # five numbers of a draw and a table of 100 blocks, in 8 bytes each
    assert sizes == [sizes[0]] * 2 + [sizes[0] - 8 * 105] * 4


def test_a_reader_of_draws_begins_anew_with_its_writer() -> None:
    writer = StepWriter()
    reader = StepReader()
    launch = launch_of(SamplingParams(top_k=3), 1, 4)
    reader.decode_launch(writer.encode_launch(launch))
    writer.encode_launch(launch_of(SamplingParams(top_k=4), 1, 5))  # lost
    writer.clear()
    reader.clear()
    found = reader.decode_launch(writer.encode_launch(launch))
    assert found.slices == launch.slices
    assert [*map(bits_of, found.draws)] == [*map(bits_of, launch.draws)]


def test_a_row_keeps_its_parameters_as_one_object() -> None:
    """They are checked when they are made, which takes longer than a row may."""
    writer = StepWriter()
    reader = StepReader()
    launch = launch_of(SamplingParams(min_p=0.5), 0, 4)
    first, second = (reader.decode_launch(writer.encode_launch(launch)) for _ in range(2))
    assert first.draws[0].params is second.draws[0].params

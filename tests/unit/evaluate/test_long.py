"""freight evaluate long: against `LLM`'s log-probabilities, and what a cache that keeps nothing
of a context does.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from freight import SamplingParams
from freight.errors import ConfigError
from freight.lab.evaluate.long import Estimate, compare_long, estimate
from freight.lab.evaluate.long_table import position_rows, retrieval_rows
from freight.lab.evaluate.retrieval import make_contexts, vocabulary
from freight.llm import LLM
from freight.settings.engine import EngineArgs

TEXT = (Path(__file__).parents[3] / "src" / "freight" / "demo" / "heldout.txt").read_text()[:3000]
LENGTH, COUNT, QUESTIONS = 192, 3, 2
CACHES = [("fp8", "dynamic"), ("fp8", "0.004,0.004")]  # the second clips nearly everything
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=0)


def value_logprob(llm: LLM, prompt: list[int], count: int) -> float:
    """The mean over the last `count` tokens of the prompt."""
    output = llm.generate([prompt], SCORED)[0]
    assert output.prompt_logprobs is not None
    pairs = list(zip(prompt, output.prompt_logprobs, strict=True))[-count:]
    return statistics.fmean(entry[token].logprob for token, entry in pairs if entry is not None)


def test_scores_are_those_of_whole_prompts():
    args = EngineArgs("demo", seed=5, kv_cache_memory="8MiB")
    scores = compare_long(args, CACHES, TEXT, LENGTH, COUNT, QUESTIONS)
    assert [score.kv_cache_dtype for score in scores] == ["bfloat16", "fp8_e4m3fn", "fp8_e4m3fn"]

    llm = LLM("demo", kv_cache_dtype="fp8", kv_scales="dynamic", kv_cache_memory="8MiB")
    words = vocabulary(llm.engine.tokenizer, 4096, 0)
    contexts = make_contexts(words, LENGTH, COUNT, QUESTIONS, seed=5)
    for part in scores[1].depths:
        with_it, without = [], []
        for index, context in enumerate(contexts):
            for question in (q for q in context.questions if q.depth == part.depth):
                for found, before in ((with_it, context), (without, contexts[index - 1])):
                    found.append(
                        value_logprob(llm, [*before.token_ids, *question.key, *question.value], 2)
                    )
        assert part.num_questions == len(with_it) == COUNT * QUESTIONS
        assert part.logprob.mean == pytest.approx(statistics.fmean(with_it), abs=1e-6)
        assert part.gain.mean == pytest.approx(
            statistics.fmean(with_it) - statistics.fmean(without), abs=1e-6
        )

    plain, dynamic, clipped = scores
    assert (
        plain.depths[0].gain.mean > 1
    )  # the demo reads the record back, if it cannot name the value
    assert clipped.depths[0].gain_change.mean < -0.5  # a cache that loses what is stored is seen
    assert dynamic.positions[-1].nll_change.mean < 0.1 < clipped.positions[-1].nll_change.mean
    for own in plain.depths:
        assert own.gain_change == own.found_change == Estimate(0, None, COUNT)

    token_ids = llm.engine.tokenizer.encode(TEXT, add_special_tokens=False)  # type: ignore[union-attr]
    window = [0, *token_ids[: LENGTH - 1]]
    first = -value_logprob(llm, window[: dynamic.positions[0].stop + 1], dynamic.positions[0].stop)
    assert dynamic.positions[0].num_tokens == COUNT * dynamic.positions[0].stop
    one = compare_long(args, CACHES[:1], TEXT[:900], LENGTH, 2, 1)[1].positions
    assert math.log(one[0].perplexity) == pytest.approx(first, abs=1e-6)
    assert len(retrieval_rows(scores)) == len(position_rows(scores)) == 1 + len(scores)


def test_an_interval_holds_the_mean_and_closes_on_equal_values():
    assert estimate([0.5] * 12) == Estimate(0.5, (0.5, 0.5), 12)
    assert estimate([0.5] * 11) == Estimate(0.5, None, 11)
    found = estimate([float(i % 7) for i in range(70)])
    assert found.interval is not None
    low, high = found.interval
    assert low < found.mean == 3 < high
    error = statistics.stdev([float(i % 7) for i in range(70)]) / math.sqrt(70)
    assert high - low == pytest.approx(
        2 * 1.99495 * error, rel=1e-4
    )  # Student's t of 69 degrees, from a table


@pytest.mark.parametrize(
    ("context", "contexts", "message"),
    [
        (2048, 4, "--window is 2048, and the context 1024 tokens"),
        (256, 1, "--contexts is 1"),
        (20, 2, "no room"),
    ],
)
def test_what_cannot_be_measured_is_refused(context: int, contexts: int, message: str):
    with pytest.raises(ConfigError, match=message):
        compare_long(EngineArgs("demo"), CACHES[:1], None, context, contexts)

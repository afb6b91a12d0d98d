"""Load on a stand-in server: what is sent, how much at once, when, and how each kind of failure is
counted.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.demo_chat import DEMO
from tests.refusals import refuses
from tests.unit.bench.stand_in_server import StandIn, running
from tokenizers import Tokenizer

from freight.errors import ConfigError, FreightError
from freight.lab.bench.answers import Answer
from freight.lab.bench.http_stream import Address
from freight.lab.bench.load import Amount, Level, Target, run_level
from freight.lab.bench.prompts import Ask, Ids, Lengths, Listed, Text, read_prompts
from freight.lab.bench.serving import ServingArgs, measure_serving

pytestmark = pytest.mark.clock

PROMPTS = Listed([Ask("hello", 4)])


def load(
    server: StandIn, level: Level, amount: Amount, target: Target | None = None
) -> list[Answer]:
    target = replace(
        target or Target(Address.parse(server.url), "stand-in"), address=Address.parse(server.url)
    )
    return asyncio.run(run_level(target, PROMPTS, level, amount, seed=1))


def test_so_many_at_a_time_over_as_many_connections():
    server = StandIn(gap=0.005)
    with running(server):
        answers = load(server, Level(concurrency=3), Amount(requests=12))
    assert len(answers) == 12
    assert {answer.error for answer in answers} == {""}
    assert {answer.num_tokens for answer in answers} == {4}
    assert server.most_at_once == 3
    assert server.num_connections == 3, "connections are used again"


def test_the_gaps_of_the_server_are_the_gaps_that_are_found():
    server = StandIn(gap=0.03, per_event=2)
    with running(server):
        (answer,) = load(server, Level(concurrency=1), Amount(requests=1))
    assert answer.counts == (2, 2)
    assert 0.029 < answer.times[0] - answer.start < 300
    assert 0.058 < answer.times[1] - answer.start < 300


def test_a_rate_is_kept_whether_answers_come_or_not():
    server = StandIn(gap=0.05)
    with running(server):
        answers = load(server, Level(rate=200.0), Amount(requests=40))
    starts = sorted(answer.start for answer in answers)
    assert starts[-1] - starts[0] > 0.05, "40 requests at 200 a second"
    assert server.most_at_once > 10
    gaps = [b - a for a, b in pairwise(starts)]
    assert max(gaps) > 3 * min(gaps), "arrivals are random, not regular"
    assert all(answer.sent > answer.start for answer in answers), (
        "times count from when a request was due"
    )


def test_a_duration_ends_a_run():
    server = StandIn(gap=0.01)
    with running(server):
        answers = load(server, Level(concurrency=2), Amount(seconds=0.2))
    assert 2 <= len(answers) < 40


def test_no_request_begins_after_the_duration_at_a_low_rate_either():
    server = StandIn()
    with running(server):
        answers = load(server, Level(rate=8.0), Amount(seconds=0.2))
        assert all(answer.sent - answers[0].start < 0.2 for answer in answers)
        with refuses(ConfigError, "--duration", "due"):
            measure_serving(
                arguments(server, levels=(Level(rate=0.5),), amount=Amount(seconds=0.01))
            )


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        *(
            ("no_done", "no_done"),
            ("error_event", "error_event"),
            ("malformed", "malformed"),
            ("closed", "closed"),
        ),
        *(
            ("bad_chunk", "malformed"),
            ("empty", "empty"),
            ("no_usage", "no_usage"),
            ("hang", "timeout"),
        ),
    ],
)
def test_each_failure_has_its_kind(fault: str, kind: str):
    server = StandIn(fault=fault)
    target = Target(
        Address.parse("http://x"), "stand-in", timeout=0.3 if fault == "hang" else 300.0
    )
    with running(server):
        answers = load(server, Level(concurrency=2), Amount(requests=4), target)
    assert [answer.error for answer in answers] == [kind] * 4
    assert all(answer.message for answer in answers)


def test_a_status_is_a_kind():
    server = StandIn(status=429)
    with running(server):
        answers = load(server, Level(concurrency=1), Amount(requests=2))
    assert [(answer.error, answer.message) for answer in answers] == [
        ("http_429", "status 429: not now")
    ] * 2


def test_an_idle_connection_that_the_server_closed_is_no_error():
    server = StandIn(hangs_up=True)
    with running(server):
        answers = load(server, Level(concurrency=1), Amount(requests=5))
    assert [answer.error for answer in answers] == [""] * 5
    assert server.num_connections == 5


def arguments(*servers: StandIn, **given: object) -> ServingArgs:
    targets = [Target(Address.parse(server.url), "") for server in servers]
    args: dict[str, Any] = dict.fromkeys(("model", "prompts_file", "vocab_size"))
    args |= {"prompt_kind": "text", "shared_prefix": 0, "warmup": 1, "rounds": 1, "seed": 0}
    args |= {"levels": (Level(concurrency=1),), "amount": Amount(requests=4)}
    args |= {"prompt": Lengths(128, 128), "output": Lengths(4, 4)}
    return ServingArgs(targets, **(args | given))


@pytest.mark.parametrize(
    ("refuses", "ignore_eos", "continuous", "unit"),
    [
        ((), True, True, "token"),
        (("continuous_usage_stats",), True, False, "event"),
        (("ignore_eos",), False, True, "token"),
        (("ignore_eos", "continuous_usage_stats"), False, False, "event"),
    ],
)
def test_what_a_server_does_not_take_is_left_out_and_said(refuses, ignore_eos, continuous, unit):
    server = StandIn(refuses=refuses)
    with running(server):
        _, found = measure_serving(arguments(server))
    (row,) = found["rows"]
    assert (row["ignore_eos"], row["usage_in_every_event"], row["itl_unit"]) == (
        ignore_eos,
        continuous,
        unit,
    )
    assert (row["model"], row["requests"], row["errors"], row["output_tokens"]) == (
        "stand-in",
        4,
        {},
        16,
    )
    assert server.bodies[-1].get("ignore_eos", False) is ignore_eos


def test_two_servers_take_turns_with_the_same_requests():
    servers = StandIn(), StandIn(gap=0.01)
    with running(*servers):
        runs, found = measure_serving(arguments(*servers, rounds=2, prompt=Lengths(4, 40)))
    order = [(servers[0].url, 0), (servers[1].url, 0), (servers[1].url, 1), (servers[0].url, 1)]
    assert [(run.url, run.round) for run in runs] == order
    first, second = (
        [body["prompt"] for body in one.bodies if body["max_tokens"] > 1] for one in servers
    )
    assert (
        first == second
    )  # without the pieces by which the first one's characters per token were found
    assert {row["figure"] for row in found["ratios"]} >= {
        "ttft_ms_median",
        "output_tokens_per_second",
    }
    assert next(r["ratio"] for r in found["ratios"] if r["figure"] == "e2e_ms_median") < 0.9


def test_ids_have_the_lengths_asked_for_and_share_a_prefix():
    server = StandIn(vocab_size=50)
    with running(server):
        _, found = measure_serving(
            arguments(server, prompt_kind="ids", prompt=Lengths(5, 9), shared_prefix=6)
        )
    assert (
        server.bodies[0]["prompt"] == [0] * 8
    )  # the question is in ids too: the server may have no tokenizer
    prompts = [
        body["prompt"] for body in server.bodies[2:]
    ]  # after the question and the one to warm up
    assert len({tuple(prompt[:6]) for prompt in prompts}) == 1
    assert len({tuple(prompt[6:]) for prompt in prompts}) == 4
    assert all(11 <= len(prompt) <= 15 and max(prompt) < 50 for prompt in prompts)
    assert found["rows"][0]["prompt_tokens"] == sum(map(len, prompts))


def test_text_has_about_the_tokens_asked_for():
    server = StandIn()
    with running(server):
        _, found = measure_serving(arguments(server, prompt=Lengths(100, 100)))
    assert found["rows"][0]["prompt_tokens"] == pytest.approx(400, rel=0.05)


@pytest.mark.parametrize("wanted", [40, 400])
def test_text_has_the_tokens_asked_for_as_a_real_tokenizer_counts_them(wanted: int):
    """The first 400 characters, by which they were found before, have fewer tokens than the rest of
    the text.
    """
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    server = StandIn(count=lambda text: len(tokenizer.encode(text).ids))
    with running(server):
        load = arguments(server, prompt=Lengths(wanted, wanted), amount=Amount(requests=150))
        _, found = measure_serving(load)
    assert found["rows"][0]["prompt_tokens"] / 150 == pytest.approx(wanted, rel=0.05)


def test_the_same_seed_draws_the_same_requests():
    for prompts in (
        Text("abc" * 50, 3.0, Lengths(1, 30), Lengths(1, 9), 2),
        Ids(9, Lengths(1, 30), Lengths(1, 9), 2),
    ):
        first, again, other = (list(islice(prompts.asks(seed), 5)) for seed in (1, 1, 2))
        assert first == again != other


@pytest.mark.parametrize("seed", [-1, 0, 1])
def test_no_prompt_is_sent_twice_so_none_is_found_in_a_prefix_cache(seed: int):
    server = StandIn(vocab_size=1000)
    levels = Level(concurrency=1), Level(concurrency=2)
    with running(server):
        measure_serving(arguments(server, prompt_kind="ids", levels=levels, rounds=3, seed=seed))
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == len(prompts) == 1 + 2 * (1 + 3 * 4)


@pytest.mark.parametrize(
    ("server", "given", "says"),
    [
        (StandIn(key="k"), {}, "--api-key or FREIGHT_API_KEY"),
        (StandIn(status=404), {}, "see --endpoint and --model"),
        (StandIn(status=500), {}, "status 500: not now"),
        (StandIn(fault="no_usage"), {}, "include_usage"),
        (StandIn(), {"prompt_kind": "ids"}, "--vocab-size"),
    ],
    ids=["key", "status", "broken", "usage", "vocabulary"],
)
def test_a_server_that_cannot_be_measured_is_one_line(
    server: StandIn, given: dict[str, object], says: str
):
    with running(server), pytest.raises(FreightError, match=says):
        measure_serving(arguments(server, **given))


def test_prompts_of_a_file(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "a", "max_tokens": 3},
        {"prompt": [1, 2]},
        {"messages": [{"role": "user", "content": "x"}]},
    ]
    path.write_text(
        "\ufeff" + "\r\n\n".join(map(json.dumps, lines)) + '\n{"prompt": "a\u2028b"}',
        encoding="utf-8",
    )
    *asks, last = read_prompts(path, Lengths(5, 5), 0)
    assert last.content == "a\u2028b"
    assert [ask.max_tokens for ask in asks] == [3, 5, 5]
    assert [ask.is_messages for ask in asks] == [False, False, True]


def test_a_line_of_the_prompts_that_is_not_utf_8_or_ambiguous_is_named(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n{"prompt": "\xe9"}\n')
    with refuses(ConfigError, "--prompts", "line 3", "UTF-8"):
        read_prompts(path, Lengths(5, 5), 0)
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "prompt": "c"}')
    with pytest.raises(ConfigError, match=r"line 2: .*'prompt' twice"):
        read_prompts(path, Lengths(5, 5), 0)


@pytest.mark.parametrize(
    "line", ["{", '{"text": "x"}', '{"prompt": ""}', '{"prompt": "x", "max_tokens": "3"}', "[]", ""]
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str):
    path = tmp_path / "prompts.jsonl"
    path.write_text(line and '{"prompt": "x"}\n' + line)
    with pytest.raises(ConfigError, match=r"line 2: write" if line else "has no prompt"):
        read_prompts(path, Lengths(5, 5), 0)

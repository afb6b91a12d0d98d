"""benchmarks/simulate.py: the event loop against queues with a closed form, what is conserved, the fit,
and what its answers say.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import simulate
from simulation.answers import Limits, Setup, capacity, cost, level, replicas_for, tail, what_binds
from simulation.beside import ALONE, Load, compare, one_at_a_time, saturation
from simulation.plane import (
    Observation,
    Plane,
    Work,
    batch_work,
    fit,
    observations,
    plane_of,
    read_reports,
)
from simulation.replicas import (
    Loss,
    PrefixAware,
    RoundRobin,
    Simulation,
    Times,
    new_router,
    quantile,
)
from simulation.replicas import simulate as run
from simulation.traffic import PUBLISHED, Ask, Even, Listed, Traffic, read_trace
from tests.refusals import assert_names, line_naming, refuses
from tests.unit.bench.stand_in_server import StandIn, running

from freight.errors import CapacityError, ConfigError, FreightError
from freight.lab.bench.http_stream import Address
from freight.lab.bench.latency import measure_latency
from freight.lab.bench.load import Target
from freight.lab.bench.prompts import Lengths
from freight.model.config.presets import PRESETS
from freight.model.open import open_random
from freight.settings.engine import EngineArgs

SCRIPTS = Path(simulate.__file__).parent
SECONDS = Work(3e-3, 1e-3, 4e-5, 2e-5, 5e-13, 2e-9)
PLANE = Plane("a", "made up", SECONDS, 65536, 200_000, 2048, max_num_seqs=256)
SLOW = PLANE.slower(20)
CONSTANT = Plane("a", "made up", Work(steps=0.1), 1, 10_000, 64, max_num_seqs=1)
CONVERSATION = Traffic(PUBLISHED["azure-conversation"])
LIMITS = Limits(2.0, 0.05)


def asks_of(*each: tuple[float, int, int]) -> list[Ask]:
    """(arrival, prompt, output) of each."""
    return [Ask(index, *one) for index, one in enumerate(each)]


# ------------------------------------------------------------------------------------------------
# closed forms


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_constant_service_waits_as_in_an_m_d_1_queue(load: float) -> None:
    service = 0.1
    asks = Traffic(Even((1, 1), (1, 1)), seed=3).asks(load / service, 5_000 * service / load)
    served = run(CONSTANT, asks, 1, RoundRobin()).served
    waits = statistics.mean(one.ttft for one in served) - service
    assert waits == pytest.approx(load * service / (2 * (1 - load)), rel=0.05)


def test_round_robin_over_constant_service_is_one_m_d_2_queue() -> None:
    """In turns is first come first served where all take equally long. The mean wait of M/D/c by
    Cosmetatos, of M/M/2 it is load² / (1 - load²) services.
    """
    service, load = 0.1, 0.7
    asks = Traffic(Even((1, 1), (1, 1)), seed=1).asks(2 * load / service, 3000 * service)
    waits = {
        name: statistics.mean(
            one.ttft - service for one in run(CONSTANT, asks, 2, new_router(name)).served
        )
        for name in ("round-robin", "least-loaded")
    }
    exponential = service * load**2 / (1 - load**2)
    ideal = exponential / 2 * (1 + (1 - load) * (14**0.5 - 2) / (16 * load * 2))
    assert waits["round-robin"] == pytest.approx(ideal, rel=0.08)
    one_queue_each = service * load / (2 * (1 - load))
    assert waits["round-robin"] <= waits["least-loaded"] < one_queue_each


def test_arrivals_at_a_distance_never_wait() -> None:
    served = run(CONSTANT, asks_of(*((0.2 * i, 1, 1) for i in range(50))), 1, RoundRobin()).served
    assert [one.ttft for one in served] == pytest.approx([0.1] * 50)


def test_a_request_alone_takes_the_sum_of_its_steps() -> None:
    num_prompt, num_output = 300, 20
    (one,) = run(PLANE, asks_of((5.0, num_prompt, num_output)), 1, RoundRobin()).served
    step, prefill, token, sequence, byte, pair = SECONDS
    key = 65536 * byte
    first = (
        step
        + prefill
        + sequence
        + num_prompt * (token + key)
        + pair * num_prompt * (num_prompt + 1) / 2
    )
    later = [step + sequence + key * (num_prompt + made) for made in range(1, num_output)]
    assert one.ttft == pytest.approx(first)
    assert one.latency == pytest.approx(first + sum(later))
    assert one.tpot == pytest.approx(statistics.mean(later))


def test_a_long_prompt_is_cut_into_steps_and_the_front_is_added() -> None:
    plane = replace(PLANE, max_num_batched_tokens=100, seconds=Work(steps=1.0))
    (one,) = run(plane, asks_of((0.0, 250, 3)), 1, RoundRobin(), front=0.25).served
    assert (one.ttft, one.latency, one.tpot) == (3.25, 5.25, 1.0)


def test_short_steps_let_decodes_go_on_beside_a_long_prompt() -> None:
    seconds = Work(steps=0.01, prefill_tokens=0.001)
    asks = asks_of((0.0, 10, 10), (0.015, 2000, 2))
    long, short = (
        run(replace(PLANE, seconds=seconds, max_step_seconds=limit), asks, 1, RoundRobin())
        for limit in (0.0, 0.1)
    )
    first = [
        next(one for one in found.served if one.ask.number == 0).latency for found in (long, short)
    ]
    assert first[1] < first[0] / 2


# ------------------------------------------------------------------------------------------------
# conservation


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("round-robin", None),
        ("least-loaded", Loss(1.0, 2.0)),
        ("prefix", Loss(1.0, 2.0, count=3)),
        ("prefix", None),
    ],
)
def test_every_request_ends_once_and_every_block_returns(name: str, loss: Loss | None) -> None:
    plane = replace(PLANE, cache_tokens=3000)  # so small that requests are preempted
    traffic = Traffic(Even((10, 900), (1, 300)), share=0.4, prefixes=5, seed=1)
    asks = traffic.asks(30.0, 2.0)
    simulation = Simulation(plane, asks, 3, new_router(name), loss=loss)
    outcome = simulation.run()
    assert sorted(one.ask.number for one in outcome.served) == [ask.number for ask in asks]
    assert all(one.ask.arrival < one.first <= one.end for one in outcome.served)
    assert all(replica.cache.num_held == 0 for replica in simulation._up.values())
    assert len(simulation._up) == 3
    assert outcome.account.preemptions > 0
    cut = [one for one in outcome.served if one.cut]
    if loss is None:
        assert not cut
        assert outcome.account.generated == sum(ask.num_output for ask in asks)
    else:
        assert all(one.end == loss.at for one in cut)
        assert outcome.account.generated >= sum(
            one.ask.num_output for one in outcome.served if not one.cut
        )


def test_a_lost_replica_cuts_what_streams_and_the_rest_is_sent_again() -> None:
    plane = replace(CONSTANT, max_num_seqs=1)
    asks = asks_of((0.0, 1, 10), (0.01, 1, 1), (0.02, 1, 1))
    served = run(plane, asks, 1, RoundRobin(), loss=Loss(0.55, 2.0)).served
    assert [(one.ask.number, one.cut, one.resent) for one in served] == [
        (0, True, 0),
        (1, False, 1),
        (2, False, 1),
    ]
    assert [one.end for one in served] == pytest.approx([0.55, 2.65, 2.75])
    assert served[1].ttft == pytest.approx(2.64)  # from when it was asked first


def test_what_cannot_fit_is_an_error() -> None:
    with pytest.raises(CapacityError, match="may grow to 300000 tokens"):
        run(PLANE, asks_of((0.0, 299_000, 1000)), 1, RoundRobin())


# ------------------------------------------------------------------------------------------------
# routing


def test_prefixes_are_found_where_the_router_sends_them() -> None:
    traffic = Traffic(Even((800, 1200), (10, 20)), share=0.6, prefixes=16)
    asks = traffic.asks(40.0, 12.0)
    hits, busy = {}, {}
    for name in ("round-robin", "prefix"):
        account = run(PLANE, asks, 8, new_router(name)).account
        hits[name] = account.prefix_hits / account.prefix_queries
        busy[name] = account.busy
    assert hits["round-robin"] < hits["prefix"] <= 0.6
    assert (
        hits["prefix"] > 0.5
    )  # 30 requests a prefix: all but the first find it, up to their own end
    assert busy["prefix"] < busy["round-robin"]


def test_no_prompt_is_found_where_nothing_is_shared() -> None:
    account = run(PLANE, CONVERSATION.asks(10.0, 10.0), 1, RoundRobin()).account
    assert (account.prefix_hits, account.prefix_queries > 0) == (0, True)


def test_the_prefix_router_leaves_a_replica_that_is_busier_by_the_slack() -> None:
    router = PrefixAware(slack=2)
    ask = Ask(0, 0.0, 10, 1, prefix=7, shared=5)
    first = router.choose(ask, {0: 0, 1: 0})
    other = 1 - first
    assert router.choose(ask, {first: 2, other: 0}) == first
    assert router.choose(ask, {first: 3, other: 0}) == other
    assert router.choose(ask, {first: 3, other: 1}) == other  # both have had it now
    assert router.choose(ask, {first: 0}) == first  # the other is lost


# ------------------------------------------------------------------------------------------------
# traffic


@pytest.mark.parametrize(
    ("name", "prompt", "output"),  # the means of the trace itself
    [("azure-conversation", 1154.7, 211.1), ("azure-code", 2047.8, 27.9)],
)
def test_percentiles_give_the_means_of_their_trace(name: str, prompt: float, output: float) -> None:
    assert Traffic(PUBLISHED[name]).means() == pytest.approx((prompt, output), rel=0.06)


def test_a_trace_in_the_form_of_azures(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    head = "TIMESTAMP,ContextTokens,GeneratedTokens"
    path.write_text(
        f"\ufeff{head}\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50,396,109\n"
    )
    found = read_trace(path)
    assert found.pairs == [(374, 44), (396, 109)]
    assert found.source == "2 requests of trace.csv, drawn evenly"
    path.write_text(f"{head}\n2023-11-16 18:15:46.6805900,374,none\n")
    with refuses(ConfigError, "line 2", "ContextTokens", "GeneratedTokens"):
        read_trace(path)
    path.write_text(head)
    with pytest.raises(ConfigError, match="has no request"):
        read_trace(path)


def test_lengths_do_not_depend_on_the_rate() -> None:
    slow, fast = (CONVERSATION.asks(rate, 50.0 / rate) for rate in (1.0, 7.0))
    assert [one.num_prompt for one in slow] == [one.num_prompt for one in fast]
    assert [one.arrival for one in slow] == pytest.approx([7 * one.arrival for one in fast])
    assert Listed("", [(3, 4)]).draw(random.Random(0)) == (3, 4)


def test_shared_tokens_are_equal_and_others_are_not() -> None:
    one, other = Ask(1, 0.0, 6, 1, 2, 4).tokens(), Ask(3, 0.0, 9, 1, 2, 6).tokens()
    assert one[:4] == other[:4]
    assert not set(one[4:]) & set(other)


# ------------------------------------------------------------------------------------------------
# the fit


def report(
    batch: int, before: int, after: int = 49, seconds: Work = SECONDS, noise: float = 0.0
) -> dict[str, Any]:
    """What `freight bench latency --json` would say of an engine that is a plane."""
    prefill, decode = batch_work(batch, before, after, 512, 65536)
    numbers = random.Random(f"{batch} {before}")
    first, step = (
        sum(seconds.times(work)) * (1 + noise * numbers.uniform(-1, 1))
        for work in (prefill, decode)
    )
    return {
        "model": "a",
        "kernels": "cpu",
        "threads": 2,
        "weight_dtype": "bfloat16",
        "max_num_batched_tokens": 512,
        "kv_cache": {"dtype": "fp8_e4m3fn", "granularity": "token", "bytes_per_token": 65536},
        "tokens_that_fit": 100_000,
        "batch_size": batch,
        "input_len": before,
        "output_len": after,
        "prefill_tokens_per_second": batch * before / first,
        "decode_step_ms": 1e3 * step,
        "decode_bytes_per_step": {
            "weights": 1,
            "kv_cache": round(batch * 65536 * (before + after / 2)),
        },
    }


GRID = [(batch, before) for batch in (1, 4, 16) for before in (32, 256, 1024)]


def test_the_fit_recovers_a_plane() -> None:
    plane, seen, errors = plane_of([report(*one) for one in GRID])
    assert plane.seconds == pytest.approx(SECONDS, rel=1e-6)
    assert len(seen) == len(errors) == 18
    assert max(map(abs, errors)) < 1e-9
    assert plane.name == "a, weights bfloat16, cache fp8_e4m3fn, token"
    assert (plane.cache_tokens, plane.max_num_batched_tokens) == (100_000, 512)


def test_a_term_that_is_not_there_is_nothing_and_none_is_negative() -> None:
    seconds = Work(3e-3, 1e-3, 4e-5, 0.0, 5e-13, 0.0)
    plane, _, _ = plane_of([report(*one, seconds=seconds) for one in GRID])
    assert plane.seconds == pytest.approx(seconds, rel=1e-6, abs=1e-15)
    noisy, _, _ = plane_of([report(*one, seconds=seconds, noise=0.1) for one in GRID])
    assert min(noisy.seconds) >= 0


def test_the_fit_of_noisy_reports_predicts_others() -> None:
    plane, _, _ = plane_of([report(*one, noise=0.03) for one in GRID])
    assert plane.error is not None
    assert plane.error[0] < 0.03
    for batch, before in ((2, 64), (8, 700), (12, 512)):
        for one in observations(report(batch, before)):
            assert plane.time(one.work) == pytest.approx(one.seconds, rel=0.04)


def test_measurements_that_other_work_disturbed_do_not_move_the_plane() -> None:
    reports = [report(*one) for one in GRID]
    for index, factor in ((2, 2.0), (5, 1.5), (7, 3.0)):
        reports[index]["decode_step_ms"] *= factor
    plane, _, errors = plane_of(reports)
    assert plane.seconds == pytest.approx(SECONDS, rel=0.02)
    assert sum(abs(error) > 0.1 for error in errors) == 3


def test_one_report_is_no_plane_and_a_window_is_refused() -> None:
    with refuses(ConfigError, "reports", "do not determine", "plane"):
        fit([Observation("", Work(1, 1, 1, 1, 1, 1), 1.0)])
    windowed = report(4, 256)
    windowed["decode_bytes_per_step"]["kv_cache"] //= 2
    with refuses(ConfigError, "not every layer", "every token"):
        observations(windowed)
    with pytest.raises(ConfigError, match="a report lacks 'batch_size'"):
        observations({})
    other = report(1, 32) | {"model": "b"}
    with pytest.raises(ConfigError, match=r"of different engines: a, .*; b, "):
        plane_of([report(1, 32), other])


def test_reports_of_bench_latency_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two reports of a random model, as the command writes them."""
    monkeypatch.setattr("freight.lab.bench.timing.bytes_beyond_caches", lambda: 2**20)
    shape = dict(PRESETS["llama-1b"]) | {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 300,
        "max_position_embeddings": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    args = EngineArgs(kv_cache_dtype="fp8", skip_tokenizer_init=True, kv_cache_memory="8 MiB")
    opened = open_random(args, str(tmp_path / "config.json"))
    found = [
        measure_latency(opened, "a", batch, before, 5, 1) for batch, before in ((1, 16), (3, 40))
    ]
    path = tmp_path / "reports.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in found))
    seen = [one for each in read_reports(path) for one in observations(each)]
    assert [one.work.prefill_tokens for one in seen] == [16, 0, 120, 0]
    assert [one.work.sequences for one in seen] == [1, 1, 3, 3]
    assert all(one.seconds > 0 for one in seen)
    plane, _, _ = plane_of(found)
    assert plane.max_num_batched_tokens == 512


# ------------------------------------------------------------------------------------------------
# answers


def setup(**changes: Any) -> Setup:
    return replace(Setup(PLANE, CONVERSATION, LIMITS, seconds=20.0, most=4), **changes)


def few(**changes: Any) -> Setup:
    """An engine so slow that few requests are simulated."""
    slow = PLANE.slower(20)
    return setup(
        plane=slow, limits=Limits(4.0, 0.8), traffic=Traffic(Even((200, 900), (10, 60))), **changes
    )


def test_the_highest_rate_keeps_the_limits_and_a_little_more_does_not() -> None:
    here = few(seconds=200.0)
    found = capacity(here, 1)
    assert found.level is not None
    assert not here.limits.missed(found.level.times)
    assert here.limits.missed(level(here, 1, 1.15 * found.level.rate).times)
    assert "first" in found.binds


def test_cost_is_the_price_over_the_tokens_and_larger_fleets_are_scaled() -> None:
    here = few()
    rows = cost(here, (1, 4, 400), price=3.6)
    for row in rows:
        tokens = row["output_tokens_per_second_and_replica"]
        assert row["cost_per_million_output_tokens"] == pytest.approx(1000 / tokens)
    assert rows[2]["requests_per_second"] == pytest.approx(100 * rows[1]["requests_per_second"])
    assert rows[2]["replicas_simulated"] == 4
    assert rows[1]["requests_per_second"] >= 4 * rows[0]["requests_per_second"] * 0.95


def test_replicas_for_users_are_the_fewest() -> None:
    here = few()
    found = replicas_for(here, 200, 1 / 60)
    count, rate = found["replicas"], 200 / 60
    assert 1 < count <= here.most
    assert not here.limits.missed(level(here, count, rate / count).times)
    assert here.limits.missed(level(here, count - 1, rate / (count - 1)).times)
    assert replicas_for(here, 20_000, 1 / 60)["replicas"] > 25 * count
    assert replicas_for(here, 10, 1 / 60)["replicas"] == 1


@pytest.mark.parametrize(
    ("plane", "sizes", "rate", "cause"),
    [
        (replace(PLANE, cache_tokens=8_000), Even((500, 700), (300, 400)), 8.0, "memory for KV"),
        (replace(PLANE, max_num_seqs=4), Even((10, 20), (300, 400)), 8.0, "max_num_seqs"),
        (PLANE, Even((3000, 4000), (2, 4)), 8.0, "prefill compute"),
        (
            replace(PLANE, max_num_seqs=1024, cache_tokens=10**7),
            Even((3000, 3500), (400, 500)),
            5.0,
            "prefill compute|bandwidth for cached keys",
        ),
        (PLANE, Even((10, 20), (100, 200)), 5.0, "weights' bandwidth"),
    ],
)
def test_what_binds(plane: Plane, sizes: Even, rate: float, cause: str) -> None:
    here = setup(plane=plane, traffic=Traffic(sizes), limits=Limits(0.001, 0.001))
    binds = what_binds(level(here, 1, rate), here.limits)
    assert any(binds.startswith(one) for one in cause.split("|")), binds


def test_limits_that_no_load_keeps_are_said() -> None:
    found = capacity(setup(limits=Limits(2.0, 0.001)), 1)
    assert found.level is None
    assert "p95 TPOT first" in found.binds


def test_the_tail_after_a_loss_is_longer_in_a_small_fleet() -> None:
    rows = [tail(few(most=8), count, 0.8, 20.0) for count in (2, 8)]
    longer = [row["with"]["ttft"][1] / row["without"]["ttft"][1] for row in rows]
    assert longer[0] > 1.5 > longer[1]
    assert all(row["cut"] + row["sent_again"] > 0 for row in rows)


def test_quantiles_are_those_of_numpy() -> None:
    assert [quantile([1.0, 2.0, 4.0], share) for share in (0.0, 0.5, 0.75, 1.0)] == [1, 2, 3, 4]
    assert Times.of([]).count == 0


# ------------------------------------------------------------------------------------------------
# beside servers


@pytest.mark.clock
def test_servers_get_what_the_simulation_gets_in_turns() -> None:
    """Servers that take 10 ms before each token, whatever comes, as engines of constant steps do."""
    plane = replace(PLANE, seconds=Work(steps=0.01))
    load = Load(Lengths(4, 9), Lengths(3, 5), requests=10, rounds=2)
    stand_ins = StandIn(gap=0.01), StandIn(gap=0.01)
    with running(*stand_ins):
        targets = [Target(Address.parse(one.url), "stand-in") for one in stand_ins]
        (row,) = compare(plane, load, [0.1], targets)
    asked = [[len(body["prompt"]) for body in one.bodies] for one in stand_ins]
    assert [len(each) for each in asked] == [2 * (ALONE + 5)] * 2
    rate = 0.1 * 2 * saturation(plane, load)
    expected = [len(one.content) for one in load.sent(f"load 0 {rate} 1", 10)]
    assert sorted(asked[0][-5:] + asked[1][-5:]) == sorted(expected)
    assert row["slowdown"] > 0.9
    tpot = row["figures"]["tpot p50"]
    assert tpot["by_plane_ms"] == pytest.approx(10)
    assert tpot["measured_ms"] > 9


@pytest.mark.clock
def test_an_answer_that_is_not_whole_is_an_error() -> None:
    stand_in, load = StandIn(fault="error_event"), Load(Lengths(4, 9), Lengths(3, 5), 10, 2)
    with running(stand_in):
        target = Target(Address.parse(stand_in.url), "stand-in")
        with refuses(FreightError, "answer", "not whole"):
            one_at_a_time(PLANE, load, [target], "x")


def test_the_verdict_names_what_is_further_off_than_the_aim() -> None:
    figures = {
        name: {"difference": off}
        for name, off in (("ttft p50", 0.15), ("tpot p95", -0.16), ("latency p50", 0.2))
    }
    row = {"replicas": 2, "requests_per_second": 3.0, "figures": figures}
    said = simulate.verdict({"rows": [row]})
    assert_names(
        said, "1 of 3", "tpot p95 of 2 at 3.00/s -16.0%", "latency p50 of 2 at 3.00/s +20.0"
    )
    assert "ttft" not in said


# ------------------------------------------------------------------------------------------------
# the command


@pytest.fixture
def plane_file(tmp_path: Path) -> str:
    path = tmp_path / "plane.json"
    path.write_text(json.dumps(SLOW.to_json()))
    assert Plane.read(path) == SLOW
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    simulate.main(arguments)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ("cost", "--price", "2", "--replicas", "1", "--replicas", "300", "--simulate", "2"),
        ("replicas", "--users", "90"),
        ("routing", "--replicas", "2", "--share", "0.5"),
        ("tail", "--replicas", "2", "--restart", "2"),
    ],
)
def test_equal_options_print_the_same_and_say_what_they_assume(
    arguments: tuple[str, ...], plane_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = arguments
    options = (command, plane_file, *rest, "--seconds", "3", "--even", "200:600", "10:60")
    options += ("--ttft", "1", "--tpot", "0.5")
    first, again = (printed(capsys, *options, "--json") for _ in range(2))
    assert first == again
    found = json.loads(first)
    assert found["rows"]
    assert printed(capsys, *options, "--json", "--seed", "1") != first
    table = printed(capsys, *options)
    assert "step time: made up" in table
    assert "limits: p95 TTFT <= 1 s and p95 TPOT <= 500 ms" in table
    assert all(f"- {one}" in table for one in found["assumptions"])


def test_the_answers_load_no_torch() -> None:
    code = "import sys, simulate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=SCRIPTS).returncode == 0


def test_fit_of_files(tmp_path: Path, plane_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = []
    for number, one in enumerate(GRID):
        names.append(str(tmp_path / f"{number}.json"))
        Path(names[-1]).write_text(json.dumps(report(*one)))
    output = str(tmp_path / "fitted.json")
    text = printed(capsys, "fit", *names, "--output", output, "--kv-cache-memory", "64MiB")
    line_naming(text, "step 3 ms", "prefill 1 ms", "prefill token 40 us", "sequence 20 us")
    assert "| 16 x 1024+49, a decode step" in text
    assert Plane.read(Path(output)).cache_tokens == 1024


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cost", "none.json", "--price", "1"), "none.json cannot be read"),
        (("cost", "PLANE", "--price", "1", "--shared", "1"), "--shared 1.0 must be"),
        (("cost", "PLANE", "--price", "1", "--seconds", "0"), "--seconds 0.0 must be above 0"),
        (("cost", "PLANE", "--price", "1", "--even", "1:2", "x"), "--even 'x'"),
        (
            ("cost", "PLANE", "--price", "1", "--trace", "none.csv"),
            "--trace none.csv cannot be read",
        ),
        (("tail", "PLANE", "--tpot", "0.001", "--seconds", "5"), "at any load"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], message: str, plane_file: str) -> None:
    options = [plane_file if one == "PLANE" else one for one in arguments]
    with pytest.raises(SystemExit, match=r"simulate\.py: ") as ended:
        simulate.main(options)
    assert message in str(ended.value)

"""/metrics: the names and labels that dashboards read, bounded labels, and a table of all series."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from freight.outputs import EngineStats, FinishReason, RequestTimes, StoreStats
from freight.serve.observe.histogram import Buckets
from freight.serve.observe.metrics import (
    MOST_HANDLERS,
    MOST_KEYS,
    Metrics,
    ModelFacts,
    Rejection,
    token_buckets,
)
from freight.serve.observe.state import CacheFacts

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"
ZERO = EngineStats(*[0] * 15)  # the counts
STORE = StoreStats(11, 12, 13, 14, 15, 16, 17, 18, 19, 20)
STATS = EngineStats(
    *(3, 2, 1000, 250, 100, 80, 40, 90, 70, 5, 1, 6, 7, 20, 15),
    {"text": 8, "mtp": 12},
    {"text": 4, "mtp": 11},
    STORE,
    ("chat", "sql"),
    ("sql",),
)
CACHE = CacheFacts("fp8_e4m3", "head", "checkpoint", 16, 64, 1024, 512)
FACTS = ModelFacts(CACHE, 512, "0.1.0", "fp-1")
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def filled(old_names: bool = False) -> Metrics:
    metrics = Metrics("m", keys=("alice",), old_names=old_names)
    metrics.set_stats(STATS)
    metrics.set_info(FACTS)
    metrics.set_max_adapters(4)
    metrics.set_kv_events(lambda: (7, 1))
    metrics.add_adapters(["sql"])
    metrics.observe_step(0.003, 33)
    metrics.request_queued(2, 64, 12)
    metrics.first_token(0.02)
    metrics.inter_token(0.008, 2)
    metrics.request_finished(
        "stop", 1.5, RequestTimes(0.5, 0.25, 0.75, 2), 12, 8, 4, "alice", longest_completion=4
    )
    metrics.rejected("queue_full")
    metrics.http_request("/v1/models/{id}", "GET", 200)
    return metrics


def families(metrics: Metrics) -> dict[str, Metric]:
    text, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    return {family.name: family for family in parse_text(text.decode())}


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """The sum of the samples of that name with these labels; None if there is none."""
    found = [
        sample.value
        for family in families(metrics).values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return sum(found) if found else None


def rendered_names(metrics: Metrics) -> set[tuple[str, str]]:
    """(name, type) as the text declares them."""
    text = metrics.render()[0].decode()
    return {(name, kind) for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M)}


def documented(table: int) -> set[tuple[str, str]]:
    """(name, type) of the table-th table of docs/metrics.md."""
    tables = DOCS.read_text().split("|---|---|---|\n")[1:]
    return {
        (name, kind) for name, kind in re.findall(r"^\| `(\S+)` \| (\w+) \|", tables[table], re.M)
    }


def test_the_table_of_the_documentation_has_exactly_the_series() -> None:
    assert rendered_names(filled()) == documented(0)
    assert rendered_names(filled(old_names=True)) == documented(0) | documented(1)


def test_every_sample_names_the_model_and_the_engine() -> None:
    for name, family in families(filled(old_names=True)).items():
        for sample in family.samples:
            if name != "http_requests":
                assert (sample.labels["model_name"], sample.labels["engine"]) == ("m", "0"), name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("freight:kv_event_batches_total", 7),
        ("freight:kv_event_batches_dropped_total", 1),
        ("vllm:num_requests_running", 3),
        ("vllm:num_requests_waiting", 2),
        ("vllm:num_requests_waiting_by_reason", 2),
        ("vllm:kv_cache_usage_perc", 0.25),
        ("vllm:gpu_cache_usage_perc", 0.25),
        ("vllm:prompt_tokens_total", 90),
        ("vllm:prompt_tokens_cached_total", 40),
        ("vllm:generation_tokens_total", 70),
        ("vllm:num_preemptions_total", 5),
        ("vllm:prefix_cache_queries_total", 80),
        ("vllm:prefix_cache_hits_total", 40),
        ("vllm:gpu_prefix_cache_queries_total", 80),
        ("vllm:gpu_prefix_cache_hits_total", 40),
        ("vllm:spec_decode_num_draft_tokens_total", 20),
        ("vllm:spec_decode_num_accepted_tokens_total", 15),
        ("freight:drafted_tokens_total", 8 + 12),
        ("freight:accepted_drafts_total", 4 + 11),
        ("vllm:corrupted_requests_total", 1),
        ("freight:cache_capacity_tokens", 1000),
        ("freight:cache_held_tokens", 250),
        ("freight:cache_reusable_tokens", 100),
        ("freight:kv_saturated_values_total", 7),
        ("freight:kv_nan_total", 6),
        ("freight:kv_store_hits_total", 11 + 12),
        ("freight:kv_store_misses_total", 13),
        ("freight:kv_store_tokens_total", 14),
        ("freight:kv_store_stored_total", 15),
        ("freight:kv_store_dropped_total", 16),
        ("freight:kv_store_corrupt_total", 17),
        ("freight:kv_store_errors_total", 18),
        ("freight:kv_store_bytes", 19 + 20),
        ("vllm:time_to_first_token_seconds_sum", 0.02),
        ("vllm:inter_token_latency_seconds_sum", 0.008),
        ("vllm:inter_token_latency_seconds_count", 2),
        ("vllm:time_per_output_token_seconds_count", 2),
        ("vllm:request_time_per_output_token_seconds_sum", 0.25),
        ("vllm:e2e_request_latency_seconds_sum", 1.5),
        ("vllm:request_queue_time_seconds_sum", 0.5),
        ("vllm:request_prefill_time_seconds_sum", 0.25),
        ("vllm:request_decode_time_seconds_sum", 0.75),
        ("vllm:request_inference_time_seconds_sum", 1.0),
        ("vllm:request_prompt_tokens_sum", 12),
        ("vllm:request_generation_tokens_sum", 8),
        ("vllm:request_max_num_generation_tokens_sum", 4),
        ("vllm:request_params_n_sum", 2),
        ("vllm:request_params_max_tokens_sum", 64),
        ("vllm:request_num_preemptions_sum", 2),
        ("vllm:iteration_tokens_total_sum", 33),
        ("freight:step_seconds_sum", 0.003),
    ],
)
def test_each_series_has_the_value_that_was_told(name: str, expected: float) -> None:
    assert value(filled(old_names=True), name) == pytest.approx(expected)


def test_labels_of_counters_and_facts() -> None:
    metrics = filled()
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(metrics, "vllm:admission_rejections_total", reason="queue_full") == 1
    assert (
        value(metrics, "http_requests_total", handler="/v1/models/{id}", method="GET", status="200")
        == 1
    )
    assert value(metrics, "vllm:cache_config_info", block_size="16", num_gpu_blocks="64") == 1
    assert (
        value(
            metrics,
            "freight:cache_info",
            format="fp8_e4m3",
            granularity="head",
            scale_source="checkpoint",
        )
        == 1
    )
    assert (
        value(
            metrics, "freight:model_info", version="0.1.0", fingerprint="fp-1", max_model_len="512"
        )
        == 1
    )
    assert value(metrics, "freight:drafted_tokens_total", by="mtp") == 12
    assert value(metrics, "freight:accepted_drafts_total", by="text") == 4
    for name, count in (
        ("requests", 1),
        ("prompt_tokens", 12),
        ("generation_tokens", 8),
        ("prompt_tokens_cached", 4),
    ):
        assert value(metrics, f"freight:key_{name}_total", key="alice") == count
        assert value(metrics, f"freight:key_{name}_total", key="unnamed") == 0


def test_every_reason_is_there_from_the_start_and_can_move() -> None:
    metrics = Metrics("m")
    for reason in FinishReason:
        assert value(metrics, "vllm:request_success_total", finished_reason=reason) == 0
        metrics.request_finished(reason, 0.1, None, 1, 0, 0)
        assert value(metrics, "vllm:request_success_total", finished_reason=reason) == 1
    for refusal in Rejection:
        assert value(metrics, "vllm:admission_rejections_total", reason=refusal) == 0
        metrics.rejected(refusal)
        assert value(metrics, "vllm:admission_rejections_total", reason=refusal) == 1
    with pytest.raises(ValueError, match="mood"):
        metrics.rejected("mood")
    with pytest.raises(ValueError, match="mood"):
        metrics.request_finished("mood", 0.1, None, 1, 0, 0)


def test_without_an_engine_its_series_are_left_out_and_a_new_one_begins_at_zero() -> None:
    metrics = filled()
    metrics.set_stats(None)
    assert value(metrics, "vllm:num_requests_running") is None
    assert value(metrics, "vllm:generation_tokens_total") is None
    metrics.set_stats(replace(ZERO, generated=2))
    assert value(metrics, "vllm:generation_tokens_total") == 2
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0  # also of a cache without capacity


def test_a_request_that_never_reached_the_engine_has_no_engine_times() -> None:
    metrics = Metrics("m")
    metrics.request_finished("abort", 0.1, None, 5, 0, 0)
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 1
    assert value(metrics, "vllm:request_queue_time_seconds_count") == 0


def test_labels_are_bounded() -> None:
    metrics = Metrics("m", keys=("alice",))
    for index in range(10 * MOST_HANDLERS):
        metrics.http_request(f"/{index}", f"VERB{index}", 404)
        metrics.request_finished("stop", 0.1, None, 1, 1, 0, f"key{index}")
    http = families(metrics)["http_requests"].samples
    assert len(http) == MOST_HANDLERS + 1
    assert {sample.labels["method"] for sample in http} == {"other"}
    assert sum(sample.value for sample in http) == 10 * MOST_HANDLERS
    keys = families(metrics)["freight:key_requests"].samples
    assert {sample.labels["key"]: sample.value for sample in keys} == {
        "alice": 0,
        "unnamed": 10 * MOST_HANDLERS,
    }


def test_keys_that_come_later_count_under_their_names() -> None:
    metrics = Metrics("m", keys=("alice",))
    metrics.request_finished("stop", 0.1, None, 1, 1, 0, "alice")
    metrics.add_keys(["bob", "alice"])
    metrics.request_finished("stop", 0.1, None, 1, 1, 0, "bob")
    assert [
        value(metrics, "freight:key_requests_total", key=key) for key in ("alice", "bob", "unnamed")
    ] == [1, 1, 0]
    metrics.add_keys([f"key{index}" for index in range(2 * MOST_KEYS)])
    metrics.request_finished("stop", 0.1, None, 1, 1, 0, f"key{2 * MOST_KEYS - 1}")
    assert value(metrics, "freight:key_requests_total", key="unnamed") == 1
    assert len(families(metrics)["freight:key_requests"].samples) == MOST_KEYS + 1


def test_openmetrics_if_it_is_asked_for() -> None:
    text, content_type = filled(old_names=True).render(OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    openmetrics = {family.name: family for family in parse_openmetrics(text.decode())}
    plain = families(filled(old_names=True))
    assert {name: family.type for name, family in openmetrics.items()} == {
        n: f.type for n, f in plain.items()
    }
    assert openmetrics["vllm:num_requests_running"].samples[0].name == "vllm:num_requests_running"
    assert text.endswith(b"# EOF\n")


PROMETHEUS_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.2"


@given(
    st.text(max_size=60)
    | st.sampled_from([OPENMETRICS, OPENMETRICS + "; q=x", "text/plain;version=9", PROMETHEUS_3])
)
def test_no_accept_header_is_an_error_or_changes_a_name(accept: str) -> None:
    assert b"\nvllm:num_requests_running{" in filled().render(accept)[0]


@settings(max_examples=25)
@given(st.text(st.characters(exclude_characters="\r", exclude_categories=()), max_size=20))
def test_any_model_name_can_be_rendered(name: str) -> None:
    metrics = Metrics(name)
    metrics.set_stats(STATS)
    assert value(metrics, "vllm:num_requests_running") == 3


def test_bounds_of_tokens_go_up_to_the_context() -> None:
    assert token_buckets(120) == [1, 2, 5, 10, 20, 50, 100]
    assert token_buckets(1) == token_buckets(0) == [1]
    samples = families(Metrics("m", most_tokens=10))["vllm:request_prompt_tokens"].samples
    bounds = [sample.labels["le"] for sample in samples if "le" in sample.labels]
    assert bounds == ["1.0", "2.0", "5.0", "10.0", "+Inf"]


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 5)), max_size=30))
def test_buckets_count_what_lies_up_to_their_bound(observed: list[tuple[float, int]]) -> None:
    bounds = [0.5, 1.0, 5.0, 10.0]
    buckets = Buckets(bounds)
    for number, count in observed:
        buckets.observe(number, count)
    expected = [sum(count for number, count in observed if number <= bound) for bound in bounds]
    assert [count for _, count in buckets.cumulative()] == [
        *expected,
        sum(count for _, count in observed),
    ]
    assert buckets.sum == pytest.approx(sum(number * count for number, count in observed))

"""/metrics: counters and histograms, under the names that routers and dashboards read.

Names, labels and buckets are vLLM's (`vllm:`), so that dashboards, load balancers and benchmarks
made for it work; metrics that only Freight has are `freight:`. docs/metrics.md lists all of them.
Labels are bounded: handlers are routes, keys are the configured ones. No series is exported that
could never change, and engine series only while there is an engine.

One thread writes and renders everything. Totals of the engine are those of its last report; a new
engine starts at 0, which Prometheus treats as a counter reset.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from freight.outputs import EngineStats, FinishReason, RequestTimes, StoreStats
from freight.serve.observe.histogram import Buckets
from freight.serve.observe.state import CacheFacts, cache_use

_LONG = (1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
# seconds
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
TTFT = (*_FIRST, *_LONG, 160.0, 640.0, 2560.0)
_SHORT = (0.001, 0.0025, 0.005)  # below vLLM's first bound, 0.01: small models are faster
ITL = (*_SHORT, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, *_LONG)
_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
LATENCY = (*_REQUEST, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COMPLETIONS = (1, 2, 5, 10, 20)
PREEMPTIONS = (0, 1, 2, 3, 4, 5, 10, 20)

_to_openmetrics: Callable[[Collector, str], bytes] = openmetrics.generate_latest

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
# More than the routes of a server: raw paths passed by mistake must not fill the memory.
MOST_HANDLERS = 64
UNNAMED = "unnamed"  # the label of requests without one of the configured keys
# Names configured since the start: the new names of each SIGHUP must not fill the memory.
MOST_KEYS = 256
# Names of adapters since the start, for the same reason.
MOST_ADAPTERS = 1024


class Rejection(StrEnum):
    """The reason why a request was refused before it was queued."""

    QUEUE_FULL = "queue_full"
    TOO_LONG = "too_long"
    INVALID = "invalid"
    UNAUTHORIZED = "unauthorized"
    DRAINING = "draining"


@dataclass(frozen=True)
class ModelFacts:
    """Labels of the info series, which are constant while an engine runs."""

    cache: CacheFacts
    max_model_len: int
    version: str
    fingerprint: str


def token_buckets(most: int) -> list[int]:
    """Return the bounds 1, 2, 5, 10, 20, 50, …, up to `most`."""
    series = [digit * 10**power for power in range(10) for digit in (1, 2, 5)]
    return [bound for bound in series if bound <= most] or [1]


class Metrics:
    """All series of one server.

    model_name  the value of the label `model_name`
    keys        names of the configured API keys; all other requests count under 'unnamed'
    most_tokens the largest bound of histograms of tokens: max_model_len, if it is known already
    old_names   also export names that vLLM has dropped and some routers still read
    """

    def __init__(
        self,
        model_name: str,
        *,
        keys: Sequence[str] = (),
        most_tokens: int = 1_000_000,
        old_names: bool = False,
    ) -> None:
        # A path may have bytes that are not UTF-8.
        name = model_name.encode("utf-8", "replace").decode()
        self._labels = {"model_name": name, "engine": "0"}
        self._old_names = old_names
        self._stats: EngineStats | None = None
        self._facts: ModelFacts | None = None
        self._is_stalled = False
        self._kv_events: Callable[[], tuple[int, int]] | None = None
        self._finished: Counter[str] = Counter({str(reason): 0 for reason in FinishReason})
        self._rejected: Counter[str] = Counter({str(reason): 0 for reason in Rejection})
        self._http: Counter[tuple[str, str, str]] = Counter()
        self._handlers: set[str] = set()
        self._by_key: dict[str, dict[str, int]] = {
            kind: {UNNAMED: 0} for kind in ("requests", "prompt", "generation", "cached")
        }
        self.add_keys(keys)
        self._max_adapters = 0
        self._by_adapter: dict[str, dict[str, int]] = {kind: {} for kind in self._by_key}
        tokens = token_buckets(most_tokens)
        self._ttft = Buckets(TTFT)
        self._itl = Buckets(ITL)
        self._per_token = Buckets(ITL)
        self._e2e = Buckets(LATENCY)
        self._queue = Buckets(LATENCY)
        self._prefill = Buckets(LATENCY)
        self._decode = Buckets(LATENCY)
        self._inference = Buckets(LATENCY)
        self._prompt = Buckets(tokens)
        self._generation = Buckets(tokens)
        self._longest = Buckets(tokens)
        self._params_n = Buckets(COMPLETIONS)
        self._params_max_tokens = Buckets(tokens)
        self._preemptions = Buckets(PREEMPTIONS)
        self._step_tokens = Buckets(STEP_TOKENS)
        self._step_seconds = Buckets(ITL)

    # -------------------------------------------------------------------------------------------
    # recording

    def set_stats(self, stats: EngineStats | None) -> None:
        """Set the engine's latest stats. None: there is no engine, and its series are left out."""
        self._stats = stats

    def add_keys(self, names: Sequence[str]) -> None:
        """Count requests with these keys under their names from now on. Beyond MOST_KEYS names,
        further keys count as 'unnamed'.

        Names that are no longer configured keep their counts, as counters never decrease.
        """
        for name in names:
            if len(self._by_key["requests"]) <= MOST_KEYS:
                for counts in self._by_key.values():
                    counts.setdefault(name, 0)

    def set_max_adapters(self, count: int) -> None:
        """Set how many adapters can be loaded at a time. 0: none, and their series are left out."""
        self._max_adapters = count

    def add_adapters(self, names: Sequence[str]) -> None:
        """Count requests for these adapters under their names from now on. Beyond MOST_ADAPTERS
        names, further ones are not counted by name.

        Names that are no longer loaded keep their counts, as counters never decrease.
        """
        for name in names:
            if len(self._by_adapter["requests"]) < MOST_ADAPTERS:
                for counts in self._by_adapter.values():
                    counts.setdefault(name, 0)

    def set_stalled(self, is_stalled: bool) -> None:
        """Record whether the engine's process gives no sign of life."""
        self._is_stalled = is_stalled

    def set_kv_events(self, counts: Callable[[], tuple[int, int]]) -> None:
        """Set what says how many batches of KV events were published and dropped. Without it their
        series are left out.
        """
        self._kv_events = counts

    def set_info(self, facts: ModelFacts) -> None:
        """Set the labels that are constant while an engine runs."""
        self._facts = facts

    def observe_step(self, seconds: float, num_tokens: int) -> None:
        """Record a step of the engine: its time, and its tokens of prompts and of generation."""
        self._step_seconds.observe(seconds)
        self._step_tokens.observe(num_tokens)

    def request_queued(self, params_n: int, max_tokens: int | None, prompt_tokens: int) -> None:
        """Record an accepted request. prompt_tokens: over all its prompts."""
        self._params_n.observe(params_n)
        if max_tokens is not None:
            self._params_max_tokens.observe(max_tokens)
        self._prompt.observe(prompt_tokens)

    def first_token(self, seconds: float) -> None:
        """Record the first token of a request, `seconds` after the request."""
        self._ttft.observe(seconds)

    def inter_token(self, seconds: float, num_tokens: int = 1) -> None:
        """Record `num_tokens` tokens of a completion that came `seconds` after the ones before; 0
        tokens record nothing.
        """
        if num_tokens > 0:
            self._itl.observe(seconds / num_tokens, num_tokens)

    def request_finished(
        self,
        reason: str,
        e2e_seconds: float,
        times: RequestTimes | None,
        prompt_tokens: int,
        generated_tokens: int,
        cached_tokens: int,
        key_name: str = UNNAMED,
        longest_completion: int | None = None,
        adapter: str | None = None,
    ) -> None:
        """Record the end of a queued request. reason: a FinishReason.

        times               the engine's; None if the request never reached the engine
        generated_tokens    over all completions
        longest_completion  tokens of the longest completion; None: there is only one
        adapter             the name of its adapter; None: the model alone

        Raises ValueError for an unknown reason.
        """
        self._finished[str(FinishReason(reason))] += 1
        self._e2e.observe(e2e_seconds)
        self._generation.observe(generated_tokens)
        longest = generated_tokens if longest_completion is None else longest_completion
        self._longest.observe(longest)
        if times is not None:
            self._queue.observe(times.queued)
            self._prefill.observe(times.prefill)
            self._decode.observe(times.decode)
            self._inference.observe(times.prefill + times.decode)
            self._preemptions.observe(times.preemptions)
            if longest > 1:
                self._per_token.observe(times.decode / (longest - 1))
        key = key_name if key_name in self._by_key["requests"] else UNNAMED
        counts = {
            "requests": 1,
            "prompt": prompt_tokens,
            "generation": generated_tokens,
            "cached": cached_tokens,
        }
        for kind, count in counts.items():
            self._by_key[kind][key] += count
            if adapter in self._by_adapter[kind]:
                self._by_adapter[kind][adapter] += count

    def rejected(self, reason: str) -> None:
        """Count a request that was refused before it was queued. Raises ValueError if `reason` is
        not a Rejection.
        """
        self._rejected[str(Rejection(reason))] += 1

    def http_request(self, handler: str, method: str, status: int) -> None:
        """Count an answer. handler: the route's template, such as '/v1/models/{id}', never the raw
        path.
        """
        if handler not in self._handlers:
            if len(self._handlers) >= MOST_HANDLERS:
                handler = "other"
            self._handlers.add(handler)
        self._http[handler, method if method in METHODS else "other", str(status)] += 1

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """`render` of these series."""
        return render(self, accept)

    # -------------------------------------------------------------------------------------------
    # series

    def collect(self) -> Iterator[Metric]:
        """Yield every series with its present value."""
        if self._stats is not None:
            yield from self._of_engine(self._stats)
        if self._facts is not None:
            yield from self._of_facts(self._facts)
        if self._kv_events is not None:
            published, dropped = self._kv_events()
            text = "Batches of KV events that were published."
            yield self._counter("freight:kv_event_batches", text, published)
            text = "Batches of KV events that were not published: too many waited."
            yield self._counter("freight:kv_event_batches_dropped", text, dropped)
        yield from self._of_requests()
        yield from self._of_histograms()

    def _of_engine(self, stats: EngineStats) -> Iterator[Metric]:
        gauge = self._gauge
        counter = self._counter
        yield gauge(
            "vllm:num_requests_running", "Sequences that take part in every step.", stats.running
        )
        yield gauge("vllm:num_requests_waiting", "Sequences that wait.", stats.waiting)
        waiting = {"reason": "capacity"}
        yield gauge(
            "vllm:num_requests_waiting_by_reason",
            "Sequences that wait, by reason.",
            stats.waiting,
            waiting,
        )
        used = cache_use(stats)
        yield gauge(
            "vllm:kv_cache_usage_perc", "Share of the KV cache that requests hold, 0 to 1.", used
        )
        yield counter(
            "vllm:prompt_tokens", "Prompt tokens, computed or found in the cache.", stats.prompt
        )
        yield counter(
            "vllm:prompt_tokens_cached",
            "Prompt tokens found in the prefix cache.",
            stats.prefix_hits,
        )
        yield counter("vllm:generation_tokens", "Tokens generated.", stats.generated)
        yield counter(
            "vllm:num_preemptions", "Times that a sequence lost its blocks.", stats.preemptions
        )
        yield counter(
            "vllm:prefix_cache_queries",
            "Prompt tokens looked up in the cache.",
            stats.prefix_queries,
        )
        yield counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits
        )
        yield counter(
            "vllm:spec_decode_num_draft_tokens", "Tokens drafted (--speculate).", stats.drafted
        )
        yield counter(
            "vllm:spec_decode_num_accepted_tokens",
            "Drafted tokens that were drawn.",
            stats.accepted,
        )
        if stats.drafted_by:
            text = "Tokens drafted, by what drafted them."
            yield self._labelled("freight:drafted_tokens", text, "by", stats.drafted_by)
            text = "Drafted tokens that were drawn, by what drafted them."
            yield self._labelled("freight:accepted_drafts", text, "by", stats.accepted_by)
        yield counter(
            "vllm:corrupted_requests",
            "Completions that failed (NaN, undecodable text, a failed step).",
            stats.failed,
        )
        yield gauge(
            "freight:engine_stalled",
            "1 while the engine gives no sign of life.",
            int(self._is_stalled),
        )
        yield gauge(
            "freight:cache_capacity_tokens",
            "Tokens that the KV cache holds.",
            stats.capacity_tokens,
        )
        yield gauge(
            "freight:cache_held_tokens",
            "Tokens of the KV cache in blocks that requests hold.",
            stats.held_tokens,
        )
        yield gauge(
            "freight:cache_reusable_tokens",
            "Tokens of the KV cache kept for prefix hits.",
            stats.reusable_tokens,
        )
        yield counter(
            "freight:kv_saturated_values", "Values beyond the range of their scale.", stats.clipped
        )
        yield counter("freight:kv_nan", "NaN stored in the KV cache.", stats.nans)
        if stats.store is not None:
            yield from self._of_store(stats.store)
        if self._max_adapters:
            use = {
                "max_lora": str(self._max_adapters),
                "waiting_lora_adapters": ",".join(stats.waiting_adapters),
                "running_lora_adapters": ",".join(stats.running_adapters),
            }
            yield self._gauge(
                "vllm:lora_requests_info",
                "Adapters of sequences that run and wait, as labels; the value is the time.",
                time.time(),
                use,
            )
        if self._old_names:
            yield gauge("vllm:gpu_cache_usage_perc", "Old name of vllm:kv_cache_usage_perc.", used)
            old = "Old name of vllm:prefix_cache_"
            yield counter("vllm:gpu_prefix_cache_queries", old + "queries.", stats.prefix_queries)
            yield counter("vllm:gpu_prefix_cache_hits", old + "hits.", stats.prefix_hits)

    def _of_store(self, store: StoreStats) -> Iterator[Metric]:
        yield self._labelled(
            "freight:kv_store_hits",
            "Blocks that were brought into the KV cache from its store.",
            "tier",
            {"memory": store.memory_hits, "disk": store.disk_hits},
        )
        for name, text, value in (
            ("misses", "Blocks that were to be brought in, and could not be read.", store.misses),
            ("tokens", "Prompt tokens found in the store and not in the cache.", store.tokens),
            ("stored", "Blocks written to the store.", store.stored),
            ("dropped", "Blocks that were to be written and were not.", store.dropped),
            ("corrupt", "Blocks of the store that were damaged.", store.corrupt),
            ("errors", "Failures of the store's disk.", store.errors),
        ):
            yield self._counter(f"freight:kv_store_{name}", text, value)
        sizes = GaugeMetricFamily(
            "freight:kv_store_bytes", "Bytes in the store.", labels=(*self._labels, "tier")
        )
        for tier, size in (("memory", store.memory_bytes), ("disk", store.disk_bytes)):
            sizes.add_metric((*self._labels.values(), tier), size)
        yield sizes

    def _of_facts(self, facts: ModelFacts) -> Iterator[Metric]:
        cache = facts.cache
        blocks = {"block_size": str(cache.block_size), "num_gpu_blocks": str(cache.num_blocks)}
        yield self._gauge("vllm:cache_config_info", "The KV cache's blocks, as labels.", 1, blocks)
        kind = {
            "format": cache.format,
            "granularity": cache.granularity or "none",
            "scale_source": cache.scale_source or "none",
        }
        yield self._gauge(
            "freight:cache_info", "The KV cache's format and scales, as labels.", 1, kind
        )
        model = {
            "version": facts.version,
            "fingerprint": facts.fingerprint,
            "max_model_len": str(facts.max_model_len),
        }
        yield self._gauge("freight:model_info", "What is served, as labels.", 1, model)

    def _of_requests(self) -> Iterator[Metric]:
        ended = "Requests that ended, by reason."
        yield self._labelled("vllm:request_success", ended, "finished_reason", self._finished)
        refused = "Requests refused, by reason."
        yield self._labelled("vllm:admission_rejections", refused, "reason", self._rejected)
        http = CounterMetricFamily(
            "http_requests", "Answers, by route.", labels=("handler", "method", "status")
        )
        for route, count in self._http.items():
            http.add_metric(route, count)
        yield http
        for kind, name, what in (
            ("requests", "requests", "Requests"),
            ("prompt", "prompt_tokens", "Prompt tokens of requests"),
            ("generation", "generation_tokens", "Generated tokens of requests"),
            (
                "cached",
                "prompt_tokens_cached",
                "Prompt tokens found in the prefix cache, of requests",
            ),
        ):
            text = f"{what} that ended, by "
            yield self._labelled(
                f"freight:key_{name}", f"{text}API key.", "key", self._by_key[kind]
            )
            if self._max_adapters:
                by_adapter = self._by_adapter[kind]
                yield self._labelled(
                    f"freight:adapter_{name}", f"{text}adapter.", "adapter", by_adapter
                )

    def _of_histograms(self) -> Iterator[Metric]:
        yield self._histogram(
            "vllm:time_to_first_token_seconds", "From a request to its first token.", self._ttft
        )
        yield self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a completion.", self._itl
        )
        of_request = "vllm:request_"
        for name, text, buckets in (
            (
                "time_per_output_token_seconds",
                "Mean time between a request's tokens.",
                self._per_token,
            ),
            ("queue_time_seconds", "Until the first step of a request.", self._queue),
            ("prefill_time_seconds", "From the first step to the first token.", self._prefill),
            ("decode_time_seconds", "From the first token to the end.", self._decode),
            ("inference_time_seconds", "From the first step to the end.", self._inference),
            ("prompt_tokens", "Prompt tokens of a request.", self._prompt),
            ("generation_tokens", "Tokens generated for a request.", self._generation),
            (
                "max_num_generation_tokens",
                "Tokens of a request's longest completion.",
                self._longest,
            ),
            ("params_n", "The parameter n.", self._params_n),
            ("params_max_tokens", "The parameter max_tokens.", self._params_max_tokens),
            ("num_preemptions", "Preemptions of a request.", self._preemptions),
        ):
            yield self._histogram(of_request + name, text, buckets)
        yield self._histogram(
            "vllm:e2e_request_latency_seconds", "From a request to its end.", self._e2e
        )
        yield self._histogram(
            "vllm:iteration_tokens_total", "Tokens computed in a step.", self._step_tokens
        )
        yield self._histogram(
            "freight:step_seconds", "Time of a step of the engine.", self._step_seconds
        )
        if self._old_names:
            text = "Old name of vllm:inter_token_latency_seconds."
            yield self._histogram("vllm:time_per_output_token_seconds", text, self._itl)

    def _gauge(
        self, name: str, text: str, value: float, more: dict[str, str] | None = None
    ) -> Metric:
        labels = {**self._labels, **(more or {})}
        family = GaugeMetricFamily(name, text, labels=tuple(labels))
        family.add_metric(tuple(labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: int) -> Metric:
        family = CounterMetricFamily(name, text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family

    def _labelled(self, name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*self._labels, label))
        for of_label, value in values.items():
            family.add_metric((*self._labels.values(), of_label), value)
        return family

    def _histogram(self, name: str, text: str, buckets: Buckets) -> Metric:
        family = HistogramMetricFamily(name, text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), buckets.cumulative(), buckets.sum)
        return family


class Series(Protocol):
    """What has series."""

    def collect(self) -> Iterator[Metric]:
        """Yield every series with its present value. Each name comes once."""


def render(series: Series, accept: str | None = None) -> tuple[bytes, str]:
    """Return the exposition and its content type: OpenMetrics if the Accept header asks for it, else
    Prometheus' text format.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(series))
    # By default the library writes `vllm_` for `vllm:` in OpenMetrics. These names are legal under
    # every escaping that a client may ask for, so none is applied.
    if "application/openmetrics-text" in (accept or "").lower():
        text = _to_openmetrics(registry, "allow-utf-8")
        return text, "application/openmetrics-text; version=1.0.0; charset=utf-8"
    return exposition.generate_latest(registry), "text/plain; version=0.0.4; charset=utf-8"


def merged(collected: Iterable[Metric]) -> Iterator[Metric]:
    """Yield each name once, with the samples of all that have it."""
    families: dict[str, Metric] = {}
    for metric in collected:
        family = families.setdefault(metric.name, metric)
        if family is not metric:
            family.samples += metric.samples
    yield from families.values()


class _Collector(Collector):
    """The collector that a registry calls. Series are built on demand."""

    def __init__(self, series: Series) -> None:
        self._series = series

    def collect(self) -> Iterator[Metric]:
        return self._series.collect()

"""The figures of each setting: sums over tokens become means, with their intervals. JSON has the
fields' names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from freight.base.fields import JsonDict, JsonObject
from freight.fp8.formats import Granularity, ScaleSource
from freight.fp8.scheme import KVScales, LayerScales
from freight.lab.columns import as_object
from freight.lab.evaluate.documents import Part
from freight.lab.evaluate.magnitudes import Magnitudes
from freight.lab.evaluate.measure import SettingRun, mean_perplexity
from freight.lab.evaluate.safety import Interval, Sample, Verdict, judge
from freight.lab.evaluate.speed import Speed, faster_from
from freight.lab.evaluate.statistics import (
    by_position,
    distinct_units,
    effective_units,
    independent_units,
    interval,
    position_edges,
    unit_sums,
)
from freight.settings.engine import EngineArgs, KVCacheConfig

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One setting. KL in nats per token, against the first; intervals are of 95 %, None below
    `safety.MIN_UNITS`.

    layers             dtype and granularity of each layer where they differ; else None
    state_dtype        how recurrent states are stored; None: no layer keeps one. bytes_per_state:
                       of one sequence
    verdict            whether it may be recommended (`safety`), and why not
    perplexity_ratio   to the first setting's perplexity
    layer_errors       by layer, relative errors of `k`, `v` and `attention` (`stored_error`)
    layer_kl           by layer, the KL of this layer's cache alone; None if it was not measured
    kl_by_position, perplexity_by_position   by bucket of Evaluation.position_edges; None in a
                                             bucket without tokens
    decode             tokens per second of one sequence, by context of Evaluation.contexts
    decode_tokens_per_second   at the longest of them
    clipping           layers in which a static scale clips what the first setting stores
                       (`Magnitudes.clipping`); None: scales are not static, or keys are centered
    faster_from        context from which decoding is faster than in the first setting; None: on no
                       timed one
    document_logprobs  by document, the sum of the log-probabilities of its scored tokens, in nats, as
                       `Evaluation.document_tokens`
    """

    name: str
    weights: str
    kv_cache_dtype: str
    granularity: str | None
    scale_source: str | None
    layers: list[dict[str, str | None]] | None
    state_dtype: str | None
    centered: bool
    verdict: Verdict
    reasons: tuple[str, ...]
    perplexity: float
    perplexity_ratio: float
    perplexity_ratio_interval: Interval | None
    kl_mean: float
    kl_interval: Interval | None
    kl_median: float
    kl_p99: float
    kl_max: float
    same_top: float
    same_top_interval: Interval | None
    bytes_per_token: int
    tokens_per_gib: int
    bytes_per_state: int
    clipped_share: float
    clipping: list[JsonDict] | None = None
    flushed_share: float
    layer_errors: list[dict[str, float]]
    layer_kl: list[float] | None = None
    perplexity_by_position: list[float | None]
    kl_by_position: list[float | None]
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    decode: list[float] | None = None
    faster_from: int | None = None
    document_logprobs: list[float] | None = None
    num_passes: int
    forward_seconds: float


@dataclass(frozen=True)
class Overview:
    """What was measured. Bytes are of the first setting's weights; `window` is the tokens scored
    together.

    `args` are the engine's options as given, for the command that repeats a setting;
    `chosen_by_layer`: the checkpoint has a choice for each layer (`KVScales.mixed`); `quantized`:
    its weights are, so no command stores scales of its own with them; `prompted`: documents follow
    prompts, so each is one window, and the unit of intervals.
    """

    args: EngineArgs
    source: str
    weight_dtype: str
    weight_bytes: int
    embedding_bytes: int
    window: int
    notes: tuple[str, ...] = ()
    calibration: CalibrationText | None = None
    chosen_by_layer: bool = False
    quantized: bool = False
    prompted: bool = False

    @property
    def weights(self) -> str:
        """What the weights take, for people."""
        layers = f"{self.weight_bytes:,} bytes in {self.weight_dtype}"
        return f"{layers}, embedding and head {self.embedding_bytes:,} bytes"


@dataclass(frozen=True)
class CalibrationText:
    """What static scales were measured on: a file or data set (None: what the demo model has itself),
    and how many samples of how many tokens at most.
    """

    data: str | None
    num_samples: int
    max_seq_len: int


@dataclass(frozen=True)
class Noise:
    """What computing in 16 bits costs by itself: mean KL in nats of a float32 run of the same weights
    to the first setting, over `num_tokens` tokens.
    """

    kl: float
    num_tokens: int


@dataclass(frozen=True)
class Evaluation:
    """All settings over the same documents; the first of `runs` is the one that the others are
    compared with.

    `position_edges` has one entry more than there are buckets; `sample` says what intervals are
    over. `magnitudes` are those of keys and values by layer (`Magnitudes.as_list`), by position in
    the buckets of `magnitude_edges`. `seconds` are those of everything, `calibration_seconds` of
    the forward passes over calibration text. `document_tokens` has the scored tokens of each
    document, in the order of the file up to the last that has any; None where units are not
    documents.
    """

    overview: Overview
    runs: tuple[Figures, ...]
    num_documents: int
    sample: Sample
    position_edges: tuple[int, ...]
    contexts: tuple[int, ...]
    magnitudes: tuple[JsonObject, ...] = ()
    magnitude_edges: tuple[int, ...] = ()
    seconds: float = 0.0
    calibration_seconds: float = 0.0
    noise: Noise | None = None
    document_tokens: tuple[int, ...] | None = None

    def without_noise(self, run: Figures) -> float | None:
        """Return about the KL that the cache costs by itself: without the noise of computing in 16
        bits, which both runs have. None where that was not measured.
        """
        if self.noise is None:
            return None
        if run is self.runs[0]:
            return 0.0
        return max(0.0, run.kl_mean - 2 * self.noise.kl)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader has to know before the figures: that the text, or the amount of it, says
        little.
        """
        return tuple(self.sample.missing)

    @property
    def forward_seconds(self) -> float:
        """Of all forward passes that the figures need: over the text, and over calibration text."""
        return self.calibration_seconds + sum(run.forward_seconds for run in self.runs)

    def as_json(self) -> JsonObject:
        runs = [asdict(run) | {"kl_without_noise": self.without_noise(run)} for run in self.runs]
        facts = as_object(self, _JSON)
        return {
            **facts,
            "weights": as_object(self.overview, _WEIGHTS),
            "intervals_over": self.sample.units if self.runs[0].kl_interval else None,
            "noise": self.noise and asdict(self.noise),
            "runs": runs,
        }


_JSON = {
    "model": "overview.args.model",
    "data": "overview.source",
    "num_documents": "num_documents",
    "document_tokens": "document_tokens",
    "num_tokens": "sample.num_tokens",
    "window": "overview.window",
    "weights": "overview",
    "vocab_size": "sample.vocab_size",
    "intervals_over": "sample.units",
    "num_units": "sample.num_units",
    "num_repeats": "sample.num_repeats",
    "warnings": "warnings",
    "position_edges": "position_edges",
    "magnitudes": "magnitudes",
    "magnitude_edges": "magnitude_edges",
    "contexts": "contexts",
    "notes": "overview.notes",
    "seconds": "seconds",
    "forward_seconds": "forward_seconds",
}
_WEIGHTS = {"dtype": "weight_dtype", "bytes": "weight_bytes", "embedding_bytes": "embedding_bytes"}


def summarize(
    overview: Overview,
    runs: Sequence[SettingRun],
    parts: Sequence[Part],
    speeds: Sequence[Speed] | None,
    layer_kl: Sequence[list[float] | None] | None,
) -> Evaluation:
    """`speeds` and `layer_kl` are by run, if they were measured. What is returned has no seconds
    yet.
    """
    counts = [part.window.num_scored for part in parts]
    documents = {part.document for part in parts}
    by_document = overview.prompted or len(documents) > 1
    keys = [part.document if by_document else index for index, part in enumerate(parts)]
    texts: dict[int, list[int]] = defaultdict(list)
    for key, part in zip(keys, parts, strict=True):
        texts[key] += part.window.token_ids
        if overview.prompted:  # an answer of one token is nowhere else
            texts[key] += part.window.targets[-1:]
    number = distinct_units if overview.prompted else independent_units
    unit_of = dict(zip(texts, number(list(texts.values())), strict=True))
    ids = [unit_of[key] for key in keys]
    positions = [np.arange(part.window.first_scored, len(part.window.targets)) for part in parts]
    of_documents = None
    if by_document:
        of_documents = np.repeat([part.document for part in parts], counts).astype(np.int64)
    tokens = _Tokens(
        units=np.repeat(ids, counts).astype(np.int64),
        positions=np.concatenate(positions).astype(np.int64),
        edges=position_edges(max(len(part.window.targets) for part in parts)),
        reference=_losses(runs[0]),
        documents=of_documents,
    )
    sizes = np.bincount(tokens.units).astype(np.float64)
    num_units = round(float(effective_units(sizes)))
    sample = Sample(
        num_units=num_units,
        num_uneven=len(sizes) if len(sizes) > num_units else 0,
        num_repeats=len(texts) - len(set(ids)),
        units="documents" if by_document else "windows",
        num_tokens=sum(counts),
        perplexity=mean_perplexity(runs[0].token_logprobs),
        vocab_size=runs[0].runner.model.config.vocab_size,
    )
    assert runs[0].probe is not None
    magnitudes = runs[0].probe.magnitudes
    figures = []
    for index, run in enumerate(runs):
        kv = run.config.kv
        clipping = _clipping(kv, magnitudes, run.runner.pool.less_bias(kv))
        setting = replace(_figures(run, tokens, sample), clipping=clipping)
        if layer_kl:
            setting = replace(setting, layer_kl=layer_kl[index])
        if speeds:
            speed = speeds[index]
            setting = replace(
                setting,
                prefill_tokens_per_second=speed.prefill,
                decode_tokens_per_second=speed.decode[-1],
                decode=list(speed.decode),
                faster_from=faster_from(speed, speeds[0]) if index else None,
            )
        figures.append(setting)
    return Evaluation(
        overview=overview,
        runs=tuple(figures),
        num_documents=len(documents),
        sample=sample,
        position_edges=tuple(tokens.edges),
        contexts=speeds[0].contexts if speeds else (),
        magnitudes=tuple(magnitudes.as_list()) if magnitudes else (),
        magnitude_edges=tuple(magnitudes.edges) if magnitudes else (),
        document_tokens=None if of_documents is None else tuple(np.bincount(of_documents).tolist()),
    )


@dataclass(frozen=True)
class _Tokens:
    """What all settings share: the unit and the position of each scored token, the first setting's
    loss in nats, and the document, None where units are not documents.
    """

    units: np.ndarray
    positions: np.ndarray
    edges: list[int]
    reference: np.ndarray
    documents: np.ndarray | None


def _is_centered(scales: KVScales | None) -> bool:
    layers = () if scales is None else scales.layers
    return any(layer is not None and layer.k_center for layer in layers)


def _clipping(
    kv: KVCacheConfig, magnitudes: Magnitudes | None, less_bias: Sequence[int] = ()
) -> list[JsonDict] | None:
    """Where static scales clip; None where there are none, or keys are stored less centers of theirs.
    Keys of the layers `less_bias`, which are stored without their biases, are left out.
    """
    static = kv.scale_source not in (None, ScaleSource.DYNAMIC)
    if magnitudes is None or not static or _is_centered(kv.scales):
        return None
    unit = LayerScales((1.0,), (1.0,), Granularity.TENSOR)
    scales = {}
    for layer in magnitudes.layers:
        if kv.of_layer(layer).granularity is None:  # it stays unquantized
            continue
        measured = unit if kv.scales is None else kv.scales.layers[layer]
        if measured is not None:
            scales[layer] = measured
    clipping = []
    for entry in magnitudes.clipping(scales, kv.format):
        if entry["side"] == "v" or entry["layer"] not in less_bias:
            clipping.append(entry)
    return clipping


def _losses(run: SettingRun) -> np.ndarray:
    """Return the loss of each token in nats, float64."""
    losses: np.ndarray = -run.token_logprobs.numpy().astype(np.float64)
    return losses


def _figures(run: SettingRun, tokens: _Tokens, sample: Sample) -> Figures:
    """Return what is measured over the text: without speed, and without the KL by layer."""
    kv = run.config.kv
    names = kv.names()
    spec = run.runner.pool.spec
    kl: np.ndarray = run.token_kl.numpy()
    same: np.ndarray = run.token_same.numpy()
    loss = _losses(run)
    change = loss - tokens.reference
    counts = np.bincount(tokens.units).astype(np.float64)
    sums = unit_sums(tokens.units, change, kl, same)
    of_change, of_kl, of_same = [interval(by_unit, counts) for by_unit in sums]
    ratio = float(np.exp(np.mean(change)))
    median, p99 = np.percentile(kl, (50, 99)).tolist()
    losses = by_position(tokens.positions, loss, tokens.edges)
    assert run.probe is not None
    kl_mean = float(kl.mean(dtype=np.float64))
    same_top = float(same.mean())
    by_document = None
    if tokens.documents is not None:
        by_document = unit_sums(tokens.documents, -loss)[0].tolist()
    of_ratio = None
    if of_change is not None:
        low, high = np.exp(of_change).tolist()
        of_ratio = (low, high)
    judged = judge(
        (ratio, of_ratio), (kl_mean, of_kl), (same_top, of_same), run.clipped_share, sample
    )
    return Figures(
        name=run.name,
        weights=run.weights,
        kv_cache_dtype=str(names["dtype"]),
        granularity=names["granularity"],
        scale_source=names["scale_source"],
        layers=kv.layer_names(),
        state_dtype=spec.state_format and str(spec.state_format),
        centered=_is_centered(kv.scales),
        verdict=judged.verdict,
        reasons=judged.reasons,
        perplexity=mean_perplexity(run.token_logprobs),
        perplexity_ratio=ratio,
        perplexity_ratio_interval=of_ratio,
        kl_mean=kl_mean,
        kl_interval=of_kl,
        kl_median=median,
        kl_p99=p99,
        kl_max=float(kl.max()),
        same_top=same_top,
        same_top_interval=of_same,
        bytes_per_token=spec.bytes_per_token,
        tokens_per_gib=spec.tokens_in(GIB),
        bytes_per_state=spec.bytes_per_state,
        clipped_share=run.clipped_share,
        flushed_share=run.probe.flushed_share,
        layer_errors=run.probe.errors,
        perplexity_by_position=[None if mean is None else float(np.exp(mean)) for mean in losses],
        kl_by_position=by_position(tokens.positions, kl, tokens.edges),
        document_logprobs=by_document,
        num_passes=run.num_passes,
        forward_seconds=run.seconds,
    )

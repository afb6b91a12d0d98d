"""The figures of each setting: sums over tokens become means, with their intervals. JSON has the fields' names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from freight.evaluate.documents import Part
from freight.evaluate.measure import SettingRun, mean_perplexity
from freight.evaluate.speed import Speed, faster_from
from freight.evaluate.statistics import bootstrap_means, by_position, interval, position_edges, unit_sums

GIB = 2**30
Interval = tuple[float, float]


@dataclass(frozen=True)
class Figures:
    """One setting. KL in nats per token, against the first; intervals hold the middle 95 % of a paired bootstrap.

    perplexity_ratio   to the first setting's perplexity
    layer_errors       by layer, relative errors of `k`, `v` and `attention` (`stored_error`)
    layer_kl           by layer, the KL of this layer's cache alone; None if it was not measured
    kl_by_position, perplexity_by_position   by bucket of Evaluation.position_edges; None in a bucket without tokens
    decode             tokens per second of one sequence, by context of Evaluation.contexts
    decode_tokens_per_second   at the longest of them
    faster_from        context from which decoding is faster than in the first setting; None: on no timed one
    """

    name: str
    weights: str
    kv_cache_dtype: str
    granularity: str | None
    scale_source: str | None
    centered: bool
    perplexity: float
    perplexity_interval: Interval | None
    perplexity_ratio: float
    perplexity_ratio_interval: Interval | None
    kl_mean: float
    kl_interval: Interval | None
    kl_median: float
    kl_p99: float
    kl_max: float
    same_top: float
    bytes_per_token: int
    tokens_per_gib: int
    clipped_share: float
    flushed_share: float
    layer_errors: list[dict[str, float]]
    layer_kl: list[float] | None
    perplexity_by_position: list[float | None]
    kl_by_position: list[float | None]
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None
    decode: list[float] | None
    faster_from: int | None
    num_passes: int
    forward_seconds: float


@dataclass(frozen=True)
class Overview:
    """What was measured. Bytes are of the first setting's weights; `window` is the tokens judged together.

    `kv_scales`, `quantization` and `calibration_data` are the options as given, for the command that repeats a setting.
    """

    model: str
    source: str
    weight_dtype: str
    weight_bytes: int
    embedding_bytes: int
    window: int
    notes: tuple[str, ...] = ()
    kv_scales: str = "auto"
    quantization: str | None = None
    calibration_data: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """All settings over the same documents; the first of `runs` is the one that the others are compared with.

    `position_edges` has one entry more than there are buckets; `units` says what intervals draw, None without them.
    `seconds` are those of the whole, `calibration_seconds` of the forward passes over calibration text.
    """

    overview: Overview
    runs: tuple[Figures, ...]
    num_documents: int
    num_tokens: int
    units: str | None
    position_edges: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: float = 0.0
    calibration_seconds: float = 0.0

    @property
    def forward_seconds(self) -> float:
        """Of all forward passes that the figures need: over the text, and over calibration text."""
        return self.calibration_seconds + sum(run.forward_seconds for run in self.runs)

    def as_json(self) -> dict[str, Any]:
        over = self.overview
        size = {"dtype": over.weight_dtype, "bytes": over.weight_bytes, "embedding_bytes": over.embedding_bytes}
        return {
            "model": over.model,
            "data": over.source,
            "num_documents": self.num_documents,
            "num_tokens": self.num_tokens,
            "window": over.window,
            "weights": size,
            "intervals_over": self.units,
            "position_edges": list(self.position_edges),
            "contexts": list(self.contexts),
            "notes": list(over.notes),
            "seconds": self.seconds,
            "forward_seconds": self.forward_seconds,
            "runs": [asdict(run) for run in self.runs],
        }


def summarize(
    overview: Overview,
    labels: Sequence[tuple[str, str]],
    runs: Sequence[SettingRun],
    parts: Sequence[Part],
    speeds: Sequence[Speed] | None,
    layer_kl: Sequence[list[float] | None] | None,
) -> Evaluation:
    """`labels` are the names of caches and weights; `speeds` and `layer_kl` by run, if they were measured.

    What is returned has no seconds yet.
    """
    counts = [len(part.window.targets) for part in parts]
    documents = np.array([part.document for part in parts])
    by_document = len(set(documents.tolist())) > 1
    ids = np.unique(documents, return_inverse=True)[1] if by_document else np.arange(len(parts))
    tokens = _Tokens(
        units=np.repeat(ids, counts).astype(np.int64),
        positions=np.concatenate([np.arange(count) for count in counts]).astype(np.int64),
        edges=position_edges(max(counts)),
        reference=-_array(runs[0].token_logprobs).astype(np.float64),
    )
    figures = []
    for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
        speed = speeds[index] if speeds else None
        faster = faster_from(speed, speeds[0]) if speed and speeds and index else None
        figures.append(_figures(label, run, tokens, speed, faster, layer_kl[index] if layer_kl else None))
    enough = len(set(ids.tolist())) > 1
    return Evaluation(
        overview=overview,
        runs=tuple(figures),
        num_documents=len(set(documents.tolist())),
        num_tokens=sum(counts),
        units=("documents" if by_document else "windows") if enough else None,
        position_edges=tuple(tokens.edges),
        contexts=speeds[0].contexts if speeds else (),
    )


@dataclass(frozen=True)
class _Tokens:
    """What all settings share: the unit and the position of each token, and the first setting's loss in nats."""

    units: np.ndarray
    positions: np.ndarray
    edges: list[int]
    reference: np.ndarray


def _array(values: Tensor) -> np.ndarray:
    array: np.ndarray = values.numpy()
    return array


def _figures(
    label: tuple[str, str],
    run: SettingRun,
    tokens: _Tokens,
    speed: Speed | None,
    faster: int | None,
    layer_kl: list[float] | None,
) -> Figures:
    kv, names, spec = run.config.kv, run.config.kv.names(), run.runner.pool.spec
    kl, loss = _array(run.token_kl), -_array(run.token_logprobs).astype(np.float64)
    own, first, divergence = unit_sums(tokens.units, loss, tokens.reference, kl)
    draws = bootstrap_means([own, first, divergence], np.bincount(tokens.units).astype(np.float64))
    ratio = float(np.exp(np.mean(loss) - np.mean(tokens.reference)))
    median, p99 = (float(value) for value in np.percentile(kl, (50, 99)))
    losses = by_position(tokens.positions, loss, tokens.edges)
    assert run.probe is not None
    return Figures(
        name=label[0],
        weights=label[1],
        kv_cache_dtype=str(names["dtype"]),
        granularity=names["granularity"],
        scale_source=names["scale_source"],
        centered=kv.scales is not None and any(layer is not None and layer.k_center for layer in kv.scales.layers),
        perplexity=mean_perplexity(run.token_logprobs),
        perplexity_interval=interval(np.exp(draws[0])) if draws else None,
        perplexity_ratio=ratio,
        perplexity_ratio_interval=interval(np.exp(draws[0] - draws[1])) if draws else None,
        kl_mean=float(kl.mean(dtype=np.float64)),
        kl_interval=interval(draws[2]) if draws else None,
        kl_median=median,
        kl_p99=p99,
        kl_max=float(kl.max()),
        same_top=float(_array(run.token_same).mean()),
        bytes_per_token=spec.bytes_per_token,
        tokens_per_gib=spec.tokens_in(GIB),
        clipped_share=run.clipped_share,
        flushed_share=run.probe.flushed_share,
        layer_errors=run.probe.errors,
        layer_kl=layer_kl,
        perplexity_by_position=[None if mean is None else float(np.exp(mean)) for mean in losses],
        kl_by_position=by_position(tokens.positions, kl, tokens.edges),
        prefill_tokens_per_second=speed.prefill if speed else None,
        decode_tokens_per_second=speed.decode[-1] if speed else None,
        decode=list(speed.decode) if speed else None,
        faster_from=faster,
        num_passes=run.num_passes,
        forward_seconds=run.seconds,
    )

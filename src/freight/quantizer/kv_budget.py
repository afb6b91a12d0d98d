"""A KV cache chosen by layer within a budget: FP8 in one of its granularities, or unquantized.

The samples are split. On one half the scales are calibrated and each layer's divergence is measured
with that layer alone quantized (`quantizer.sensitivity`). The sum over the layers predicts that of
a choice, and one pass over the layers finds, for every number of bytes, the choice of the least
predicted divergence. What is promised is not the prediction: the cheapest such choice is taken
whose divergence, measured as a whole, keeps within the budget, on that half and on the other, which
nothing was chosen by. If the other half needs it, a dearer choice is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from freight.base.terminal import OnStage
from freight.errors import ConfigError
from freight.fp8.formats import Granularity, ScaleSource
from freight.fp8.scheme import KVScales, LayerScales
from freight.model.open import OpenModel, open_model
from freight.quantizer.budget import Budget, BudgetKind
from freight.quantizer.calibration import Calibration
from freight.quantizer.plan import KV_GRANULARITIES
from freight.quantizer.sensitivity import Meter, Samples, Sensitivity, at_most
from freight.settings.engine import EngineArgs, EngineConfig, KVCacheConfig
from freight.settings.resolve import for_variant

# Tokens of each half, at most, that are run with one layer quantized after the other
MEASURED = 16384
QUANTIZED = (*KV_GRANULARITIES, Granularity.TOKEN)
CANDIDATES = (*QUANTIZED, None)  # None: unquantized


@dataclass(frozen=True)
class Option:
    """A choice by layer: its bytes per token, and the divergence that the layers' sum predicts."""

    num_bytes: int
    predicted_kl: float
    choice: tuple[int, ...]


@dataclass(frozen=True)
class KVChoice:
    """What was chosen and measured. KL in nats per token, against an unquantized cache under
    unquantized weights.

    granularities        by layer; None is 16 bits
    bits                 per stored value, scales per token included
    kl_chosen            measured as a whole on the text by which was chosen
    kl_verified          on the other text
    num_chosen           tokens of the two texts
    num_verified
    kl_by_layer          by layer and granularity, alone
    """

    budget: Budget
    granularities: tuple[Granularity | None, ...]
    bytes_per_token: int
    bytes_unquantized: int
    bits: float
    predicted_kl: float
    kl_chosen: float
    kl_verified: float
    num_chosen: int
    num_verified: int
    kl_by_layer: tuple[dict[Granularity, float], ...]

    @property
    def uniform(self) -> Granularity | None:
        """The static granularity of every layer, which other engines can read; None where
        layers differ.
        """
        granularity, *different = set(self.granularities)
        if different or granularity is Granularity.TOKEN:
            return None
        return granularity


def split(
    samples: list[list[int]], flag: str = "--kv-budget"
) -> tuple[list[list[int]], list[list[int]]]:
    """Return every other sample to choose by, and the rest to verify with. Raises ConfigError for a
    single sample. `flag`: of the budget, for messages.
    """
    if len(samples) < 2:
        raise ConfigError(
            f"{flag} needs at least 2 samples, one to choose by and one to verify with: give more data, or a "
            "shorter --max-seq-len"
        )
    return samples[::2], samples[1::2]


def frontier(kl: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]]) -> list[Option]:
    """Return the choices that no other beats in both, from the fewest bytes to the most.

    kl, sizes: [layers][candidates], the divergence and bytes per token of one layer. Exact: layer
    by layer, the best of each total; layers have few sizes, so totals are few.
    """
    front = [Option(0, 0.0, ())]
    for of_layer, size in zip(kl, sizes, strict=True):
        best: dict[int, Option] = {}
        for option in front:
            for index, (cost, count) in enumerate(zip(of_layer, size, strict=True)):
                longer = Option(
                    option.num_bytes + count, option.predicted_kl + cost, (*option.choice, index)
                )
                known = best.get(longer.num_bytes)
                if known is None or longer.predicted_kl < known.predicted_kl:
                    best[longer.num_bytes] = longer
        front = []
        for num_bytes in sorted(best):
            if not front or best[num_bytes].predicted_kl < front[-1].predicted_kl:
                front.append(best[num_bytes])
    return front


def cheapest(front: Sequence[Option], limit: float, measure: Callable[[Option], float]) -> int:
    """Find the index of the first option that measures at most `limit`, begun where the prediction
    says; the last one does.

    By halves, as if what is measured fell with the bytes. Where it does not, what is found is still
    within the limit.
    """
    low = 0
    high = len(front) - 1
    probe = next((i for i, option in enumerate(front) if option.predicted_kl <= limit), high)
    while low < high:
        if measure(front[min(probe, high - 1)]) <= limit:
            high = min(probe, high - 1)
        else:
            low = min(probe, high - 1) + 1
        probe = (low + high) // 2
    return high


def choose(
    engine: EngineArgs,
    budget: Budget,
    calibration: Calibration,
    halves: tuple[Samples, Samples],
    say: OnStage,
) -> KVChoice:
    """Measure and choose. `engine` names the folder of the unquantized model; `halves` are those of
    `split`.
    """
    longest = max(len(ids) for half in halves for ids in half)
    opened = open_model(replace(engine, max_model_len=longest))
    config = opened.resolve(opened.args)
    native = opened.device.native_e4m3
    caches = []
    for granularity in QUANTIZED:
        source = ScaleSource.DYNAMIC  # per token
        scales = calibration.by_granularity.get(granularity)
        if scales is not None:
            source = ScaleSource.CALIBRATED
            scales = for_variant(scales, native)
        caches.append(KVCacheConfig(native, granularity, source, scales))
    chosen, other = [at_most(half, MEASURED) for half in halves]
    with opened.threads(config):
        meter = Meter.open(opened, config, caches, longest)
        measured = meter.by_layer(chosen, lambda done, total: say("measuring layers", done, total))
        return _choose(opened, config, caches, meter, measured, budget, (chosen, other))


def _choose(
    opened: OpenModel,
    config: EngineConfig,
    caches: Sequence[KVCacheConfig],
    meter: Meter,
    measured: Sensitivity,
    budget: Budget,
    texts: tuple[Samples, Samples],
) -> KVChoice:
    specs = [opened.cache_spec(replace(config, kv=kv)) for kv in (*caches, config.kv)]
    sizes = []
    for index in specs[0].kept:
        sizes.append([spec.kept[index].bytes_per_token for spec in specs])
    bytes_unquantized = sum(size[-1] for size in sizes)
    values = specs[0].values_per_token
    front = frontier([(*of_layer, 0.0) for of_layer in measured.kl], sizes)

    @cache
    def kl(option: Option, text: int) -> float:
        return meter.whole([None if i == len(caches) else i for i in option.choice], texts[text])

    index = 0
    if budget.kind is BudgetKind.BITS:
        for i, option in enumerate(front):
            if option.num_bytes * 8 <= budget.limit * values:
                index = i
    else:
        index = cheapest(front, budget.limit, lambda option: kl(option, 0))
        while max(kl(front[index], 0), kl(front[index], 1)) > budget.limit:
            index += 1
    option = front[index]
    return KVChoice(
        budget=budget,
        granularities=tuple(CANDIDATES[i] for i in option.choice),
        bytes_per_token=option.num_bytes,
        bytes_unquantized=bytes_unquantized,
        bits=option.num_bytes * 8 / values,
        predicted_kl=option.predicted_kl,
        kl_chosen=kl(option, 0),
        kl_verified=kl(option, 1),
        num_chosen=sum(map(len, texts[0])),
        num_verified=sum(map(len, texts[1])),
        kl_by_layer=tuple(dict(zip(QUANTIZED, of_layer, strict=True)) for of_layer in measured.kl),
    )


def as_chosen(calibration: Calibration, choice: KVChoice) -> Calibration:
    """Return what is written of a choice: the scales of its layers and nothing of the others.

    One static granularity in every layer is what other engines can read, with a scale per
    layer; for any other choice the side file alone has it, because they would take 1.0
    for the layers without scales.
    """
    layers: list[LayerScales | None] = []
    for index, granularity in enumerate(choice.granularities):
        if granularity in (None, Granularity.TOKEN):
            layers.append(None)
        else:
            layers.append(calibration.by_granularity[granularity].layers[index])
    if choice.uniform is not None:
        return replace(calibration, kv_finer=KVScales(tuple(layers)))
    mixed = KVScales(tuple(layers), mixed=choice.granularities)
    return replace(calibration, kv=None, kv_finer=mixed)

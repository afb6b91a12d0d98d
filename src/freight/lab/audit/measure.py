"""What an engine's choice of scales costs on this checkpoint: perplexity and KL against a 16-bit
cache.

An engine's view becomes the `KVCacheConfig` that Freight would have for the same scales, so every
row is computed by the same kernels and differs in scales alone; but for the rows of vLLM's CPU
kernels, which round differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from freight.base.terminal import OnProgress, unseen
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.fp8.scheme import KVScales, LayerScales
from freight.lab.audit.effects import EngineView, LayerEffect
from freight.lab.audit.vllm_cpu import VllmCpuKernels
from freight.lab.evaluate.report import CacheScore, cache_run, plain_config, run_caches
from freight.model.open import open_model
from freight.settings.device import probe
from freight.settings.engine import EngineArgs, KVCacheConfig
from freight.settings.resolve import for_variant

DYNAMIC = KVCacheConfig(Format.E4M3FN, Granularity.TOKEN, ScaleSource.DYNAMIC, None)


@dataclass(frozen=True)
class LayerCost:
    """What a layer adds to the KL, nats per token, if it alone has the engine's scales, the others
    repaired ones.
    """

    layer: int
    added_kl: float


def engine_scales(view: EngineView) -> KVScales | None:
    """Return the scales that the engine divides by, made for E4M3FN; None if it does not load the
    checkpoint, or not known.
    """
    if view.refusal or view.unknown:
        return None
    by_layer = {layer.layer: _layer_scales(layer) for layer in view.layers}
    layers = tuple(by_layer.get(index) for index in range(view.num_layers))
    return KVScales(layers, unneeded=frozenset(range(view.num_layers)).difference(by_layer))


def _layer_scales(layer: LayerEffect) -> LayerScales:
    k = layer.k.values
    v = layer.v.values
    count = max(len(k), len(v))
    granularity = Granularity.TENSOR if count == 1 else Granularity.HEAD
    return LayerScales(k * (count // len(k)), v * (count // len(v)), granularity)


def static(scales: KVScales, native: Format) -> KVCacheConfig:
    """Return an E4M3 cache with these scales, on a device whose E4M3 is `native`."""
    converted = for_variant(scales, native)
    of_layers = [layer.granularity for layer in converted.layers if layer is not None]
    return KVCacheConfig(
        native, max(of_layers, key=list(Granularity).index), ScaleSource.GIVEN, converted
    )


def measure(
    args: EngineArgs,
    scales: Sequence[KVScales],
    text: str | Sequence[int],
    window: int | None = None,
    max_tokens: int | None = None,
    on_progress: OnProgress = unseen,
    truncated: Sequence[KVScales] = (),
) -> list[CacheScore]:
    """Scores of a 16-bit cache, of one scaled per token, and of each of `scales`, in this order.

    After them those of `truncated`, which are stored as vLLM's CPU kernels store them. The one
    place where auditing calls the evaluation. Raises ConfigError for a text of fewer than two
    tokens, and for a window beyond the context.
    """
    native = probe(args.device).native_e4m3
    plain = replace(args, kv_cache_dtype="auto", kv_scales="auto", quantization_param_path=None)
    caches = [replace(DYNAMIC, format=native), *(static(layers, native) for layers in scales)]
    caches += [static(layers, Format.E4M3FN) for layers in truncated]
    kernels = [VllmCpuKernels()] * len(truncated)
    runs = run_caches(plain, caches, text, window, max_tokens, on_progress, kernels)
    return [run.score() for run in runs]


def worst_layers(
    args: EngineArgs,
    engine: KVScales,
    repaired: KVScales,
    text: str | Sequence[int],
    window: int | None,
    max_tokens: int,
    on_progress: OnProgress = unseen,
) -> tuple[LayerCost, ...]:
    """Return the layers whose scales differ between the two, the costliest first."""
    differing = []
    swapped = []
    for index, layer in enumerate(engine.layers):
        base = repaired.layers[index]
        if layer is None or base is None or (layer.k, layer.v) == (base.k, base.v):
            continue
        layers = (*repaired.layers[:index], layer, *repaired.layers[index + 1 :])
        differing.append(index)
        swapped.append(replace(repaired, layers=layers))
    if not differing:
        return ()
    scores = measure(args, [repaired, *swapped], text, window, max_tokens, on_progress)[2:]
    costs = []
    for index, score in zip(differing, scores[1:], strict=True):
        costs.append(LayerCost(index, score.mean_kl - scores[0].mean_kl))
    return tuple(sorted(costs, key=lambda cost: -cost.added_kl))


def measured_scales(
    args: EngineArgs, text: str, window: int | None = None, max_tokens: int = 8192
) -> KVScales:
    """Scales per tensor from the largest key and value of each layer over `text`, for a checkpoint
    that has none.

    They come from the scales that a cache measures per token, so that it works for quantized
    weights too.
    """
    opened = open_model(args)
    dynamic = replace(DYNAMIC, format=opened.device.native_e4m3)
    config = replace(plain_config(opened), kv=dynamic)
    tokenizer = opened.load_tokenizer()
    assert tokenizer is not None, (
        "auditing reads text, so the command line has required a tokenizer"
    )
    ids = tokenizer.encode(text, add_special_tokens=False)[:max_tokens]
    length = min(window or 1024, config.max_model_len)
    with opened.threads(config):
        runner = cache_run(opened, opened.load(config, length), config, length).runner
        paged = runner.pool.paged
        largest = {index: [0.0, 0.0] for index in paged}
        for start in range(0, len(ids), length):
            part = ids[start : start + length]
            runner.logits(part, 0, runner.pool.whole)
            for index, layer in paged.items():
                best = largest[index]
                for side, scale in enumerate((layer.pages.k_scale, layer.pages.v_scale)):
                    assert scale is not None
                    best[side] = max(best[side], float(scale.flatten(0, 1)[: len(part)].max()))
    # A layer whose keys are all zero has no amax; any scale stores its zeros.
    by_layer = {}
    for index, (k, v) in largest.items():
        by_layer[index] = LayerScales((k or 1.0,), (v or 1.0,), Granularity.TENSOR)
    layers = tuple(by_layer.get(index) for index in range(opened.model.num_layers))
    scales = KVScales(layers, opened.device.native_e4m3, unneeded=opened.model.without_pages)
    return for_variant(scales, Format.E4M3FN)

"""`freight evaluate layers`: each layer's share of what a quantized cache costs.

Each layer is quantized alone against an unquantized cache. The sum of the layers and the divergence
of the whole stand side by side, because errors of several layers may cancel or amplify each other:
where the two differ much, the shares say which layer to look at, and not what leaving it in 16 bits
would save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from freight.base.tables import markdown
from freight.base.terminal import OnProgress, unseen
from freight.errors import ConfigError
from freight.lab.evaluate.documents import Document, cut_documents, window_length
from freight.model.open import open_model
from freight.quantizer.sensitivity import Meter
from freight.settings.engine import EngineArgs

TOKENS = 16384  # of the text: the model runs over them (layers + 1) / 2 times


@dataclass(frozen=True)
class LayerCost:
    """One layer quantized alone: KL in nats per token, its share of the layers' sum, and how it is
    stored.

    `read_by` are the layers that read its keys and values in the place of theirs. They have no
    row: what their attention loses is in this one.
    """

    layer: int
    read_by: tuple[int, ...]
    dtype: str
    granularity: str | None
    kl: float
    share: float


@dataclass(frozen=True)
class PerLayer:
    """`kl_sum` is over the layers, `kl_whole` with all of them quantized at once; both in nats per
    token.
    """

    layers: tuple[LayerCost, ...]
    kl_sum: float
    kl_whole: float
    num_tokens: int


def per_layer(
    args: EngineArgs,
    documents: Sequence[Document],
    window: int | None = None,
    on_progress: OnProgress = unseen,
) -> PerLayer:
    """Measure the cache that `args` name, E4M3 where they name none, layer by layer.

    Judged are the first TOKENS tokens of `documents`, `window` of them together. Raises ConfigError
    for a cache of 16 bits, and what `resolve` and `cut_documents` raise, before weights are read.
    """
    opened = open_model(args)
    everywhere = replace(args, kv_cache_dtype_skip_layers=())
    if args.kv_cache_dtype == "auto" and not opened.resolve(everywhere).kv.format.is_quantized:
        args = replace(args, kv_cache_dtype="fp8")
    config = opened.resolve(args)
    if not config.kv.format.is_quantized:
        raise ConfigError(
            f"--per-layer with a cache in {config.kv.format}: no layer of it is quantized; use --kv-cache-dtype fp8"
        )
    unquantized = opened.resolve(args.with_plain_cache(str(config.compute_format)))
    # pages alone are measured
    unquantized = replace(unquantized, kv=replace(unquantized.kv, state=config.kv.state))
    length = window_length(window, config.max_model_len)
    parts = cut_documents(opened, documents, length, TOKENS)
    samples = [part.window.token_ids for part in parts]
    with opened.threads(config):
        meter = Meter.open(opened, unquantized, [config.kv], max(map(len, samples)))
        by_layer = meter.by_layer(samples, on_progress)
        together = meter.whole([0] * opened.model.num_layers, samples)
    total = sum(kl for (kl,) in by_layer.kl)
    layers = []
    for (index, *readers), (kl,) in zip(by_layer.shared, by_layer.kl, strict=True):
        kind = config.kv.of_layer(index)
        layers.append(
            LayerCost(
                layer=index,
                read_by=tuple(readers),
                dtype=str(kind.format),
                granularity=kind.granularity and str(kind.granularity),
                kl=kl,
                share=kl / (total or 1.0),
            )
        )
    return PerLayer(tuple(layers), total, together, by_layer.num_tokens)


def as_table(costs: PerLayer) -> str:
    """For people. KL in nats per token."""
    rows = [("layer", "cache", "KL alone", "share")]
    for layer in costs.layers:
        name = str(layer.layer)
        if layer.read_by:
            name += f", read by {', '.join(map(str, layer.read_by))}"
        cache = layer.dtype
        if layer.granularity:
            cache += f", {layer.granularity}"
        rows.append((name, cache, f"{layer.kl:.6f}", f"{layer.share:.1%}"))
    share = "100.0%" if costs.kl_sum else ""
    rows.append(("sum", "one at a time", f"{costs.kl_sum:.6f}", share))
    rows.append(("whole", "all at once", f"{costs.kl_whole:.6f}", ""))
    return markdown(rows, num_left=2)

"""Calibration: run the unquantized model over samples, one layer at a time, and observe what will
be quantized.

All samples go through a layer before the next layer is read, so memory holds one layer with its observers, its cache
for one sample, the scales of the layers before, and the hidden states of all samples (tokens x hidden_size in the
model's format). The layers are the engine's own. Observed are the keys and values that they store (after rotary
embedding, as the cache gets them) and the inputs of their Linear modules. The cache has the model's own format and no
scales, so it stores values unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from freight.base.terminal import OnStage, unseen
from freight.cache.pool import AngleTables, LayerCache, PagedKV, PagedState, allocate_pool
from freight.cache.spec import KVCacheSpec, LayerSpec, layer_spec
from freight.errors import CheckpointError
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import KVScales, LayerScales
from freight.kernels.interface import KernelSet
from freight.kernels.reference_set import REFERENCE
from freight.model.architectures import tensor_names
from freight.model.config.model import ModelConfig
from freight.model.decoder import DecoderLayer
from freight.model.layers.per_layer_embeddings import PerLayerEmbeddings
from freight.model.layers.rope import build_ropes
from freight.model.loader import model_builder
from freight.model.mixers.attention.layer import Attention
from freight.model.mixers.spec import Mixer, PagedMixer
from freight.model.sources import WeightSource
from freight.operands.batch import ForwardBatch
from freight.operands.kv_pages import KeyCenter
from freight.operands.rotary import Rotary
from freight.quantizer.centers import CenterWatch, LayerCenters
from freight.quantizer.expert_inputs import one_by_one
from freight.quantizer.modules import layer_modules
from freight.quantizer.plan import ActivationScheme, QuantizePlan
from freight.quantizer.watch import LayerWatch, Watch, WatchedKV, observed, watch_layer
from freight.settings.engine import KVCacheConfig, LayerKVFormat

BLOCK_SIZE = 64  # of the cache that one sample is computed with
LATE = 0.75  # share of the tokens after which scales are compared with the final ones
# a scale that grows by more than this factor after that has not settled; about one step of E4M3
MOVING = 1.05


@dataclass(frozen=True)
class Calibration:
    """What was measured. Scales are for E4M3FN.

    kv            one scale per layer for K and one for V; None if the cache was not observed
    kv_finer      per head or channel, if requested; with centers, in any granularity
    centers       by layer, the gain of centering, and the centers where it is large enough; empty
                  if not requested
    input_scales  by Linear module; empty if activations were not observed
    moving        name -> growth of scales that had not settled: more data would change them
    zeros         names of what was always zero; its scale is 1.0
    by_granularity  scales of every granularity that was observed; all static ones for a budget
    unseen          names of experts that no token reached, where inputs were observed; they have
                    the scales of the rest
    """

    kv: KVScales | None
    kv_finer: KVScales | None
    input_scales: Mapping[str, float]
    num_samples: int
    num_tokens: int
    longest: int  # tokens of the longest sample: scales have seen no position from there on
    moving: Mapping[str, float]
    zeros: tuple[str, ...]
    centers: tuple[LayerCenters, ...] = ()
    by_granularity: Mapping[Granularity, KVScales] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()


@torch.inference_mode()
def calibrate(
    config: ModelConfig,
    source: WeightSource,
    kernels: KernelSet,
    plan: QuantizePlan,
    samples: Sequence[Sequence[int]],
    ignored: Sequence[str] = (),
    device: str = "cpu",
    on_progress: OnStage = unseen,
) -> Calibration:
    """Measure the scales that `plan` needs, on `samples` of token ids. `source` gives unquantized
    weights.

    Keys and values are stored and read by the reference, in float32: the rounding of faster kernels
    depends on the machine, and would become part of the scales. Centers need a second pass through
    each layer, because scales are for the centered keys, and the hidden states twice; everything
    else is measured as without them. Layers that read the keys and values of another have its
    scales; what it stores of all samples is kept for them. Raises CheckpointError that names the
    layer and what in it is NaN or infinite, and for a budget of a model with such layers.
    """
    names = tensor_names(config)
    left_out = frozenset(ignored)
    sources, sharing = _sources(config, plan)
    lengths = [len(ids) for ids in samples]
    ropes = build_ropes(config.ropes, max(lengths), device)
    shared = {sources[index] for index in sharing}
    passes = config.num_layers
    if plan.center:
        passes += config.num_layers - len(sharing)
    total = passes * sum(lengths)
    tokens = torch.tensor([*chain.from_iterable(samples)], dtype=torch.int64, device=device)
    position = torch.arange(max(lengths), dtype=torch.int64, device=device)
    positions = torch.cat([position[:length] for length in lengths])
    builder = model_builder(config, source, kernels)
    of_layers = model_builder(config, source, one_by_one(kernels))
    hidden = builder.embedding()(tokens, positions)
    embedded = hidden.clone() if config.per_layer_vocab_size is not None else hidden[:0]
    run = _Run(
        config.checkpoint_format,
        lengths,
        device,
        tokens,
        embedded,
        lambda done: on_progress("calibrating", done, total),
    )
    watched: list[LayerWatch] = []
    centered: list[tuple[LayerCenters, LayerWatch]] = []
    for index, modules in enumerate(layer_modules(config)):
        layer = of_layers.layer(index, ropes)
        mixer = config.layers[index].mixer
        rotary_dim = 0
        if isinstance(mixer, PagedMixer):
            rotary_dim = ropes[mixer.rope].rotary_dim
        watch = watch_layer(plan, mixer, modules, left_out, device, rotary_dim)
        embeddings = builder.per_layer_embeddings(index)
        through = partial(run.through, mixer, embeddings=embeddings)
        keep = sources[index] if sources[index] in shared else None
        finder = None
        before = hidden
        if plan.center and index not in sharing:
            finder = CenterWatch(_rotary(layer).rotary_dim)
            before = hidden.clone()
        projected = None if finder is None else finder.see
        through(watch.around(layer), hidden, watch, projected=projected, keep=keep)
        if index in sharing:
            centered += centered[sources[index] : sources[index] + 1]
        elif finder is not None:
            only_kv = replace(plan, activations=ActivationScheme.NONE)
            kv_watch = watch_layer(only_kv, mixer, modules, left_out, device, rotary_dim)
            centers = finder.centers()
            centered.append((centers, kv_watch))
            through(layer, before, kv_watch, centers=centers)
        if not hidden.isfinite().all():
            raise CheckpointError(
                f"layer {index} ({names.layer.format(index).rstrip('.')}) computes NaN or infinity during calibration, "
                "without quantization: no scales can be measured beyond it"
            )
        watched.append(watch)
        del layer, embeddings, through, before  # before the next one is read
    stored = {index: watched[sources[index]] for index in config.paged}
    return _summary(plan, watched, stored, centered, lengths)


def _sources(config: ModelConfig, plan: QuantizePlan) -> tuple[list[int], list[int]]:
    """Return (for each layer the one whose keys and values it reads, the layers that read another's)."""
    sources = list(range(config.num_layers))
    sharing = []
    for index, mixer in config.paged.items():
        if mixer.kv_from is not None:
            sources[index] = mixer.kv_from
            sharing.append(index)
    if plan.kv_granularity is not None and not config.paged:
        raise CheckpointError(
            f"--kv-cache fp8: no layer of this model ({config.model_type}) has attention, and stores keys and values; "
            "use --kv-cache none"
        )
    if config.without_pages and (plan.center or plan.kv_budget):
        flag = "--center" if plan.center else "--kv-budget"
        raise CheckpointError(
            f"layer {min(config.without_pages)} has no attention, and stores no keys and values: {flag} is implemented "
            f"for models in which every layer does; omit {flag}"
        )
    if plan.center and len(config.attention) < len(config.paged):
        raise CheckpointError(
            f"--center: what layer {min(config.paged.keys() - config.attention.keys())} stores are latents, of which "
            "keys and values are made (MLA): a center would be missing in the values; omit --center"
        )
    if sharing and plan.kv_budget:
        raise CheckpointError(
            f"layer {sharing[0]} reads the keys and values of layer {sources[sharing[0]]} (num_kv_shared_layers): a "
            "budget chooses how each layer is stored by itself, which is not implemented for it; omit --kv-budget"
        )
    return sources, sharing


def _rotary(layer: DecoderLayer) -> Rotary:
    assert isinstance(layer.mixer, Attention), "`_sources` refuses to center keys of other layers"
    return layer.mixer.rotary


class _Run:
    """Runs all samples through one layer after the other."""

    def __init__(
        self,
        format: Format,
        lengths: Sequence[int],
        device: str,
        tokens: Tensor,
        embedded: Tensor,
        on_progress: Callable[[int], None],
    ) -> None:
        """`embedded`: the embeddings of `tokens`, in models that have per-layer embeddings."""
        self._format = format
        self._lengths = lengths
        self._total = sum(lengths)
        self._done = 0
        self._tokens = tokens
        self._embedded = embedded
        self._device = device
        self._on_progress = on_progress
        self._blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        self._caches: dict[tuple[LayerSpec, int | None], PagedKV | PagedState] = {}
        self._angles = AngleTables()

    def _cache(self, mixer: Mixer, keep: int | None) -> PagedKV | PagedState | None:
        """Return a cache for one sample, the same for all layers of one shape; or that of layer
        `keep`, for all samples.

        None for a layer that keeps nothing of the tokens before.
        """
        layer = layer_spec(mixer, LayerKVFormat(self._format, None), self._format)
        if layer is None:
            return None
        layer = layer.alone  # all tokens of a sample are kept
        if (layer, keep) not in self._caches:
            longest = max(self._blocks) * BLOCK_SIZE
            num_tokens = longest
            if keep is not None:
                num_tokens = sum(self._blocks) * BLOCK_SIZE
            spec = KVCacheSpec((layer,), BLOCK_SIZE, state_every=longest)
            num_blocks = spec.blocks_of(num_tokens)
            config = KVCacheConfig(self._format, granularity=None, scale_source=None, scales=None)
            cache = allocate_pool(spec, config, num_blocks, REFERENCE, self._device).layers[0]
            assert cache is not None
            self._caches[layer, keep] = cache
        return self._caches[layer, keep]

    def through(
        self,
        mixer: Mixer,
        layer: DecoderLayer,
        hidden: Tensor,
        watch: LayerWatch,
        centers: LayerCenters | None = None,
        projected: Callable[[Tensor, Tensor], None] | None = None,
        keep: int | None = None,
        embeddings: PerLayerEmbeddings | None = None,
    ) -> None:
        """Compute a layer for all samples, observed.

        hidden      [total, hidden_size], samples end to end; overwritten with the layer's output
        keep        the layer whose keys and values, of all samples, this one stores or reads; None:
                    nothing reads them later
        embeddings  the layer's own of the tokens, in models that have them
                    (`model/layers/per_layer_embeddings.py`)

        `watch` observes keys and values as they are stored, the keys less `centers` if given, and
        is then finished.
        """
        cache: LayerCache = self._cache(mixer, keep)
        if isinstance(cache, PagedKV):
            pages = cache.pages
            if centers is not None and centers.k is not None:
                k_center = KeyCenter.of(centers.k, *self._angles.of(_rotary(layer)))
                pages = replace(pages, k_center=k_center)
            cache = WatchedKV(pages, cache.kernels, stored=watch.see_kv, projected=projected)
        begin = 0
        late = min(LATE * self._total, self._total - self._lengths[-1])
        first = 0
        for length, blocks in zip(self._lengths, self._blocks, strict=True):
            if begin > 0 and begin >= late:
                late = self._total
                for observer in watch.all:
                    observer.mark()
            rows = slice(begin, begin + length)
            inputs = None
            if embeddings is not None:
                inputs = embeddings(self._embedded[rows], self._tokens[rows])
            hidden[rows] = layer.whole(hidden[rows], self._batch(length, first), cache, inputs)
            begin += length
            if keep is not None:
                first += blocks
            self._done += length
            self._on_progress(self._done)
        for observer in watch.all:
            observer.finish()

    def _batch(self, length: int, first: int) -> ForwardBatch:
        """Build the batch of one sequence from its beginning, in the blocks from `first` on. Layers
        do not use token ids.
        """
        position = torch.arange(length, dtype=torch.int64, device=self._device)
        blocks = first + torch.arange(
            -(-length // BLOCK_SIZE), dtype=torch.int32, device=self._device
        )
        return ForwardBatch(
            token_ids=position,
            positions=position,
            query_starts=torch.tensor([0, length], dtype=torch.int32, device=self._device),
            context_lens=torch.tensor([length], dtype=torch.int32, device=self._device),
            slots=(position + first * BLOCK_SIZE,),
            block_tables=(blocks[None],),
            logit_rows=position[:0],
        )


def _summary(
    plan: QuantizePlan,
    watched: Sequence[LayerWatch],
    stored: Mapping[int, LayerWatch],
    centered: Sequence[tuple[LayerCenters, LayerWatch]],
    lengths: Sequence[int],
) -> Calibration:
    """Return what was measured. `stored` has, of each layer with attention, the watch of the layer
    whose keys and values it reads: its own in most models.
    """

    def scales(granularity: Granularity) -> KVScales:
        by_layer: list[LayerScales | None] = [None] * len(watched)
        for index, layer in stored.items():
            by_layer[index] = layer.layer_scales(granularity)
        return KVScales(tuple(by_layer), unneeded=frozenset(range(len(watched))) - stored.keys())

    watches: list[Watch] = []
    input_scales: dict[str, float] = {}
    unseen: list[str] = []
    for layer in watched:
        watches += layer.all
        unseen += layer.unseen()
        for group, watch in layer.inputs.items():
            input_scales |= dict.fromkeys(group, float(watch.scales()))
    for _, layer in centered:
        watches += layer.all
    finer = plan.kv_granularity
    kv = None
    kv_finer = None
    if finer is not None:
        kv = scales(Granularity.TENSOR)
        if centered:
            of_layers = (layer.layer_scales(finer, centers) for centers, layer in centered)
            kv_finer = KVScales(tuple(of_layers))
        elif finer is not Granularity.TENSOR:
            kv_finer = scales(finer)
    return Calibration(
        kv=kv,
        kv_finer=kv_finer,
        input_scales=input_scales,
        num_samples=len(lengths),
        num_tokens=sum(lengths),
        longest=max(lengths),
        moving={watch.name: watch.growth for watch in watches if watch.growth > MOVING},
        zeros=tuple(dict.fromkeys(watch.name for watch in watches if watch.zero)),
        centers=tuple(centers for centers, _ in centered),
        by_granularity={granularity: scales(granularity) for granularity in observed(plan)},
        unseen=tuple(unseen),
    )

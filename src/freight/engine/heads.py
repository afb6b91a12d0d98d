"""Heads that draft, from the settings to `Drafting`: opened and checked before weights are read."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from freight.cache.pool import KVPool
from freight.cache.spec import KVCacheSpec, measured, with_layers
from freight.checkpoint.headers import Shape
from freight.checkpoint.reader import Checkpoint
from freight.engine.decode_steps import DecodeSteps
from freight.engine.drafting import Drafting
from freight.engine.guesses import ASSUMED, FLOAT32_ROW, ROW, pays
from freight.engine.head_runner import HeadLeader, HeadRunner
from freight.engine.least_bytes import least_weight_bytes
from freight.engine.recordings import CpuRecordings
from freight.errors import CheckpointError, ConfigError, shown
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.fp8.scheme import KVScales
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.interface import KernelSet
from freight.model.config.predicting import published_predicting
from freight.model.decoder import Decoder, LanguageModel
from freight.model.draft_head import DraftHead
from freight.model.eagle import open_eagle
from freight.model.held_tensors import held_tensors
from freight.model.mixers.spec import Mixer
from freight.model.open import OpenModel, open_model
from freight.model.predicting import load_predicting, require_predicting
from freight.model.second_model import SecondModel
from freight.model.shapes import predicting_shapes
from freight.parallel.shards import require_head_divisible
from freight.settings.cpu_builds import multiplies_bfloat16
from freight.settings.engine import EngineArgs, EngineConfig, KVCacheConfig, LayerKVFormat
from freight.settings.speculation import HeadKind, HeadSource, require_drafts_of
from freight.text.tokenizer import Tokenizer

logger = logging.getLogger("freight")


@dataclass(frozen=True)
class OpenHead:
    """A head that is opened and not loaded yet.

    method       what kind it is
    name         for messages
    mixers       of its layers, whole also where ranks divide them
    kinds        the stored format of each layer's keys and values
    limit        positions that it has
    least_bytes  that its weights occupy at least, on all ranks together
    checkpoint   that it is read from; None: the model's own
    load         reads its weights, or a rank's part, for the model that it guesses for, which is loaded
    """

    method: HeadKind
    name: str
    mixers: tuple[Mixer, ...]
    kinds: tuple[LayerKVFormat, ...]
    limit: int
    least_bytes: int
    checkpoint: Checkpoint | None
    load: Callable[[LanguageModel], DraftHead]

    @property
    def identity(self) -> str:
        """What ranks compare before they read weights, '' where the model's own checkpoint has them."""
        if self.checkpoint is None:
            return ""
        said = repr((self.method, self.mixers, self.kinds, self.limit, self.least_bytes))
        return hashlib.sha256(said.encode()).hexdigest()[:16]


def open_head(opened: OpenModel, config: EngineConfig, spec: KVCacheSpec) -> OpenHead | None:
    """Open what drafts for a model. spec: of the model's own cache. None where a head is looked for, and
    the model has none.

    Raises ConfigError, and CheckpointError for a folder at fault.
    """
    source = config.drafts.head
    if source is None:
        source = _own_head(opened)
    keeps_all = any(group.keeps_all and group.has_slots for group in spec.groups)
    if source is None or (not keeps_all and config.drafts.head is None):
        return None
    if not keeps_all:
        raise ConfigError(
            f"--speculative-config: method {str(source.kind)!r} keeps its own keys in the blocks of layers that keep "
            f"every token, and this model ({opened.model.model_type}) has none; omit it"
        )
    if source.kind is HeadKind.MTP:
        return _open_predicting(opened, config)
    assert source.folder is not None
    if source.kind is HeadKind.EAGLE3:
        return _open_eagle(opened, config, source.folder)
    return _open_second(opened, config, source.folder)


def _own_head(opened: OpenModel) -> HeadSource | None:
    """Return the layers of the model's own checkpoint that draft; None if it has none."""
    if opened.checkpoint is None or opened.args.pipeline_parallel_size > 1:
        return None
    if published_predicting(opened.model, opened.checkpoint.names) is None:
        return None
    return HeadSource(HeadKind.MTP)


def _measured(config: EngineConfig, opened: OpenModel) -> LayerKVFormat:
    """Return the format of the keys and values of layers beside the model's, for which a checkpoint has
    no static scales.
    """
    return measured(config.kv.of_layer(max(opened.model.paged)))


def _num_values(shapes: Mapping[str, Shape]) -> int:
    """Return how many values tensors of these shapes have."""
    return sum(math.prod(shape) for shape in shapes.values())


def _open_predicting(opened: OpenModel, config: EngineConfig) -> OpenHead:
    predicting = require_predicting(opened, config)
    count = _num_values(predicting_shapes(opened.model, predicting))

    def load(model: LanguageModel) -> DraftHead:
        assert isinstance(model, Decoder), "refused where drafts are"
        head = load_predicting(opened, config, model)
        return replace(head, layers=head.layers[:1])  # drafts at every depth: see `Drafting`

    return OpenHead(
        method=HeadKind.MTP,
        name="the model's own layers for it",
        mixers=(predicting.layer.mixer,),
        kinds=(_measured(config, opened),),
        limit=config.max_model_len,
        least_bytes=count * min(config.weight_format.bytes, config.compute_format.bytes),
        checkpoint=None,
        load=load,
    )


def _open_eagle(opened: OpenModel, config: EngineConfig, folder: str) -> OpenHead:
    eagle = open_eagle(folder, opened.model)
    require_head_divisible(eagle.config.model, opened.ranks.size, shown(folder))
    return OpenHead(
        method=HeadKind.EAGLE3,
        name=shown(folder),
        mixers=(eagle.mixer,),
        kinds=(_measured(config, opened),),
        limit=config.max_model_len,
        least_bytes=_num_values(eagle.shapes) * config.compute_format.bytes,
        checkpoint=eagle.checkpoint,
        load=lambda model: eagle.load(config, model, opened.ranks),
    )


def _open_second(opened: OpenModel, config: EngineConfig, folder: str) -> OpenHead:
    second = open_model(_args_of(opened.args, folder, config))
    name = shown(folder)
    require_drafts_of(second.model, name)
    _check_vocabulary(opened, second, name)
    require_head_divisible(second.model, opened.ranks.size, name)
    limit = min(config.max_model_len, second.model.max_position_embeddings)
    args = replace(
        second.args, max_model_len=limit, tensor_parallel_size=opened.args.tensor_parallel_size
    )
    second = replace(second, args=args, ranks=opened.ranks, device=opened.device)
    of_second = second.resolve(second.args)

    def load(model: LanguageModel) -> DraftHead:
        decoder = second.load(of_second)
        assert isinstance(decoder, Decoder), "refused above"
        return SecondModel(decoder)

    layers = range(second.model.num_layers)
    return OpenHead(
        method=HeadKind.MODEL,
        name=name,
        mixers=tuple(layer.mixer for layer in second.model.layers),
        kinds=tuple(of_second.kv.of_layer(index) for index in layers),
        limit=limit,
        least_bytes=least_weight_bytes(second, of_second),
        checkpoint=second.checkpoint,
        load=load,
    )


def _args_of(args: EngineArgs, folder: str, config: EngineConfig) -> EngineArgs:
    """Return the options of a second model in `folder`: computed and cached as the first one is."""
    kv = config.kv
    scales = "auto"
    if kv.format.is_quantized:
        scales = "dynamic"
    return EngineArgs(
        model=folder,
        skip_tokenizer_init=args.skip_tokenizer_init,
        dtype=str(config.compute_format),
        quantization=args.quantization,
        activations=args.activations,
        kv_cache_dtype=str(kv.format),
        kv_scales=scales,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=args.block_size,
        speculate=0,
        device=args.device,
        kernels=args.kernels,
        threads=args.threads,
        seed=args.seed,
    )


def _check_vocabulary(first: OpenModel, second: OpenModel, name: str) -> None:
    """Raise ConfigError where a token id does not mean the same in both."""
    tokens = _tokens(first.load_tokenizer())
    try:
        drafted = _tokens(second.load_tokenizer())
    except CheckpointError as error:
        raise ConfigError(
            f"--speculative-config: the token ids of {name} cannot be compared with the model's: {error}"
        ) from error
    if not tokens or not drafted:
        if first.model.vocab_size != second.model.vocab_size:
            raise ConfigError(
                f"--speculative-config: {name} has {second.model.vocab_size:,} tokens and the model "
                f"{first.model.vocab_size:,}, and without both tokenizers they cannot be compared; use a model with "
                "the same vocabulary"
            )
        return
    differ = [token for token in tokens.keys() & drafted.keys() if tokens[token] != drafted[token]]
    if differ:
        token = min(differ)
        raise ConfigError(
            f"--speculative-config: {name} has another vocabulary: {len(differ):,} token ids mean something else, such "
            f"as {token}, {shown(tokens[token])} in the model and {shown(drafted[token])} there; use a model of "
            "the same family"
        )


def _tokens(tokenizer: Tokenizer | None) -> dict[int, str]:
    if tokenizer is None:
        return {}
    return {token: text for text, token in tokenizer.vocabulary().items()}


def with_head(spec: KVCacheSpec, head: OpenHead | None, compute: Format, ranks: int) -> KVCacheSpec:
    """Return the cache of a model and of the head behind its layers, in the blocks of those that keep
    every token: that of each of several `ranks`, as `spec`.
    """
    if head is None:
        return spec
    return with_layers(spec, head.mixers, head.kinds, compute, ranks)


def kv_with_head(kv: KVCacheConfig, num_layers: int) -> KVCacheConfig:
    """Return a cache's settings with those of a head's layers, which have no static scales; of
    `num_layers` layers in all.
    """
    if kv.scales is None:
        return kv
    added = (None,) * (num_layers - len(kv.scales.layers))
    scales: KVScales = replace(kv.scales, layers=kv.scales.layers + added)
    return replace(kv, scales=scales)


def head_runner(
    head: DraftHead,
    pool: KVPool,
    kernels: KernelSet,
    config: EngineConfig,
    leader: HeadLeader | None = None,
) -> HeadRunner:
    """Return what runs a head. pool: of the head's layers."""
    captured = None
    if isinstance(kernels, CpuKernels) and isinstance(head, SecondModel):
        rows = max(config.max_num_seqs, 1 + config.most_drafts)
        capture = CpuRecordings(head.decoder, pool, kernels, rows)
        captured = DecodeSteps(capture, pool, config.max_model_len, config.device)
    dtype = torch_dtype(config.compute_format)
    return HeadRunner(head, pool, config.device, dtype, captured, leader)


def drafting(
    runner: HeadRunner,
    opened: OpenHead,
    model: LanguageModel,
    kernels: KernelSet,
    config: EngineConfig,
) -> Drafting:
    """Return what drafts for `model`."""
    assert isinstance(model, Decoder), "refused where drafts are"
    cost = _bytes_of(runner.head.read) / _bytes_of((model.layers, model.head))
    logger.info(
        "drafts: up to %d a step, by %s, one pass of which reads %.2f times what the model's reads",
        config.most_drafts,
        opened.name,
        cost,
    )
    row = ROW
    if isinstance(kernels, CpuKernels) and not multiplies_bfloat16(kernels.library.build):
        row = FLOAT32_ROW
    if not pays(ASSUMED, cost, row):
        logger.warning(
            "%s will not draft: a pass of it and a row more in a step of the model cost more than a draft gains; use a "
            "smaller model",
            opened.name,
        )
    return Drafting(
        method=str(opened.method),
        runner=runner,
        vocab_size=model.config.vocab_size,
        limit=opened.limit,
        cost=cost,
        row=row,
    )


def _bytes_of(parts: object) -> int:
    return sum(held_tensors(parts).values())

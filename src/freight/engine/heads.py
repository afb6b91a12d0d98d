"""Heads that draft, from the settings to `Drafting`: opened and checked before weights are read."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from freight.cache.pool import KVPool
from freight.cache.spec import KVCacheSpec, LayerKVSpec, layer_spec
from freight.engine.decode_steps import DecodeSteps
from freight.engine.drafting import Drafting
from freight.engine.guesses import MOST_COST
from freight.engine.recordings import CpuRecordings
from freight.errors import CheckpointError, ConfigError, shown
from freight.fp8.scheme import KVScales
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.interface import KernelSet
from freight.model.decoder import Decoder, LanguageModel
from freight.model.draft_head import DraftHead
from freight.model.mixers.spec import PagedMixer
from freight.model.open import OpenModel, open_model
from freight.model.second_model import SecondModel
from freight.model.weight_bytes import weight_bytes
from freight.settings.engine import EngineArgs, EngineConfig, KVCacheConfig
from freight.settings.speculation import HeadKind, HeadSource
from freight.text.tokenizer import Tokenizer

logger = logging.getLogger("freight")


@dataclass(frozen=True)
class OpenHead:
    """A head that is opened and not loaded yet: the model that it is, with its settings."""

    opened: OpenModel
    config: EngineConfig

    def layers(self, first: int) -> tuple[LayerKVSpec, ...]:
        """Return the cache of its layers, which are numbered from `first` on, in the blocks of the layers
        that keep every token.
        """
        specs = []
        for index, layer in enumerate(self.opened.model.layers):
            kind = self.config.kv.of_layer(index)
            spec = layer_spec(layer.mixer, kind, self.config.compute_format)
            assert isinstance(spec, LayerKVSpec), "refused when it was opened"
            if spec.source is not None:
                spec = replace(spec, source=spec.source + first)
            specs.append(replace(spec, window=None))
        return tuple(specs)

    def load(self) -> DraftHead:
        """Read its weights."""
        decoder = self.opened.load(self.config)
        assert isinstance(decoder, Decoder), "refused when it was opened"
        return SecondModel(decoder)


def open_head(
    opened: OpenModel, config: EngineConfig, source: HeadSource, spec: KVCacheSpec
) -> OpenHead:
    """Open what drafts for a model. spec: of the model's own cache.

    Raises ConfigError, and CheckpointError for a folder at fault.
    """
    if not any(group.keeps_all and group.has_slots for group in spec.groups):
        raise ConfigError(
            f"--speculative-config: method {str(source.kind)!r} keeps its own keys in the blocks of layers that keep "
            f"every token, and this model ({opened.model.model_type}) has none; omit it"
        )
    assert source.kind is HeadKind.MODEL
    assert source.folder is not None
    second = open_model(_args_of(opened.args, source.folder, config))
    name = shown(source.folder)
    if second.model.foreign is not None:
        raise ConfigError(
            f"--speculative-config: {name} is of model_type {second.model.model_type!r}, which runs through "
            "transformers' modules; what drafts needs Freight's own decoder"
        )
    if not second.model.generates:
        raise ConfigError(f"--speculative-config: {name} gives no text, and so drafts nothing")
    for layer in second.model.layers:
        if not isinstance(layer.mixer, PagedMixer):
            raise ConfigError(
                f"--speculative-config: {name} ({second.model.model_type}) has layers that keep a state, which do not "
                "take back a draft; use a model of attention alone"
            )
    _check_vocabulary(opened, second, name)
    limit = min(config.max_model_len, second.model.max_position_embeddings)
    args = replace(second.args, max_model_len=limit)
    return OpenHead(replace(second, args=args), second.resolve(args))


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


def with_head(spec: KVCacheSpec, head: OpenHead | None) -> KVCacheSpec:
    """Return the cache of a model and of the head behind its layers."""
    if head is None:
        return spec
    return replace(spec, layers=spec.layers + head.layers(len(spec.layers)))


def kv_with_head(kv: KVCacheConfig, num_layers: int) -> KVCacheConfig:
    """Return a cache's settings with those of a head's layers, which have no static scales; of
    `num_layers` layers in all.
    """
    if kv.scales is None:
        return kv
    added = (None,) * (num_layers - len(kv.scales.layers))
    scales: KVScales = replace(kv.scales, layers=kv.scales.layers + added)
    return replace(kv, scales=scales)


def drafting(
    head: DraftHead,
    opened: OpenHead,
    pool: KVPool,
    model: LanguageModel,
    kernels: KernelSet,
    config: EngineConfig,
) -> Drafting:
    """Return what drafts for `model`. pool: of the head's layers."""
    captured = None
    assert isinstance(head, SecondModel)
    if isinstance(kernels, CpuKernels):
        rows = max(config.max_num_seqs, 1 + config.most_drafts)
        capture = CpuRecordings(head.decoder, pool, kernels, rows)
        captured = DecodeSteps(capture, pool, config.max_model_len, config.device)
    cost = weight_bytes(head.decoder).total / weight_bytes(model).total
    logger.info(
        "drafts: up to %d a step, by %s, one pass of which reads %.2f times what the model's reads",
        config.most_drafts,
        shown(opened.opened.args.model),
        cost,
    )
    if cost >= MOST_COST:
        logger.warning(
            "%s will hardly draft: one pass of it reads %.2f times what the model's reads, and from %.1f on that costs "
            "more than drafts gain; use a smaller model",
            shown(opened.opened.args.model),
            cost,
            MOST_COST,
        )
    return Drafting(
        head=head,
        pool=pool,
        captured=captured,
        device=config.device,
        vocab_size=model.config.vocab_size,
        limit=opened.config.max_model_len,
        cost=cost,
    )

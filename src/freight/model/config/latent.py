"""Latent attention (`LatentConfig`) in a config.json: the parts that its families share. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from freight.base.fields import JsonObject, flag, integer, number
from freight.errors import CheckpointError
from freight.model.config.family import words
from freight.model.config.model import ModelConfig, SparseConfig
from freight.model.config.rope import yarn_mscale
from freight.model.mixers.latent.spec import IndexerConfig, LatentConfig

LATENT_KEYS = words(
    "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim"
)
# `Family.fixed`: no published file has other values of these keys. `attention_bias` is false or
# absent: other values are not implemented.
LATENT_FIXED: Mapping[str, tuple[object, ...]] = {
    "rope_interleave": (True,),
    "attention_bias": (False,),
}
# keys of an indexer (`IndexerConfig`)
INDEXER_KEYS = words(
    "index_topk index_head_dim index_n_heads index_topk_freq index_topk_pattern "
    "index_skip_topk_offset index_share_for_mtp_iteration indexer_rope_interleave indexer_types "
    "layer_types"
)
INDEXED = "indexed_attention"  # in `layer_types`, as transformers writes them
INDEXER = (
    (
        "*.self_attn.indexer.*",
        "of an indexer: in contexts up to index_topk, sparse attention attends to all tokens",
    ),
)
# Whether a layer uses the choice of the one before
_KINDS = {"full": False, "F": False, "shared": True, "S": True}
_SHARE = "partial_rotary_factor"


def translate_latent(config: JsonObject, whole_heads: bool = False) -> JsonObject:
    """Return `config` with the heads that `parse_mixers` expects. Raises CheckpointError for heads
    of another size, and for a `rope_interleave` of null, which transformers reads as false.

    `whole_heads`: `head_dim` counts all channels of a head, and `partial_rotary_factor` is the
    share of rotated ones (Mistral 4). Otherwise `head_dim` counts the rotated channels only.
    """
    if config.get("rope_interleave", True) not in (True,):
        raise CheckpointError(
            f"config.json: rope_interleave = {config['rope_interleave']!r} is not implemented; true is, or no such key"
        )
    heads = integer(config, "num_attention_heads")
    rotated = integer(config, "qk_rope_head_dim")
    channels = integer(config, "qk_nope_head_dim") + rotated
    config = _without_share(config, rotated, channels) if whole_heads else config
    named = channels if whole_heads else rotated
    for key, expected in (
        ("num_key_value_heads", heads),
        ("head_dim", named),
        ("qk_head_dim", channels),
    ):
        if config.get(key) is not None and config[key] != expected:
            raise CheckpointError(
                f"config.json contradicts itself: {key} = {config[key]!r}, but latent attention with "
                f"num_attention_heads = {heads}, qk_nope_head_dim = {channels - rotated} and "
                f"qk_rope_head_dim = {rotated} has {expected}"
            )
    return {**config, "num_key_value_heads": heads, "head_dim": rotated}


def translate_indexed(config: JsonObject) -> JsonObject:
    """Translate like `translate_latent`, but drop `head_dim`, which transformers ignores here: it
    is 192 in GLM-5.2, where 64 channels are rotated.
    """
    return translate_latent({key: value for key, value in config.items() if key != "head_dim"})


def _without_share(config: JsonObject, rotated: int, channels: int) -> JsonObject:
    """Return `config` without `partial_rotary_factor`, in a rope or outside. Raises CheckpointError
    unless it equals `rotated` / `channels`.
    """
    reduced = dict(config)
    for where in ("", "rope_parameters", "rope_scaling"):
        part = reduced.get(where) if where else reduced
        if not isinstance(part, Mapping) or part.get(_SHARE) is None:
            continue
        # a thousandth of a channel: the share is a rounded decimal
        if abs(number(part, _SHARE) * channels - rotated) > 1e-3:
            raise CheckpointError(
                f"config.json contradicts itself: {_SHARE} = {part[_SHARE]!r}{f' in {where}' * bool(where)}, but "
                f"qk_rope_head_dim = {rotated} of the {channels} channels of a head are rotated"
            )
        remaining = {key: value for key, value in part.items() if key != _SHARE}
        reduced = {**reduced, where: remaining} if where else remaining
    return reduced


def refuse_tied(config: JsonObject) -> None:
    """Raise CheckpointError for tied embeddings, for families whose class in transformers always
    has a separate head.
    """
    if flag(config, "tie_word_embeddings"):
        raise CheckpointError(
            "config.json: tie_word_embeddings = True is not implemented for this model_type: transformers' class reads "
            "lm_head.weight all the same, and the publisher's takes the embedding; no published file has it"
        )


def with_latent(config: JsonObject, model: ModelConfig) -> ModelConfig:
    """Return `model` with latent attention in every layer."""
    mixer = latent_of(config)
    return replace(model, layers=tuple(replace(layer, mixer=mixer) for layer in model.layers))


def latent_of(config: JsonObject) -> LatentConfig:
    """Build the latent attention that the keys describe."""
    nope = integer(config, "qk_nope_head_dim")
    rotated = integer(config, "qk_rope_head_dim")
    return LatentConfig(
        num_heads=integer(config, "num_attention_heads"),
        q_rank=None if config.get("q_lora_rank") is None else integer(config, "q_lora_rank"),
        latent=integer(config, "kv_lora_rank"),
        nope=nope,
        rotated=rotated,
        head_size=integer(config, "v_head_dim"),
        softmax_scale=(nope + rotated) ** -0.5 * _sharper(config),
    )


def with_indexed(config: JsonObject, model: ModelConfig) -> ModelConfig:
    """Return `model` with latent attention in every layer, limited to contexts in which the sparse
    one attends to all tokens.
    """
    limit = integer(config, "index_topk")
    positions = model.max_position_embeddings
    return replace(
        with_latent(config, model),
        max_position_embeddings=min(positions, limit),
        dense_limit=limit,
        sparse=SparseConfig(_indexer(config), _chosen_by(config, model.num_layers), positions),
    )


def beyond_dense(model: ModelConfig) -> ModelConfig:
    """Return `model`, which has a `dense_limit`, for contexts beyond it: layers have the indexers of
    its `sparse`. Raises CheckpointError for one that is not implemented.
    """
    sparse = model.sparse
    assert sparse is not None
    size = sparse.indexer.head_dim
    layers = []
    for index, (layer, chosen_by) in enumerate(zip(model.layers, sparse.chosen_by, strict=True)):
        mixer = layer.mixer
        assert isinstance(mixer, LatentConfig)
        if size < mixer.rotated or size & (size - 1) or mixer.q_rank is None:
            raise CheckpointError(
                f"config.json: an indexer with index_head_dim = {size}, qk_rope_head_dim = {mixer.rotated} and "
                f"q_lora_rank = {mixer.q_rank} is not implemented; heads of a power of two channels, that are no "
                "fewer than the rotated ones, and a latent of q are"
            )
        indexer = sparse.indexer if chosen_by == index else None
        mixer = replace(mixer, indexer=indexer, chosen_by=chosen_by)
        layers.append(replace(layer, mixer=mixer))
    return replace(
        model,
        layers=tuple(layers),
        max_position_embeddings=sparse.max_position_embeddings,
        dense_limit=None,
    )


def _indexer(config: JsonObject) -> IndexerConfig:
    return IndexerConfig(
        num_heads=integer(config, "index_n_heads"),
        head_dim=integer(config, "index_head_dim"),
        topk=integer(config, "index_topk"),
        interleaved=flag(config, "indexer_rope_interleave"),
    )


def _chosen_by(config: JsonObject, num_layers: int) -> tuple[int, ...]:
    """Return for each layer the one whose indexer chooses its keys: the last layer that is 'full',
    up to itself.

    As transformers 5.23 (`GlmMoeDsaConfig`): `indexer_types`, else `index_topk_pattern`, whose
    letters are F and S, else every `index_topk_freq`-th layer from `index_skip_topk_offset` - 1 on is
    full, and those before.
    """
    types = config.get("indexer_types") or config.get("index_topk_pattern")
    if types is None:
        every = max(integer(config, "index_topk_freq", 1, least=0), 1)
        offset = integer(config, "index_skip_topk_offset", 2, least=0)
        types = ["FS"[max(i - offset + 1, 0) % every > 0] for i in range(num_layers)]
    chosen_by: list[int] = []
    kinds = [_KINDS.get(str(kind)) for kind in types] if isinstance(types, str | list) else []
    for index, shares in enumerate(kinds[:num_layers]):
        if shares is None or (shares and not chosen_by):
            break
        chosen_by.append(chosen_by[-1] if shares else index)
    if len(chosen_by) < num_layers:
        raise CheckpointError(
            f"config.json: the indexers of {num_layers} layers are {types!r}; each is 'full' or 'shared', or F or S "
            "in index_topk_pattern, and the first is full"
        )
    return tuple(chosen_by)


def _sharper(config: JsonObject) -> float:
    """Return the factor by which YaRN multiplies scores where it has `mscale_all_dim`; 1.0
    elsewhere.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping) or not rope.get("mscale_all_dim"):
        return 1.0
    return yarn_mscale(number(rope, "factor"), number(rope, "mscale_all_dim")) ** 2

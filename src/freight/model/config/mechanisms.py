"""Mechanisms of published models that Freight does not have, recognised by keys of a config.json.
Imports no torch.

A model type without a row is refused for its missing mechanism before transformers' modules are
tried. The error then names what is missing, and docs/models.md counts models by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from freight.base.fields import JsonObject, shortened
from freight.errors import CheckpointError

# where a config.json of several parts describes its decoder
_TEXTS = ("text_config", "llm_config", "language_config", "thinker_config")


@dataclass(frozen=True)
class Mechanism:
    """A mechanism and its signs in a config.json: `keys` that have a value, `prefixes` of such
    keys, or the rule `sign`.

    `excluded` returns True for a config.json in which `prefixes` show nothing.
    """

    name: str
    keys: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    sign: Callable[[JsonObject], str | None] | None = None
    excluded: Callable[[JsonObject], bool] = lambda config: False

    def key_in(self, config: JsonObject) -> str | None:
        """Return the key of `config` that shows this mechanism, None without one."""
        named = next((key for key in self.keys if config.get(key)), None)
        prefixes = () if self.excluded(config) else self.prefixes
        keys = [key for key, value in config.items() if value]
        begins = next((key for key in keys if key.startswith(prefixes)), None)
        return named or begins or (self.sign(config) if self.sign is not None else None)


def _kind(words: tuple[str, ...]) -> Callable[[JsonObject], str | None]:
    """Build a rule: the key that lists kinds of layers, if one of `words` is part of a kind."""

    def find(config: JsonObject) -> str | None:
        for key in ("layer_types", "layers_block_type"):
            kinds = config.get(key)
            if isinstance(kinds, list) and any(
                word in str(kind) for kind in kinds for word in words
            ):
                return key
        return None

    return find


def only_attention(config: JsonObject) -> bool:
    """Return whether every layer is listed and attends. If so, keys of recurrent layers describe
    none (Granite 4.0 350M).
    """
    kinds = config.get("layer_types") or config.get("layers_block_type")
    return isinstance(kinds, list) and all(
        "attention" in str(kind) and "linear" not in str(kind) for kind in kinds
    )


_recurrent_kind = _kind(("linear", "mamba", "conv", "recurrent", "delta"))
_sparse_kind = _kind(("sparse",))


def _sparse(config: JsonObject) -> str | None:
    sparse = config.get("sparse_attention_config")
    switched_on = isinstance(sparse, Mapping) and sparse.get("use_sparse_attention")
    return "sparse_attention_config" if switched_on else _sparse_kind(config)


def _chunked(config: JsonObject) -> str | None:
    """Return the key of chunked attention, for Llama 4 only: MiMo-V2's files have it too, and
    nothing reads it.
    """
    is_llama_4 = str(config.get("model_type")).startswith("llama4")
    if is_llama_4 and "attention_chunk_size" in config:
        return "attention_chunk_size"
    return None


def _linear_kinds(config: JsonObject) -> str | None:
    kinds = config.get("attn_type_list")  # of MiniMax: 0 is a linear layer
    return "attn_type_list" if isinstance(kinds, list) and 0 in kinds else None


def _alibi(config: JsonObject) -> str | None:
    attention = config.get("attn_config")  # of MPT
    if isinstance(attention, Mapping) and attention.get("alibi"):
        return "attn_config"
    return "model_type" if config.get("model_type") == "bloom" else None


MECHANISMS = (
    Mechanism("compressed keys and values (CSA, HCA)", ("compress_ratios", "compress_rates")),
    Mechanism(
        "sparse attention over keys that an indexer chooses (DSA, MSA)",
        ("index_topk", "indexer_budget"),
        sign=_sparse,
    ),
    Mechanism(
        "layers with a recurrent state (Mamba, linear attention)",
        (
            "linear_attn_config",
            "hybrid_override_pattern",
            "conv_L_cache",
            "conv_kernel",
            "state_size",
            "full_attention_interval",
        ),
        prefixes=("mamba_", "ssm_", "linear_num_", "linear_conv_"),
        sign=lambda config: _recurrent_kind(config) or _linear_kinds(config),
        excluded=only_attention,
    ),
    Mechanism("latent attention (MLA)", ("kv_lora_rank",)),
    Mechanism("layers that attend in chunks (Llama 4)", sign=_chunked),
    Mechanism(
        "blocks without attention, or of different widths (block_configs)", ("block_configs",)
    ),
    Mechanism("biases of scores by position (ALiBi)", ("alibi",), sign=_alibi),
    Mechanism(
        "an encoder, or cross attention",
        ("is_encoder_decoder", "add_cross_attention", "cross_attention_layers"),
    ),
)


# model types of encoders that Freight does not run -> what they have that it lacks; "": only a row
OTHER_ENCODERS: Mapping[str, str] = {
    "albert": "layers that share their weights",
    "deberta": "scores by relative positions (disentangled attention)",
    "deberta-v2": "scores by relative positions (disentangled attention)",
    "distilbert": "",
    "electra": "",
    "eurobert": "",
    "gte": "",
    "jina_embeddings_v3": "adapters by task within the model",
    "longformer": "attention in windows with global tokens",
    "mpnet": "scores by relative positions",
    "mt5": "an encoder with a decoder behind it, and scores by relative positions",
    "new": "code that the checkpoint brings along",
    "nomic_bert": "",
    "roberta-prelayernorm": "",
    "t5": "an encoder with a decoder behind it, and scores by relative positions",
    "t5gemma": "an encoder with a decoder behind it",
    "umt5": "an encoder with a decoder behind it, and scores by relative positions",
    "xlm-roberta-xl": "",
}


def refuse_other_encoders(model_type: object) -> None:
    """Raise CheckpointError for an encoder that `OTHER_ENCODERS` names."""
    if model_type in OTHER_ENCODERS:
        lacking = OTHER_ENCODERS[str(model_type)]
        needs = f": it needs {lacking}" if lacking else ""
        raise CheckpointError(
            f"config.json: model_type {model_type!r} is an encoder that Freight does not run{needs}. "
            "The encoders bert, roberta, xlm-roberta and modernbert run, and "
            "decoders that attend both ways, such as EmbeddingGemma; sentence-transformers runs this one"
        )


# model types without a public implementation to compare results with -> their models
UNCOMPARED: Mapping[str, str] = {
    "plamo3": "PLaMo 3",
    "bailing_moe": "Ling and Ring 1T",
    "step3p5": "Step-3.5",
}


# the same for architectures whose model_type has a row for another architecture
UNCOMPARED_ARCHITECTURES: Mapping[str, str] = {
    "BailingMoeV2_5ForCausalLM": "Ling 2.6 and Ring 2.6, with lightning attention",
}


def refuse_uncompared_architecture(architectures: object) -> None:
    """Raise CheckpointError for an architecture that `UNCOMPARED_ARCHITECTURES` names."""
    for name in architectures if isinstance(architectures, list) else ():
        if isinstance(name, str) and name in UNCOMPARED_ARCHITECTURES:
            raise CheckpointError(
                f"config.json: architecture {name!r} ({UNCOMPARED_ARCHITECTURES[name]}) is not implemented: no public "
                "implementation of it can be run to compare with. transformers has none, and code that a checkpoint "
                "brings along is never run"
            )


def refuse_uncompared(model_type: object) -> None:
    """Raise CheckpointError for a model that Freight could compute, but that has no public
    implementation to compare with.
    """
    if model_type in UNCOMPARED:
        raise CheckpointError(
            f"config.json: model_type {model_type!r} ({UNCOMPARED[str(model_type)]}) is not implemented: no public "
            "implementation of it can be run to compare with. transformers has no causal language model of this type, "
            "and code that a checkpoint brings along is never run"
        )


def missing_mechanisms(config: JsonObject) -> dict[str, str]:
    """Return {name of a mechanism: "KEY" or "text_config: KEY"} for all that the model needs and
    Freight does not have.
    """
    texts = [("", config)] + [
        (f"{key}: ", config[key]) for key in _TEXTS if isinstance(config.get(key), Mapping)
    ]
    missing: dict[str, str] = {}
    for where, text in texts:
        for mechanism in MECHANISMS:
            key = mechanism.key_in(text)
            if key is not None:
                missing.setdefault(mechanism.name, f"{where}{key} = {shortened(text.get(key))}")
    return missing


def refuse_mechanisms(config: JsonObject, model_type: object) -> None:
    """Raise CheckpointError for a model that needs a mechanism that Freight does not have."""
    missing = missing_mechanisms(config)
    if missing:
        listed = "; ".join(f"{name}: {key}" for name, key in missing.items())
        raise CheckpointError(
            f"config.json: model_type {model_type!r} needs what Freight does not have: {listed}"
        )

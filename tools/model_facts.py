"""Facts about families for docs/models.md (`models_table.py`), from the code and the tests.

No fact is typed here. Layers come from the configurations of tests/parity/variants.py, as Freight
reads them; comparisons come from the tables of the tests.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from freight.model.config.layer import DenseConfig, MoEConfig, NormKind, NormPlacement
from freight.model.config.model import ModelConfig
from freight.model.config.parse import parse_model_config
from freight.model.config.registry import FAMILIES
from freight.model.config.rope import QUERY_SCALING
from freight.model.mixers.attention.spec import NormPlace, NormSpan, QKNormConfig
from freight.model.mixers.latent.spec import LatentConfig
from freight.model.mixers.spec import PagedMixer
from freight.operands.activation import GatedActivation
from freight.operands.routing import Scoring

ROOT = Path(__file__).resolve().parent.parent

_ATTENTION = {
    "v_norm": "norm of v",
    "v_factor": "factor of v",
    "k_eq_v": "v is k",
    "kv_from": "layers that read the k and v of others",
    "qkv_bias": "biases of q, k, v",
    "o_bias": "bias of the output",
    "soft_cap": "soft cap",
    "sinks": "sinks",
    "output_gate": "gate of the output",
}
_SHAPE = frozenset(
    {"num_heads", "num_kv_heads", "k_dim", "v_dim", "softmax_scale", "window", "rope", "qk_norm"}
)
_EXPERTS = {
    "choice_bias": "bias for the choice",
    "router_bias": "bias of the router",
    "bias": "biases of experts",
    "parallel_experts": "experts and a dense part, summed",
    "latent_size": "experts in a smaller space",
}
_ROUTED = frozenset({"routing", "intermediate_size", "activation", "shared", "shared_gate"})
_SCORING = {
    Scoring.SOFTMAX: "softmax over all",
    Scoring.SIGMOID: "sigmoid",
    Scoring.CHOSEN: "softmax over the chosen",
}
_NORMS = {
    NormPlacement.PRE: "of inputs",
    NormPlacement.SANDWICH: "of inputs and outputs",
    NormPlacement.OUTPUT: "of outputs",
    NormPlacement.POST: "of sums",
}


@dataclass(frozen=True)
class Tables:
    """The tables of the tests, which decide whether a family counts as compared.

    same_weights   model types that transformers does not know -> one that computes the same from
                   the same weights
    states         models without a head, whose final states are compared
    same_states    model types that transformers does not know -> the one of `states` that computes the
                   same from the same weights
    targets        the GPUs that every Triton kernel is compiled for
    """

    variants: Mapping[str, Any]
    bfloat16: frozenset[str]
    equivalences: frozenset[str]
    fast_equivalences: frozenset[str]
    triton: frozenset[str]
    quantized: frozenset[str]
    expert_forms: Mapping[str, list[str]]
    same_weights: Mapping[str, str]
    states: Mapping[str, Any]
    same_states: Mapping[str, str]
    targets: tuple[str, ...]
    num_forms: int
    fast: frozenset[str]
    slow: frozenset[str]

    @cached_property
    def models(self) -> dict[str, ModelConfig]:
        """Each variant's config.json, as Freight reads it."""
        every = {**self.states, **self.variants}
        return {name: parse_model_config(config.to_dict()) for name, config in every.items()}

    def of(self, model_type: str) -> list[str]:
        """Return the variants of a model type."""
        return [name for name, config in self.variants.items() if config.model_type == model_type]

    def states_of(self, model_type: str) -> list[str]:
        """Return the models of a model type whose final states are compared."""
        same = self.same_states.get(model_type)
        if same is not None:
            return [same]
        return [name for name, config in self.states.items() if config.model_type == model_type]


def read_tests() -> Tables:
    """Read the tables from the modules of tests/."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))

    def module(name: str) -> Any:
        return importlib.import_module(f"tests.{name}")

    forms = module("formats.forms")
    experts = module("formats.experts")
    families = module("e2e.test_families")
    equivalences = module("e2e.test_equivalences")
    fallback = module("e2e.test_fallback")
    encoders = module("parity.test_encoders")
    triton = module("kernels.triton.test_triton_families").FAMILIES.values()
    return Tables(
        variants=module("parity.variants").VARIANTS,
        bfloat16=frozenset(module("parity.test_transformers").BFLOAT16),
        equivalences=frozenset(
            variant for variant, *_ in (*equivalences.SETUPS, *equivalences.EVERY)
        ),
        fast_equivalences=frozenset(equivalences.DIFFERENT),
        triton=frozenset(config.model_type for config in triton),
        quantized=frozenset(
            (
                *families.MODULES,
                *module("e2e.test_experts").KEPT,
                *module("unit.calibrate.test_every_family").EVERY,
            )
        ),
        expert_forms=_by_family({**experts.FORMS, **module("formats.mixtures").FORMS}),
        same_weights=module("parity.test_wrapped").SAME_WEIGHTS,
        states={**encoders.DECODERS, **encoders.ENCODERS},
        same_states=encoders.SAME_STATES,
        targets=module("kernels.triton.test_triton_compile").TARGETS,
        num_forms=len(forms.FORMS),
        fast=frozenset(fallback.FAST),
        slow=frozenset(fallback.SLOW),
    )


def _by_family(forms: Mapping[str, Any]) -> dict[str, list[str]]:
    results: dict[str, list[str]] = {}
    for name, form in forms.items():
        for family in form.families:
            results.setdefault(family, []).append(re.sub(r"^ct ", "compressed-tensors ", name))
    return results


def united(result: Sequence[Sequence[str]]) -> str:
    """Join the words of several models: first those that all have, then those that depend on the
    config.json.
    """
    every = list(dict.fromkeys(word for words in result for word in words))
    common = set(every).intersection(*result)
    always = [word for word in every if word in common]
    some = [word for word in every if word not in always]
    parts = [", ".join(always), f"by config: {', '.join(some)}" if some else ""]
    return "; ".join(part for part in parts if part)


def flags(config: object, known: Mapping[str, str], other: frozenset[str]) -> list[str]:
    """Return the fields of `config` that are set, in words; for a field that `known` lacks, its
    name.
    """
    names = [field.name for field in fields(config) if field.name not in other]  # type: ignore[arg-type]
    results = []
    for name in names:
        value = getattr(config, name)
        if value is not None and value is not False:
            results.append(known.get(name, name.replace("_", " ")))
    return results


def of_attention(model: ModelConfig) -> list[str]:
    mixers = list(model.attention.values())
    result = of_latents(model)
    windows = [mixer.window is not None for mixer in mixers]
    if any(windows):
        result.append("window" if all(windows) else "windows in some layers")
    ropes = {mixer.rope for mixer in mixers}
    if model.position_offset is None and None in ropes:
        result.append("layers without rope")
    if model.position_offset is not None:
        result.append("learned positions")
    if len(ropes - {None}) > 1:
        result.append("two ropes")
    for mixer in mixers:
        if mixer.rope is not None and model.position_offset is None:
            result += of_rope(model, mixer)
        result += of_qk_norm(mixer.qk_norm)
        result += flags(mixer, _ATTENTION, _SHAPE)
        if mixer.v_dim != mixer.k_dim:
            result.append("values of another width")
        if mixer.softmax_scale != mixer.k_dim**-0.5:
            result.append("another softmax scale")
    if len({(mixer.num_kv_heads, mixer.k_dim, mixer.v_dim) for mixer in mixers}) > 1:
        result.append("heads differ by layer")
    return list(dict.fromkeys(result))


def of_qk_norm(norm: QKNormConfig | None) -> list[str]:
    if norm is None:
        return []
    results = ["norms of q and k"]
    if norm.span is NormSpan.ALL_HEADS:
        results.append("over all heads at once")
    if norm.place is NormPlace.AFTER_ROPE:
        results.append("behind the rope")
    if not norm.weighted:
        results.append("without weights")
    return results


def of_latents(model: ModelConfig) -> list[str]:
    results = []
    for mixer in model.paged.values():
        if isinstance(mixer, LatentConfig):
            results += ["keys and values from a latent (MLA)"] + ["queries from another"] * (
                mixer.q_rank is not None
            )
            results += ["layers without rope"] if mixer.rope is None else of_rope(model, mixer)
            results += ["gate of the output"] * mixer.output_gate
    results += ["sparse beyond index_topk tokens (--kernels reference, slowly)"] * (
        model.dense_limit is not None
    )
    return list(dict.fromkeys(results))


def of_rope(model: ModelConfig, mixer: PagedMixer) -> list[str]:
    assert mixer.rope is not None
    rope = model.ropes[mixer.rope]
    results = [] if rope.kind == "default" else [f"{rope.kind} rope"]
    if rope.rotary_dim < mixer.k_dim:
        results.append("partial rope")
    if rope.interleaved:
        results.append("interleaved rope")
    if QUERY_SCALING in rope.parameters:
        results.append("query factor by position")
    return results


def of_feed_forward(model: ModelConfig) -> list[str]:
    parts = [layer.feed_forward for layer in model.layers if layer.feed_forward is not None]
    experts = [part for part in parts if isinstance(part, MoEConfig)]
    if not experts:
        return list(dict.fromkeys(word for part in parts for word in of_dense(part)))
    results = ["dense layers"] if len(experts) < len(parts) else []
    for part in experts:
        routing = part.routing
        results.append(_SCORING[routing.scoring])
        if routing.scoring is not Scoring.CHOSEN and routing.normed:
            results.append("normed weights")
        results += ["factor"] * (routing.factor != 1) + ["groups"] * (routing.num_groups > 1)
        results += flags(part, _EXPERTS, _ROUTED)
        if part.shared is not None:
            results.append("gated shared expert" if part.shared_gate else "shared expert")
        if part.activation != GatedActivation.SILU:
            results.append(activation_of(part))
    return list(dict.fromkeys(results))


def activation_of(part: DenseConfig | MoEConfig) -> str:
    gate = "" if isinstance(part.activation, GatedActivation) else ", no gate"
    return f"{str(part.activation).replace('_', ' ')}{gate}"


def of_dense(part: object) -> list[str]:
    if not isinstance(part, DenseConfig):
        return [type(part).__name__]
    return [activation_of(part), *(["biases"] if part.bias else [])]


def of_norms(model: ModelConfig) -> list[str]:
    norm = "LayerNorm" if model.norm_kind is NormKind.LAYER else "RMSNorm"
    kinds = dict.fromkeys(layer.norms for layer in model.layers)
    results = [f"{norm} {_NORMS.get(kind, str(kind))}" for kind in kinds]
    if model.norm_offset:
        results.append(f"{model.norm_offset:g} + weight")
    multiplied = {
        "embedding": model.embedding_multiplier is not None,
        "residual": model.residual_multiplier != 1,
        "logit": model.logit_divisor is not None,
    }
    results += [f"{name} multiplier" for name, there in multiplied.items() if there]
    apart = {
        "last weight as stored": not model.final_norm_offset,
        "another eps of outputs": model.post_norm_eps is not None,
        "norm of the embedding": model.embedding_norm,
    }
    results += [word for word, there in apart.items() if there]
    results += ["logit cap"] * (model.logit_soft_cap is not None) + ["projected embedding"] * bool(
        model.embedding_size
    )
    return results


def native_types() -> dict[str, list[str]]:
    """Return {model type with its own decoder: model types whose text model it is}.

    A text model that is published only within others is known by the first of these.
    """
    own: dict[str, list[str]] = {}
    for name in FAMILIES:
        texts = text_types(name)
        for text in texts:
            own.setdefault(text, [])
        if name not in texts:
            for text in texts:
                own[text].append(name)
    return own


def text_types(model_type: str) -> list[str]:
    """Return the names in `native_types` of a row's text model, and of the others that it may have."""
    family = FAMILIES[model_type]
    first = {item.text_type: name for name, item in reversed(FAMILIES.items())}
    texts = (
        (family.text_type, *family.other_texts) if family.text_type is not None else (model_type,)
    )
    return [text if text in FAMILIES else first[text] for text in texts]

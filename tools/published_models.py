"""Published models: those of tools/recipes.json, and of tests/fixtures/published/.

The verdict on a model whose config.json is there comes from that file; on any other it comes from
the model type and from the forms in which its weights are published. Reasons are the errors' texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from model_facts import ROOT, Tables, text_types

from freight.checkpoint.layouts import read_scheme
from freight.errors import CheckpointError, ConfigError
from freight.model.config.keys import find_family
from freight.model.config.mechanisms import MECHANISMS
from freight.model.config.parse import parse_model_config
from freight.model.config.registry import FAMILIES
from freight.model.fallback_probe import hf_config
from freight.model.open import read_model_config

RECIPES = ROOT / "tools/recipes.json"
FILES = ROOT / "tests/fixtures/published"  # OWNER--NAME.json
NATIVE = "natively"
FOREIGN = "through transformers"
REFUSED = "refused"

_UNKNOWN = "no row, and transformers does not know the model type"
_UNCOMPARED = "no public implementation of it can be run to compare with"
_NOT_THERE = "it is no causal language model there"
_NO_CAUSAL = "no row, and no causal language model in transformers"
_MXFP4_KEPT = (
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
)
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_DECLARED: Mapping[
    str, Mapping[str, Any]
] = {  # precision of a recipe -> the declaration of such a checkpoint
    "bf16": {},
    "fp8": {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
    "int4": {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4}},
        }
    },
    "nvfp4": {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
    "mxfp4": {
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [*_MXFP4_KEPT]}
    },
}


@dataclass(frozen=True)
class Verdict:
    """The way in which a model runs: NATIVE, FOREIGN or REFUSED, with the reasons."""

    runs: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Published:
    """A published model with its verdict. `moe` and `precisions` are those of its recipe.

    seen   its complete config.json, as published, is there
    """

    name: str
    model_type: str
    verdict: Verdict
    seen: bool
    text_type: str | None = None
    moe: bool = False
    precisions: tuple[str, ...] = ()

    @property
    def short_name(self) -> str:
        return self.name.partition("/")[2]

    @property
    def runs(self) -> bool:
        return self.verdict.runs != REFUSED

    @property
    def is_fp8(self) -> bool:
        return bool({"fp8", "mxfp8"} & set(self.precisions))

    @property
    def family(self) -> str:
        """The model type that it is listed under: that of its text model, if Freight has a row for
        it.
        """
        if self.model_type not in FAMILIES:
            return self.model_type
        return self.text_type or text_types(self.model_type)[0]


@cache
def published_files() -> dict[str, dict[str, Any]]:
    """Return {OWNER/NAME: config.json as published}."""
    return {
        file.stem.replace("--", "/", 1): json.loads(file.read_text())
        for file in sorted(FILES.glob("*.json"))
    }


def is_complete(config: Mapping[str, Any]) -> bool:
    """Return whether a collected config.json is complete.

    transformers writes its version into it, and nobody makes up an `auto_map`.
    """
    return not {"transformers_version", "auto_map"}.isdisjoint(config)


def read_file(config: Mapping[str, Any]) -> Verdict:
    """Return the code's verdict on a published config.json: on the model, and on the form of its
    weights.
    """
    try:
        model = read_model_config(config)
        read_scheme(config, None)
    except (CheckpointError, ConfigError) as error:
        return Verdict(REFUSED, reasons_of(error))
    return Verdict(NATIVE if model.foreign is None else FOREIGN)


def ask(
    model_type: str,
    tests: Tables,
    text_type: str | None = None,
    keys: Mapping[str, Any] | None = None,
    architecture: str | None = None,
) -> Verdict:
    """Return the code's verdict on a model type and one of its architectures.

    If its row, or the tests of the fallback, do not settle it, the default configuration of
    transformers is read, with `keys`.
    """
    try:
        if keys is None and model_type in FAMILIES:
            named = {} if architecture is None else {"architectures": [architecture]}
            _, family = find_family({"model_type": model_type, **named})
            if text_type is not None and text_type not in (family.text_type, *family.other_texts):
                parse_model_config(
                    {"model_type": model_type, "text_config": {"model_type": text_type}}
                )
            return Verdict(NATIVE)
        if model_type in tests.fast | tests.slow:
            return Verdict(FOREIGN)
        declared = {"model_type": model_type, **(keys or {})}
        config = hf_config(declared).to_dict() | {"architectures": None}
        result = read_model_config(
            {key: value for key, value in config.items() if value is not None}
        )
        return Verdict(NATIVE if result.foreign is None else FOREIGN)
    except (CheckpointError, ConfigError) as error:
        of_wrapper = Verdict(REFUSED, reasons_of(error))
    if text_type is not None and text_type not in FAMILIES:
        of_text = ask(text_type, tests)
        if of_text.runs == REFUSED and not {_NO_CAUSAL, _UNKNOWN} & {*of_text.reasons}:
            return of_text
    return of_wrapper


def reasons_of(error: Exception) -> tuple[str, ...]:
    """Return the mechanisms that an error names, else its reason without the way out."""
    message = " ".join(str(error).split())
    if "is an encoder that Freight does not run" in message:
        return ("an encoder, or cross attention",)
    return tuple(item.name for item in MECHANISMS if f"{item.name}: " in message) or (
        _in_short(message),
    )


def _in_short(message: str) -> str:
    if _UNCOMPARED in message:
        return _UNCOMPARED
    if _NOT_THERE in message:
        return _NO_CAUSAL
    if "does not know it" in message:
        own_code = re.search(r"\(auto_map .*?\)", message)
        return f"{_UNKNOWN} {own_code[0]}" if own_code else _UNKNOWN
    reason = message.partition("cannot be used: ")[2] or message.removeprefix("config.json: ")
    reason = reason.partition(". Model types that need")[0].partition("; ")[0]
    reason = re.sub(r" of type '\w+'", "", reason)  # the row names the model
    reason = re.sub(r" config_groups\['\w+'\]", "", reason)
    reason = re.sub(r" = \{.*(?:\}|\.\.\.)", "", reason)  # long values
    return reason.replace("|", "\\|")


def read_recipes(tests: Tables) -> tuple[dict[str, Any], list[Published]]:
    """Return (the content of recipes.json, its models with verdicts).

    A model whose file is not there counts as refused unless it has a checkpoint in a form that is
    read.
    """
    content = json.loads(RECIPES.read_text(encoding="utf-8"))
    by_type = cache(lambda entry: _of_type(json.loads(entry), tests))
    results = []
    for entry in content["models"]:
        precisions = tuple(entry["precisions"])
        config = published_files().get(entry["name"])
        if config is not None:
            results.append(of_file(entry["name"], config, entry["moe"], precisions))
            continue
        asked = {
            key: entry.get(key)
            for key in ("model_type", "text_type", "keys", "architecture", "precisions")
        }
        results.append(
            Published(
                entry["name"],
                entry["model_type"],
                verdict=by_type(json.dumps(asked)),
                seen=False,
                text_type=entry.get("text_type"),
                moe=entry["moe"],
                precisions=precisions,
            )
        )
    return content, results


def _of_type(entry: Mapping[str, Any], tests: Tables) -> Verdict:
    """Return the verdict by model type, and by the forms in which a recipe names it."""
    verdict = ask(
        entry["model_type"], tests, entry["text_type"], entry["keys"], entry["architecture"]
    )
    faults = [unreadable(item, entry["model_type"]) for item in entry["precisions"]]
    unread = [why for why in faults if why]
    if verdict.runs != REFUSED and len(unread) == len(entry["precisions"]):
        return Verdict(REFUSED, (unread[0],))
    return verdict


def read_others(recipes: Sequence[Published]) -> list[Published]:
    """Return the published files of models that the recipes do not have."""
    names = {recipe.name for recipe in recipes}
    return [
        of_file(name, config) for name, config in published_files().items() if name not in names
    ]


def of_file(
    name: str, config: Mapping[str, Any], moe: bool = False, precisions: tuple[str, ...] = ()
) -> Published:
    """Return the verdict on a model whose file is there."""
    verdict = read_file(config)
    seen = is_complete(config)
    return Published(name, config["model_type"], verdict, seen, _text_type(config), moe, precisions)


def _text_type(config: Mapping[str, Any]) -> str | None:
    """Return the model type of the text model within, if Freight has a row for it."""
    parts = [
        config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), Mapping)
    ]
    return next((part["model_type"] for part in parts if part.get("model_type") in FAMILIES), None)


def unreadable(precision: str, model_type: str) -> str | None:
    """Say why a checkpoint of this precision and model type is not read; None if it is."""
    if precision not in _DECLARED:
        return f"{precision} is not read"
    try:
        read_scheme({"model_type": model_type, **_DECLARED[precision]}, None)
    except CheckpointError as error:
        return reasons_of(error)[0]
    return None

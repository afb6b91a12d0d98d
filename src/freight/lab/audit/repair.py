"""Repair a checkpoint for an engine: store KV scales under names, and with a declaration, that the
engine's rules load.

The form is found with the rules themselves: of the forms that exist, the first under which the
engine uses every scale as it is stored, and of those the one that most of the other engines use
too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open

from freight.base.fields import JsonObject
from freight.checkpoint.kv_scales import is_shift, parse_scale_name
from freight.checkpoint.reader import Checkpoint
from freight.checkpoint.writer import CheckpointWriter, require_space
from freight.errors import CheckpointError, ConfigError
from freight.fp8.formats import Granularity
from freight.fp8.scheme import KVScales
from freight.lab.audit.effects import Facts, StoredScale, view
from freight.lab.audit.rules import NONE, Effect, Engine
from freight.quantizer.declare import declare
from freight.quantizer.plan import (
    ActivationScheme,
    Layout,
    QuantizePlan,
    WeightScheme,
)

NAMES = (
    "self_attn.{side}_scale",
    "self_attn.attn.{side}_scale",
    "self_attn.{side}_proj.{side}_scale",
)
_ATTENTION = re.compile(r"^(.*\blayers\.)\d+\.self_attn\.")
_KV_ONLY = QuantizePlan(
    weights=WeightScheme.NONE,
    activations=ActivationScheme.NONE,
    kv_granularity=Granularity.TENSOR,
    layout=Layout.COMPRESSED_TENSORS,
)


@dataclass(frozen=True)
class Form:
    """How the scales are stored: `names` has a place for the side; `declared` replaces the
    kv_cache_scheme.

    `method` is that of the repaired checkpoint: 'compressed-tensors' where it declared none.
    """

    names: str
    method: str
    engines: tuple[Engine, ...]

    def as_json(self) -> JsonObject:
        return {
            "names": self.names,
            "quant_method": self.method,
            "engines": list(self.engines),
        }


def choose_form(facts: Facts, scales: KVScales, engines: Sequence[tuple[Engine, str]]) -> Form:
    """Return the form that the first of `engines` uses in full. Raises ConfigError if there is
    none.
    """
    best: Form | None = None
    methods = (facts.method,) if facts.method != NONE else (NONE, "compressed-tensors")
    for method in methods:
        for names in NAMES:
            repaired = with_scales(facts, scales, names, method)
            served = tuple(
                engine for engine, version in engines if _uses(engine, version, repaired)
            )
            if engines[0][0] in served and (best is None or len(served) > len(best.engines)):
                best = Form(names, method, served)
    if best is None:
        raise ConfigError(
            f"--fix: no form of KV scales is known that {engines[0][0]} {engines[0][1]} loads for a {facts.model_type} "
            f"with quant_method {facts.method!r}; name another engine first with --engine"
        )
    return best


def with_scales(facts: Facts, scales: KVScales, names: str, method: str) -> Facts:
    """Return the facts of the checkpoint once `scales`, one number per layer and side, are stored
    under `names`.
    """
    stored: list[StoredScale] = []
    for index, layer in enumerate(scales.layers):
        if layer is None:
            continue
        for side, values in (("k", layer.k), ("v", layer.v)):
            name = f"layers.{index}.{names.format(side=side)}"
            stored.append(StoredScale(name, index, side, values))
    return replace(
        facts,
        method=method,
        strategy="tensor",
        declares_kv=True,
        stored=tuple(stored),
        rounded=(),
        scheme=None,
    )


def _uses(engine: Engine, version: str, facts: Facts) -> bool:
    return all(side.effect is Effect.USED for side in view(engine, version, facts).sides)


def write_repaired(checkpoint: Checkpoint, scales: KVScales, form: Form, out: Path) -> None:
    """Write the checkpoint into the new folder `out`, its KV scales replaced by `scales`; every
    other tensor as it is.

    Raises what CheckpointWriter raises, and CheckpointError for names in which no attention layer
    is found.
    """
    prefix = _prefix(checkpoint)
    names = sorted(
        name for name in checkpoint.names if parse_scale_name(name) is None and not is_shift(name)
    )
    require_space(out, sum(checkpoint.entry(name).size for name in names))
    files = {}
    hf_quant = checkpoint.path / "hf_quant_config.json"
    if hf_quant.is_file():
        files[hf_quant.name] = hf_quant.read_bytes()
    with CheckpointWriter(out) as writer:
        for name in names:
            with safe_open(checkpoint.entry(name).file, framework="pt") as handle:
                writer.add({name: handle.get_tensor(name)})
        for index, layer in enumerate(scales.layers):
            if layer is None:
                assert index in scales.unneeded, "repaired scales have every layer with attention"
                continue
            module = f"{prefix}{index}."
            pair = {}
            for side, values in (("k", layer.k), ("v", layer.v)):
                scale = torch.tensor([max(values)], dtype=torch.float32, device="cpu")
                pair[module + form.names.format(side=side)] = scale
            writer.add(pair)
        checkpoint.require_unchanged()
        writer.finish(
            _declared(checkpoint.config, form),
            checkpoint.path,
            {**checkpoint.other_files(), **files},
        )


def _prefix(checkpoint: Checkpoint) -> str:
    """'model.layers.' or what else stands before the number of a decoder layer."""
    prefixes = {match[1] for match in map(_ATTENTION.match, checkpoint.names) if match}
    text = sorted(
        (prefix for prefix in prefixes if "vis" not in prefix and "mtp" not in prefix), key=len
    )
    if not text:
        raise CheckpointError(
            f"{checkpoint.path}: no tensor is named layers.N.self_attn.…, so scales have no place"
        )
    return text[0]


def _declared(config: JsonObject, form: Form) -> JsonObject:
    """config.json of the repaired checkpoint: the declaration stays, but for that of the KV cache."""
    repaired = {key: value for key, value in config.items() if key != "freight"}
    if form.method == NONE:
        return repaired
    key = "compression_config" if "compression_config" in repaired else "quantization_config"
    new = declare({}, _KV_ONLY, ())["quantization_config"]
    if not isinstance(repaired.get(key), Mapping):
        return repaired if form.method == "modelopt" else {**repaired, "quantization_config": new}
    if form.method == "compressed-tensors":
        scheme: object = new["kv_cache_scheme"]
    elif form.method == "modelopt":
        scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    else:
        scheme = "static"
    return {**repaired, key: {**repaired[key], "kv_cache_scheme": scheme}}

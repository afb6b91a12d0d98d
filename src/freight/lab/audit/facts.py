"""What an engine's loader sees of a checkpoint: config.json, tensor names, and the values of its KV
scales.

It is read without Freight's model code, so that families which Freight does not run can be
audited as well.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from freight.base.fields import JsonObject, check_counts
from freight.checkpoint.headers import FORMAT_NAMES
from freight.checkpoint.kv_scales import is_other_part, parse_scale_name
from freight.checkpoint.open import open_files
from freight.checkpoint.reader import Checkpoint
from freight.errors import CheckpointError
from freight.fp8.cast import torch_dtype
from freight.lab.audit.effects import Facts, StoredScale
from freight.lab.audit.rules import NONE
from freight.lab.audit.schemes import KVScheme

_INPUTS = ("input_scale", "activation_scale", "act_scale", "qscale_act")
_QUERIES = (".q_scale", ".q_proj.output_scale")
# of projections of keys: alone, with those of values, and of latents
_KEYS = re.compile(
    r"layers\.(\d+)\.[\w.]*(?:attn|attention|mixer)[\w.]*\.(?:\w*k_?v?_proj|kv_a\w*|W?qkv\w*|\w*key\w*|wk)\."
)
_SIDES = {"k": 0, "v": 1, "kv": 2}  # engines that know both forms take separate scales first


def read_facts(path: Path) -> tuple[Checkpoint, Facts]:
    """Return the checkpoint in `path`, and its facts. Raises CheckpointError for a damaged folder,
    or one without a config.
    """
    checkpoint = open_files(path)
    config = checkpoint.config
    check_counts(config)
    text = config.get("text_config", config.get("llm_config"))
    inner: JsonObject = text if isinstance(text, Mapping) else config
    layers = _num_layers(inner)
    if not isinstance(layers, int) or layers < 1:
        raise CheckpointError(
            f"{path}/config.json: num_hidden_layers {layers!r} is not a number of layers"
        )
    declared = _declared(checkpoint)
    stored = []
    rounded = []
    for name in sorted(checkpoint.names):
        parsed = parse_scale_name(name)
        if parsed is None:
            continue
        # whatever its value: engines that take it report what is wrong with it
        tensor = checkpoint.copy(name).float().flatten()
        stored.append(StoredScale(name, parsed[0], parsed[1], tuple(map(float, tensor.tolist()))))
        if parsed[1] == "kv" and len(tensor) == 1:
            rounded.append((name, float(tensor.to(_model_dtype(inner)).float())))
    stored.sort(key=lambda scale: (scale.layer, _SIDES[scale.side], scale.name))
    strategy, declares = _kv_scheme(declared)
    inputs = Counter(name.rpartition(".")[2] for name in checkpoint.names if name.endswith(_INPUTS))
    facts = Facts(
        method=_method(declared),
        strategy=strategy,
        declares_kv=declares,
        model_type=str(inner.get("model_type", config.get("model_type"))),
        num_layers=layers,
        stored=tuple(stored),
        input_scales=tuple(sorted(inputs.items())),
        rounded=tuple(rounded),
        architecture=_architecture(config),
        scheme=_scheme(declared.get("kv_cache_scheme")),
        query_scales=sum(name.endswith(_QUERIES) for name in checkpoint.names),
        without_keys=_without_keys(checkpoint.names, layers),
    )
    return checkpoint, facts


def _num_layers(config: JsonObject) -> object:
    """Return the number of layers; where config.json does not say it, as many as it names kinds of
    layers (Nemotron-H).
    """
    kinds = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    count = len(kinds) if isinstance(kinds, list | str) else None
    return config.get("num_hidden_layers", count)


def _without_keys(names: Collection[str], num_layers: int) -> frozenset[int]:
    """Return the layers without a projection of keys, where others have one: they keep a state, or
    have no mixer at all.

    Kimi delta attention has such a projection, of keys that a state takes up: its module has
    decays, too.
    """
    stateful = {name.removesuffix(".A_log") for name in names if name.endswith(".A_log")}
    with_keys = set()
    for name in names:
        match = _KEYS.search(name)
        if match and not is_other_part(name) and name.rsplit(".", 2)[0] not in stateful:
            with_keys.add(int(match[1]))
    if not with_keys:
        return frozenset()
    return frozenset(range(num_layers)) - with_keys


def _declared(checkpoint: Checkpoint) -> JsonObject:
    """Return the declaration, in the order in which engines look for it; {} without one."""
    for key in ("quantization_config", "compression_config"):
        if isinstance(checkpoint.config.get(key), Mapping):
            config: JsonObject = checkpoint.config[key]
            return config
    other = checkpoint.hf_quant_config
    if other is not None and isinstance(other.get("quantization"), Mapping):
        return {"quant_method": "modelopt", **other["quantization"]}
    return {}


def _method(declared: JsonObject) -> str:
    method = str(declared.get("quant_method", NONE)).replace(
        "compressed_tensors", "compressed-tensors"
    )
    return "modelopt" if method.startswith("modelopt") else method


def _kv_scheme(declared: JsonObject) -> tuple[str, bool]:
    """(strategy, whether an FP8 cache is declared)."""
    scheme = declared.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        strategy = "dynamic" if scheme.get("dynamic") else str(scheme.get("strategy", "tensor"))
        return strategy, scheme.get("num_bits") == 8 and scheme.get("type") == "float"
    words = {str(scheme).upper(), str(declared.get("kv_cache_quant_algo")).upper()}
    named = bool(words & {"STATIC", "FP8"})  # NVFP4 and INT8 are other caches
    return ("tensor" if named else NONE), named


def _architecture(config: JsonObject) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _scheme(declared: object) -> KVScheme | None:
    if not isinstance(declared, Mapping):
        return None
    return KVScheme(*(declared.get(key) for key in ("type", "num_bits", "strategy", "symmetric")))


def _model_dtype(config: JsonObject) -> Any:
    name = {"bfloat16": "BF16", "float16": "F16"}.get(
        str(config.get("torch_dtype", config.get("dtype"))), "F32"
    )
    return torch_dtype(FORMAT_NAMES[name])

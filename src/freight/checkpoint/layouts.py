"""read_scheme: what a checkpoint declares about its quantization, by producer. Declarations only, no tensors.

Understood are `quant_method` fp8 (AutoFP8, Quark's vLLM export, DeepSeek's blocks, transformers), compressed-tensors
(llm-compressor), modelopt (NVIDIA), quark (AMD), fbgemm_fp8 and torchao, and the keys that Text Generation Inference
reads. What is declared and not implemented, such as an INT8 cache, is a CheckpointError, never a fall-back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from freight.errors import CheckpointError, choices
from freight.fp8.formats import Format
from freight.fp8.scheme import Scheme

_E4M3 = Format.E4M3FN  # what every producer stores; E4M3FNUZ is a matter of the device that reads it
_NAMED = {"float8_e4m3fn": Format.E4M3FN, "float8_e4m3fnuz": Format.E4M3FNUZ}
_NAMED |= {str(format): format for format in (Format.E4M3FN, Format.E4M3FNUZ)}


def read_scheme(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> Scheme:
    """The scheme that config.json, or ModelOpt's hf_quant_config.json, declares.

    Raises CheckpointError for an unknown method and for what is not FP8.
    """
    said = config.get("quantization_config") or config.get("compression_config")
    if said is None and hf_quant_config is not None:
        said = {"quant_method": "modelopt"}
    if said is None:
        return _described(_in_named_format(Scheme(), config))
    if not isinstance(said, Mapping):
        raise CheckpointError(f"config.json: quantization_config = {said!r} is no JSON object")
    method = said.get("quant_method")
    if method is None and "config_groups" in said:
        method = "compressed-tensors"  # files of 2024 do not say
    if not isinstance(method, str) or method not in _READERS:
        raise CheckpointError(f"quantization method {method!r} is not implemented; {choices(_READERS)} are")
    if method == "modelopt":  # config.json counts where both files speak
        said = {**((hf_quant_config or {}).get("quantization") or {}), **said}
    return _described(_in_named_format(_READERS[method](said), {**said, **config}))


def _described(scheme: Scheme) -> Scheme:
    """With `description` completed by what is said of the cache; readers put the weights there."""
    kv = f"KV cache {scheme.kv_format}, {'static scales' if scheme.kv_static else 'no static scales promised'}"
    parts = [scheme.description] * (scheme.weight_format is not None) + [kv] * (scheme.kv_format is not None)
    method = "" if scheme.method is None else f"{scheme.method}: "
    return replace(scheme, description=f"{method}{'; '.join(parts)}" if parts else f"{method}none")


def _in_named_format(scheme: Scheme, config: Mapping[str, Any]) -> Scheme:
    """With the format that scales were made for, where config.json says it, which also promises that there are some.

    The keys are `kv_cache_torch_dtype` (or, from the same tool, `kv_cache_dtype`) beside the model's own, and
    `kv_cache_format` within quantization_config.
    """
    keys = ("kv_cache_torch_dtype", "kv_cache_dtype", "kv_cache_format")
    said = {key: config[key] for key in keys if config.get(key) is not None}
    for key, name in said.items():
        if name not in _NAMED:
            raise CheckpointError(f"config.json: {key} = {name!r} is not implemented; {choices(_NAMED)} are")
    formats = {_NAMED[name] for name in said.values()}
    if len(formats) > 1:
        raise CheckpointError(
            f"config.json contradicts itself: {' but '.join(f'{k} = {v!r}' for k, v in said.items())}"
        )
    if not formats:
        return scheme
    return replace(scheme, kv_format=formats.pop(), kv_static=scheme.kv_static or scheme.kv_format is None)


def _fp8(said: Mapping[str, Any]) -> Scheme:
    """AutoFP8, Quark custom_mode fp8, DeepSeek, transformers' FineGrainedFP8: weights in E4M3, KV by one word."""
    if said.get("fmt", "e4m3") != "e4m3":
        raise CheckpointError(f"quant_method fp8 with fmt {said['fmt']!r} is not implemented; e4m3 is")
    blocks = said.get("weight_block_size")
    description = f"weights {_E4M3}, {f'scales per {blocks} block' if blocks else 'scales per tensor'}, "
    return _kv_scheme(
        said, Scheme("fp8", _E4M3, description=f"{description}activations {said.get('activation_scheme')}")
    )


def _compressed_tensors(said: Mapping[str, Any]) -> Scheme:
    for key in ("transform_config", "sparsity_config"):
        value = said.get(key) or {}
        if value and value.get("format", "dense" if key == "sparsity_config" else None) != "dense":
            raise CheckpointError(f"compressed-tensors with {key} = {value!r} is not implemented")
    weights = [group["weights"] for group in (said.get("config_groups") or {}).values() if group.get("weights")]
    for weight in weights:
        _require_fp8(weight, "compressed-tensors weights")
    kinds = sorted({str(weight.get("strategy", "tensor")) for weight in weights})
    description = f"weights {_E4M3}, scales per {choices(kinds)}" if kinds else "none"
    scheme = Scheme("compressed-tensors", _E4M3 if weights else None, description=description)
    return _kv_scheme(said, scheme)


def _modelopt(said: Mapping[str, Any]) -> Scheme:
    """NVIDIA ModelOpt. An FP8 cache may come without scales (its cast mode), so none are promised."""
    algo = said.get("quant_algo")
    algos = (
        {algo}
        if algo != "MIXED_PRECISION"
        else {layer.get("quant_algo") for layer in (said.get("quantized_layers") or {}).values()}
    )
    known = {"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"}
    for other in algos - {None}:
        if str(other).upper() not in known:
            raise CheckpointError(
                f"modelopt with quant_algo {other!r} is not implemented; {choices(sorted(known))} are"
            )
    weight_format = _E4M3 if algos - {None} else None
    scheme = Scheme("modelopt", weight_format, description=f"weights {_E4M3} ({algo})" if weight_format else "none")
    kv_algo = said.get("kv_cache_quant_algo")
    if kv_algo not in (None, "FP8"):
        raise CheckpointError(f"modelopt with kv_cache_quant_algo {kv_algo!r} is not implemented; FP8 is")
    if kv_algo == "FP8":
        return replace(scheme, kv_format=_E4M3)
    return replace(_kv_scheme(said, scheme), kv_static=False)


def _quark(said: Mapping[str, Any]) -> Scheme:
    """AMD Quark, native export: tensor specs by layer pattern; the cache is what k_proj and v_proj put out."""
    weight = (said.get("global_quant_config") or {}).get("weight")
    fake = (said.get("export") or {}).get("weight_format") == "fake_quantized"
    if weight is not None and not fake:
        _require_quark_fp8(weight, "weight")
        scheme = Scheme("quark", _E4M3, description=f"weights {_E4M3}, {weight['qscheme']}")
    else:
        scheme = Scheme("quark")
    for where, spec in _quark_kv_specs(said):
        _require_quark_fp8(spec, where, "per_tensor")
        scheme = replace(scheme, kv_format=_E4M3, kv_static=True)
    return scheme


def _quark_kv_specs(said: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in ("kv_cache_quant_config", "layer_quant_config"):
        for pattern, layer in (said.get(key) or {}).items():
            is_kv = key == "kv_cache_quant_config" or pattern.endswith(("k_proj", "v_proj"))
            if is_kv and isinstance(layer, Mapping) and layer.get("output_tensors"):
                yield f"{key}[{pattern!r}].output_tensors", layer["output_tensors"]


def _fbgemm(said: Mapping[str, Any]) -> Scheme:
    return Scheme("fbgemm_fp8", _E4M3, description=f"weights {_E4M3}, scales per row, activations dynamic")


def _torchao(said: Mapping[str, Any]) -> Scheme:
    quant_type = said.get("quant_type")
    default = quant_type.get("default") if isinstance(quant_type, Mapping) else quant_type
    kind = default.get("_type") if isinstance(default, Mapping) else default
    if "float8" not in str(kind).lower():
        raise CheckpointError(f"torchao with quant_type {kind!r} is not implemented; its Float8 types are")
    return Scheme("torchao", _E4M3, description=f"weights {_E4M3} ({kind})")


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "compressed_tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "quark": _quark,
    "fbgemm_fp8": _fbgemm,
    "torchao": _torchao,
}


def _kv_scheme(said: Mapping[str, Any], scheme: Scheme) -> Scheme:
    """`kv_cache_scheme`: the word 'static' (AutoFP8, Quark) or QuantizationArgs (compressed-tensors, ModelOpt)."""
    kv = said.get("kv_cache_scheme")
    if kv is None:
        return scheme
    if isinstance(kv, Mapping):
        _require_fp8(kv, "kv_cache_scheme")
        if kv.get("strategy", "tensor") not in ("tensor", "attn_head") or not kv.get("symmetric", True):
            raise CheckpointError(
                f"kv_cache_scheme with strategy {kv.get('strategy')!r} and symmetric {kv.get('symmetric', True)!r} "
                "is not implemented; symmetric 'tensor' and 'attn_head' are"
            )
        return replace(scheme, kv_format=_E4M3, kv_static=not kv.get("dynamic"))
    if kv != "static":
        raise CheckpointError(f"kv_cache_scheme = {kv!r} is not implemented; 'static' is")
    return replace(scheme, kv_format=_E4M3, kv_static=True)


def _require_fp8(spec: Mapping[str, Any], what: str) -> None:
    """QuantizationArgs must say 8 bits, float."""
    if spec.get("num_bits") != 8 or spec.get("type") != "float":
        said = f"num_bits {spec.get('num_bits')!r}, type {spec.get('type')!r}"
        raise CheckpointError(f"{what} of {said} is not implemented; FP8 (num_bits 8, type 'float') is")


def _require_quark_fp8(spec: Any, where: str, qscheme: str | None = None) -> None:
    said = spec if isinstance(spec, Mapping) else {}
    if said.get("dtype") != "fp8_e4m3" or said.get("qscheme") is None or qscheme not in (None, said.get("qscheme")):
        raise CheckpointError(
            f"quark {where} of dtype {said.get('dtype')!r}, qscheme {said.get('qscheme')!r} is not implemented; "
            f"fp8_e4m3{f', {qscheme}' if qscheme else ''} is"
        )

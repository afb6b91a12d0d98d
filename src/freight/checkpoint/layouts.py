"""Reader of a checkpoint's declared quantization. It reads no tensors, and imports no torch.

Supported are `quant_method` fp8 (AutoFP8, Quark's vLLM export, DeepSeek's blocks, transformers),
compressed-tensors (llm-compressor), modelopt (NVIDIA), quark (AMD), fbgemm_fp8, torchao, mxfp4, and
for weights in 4 bits gptq, awq and auto-round, each read in `producers/`, and the keys that Text Generation
Inference reads. A declared scheme that is not implemented, such as an INT8 cache, raises
CheckpointError; there is no fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from freight.base.fields import JsonObject
from freight.checkpoint.producers.auto_round import read_auto_round
from freight.checkpoint.producers.compressed_tensors import read_compressed_tensors
from freight.checkpoint.producers.fp8 import read_fbgemm, read_fp8
from freight.checkpoint.producers.gptq import read_awq, read_gptq
from freight.checkpoint.producers.modelopt import read_modelopt
from freight.checkpoint.producers.mxfp4 import read_mxfp4
from freight.checkpoint.producers.quark import read_quark
from freight.checkpoint.producers.torchao import read_torchao
from freight.checkpoint.producers.unread import refuse_bitsandbytes, refuse_hqq
from freight.errors import CheckpointError, choices
from freight.fp8.formats import Format
from freight.fp8.scheme import Scheme
from freight.model.config.dtype import TEXT_KEYS

_NAMED = {"float8_e4m3fn": Format.E4M3FN, "float8_e4m3fnuz": Format.E4M3FNUZ}
_NAMED |= {str(format): format for format in (Format.E4M3FN, Format.E4M3FNUZ)}

_READERS: Mapping[str, Callable[[JsonObject], Scheme]] = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "compressed_tensors": read_compressed_tensors,
    "modelopt": read_modelopt,
    "modelopt_mixed": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "quark": read_quark,
    "fbgemm_fp8": read_fbgemm,
    "torchao": read_torchao,
    "gptq": read_gptq,
    "awq": read_awq,
    "auto-round": read_auto_round,
    "mxfp4": read_mxfp4,
}
# Tools whose files are refused, each by what it declares
_UNREAD: Mapping[str, Callable[[JsonObject], NoReturn]] = {
    "hqq": refuse_hqq,
    "bitsandbytes": refuse_bitsandbytes,
}


def read_scheme(config: JsonObject, hf_quant_config: JsonObject | None) -> Scheme:
    """Read the scheme that config.json, or ModelOpt's hf_quant_config.json, declares.

    Raises CheckpointError for an unknown method and for what is not implemented.
    """
    declared = declaration(config)
    if declared is None and hf_quant_config is not None:
        declared = {"quant_method": "modelopt"}
    if declared is None:
        return _described(_in_named_format(Scheme(), config))
    if not isinstance(declared, Mapping):
        raise CheckpointError(
            f"config.json: quantization_config = {declared!r} is not a JSON object"
        )
    method = declared.get("quant_method")
    if method is None and "quant_algo" in declared:
        method = "modelopt"  # version 0.31 wrote config_groups and no quant_method
    if method is None and "config_groups" in declared:
        method = "compressed-tensors"  # files of 2024 have no quant_method
    if isinstance(method, str) and method in _UNREAD:
        _UNREAD[method](declared)
    if not isinstance(method, str) or method not in _READERS:
        raise CheckpointError(
            f"quantization method {method!r} is not implemented; {choices(_READERS)} are"
        )
    if method.startswith("modelopt"):  # config.json wins where both files have a key
        declared = {**_of_modelopt(hf_quant_config, "hf_quant_config.json"), **declared}
        declared = {**_of_modelopt(declared, "config.json"), **declared}
    both = {**declared, **config}
    of_model = {**declared, "model_type": config.get("model_type")}
    return _described(_in_named_format(_READERS[method](of_model), both))


def _of_modelopt(config: JsonObject | None, file: str) -> JsonObject:
    """Return what ModelOpt's `quantization` declares: in its own file, or, as it is published with
    some models, in the quantization_config of config.json.
    """
    quantization = (config or {}).get("quantization") or {}
    if not isinstance(quantization, Mapping):
        raise CheckpointError(f"{file}: quantization = {quantization!r} is not a JSON object")
    return quantization


def declaration(config: JsonObject) -> Any:
    """Return config.json's declaration of quantization, of the full model or else of its text
    model, where Kimi-K2.5 has it.

    None if there is none.
    """
    for part in (config, *map(config.get, TEXT_KEYS)):
        if isinstance(part, Mapping):
            declared = part.get("quantization_config") or part.get("compression_config")
            if declared:
                return declared
    return None


def _described(scheme: Scheme) -> Scheme:
    """Return `scheme` with its `description`: how Linear weights and the KV cache are quantized."""
    parts = [scheme.weights] if scheme.weights else []
    if scheme.kv_format is not None:
        promised = "static scales" if scheme.kv_static else "no static scales promised"
        parts.append(f"KV cache {scheme.kv_format}, {promised}")
    if scheme.kv_refused:
        parts.append(f"KV cache not implemented: {scheme.kv_refused}")
    description = "; ".join(parts) or "none"
    if scheme.method is not None:
        description = f"{scheme.method}: {description}"
    return replace(scheme, description=description)


def _in_named_format(scheme: Scheme, config: JsonObject) -> Scheme:
    """Return `scheme` with the E4M3 variant that config.json names for the KV scales, if it names
    one.

    A variant without a declared KV scheme also declares that the checkpoint has static scales. The
    keys are `kv_cache_torch_dtype` (or, from the same tool, `kv_cache_dtype`) among the
    model's of_file, and `kv_cache_format` within quantization_config.
    """
    declared = {}
    for key in ("kv_cache_torch_dtype", "kv_cache_dtype", "kv_cache_format"):
        name = config.get(key)
        if name is None:
            continue
        if name not in tuple(_NAMED):  # it may be a list
            raise CheckpointError(
                f"config.json: {key} = {name!r} is not implemented; {choices(_NAMED)} are"
            )
        declared[key] = name
    formats = {_NAMED[name] for name in declared.values()}
    if len(formats) > 1:
        named = " but ".join(f"{key} = {name!r}" for key, name in declared.items())
        raise CheckpointError(f"config.json contradicts itself: {named}")
    if not formats:
        return scheme
    return replace(
        scheme, kv_format=formats.pop(), kv_static=scheme.kv_static or scheme.kv_format is None
    )

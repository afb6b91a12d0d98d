"""Checks that reject what a device cannot compute, before any file of a model is read. Imports no
torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from freight.errors import ConfigError, choices, shown
from freight.fp8.formats import Format
from freight.model.mixers.spec import PagedMixer
from freight.settings.cpu_builds import (
    BUILD_VARIABLE,
    PREFIX,
    build_in,
    named_build,
    obstacles,
)
from freight.settings.device import DeviceFacts
from freight.settings.engine import TRITON, EngineArgs, KVCacheConfig
from freight.settings.kv_source import groups_fit


def interprets() -> bool:
    """Return whether Triton runs its kernels in its interpreter (TRITON_INTERPRET=1), slowly: the
    kernels for GPUs are tried so where there is none.
    """
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def computing_kind(device: DeviceFacts, kernels: str) -> str:
    """Return the kind of device whose kernels compute: 'cuda' as well for those that Triton
    interprets.
    """
    if kernels == TRITON:
        return "cuda"
    return str(device.kind)


def check_hardware(args: EngineArgs, compute: Format | None) -> None:
    """Reject options that the named device cannot compute. `compute` is the format of --dtype, None
    for 'auto'. Raises ConfigError.
    """
    _check_build(args.kernels, args.device)
    if args.kv_cache_dtype == Format.INT8 and args.device == "cuda" and args.kernels != "reference":
        raise _no_int8("--device cuda")
    if args.quantization == Format.INT8 and args.device == "cuda" and args.kernels != "reference":
        raise no_int8_weights("--device cuda")
    if args.kv_scales == "group" and args.device == "cuda" and args.kernels != "reference":
        raise _no_groups("--device cuda")
    if args.attention_compute == "fp8":
        if args.kv_scales == "group":
            raise _no_fp8_attention(
                "--kv-scales group: a product has one scale for a key; use --kv-scales dynamic"
            )
        stored = None
        if args.kv_cache_dtype in map(str, Format):
            stored = Format(args.kv_cache_dtype)
        problem = _attention_problem(compute, stored)
        if not problem and args.computes_on == "cpu" and args.kernels != "reference":
            problem = _ON_A_CPU
        if problem:
            raise _no_fp8_attention(problem)


def _check_build(kernels: str, device: str) -> None:
    """Raise ConfigError where --kernels names a build of the CPU kernels that cannot be used here."""
    build = build_in(kernels)
    if not build:
        return
    if device == "cuda":
        raise ConfigError(
            f"--kernels {kernels} with --device cuda: it is a build of the CPU kernels; use --device cpu, or omit "
            "--kernels"
        )
    named = named_build()
    if named not in ("", build):
        raise ConfigError(
            f"--kernels {kernels}, but {BUILD_VARIABLE} is {shown(named)}: give one of the two"
        )
    reasons = obstacles()
    if reasons[build]:
        usable = [PREFIX + other for other, reason in reasons.items() if not reason]
        raise ConfigError(
            f"--kernels {kernels} cannot be used here: {reasons[build]}; choose "
            f"{choices(('auto', 'reference', *usable))}"
        )


def check_kernels(kv: KVCacheConfig, device: DeviceFacts, kernels: str) -> None:
    """Raise ConfigError for a cache that the kernels for `device` do not have; `kernels` is
    --kernels.
    """
    if computing_kind(device, kernels) == "cpu" or kernels == "reference":
        return
    if kv.format is Format.INT8:
        raise _no_int8(device.name)
    if kv.grouped and not has_groups(device, kernels):
        raise _no_groups(device.name)


def has_groups(device: DeviceFacts, kernels: str) -> bool:
    """Return whether the kernels have latents with a scale per group; `kernels` is --kernels."""
    return computing_kind(device, kernels) == "cpu" or kernels == "reference"


def takes_groups(stored: Mapping[int, PagedMixer], args: EngineArgs, device: DeviceFacts) -> bool:
    """Return whether the layers `stored`, whose keys and values are quantized, can have scales per
    group on this device.
    """
    here = has_groups(device, args.kernels) and args.attention_compute != "fp8"
    return here and groups_fit(stored)


def _no_int8(device: str) -> ConfigError:
    return ConfigError(
        f"--kv-cache-dtype int8 on {device}: the kernels for GPUs have no INT8 cache; "
        "use --kv-cache-dtype fp8, --device cpu, or --kernels reference"
    )


def no_int8_weights(device: str) -> ConfigError:
    """Return the error for weights in INT8 on a GPU; `device` is its name, or the option's."""
    return ConfigError(
        f"weights in INT8 on {device}: the kernels for GPUs have no products in INT8; use FP8 (--quantization fp8 with "
        "the unquantized model), --device cpu, or --kernels reference"
    )


def no_four_bit_weights(device: str) -> ConfigError:
    """Return the error for weights in 4 bits with scales of groups on a GPU."""
    return ConfigError(
        f"weights in 4 bits on {device}: the kernels for GPUs have no products with them; use FP8 (--quantization fp8 "
        "with the unquantized model), or --device cpu"
    )


def _no_groups(device: str) -> ConfigError:
    return ConfigError(
        f"--kv-scales group on {device}: not on GPUs yet, whose kernels have one scale per token; "
        "use --kv-scales dynamic, --device cpu, or --kernels reference"
    )


_ON_A_CPU = (
    "a CPU, which has no FP8 products; --kernels reference computes it, slowly, to measure accuracy"
)


def _attention_problem(compute: Format | None, stored: Format | None) -> str:
    """Return why attention cannot multiply in FP8 with these formats, '' if it can. None is a
    format that is not known yet.
    """
    if stored is not None and not stored.is_e4m3:
        return f"a cache in {stored}: it multiplies stored E4M3 only; use --kv-cache-dtype fp8"
    if compute is Format.FLOAT32:
        return "--dtype float32, whose precision it would lose; use --dtype bfloat16 or float16"
    return ""


def _no_fp8_attention(problem: str) -> ConfigError:
    return ConfigError(f"--attention-compute fp8 with {problem}, or omit --attention-compute")


def fp8_attention(args: EngineArgs, compute: Format, stored: Format, device: DeviceFacts) -> bool:
    """Return whether attention multiplies FP8 by FP8. The reference kernels do it on any device, to
    measure its accuracy. Raises ConfigError if it was requested and cannot be done.
    """
    if args.attention_compute == "auto":
        return False
    problem = _attention_problem(compute, stored)
    if problem:
        raise _no_fp8_attention(problem)
    if args.kernels == "reference":
        return True
    if device.kind == "cpu":
        raise _no_fp8_attention(_ON_A_CPU)
    if not device.multiplies_fp8:
        raise _no_fp8_attention(f"{device.name}, which has no FP8 matrix units")
    if stored is not device.native_e4m3:
        multiplies = f"{device.name} multiplies {device.native_e4m3}; use --kv-cache-dtype fp8"
        raise _no_fp8_attention(f"a cache in {stored}: {multiplies}")
    return True


def int8_activations(args: EngineArgs, four_bits: bool, device: DeviceFacts) -> bool:
    """Return whether products with weights in 4 bits, or in a GGUF file's blocks, round their inputs
    to INT8 in groups: by default wherever there are such products.

    four_bits: whether the model has such weights. Raises ConfigError if it was requested and
    there are none, or the device has no such products.
    """
    has_products = computing_kind(device, args.kernels) == "cpu" or args.kernels == "reference"
    if args.activations != "int8":
        return args.activations == "auto" and four_bits and has_products
    if not four_bits:
        raise ConfigError(
            "--activations int8 is for weights in 4 bits and in a GGUF file's blocks, and this model has none: add "
            "--quantization int4, use --quantization int8, whose activations are in INT8 too, or omit it"
        )
    if not has_products:
        raise ConfigError(
            f"--activations int8 on {device.name}: the kernels for GPUs have no products with inputs in INT8; omit it, "
            "or use --device cpu"
        )
    return True

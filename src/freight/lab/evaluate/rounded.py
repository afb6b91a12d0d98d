"""A model's weights under the schemes of `freight quantize --weights`, made in memory as they are
read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freight.errors import ConfigError, choices
from freight.fp8 import mxfp4
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.fp8.four_bits import round_mxfp4
from freight.fp8.weights import quantize_blocks, quantize_rows, quantize_tensor
from freight.model.decoder import Decoder
from freight.model.loader import build_decoder, require_groups
from freight.model.open import OpenModel, open_model
from freight.model.sources import CheckpointSource, round_to_int4
from freight.operands.weight import Activations, Weight
from freight.quantizer.declare import scale_format
from freight.quantizer.plan import Layout
from freight.settings.engine import EngineConfig
from freight.settings.hardware import int8_activations

_GROUPS = {"int4": 128, "int4-64": 64, "int4-32": 32}  # inputs that share a scale
SCHEMES = ("fp8", "fp8-channel", "fp8-block", "int8", *_GROUPS, "mxfp4")
_A16 = "-a16"  # inputs of products stay in 16 bits
WEIGHT_ONLY = tuple(f"{scheme}{_A16}" for scheme in SCHEMES if scheme != "int8")


@dataclass(frozen=True)
class RoundedSource(CheckpointSource):
    """Rounds matrices, but not the head, to `weight_format` by `scheme`, with `activations`, or to 4
    bits, with what the kernels do there.
    """

    scheme: str = "fp8"
    activations: Activations = Activations.DYNAMIC
    scale_format: Format = Format.FLOAT32

    def _rounded(self, stored: Tensor) -> Weight:
        dtype = torch_dtype(self.compute_format)
        if self.scheme in _GROUPS:
            return round_to_int4(stored, dtype, _GROUPS[self.scheme])
        if self.scheme == "mxfp4":
            return _round_to_mxfp4(stored, dtype, self.keeps_mxfp4)
        quantize = {
            "fp8": quantize_tensor,
            "fp8-channel": quantize_rows,
            "fp8-block": quantize_blocks,
            "int8": quantize_rows,
        }[self.scheme]
        plain = stored.to(dtype)
        data, scale = quantize(plain, self.weight_format, self.scale_format)
        if scale.ndim == 0:
            scale = scale.expand(len(data)).contiguous()
        return Weight(data, scale, self.activations)


def _round_to_mxfp4(stored: Tensor, dtype: torch.dtype, keeps: bool) -> Weight:
    """Round a matrix to MXFP4, held so where kernels take it (`keeps`), else in `dtype`; one whose
    inputs groups do not divide becomes `dtype` unrounded.
    """
    if stored.shape[1] % mxfp4.GROUP:
        return Weight(stored.to(dtype).contiguous())
    codes, scales = round_mxfp4(stored)
    if keeps:
        return Weight(codes.view(mxfp4.CODES), scales.view(mxfp4.SCALES))
    blocks = codes.unflatten(1, (-1, mxfp4.GROUP // 2))
    return Weight(mxfp4.to_bfloat16(blocks, scales).to(dtype))


def require_names(flag: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raises ConfigError for one of `names` that is not known."""
    for name in names:
        if name not in known:
            raise ConfigError(f"{flag} {name!r} is unknown: choose among {choices(known)}")


def check_schemes(opened: OpenModel, schemes: tuple[str, ...], quantization: str | None) -> None:
    """Raises ConfigError for an unknown scheme, and where the weights are not in 16 or 32 bits."""
    if f"int8{_A16}" in schemes:
        raise ConfigError(
            "--weights int8-a16: kernels multiply weights in INT8 by inputs in INT8 alone; use int8, or "
            "fp8-channel-a16, 8 bits with inputs in 16 bits"
        )
    require_names("--weights", schemes, (*SCHEMES, *WEIGHT_ONLY))
    if schemes and opened.scheme.blocks:
        raise ConfigError(
            f"--weights {','.join(schemes)}, but the weights of {opened.args.model} are quantized already, in a GGUF "
            f"file; freight convert {opened.args.model} OUT writes a folder in 16 bits: evaluate OUT"
        )
    if schemes and (
        quantization is not None
        or opened.scheme.weight_format is not None
        or opened.checkpoint is None
    ):
        raise ConfigError(
            f"--weights {','.join(schemes)}, but the weights are quantized already, or asked to be; "
            "name the 16-bit model, without --quantization"
        )


def open_other(opened: OpenModel, folder: str) -> OpenModel:
    """Open another checkpoint of the model `opened`, such as one that was quantized, in `folder`.

    Raises ConfigError where it is not one of the same tokens and layers.
    """
    args = replace(
        opened.args,
        model=folder,
        revision=None,
        quantization=None,
        dtype=str(opened.model.checkpoint_format),
    )
    other = open_model(args)
    for what in ("model_type", "vocab_size", "num_layers", "hidden_size"):
        theirs = getattr(other.model, what)
        ours = getattr(opened.model, what)
        if theirs != ours:
            raise ConfigError(
                f"--weights {folder} is not a checkpoint of {opened.args.model}: its {what} is {theirs}, not {ours}; "
                "name one that was made from it"
            )
    return other


def load_rounded(
    opened: OpenModel, config: EngineConfig, scheme: str, num_positions: int
) -> Decoder:
    """Return the model with its weights under `scheme`, for `num_positions` as in `OpenModel.load`.

    Its 16-bit decoder has been loaded, so its tensors are checked.
    """
    assert opened.checkpoint is not None
    rounding = scheme.removesuffix(_A16)
    weight_only = rounding != scheme
    four_bits = rounding in _GROUPS or rounding == "mxfp4"
    integers = not weight_only and int8_activations(opened.args, four_bits, opened.device)
    kernels = opened.kernels(replace(config, int8_activations=integers))
    require_groups(kernels, {}, int4=rounding in _GROUPS)
    source = RoundedSource(
        opened.checkpoint,
        config.compute_format,
        Format.INT8 if rounding == "int8" else opened.device.native_e4m3,
        config.device,
        keeps_mxfp4=kernels.packs_mxfp4,
        scheme=rounding,
        activations=Activations.PLAIN if weight_only else Activations.DYNAMIC,
        scale_format=scale_format(Layout.COMPRESSED_TENSORS, opened.model.checkpoint_format),
    )
    model = opened.model.for_context(config.max_model_len)
    return build_decoder(model, source, kernels, num_positions, config.device)

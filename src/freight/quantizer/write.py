"""Write a checkpoint with its scales: every tensor once, in the model's order, quantized as
planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from freight.base.terminal import OnStage
from freight.checkpoint.extras import write_extras
from freight.checkpoint.mxfp4 import StoredExperts
from freight.checkpoint.reader import Checkpoint
from freight.checkpoint.writer import CheckpointWriter, require_space
from freight.errors import CheckpointError
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.fp8.four_bits import int4_scale_dtype, round_int4, round_mxfp4
from freight.fp8.weights import quantize_blocks, quantize_rows, quantize_tensor
from freight.model.config.model import ModelConfig
from freight.model.loader import tensor_shapes
from freight.quantizer.calibration import Calibration
from freight.quantizer.declare import (
    declare,
    four_bit_tensors,
    kv_tensors,
    scale_format,
    weight_tensors,
)
from freight.quantizer.modules import head_module, layer_modules, linear_modules
from freight.quantizer.other_parts import in_both_names, kv_twins, modules_beside, tensors_beside
from freight.quantizer.plan import QuantizePlan, WeightScheme

_ROUND = {
    WeightScheme.TENSOR: quantize_tensor,
    WeightScheme.CHANNEL: quantize_rows,
    WeightScheme.BLOCK: quantize_blocks,
    WeightScheme.INT8: quantize_rows,
}


def check_disk_space(checkpoint: Checkpoint, out: Path) -> None:
    """Raise CapacityError unless the disk of `out` has room for a copy of the checkpoint; the
    output is no larger.
    """
    require_space(out, sum(checkpoint.entry(name).size for name in checkpoint.names))


def write_quantized(
    checkpoint: Checkpoint,
    model: ModelConfig,
    plan: QuantizePlan,
    ignored: Sequence[str],
    calibration: Calibration,
    out: Path,
    on_progress: OnStage,
    packed: Mapping[str, StoredExperts],
    kv_scale_format: Format | None = None,
    overwrite: bool = False,
) -> tuple[int, int]:
    """Write `checkpoint`, which is unquantized, into the new folder `out`; return (bytes of tensors
    before, after).

    Experts in MXFP4, `packed` by the names of their tensors in 16 bits, are written as they are; so
    are the tensors of other parts than the text model (`quantizer.other_parts`).

    KV scales are stored in the scale format of `plan.layout`, unless `kv_scale_format` is given.
    With `overwrite`, `out` may be a folder that Freight wrote. Raises what CheckpointWriter raises,
    and CheckpointError for a weight that is NaN or infinite.
    """
    scales_in = scale_format(plan.layout, model.checkpoint_format)
    linear: set[str] = set()
    if plan.weights is not WeightScheme.NONE:
        linear = {*linear_modules(model), head_module(model)}.difference(ignored)
    of_others = tensors_beside(checkpoint, model)
    twins = kv_twins(model)
    others_in_16_bits = [
        module for module in modules_beside(of_others) if twins.get(module) not in linear
    ]
    ignored = in_both_names(model, (*ignored, *others_in_16_bits))
    shapes = tensor_shapes(model) | of_others
    others = checkpoint.other_files()  # first: an unknown tokenizer is refused before the work
    before = 0
    after = 0
    with CheckpointWriter(out, overwrite=overwrite) as writer:
        for done, (name, shape) in enumerate(shapes.items(), 1):
            module, _, kind = name.rpartition(".")
            like = twins.get(module, module)
            if name in packed:
                tensors = packed[name].stored(checkpoint)
            elif name in of_others and like not in linear:
                tensors = {name: checkpoint.copy(name)}
            else:
                tensors = {name: checkpoint.take(name, shape)}
            before += _num_bytes(tensors)
            if kind == "weight" and like in linear:
                input_scale = calibration.input_scales.get(like)
                tensors = _rounded(name, tensors[name], plan, scales_in, input_scale)
            elif name in tensors and checkpoint.block_format(name) is not None:
                tensors = {name: tensors[name].to(torch_dtype(model.checkpoint_format))}
            after += _num_bytes(tensors)
            writer.add(tensors)
            on_progress("writing", done, len(shapes))
        declared = declare(checkpoint.config, plan, ignored, keeps=bool(packed))
        files: dict[str, bytes] = {}
        modules = layer_modules(model)
        for index, mixer in model.paged.items():
            if calibration.kv is None or mixer.kv_from is not None:
                continue  # the layer stores no keys and values of its own
            layer = calibration.kv.layers[index]
            assert layer is not None
            writer.add(kv_tensors(plan, modules[index].mixer, layer, kv_scale_format or scales_in))
        if calibration.kv_finer is not None:
            named, files = write_extras(calibration.kv_finer)
            declared |= named
        checkpoint.require_unchanged()
        writer.finish(declared, checkpoint.path, {**others, **files})
    return before, after


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _rounded(
    name: str, weight: Tensor, plan: QuantizePlan, scales_in: Format, input_scale: float | None
) -> dict[str, Tensor]:
    """Round the matrix `name`; return its tensors."""
    if not bool(weight.isfinite().all()):
        raise CheckpointError(
            f"{name} has values that are NaN or infinite; a damaged checkpoint cannot be quantized"
        )
    module = name.rpartition(".")[0]
    if plan.weights.in_four_bits:
        if plan.weights is WeightScheme.MXFP4:
            codes, scales = round_mxfp4(weight)
        else:
            scales_dtype = int4_scale_dtype(weight.dtype)
            codes, scales = round_int4(weight, plan.group_size, scales_dtype)
        return four_bit_tensors(plan, module, codes, scales, weight.shape[1])
    data, scale = _ROUND[plan.weights](weight, plan.weight_format, scales_in)
    return weight_tensors(plan, module, data, scale, input_scale, scales_in)

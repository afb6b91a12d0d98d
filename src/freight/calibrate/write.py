"""Write a checkpoint with its scales: every tensor once, in the model's order, quantized as planned."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from freight.calibrate.modules import head_module, layer_modules, linear_modules
from freight.calibrate.run import Calibration, Progress
from freight.checkpoint.declare import declare, kv_tensors, scale_format, weight_tensors
from freight.checkpoint.extras import write_extras
from freight.checkpoint.mxfp4 import StoredExperts
from freight.checkpoint.reader import Checkpoint
from freight.checkpoint.writer import CheckpointWriter, require_space
from freight.config.model import ModelConfig
from freight.config.plan import QuantizePlan, WeightScheme
from freight.errors import CheckpointError
from freight.fp8.formats import Format
from freight.fp8.weights import quantize_blocks, quantize_rows, quantize_tensor
from freight.models.architectures import prediction_patterns
from freight.models.loader import tensor_shapes

_ROUND = {
    WeightScheme.TENSOR: quantize_tensor,
    WeightScheme.CHANNEL: quantize_rows,
    WeightScheme.BLOCK: quantize_blocks,
}


def check_disk_space(checkpoint: Checkpoint, out: Path) -> None:
    """Raises CapacityError unless the disk of `out` has room for a copy of the checkpoint; the output is no larger."""
    require_space(out, sum(checkpoint.entry(name).size for name in checkpoint.names))


def prediction_tensors(checkpoint: Checkpoint, model: ModelConfig) -> list[str]:
    """Tensors of layers that predict further tokens (`ModelConfig.prediction_layers`). They are never calibrated, as
    they do not run; a quantized checkpoint has them as they are, and names their modules among those in 16 bits.
    """
    return sorted(name for at in prediction_patterns(model) for name in fnmatch.filter(checkpoint.names, at))


def write_quantized(
    checkpoint: Checkpoint,
    model: ModelConfig,
    plan: QuantizePlan,
    ignored: Sequence[str],
    calibration: Calibration,
    out: Path,
    on_progress: Progress = lambda what, done, total: None,
    kv_scale_format: Format | None = None,
    overwrite: bool = False,
    packed: Mapping[str, StoredExperts] | None = None,
) -> tuple[int, int]:
    """Write `checkpoint`, which is unquantized, into the new folder `out`; (bytes of tensors before, after).

    Experts in MXFP4, `packed` by the names of their tensors in 16 bits, are written as they are.

    KV scales are stored in the scale format of `plan.layout`, unless `kv_scale_format` is given. With `overwrite`,
    `out` may be a folder that Freight wrote.
    Raises what CheckpointWriter raises, and CheckpointError for a weight that is NaN or infinite.
    """
    scales_in = scale_format(plan.layout, model.checkpoint_format)
    linear = {*linear_modules(model), head_module(model)} - set(ignored)
    carried = {name: checkpoint.shape_of(name) for name in prediction_tensors(checkpoint, model)}
    ignored = [*ignored, *(name.removesuffix(".weight") for name, shape in carried.items() if len(shape) > 1)]
    shapes = tensor_shapes(model) | carried
    packed = packed or {}
    before = after = 0
    with CheckpointWriter(out, overwrite=overwrite) as writer:
        for done, (name, shape) in enumerate(shapes.items(), 1):
            tensors = packed[name].stored(checkpoint) if name in packed else {name: checkpoint.take(name, shape)}
            before += sum(one.nbytes for one in tensors.values())
            module, _, kind = name.rpartition(".")
            if kind == "weight" and module in linear and plan.weights is not WeightScheme.NONE:
                _require_finite(name, tensors[name])
                data, scale = _ROUND[plan.weights](tensors[name], Format.E4M3FN, scales_in)
                tensors = weight_tensors(plan, module, data, scale, calibration.input_scales.get(module), scales_in)
            after += sum(one.nbytes for one in tensors.values())
            writer.add(tensors)
            on_progress("writing", done, len(shapes))
        declared = declare(checkpoint.config, plan, ignored, keeps=bool(packed))
        files: dict[str, bytes] = {}
        if calibration.kv is not None:
            of_layers = zip(layer_modules(model), model.layers, calibration.kv.layers, strict=True)
            for modules, described, layer in of_layers:
                assert layer is not None
                if described.mixer.kv_from is not None:
                    continue  # it stores none
                writer.add(kv_tensors(plan, modules.attention, layer, kv_scale_format or scales_in))
        if calibration.kv_finer is not None:
            named, files = write_extras(calibration.kv_finer)
            declared |= named
        writer.finish(declared, checkpoint.path, files)
    return before, after


def _require_finite(name: str, weight: Tensor) -> None:
    if not bool(weight.isfinite().all()):
        raise CheckpointError(f"{name} has values that are NaN or infinite; a damaged checkpoint cannot be quantized")

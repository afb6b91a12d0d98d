"""Write a checkpoint with its scales: every tensor once, in the model's order, quantized as
planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from freight.base.terminal import OnStage
from freight.checkpoint.extras import write_extras
from freight.checkpoint.headers import Shape
from freight.checkpoint.mxfp4 import StoredExperts
from freight.checkpoint.reader import Checkpoint
from freight.checkpoint.writer import CheckpointWriter, require_space
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.model.architectures import tensor_names
from freight.model.config.model import ModelConfig
from freight.model.loader import tensor_shapes
from freight.quantizer.calibration import Calibration
from freight.quantizer.changed_source import Change
from freight.quantizer.declare import (
    PlannedModules,
    declare,
    kv_tensors,
    scale_format,
    stored_tensors,
    with_own_head,
)
from freight.quantizer.modules import head_module, layer_modules, linear_modules
from freight.quantizer.other_parts import in_both_names, kv_twins, modules_beside, tensors_beside
from freight.quantizer.plan import QuantizePlan, WeightScheme
from freight.quantizer.rounding import RoundedMatrix, Rounding, require_finite


def _as_stored(name: str) -> Tensor | None:
    """Change nothing."""
    return None


def check_disk_space(checkpoint: Checkpoint, out: Path, copies: int = 1) -> None:
    """Raise CapacityError unless the disk of `out` has room for so many copies of the checkpoint; the
    output is no larger than one.
    """
    require_space(out, copies * sum(checkpoint.entry(name).size for name in checkpoint.names))


def rounding_of(plan: QuantizePlan, model: ModelConfig) -> Rounding:
    """Return how the matrices of a model are rounded."""
    stored = model.checkpoint_format
    return Rounding(plan, scale_format(plan.layout, stored), torch_dtype(stored))


class Matrices(Protocol):
    """Matrices that are rounded already."""

    def matrix(self, module: str) -> RoundedMatrix | None:
        """Return that of a module; None if there is none."""
        ...


@dataclass(frozen=True)
class _Written:
    """The tensors of a checkpoint as they are written.

    linear    modules whose matrix is quantized
    beside    tensors of other parts than the text model
    twins     modules of other parts -> those of the text model whose scales they have
    divisors  of NVFP4, by module
    plans     of modules that do not have `plan`
    """

    checkpoint: Checkpoint
    model: ModelConfig
    plan: QuantizePlan
    calibration: Calibration
    packed: Mapping[str, StoredExperts]
    layers: Matrices | None
    change: Change
    rounding: Rounding
    linear: frozenset[str]
    beside: frozenset[str]
    twins: Mapping[str, str]
    divisors: Mapping[str, Tensor]
    plans: Mapping[str, QuantizePlan]

    def tensors(self, name: str, shape: Shape) -> tuple[int, dict[str, Tensor]]:
        """Return (bytes of tensor `name` before, what it becomes)."""
        module, _, kind = name.rpartition(".")
        like = self.twins.get(module, module)
        changed = self.change(name)
        if changed is not None:
            dtype = self._dtype(name)
            before = changed.numel() * dtype.itemsize if name in self.checkpoint.names else 0
            if kind == "weight" and like in self.linear:
                return before, self._quantized(name, module, like, changed)
            return before, {name: changed.to(dtype)}
        if name in self.packed:
            tensors = self.packed[name].stored(self.checkpoint)
            return _num_bytes(tensors), tensors
        if name in self.beside and like not in self.linear:
            copied = {name: self.checkpoint.copy(name)}
            return _num_bytes(copied), copied
        stored = self.checkpoint.take(name, shape)
        if kind == "weight" and like in self.linear:
            return stored.nbytes, self._quantized(name, module, like, stored)
        if self.checkpoint.block_format(name) is not None:
            return stored.nbytes, {name: stored.to(self._dtype(name))}
        return stored.nbytes, {name: stored}

    def _dtype(self, name: str) -> torch.dtype:
        """Return the dtype that a tensor of 16 or 32 bits is written in."""
        checkpoint = self.checkpoint
        if name not in checkpoint.names or checkpoint.block_format(name) is not None:
            return torch_dtype(self.model.checkpoint_format)
        return torch_dtype(checkpoint.format_of(name))

    def _quantized(self, name: str, module: str, like: str, weight: Tensor) -> dict[str, Tensor]:
        """Return the tensors of the matrix `name`, rounded to nearest unless it is in `layers`."""
        matrix: RoundedMatrix | None = None
        if self.layers is not None:
            matrix = self.layers.matrix(like)
        if matrix is None:
            require_finite(name, weight)
            matrix = self.rounding.nearest(weight, divisor=self.divisors.get(module))
        input_scale = self.calibration.input_scales.get(like)
        plan = self.plans.get(like, self.plan)
        return stored_tensors(plan, module, matrix, input_scale, self.rounding.scale_format)


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
    layers: Matrices | None = None,
    change: Change = _as_stored,
    unties: bool = False,
    plans: Mapping[str, QuantizePlan] = MappingProxyType({}),
    report: Mapping[str, bytes] = MappingProxyType({}),
) -> tuple[int, int]:
    """Write `checkpoint`, which is unquantized, into the new folder `out`; return (bytes of tensors
    before, after).

    Experts in MXFP4, `packed` by the names of their tensors in 16 bits, are written as they are; so
    are the tensors of other parts than the text model (`quantizer.other_parts`).

    Matrices that are in `layers` are written as they are there; other tensors become what `change`
    gives before they are rounded. `unties`: the head, which was the embedding, is one of these.

    `plans`: those of modules, all in `layers`, whose numbers differ from those of `plan`; then of every
    module that is quantized. `report`: files that are written beside the model, by name.

    KV scales are stored in the scale format of `plan.layout`, unless `kv_scale_format` is given.
    With `overwrite`, `out` may be a folder that Freight wrote. Raises what CheckpointWriter raises,
    and CheckpointError for a weight that is NaN or infinite.
    """
    linear: frozenset[str] = frozenset()
    if plan.weights is not WeightScheme.NONE:
        linear = frozenset((*linear_modules(model), head_module(model))).difference(ignored)
    of_others = tensors_beside(checkpoint, model)
    twins = kv_twins(model)
    others_in_16_bits = [
        module for module in modules_beside(of_others) if twins.get(module) not in linear
    ]
    ignored = in_both_names(model, (*ignored, *others_in_16_bits))
    shapes = tensor_shapes(model) | of_others
    rounding = rounding_of(plan, model)
    written = _Written(
        checkpoint,
        model,
        plan,
        calibration,
        packed,
        layers,
        change,
        rounding,
        linear,
        frozenset(of_others),
        twins,
        _divisors(checkpoint, model, rounding, linear, change),
        plans,
    )
    others = checkpoint.other_files()  # first: an unknown tokenizer is refused before the work
    before = 0
    after = 0
    with CheckpointWriter(out, overwrite=overwrite) as writer:
        for done, (name, shape) in enumerate(shapes.items(), 1):
            num_bytes, tensors = written.tensors(name, shape)
            before += num_bytes
            after += _num_bytes(tensors)
            writer.add(tensors)
            on_progress("writing", done, len(shapes))
        mixed = planned_modules(model, plans)
        declared = declare(checkpoint.config, plan, ignored, keeps=bool(packed), mixed=mixed)
        if unties:
            declared = with_own_head(declared)
        files: dict[str, bytes] = {}
        modules = layer_modules(model)
        scales_in = kv_scale_format or rounding.scale_format
        for index, mixer in model.paged.items():
            if calibration.kv is None or mixer.kv_from is not None:
                continue  # the layer stores no keys and values of its own
            layer = calibration.kv.layers[index]
            assert layer is not None
            writer.add(kv_tensors(plan, modules[index].mixer, layer, scales_in))
        if calibration.kv_finer is not None:
            named, files = write_extras(calibration.kv_finer)
            declared |= named
        checkpoint.require_unchanged()
        writer.finish(declared, checkpoint.path, {**others, **files, **report})
    return before, after


def planned_modules(model: ModelConfig, plans: Mapping[str, QuantizePlan]) -> list[PlannedModules]:
    """Return the modules of each plan as expressions of their layers' numbers: other engines call a
    module by the name of the merged one that it is part of, and layers are whole. Those that are ignored in
    these layers are declared so by name, which comes before an expression.
    """
    layer, _, _ = tensor_names(model).layer.rpartition(".{}")
    _, _, part = layer.rpartition(".")
    by_plan: dict[QuantizePlan, list[int]] = {}
    for index, modules in enumerate(layer_modules(model)):
        of_layer = {plans[name] for group in modules.groups for name in group if name in plans}
        assert len(of_layer) <= 1, "the modules of a layer have one plan"
        for plan in of_layer:
            by_plan.setdefault(plan, []).append(index)
    planned = []
    for plan, layers in by_plan.items():
        numbers = "|".join(map(str, layers))
        planned.append(PlannedModules((rf"re:.*\b{part}\.(?:{numbers})\..*",), plan))
    return planned


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _divisors(
    checkpoint: Checkpoint,
    model: ModelConfig,
    rounding: Rounding,
    linear: frozenset[str],
    change: Change,
) -> dict[str, Tensor]:
    """Return the divisor of each matrix that is merged with others in NVFP4, by module: one for all
    that are merged, because engines take the largest for them. It takes reading these matrices once
    more.
    """
    divisors: dict[str, Tensor] = {}
    if rounding.plan.weights is not WeightScheme.NVFP4:
        return divisors
    shapes = tensor_shapes(model)
    for layer in layer_modules(model):
        for group in layer.merged:
            modules = [module for module in group if module in linear]
            if len(modules) < 2:
                continue
            largest = []
            for module in modules:
                name = f"{module}.weight"
                weight = change(name)
                if weight is None:
                    weight = checkpoint.take(name, shapes[name])
                largest.append(weight.abs().amax()[None])
            divisor = rounding.shared_divisor(largest)
            assert divisor is not None
            divisors |= dict.fromkeys(modules, divisor)
    return divisors

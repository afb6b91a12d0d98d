"""Experts that a checkpoint stores in another layout, presented under the hub's names.

transformers keeps all experts of a layer in two 3-D tensors, `mlp.experts.gate_up_proj` [experts, 2
* width, hidden] and `mlp.experts.down_proj` [experts, hidden, width], and saves them so when it is
asked not to restore the original format. Experts without a gate have `up_proj` instead. The scales
of its FP8 models are named after them (`gate_up_proj_scale_inv`). Qwen3-VL's files have the
transposed layout, [experts, hidden, 2 * width] and [experts, width, hidden]. transformers also
names Mixtral's modules like those of its other families. Loading, quantizing and inspecting always
see the separate matrices of `shapes.py`: each is read as a slice, and no stacked tensor is copied.

gpt-oss has 3-D tensors in which rows of gate and up alternate, and is loaded from them directly. In
FP8 its experts are separate matrices, under the names that llm-compressor gives them
(`ModelConfig.separate_experts`).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from freight.checkpoint.headers import Index, Shape
from freight.checkpoint.reader import Checkpoint
from freight.fp8.scheme import LinearScheme, Scheme
from freight.model.architectures import tensor_names
from freight.model.config.layer import MoEConfig
from freight.model.config.model import ModelConfig
from freight.model.config.tensor_names import TensorNames
from freight.model.shapes import tensor_shapes

_COMMON = TensorNames()
# Suffix after the name of a 3-D weight -> the tensor of one expert's module
_SUFFIXES = {
    "": "weight",
    "_scale_inv": "weight_scale_inv",
    "_scale": "weight_scale",
    "_weight_scale": "weight_scale",
    "_activation_scale": "activation_scale",
    "_input_scale": "input_scale",
}
_INPUTS = ("activation_scale", "input_scale")


def present_experts(checkpoint: Checkpoint, config: ModelConfig, scheme: Scheme) -> None:
    """Give the tensors of a mixture of experts the names of `tensor_shapes`.

    Raises CheckpointError for a 3-D tensor of another shape than config.json asks for, for scales
    that cannot be divided by expert and by gate and up, and for a matrix that is there in both
    forms.
    """
    names = tensor_names(config)
    if names.interleaved:
        return
    for index, layer in enumerate(config.layers):
        if isinstance(layer.feed_forward, MoEConfig):
            channels = layer.feed_forward.expert_channels(config.hidden_size)
            prefix = names.layer.format(index)
            present_layer(checkpoint, prefix, layer.feed_forward, channels, names, scheme)


def present_layer(
    checkpoint: Checkpoint,
    prefix: str,
    moe: MoEConfig,
    channels: int,
    names: TensorNames,
    scheme: Scheme,
) -> None:
    """Do `present_experts` for the layer whose tensors begin with `prefix`. channels: the width that
    an expert takes and returns.
    """
    _rename(checkpoint, prefix, moe, names)
    both = _stacked(prefix, moe, channels, names)
    turned = names.stacked_turned and any(_is_turned(checkpoint, stacked) for stacked in both)
    for stacked in both:
        _divide(checkpoint, stacked, scheme, turned)


def present_written(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Give modules that transformers saves under another name than the hub's files the hub's names
    (`TensorNames.also`), in layers that need such a module and do not have it.
    """
    names = tensor_names(config)
    shapes = tensor_shapes(config) if names.also else {}
    for index in range(config.num_layers) if names.also else ():
        prefix = names.layer.format(index)
        for written, native in names.also:
            if (
                f"{prefix}{native}.weight" not in shapes
                or f"{prefix}{native}.weight" in checkpoint.names
            ):
                continue
            module = prefix + written
            for stored in sorted(
                name for name in checkpoint.names if name.rpartition(".")[0] == module
            ):
                checkpoint.divide(
                    stored, {f"{prefix}{native}.{stored.rpartition('.')[2]}": ((), module)}
                )


def as_stored(config: ModelConfig, tensors: Collection[str]) -> ModelConfig:
    """Return `config` for a checkpoint that has `tensors`: with a layer's experts in one tensor, or
    as separate matrices.
    """
    separate_config = replace(config, separate_experts=True)
    if not tensor_names(config).interleaved:
        return config
    names = tensor_names(separate_config)
    first = (
        names.layer.format(index) + names.expert.format(0) for index in range(config.num_layers)
    )
    is_separate = any(f"{prefix}{names.expert_down}.weight" in tensors for prefix in first)
    return separate_config if is_separate else config


def separate(checkpoint: Checkpoint, config: ModelConfig) -> ModelConfig:
    """Present the experts of `checkpoint` as separate matrices, and return `config` for them.

    Gate, up and down of each expert are slices of the tensors [experts, inputs, outputs] and of
    their biases. Every layer must have such tensors, in 16 or 32 bits.
    """
    assert tensor_names(config).interleaved
    stored = tensor_names(config)
    separate_config = replace(config, separate_experts=True)
    own_names = tensor_names(separate_config)
    for index, layer in enumerate(config.layers):
        assert isinstance(layer.feed_forward, MoEConfig)
        prefix = stored.layer.format(index)
        for fused, modules in (
            (stored.expert_gate_up[0], own_names.expert_gate_up),
            (stored.expert_down, (own_names.expert_down,)),
        ):
            weights: dict[str, tuple[Index, str]] = {}
            biases: dict[str, tuple[Index, str]] = {}
            for expert in range(layer.feed_forward.num_experts):
                for number, part in enumerate(modules):
                    module = prefix + own_names.expert.format(expert) + part
                    columns = slice(number, None, len(modules)) if len(modules) > 1 else slice(None)
                    weights[f"{module}.weight"] = (expert, slice(None), columns), module
                    biases[f"{module}.bias"] = (expert, columns), module
            name = prefix + stored.expert + fused
            checkpoint.divide(name, weights, turned=True)
            if layer.feed_forward.bias:
                checkpoint.divide(f"{name}_bias", biases)
    return separate_config


def _rename(checkpoint: Checkpoint, prefix: str, moe: MoEConfig, names: TensorNames) -> None:
    """Rename modules that transformers names alike in all families to this family's names.

    llm-compressor restores the name of Mixtral's block, but not those of its projections, so names
    that are restored halfway are accepted too.
    """
    common = _common(names)
    halfway = replace(common, expert=names.expert)
    modules = {common.router: names.router}
    for expert in range(moe.num_experts):
        for source_names in (common, halfway):
            modules |= dict(
                zip(_modules(source_names, expert), _modules(names, expert), strict=True)
            )
    other = {prefix + its: prefix + native for its, native in modules.items() if its != native}
    for stored in sorted(checkpoint.names) if other else ():
        module, _, suffix = stored.rpartition(".")
        if module in other:
            checkpoint.divide(stored, {f"{other[module]}.{suffix}": ((), module)})


def _common(names: TensorNames) -> TensorNames:
    """Return transformers' names for the experts that `names` names; without a gate, those of up
    and down alone.
    """
    return replace(_COMMON, expert_gate_up=_COMMON.expert_gate_up[-len(names.expert_gate_up) :])


def _modules(names: TensorNames, expert: int) -> list[str]:
    """Return the names of gate, up and down of one expert, or of up and down."""
    return [
        names.expert.format(expert) + part for part in (*names.expert_gate_up, names.expert_down)
    ]


@dataclass(frozen=True)
class _Stacked:
    """One 3-D tensor. `modules`: those of each expert, in the order of their `rows`, as (own name,
    common name).
    """

    name: str
    rows: int
    columns: int
    modules: tuple[tuple[tuple[str, str], ...], ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.modules), len(self.modules[0]) * self.rows, self.columns


def _stacked(
    prefix: str, moe: MoEConfig, channels: int, names: TensorNames
) -> tuple[_Stacked, ...]:
    """Describe a layer's 3-D tensors: gate_up and down, or gate, up and down, or up and down.

    channels: the width that an expert takes and returns.
    """
    common = _common(names)
    modules: list[list[tuple[str, str]]] = []  # of each expert, in the order of `_modules`
    for expert in range(moe.num_experts):
        natives = [prefix + name for name in _modules(names, expert)]
        its = [prefix + name for name in _modules(common, expert)]
        modules.append(list(zip(natives, its, strict=True)))
    *before, down = [prefix + name for name in names.stacked]
    width = moe.intermediate_size
    each = len(moe.up_sizes) // len(before)  # modules of a tensor
    stacks = []
    for at, name in enumerate(before):
        part = slice(at * each, (at + 1) * each)
        of_experts = tuple(tuple(of_expert[part]) for of_expert in modules)
        stacks.append(_Stacked(name, width, channels, of_experts))
    last = tuple((of_expert[-1],) for of_expert in modules)
    return *stacks, _Stacked(down, channels, width, last)


def _is_turned(checkpoint: Checkpoint, stacked: _Stacked) -> bool:
    """Return whether the tensor is stored as [experts, inputs, outputs], by its shape.

    Of the two tensors of a layer, at most one has the same shape in both orders.
    """
    experts, outputs, inputs = stacked.shape
    turned = (experts, inputs, outputs)
    return (
        stacked.name in checkpoint.names
        and checkpoint.shape_of(stacked.name) == turned != stacked.shape
    )


def _divide(checkpoint: Checkpoint, stacked: _Stacked, scheme: Scheme, turned: bool) -> None:
    """Divide the weight and its scales by expert. `turned`: inputs come before outputs in all of
    them.
    """
    declared = scheme.linear(stacked.modules[0][0][1])
    for suffix, kind in _SUFFIXES.items():
        name = stacked.name + suffix
        if name not in checkpoint.names:
            continue
        shape = checkpoint.shape_of(name)
        exchanged = turned and len(shape) == 3
        shape = (shape[0], shape[2], shape[1]) if exchanged else shape
        if kind == "weight" and shape != stacked.shape:
            raise checkpoint.fault(
                f"{name} has shape {list(shape)}, config.json asks for {list(stacked.shape)}: "
                f"experts, outputs{' (of gate, then of up)' * (len(stacked.modules[0]) > 1)}, inputs"
            )
        if kind != "weight" and math.prod(shape) > 1 and shape[0] != len(stacked.modules):
            raise checkpoint.fault(
                f"{name} has shape {list(shape)}; one scale, or scales of {len(stacked.modules)} "
                "experts, can be read"
            )
        bands = _bands(checkpoint, name, shape, kind, stacked, declared)
        parts: dict[str, tuple[Index, str]] = {}
        for expert, modules in enumerate(stacked.modules):
            for number, (native, common) in enumerate(modules):
                index: Index = () if len(shape) == 0 or shape == (1,) else (expert,)
                if index and bands:
                    rows = slice(number * bands, (number + 1) * bands)
                    index = (expert, slice(None), rows) if exchanged else (expert, rows)
                parts[f"{native}.{kind}"] = index, common
        checkpoint.divide(name, parts, exchanged)


def _bands(
    checkpoint: Checkpoint,
    name: str,
    shape: Shape,
    kind: str,
    stacked: _Stacked,
    declared: LinearScheme | None,
) -> int:
    """Return how many entries of the second dimension belong to one module; 0 if all of them belong
    to each.

    Raises CheckpointError for a scale that covers rows of both gate and up.
    """
    modules = len(stacked.modules[0])
    if kind in _INPUTS or len(shape) < 2 or (modules > 1 and shape[1] == 1):
        return 0
    block = declared.block if declared is not None and kind != "weight" else None
    spans = block is not None and stacked.rows % block[0] and modules * stacked.rows > block[0]
    if shape[1] % modules or (modules > 1 and spans):
        raise checkpoint.fault(
            f"{name} has shape {list(shape)}: blocks of scales span gate and up ({stacked.rows} "
            "rows each); quantize with a scale per row, or store each expert's matrices by themselves"
        )
    return shape[1] // modules

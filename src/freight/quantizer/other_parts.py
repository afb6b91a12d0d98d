"""Tensors of a checkpoint outside of the text model that is quantized: of pictures and sound, of
adapters for these, of layers that predict further tokens.

They do not run here, so nothing of them is calibrated. A quantized checkpoint has each of them
under its name, with the bits and the dtype that it had, and names their Linear modules among those
that are not quantized, so that other engines run the whole model. One exception: keys and values of
layers that read those of another layer (`kv_twins`).
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping

from freight.checkpoint.headers import Shape
from freight.checkpoint.reader import Checkpoint
from freight.errors import CheckpointError
from freight.model.architectures import tensor_names
from freight.model.config.model import ModelConfig
from freight.model.mixers.attention.spec import AttentionNames
from freight.model.shapes import pooling_shapes
from freight.quantizer.modules import head_module, kept_modules

Shapes = Mapping[str, Shape]
# What engines read as a scale of the FP8 matrix of the same module
_SCALES = ("weight_scale", "weight_scale_inv", "input_scale", "activation_scale")


def tensors_beside(checkpoint: Checkpoint, model: ModelConfig) -> dict[str, Shape]:
    """Return the tensors that the text model does not need (`TensorNames.unused`), by name, with
    their shapes.
    """
    names: set[str] = set()
    for pattern, _ in tensor_names(model).unused:
        names.update(fnmatch.filter(checkpoint.names, pattern))
    if model.pooling is not None:  # of a head that scores, which is read
        names -= pooling_shapes(model.pooling).keys()
    return {name: checkpoint.shape_of(name) for name in sorted(names)}


def require_unquantized(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Raise CheckpointError for one that is in FP8 or less, or has the name of a scale of such a
    matrix: the written checkpoint says that their modules are not quantized.
    """
    for name in names:
        dtype = checkpoint.entry(name).dtype
        fault = ""
        if name.rpartition(".")[2] in _SCALES:
            fault = "has the name of a scale"
        elif dtype.startswith(("F8_", "F6_", "F4")):
            fault = f"is stored as {dtype}"
        if fault:
            raise CheckpointError(
                f"{checkpoint.path}: {name}, which is not of the text model, {fault}; tensors beside the text model "
                "are copied as they are, and have to be unquantized: quantize the 16-bit model that it was made from"
            )


def modules_beside(shapes: Shapes) -> list[str]:
    """Return the modules with a matrix, as Linear modules have."""
    modules = []
    for name, shape in shapes.items():
        if len(shape) == 2 and name.endswith(".weight"):
            modules.append(name.removesuffix(".weight"))
    return modules


def kv_twins(model: ModelConfig) -> dict[str, str]:
    """Map k and v of layers that read the keys and values of another layer to q of the same layer.

    Nothing uses these matrices, but engines merge q, k and v of every layer, and need one scheme
    for the three. So they are quantized where q is, with the input scale of q.
    """
    names = tensor_names(model)
    twins: dict[str, str] = {}
    for index, mixer in model.attention.items():
        if mixer.kv_from is not None:
            qkv = names.of(AttentionNames).qkv
            q, *k_and_v = [names.layer.format(index) + part for part in qkv]
            twins |= dict.fromkeys(k_and_v, q)
    return twins


def in_both_names(model: ModelConfig, modules: Iterable[str]) -> list[str]:
    """Return `modules` by their names in the checkpoint; then by those that transformers' classes
    give them, where these are others.

    A class for text and pictures has its parts under `model.` and its head outside, whatever older
    files call them, and transformers compares a list of modules with the names in the class.
    """
    stored = list(modules)
    if not model.architecture.endswith("ForConditionalGeneration"):
        return stored
    body = model.prefixes[0]
    head = head_module(model)
    always_kept = kept_modules(model)
    layers = tensor_names(model).layer.partition("{}")[0]

    def named(module: str) -> str:
        if module == head:
            return "lm_head"
        if module.startswith(layers) or module in always_kept:
            return f"model.language_model.{module.removeprefix(body)}"
        return module if module.startswith("model.") else f"model.{module}"

    return list(dict.fromkeys((*stored, *map(named, stored))))


def stored_formats(checkpoint: Checkpoint, model: ModelConfig) -> dict[str, int]:
    """Count the tensors that are copied as they are, by the name of their dtype."""
    twins = kv_twins(model)
    formats = Counter[str]()
    for name in tensors_beside(checkpoint, model):
        if name.rpartition(".")[0] not in twins:
            formats[checkpoint.entry(name).dtype_name] += 1
    return dict(formats.most_common())

"""A model as a tree of its modules, with the shape and format of each: what `print(model)` shows."""

from __future__ import annotations

from collections.abc import Collection

from freight.checkpoint.reader import Checkpoint
from freight.fp8.formats import Format
from freight.model.architectures import tensor_names
from freight.model.config.model import ModelConfig
from freight.model.loader import tensor_shapes
from freight.quantizer.modules import head_module, layer_modules, linear_modules
from freight.quantizer.plan import QuantizePlan, WeightScheme


def model_tree(
    checkpoint: Checkpoint, config: ModelConfig, plan: QuantizePlan | None, ignored: Collection[str]
) -> str:
    """Describe the model in lines of the form `(self_attn.q_proj): Linear(256 -> 256), bfloat16`;
    layers that are alike share theirs.

    With a plan, modules that are not `ignored` are shown as it quantizes them, else as they are
    stored.
    """
    prefix = tensor_names(config).layer
    prefixes = [prefix.format(index) for index in range(config.num_layers)]
    linear = {*linear_modules(config), head_module(config)}
    quantized: set[str] = set()
    if plan is not None and plan.weights is not WeightScheme.NONE:
        quantized = linear.difference(ignored)
    names = _shown_names(config)
    outside: list[str] = []
    layers: list[list[str]] = [[] for _ in prefixes]
    for name, shape in tensor_shapes(config).items():
        module, _, kind = name.rpartition(".")
        label = names.get(module, module)
        if not label:
            continue  # like the first of the layer
        if kind != "weight":
            label += f".{kind}"
        content = str(list(shape))
        format = checkpoint.entry(name).dtype_name
        if module in linear and kind == "weight":
            content = f"Linear({shape[1]} -> {shape[0]})"
            if plan is not None and module in quantized:
                format = f"{plan.weight_format}, inputs {plan.activations}"
        lines = outside
        for start, of_layer in zip(prefixes, layers, strict=True):
            if name.startswith(start):
                lines = of_layer
                label = label.removeprefix(start)
                break
        lines.append(f"({label}): {content}, {format}")
    if plan is not None and plan.kv_granularity is not None:
        for lines in layers:
            lines.append(f"(KV cache): {Format.E4M3FN}, a scale per {plan.kv_granularity}")
    body = [*outside[:1], *_folded(prefix.format("").strip("."), layers), *outside[1:]]
    return "\n".join([f"{config.architecture}(", *(f"  {line}" for line in body), ")"])


def _shown_names(config: ModelConfig) -> dict[str, str]:
    """Return the names of experts' modules as they are shown: those of a layer's first expert stand
    for all of them, and the others have ''.
    """
    names: dict[str, str] = {}
    for layer in layer_modules(config):
        experts = layer.experts
        if experts is None:
            continue
        first = experts.named(0)
        for module in experts.matrices:
            names[module] = ""
            if module.rpartition(".")[0] == first:
                names[module] = module.replace(first, f"{first}-{experts.count - 1}", 1)
    return names


def _folded(name: str, layers: list[list[str]]) -> list[str]:
    """Return the lines of the layers, those that follow each other and are alike as one."""
    lines = [f"({name}): ("]
    start = 0
    for index in range(1, len(layers) + 1):
        if index == len(layers) or layers[index] != layers[start]:
            span = f"({start}):"
            if index - start > 1:
                span = f"({start}-{index - 1}): {index - start} x"
            lines += [f"  {span} (", *(f"    {line}" for line in layers[start]), "  )"]
            start = index
    return [*lines, ")"]

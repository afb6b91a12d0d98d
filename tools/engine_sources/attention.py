"""Where a model's attention has its scales: the path of its attention module within a layer, and
whether it gets a quantization configuration. Read from what the classes assign to themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from engine_sources.modules import ClassRef

KERNELS = frozenset(
    {"RadixAttention", "Attention", "attn_cls", "EncoderOnlyAttention", "UnifiedRadixAttention"}
)
LAYER_NAMES = ("self_attn", "self_attention", "attn", "attention", "mixer")


@dataclass(frozen=True)
class AttentionPath:
    """'self_attn' and 'attn' of `model.layers.0.self_attn.attn`; `quantized`: the layer is given a
    configuration.
    """

    outer: str
    inner: str
    quantized: bool


def reachable(start: ClassRef) -> list[ClassRef]:
    """Return the classes of the tree that `start` refers to, and those that they refer to."""
    results = [start]
    waiting = [start]
    while waiting:
        cls = waiting.pop()
        for name in sorted(cls.referred):
            other = cls.module.resolve_expression(ast.Name(name))
            if isinstance(other, ClassRef) and other not in results and _is_of_models(other):
                results.append(other)
                waiting.append(other)
    return results


def _is_of_models(cls: ClassRef) -> bool:
    return ".models" in cls.module.name


def attention_paths(start: ClassRef) -> frozenset[AttentionPath]:
    """Return every place of an attention kernel in the model; empty if none was found.

    A model that defines layers of its own gives them to the model that it inherits from, so where
    the two differ in what they pass on, those of the file of `start` count.
    """
    classes = reachable(start)
    result = _paths(classes)
    if len({(item.outer, item.inner) for item in result}) < len(result):
        return _paths([item for item in classes if item.module is start.module]) or result
    return result


def _paths(classes: list[ClassRef]) -> frozenset[AttentionPath]:
    inner = {cls: result for cls in classes if (result := list(_kernels(cls)))}
    paths = set()
    for cls in classes:
        for attribute, value in _assigned(cls):
            created = _created(value, cls)
            for attention in created & inner.keys():
                paths |= {
                    AttentionPath(attribute, name, quantized)
                    for name, quantized in inner[attention]
                }
    if not paths:  # the class is chosen at run time: its usual names
        names = {attribute for cls in classes for attribute, _ in _assigned(cls)} & set(LAYER_NAMES)
        kernels = {item for result in inner.values() for item in result}
        for outer in names:
            paths |= {AttentionPath(outer, *kernel) for kernel in kernels if kernel[0] != outer}
    return frozenset(paths)


def _assigned(cls: ClassRef) -> Iterable[tuple[str, ast.expr]]:
    for item in cls.mro:
        for attribute, result in item.assignments.items():
            yield from ((attribute, value) for value, _ in result)


def _kernels(cls: ClassRef) -> Iterable[tuple[str, bool]]:
    for attribute, value in _assigned(cls):
        for call in ast.walk(value):
            if not isinstance(call, ast.Call):
                continue
            callee = cls.module.resolve_expression(call.func)
            if isinstance(callee, ClassRef):
                names = callee.base_names
            else:
                names = frozenset({ast.unparse(call.func).rpartition(".")[2]})
            # Of the tree's classes named *Attention, those in models/ hold a kernel and are none.
            if names & KERNELS and not (
                isinstance(callee, ClassRef) and _is_of_models(callee) and not _extends(callee)
            ):
                given = {keyword.arg for keyword in call.keywords}
                yield attribute, bool(given & {"quant_config", None})


def _extends(cls: ClassRef) -> bool:
    return any(item.name in KERNELS and not _is_of_models(item) for item in cls.mro)


def _created(value: ast.expr, cls: ClassRef) -> set[ClassRef]:
    """Return the classes that an expression may create, and the ones that those inherit from."""
    results = set()
    for node in ast.walk(value):
        if isinstance(node, ast.Call | ast.Name):
            callee = cls.module.resolve_expression(
                node.func if isinstance(node, ast.Call) else node
            )
            if isinstance(callee, ClassRef):
                results.add(callee)
    return results

"""TGI: which class serves a model_type, whether its attention asks for KV scales, and under which
names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_sources.attention import reachable
from engine_sources.interpreter import Interpreter
from engine_sources.modules import ClassRef, FunctionRef, Tree
from engine_sources.outcome import FORMS, Outcome, undecided
from engine_sources.values import UNKNOWN, Bound, Parameters

ASKS = "get_kv_scales"
PREFIX = "model.layers.0"


class _Weights:
    """TGI's `weights`, of which the names of one form alone are known; `read` are those that were
    taken.
    """

    def __init__(self, names: set[str]) -> None:
        self.read = dict[str, bool]()
        self.names = names


def tgi_families(root: Path) -> dict[str, dict[str, dict[str, Outcome]]]:
    """Return {model_type: {'any': {form: outcome}}}, of those with a class of TGI's that runs with
    FlashAttention.
    """
    tree = Tree(root / "server", "text_generation_server")
    models = tree.module("text_generation_server.models")
    getter = models.resolve("get_model") if models is not None else None
    assert models is not None
    assert isinstance(getter, FunctionRef)
    types = _model_types(models.names["ModelType"])
    results: dict[str, dict[str, dict[str, Outcome]]] = {}
    for test, body in _branches(getter.node):
        name = _served_by(body)
        cls = models.resolve(name) if name else None
        if isinstance(cls, ClassRef):
            outcomes = {form: _outcome(tree, cls, form) for form in FORMS}
            for model_type in test:
                results.setdefault(types.get(model_type, model_type), {"any": outcomes})
    return results


def _model_types(node: object) -> dict[str, str]:
    """Return {name of the constant: model_type}, from the enumeration's {"type": ...}."""
    assert isinstance(node, ast.ClassDef)
    results = {}
    for item in node.body:
        if (
            isinstance(item, ast.Assign)
            and isinstance(item.targets[0], ast.Name)
            and isinstance(item.value, ast.Dict)
        ):
            pairs = zip(item.value.keys, item.value.values, strict=True)
            for key, value in pairs:
                if (
                    isinstance(key, ast.Constant)
                    and key.value == "type"
                    and isinstance(value, ast.Constant)
                ):
                    results[item.targets[0].id] = str(value.value)
    return results


def _branches(function: ast.AST) -> Iterator[tuple[list[str], list[ast.stmt]]]:
    """Yield (names that model_type is compared with, body) of each `if model_type == …`."""
    for node in ast.walk(function):
        if not isinstance(node, ast.If):
            continue
        names = []
        for item in ast.walk(node.test):
            if isinstance(item, ast.Compare) and ast.unparse(item.left) == "model_type":
                other = item.comparators[0]
                names += (
                    [ast.unparse(other).strip("'\"")] if isinstance(item.ops[0], ast.Eq) else []
                )
        if names:
            yield names, node.body


def _served_by(body: list[ast.stmt]) -> str:
    """Return the class of the first `return` in the branch for FlashAttention: its model_class."""
    for statement in body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "FLASH_ATTENTION":
            for node in ast.walk(statement):
                if isinstance(node, ast.keyword) and node.arg == "model_class":
                    return ast.unparse(node.value)
    return ""


def _outcome(tree: Tree, cls: ClassRef, form: str) -> Outcome:
    asking = []
    for item in reachable(cls):
        asking += [(item, value) for value, _ in item.assignments.get("kv_scales", ())]
    if not asking:
        return undecided("the text model is chosen at run time")
    places = {place for item, _ in asking for place in _places(cls, item)}
    effects = set()
    for place in places:
        names = {FORMS[form].format(side=side) for side in "kv"}
        weights = _Weights({f"{PREFIX}.{name}" for name in names})
        run = Interpreter(Parameters(frozenset()), [], _native)
        function = tree.imported("text_generation_server.layers.attention.kv_cache", ASKS)
        assert isinstance(function, FunctionRef)
        run.call(Bound(function), [weights, f"{PREFIX}.{place}"], {})
        if not weights.read:
            effects.add("drops")
        else:
            effects.add("uses" if all(weights.read.values()) else "converts")
    first, value = asking[0]
    if len(effects) != 1:
        return Outcome("unknown", why=f"{sorted(places)} differ")
    return Outcome(effects.pop(), tree.relative(first.module), value.lineno)


def _places(start: ClassRef, attention: ClassRef) -> set[str]:
    """Return 'self_attn' of `prefix=f"{prefix}.self_attn"`, wherever the attention is created."""
    results = set()
    for cls in reachable(start):
        for pairs in cls.assignments.values():
            for value, method in pairs:
                for call in ast.walk(value):
                    if (
                        isinstance(call, ast.Call)
                        and method.module.resolve_expression(call.func) is attention
                    ):
                        for keyword in call.keywords:
                            if keyword.arg == "prefix":
                                prefix = ast.unparse(keyword.value).rpartition(".")[2]
                                results.add(prefix.strip("'\""))
    return results


def _native(
    interpreter: Interpreter, owner: object, name: str, args: list[Any], kwargs: dict[str, Any]
) -> object:
    if not isinstance(owner, _Weights):
        return NotImplemented
    if name == "has_tensor":
        return args[0] in owner.names
    if name == "get_tensor" and args[0] in owner.names:
        owner.read[args[0]] = kwargs.get("to_dtype") is False
    return UNKNOWN

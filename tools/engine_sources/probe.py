"""What becomes of one name in one model: every way through its `load_weights`, and what they agree
on.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

from engine_sources.attention import attention_paths
from engine_sources.calls import child_class
from engine_sources.interpreter import MAX_PATHS, Interpreter
from engine_sources.modules import ClassRef
from engine_sources.outcome import FORMS, Outcome, undecided
from engine_sources.values import (
    UNKNOWN,
    Bound,
    Instance,
    ModuleObject,
    Parameters,
    Raised,
    Undecided,
)

PREFIXES = ("model.layers.0.",)
# Models of images and text store their text model under one of these.
NESTED_PREFIXES = ("model.language_model.layers.0.", "language_model.model.layers.0.")


cached_paths = cache(attention_paths)


def probe(cls: ClassRef, form: str, has_scales: bool, quant_config: object) -> Outcome:
    """Find what `cls` does with the scales of K and V under `form`: one outcome if both sides and
    all prefixes agree.
    """
    paths = cached_paths(cls)
    # A place that is there twice has both values of `quantized`
    if not paths or len({(item.outer, item.inner) for item in paths}) < len(paths):
        return undecided("where attention keeps its scales")
    kept = [f"{item.outer}.{item.inner}" for item in paths if item.quantized and has_scales]
    ends = {f"{place}.{side}_scale" for place in kept for side in "kv"}
    prefixes = PREFIXES if cls.name.endswith("ForCausalLM") else (*PREFIXES, *NESTED_PREFIXES)
    outcomes = []
    for prefix in prefixes:
        for side in "kv" if "{side}" in FORMS[form] else "k":
            name = prefix + FORMS[form].format(side=side)
            outcomes.append(_follow(cls, name, side, Parameters(frozenset(ends)), quant_config))
            if outcomes[-1].effect == "unknown":
                return outcomes[-1]
    if len({item.effect for item in outcomes}) > 1:
        return undecided("K and V, or prefixes, differ")
    return outcomes[0]


def _follow(
    cls: ClassRef, name: str, side: str, parameters: Parameters, quant_config: object
) -> Outcome:
    """Follow every way that `name` may take; undecided unless they agree."""
    load = cls.method("load_weights")
    if load is None:
        return undecided("no load_weights")
    results: dict[str, Outcome] = {}
    decisions: list[bool] = []
    for _ in range(MAX_PATHS):
        run = Interpreter(parameters, decisions, native, quant_config)
        try:
            run.call(Bound(load, ModuleObject(cls)), [[(name, UNKNOWN)]], {})
            effect = _effect(run.loaded, side)
        except Raised as error:
            effect = f"stops: {error.kind}"
        except (Undecided, RecursionError, TypeError, AttributeError) as error:
            return undecided(f"{type(error).__name__} {error} after {run.line}")
        file, line = (
            run.line if run.line[0] else (load.module.tree.relative(load.module), load.node.lineno)
        )
        results.setdefault(effect, Outcome(effect, file, line))
        if len(results) > 1:
            item, other = results.values()
            return undecided(
                f"{item.effect} at {item.file}:{item.line}, {other.effect} at {other.file}:{other.line}"
            )
        del decisions[run.used :]
        while decisions and decisions[-1]:
            decisions.pop()
        if not decisions:
            return next(iter(results.values()))
        decisions[-1] = True
    return undecided("too many ways")


def _effect(loaded: list[str], side: str) -> str:
    if not loaded:
        return "drops"
    if all(name.endswith(f".{side}_scale") for name in loaded):
        return "uses"
    return "unknown"


def native(
    interpreter: Interpreter, owner: object, name: str, args: list[Any], kwargs: dict[str, Any]
) -> object:
    """Do what torch's own methods of modules do, and the part of AutoWeightsLoader that walks through
    them.
    """
    if isinstance(owner, ModuleObject) and owner.cls.method(name) is None:
        if name == "named_parameters":
            return interpreter.parameters
        if name in ("named_buffers", "buffers"):
            return {}
        if name == "children":
            return [ModuleObject(item) for item in _children(owner.cls)]
        if name in ("modules", "named_modules"):
            return UNKNOWN
        if name in ("named_children", "state_dict", "get_submodule"):
            raise Undecided(name)
    if isinstance(owner, Instance) and owner.cls.name == "AutoWeightsLoader":
        if name == "_load_module":
            return _load_module(interpreter, owner, args[1], args[2])
        if name == "_check_skipped_aliases":  # of tied embeddings, which are no scales
            return None
    if isinstance(owner, Instance) and owner.cls.name.startswith("Env") and name == "get":
        return owner.attributes.get("default", UNKNOWN)
    return NotImplemented


def _children(cls: ClassRef) -> list[ClassRef]:
    names: dict[str, None] = {}
    for base in cls.mro:
        for item in ast.walk(base.node):
            if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store):
                names[item.attr] = None
    results = [child_class(cls, name) for name in names]
    return [item for item in results if item is not None and "Module" in item.base_names]


def _load_module(
    interpreter: Interpreter, loader: Instance, module: object, weights: object
) -> list[str]:
    """Do as AutoWeightsLoader._load_module: load into a child that has `load_weights`, else by
    name; ValueError where none is.
    """
    if not isinstance(module, ModuleObject) or not isinstance(weights, list):
        raise Undecided("_load_module")
    for name, tensor in weights:
        if not isinstance(name, str):
            raise Undecided("a name that is not known")
        _load_name(interpreter, loader, module.cls, name, name, tensor)
    return []


def _load_name(
    interpreter: Interpreter, loader: Instance, cls: ClassRef, full: str, name: str, tensor: object
) -> None:
    head, _, rest = name.partition(".")
    child = child_class(cls, head)
    load_weights = None if child is None else child.method("load_weights")
    if child is not None and load_weights is not None:
        interpreter.call(Bound(load_weights, ModuleObject(child)), [[(rest, tensor)]], {})
        return
    if child is not None and rest and not rest[0].isdigit():
        _load_name(interpreter, loader, child, full, rest, tensor)
        return
    load = cls.method("load_weights")
    interpreter.line = (
        cls.module.tree.relative(cls.module),
        load.node.lineno if load else cls.node.lineno,
    )
    values = cls.assigned(head)
    if values and child is None and head not in ("layers", "blocks", "h"):
        raise Undecided(f"the class of {head}")
    if values and full in interpreter.parameters:
        interpreter.loaded.append(full)
        return
    prefixes = loader.attributes.get("ignore_unexpected_prefixes")
    suffixes = loader.attributes.get("ignore_unexpected_suffixes")
    if (
        not isinstance(prefixes, list)
        or not isinstance(suffixes, list)
        or UNKNOWN in [*prefixes, *suffixes]
    ):
        raise Undecided("what AutoWeightsLoader ignores")
    if full.startswith(tuple(prefixes)) or full.endswith(tuple(suffixes)):
        return
    raise Raised("ValueError")

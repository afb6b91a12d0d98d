"""Names, attributes and calls of the interpreter: functions, methods and classes of the tree, and
some builtins.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

from engine_sources.evaluation import LITERALS, Evaluation
from engine_sources.modules import ClassRef, FunctionRef, Module
from engine_sources.values import (
    UNKNOWN,
    Bound,
    Closure,
    Instance,
    Loader,
    ModuleObject,
    Parameter,
    Parameters,
    Scope,
    Super,
    Undecided,
)

MAX_DEPTH = 24
ASSUMED_CALLS: Mapping[str, object] = {
    "is_pp_missing_parameter": False,
    "get_spec_layer_idx_from_weight_name": None,
    "get_tensor_model_parallel_rank": 0,
    "get_tensor_model_parallel_world_size": 1,
    "print_warning_once": None,
    "log_info_on_rank0": None,
    "is_weights_pre_processed": False,
    "print": None,
    "_get_tied_embedding_params": {},
}
ASSUMED_ATTRIBUTES: Mapping[str, object] = {
    "start_layer": 0,
    "end_layer": 1 << 30,
    "is_last_rank": True,
    "is_first_rank": True,
    "num_nextn_predict_layers": 0,
    "world_size": 1,
    "rank_in_group": 0,
    "tp_size": 1,
}
_BUILTINS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(list, tuple, set, frozenset, sorted, len, any, all, zip, enumerate, range, str, int),
        *(min, max, reversed, bool, iter, next, map, filter),
    )
}


class Returned(Exception):
    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value


class Calls(Evaluation):
    """`run`, which executes statements, is the interpreter's."""

    def run(self, body: list[ast.stmt], scope: Scope) -> None:
        raise NotImplementedError

    def _get_Name(self, node: ast.Name, scope: Scope) -> object:
        result, value = scope.find(node.id)
        if result:
            return value
        if node.id in ASSUMED_CALLS or node.id == "default_weight_loader":
            return Loader("") if node.id == "default_weight_loader" else node.id
        resolved = scope.module.resolve(node.id)
        if resolved is None:
            return _BUILTINS.get(node.id, UNKNOWN)
        return self.resolved(resolved)

    def resolved(self, value: object) -> object:
        """Return the value of what a module's name refers to."""
        if isinstance(value, FunctionRef):
            return Bound(value)
        if isinstance(value, ClassRef | Module):
            return value
        if isinstance(value, tuple) and isinstance(value[0], Module):
            return self.eval(value[1], Scope(value[0]))
        if isinstance(value, tuple) and value[0] in ("re", "regex"):
            return re if not value[1] else getattr(re, value[1])
        return UNKNOWN

    def _get_Attribute(self, node: ast.Attribute, scope: Scope) -> object:
        return self.attribute(self.eval(node.value, scope), node.attr)

    def attribute(self, owner: object, name: str) -> Any:
        if isinstance(owner, Module):
            return self.resolved(owner.resolve(name))
        if isinstance(owner, Parameter):
            if name in ("data", "copy_"):
                raise Undecided("a parameter is written without its loader")
            return Loader(owner.name) if name == "weight_loader" else UNKNOWN
        if isinstance(owner, Parameters):
            return {"keys": lambda: owner, "get": owner.get}.get(name, UNKNOWN)
        if isinstance(owner, Super):
            cls = cast("ModuleObject | Instance", owner.receiver).cls
            result = cls.method(name, owner.after)
            return Bound(result, owner.receiver) if result else UNKNOWN
        if isinstance(owner, ClassRef):
            return self._of_class(owner, name, receiver=None)
        if isinstance(owner, ModuleObject | Instance):
            return self._of_object(owner, name)
        if name in ASSUMED_ATTRIBUTES:
            return ASSUMED_ATTRIBUTES[name]
        if owner is re or isinstance(owner, (*LITERALS,)):
            return getattr(owner, name, UNKNOWN)
        return UNKNOWN

    def _of_object(self, owner: ModuleObject | Instance, name: str) -> Any:
        if isinstance(owner, Instance) and name in owner.attributes:
            return owner.attributes[name]
        if isinstance(owner, ModuleObject) and name == "quant_config":
            return self.quant_config
        value = self._of_class(owner.cls, name, owner)
        if value is UNKNOWN and isinstance(owner, ModuleObject):
            return self._of_module(owner, name)
        return value

    def _of_class(self, cls: ClassRef, name: str, receiver: object) -> Any:
        method = cls.method(name)
        if method is not None:
            decorators = [ast.unparse(item) for item in method.node.decorator_list]
            if "property" in decorators or "cached_property" in decorators:
                return self.call(Bound(method, receiver), [], {})
            if "staticmethod" in decorators:
                receiver = None
            elif "classmethod" in decorators:
                receiver = cls
            return Bound(method, receiver)
        result = cls.attribute(name)
        if result is None:
            return UNKNOWN
        return self.eval(
            result[0], Scope(result[1].module, result[1], _class_names(self, result[1], result[0]))
        )

    def _of_module(self, owner: ModuleObject, name: str) -> object:
        """Return what __init__ assigns, where it can be read: a module, a constant, the
        quantization's configuration.
        """
        if name in ASSUMED_ATTRIBUTES:
            return ASSUMED_ATTRIBUTES[name]
        child = child_class(owner.cls, name)
        if child is not None:
            return ModuleObject(child, f"{owner.prefix}.{name}".lstrip("."))
        values = owner.cls.assigned(name)
        if len(values) == 1 and isinstance(
            values[0][0], ast.Constant | ast.Dict | ast.List | ast.Tuple
        ):
            return self.eval(values[0][0], Scope(values[0][1].module))
        return UNKNOWN

    def _get_Call(self, node: ast.Call, scope: Scope) -> Any:
        args: list[Any] = []
        for item in node.args:
            if isinstance(item, ast.Starred):
                args += list(self.iterate(self.eval(item.value, scope), item.value))
            else:
                args.append(self.eval(item, scope))
        kwargs = {item.arg: self.eval(item.value, scope) for item in node.keywords if item.arg}
        if isinstance(node.func, ast.Name) and not scope.find(node.func.id)[0]:
            special = getattr(self, f"_call_{node.func.id}", None)
            if special is not None:
                return special(args, kwargs, scope)
        if isinstance(node.func, ast.Attribute):
            owner = self.eval(node.func.value, scope)
            answer = self.native(self, owner, node.func.attr, args, kwargs)
            if answer is not NotImplemented:
                return answer
            called = self.attribute(owner, node.func.attr)
        else:
            called = self.eval(node.func, scope)
        if isinstance(called, Loader):
            self._at(node, scope)
        return self.call(
            called, args, kwargs, getattr(node.func, "attr", getattr(node.func, "id", ""))
        )

    def call(self, called: object, args: list[Any], kwargs: dict[str, Any], name: str = "") -> Any:
        if name in ASSUMED_CALLS:
            return ASSUMED_CALLS[name]
        if isinstance(called, Loader):
            return self._load(called, args)
        if isinstance(called, Bound):
            return self._function(called, args, kwargs)
        if isinstance(called, Closure):
            return self._closure(called, args, kwargs)
        if isinstance(called, ClassRef):
            return self._create(called, args, kwargs)
        if callable(called):
            return self._python(called, args, kwargs, name)
        given = [*args, *kwargs.values()]
        if name == "submit" and args:  # an executor of threads
            return self.call(args[0], args[1:], kwargs)
        if any(
            isinstance(item, Parameter | Parameters | Loader) or holds_weights(item)
            for item in given
        ):
            raise Undecided(f"{name} takes the tensor")
        return UNKNOWN

    def _python(
        self, called: Callable[..., object], args: list[Any], kwargs: dict[str, Any], name: str
    ) -> object:
        """Return what a function of Python's own returns."""
        given = [*args, *kwargs.values()]
        if any(isinstance(item, Parameters) for item in given):
            return UNKNOWN
        holds = isinstance(getattr(called, "__self__", None), list | dict | set)
        if any(item is UNKNOWN for item in given) and not holds:
            return UNKNOWN
        if any(isinstance(item, Closure | Bound) for item in given):
            if not any(map(holds_weights, given)):
                return UNKNOWN
            return self._sorted(name, args, kwargs)
        try:
            return called(*args, **kwargs)
        except (TypeError, ValueError, AttributeError) as error:
            raise Undecided(f"{name}: {error}") from error

    def _sorted(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> object:
        """Compute `sorted` or `filter` of the one tensor."""
        if name == "sorted" and len(args[0]) == 1:
            return list(args[0])
        raise Undecided(f"{name} takes the tensor")

    def _load(self, called: Loader, args: list[Any]) -> None:
        name = called.name or next((item.name for item in args if isinstance(item, Parameter)), "")
        if not name:
            raise Undecided("a loader without a parameter")
        self.loaded.append(name)

    def _function(self, bound: Bound, args: list[Any], kwargs: dict[str, Any]) -> Any:
        function = bound.function
        if bound.receiver is not None:
            args = [bound.receiver, *args]
        scope = Scope(function.module, function.owner)
        return self._body(
            function.node, function.node.body, function.node.args, args, kwargs, scope, scope
        )

    def _closure(self, closure: Closure, args: list[Any], kwargs: dict[str, Any]) -> Any:
        outer = closure.scope
        scope = Scope(outer.module, outer.owner, outer=outer)
        body = closure.node.body
        statements: list[ast.stmt] = body if isinstance(body, list) else [ast.Return(body)]
        return self._body(closure.node, statements, closure.node.args, args, kwargs, scope, outer)

    def _body(
        self,
        node: ast.AST,
        body: list[ast.stmt],
        spec: ast.arguments,
        args: list[Any],
        kwargs: dict[str, Any],
        scope: Scope,
        defaults: Scope,
    ) -> Any:
        if self.depth >= MAX_DEPTH:
            raise Undecided("too deep")
        positional = [*spec.posonlyargs, *spec.args]
        for item, default in zip(reversed(positional), reversed(spec.defaults), strict=False):
            scope.names[item.arg] = self.eval(default, defaults)
        for item, keyword_default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
            scope.names[item.arg] = (
                UNKNOWN if keyword_default is None else self.eval(keyword_default, defaults)
            )
        scope.names |= dict(zip((item.arg for item in positional), args, strict=False)) | kwargs
        if spec.vararg is not None:
            scope.names[spec.vararg.arg] = args[len(positional) :]
        self.depth += 1
        value: Any = None
        try:
            self.run(body, scope)
        except Returned as returned:
            value = returned.value
        finally:
            self.depth -= 1
        return scope.yields if _is_generator(node) else value

    def _create(self, cls: ClassRef, args: list[Any], kwargs: dict[str, Any]) -> object:
        if "Module" in cls.base_names:
            return UNKNOWN
        made = Instance(cls)
        if cls.method("__init__") is not None:
            self._function(Bound(cast("FunctionRef", cls.method("__init__")), made), args, kwargs)
            return made
        fields = []
        for item in reversed(cls.mro):
            for node in item.node.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    fields.append((node.target.id, node.value, item))
        given = dict(zip((name for name, _, _ in fields), args, strict=False)) | kwargs
        for name, default, owner in fields:
            made.attributes[name] = given[name] if name in given else self._default(default, owner)
        return made

    def _default(self, node: ast.expr | None, owner: ClassRef) -> object:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "field":
            factory = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}.get(
                "default_factory"
            )
            return {"dict": {}, "list": [], "set": set()}.get(factory or "", UNKNOWN)
        return UNKNOWN if node is None else self.eval(node, Scope(owner.module))

    def _call_dict(self, args: list[Any], kwargs: dict[str, Any], scope: Scope) -> object:
        if args and isinstance(args[0], Parameters):
            return args[0]
        return UNKNOWN if any(item is UNKNOWN for item in args) else dict(*args, **kwargs)

    def _call_getattr(self, args: list[Any], kwargs: dict[str, Any], scope: Scope) -> object:
        value = self.attribute(args[0], args[1]) if isinstance(args[1], str) else UNKNOWN
        if value is UNKNOWN and len(args) == 3 and isinstance(args[0], Instance):
            return args[2]
        return value

    def _call_hasattr(self, args: list[Any], kwargs: dict[str, Any], scope: Scope) -> object:
        owner, name = args[:2]
        if isinstance(owner, ModuleObject) and name == "quant_config":
            return "SupportsQuant" in owner.cls.base_names or bool(owner.cls.assigned(name))
        if isinstance(owner, ModuleObject | Instance):
            return True if self.attribute(owner, name) is not UNKNOWN else UNKNOWN
        return UNKNOWN

    def _call_isinstance(self, args: list[Any], kwargs: dict[str, Any], scope: Scope) -> object:
        if not isinstance(args[1], type) or args[0] is UNKNOWN:
            return UNKNOWN
        return isinstance(args[0], args[1])

    def _call_super(self, args: list[Any], kwargs: dict[str, Any], scope: Scope) -> object:
        receiver = scope.find("self")[1]
        owner = scope.owner
        return UNKNOWN if owner is None or receiver is None else Super(receiver, owner)

    def _call_next(self, args: list[Any], kwargs: dict[str, Any], scope: Scope) -> object:
        return UNKNOWN if args[0] is UNKNOWN else next(iter(args[0]), *args[1:])

    def _call_callable(self, args: list[Any], kwargs: dict[str, Any], scope: Scope) -> object:
        return isinstance(args[0], Bound | Closure) or UNKNOWN


@cache
def child_class(cls: ClassRef, name: str) -> ClassRef | None:
    """Return the class of the module that __init__ assigns to `self.name`, if it is one of the
    tree.
    """
    for value, method in cls.assigned(name):
        result = called_class(value, method)
        if result is not None:
            return result
    return None


def called_class(value: ast.expr, method: FunctionRef) -> ClassRef | None:
    """Return the class that an expression creates: `Class(...)`, one branch of an if, or
    `self._init_model(...)`.
    """
    if isinstance(value, ast.IfExp):
        return called_class(value.body, method) or called_class(value.orelse, method)
    if not isinstance(value, ast.Call):
        return None
    result = method.module.resolve_expression(value.func)
    if isinstance(result, ClassRef):
        return result
    if (
        isinstance(value.func, ast.Attribute)
        and ast.unparse(value.func.value) == "self"
        and method.owner is not None
    ):
        inner = method.owner.method(value.func.attr)
        if inner is not None:
            returns = [
                item.value
                for item in ast.walk(inner.node)
                if isinstance(item, ast.Return) and item.value
            ]
            return next((made for item in returns if (made := called_class(item, inner))), None)
    return None


def _class_names(interpreter: Calls, cls: ClassRef, node: ast.expr) -> dict[str, Any]:
    """Return what a class attribute's expression may refer to: other attributes of the class body."""
    results = {}
    for name in names_in(node):
        other = cls.attribute(name)
        if other is not None and other[0] is not node:
            results[name] = interpreter.eval(other[0], Scope(other[1].module, other[1]))
    return results


@cache
def names_in(node: ast.AST) -> frozenset[str]:
    return frozenset(item.id for item in ast.walk(node) if isinstance(item, ast.Name))


@cache
def _is_generator(node: ast.AST) -> bool:
    inner = [
        item
        for item in ast.iter_child_nodes(node)
        if not isinstance(item, ast.FunctionDef | ast.Lambda)
    ]
    return any(isinstance(item, ast.Yield | ast.YieldFrom) or _is_generator(item) for item in inner)


def holds_weights(value: object) -> bool:
    return isinstance(value, list) and any(
        isinstance(item, tuple) and len(item) == 2 and item[1] is UNKNOWN for item in value
    )

"""Expressions of the interpreter: operators, containers, comprehensions. What is not known stays
unknown.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from engine_sources.values import (
    UNKNOWN,
    Bound,
    Closure,
    Instance,
    ModuleObject,
    Parameter,
    Parameters,
    Raised,
    Scope,
    Undecided,
)

MAX_STEPS = 20_000
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.BitOr: operator.or_, ast.Div: operator.truediv,
}  # fmt: skip
LITERALS = (
    str,
    int,
    float,
    bool,
    list,
    tuple,
    dict,
    set,
    frozenset,
    re.Pattern,
    re.Match,
    type(None),
)


class _NotKnown(Exception):
    """A comprehension over what is not known."""


@dataclass
class Evaluation:
    """One way through the code. `decisions` are the answers to unknown conditions; further ones are
    False.

    `native(interpreter, receiver, name, args, kwargs)` is asked first at each method of a module or
    instance; it returns NotImplemented where it has no answer. `loaded` are the parameters that a
    tensor was loaded into, `line` is (file, line) of the last statement that decided.
    """

    parameters: Parameters
    decisions: list[bool]
    native: Callable[[Any, object, str, list[Any], dict[str, Any]], object]
    quant_config: object = UNKNOWN
    loaded: list[str] = field(default_factory=list)
    line: tuple[str, int] = ("", 0)
    used: int = 0
    depth: int = 0
    steps: int = 0

    def call(self, called: object, args: list[Any], kwargs: dict[str, Any], name: str = "") -> Any:
        raise NotImplementedError

    def truth(self, value: object) -> bool:
        if value is UNKNOWN:
            if self.used == len(self.decisions):
                self.decisions.append(False)
            self.used += 1
            return self.decisions[self.used - 1]
        if isinstance(value, LITERALS):
            return bool(value)
        return True

    def _at(self, node: ast.AST, scope: Scope) -> None:
        self.line = (scope.module.tree.relative(scope.module), getattr(node, "lineno", 0))

    def bind(self, target: ast.expr, value: object, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            if value is UNKNOWN:
                value = [UNKNOWN] * len(target.elts)
            values = list(cast("Any", value))
            if any(isinstance(item, ast.Starred) for item in target.elts) or len(values) != len(
                target.elts
            ):
                raise Undecided("unpacking")
            for item, part in zip(target.elts, values, strict=True):
                self.bind(item, part, scope)
        elif isinstance(target, ast.Subscript):
            owner = self.eval(target.value, scope)
            key = self.eval(target.slice, scope)
            if isinstance(owner, dict) and key is not UNKNOWN:
                owner[key] = value
        elif isinstance(target, ast.Attribute):
            owner = self.eval(target.value, scope)
            if isinstance(owner, Instance):
                owner.attributes[target.attr] = value

    def iterate(self, value: object, node: ast.expr) -> Iterator[Any]:
        if isinstance(value, str | list | tuple | set | frozenset | dict) or hasattr(
            value, "__next__"
        ):
            return iter(cast("Any", value))
        if isinstance(value, zip | enumerate | range | map | filter | reversed) or type(
            value
        ).__name__.startswith("dict_"):
            return iter(cast("Any", value))
        if value is UNKNOWN and "expert" in ast.unparse(node):
            return iter(())
        raise Undecided(f"a loop over {ast.unparse(node)}")

    def eval(self, node: ast.expr, scope: Scope) -> Any:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise Undecided("too many steps")
        method = getattr(self, "_get_" + node.__class__.__name__, None)
        if method is None:
            raise Undecided(f"{type(node).__name__} in {scope.module.name}:{node.lineno}")
        return method(node, scope)

    def _get_Constant(self, node: ast.Constant, scope: Scope) -> object:
        return node.value

    def _get_BoolOp(self, node: ast.BoolOp, scope: Scope) -> object:
        """Unknown operands are passed over while another may decide; their effects on names are
        none.
        """
        stop = isinstance(node.op, ast.Or)
        unknown = False
        value = None
        for operand in node.values:
            try:
                value = self.eval(operand, scope)
            except Raised:
                if not unknown:
                    raise
                return UNKNOWN
            if value is UNKNOWN:
                unknown = True
            elif self.truth(value) is stop:
                return value
        return UNKNOWN if unknown else value

    def _get_UnaryOp(self, node: ast.UnaryOp, scope: Scope) -> object:
        value = self.eval(node.operand, scope)
        if isinstance(node.op, ast.Not):
            return UNKNOWN if value is UNKNOWN else not self.truth(value)
        if value is UNKNOWN or not isinstance(node.op, ast.USub):
            return UNKNOWN
        return -value

    def _get_Compare(self, node: ast.Compare, scope: Scope) -> object:
        left = self.eval(node.left, scope)
        result = True
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.eval(right_node, scope)
            item = self.compare(op, left, right)
            if item is UNKNOWN:
                return UNKNOWN
            result = result and bool(item)
            left = right
        return result

    def compare(self, op: ast.cmpop, left: Any, right: Any) -> object:
        if isinstance(op, ast.Is | ast.IsNot):
            if left is UNKNOWN or right is UNKNOWN:
                return UNKNOWN
            return (left is right) == isinstance(op, ast.Is)
        if isinstance(op, ast.In | ast.NotIn):
            if left is UNKNOWN or right is UNKNOWN or isinstance(right, Instance | ModuleObject):
                return UNKNOWN
            inside = left in right
            if (
                not inside
                and not isinstance(right, Parameters | str)
                and any(item is UNKNOWN for item in right)
            ):
                return UNKNOWN
            return inside == isinstance(op, ast.In)
        if left is UNKNOWN or right is UNKNOWN:
            return UNKNOWN
        return _COMPARE[type(op)](left, right)

    def _get_BinOp(self, node: ast.BinOp, scope: Scope) -> object:
        return self.binary(node.op, self.eval(node.left, scope), self.eval(node.right, scope))

    def binary(self, op: ast.operator, left: Any, right: Any) -> object:
        if isinstance(left, Instance) and isinstance(op, ast.BitOr):
            method = left.cls.method("__or__")
            if method is None or right is UNKNOWN:
                return UNKNOWN
            return self.call(Bound(method, left), [right], {})
        odd = isinstance(left, Parameters) or isinstance(right, Parameters)
        if left is UNKNOWN or right is UNKNOWN or odd or type(op) not in _BINARY:
            return UNKNOWN
        return _BINARY[type(op)](left, right)

    def _get_JoinedStr(self, node: ast.JoinedStr, scope: Scope) -> object:
        parts = [
            self.eval(item.value if isinstance(item, ast.FormattedValue) else item, scope)
            for item in node.values
        ]
        if not all(isinstance(item, str | int) for item in parts):
            return UNKNOWN
        return "".join(map(str, parts))

    def _get_IfExp(self, node: ast.IfExp, scope: Scope) -> object:
        return self.eval(
            node.body if self.truth(self.eval(node.test, scope)) else node.orelse, scope
        )

    def _get_NamedExpr(self, node: ast.NamedExpr, scope: Scope) -> object:
        value = self.eval(node.value, scope)
        self.bind(node.target, value, scope)
        return value

    def _elements(self, nodes: list[ast.expr], scope: Scope) -> list[Any]:
        results: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                results += list(self.iterate(self.eval(node.value, scope), node.value))
            else:
                results.append(self.eval(node, scope))
        return results

    def _get_List(self, node: ast.List, scope: Scope) -> object:
        return self._elements(node.elts, scope)

    def _get_Tuple(self, node: ast.Tuple, scope: Scope) -> object:
        return tuple(self._elements(node.elts, scope))

    def _get_Set(self, node: ast.Set, scope: Scope) -> object:
        return set(self._elements(node.elts, scope))

    def _get_Dict(self, node: ast.Dict, scope: Scope) -> object:
        made: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            result = self.eval(value, scope)
            if key is None:
                if not isinstance(result, dict):
                    return UNKNOWN
                made |= result
                continue
            name = self.eval(key, scope)
            if name is UNKNOWN:
                return UNKNOWN
            made[name] = result
        return made

    def _get_Subscript(self, node: ast.Subscript, scope: Scope) -> object:
        owner = self.eval(node.value, scope)
        if isinstance(node.slice, ast.Slice):
            ends = [
                None if item is None else self.eval(item, scope)
                for item in (node.slice.lower, node.slice.upper)
            ]
            sliceable = isinstance(owner, str | list | tuple) and UNKNOWN not in ends
            return cast("Any", owner)[slice(*ends)] if sliceable else UNKNOWN
        key = self.eval(node.slice, scope)
        if isinstance(owner, Parameters):
            self._at(node, scope)
            if key is UNKNOWN:
                raise Undecided("a parameter of unknown name")
            if key not in owner:
                raise Raised("KeyError")
            return Parameter(key)
        if (
            owner is UNKNOWN
            or key is UNKNOWN
            or not isinstance(owner, str | list | tuple | dict | re.Match)
        ):
            return UNKNOWN
        try:
            return owner[key]
        except (KeyError, IndexError) as error:
            raise Raised(type(error).__name__) from error

    def _get_Lambda(self, node: ast.Lambda, scope: Scope) -> object:
        return Closure(node, scope)

    def _get_ListComp(
        self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, scope: Scope
    ) -> object:
        results: list[Any] = []
        try:
            self._comprehend(
                node.generators, Scope(scope.module, scope.owner, outer=scope), node.elt, results
            )
        except _NotKnown:
            return UNKNOWN
        return set(results) if isinstance(node, ast.SetComp) else results

    _get_GeneratorExp = _get_SetComp = _get_ListComp

    def _get_DictComp(self, node: ast.DictComp, scope: Scope) -> object:
        results: list[Any] = []
        pair = ast.Tuple([node.key, node.value])
        try:
            self._comprehend(
                node.generators, Scope(scope.module, scope.owner, outer=scope), pair, results
            )
        except _NotKnown:
            return UNKNOWN
        return dict(results)

    def _comprehend(
        self, generators: list[ast.comprehension], scope: Scope, element: ast.expr, out: list[Any]
    ) -> None:
        if not generators:
            out.append(self.eval(element, scope))
            return
        first, *rest = generators
        values = self.eval(first.iter, scope)
        if values is UNKNOWN or isinstance(values, Parameters):
            raise _NotKnown
        for value in self.iterate(values, first.iter):
            self.bind(first.target, value, scope)
            if all(self.truth(self.eval(test, scope)) for test in first.ifs):
                self._comprehend(rest, scope, element, out)

    def _get_Yield(self, node: ast.Yield, scope: Scope) -> None:
        scope.yields.append(None if node.value is None else self.eval(node.value, scope))

    def _get_YieldFrom(self, node: ast.YieldFrom, scope: Scope) -> None:
        scope.yields += list(self.iterate(self.eval(node.value, scope), node.value))

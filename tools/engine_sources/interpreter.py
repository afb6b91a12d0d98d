"""Runs an engine's `load_weights` on the name of one tensor, without the engine: an interpreter
over its sources.

The name is known, values are not. At a condition that depends on what is not known both ways are
taken, one after the other (`paths`). What happens to the name is known if all ways agree. Whatever
the interpreter cannot follow raises `Undecided`, so that a mistake of its own is "unknown" and
never an answer.

Assumed: one device, no pipeline stages, no draft model, default environment variables; that names
of experts match no attention scale, and that no stored scale is a buffer.
"""

from __future__ import annotations

import ast
import re
from functools import cache

from engine_sources.calls import Calls, Returned, holds_weights, names_in
from engine_sources.values import (
    UNKNOWN,
    Closure,
    Loader,
    Parameter,
    Parameters,
    Raised,
    Scope,
    Undecided,
)

MAX_PATHS = 48


class _Break(Exception):
    pass


class _Continue(Exception):
    pass


class Interpreter(Calls):
    """One way through the code, statement by statement."""

    def run(self, body: list[ast.stmt], scope: Scope) -> None:
        for node in body:
            method = getattr(self, "_do_" + node.__class__.__name__, None)
            if method is None:
                raise Undecided(f"{type(node).__name__} in {scope.module.name}:{node.lineno}")
            method(node, scope)

    def _do_Expr(self, node: ast.Expr, scope: Scope) -> None:
        self.eval(node.value, scope)

    def _do_Pass(self, node: ast.Pass, scope: Scope) -> None:
        pass

    _do_Global = _do_Nonlocal = _do_Delete = _do_Pass

    def _do_ClassDef(self, node: ast.ClassDef, scope: Scope) -> None:
        scope.names[node.name] = UNKNOWN

    def _do_Assign(self, node: ast.Assign, scope: Scope) -> None:
        value = self.eval(node.value, scope)
        for target in node.targets:
            self.bind(target, value, scope)

    def _do_AnnAssign(self, node: ast.AnnAssign, scope: Scope) -> None:
        if node.value is not None:
            self.bind(node.target, self.eval(node.value, scope), scope)

    def _do_AugAssign(self, node: ast.AugAssign, scope: Scope) -> None:
        left = self.eval(_as_load(node.target), scope)
        self.bind(node.target, self.binary(node.op, left, self.eval(node.value, scope)), scope)

    def _do_If(self, node: ast.If, scope: Scope) -> None:
        taken = self.truth(self.eval(node.test, scope))
        self.run(node.body if taken else node.orelse, scope)

    def _do_For(self, node: ast.For, scope: Scope) -> None:
        values = self.eval(node.iter, scope)
        if values is UNKNOWN and self._bears_no_weights(node, scope):
            # A loop over the names of buffers changes nothing: no scale that is stored is a buffer.
            for name in () if "_buffers" in ast.unparse(node) else names_in(node):
                if isinstance(
                    scope.names.get(name, UNKNOWN), str | int | float | list | set | dict | None
                ):
                    scope.names[name] = UNKNOWN
            return
        for value in self.iterate(values, node.iter):
            self.bind(node.target, value, scope)
            try:
                self.run(node.body, scope)
            except _Continue:
                continue
            except _Break:
                self._at(node, scope)
                return
        self.run(node.orelse, scope)

    def _bears_no_weights(self, node: ast.For, scope: Scope) -> bool:
        """Return whether a loop over what is not known touches neither the tensor nor its name, and
        can only end by itself.
        """
        for name in names_in(node):
            value = scope.find(name)[1]
            named = isinstance(value, str) and "_scale" in value
            if (
                named
                or isinstance(value, Parameters | Parameter | Loader | Closure)
                or holds_weights(value)
            ):
                return False
        return _ends_by_itself(node)

    def _do_While(self, node: ast.While, scope: Scope) -> None:
        raise Undecided("while")

    def _do_Continue(self, node: ast.Continue, scope: Scope) -> None:
        self._at(node, scope)
        raise _Continue

    def _do_Break(self, node: ast.Break, scope: Scope) -> None:
        raise _Break

    def _do_Return(self, node: ast.Return, scope: Scope) -> None:
        raise Returned(None if node.value is None else self.eval(node.value, scope))

    def _do_Raise(self, node: ast.Raise, scope: Scope) -> None:
        self._at(node, scope)
        called = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        raise Raised(ast.unparse(called) if called is not None else "Exception")

    def _do_Assert(self, node: ast.Assert, scope: Scope) -> None:
        value = self.eval(node.test, scope)
        if value is not UNKNOWN and not self.truth(value):
            self._at(node, scope)
            raise Raised("AssertionError")

    def _do_With(self, node: ast.With, scope: Scope) -> None:
        for item in node.items:
            value = self.eval(item.context_expr, scope)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, value, scope)
        self.run(node.body, scope)

    def _do_Try(self, node: ast.Try, scope: Scope) -> None:
        try:
            self.run(node.body, scope)
        except Raised as error:
            for handler in node.handlers:
                caught = "" if handler.type is None else ast.unparse(handler.type)
                if not caught or error.kind in caught or re.search(r"\bException\b", caught):
                    self.run(handler.body, scope)
                    break
            else:
                raise
        else:
            self.run(node.orelse, scope)
        self.run(node.finalbody, scope)

    def _do_Import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        for name, (module, there) in scope.module.imports(node).items():
            scope.names[name] = self.resolved(scope.module.tree.imported(module, there))

    _do_ImportFrom = _do_Import

    def _do_FunctionDef(self, node: ast.FunctionDef, scope: Scope) -> None:
        scope.names[node.name] = Closure(node, scope)


@cache
def _ends_by_itself(node: ast.For) -> bool:
    return not any(
        isinstance(item, ast.Raise | ast.Return | ast.Yield | ast.YieldFrom)
        for item in ast.walk(node)
    )


@cache
def _as_load(node: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(node), mode="eval").body

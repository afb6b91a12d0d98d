"""A tree of Python sources, read with `ast` alone: modules, imports, classes, methods. Nothing of
it is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, eq=False)
class FunctionRef:
    """A function, with the module whose names it sees, and the class that defines it."""

    node: Function
    module: Module
    owner: ClassRef | None = None


@dataclass(frozen=True, eq=False)
class ClassRef:
    node: ast.ClassDef
    module: Module

    @property
    def name(self) -> str:
        return self.node.name

    @cached_property
    def mro(self) -> tuple[ClassRef, ...]:
        """This class and those that it inherits from, as far as they are in the tree, depth first."""
        results: list[ClassRef] = [self]
        for base in self.node.bases:
            parent = self.module.resolve_expression(base)
            if isinstance(parent, ClassRef) and parent != self:
                results += [item for item in parent.mro if item not in results]
        return tuple(results)

    @cached_property
    def base_names(self) -> frozenset[str]:
        """The names of all bases, those outside the tree among them."""
        names = {item.name for item in self.mro}
        names |= {
            ast.unparse(base).rpartition(".")[2] for item in self.mro for base in item.node.bases
        }
        return frozenset(names)

    @cached_property
    def methods(self) -> dict[str, FunctionRef]:
        body = (node for node in self.node.body if isinstance(node, ast.FunctionDef))
        return {node.name: FunctionRef(node, self.module, self) for node in body}

    def method(self, name: str, after: ClassRef | None = None) -> FunctionRef | None:
        """Find the method as Python would; with `after`, as `super()` in that class would."""
        order = self.mro if after is None else self.mro[self.mro.index(after) + 1 :]
        return next((item.methods[name] for item in order if name in item.methods), None)

    @cached_property
    def body_values(self) -> dict[str, ast.expr]:
        """{name: the expression that the class body assigns to it}."""
        results: dict[str, ast.expr] = {}
        for node in self.node.body:
            target = (
                node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            )
            value = getattr(node, "value", None)
            if isinstance(target, ast.Name) and value is not None:
                results.setdefault(target.id, value)
        return results

    def attribute(self, name: str) -> tuple[ast.expr, ClassRef] | None:
        """Return what the body of this class, or of one that it inherits from, assigns to `name`,
        and which of them.
        """
        for item in self.mro:
            if name in item.body_values:
                return item.body_values[name], item
        return None

    @cached_property
    def assignments(self) -> dict[str, list[tuple[ast.expr, FunctionRef]]]:
        """{attribute: what the methods of this class assign to it}, without those of its bases."""
        results: dict[str, list[tuple[ast.expr, FunctionRef]]] = {}
        for method in self.node.body:
            if isinstance(method, ast.FunctionDef):
                for attribute, value in self_assignments(method):
                    results.setdefault(attribute, []).append(
                        (value, FunctionRef(method, self.module, self))
                    )
        return results

    def assigned(self, name: str) -> list[tuple[ast.expr, FunctionRef]]:
        """Return what methods assign to `self.name`, those of the nearest class that does so."""
        return next((item.assignments[name] for item in self.mro if name in item.assignments), [])

    @cached_property
    def referred(self) -> frozenset[str]:
        """Every name in the class."""
        return frozenset(item.id for item in ast.walk(self.node) if isinstance(item, ast.Name))


def self_assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield (attribute, value) of each `self.attribute = value` in `node`; of tuples, where both
    sides have as many.
    """
    for item in ast.walk(node):
        if not isinstance(item, ast.Assign | ast.AnnAssign) or item.value is None:
            continue
        targets = item.targets if isinstance(item, ast.Assign) else [item.target]
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            for part in parts:
                if (
                    isinstance(part, ast.Attribute)
                    and isinstance(part.value, ast.Name)
                    and part.value.id == "self"
                ):
                    yield part.attr, item.value


@dataclass
class Module:
    """One file. `name` is dotted; `names` maps each name at the top to its node, or to (module,
    name) of an import.
    """

    name: str
    path: Path
    tree: Tree
    names: dict[str, ast.AST | tuple[str, str]] = field(default_factory=dict)
    _resolved: dict[str, Found] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._collect(ast.parse(self.path.read_text(encoding="utf-8")).body)

    def _collect(self, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                self.names[node.name] = node
            elif isinstance(node, ast.Assign):
                self.names |= {
                    item.id: node.value for item in node.targets if isinstance(item, ast.Name)
                }
            elif (
                isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value
            ):
                self.names[node.target.id] = node.value
            elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                everything = self.tree.module(self.imports(node)["*"][0])
                if everything is not None:
                    self.names |= {item: (everything.name, item) for item in everything.names}
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self.names |= self.imports(node)
            elif isinstance(node, ast.If | ast.Try):
                self._collect(node.body)
                self._collect(node.orelse)

    def imports(self, node: ast.Import | ast.ImportFrom) -> dict[str, tuple[str, str]]:
        """Return {name here: (module, name there)}; the name there is '' for a module."""
        if isinstance(node, ast.Import):
            return {item.asname or item.name.split(".")[0]: (item.name, "") for item in node.names}
        base = node.module or ""
        if node.level:
            package = self.name.split(".")
            if self.path.name != "__init__.py":
                package.pop()
            package = package[: len(package) - node.level + 1]
            base = ".".join([*package, *([node.module] if node.module else [])])
        return {item.asname or item.name: (base, item.name) for item in node.names}

    def resolve(self, name: str) -> Found:
        """Return what `name` is here, through imports. (module, name) if it lies outside of the
        tree, else None.
        """
        if name not in self._resolved:
            self._resolved[name] = None  # of a cycle of imports
            self._resolved[name] = self._resolve(name)
        return self._resolved[name]

    def _resolve(self, name: str) -> Found:
        result = self.names.get(name)
        if isinstance(result, tuple):
            return self.tree.imported(*result)
        if isinstance(result, ast.ClassDef):
            return ClassRef(result, self)
        if isinstance(result, ast.FunctionDef | ast.AsyncFunctionDef):
            return FunctionRef(result, self)
        return None if result is None else (self, result)

    def resolve_expression(self, node: ast.expr) -> object:
        """Return a class or function that a name, or module.name, refers to."""
        if isinstance(node, ast.Name):
            result = self.resolve(node.id)
            if (
                isinstance(result, tuple)
                and isinstance(result[0], Module)
                and isinstance(result[1], ast.Name)
            ):
                return result[0].resolve(result[1].id)
            return result
        if isinstance(node, ast.Attribute):
            owner = self.resolve_expression(node.value)
            return owner.resolve(node.attr) if isinstance(owner, Module) else None
        return None


# What a name is: a class, a function, another value with its module, a module, or (module, name)
# outside of the tree.
Found = ClassRef | FunctionRef | tuple[Module, ast.AST] | Module | tuple[str, str] | None


class Tree:
    """A package below `root`; modules are read when they are asked for."""

    def __init__(self, root: Path, package: str) -> None:
        self.root = root
        self.package = package
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            stem = self.root.joinpath(*name.split("."))
            places = (stem.with_suffix(".py"), stem / "__init__.py")
            path = next((place for place in places if place.is_file()), None)
            known = path is not None and (
                name == self.package or name.startswith(f"{self.package}.")
            )
            self._modules[name] = Module(name, path, self) if known and path is not None else None
        return self._modules[name]

    def imported(self, module: str, name: str) -> Found:
        result = self.module(module)
        if result is None:
            return (module, name)
        if not name:
            return result
        return result.resolve(name) or self.module(f"{module}.{name}")

    def relative(self, module: Module) -> str:
        return str(module.path.relative_to(self.root))

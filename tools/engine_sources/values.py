"""What the interpreter computes with apart from strings, numbers and containers."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from engine_sources.modules import ClassRef, FunctionRef, Module


class Unknown:
    """A value that cannot be read from sources: a configuration, a tensor."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = Unknown()


class Undecided(Exception):
    """The interpreter met what it cannot follow; the outcome of this name is unknown."""


class Raised(Exception):
    """The interpreted code raises. `kind` is the exception's class name."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass(frozen=True)
class Parameters:
    """`dict(self.named_parameters())`. Of attention's scales alone it knows whether they exist."""

    ends: frozenset[str]  # 'self_attn.attn.k_scale'

    def __contains__(self, name: str) -> bool:
        return any(name == end or name.endswith(f".{end}") for end in self.ends)

    def get(self, name: str, default: object = None) -> object:
        return Parameter(name) if name in self else default


@dataclass(frozen=True)
class Parameter:
    name: str


@dataclass(frozen=True)
class Loader:
    """`param.weight_loader`, or `default_weight_loader` where `name` is ''."""

    name: str


@dataclass(frozen=True)
class ModuleObject:
    """A torch module of a class, known by its source alone. `prefix` is its path below the
    outermost.
    """

    cls: ClassRef
    prefix: str = ""

    def __hash__(self) -> int:
        return hash((self.cls, self.prefix))


@dataclass(eq=False)
class Instance:
    """An instance of a class of the tree that is no torch module."""

    cls: ClassRef
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bound:
    """A function with what it is bound to; `owner` is the class that `super()` goes on from."""

    function: FunctionRef
    receiver: object = None


@dataclass
class Closure:
    """A function or lambda defined inside another."""

    node: ast.FunctionDef | ast.Lambda
    scope: Scope


@dataclass
class Super:
    receiver: object
    after: ClassRef


@dataclass
class Scope:
    """Local names, then those of the enclosing function, then the module's."""

    module: Module
    owner: ClassRef | None = None
    names: dict[str, Any] = field(default_factory=dict)
    outer: Scope | None = None
    yields: list[Any] = field(default_factory=list)

    def find(self, name: str) -> tuple[bool, Any]:
        if name in self.names:
            return True, self.names[name]
        return self.outer.find(name) if self.outer is not None else (False, None)

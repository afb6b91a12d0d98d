"""Who imports whom in src/freight, read from the source without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
PACKAGE = SRC / "freight"
FACADE = "freight"  # freight/__init__.py: the public names
SOURCES = sorted(PACKAGE.rglob("*.py"))
# Parts of packages with a place of their own in the import order
PARTS = ("model.config", "serve.processes", "adapters.ray", "adapters.tgi_launcher")
# What `model.config` is made of, though it lies with the layers that it describes
SPECS = re.compile(r"model\.mixers\.(spec|dividing|\w+\.spec)\b")
# The packages, and the modules beside them
TOP = frozenset(
    path.stem
    for path in PACKAGE.iterdir()
    if path.suffix == ".py" or (path / "__init__.py").exists()
)


@cache
def parsed(source: str) -> ast.Module:
    """Parse a file's text; many checks read the same files."""
    return ast.parse(source)


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    """Return the package, the part of one in PARTS, or the module beside packages, of a module:
    'fp8' of 'freight.fp8.formats', 'model.config' of 'freight.model.config.parse', and of the specs
    of mixers.
    """
    if module == FACADE:
        return FACADE
    name = module.removeprefix("freight.")
    if SPECS.match(name):
        return "model.config"
    for part in PARTS:
        if name == part or name.startswith(f"{part}."):
            return part
    return name.split(".")[0]


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the full names of every module that a file imports anywhere in it, also for types alone
    or by `import_module("freight.…")`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield "." * node.level + (node.module or "")
            elif node.module == "freight":
                # `from freight import cache` names a package, `… import LLM` the facade
                yield from (f"freight.{a.name}" if a.name in TOP else "freight" for a in node.names)
            else:
                module = node.module or ""
                yield module
                # `from freight.model import config` names a part with a place of its own
                names = [f"{module}.{alias.name}" for alias in node.names]
                yield from (name for name in names if package_of(name) != package_of(module))
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module"
        ):
            yield from (
                arg.value
                for arg in node.args
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            )


@cache
def package_imports() -> dict[str, set[str]]:
    """Return, for each package and each module beside packages, those that it imports."""
    results: dict[str, set[str]] = {name: set() for name in sorted({*TOP, *PARTS} - {"__init__"})}
    for path in SOURCES:
        package = package_of(module_name(path))
        if package != FACADE:
            names = imported(parsed(path.read_text(encoding="utf-8")))
            results[package] |= {package_of(n) for n in names if n.startswith("freight.")} - {
                package
            }
    return results

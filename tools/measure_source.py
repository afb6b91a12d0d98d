"""Print figures of how Python source reads, for this tree and for others to compare with.

    python tools/measure_source.py [FOLDER ...]        without one: src/freight

lines            that hold code: no blank ones, comments or docstrings
nodes a line     syntax nodes of ast, by those lines: how much a line holds
comprehensions, conditionals, comments, Any    for each 1,000 of them; conditionals are `a if b else
                                               c`
complexity       mean of a function, as ruff's C901 counts it: 1, and 1 for each branch
packed           share of assignments that bind several names to a tuple of values, but for swaps
prose            share of bound names that are prose (PROSE): a reader cannot tell what `one` is
over 96          share of lines longer than 96 columns

The figures are hints, not goals: they show where to look.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.comprehension,
    ast.match_case,
)
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PROSE = re.compile(
    "_*(one|found|given|held|kept|told|beside|every|others|wanted|sought|shown|said|due|whole|own|taken"
    "|meant|once|rest|apart|ahead|behind)"
)


@dataclass
class Figures:
    """Counts over the files of a folder."""

    files: int = 0
    lines: int = 0
    nodes: int = 0
    comprehensions: int = 0
    conditionals: int = 0
    comments: int = 0
    any: int = 0
    long: int = 0
    assignments: int = 0
    packed: int = 0
    names: int = 0
    prose: int = 0
    complexity: list[int] | None = None

    def add(self, text: str) -> None:
        """Count one file."""
        tree = ast.parse(text)
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        docstrings = {line for node in ast.walk(tree) for line in docstring_lines(node)}
        code: set[int] = set()
        for token in tokens:
            if token.type not in NO_CODE:
                code.update(range(token.start[0], token.end[0] + 1))
        lines = text.splitlines()
        self.files += 1
        self.lines += len(code - docstrings)
        self.long += sum(len(lines[line - 1]) > 96 for line in code - docstrings)
        self.comments += sum(token.type == tokenize.COMMENT for token in tokens)
        self.complexity = self.complexity or []
        for node in ast.walk(tree):
            self.nodes += 1
            self.comprehensions += isinstance(node, COMPREHENSIONS)
            self.conditionals += isinstance(node, ast.IfExp)
            self.any += isinstance(node, ast.Name) and node.id == "Any"
            self.assignments += isinstance(node, ast.Assign)
            self.packed += is_packed(node)
            name = bound_name(node)
            self.names += name is not None
            self.prose += name is not None and PROSE.fullmatch(name) is not None
            if isinstance(node, FUNCTIONS):
                self.complexity.append(complexity(node))

    def row(self, name: str) -> list[str]:
        """Return the cells of a table's row."""
        per_thousand = [self.comprehensions, self.conditionals, self.comments, self.any]
        return [
            name,
            f"{self.files:,}",
            f"{self.lines:,}",
            f"{self.nodes:,}",
            f"{self.nodes / self.lines:.1f}",
            *(f"{1000 * count / self.lines:.1f}" for count in per_thousand),
            f"{statistics.mean(self.complexity or [1]):.2f}",
            f"{self.long / self.lines:.1%}",
            f"{self.packed / max(self.assignments, 1):.2%}",
            f"{self.prose / max(self.names, 1):.2%}",
        ]


def is_packed(node: ast.AST) -> bool:
    """Return whether `node` is `a, b = x, y`, and not a swap."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    bound = {ast.unparse(element) for element in target.elts}
    return bound != {ast.unparse(element) for element in node.value.elts}


def bound_name(node: ast.AST) -> str | None:
    """Return the name that `node` binds: a variable or a parameter."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else None


def docstring_lines(node: ast.AST) -> range:
    """Return the lines of the docstring of a module, class or function; empty for other nodes."""
    if (
        isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
        and ast.get_docstring(node, clean=False) is not None
    ):
        first = node.body[0]
        return range(first.lineno, (first.end_lineno or first.lineno) + 1)
    return range(0)


def complexity(function: ast.AST) -> int:
    """Return 1 plus the branches of `function`, without those of functions inside it."""
    return 1 + sum(isinstance(node, BRANCHES) for node in inside(function))


def inside(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of `function`, without those of functions inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, FUNCTIONS):
            yield child
            yield from inside(child)


def measure(folder: Path) -> Figures:
    """Count every Python file of `folder`, at any depth."""
    figures = Figures()
    for path in sorted(folder.rglob("*.py")):
        figures.add(path.read_text(encoding="utf-8"))
    return figures


def main() -> None:
    names = [
        "",
        "files",
        "lines",
        "nodes",
        "nodes a line",
        "comprehensions",
        "conditionals",
        "comments",
        "Any",
    ]
    rows = [[*names, "complexity", "over 96", "packed", "prose"]]
    for folder in map(Path, sys.argv[1:] or [str(ROOT / "src" / "freight")]):
        figures = measure(folder)
        if not figures.files:
            sys.exit(f"{folder} has no Python file")
        rows.append(figures.row(folder.name))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    main()

"""The program that decides whether an answer to a problem of HumanEval is right.

It is what stands before the function in the prompt (imports, other functions), then the answer's code,
then the published tests and their call. Of the answer's code only what the function needs stays, as in
EvalPlus (Liu et al. 2023): imports, and definitions and assignments that it reaches. So an example call
or an `input()` beside the function decides nothing.
"""

from __future__ import annotations

import ast
import re

from questions.sources import CodeProblem

_BLOCK = re.compile(
    r"```[ \t]*(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)(?:\n[ \t]*```|\Z)", re.DOTALL
)
_PYTHON = ("python", "python3", "py", "")


def program(problem: CodeProblem, answer: str) -> str:
    """Python source that raises nothing if, and only if, the answer is right."""
    code = answer_code(answer, problem.entry_point)
    parts = [preamble(problem), needed_code(code, problem.entry_point), problem.test]
    return "\n\n".join([*parts, f"check({problem.entry_point})\n"])


def answer_code(answer: str, entry_point: str) -> str:
    """The last block of Python that defines the function, else the first block, else the whole text."""
    blocks = [
        match["code"] for match in _BLOCK.finditer(answer) if match["language"].lower() in _PYTHON
    ]
    defining = [block for block in blocks if _definition(entry_point).search(block)]
    if defining:
        return defining[-1]
    return blocks[0] if blocks else answer


def preamble(problem: CodeProblem) -> str:
    """What stands in the prompt before the function."""
    start = _definition(problem.entry_point).search(problem.prompt)
    assert start is not None, f"{problem.id}: the prompt defines no {problem.entry_point}"
    return problem.prompt[: start.start()]


def needed_code(code: str, entry_point: str) -> str:
    """The imports, and what `entry_point` reaches through names; code that cannot be parsed as it is."""
    try:
        nodes = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code
    needed = {entry_point}
    remaining = nodes
    while True:
        reached = [node for node in remaining if needed & _defined_names(node)]
        if not reached:
            break
        remaining = [node for node in remaining if node not in reached]
        for node in reached:
            needed |= _used_names(node)
    used = [node for node in nodes if _is_import(node) or node not in remaining]
    return "\n\n".join(ast.unparse(node) for node in used)


def _definition(name: str) -> re.Pattern[str]:
    return re.compile(rf"^(?:async +)?def +{re.escape(name)}\b", re.MULTILINE)


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _defined_names(node: ast.stmt) -> set[str]:
    """The names that a statement at the top level binds; none of other kinds of statements."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {
            name.id
            for target in targets
            for name in ast.walk(target)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
    return set()


def _used_names(node: ast.stmt) -> set[str]:
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}

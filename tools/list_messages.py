r"""List the sentences of Freight's own errors as they stand in the source, one a line, sorted.

    python tools/list_messages.py            prints them
    python tools/list_messages.py --write    writes tests/fixtures/messages.txt

A line is the exception's class and the message; expressions are {…}, and a line break is \n. Where a
function makes the error (`raise checkpoint.fault("…")`), its name stands for the class. Places in the
source are not named, so that moving a file changes no line. A message that is put together elsewhere
(a variable, a function's result) is left out.
tests/test_messages.py holds the rules that the sentences keep.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src/freight"
LIST = ROOT / "tests/fixtures/messages.txt"

# What messages show of a value: its kind of expression says nothing to a reader
VALUE = "{…}"


def error_classes(classes: list[ast.ClassDef]) -> set[str]:
    """The names of FreightError, ApiError and all classes derived from them."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for node in classes
    }
    names = {"FreightError", "ApiError"}
    while derived := {name for name, parents in bases.items() if parents & names} - names:
        names |= derived
    return names


def template(expression: ast.expr) -> str:
    """The text of an expression of a string, with {…} for what is known only when it runs."""
    match expression:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(template(part) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left) + template(right)
    return VALUE


def messages(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """The class (or the function that makes the error) and the template of each message of `nodes`.
    A message may be listed more than once.
    """
    classes = error_classes([node for node in nodes if isinstance(node, ast.ClassDef)])
    for node in nodes:
        match node:
            case ast.Call(func=ast.Name(id=name)) as call if name in classes:
                yield from ((name, text) for text in sentences(call))
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) as call):
                if name[0].islower() or name[0] == "_":
                    yield from ((name.lstrip("_"), text) for text in sentences(call))


def sentences(call: ast.Call) -> Iterator[str]:
    """The templates of the arguments of a call that are sentences, not one or two words."""
    for argument in call.args:
        text = template(argument)
        if len(text.split()) > 2 and text.replace(VALUE, "").strip():
            yield text


def listing(source: Path) -> list[str]:
    nodes: list[ast.AST] = []
    for path in source.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kinds = (ast.Call, ast.ClassDef, ast.Raise)
        nodes.extend(node for node in ast.walk(tree) if isinstance(node, kinds))
    return sorted({f"{name}: {text}".replace("\n", "\\n") for name, text in messages(nodes)})


def main() -> None:
    parser = argparse.ArgumentParser(description="List the messages of Freight's errors.")
    parser.add_argument("--write", action="store_true", help=f"write {LIST.relative_to(ROOT)}")
    parser.add_argument("--source", type=Path, default=SOURCE, help="the folder to read")
    options = parser.parse_args()
    text = "\n".join(listing(options.source)) + "\n"
    if options.write:
        LIST.write_text(text, encoding="utf-8")
    else:
        sys.stdout.buffer.write(text.encode())


if __name__ == "__main__":
    main()

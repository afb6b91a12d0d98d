"""Write docs/modules.md: every module of the source, with its first sentence.

    python tools/list_modules.py            write it
    python tools/list_modules.py --check    exit with 1 if it differs from what would be written

A package opens with a docstring in its `__init__.py`, a C++ file with a comment.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "modules.md"
OTHERS = {  # folders that are no packages
    "csrc": "The CPU kernels in C++17, one source for every instruction set.",
    "benchmarks": "Scripts that print the figures of benchmarks.md.",
    "benchmarks/peers": "Drivers that measure other engines in the same way as Freight.",
    "tools": "Scripts that write documents and models, and what `make` runs.",
}
HEAD = """# Modules

Every module of the source, in the words of its first sentence. `python tools/list_modules.py` writes this page.
[architecture.md](architecture.md) says how they work together.
"""


def opening(path: Path) -> str:
    """Return the first sentence of a file's docstring or opening comment; "" for a file without
    one.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    else:
        lines = re.match(r"(?://.*\n)*", text)
        assert lines is not None
        text = "\n".join(line.removeprefix("//").strip() for line in lines[0].splitlines())
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph)[0]


def folders() -> Iterator[tuple[Path, list[Path]]]:
    """Yield each folder of the source with its files, a package before those inside it."""
    package = ROOT / "src" / "freight"
    inits = sorted(
        package.rglob("__init__.py"), key=lambda init: init.parent.relative_to(package).parts
    )
    for init in inits:
        yield init.parent, sorted(path for path in init.parent.glob("*.py") if path != init)
    yield ROOT / "csrc", sorted([*(ROOT / "csrc").glob("*.h"), *(ROOT / "csrc").glob("*.cpp")])
    for folder in (
        "benchmarks",
        "benchmarks/peers",
        "benchmarks/questions",
        "benchmarks/simulation",
        "tools",
    ):
        files = (ROOT / folder).glob("*.py")
        yield ROOT / folder, sorted(path for path in files if path.name != "__init__.py")


def page() -> str:
    """Return the page's text. Raises ValueError for a file that does not say what it is."""
    lines = [HEAD]
    for folder, files in folders():
        lines += [f"## {folder.relative_to(ROOT)}/", ""]
        init = folder / "__init__.py"
        heading = opening(init) if init.exists() else OTHERS[str(folder.relative_to(ROOT))]
        lines += [heading, ""]
        openings = [opening(path) for path in files]
        lines += [f"- `{path.name}`: {item}" for path, item in zip(files, openings, strict=True)]
        if not all((heading, *openings)):
            raise ValueError(
                f"{folder.relative_to(ROOT)} has a file, or is a package, that does not say what it is"
            )
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

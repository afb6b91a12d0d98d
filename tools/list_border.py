"""Write docs/internals/border.md: the names of the core that `lab/` and `adapters/` may import.

    python tools/list_border.py            write it
    python tools/list_border.py --check    exit with 1 if it differs from what would be written

The core is every package but `lab`, `adapters` and `cli`. A name that is new on this page widens
what the core promises to its tools, so a review sees it there.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict

from source_imports import ROOT, SOURCES, module_name, package_of, parsed

PAGE = ROOT / "docs" / "internals" / "border.md"
OUTSIDE = ("lab", "adapters", "cli")
HEAD = """# The border of the core

What answers a request, reads a checkpoint or quantizes one is the core: every package but `lab/`, `adapters/` and
`cli/`. The core imports none of the three. `lab/` and `adapters/` import these names of the core and no others.
`python tools/list_border.py` writes this page, and a test compares it with the imports.

| module | names |
|---|---|
"""


def is_outside(module: str) -> bool:
    return package_of(module).split(".")[0] in OUTSIDE


def border() -> dict[str, set[str]]:
    """Return the modules of the core that lab and adapters import, each with the names they take."""
    modules = {module_name(path) for path in SOURCES}
    names: dict[str, set[str]] = defaultdict(set)
    for path in SOURCES:
        module = module_name(path)
        if not is_outside(module) or package_of(module) == "cli":
            continue
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            if not node.module.startswith("freight.") or is_outside(node.module):
                continue
            for alias in node.names:
                imported = f"{node.module}.{alias.name}"
                if imported in modules:
                    names[imported].add("*")
                else:
                    names[node.module].add(alias.name)
    return names


def page() -> str:
    rows = []
    for module, names in sorted(border().items()):
        listed = "all of it" if "*" in names else ", ".join(f"`{name}`" for name in sorted(names))
        rows.append(f"| `{module.removeprefix('freight.')}` | {listed} |\n")
    return HEAD + "".join(rows)


def main() -> int:
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

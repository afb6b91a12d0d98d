"""All *.md files: relative links and anchors lead somewhere, and the index lists every page."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]
BUILT = {"build", "dist", "node_modules", "real"}  # not the source's; those with a dot neither
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part in BUILT or part.startswith(".venv") for part in path.relative_to(ROOT).parts)
)
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2[`~]*\s*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(
    r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|^\[[^\]]+\]:\s+(\S+)", re.MULTILINE
)
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$", re.MULTILINE)
MOST_LINES_OF_README = 120


def links(text: str) -> list[str]:
    """Where links lead that are within this repository, outside of code."""
    plain = CODE.sub("", FENCE.sub("", text))
    found = [inline or reference for inline, reference in LINK.findall(plain)]
    return [link for link in found if not re.match(r"[a-z][a-z+.-]*:", link)]


def anchors(text: str) -> set[str]:
    """The names of a page's headings as the forge makes them, and those that are written out."""
    names: Counter[str] = Counter()
    found = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for heading in HEADING.findall(FENCE.sub("", text)):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(f"{name}-{names[name]}" if names[name] else name)
        names[name] += 1
    return found


@cache
def anchors_of(path: Path) -> set[str]:
    return anchors(path.read_text(encoding="utf-8"))


def broken(page: Path, text: str) -> list[str]:
    found = []
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = (page.parent / unquote(path)).resolve() if path else page
        within = anchors(text) if target == page else anchors_of(target) if anchor else set()
        if not target.exists() or not target.is_relative_to(ROOT):
            found.append(f"{link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in within:
            found.append(f"{link}: no such heading")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page, page.read_text(encoding="utf-8")) == []


def test_broken_links_are_found() -> None:
    page = ROOT / "docs" / "audit.md"
    text = (
        "# A `heading`, twice\n# A heading twice\n[a](#a-heading-twice) [b](#a-heading-twice-1)\n"
        "[c](#a-heading-twice-2) [d](missing.md) [e](cli.md#no-such) [f](../../outside.md)\n"
        "[g](cli.md#freight-serve) [h](https://example.org) `[i](code.md)`\n"
        "```\n[j](code.md)\n# no heading\n```\n[k]: missing.md\n[l](#no-heading)\n"
    )
    assert broken(page, text) == [
        "#a-heading-twice-2: no such heading",
        "missing.md: no such file",
        "cli.md#no-such: no such heading",
        "../../outside.md: no such file",
        "missing.md: no such file",
        "#no-heading: no such heading",
    ]


def test_the_index_has_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {
        (index.parent / link.partition("#")[0]).resolve() for link in links(index.read_text())
    }
    pages = {page for page in PAGES if page.is_relative_to(ROOT / "docs")} - {index}
    assert {str(page.relative_to(ROOT)) for page in pages - listed} == set()


def test_readme_is_short_and_begins_with_what_matters() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_LINES_OF_README
    first_screen = "\n".join(lines[:40])
    for needed in ("docs/architecture.svg", "not run", "text only", "LICENSE", "docs/README.md"):
        assert needed in first_screen, needed


def test_the_glossary_is_in_order() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^- \*\*(.+?)\*\*", text, re.MULTILINE)
    assert terms == sorted(terms, key=str.casefold)
    assert len(terms) >= 30

"""tools/build_docs.py and reference_pages.py: all pages are laid out with links that lead somewhere.

What Sphinx makes of them is `make docs`; the check of its HTML is shown here to find faults.
"""

from __future__ import annotations

import re
from pathlib import Path

import build_docs
import pytest
import reference_pages
from tests.test_documents import FENCE, HEADING, PAGES, anchors, links
from typer.testing import CliRunner

import freight
from freight.cli.main import app
from freight.serve.documented import SUMMARIES

ROOT = build_docs.ROOT


@pytest.fixture(scope="module")
def laid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    build_docs.lay(ROOT, folder, build_docs.reference())
    return folder


def test_every_document_is_a_page(laid: Path) -> None:
    wanted = {page for page in PAGES if page.is_relative_to(ROOT / "docs")}
    wanted |= {ROOT / name for name in build_docs.PLACES}
    names = [build_docs.staged_place(str(page.relative_to(ROOT))) for page in wanted]
    assert [name for name in names if not (laid / name).is_file()] == []


def test_links_between_pages_lead_somewhere(laid: Path) -> None:
    broken = []
    for page in laid.rglob("*.md"):
        for link in links(page.read_text(encoding="utf-8")):
            target = page.parent / link.partition("#")[0] if link[0] != "#" else page
            if not target.is_file():
                broken.append(f"{page.relative_to(laid)}: {link}")
    assert broken == []


def test_the_navigation_has_every_page(laid: Path) -> None:
    entries = re.findall(r"```\{toctree\}(.*?)```", (laid / "index.md").read_text(), re.DOTALL)
    lines = [line for part in entries for line in part.split("\n\n", 1)[1].splitlines()]
    listed = {f"{line.rpartition('<')[2].removesuffix('>')}.md" for line in lines}
    pages = {str(page.relative_to(laid)) for page in laid.rglob("*.md")}
    assert {page for page in pages if not page.startswith("source/")} - listed == {"index.md"}
    captions = re.findall(r":caption: (.*)", "".join(entries))
    assert captions[1:5] == ["Tutorials", "How to", "Reference", "Explanation"]


def test_links_in_code_stay_as_they_are() -> None:
    page = (
        "[a](b.md) ![p](c.svg) [cli.md](cli.md#x) [![i](d.svg)](e.md) [w](https://example.org) [k](#z)\n"
        "`[f](g.md)` ``[`f`](g.md)``\n```\n[h](i.md)\n```\n  ~~~~\n  [j](k.md)\n  ~~~~\n"
        '<img width="3" src="l.svg" alt="m">\n[n `o` [p]](q.md)\n'
    )
    assert build_docs.with_links(page, lambda target: f"<{target}>") == (
        "[a](<b.md>) ![p](<c.svg>) [](<cli.md#x>) [![i](<d.svg>)](<e.md>) [w](https://example.org) [k](<#z>)\n"
        "`[f](g.md)` ``[`f`](g.md)``\n```\n[h](i.md)\n```\n  ~~~~\n  [j](k.md)\n  ~~~~\n"
        '<img width="3" src="<l.svg>" alt="m">\n[n `o` [p]](<q.md>)\n'
    )


def test_headings_have_the_forge_s_names() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        plain = [
            re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", one)
            for one in HEADING.findall(FENCE.sub("", text))
        ]
        assert {build_docs.heading_name(one) for one in plain} <= anchors(text)


def test_a_site_s_faults_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top"></h1><a href="b.html#there"></a><a href="#top"></a><a href="https://example.org"></a>'
        '<a href="b.html#not"></a><a href="c.html"></a><script src="https://example.org/x.js"></script>'
        '<img src="data:image/png;base64,AA"><link href="//example.org/font.css"><img src="no.svg">'
    )
    (tmp_path / "b.html").write_text('<p id="there"></p>')
    (tmp_path / "d.css").write_text(
        "@import url(local.css); p{src:url('https://example.org/f.woff')}"
    )
    assert sorted(build_docs.site_faults(tmp_path)) == [
        "a.html: //example.org/font.css is loaded from elsewhere",
        "a.html: b.html#not: no such heading",
        "a.html: c.html: no such file",
        "a.html: https://example.org/x.js is loaded from elsewhere",
        "a.html: no.svg: no such file",
        "d.css: https://example.org/f.woff is loaded from elsewhere",
    ]


def test_every_public_name_is_described(laid: Path) -> None:
    page = (laid / "reference" / "python.md").read_text(encoding="utf-8")
    assert [name for name in freight.__all__ if f"### {name}\n" not in page] == []
    assert "#### LLM.generate\n\n```python\nLLM.generate(\n    prompts: " in page
    assert "\n    kv_cache_dtype: str = 'auto',\n" in page
    assert " object at 0x" not in page  # defaults have names, not addresses


def test_every_verb_and_option_is_listed(laid: Path) -> None:
    """The verbs of docs/cli.md, and what --help of a few prints."""
    page = (laid / "reference" / "options.md").read_text(encoding="utf-8")
    written = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    parts = dict(
        re.findall(r"^## (freight [\w ]+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    )
    verbs = re.findall(r"^\| `freight (\w+)` \|", written, re.MULTILINE)
    assert [verb for verb in verbs if f"freight {verb}" not in parts] == []
    for verb in ("serve", "quantize", "bench serving", "scales extract", "store ls"):
        shown = CliRunner().invoke(app, [*verb.split(), "--help"]).output
        options = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", shown, re.MULTILINE)) - {"--help"}
        assert options
        assert [one for one in options if f"`{one}`" not in parts[f"freight {verb}"]] == []


IF_ASKED_FOR = {
    *("/tokenizer_info", "/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/is_sleeping"),
    *("/update_weights_from_disk", "/get_weight_version", "/reset_prefix_cache"),
}


def test_every_route_is_listed(laid: Path) -> None:
    page = (laid / "reference" / "http.md").read_text(encoding="utf-8")
    paths = {path.replace(":path", "") for path in SUMMARIES} - IF_ASKED_FOR
    found = set(re.findall(r"^## (?:GET|POST) (\S+)$", page, re.MULTILINE))
    assert found == paths
    assert "| `temperature` | number |  | at least 0, at most 2.0 |" in page
    assert "| `messages` | array of object with role, content" in page


def test_docstrings_become_markdown() -> None:
    docstring = """Return *x*.

        Call it:

            f(1)

        a    the first
        bcd  the second, `[1]` and [2]
        """
    assert reference_pages.as_markdown(docstring) == (
        "Return \\*x\\*.\n\nCall it:\n\n```python\nf(1)\n```\n\n"
        "```text\na    the first\nbcd  the second, `[1]` and [2]\n```"
    )

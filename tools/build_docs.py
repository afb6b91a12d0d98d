"""Build the site of all documents into build/docs, and check that every link in it leads somewhere.

    make docs
    python tools/build_docs.py [OUT]        needs Sphinx, Furo and MyST (docs/requirements.txt)

The pages are those of the repository. They are laid into a folder of their own first: docs/ at its
root, docs/README.md as the front page, whose sections are the navigation; the pages of the source
that documents link to, as code; and the reference pages of `reference_pages.py`. Links are written
anew for that. Sphinx's warnings are errors. Afterwards `site_faults` reads the HTML as a browser
would without a network: a link to what is not there is a fault, and so is anything that would be
loaded from elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
STAGED = ROOT / "build" / "docs-source"
SITE = ROOT / "build" / "docs"
PLACES = {  # pages that are not in docs/ -> where they are in the site
    "README.md": "about.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "docs/README.md": "index.md",
}
REFERENCE = {  # the pages that are made of the source, and what the front page says of them
    "reference/python.md": "every public name, with its docstring",
    "reference/options.md": "every verb and option, as `--help` has them",
    "reference/http.md": "every route and field of /openapi.json",
}
FIRST = ("Overview <about>", "features", "glossary")  # in the navigation, above the sections
LANGUAGES = {".py": "python", ".yaml": "yaml", ".jinja": "jinja"}

_FENCE = r"^(?P<indent> *)(?P<fence>```+|~~~+).*?^(?P=indent)(?P=fence)[`~]*\s*$"
_CODE = r"(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)"
_LINK = r"(?P<text>!?\[(?:[^\]\[]|\[[^\]]*\])*\])\((?P<target>[^)\s]+)\)"
_IMAGE = r"(?P<image><img [^>]*?src=\")(?P<source>[^\"]+)\""
_PARTS = re.compile(f"{_FENCE}|{_LINK}|{_IMAGE}|{_CODE}", re.MULTILINE | re.DOTALL)

_ORPHAN = "---\norphan: true\n---\n\n"  # in no navigation


def heading_name(heading: str) -> str:
    """Return the name that the forge gives to a heading, which links to it use."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def staged_place(path: str) -> str:
    """Return where a file of the repository is in the site's folder."""
    if path in PLACES:
        return PLACES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path.endswith(".svg") else f"source/{path.removesuffix('.md')}.md"


def with_links(text: str, link: Callable[[str], str]) -> str:
    """Return a page whose links within the repository, outside of code, lead to `link(target)`."""

    def changed(match: re.Match[str]) -> str:
        target = match["target"] or match["source"]
        if target is None or re.match(r"[a-z][a-z+.-]*:", target):
            return match[0]
        result = link(target)
        if match["source"]:
            return f'{match["image"]}{result}"'
        words = with_links(match["text"], link)
        if words.endswith(".md]"):  # a file's name is none of a page: MyST puts its title
            words = "[]"
        return f"{words}({result})"

    return _PARTS.sub(changed, text)


class Pages:
    """The pages that are laid out so far, from the root of the repository on.

    files      place in the site -> content
    pictures   place in the site -> the file to copy
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, str] = {}
        self.pictures: dict[str, Path] = {}

    def add(self, path: str) -> None:
        """Add a page of the repository and what it links to."""
        place = staged_place(path)
        if place in self.files or place in self.pictures:
            return
        source = self.root / path
        if path.endswith(".svg"):
            self.pictures[place] = source
            return
        if not path.endswith(".md"):
            self.files[place] = source_page(source, path)
            return
        self.files[place] = ""  # being added: pages link to each other
        text = with_links(
            source.read_text(encoding="utf-8"), lambda target: self._link(path, target)
        )
        self.files[place] = f"{_ORPHAN}{text}" if place.startswith("source/") else text

    def _link(self, path: str, target: str) -> str:
        """Return `target`, as the page `path` has it, from this page's place in the site."""
        file, _, anchor = target.partition("#")
        anchor = f"#{anchor}" if anchor else ""
        if not file:
            return anchor
        linked = os.path.normpath(os.path.join(os.path.dirname(path), unquote(file)))
        self.add(linked)
        there = os.path.relpath(
            staged_place(linked), os.path.dirname(staged_place(path)) or os.curdir
        )
        return PurePosixPath(there).as_posix() + anchor


def source_page(source: Path, path: str) -> str:
    """Return a page with the text of a file, or of all files of a folder."""
    files = sorted(file for file in source.rglob("*") if file.is_file()) if source.is_dir() else []
    parts = [f"{_ORPHAN}# {path}"]
    for file in files or [source]:
        text = file.read_text(encoding="utf-8")
        longest = max((len(run) for run in re.findall("`+", text)), default=0)
        fence = "`" * max(3, longest + 1)
        if files:
            parts.append(f"## {file.relative_to(source).as_posix()}")
        language = LANGUAGES.get(file.suffix, "text")
        parts.append(f"{fence}{language}\n{text.rstrip()}\n{fence}")
    return "\n\n".join(parts) + "\n"


def front_page(index: str, readme: str) -> str:
    """Return the front page: what Freight is, the index of documents, and the navigation.

    The sections of the index are those of the navigation, with the first link of each line.
    """
    [intro] = [block for block in readme.split("\n\n") if block.startswith("Freight is an ")]
    _, *sections = re.split(r"^## (.*)$", index, flags=re.MULTILINE)
    parts = [f"# Freight\n\n{intro}\n", navigation("Freight", FIRST)]
    for name, body in zip(sections[::2], sections[1::2], strict=True):
        lines = body.rstrip()
        if name == "Reference":
            made = [
                f"- [{place.partition('/')[2]}]({place}): {says}"
                for place, says in REFERENCE.items()
            ]
            lines += "\n" + "\n".join(made)
        links = re.findall(r"^- \[[^\]]*\]\(([^)#]+)\.md\)", lines, re.MULTILINE)
        parts.append(f"## {name}\n{lines}\n\n{navigation(name, links)}")
    parts.append(navigation("Project", ("contributing", "security", "changelog", "modules")))
    return "\n".join(parts)


def navigation(caption: str, places: Sequence[str]) -> str:
    """Return a part of the navigation at the side."""
    head = ["```{toctree}", ":hidden:", f":caption: {caption}", ""]
    return "\n".join([*head, *places, "```"]) + "\n"


def lay(root: Path, folder: Path, reference: Mapping[str, str]) -> None:
    """Write every page into `folder`, ready for Sphinx. `reference`: place -> content."""
    pages = Pages(root)
    for path in (
        *PLACES,
        *(str(p.relative_to(root)) for p in sorted((root / "docs").rglob("*.md"))),
    ):
        pages.add(path)
    pages.files["index.md"] = front_page(pages.files["index.md"], pages.files["about.md"])
    shutil.rmtree(folder, ignore_errors=True)
    for place, text in (pages.files | dict(reference)).items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text, encoding="utf-8")
    for place, source in pages.pictures.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, folder / place)
    shutil.copy(root / "docs" / "conf.py", folder)
    shutil.copytree(root / "docs" / "_static", folder / "_static")


def reference() -> dict[str, str]:
    """Return the pages that are made of the source."""
    import reference_pages

    document = reference_pages.openapi()
    return {
        "reference/python.md": reference_pages.python_page(),
        "reference/options.md": reference_pages.options_page(),
        "reference/http.md": reference_pages.http_page(document),
        "reference/openapi.json": json.dumps(document, indent=1) + "\n",
    }


# --- the site


_LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "srcset"}
_ELSEWHERE = " is loaded from elsewhere"


class _Links(HTMLParser):
    """What a page has: the names in it, where it leads, and what a browser loads for it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.leads: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name = given.get("id") or (given.get("name") if tag == "a" else None)
        if name:
            self.names[name] += 1
        if tag == "a" and given.get("href"):
            self.leads.append(given["href"] or "")
        loaded = given.get(_LOADED.get(tag, ""))
        if loaded:
            self.loads.append(loaded)


def site_faults(site: Path) -> list[str]:
    """List links that lead nowhere, and what would be loaded from elsewhere, page by page."""
    pages: dict[Path, _Links] = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = _Links()
        pages[path].feed(path.read_text(encoding="utf-8"))
    results = []
    for path, page in pages.items():
        targets = page.loads + [item for item in page.leads if not urlsplit(item).scheme]
        for target in targets:
            if fault := _fault(path, target, pages):
                results.append(f"{path.relative_to(site)}: {target}{fault}")
    for path in sorted(site.rglob("*.css")):
        for target in re.findall(r"url\(\s*[\"']?((?:https?:)?//[^)\"']+)", path.read_text()):
            results.append(f"{path.relative_to(site)}: {target}{_ELSEWHERE}")
    return results


def _fault(path: Path, target: str, pages: Mapping[Path, _Links]) -> str:
    """Return what is wrong with `target` on the page `path`; "" for nothing."""
    parts = urlsplit(target)
    if parts.scheme == "data":
        return ""
    if parts.scheme or parts.netloc:
        return _ELSEWHERE
    linked = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not linked.is_file():
        return ": no such file"
    is_missing = (
        parts.fragment and linked in pages and unquote(parts.fragment) not in pages[linked].names
    )
    return ": no such heading" if is_missing else ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the site of all documents.")
    parser.add_argument("out", nargs="?", type=Path, default=SITE, help="the folder of the site")
    out = parser.parse_args().out.resolve()
    lay(ROOT, STAGED, reference())
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    command += ["-d", str(ROOT / "build" / "docs-trees"), str(STAGED), str(out)]
    environ = os.environ | {"PYTHONPATH": str(ROOT / "tools")}
    if subprocess.run(command, check=False, env=environ).returncode:
        sys.exit("Sphinx found faults; its lines above name page and line")
    faults = site_faults(out)
    if faults:
        sys.exit("the site has faults:\n" + "\n".join(faults))
    print(
        f"{out / 'index.html'}: {len(list(out.rglob('*.html')))} pages, every link leads somewhere"
    )


if __name__ == "__main__":
    main()

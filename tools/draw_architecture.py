"""Draw docs/architecture.svg: the packages of src/freight, and who imports whom.

    python tools/draw_architecture.py            write it
    python tools/draw_architecture.py --check    exit with 1 if it differs from what would be written

Arrows, floors, words and numbers come from the source. Only the columns are chosen here, so that every arrow is one
straight line: a box stands above all that it imports and reaches up to the first box that imports it. An import that
follows from others (cli -> fp8) has no arrow. What cannot be drawn so raises ValueError with what to change.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from list_modules import opening
from source_imports import PACKAGE, PARTS, ROOT, SOURCES, module_name, package_imports, package_of

from freight.base.svg import framed, line, styled, text

PICTURE = ROOT / "docs" / "architecture.svg"
Imports = Mapping[str, set[str]]

COLUMNS = {  # the first and the last of four, and the colour: used, running, parts
    "adapters.ray": (0, 3, "used"),
    "cli": (0, 3, "used"),
    "lab": (0, 2, "used"),
    "adapters": (0, 1, "used"),
    "serve": (3, 3, "used"),
    "llm": (1, 1, "used"),
    "serve.processes": (3, 3, "running"),
    "quantizer": (0, 0, "running"),
    "engine": (1, 3, "running"),
    "model": (0, 3, "running"),
    "checkpoint": (0, 0, "parts"),
    "cache": (1, 1, "parts"),
    "text": (2, 2, "parts"),
    "parallel": (1, 1, "parts"),
    "kernels": (1, 1, "parts"),
    "settings": (0, 1, "parts"),
    "model.config": (0, 1, "parts"),
    "operands": (0, 0, "parts"),
    "fp8": (0, 0, "parts"),
    "base": (1, 2, "parts"),
}
KINDS = {
    "used": "what people and programs use",
    "running": "what runs and quantizes a model",
    "parts": "what that is made of",
}
KEY = (
    "An arrow is an import; those that follow from other arrows are left out. "
    "The number is that of a package's modules."
)
BESIDE = (3, 3)  # the columns of the modules that are no packages
NO_FLOOR = {
    "__main__",
    "auto_fp8",
    "llm_compressor",
    "lm_eval",
    "ray",
    "transformers",
    "adapters.tgi_launcher",
}  # names for others, and of one module

WIDTH = 860
MARGIN = 24
TOP = 82
GAP = 22
INSET = 12
_LINE = 16  # the height of a line, and of a row of names of packages inside
_CHIP = 23
_RULES = """
text{font-size:12px}text.name{font-size:15px;font-weight:600}
text.chip{font:11px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
rect.used{fill:var(--used);stroke:var(--used-edge)}rect.running{fill:var(--running);stroke:var(--running-edge)}
rect.parts{fill:var(--parts);stroke:var(--parts-edge)}rect.beside{fill:none;stroke:var(--line);stroke-dasharray:4 4}
rect.chip{fill:var(--paper);stroke:var(--line)}
.arrow{stroke:var(--soft);stroke-width:1.5}path{fill:var(--soft)}
"""
_STYLE = styled(
    _RULES,
    light="--used:#e6f0fa;--used-edge:#8fb8de;--running:#e4f4ec;--running-edge:#86c2a6;--parts:#fbeee3;"
    "--parts-edge:#dfb48f;",
    dark="--used:#182a3c;--used-edge:#37608a;--running:#15302a;--running-edge:#34705a;--parts:#35271c;"
    "--parts-edge:#80593a;",
)


def below(name: str, imports: Imports) -> set[str]:
    """Return everything that `name` imports, directly or through others."""
    results: set[str] = set()
    for item in imports[name]:
        results |= {item} | below(item, imports)
    return results


def arrows(imports: Imports) -> list[tuple[str, str]]:
    """Return the imports between drawn boxes that follow from no others."""
    reach = {name: below(name, imports) & COLUMNS.keys() for name in sorted(COLUMNS)}
    results = []
    for name, reached in reach.items():
        farther = set().union(*(reach[other] for other in reached))
        results += [(name, item) for item in sorted(reached - farther)]
    return results


def floors(imports: Imports) -> dict[str, int]:
    """Return the floor of each drawn box, from 0 at the bottom: one above the highest that it
    imports.
    """

    @cache
    def height(name: str) -> int:
        return max((height(item) + 1 for item in imports[name]), default=0)

    used = sorted({height(name) for name in COLUMNS})
    return {name: used.index(height(name)) for name in COLUMNS}


@dataclass(frozen=True)
class Box:
    """What stands on the floors `low` … `high` in the columns `first` … `last`."""

    name: str
    kind: str
    first: int
    last: int
    low: int
    high: int
    more: str  # at the right of the name
    words: str
    inside: tuple[str, ...] = ()  # names of packages, each in a frame

    @property
    def x(self) -> float:
        return MARGIN + self.first * (_COLUMN + GAP)

    @property
    def width(self) -> float:
        return (self.last - self.first + 1) * (_COLUMN + GAP) - GAP

    @property
    def lines(self) -> list[str]:
        return wrapped(self.words.split(), self.width - 2 * INSET)

    @property
    def rows(self) -> list[str]:
        """The names of packages inside, by rows: one to a row where there is room."""
        width = self.width - 2 * INSET if self.low == self.high else 0.0
        return wrapped(list(self.inside), width, 24)

    @property
    def height(self) -> int:
        """What the content takes."""
        return 36 + _LINE * len(self.lines) + _CHIP * len(self.rows) + (4 if self.inside else 0)


_COLUMN = (WIDTH - 2 * MARGIN - 3 * GAP) / 4


def wrapped(words: list[str], width: float, between: float = 4) -> list[str]:
    """Return `words` in lines of at most `width` pixels, by a width of letters that no usual font
    exceeds.
    """
    lines: list[str] = []
    left = 0.0
    for word in words:
        wide = 7.1 * len(word) + between
        if wide > left:
            lines.append(word)
            left = width + between - wide
        else:
            lines[-1] += f" {word}"
            left -= wide
    return lines


def boxes(imports: Imports) -> dict[str, Box]:
    low = floors(imports)
    results: dict[str, Box] = {}
    over: dict[str, list[int]] = {name: [] for name in COLUMNS}
    for upper, lower in arrows(imports):
        over[lower].append(low[upper])
    for name, (first, last, kind) in COLUMNS.items():
        folder = PACKAGE / name.replace(".", "/")
        is_package = folder.is_dir()
        modules = [path for path in SOURCES if package_of(module_name(path)) == name]
        count = sum(path.name != "__init__.py" for path in modules)
        rooms = {init.parent.name for init in folder.glob("*/__init__.py")}
        rooms -= {part.removeprefix(f"{name}.") for part in PARTS}
        results[name] = Box(
            name=name.replace(".", "/") if is_package else f"{name}.py",
            kind=kind,
            first=first,
            last=last,
            low=low[name],
            high=min(over[name], default=low[name] + 1) - 1,
            more=str(count) if is_package else "",
            words=opening(
                folder / "__init__.py" if is_package else folder.with_suffix(".py")
            ).replace("`", ""),
            inside=tuple(sorted(rooms)),
        )
    return results


def beside(drawn: Mapping[str, Box], imports: Imports) -> Box:
    """Return the box of the modules that are no packages, below what stands in their columns."""
    first, last = BESIDE
    over = [box.low for box in drawn.values() if box.first <= last and box.last >= first]
    names = sorted(set(imports) - set(drawn) - NO_FLOOR)
    words = f"Modules beside the packages: {', '.join(names)}."
    return Box(
        name="beside",
        kind="beside",
        first=first,
        last=last,
        low=0,
        high=min(over) - 1,
        more="",
        words=words,
    )


def extents(drawn: list[Box]) -> list[tuple[float, float]]:
    """Return the top and bottom of each floor in pixels: as high as what stands on it needs."""
    heights = [0] * (1 + max(box.high for box in drawn))
    for box in drawn:
        if box.low == box.high:
            heights[box.low] = max(heights[box.low], box.height)
    for box in drawn:
        room = sum(heights[box.low : box.high + 1]) + GAP * (box.high - box.low)
        heights[box.high] += max(0, box.height - room)
    ends: list[tuple[float, float]] = []
    y = float(TOP)
    for height in reversed(heights):
        ends.append((y, y + height))
        y += height + GAP
    return ends[::-1]


def drawn_box(box: Box, top: float, bottom: float) -> Iterator[str]:
    shape = f'x="{box.x:g}" y="{top:g}" width="{box.width:g}" height="{bottom - top:g}" rx="7"'
    yield f'<rect {shape} class="{box.kind}"/>'
    left = box.x + INSET
    y = top + 9
    if box.kind != "beside":
        y = top + 25
        yield text(left, y - 2, box.name, 'class="name"')
    if box.more:
        yield text(box.x + box.width - INSET, y - 2, box.more, 'text-anchor="end" class="soft"')
    for words in box.lines:
        y += _LINE
        yield text(left, y, words, 'class="soft"' if box.kind == "beside" else "")
    for row in box.rows:
        y += _CHIP
        yield from chips(row.split(), left, y)


def chips(names: list[str], x: float, y: float) -> Iterator[str]:
    for name in names:
        wide = 7.1 * len(name) + 14
        yield f'<rect x="{x:g}" y="{y - 13:g}" width="{wide:g}" height="19" rx="4" class="chip"/>'
        yield text(x + wide / 2, y, name, 'text-anchor="middle" class="chip"')
        x += wide + 8


def free_columns(upper: Box, lower: Box, drawn: list[Box]) -> list[int]:
    """Return the columns that both boxes stand in, with no other box between them."""
    between = [box for box in drawn if box.high > lower.high and box.low < upper.low]
    crossed = {column for box in between for column in range(box.first, box.last + 1)}
    first = max(upper.first, lower.first)
    last = min(upper.last, lower.last)
    return [column for column in range(first, last + 1) if column not in crossed]


def arrow(
    upper: Box, lower: Box, drawn: list[Box], ends: list[tuple[float, float]]
) -> Iterator[str]:
    """Yield a line straight down. Raises ValueError where there is none, or where it would cross a
    box.
    """
    columns = free_columns(upper, lower, drawn)
    if not columns:
        raise ValueError(
            f"{upper.name} imports {lower.name}, which no straight arrow shows: give them COLUMNS in "
            "tools/draw_architecture.py in which they stand above each other"
        )
    x = MARGIN + (columns[0] + columns[-1] + 1) / 2 * (_COLUMN + GAP) - GAP / 2
    start = ends[upper.low][1] + 1
    end = ends[lower.high][0] - 2
    yield line((x, x), (start, end - 6), 'class="arrow"')
    yield f'<path d="M{x:g} {end:g}l-4.5 -8h9z"/>'


def check(drawn: list[Box]) -> None:
    """Raise ValueError for boxes that lie upon each other."""
    taken: dict[tuple[int, int], str] = {}
    for box in drawn:
        for floor in range(box.low, box.high + 1):
            for column in range(box.first, box.last + 1):
                other = taken.setdefault((floor, column), box.name)
                if other != box.name:
                    raise ValueError(
                        f"{box.name} and {other} need one place: give one of them other COLUMNS in "
                        "tools/draw_architecture.py"
                    )


def picture(imports: Imports) -> str:
    """Return the SVG's text. Raises ValueError for a package without a place, or where an arrow has
    none.
    """
    packages = {name for name in imports if not (PACKAGE / f"{name.replace('.', '/')}.py").exists()}
    unplaced = packages - set(COLUMNS)
    if unplaced:
        raise ValueError(f"{', '.join(sorted(unplaced))}: no COLUMNS in tools/draw_architecture.py")
    drawn = boxes(imports)
    every = [*drawn.values(), beside(drawn, imports)]
    check(every)
    ends = extents(every)
    parts = [text(MARGIN, 58, KEY, 'class="soft"')]
    for upper, lower in arrows(imports):
        parts += arrow(drawn[upper], drawn[lower], every, ends)
    for box in every:
        parts += drawn_box(box, ends[box.high][0], ends[box.low][1])
    y = ends[0][1] + 34
    x = float(MARGIN)
    for kind, meaning in KINDS.items():
        parts.append(
            f'<rect x="{x:g}" y="{y - 11:g}" width="20" height="13" rx="3" class="{kind}"/>'
        )
        parts.append(text(x + 28, y, meaning, 'class="soft"'))
        x += 7.1 * len(meaning) + 52
    return framed("The packages of Freight", WIDTH, round(y + 20), _STYLE, parts)


def main() -> int:
    drawn = picture(package_imports())
    if "--check" in sys.argv[1:]:
        return int(PICTURE.read_text(encoding="utf-8") != drawn)
    PICTURE.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The kit of all pictures, as SVG text: colours, elements, a frame, a logarithmic axis.

Every picture follows the reader's light or dark setting and loads nothing. Its colours are the
variables of `styled`: paper, ink, soft (for what is second), grid, line, box, and c0 to c7, which
differ on both papers, for data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

_LIGHT = """--paper:#fff;--ink:#1d2329;--soft:#59626c;--grid:#e6eaed;--line:#8b949e;--box:#f3f6f8;
--c0:#1d2329;--c1:#1668b8;--c2:#c2410c;--c3:#0f7a5a;--c4:#8a3ffc;--c5:#9a6700;--c6:#b0307a;--c7:#3d6470;"""
_DARK = """--paper:#14181d;--ink:#e8ebee;--soft:#a3adb7;--grid:#29313a;--line:#6b7681;--box:#1d232a;
--c0:#e8ebee;--c1:#6bb3f5;--c2:#f59a5d;--c3:#4fcf9f;--c4:#c4a0ff;--c5:#e3b341;--c6:#f58ac5;--c7:#9fc3cf;"""
_RULES = """
text{font:13px system-ui,-apple-system,"Segoe UI",sans-serif;fill:var(--ink)}
text.soft{fill:var(--soft)}text.title{font-size:18px;font-weight:600}text.head{font-weight:600}
text.num{font-variant-numeric:tabular-nums}.grid{stroke:var(--grid)}.base{stroke:var(--line)}
"""


def styled(rules: str = "", light: str = "", dark: str = "", root: str = "svg") -> str:
    """Return the style sheet of a picture: the kit's rules, then `rules`.

    `light` and `dark` are further variables on either paper; `root` is the element that has them.
    """
    colours = (
        f"{root}{{{_LIGHT}{light}}}\n@media(prefers-color-scheme:dark){{{root}{{{_DARK}{dark}}}}}\n"
    )
    return colours + _RULES + rules


def text(x: float, y: float, content: object, look: str = "") -> str:
    """Write text at (x, y); `look` has further attributes."""
    return f'<text x="{x}" y="{y}"{look and " "}{look}>{escape(str(content))}</text>'


def line(x: tuple[float, float], y: tuple[float, float], look: str) -> str:
    """Write a line from (x[0], y[0]) to (x[1], y[1]); `look` has further attributes."""
    return f'<line x1="{x[0]}" x2="{x[1]}" y1="{y[0]}" y2="{y[1]}" {look}/>'


def framed(title: str, width: int, height: int, style: str, parts: Iterable[str]) -> str:
    """Write a picture with its title at the top, and the sheet `style` (`styled`), as a file."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{style}</style>",
        f'<rect width="{width}" height="{height}" fill="var(--paper)"/>',
        text(24, 34, title, 'class="title"'),
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


@dataclass(frozen=True)
class LogAxis:
    """A logarithmic axis: `low` to `high` lie at the pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the pixel of `value`, or the nearest end."""
        low = math.log10(self.low)
        high = math.log10(self.high)
        share = (math.log10(value) - low) / (high - low)
        return round(self.start + min(1.0, max(0.0, share)) * (self.end - self.start), 1)

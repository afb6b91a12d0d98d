"""Parts of pictures as SVG text: elements, a frame, a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape


def text(x: float, y: float, content: object, look: str = "") -> str:
    """Write text at (x, y); `look` has further attributes."""
    return f'<text x="{x}" y="{y}"{look and " "}{look}>{escape(str(content))}</text>'


def line(x: tuple[float, float], y: tuple[float, float], look: str) -> str:
    """Write a line from (x[0], y[0]) to (x[1], y[1]); `look` has further attributes."""
    return f'<line x1="{x[0]}" x2="{x[1]}" y1="{y[0]}" y2="{y[1]}" {look}/>'


def framed(title: str, width: int, height: int, style: str, parts: Iterable[str]) -> str:
    """Write a picture with its title at the top, and its colours in `style`, as a file."""
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
        low, high = math.log10(self.low), math.log10(self.high)
        share = (math.log10(value) - low) / (high - low)
        return round(self.start + min(1.0, max(0.0, share)) * (self.end - self.start), 1)

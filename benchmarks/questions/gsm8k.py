"""The final number of an answer to a problem of GSM8K, and whether it is the reference's.

It is the number in the last \\boxed{…}, which the prompt asks for; there, behind the last equals sign.
Without one it is the last number in the text. Numbers are compared by their value: 1,450,000 is
1450000.00, \\frac{1}{2} is 0.5. A percent sign counts as a unit, as it does in GSM8K's references: 20% is
20.
"""

from __future__ import annotations

import re
from fractions import Fraction

_BOX = "\\boxed"
_AMOUNT = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
# a mixed number such as 2 1/2, else a number or a quotient; a hyphen behind a word is no sign
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w.])-\s?)?(?:(?P<whole>\d+)\s+(?P<part>\d+)/(?P<parts>\d+)"
    rf"|(?P<above>{_AMOUNT})(?:/(?P<below>{_AMOUNT}))?)"
)
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac\s?(\d)(\d)")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\{([^{}]*)\}")
_EXPONENT = re.compile(r"\^(?:\{[^{}]*\}|\\circ|\w)")
_EQUAL = re.compile(r"=|\\approx|≈")


def is_right(answer: str, reference: str) -> bool:
    """reference: a number as GSM8K writes it, such as 114,200"""
    expected = _values(reference)
    assert len(expected) == 1, f"the reference {reference!r} is not a number"
    return final_number(answer) == expected[0]


def final_number(answer: str) -> Fraction | None:
    """None: there is no number."""
    box = last_box(answer)
    if box is not None:
        result = _EQUAL.split(box)[-1]
        # units may have digits: m^2. But a number may be written as text too.
        without_units = _EXPONENT.sub(" ", _TEXT.sub(" ", result))
        values = _values(without_units) or _values(result)
        if values:
            return values[0]
    values = _values(answer)
    return values[-1] if values else None


def last_box(answer: str) -> str | None:
    """The content of the last complete \\boxed{…}, braces within it paired. None: there is none."""
    end = len(answer)
    while (start := answer.rfind(_BOX, 0, end)) >= 0:
        content = _braced(answer, start + len(_BOX))
        if content is not None:
            return content
        end = start
    return None


def _braced(text: str, start: int) -> str | None:
    """What stands in the braces that open at `start`; None: they do not open there, or never close."""
    begin = start
    while begin < len(text) and text[begin] == " ":
        begin += 1
    if not text.startswith("{", begin):
        return None
    depth = 0
    for place in range(begin, len(text)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                return text[begin + 1 : place]
    return None


def _values(text: str) -> list[Fraction]:
    """The numbers of a text, in their order."""
    values = []
    for match in _NUMBER.finditer(_plain(text)):
        value = _value(match)
        if value is not None:
            values.append(value)
    return values


def _value(match: re.Match[str]) -> Fraction | None:
    """None: the divisor is 0."""
    whole = Fraction(match["whole"] or 0)
    above = match["above"] or match["part"]
    below = match["below"] or match["parts"] or "1"
    divisor = Fraction(below.replace(",", ""))
    if not divisor:
        return None
    value = whole + Fraction(above.replace(",", "")) / divisor
    return -value if match["sign"] else value


def _plain(text: str) -> str:
    """Without TeX: fractions as a/b, \\text{…} as its content, no dollars, spacing of numbers."""
    text = text.replace("{,}", ",").replace("\\!", "").replace("\\,", "").replace("\\ ", " ")
    text = _SHORT_FRACTION.sub(r" \1/\2", text)
    text = _FRACTION.sub(r" \1/\2", text)
    text = _TEXT.sub(r" \1 ", text)
    text = text.replace("\\$", "$").replace("\N{MINUS SIGN}", "-")
    # -$5 and $-5 are both negative
    text = text.replace("-$", "-").replace("$", " ")
    return re.sub(r"(?<=\d) ?/ ?(?=\d)", "/", text)

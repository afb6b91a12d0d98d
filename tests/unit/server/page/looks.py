"""What anyone must be able to do with a page: read it at every width, light and dark, and use it
with the keyboard alone. Scripts that find what is wrong, and the keys of a user.

Contrast is WCAG 2.2's (https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio): 4.5 for text (1.4.3), 3
for the mark of the focus (1.4.11). Text of disabled controls is exempt there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

from tests.unit.server.page.browser import Browser

WIDTHS = (360, 800, 1200, 1920)
SCHEMES = ("light", "dark")
LOOKS = list(product(WIDTHS, SCHEMES))

_COLOURS = """
const numbers = (colour) => {
  const found = colour.match(/[\\d.]+/g).map(Number);
  return [...found.slice(0, 3), found[3] ?? 1];
};
const over = ([r, g, b, a], below) => [r, g, b].map((own, i) => own * a + below[i] * (1 - a));
const paper = (element) => {
  if (!element) return matchMedia("(prefers-color-scheme: dark)").matches ? [0, 0, 0] : [255, 255, 255];
  const own = numbers(getComputedStyle(element).backgroundColor);
  return own[3] === 1 ? own.slice(0, 3) : over(own, paper(element.parentElement));
};
const luminance = (colour) => {
  const [r, g, b] = colour.map((own) => own / 255).map((own) =>
    own <= 0.04045 ? own / 12.92 : ((own + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (one, other) => {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};
"""
_NAMED = """
const named = (element) => `${element.tagName}#${element.id}.${element.getAttribute("class") ?? ""}`;
"""
# Elements that are wider than they may be. What scrolls by itself may hold more than it shows.
_TOO_WIDE = (
    _NAMED
    + """
const clips = (element) => getComputedStyle(element).overflowX !== "visible";
const wide = [];
for (const element of document.querySelectorAll("body *")) {
  if (!element.checkVisibility() || element.closest(".sr")) continue;
  const scrolls = clips(element) && element.scrollWidth > element.clientWidth + 1;
  const may = element.matches("pre, .wide, textarea, input, summary, #model");
  if (scrolls && !may) wide.push(`${named(element)} scrolls sideways`);
  let up = element.parentElement;
  while (up !== document.body && !clips(up)) up = up.parentElement;
  const box = element.getBoundingClientRect();
  if (up === document.body && (box.right > innerWidth + 0.5 || box.left < -0.5)) wide.push(named(element));
}
const root = document.documentElement;
if (root.scrollWidth > innerWidth) wide.push(`the page: ${root.scrollWidth} > ${innerWidth}`);
return wide;
"""
)
# Texts, and placeholders, that stand out too little from what is behind them.
_FAINT = (
    _NAMED
    + _COLOURS
    + """
const found = [];
const look = (element, colour, opacity, text) => {
  const behind = paper(element);
  const value = contrast(over([...colour.slice(0, 3), colour[3] * opacity], behind), behind);
  if (value < 4.5) found.push(`${named(element)} "${text.slice(0, 30)}": ${value.toFixed(2)}`);
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
  const off = element.closest("fieldset:disabled, :disabled") || element.previousElementSibling?.matches(":disabled");
  if (!text || off || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
  if (element.closest("script, style, noscript, title, .sr")) continue;
  const style = getComputedStyle(element);
  let opacity = 1;
  for (let up = element; up; up = up.parentElement) opacity *= Number(getComputedStyle(up).opacity);
  const svg = element instanceof SVGElement;
  look(svg ? element.closest("svg").parentElement : element, numbers(svg ? style.fill : style.color), opacity, text);
}
for (const element of document.querySelectorAll("[placeholder]")) {
  if (!element.checkVisibility() || element.matches(":disabled")) continue;
  const style = getComputedStyle(element, "::placeholder");
  look(element, numbers(style.color), Number(style.opacity), element.placeholder);
}
return found;
"""
)
# Pairs of controls, or of texts of one picture, that lie on each other where they are not scrolled away.
_ON_EACH_OTHER = """
const pairs = [];
const seen = (element) => {
  let { left, top, right, bottom } = element.getBoundingClientRect();
  for (let up = element.parentElement; up; up = up.parentElement) {
    if (getComputedStyle(up).overflowY === "visible") continue;
    const edge = up.getBoundingClientRect();
    [left, top] = [Math.max(left, edge.left), Math.max(top, edge.top)];
    [right, bottom] = [Math.min(right, edge.right), Math.min(bottom, edge.bottom)];
  }
  return { left, top, right, bottom };
};
const boxes = (elements) => elements.filter((element) => element.checkVisibility({ visibilityProperty: true }))
  .map((element) => [element, seen(element)]);
const compare = (found) => found.forEach(([a, p], i) => found.slice(i + 1).forEach(([b, q]) => {
  const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
  const down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
  const within = a.contains(b) || b.contains(a);
  if (across > 0.5 && down > 0.5 && !within) pairs.push(`${a.outerHTML.slice(0, 60)} on ${b.outerHTML.slice(0, 60)}`);
}));
compare(boxes([...document.querySelectorAll("summary, button, input:not([type=radio]), textarea, label > span")]));
for (const picture of document.querySelectorAll("svg")) compare(boxes([...picture.querySelectorAll("text")]));
return pairs;
"""
# What the keyboard must reach, by a key that finds it again. A group of radio buttons is one stop.
_REACHABLE = """
window.stops ??= new Map();
window.nameOf = (element) => {
  const name = [element.tagName.toLowerCase(), element.id, element.name ?? ""].join(" ");
  if (!stops.has(element)) stops.set(element, `${name} ${stops.size}`);
  return stops.get(element);
};
return [...document.querySelectorAll("summary, button, input, textarea, select, a[href], [tabindex='0']")]
  .filter((element) => element.checkVisibility({ visibilityProperty: true }) && !element.matches(":disabled"))
  .filter((element) => element.type !== "radio" || element.checked)
  .map(nameOf);
"""
# The element with the focus: its name, whether it is in view, and the contrast of the mark around it.
_FOCUSED = (
    _COLOURS
    + """
const element = document.activeElement;
if (!element || element === document.body) return null;
const box = (element.type === "radio" ? element.nextElementSibling : element).getBoundingClientRect();
let mark = 0;
for (const place of [element, element.nextElementSibling, element.closest(".box")]) {
  const style = place && getComputedStyle(place);
  if (!style || style.outlineStyle === "none" || parseFloat(style.outlineWidth) < 1) continue;
  const colour = numbers(style.outlineColor).slice(0, 3);  // the browser's own ring has two colours
  mark = Math.max(mark, style.outlineStyle === "auto" ? 21 : contrast(colour, paper(place.parentElement)));
}
const inView = box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
return { name: nameOf(element), inView, mark };
"""
)


@contextmanager
def seen_at(page: Browser, width: int, scheme: str, height: int = 900) -> Iterator[None]:
    """Set the width of the window in pixels, and a user who prefers `scheme`."""
    feature = [{"name": "prefers-color-scheme", "value": scheme}]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    page.devtools("Emulation.setDeviceMetricsOverride", **metrics)
    page.devtools("Emulation.setEmulatedMedia", features=feature)
    try:
        yield
    finally:
        page.devtools("Emulation.setEmulatedMedia", features=[])
        page.devtools("Emulation.clearDeviceMetricsOverride")


def faults(page: Browser) -> list[str]:
    """What cannot be read: beyond the edge, too faint, or on top of each other."""
    found: list[str] = []
    for name, script in (("wide", _TOO_WIDE), ("faint", _FAINT), ("overlap", _ON_EACH_OTHER)):
        found += [f"{name}: {fault}" for fault in page.run(script)]
    return found


def tab_round(page: Browser, most: int = 60) -> list[dict[str, Any]]:
    """Press Tab until an element has the focus again; the stops in order."""
    page.run(_REACHABLE)
    stops: list[dict[str, Any]] = []
    for _ in range(most):
        page.press("Tab")
        stop = page.run(_FOCUSED)
        if stop is None:  # the document itself, between the last stop and the first
            continue
        if stops and stop["name"] == stops[0]["name"]:
            return stops
        stops.append(stop)
    raise AssertionError(f"Tab does not come round: {[stop['name'] for stop in stops]}")


def keyboard_faults(page: Browser) -> list[str]:
    """What the keyboard does not reach, or reaches out of view or without a mark."""
    reachable = page.run(_REACHABLE)
    stops = tab_round(page)
    names = [stop["name"] for stop in stops]
    found = [f"not reached: {name}" for name in reachable if name not in names]
    found += [f"out of view: {stop['name']}" for stop in stops if not stop["inView"]]
    found += [f"no mark: {stop['name']}" for stop in stops if stop["mark"] < 3]
    in_order = [name for name in names if name in reachable]
    start = in_order.index(reachable[0]) if reachable[0] in in_order else 0
    if in_order[start:] + in_order[:start] != [name for name in reachable if name in names]:
        found.append(f"not in the order of the page: {names}")
    return found

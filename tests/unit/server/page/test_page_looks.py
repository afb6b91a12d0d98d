"""The page at `/` at every width, light and dark, and by the keyboard alone, in a real Chromium."""

from __future__ import annotations

import pytest
from tests.unit.server.page.browser import Browser, finished, in_browser, send, wait_for
from tests.unit.server.page.fake_server import STATE, Server, answer, chunk
from tests.unit.server.page.looks import LOOKS, faults, keyboard_faults, seen_at, tab_round

ANSWER = (
    "Text with `code` and **bold**, " + "long" * 90 + "\n\n```py\n" + "x = 1  # " * 40 + "\n```\n"
)


def converse(server: Server, page: Browser) -> None:
    """A page with all that it can show: panels, warnings, reasoning, a tool, code, a failure."""
    server.fake.state = {**STATE, "saturated_values": 1204, "nan_values": 1}
    call = {"index": 0, "function": {"name": "search", "arguments": '{"x": "' + "y" * 200 + '"}'}}

    def play(write) -> None:
        write(chunk(reasoning_content="Let me see.") + chunk(tool_calls=[call]))
        answer(ANSWER)(write)

    server.fake.play = play
    page.open(server.url)
    wait_for(lambda: page.text("#status") == "Ready" and page.text("[data-live=held]") == "18,432")
    send(page, "A question, and " + "w" * 200)
    wait_for(lambda: finished(page))
    server.fake.refusal = (400, "temperature is -1; it must be at least 0.")
    send(page, "Another")
    wait_for(lambda: page.text(".failure") != "")
    server.fake.refusal = None
    page.run("for (const part of document.querySelectorAll('details')) part.open = true")


@in_browser
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_all_of_it_can_be_read(server: Server, page: Browser, width: int, scheme: str) -> None:
    with seen_at(page, width, scheme):
        page.open(server.url)
        wait_for(lambda: page.text("#status") == "Ready")
        assert faults(page) == [], "before the first message"
        converse(server, page)
        assert faults(page) == []


@in_browser
@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1200, "light")])
def test_the_keyboard_reaches_every_control_and_shows_where_it_is(
    server: Server, page: Browser, width: int, scheme: str
) -> None:
    with seen_at(page, width, scheme):
        converse(server, page)
        assert keyboard_faults(page) == []


@in_browser
def test_every_control_works_by_the_keyboard(server: Server, page: Browser) -> None:
    def go_to(name: str) -> None:
        for _ in tab_round(page):
            if page.run("return document.activeElement.matches(arguments[0])", name):
                return
            page.press("Tab")
        pytest.fail(f"Tab does not reach {name}")

    for part, key in (("#engine", "Enter"), ("#settings", "Space")):
        was = page.run(f"return document.querySelector('{part}').open")
        go_to(f"{part} > summary")
        page.press(key)
        assert page.run(f"return document.querySelector('{part}').open") is not was
    page.press("Space")  # the parameters again
    go_to("[name=max_tokens]")
    page.press("7")
    go_to("#prompt")
    page.press("Hi")
    go_to("#send")
    page.press("Space")
    wait_for(lambda: finished(page))
    assert server.fake.bodies[0][1]["max_tokens"] == 7
    go_to(".again")
    page.press("Enter")
    wait_for(lambda: len(server.fake.bodies) == 2 and finished(page))
    go_to("#clear")
    page.press("Enter")
    assert page.text(".exchange") == ""
    assert page.run("return document.activeElement.id") == "prompt", "the focus is not lost"


@in_browser
def test_faults_are_found(server: Server, page: Browser) -> None:
    page.run(
        """const sheet = new CSSStyleSheet();
        sheet.replaceSync("#model { position: fixed; left: 90vw; width: 20vw; display: block }"
            + "#uptime { color: #aaa } #clear { margin-right: -3rem }"
            + ":focus-visible { outline: 0 !important }");
        document.adoptedStyleSheets = [sheet];
        document.querySelector("#clear").hidden = false;
        document.querySelector("#settings > summary").tabIndex = -1;"""
    )
    found = "\n".join(faults(page))
    for fault in ("wide: P#model", "faint: SPAN#uptime", "overlap: <button"):
        assert fault in found, found
    by_keys = "\n".join(keyboard_faults(page))
    for fault in ("not reached: summary", "no mark: input  temperature"):
        assert fault in by_keys, by_keys

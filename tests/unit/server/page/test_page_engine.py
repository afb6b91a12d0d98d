"""The page at `/` in a real Chromium: the key, the live view, connections that fail, and narrow
screens.
"""

from __future__ import annotations

import re

import pytest
from tests.unit.server.page.browser import Browser, finished, in_browser, send, wait_for
from tests.unit.server.page.fake_server import STATE, Server, answer


@in_browser
def test_a_key_is_asked_for_once_and_stays_in_the_tab(server: Server, page: Browser) -> None:
    assert not page.shown("#key-form")
    server.fake.key = "sesame"
    send(page, "Hi")
    wait_for(lambda: page.shown("#key-form"))
    assert page.run("return document.querySelector('#prompt').value") == "Hi", (
        "what was not sent is not lost"
    )
    assert page.text(".exchange") == ""
    page.press("wrong", "Enter")
    wait_for(lambda: page.run("return document.activeElement.id") == "prompt")
    page.press("Enter")
    wait_for(lambda: "did not accept" in page.text("#key-text"))
    page.press("sesame", "Enter")
    wait_for(lambda: not page.shown("#key-form") and page.text("#status") == "Ready")
    page.press("Enter")
    wait_for(lambda: page.text(".body") == "Hello")
    assert server.fake.keys[-1] == "Bearer sesame"
    page.open(server.url)
    wait_for(lambda: page.text("#status") == "Ready")
    assert page.run("return [sessionStorage.length, localStorage.length, document.cookie]") == [
        1,
        0,
        "",
    ]


@in_browser
def test_the_mode_is_chosen_by_keyboard(server: Server, page: Browser) -> None:
    assert page.shown(".for-chat")
    page.run("document.querySelector('#mode :checked').focus()")
    page.press("Right")
    assert not page.shown(".for-chat"), "a completion has no system message"
    page.run("document.querySelector('#prompt').focus()")
    send(page, "Once")
    wait_for(lambda: server.fake.bodies)
    path, body = server.fake.bodies[0]
    assert (path, body["prompt"], body["max_tokens"]) == ("/v1/completions", "Once", 256)


@in_browser
def test_a_page_that_opens_without_a_key_asks_for_it(server: Server, page: Browser) -> None:
    server.fake.key = "sesame"
    page.open(server.url)
    wait_for(lambda: page.shown("#key-form"))
    page.press("sesame", "Enter")
    wait_for(lambda: page.text("#status") == "Ready")


@in_browser
@pytest.mark.parametrize("streams", [True, False])
def test_the_live_view_follows_the_engine(server: Server, page: Browser, streams: bool) -> None:
    server.fake.streams = streams
    page.open(server.url)
    wait_for(lambda: page.text("[data-live=held]") == "18,432")
    values = page.run(
        """const places = [...document.querySelectorAll("[data-live]")];
        return Object.fromEntries(places.map((place) => [place.dataset.live, place.textContent]));"""
    )
    assert values == {
        "generated": "412",
        "prompt": "1,893",
        "format": "fp8_e4m3",
        "held": "18,432",
        "reusable": "9,216",
        "free": "37,888",
        "running": "3",
        "waiting": "1",
        "hits": "63 %",
        "preemptions": "2",
        "saturated": "0",
        "nan": "0",
    }
    assert "16 bits it would be 32,768 (2.0×)" in page.text("#cache-note")
    assert page.text("#uptime").endswith("up 2 h 14 min")
    assert not page.shown("#saturation")
    server.fake.state = {
        **STATE,
        "running": 9,
        "saturated_values": 1204,
        "nan_values": 1,
        "prefix_hit_rate": None,
    }
    server.fake.changed.set()
    wait_for(lambda: page.text("[data-live=running]") == "9")
    assert page.text("[data-live=hits]") == "–"
    assert re.search(r"1,204 values .* 1 NaN", page.text("#saturation"))
    assert page.shown("#saturation")
    wait_for(
        lambda: (
            "L" in page.run("return document.querySelector('#spark-cache .line').getAttribute('d')")
        )
    )


@in_browser
def test_loading_and_a_lost_connection_are_shown_and_end_by_themselves(
    server: Server, page: Browser
) -> None:
    server.fake.health = 503
    page.open(server.url)
    wait_for(lambda: page.text("#status") == "Loading" and page.shown("#banner"))
    assert not page.run("return document.querySelector('#send').matches(':enabled')")
    server.fake.health = 200
    wait_for(lambda: page.text("#status") == "Ready" and not page.shown("#banner"))
    page.devtools("Network.enable")
    page.devtools(
        "Network.emulateNetworkConditions",
        offline=True,
        latency=0,
        downloadThroughput=0,
        uploadThroughput=0,
    )
    server.fake.ended.set()  # the stream of states ends, and the next one cannot begin
    server.fake.changed.set()
    wait_for(lambda: page.text("#status") == "No connection")
    server.fake.ended.clear()
    page.devtools(
        "Network.emulateNetworkConditions",
        offline=False,
        latency=0,
        downloadThroughput=-1,
        uploadThroughput=-1,
    )
    wait_for(lambda: page.text("#status") == "Ready")


@in_browser
def test_it_fits_a_narrow_screen_in_the_dark(server: Server, page: Browser) -> None:
    server.fake.play = answer(
        "a" * 300 + "\n\n```\n" + "b" * 300 + "\n```\n", "`" + "c" * 300 + "`"
    )
    light = page.run("return getComputedStyle(document.body).backgroundColor")
    page.devtools(
        "Emulation.setDeviceMetricsOverride",
        width=360,
        height=740,
        deviceScaleFactor=2,
        mobile=True,
    )
    dark = [
        {"name": "prefers-color-scheme", "value": "dark"},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    page.devtools("Emulation.setEmulatedMedia", features=dark)
    try:
        page.open(server.url)
        wait_for(
            lambda: page.text("#status") == "Ready" and page.text("[data-live=held]") == "18,432"
        )
        send(page, "x" * 200)
        wait_for(lambda: finished(page))
        overflowing = """return [...document.querySelectorAll("html, body, #log, aside, main, .exchange")]
            .filter((part) => part.scrollWidth > Math.min(part.clientWidth, 360))
            .map((part) => `${part.tagName} ${part.id} ${part.scrollWidth} > ${part.clientWidth}`)"""
        assert page.run(overflowing) == []
        page.click("#engine summary")
        page.click("#settings summary")
        assert page.shown("#spark-cache")
        assert page.run(overflowing) == []
        assert page.run("return getComputedStyle(document.body).backgroundColor") != light
        assert page.run("return document.getAnimations().length") == 0
    finally:
        page.devtools("Emulation.setEmulatedMedia", features=[])

"""A headless Chromium driven by chromedriver: W3C WebDriver is JSON over HTTP, and this is the part
that tests need.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import pytest

# the key that WebDriver gives to a reference to an element
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {
    "Enter": "\ue007",
    "Escape": "\ue00c",
    "Shift": "\ue008",
    "Tab": "\ue004",
    "Right": "\ue014",
    "Space": " ",
}
BINARIES = ("chromium", "chromedriver")
ARGUMENTS = [
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
    ),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-extensions",
    ),
    "--window-size=1280,860",
]


def missing() -> str:
    """Names of the programs that are not installed; empty if a browser can run."""
    return ", ".join(name for name in BINARIES if not shutil.which(name))


class Browser:
    """One window. Elements are named by CSS selectors."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._path = ""
        capabilities = {
            "goog:chromeOptions": {"binary": shutil.which("chromium"), "args": ARGUMENTS},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._path = f"/session/{session['sessionId']}"

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=300)
        try:
            connection.request(
                method, self._path + path, json.dumps(body or {}) if method == "POST" else None
            )
            value = json.loads(connection.getresponse().read())["value"]
        finally:
            connection.close()
        if isinstance(value, dict) and "error" in value:
            raise RuntimeError(f"{value['error']}: {value['message']}")
        return value

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *args: object) -> Any:
        """The value of a function's body in the page; a promise is awaited."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": args})

    def text(self, selector: str) -> str:
        """All text of the first element, hidden parts included; empty where there is none."""
        found = self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        return str(found)

    def shown(self, selector: str) -> bool:
        return bool(
            self.run(
                "return document.querySelector(arguments[0])?.checkVisibility() ?? false", selector
            )
        )

    def click(self, selector: str) -> None:
        element = self._ask("POST", "/element", {"using": "css selector", "value": selector})[
            ELEMENT
        ]
        self._ask("POST", f"/element/{element}/click")

    def press(self, *keys: str) -> None:
        """Keys to whatever has the focus: a name of KEYS, or text to type. `Shift` holds for the
        next key.
        """
        actions: list[dict[str, str]] = []
        held = False
        for key in keys:
            for character in [KEYS[key]] if key in KEYS else list(key):
                actions.append({"type": "keyDown", "value": character})
                if key != "Shift":
                    actions.append({"type": "keyUp", "value": character})
                if held:
                    actions.append({"type": "keyUp", "value": KEYS["Shift"]})
            held = key == "Shift"
        self._ask(
            "POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]}
        )

    def devtools(self, command: str, **params: object) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def log(self) -> list[dict[str, Any]]:
        """What the console has said since the last call."""
        return list(self._ask("POST", "/se/log", {"type": "browser"}))

    def quit(self) -> None:
        self._ask("DELETE", "")


def wait_for(condition: Callable[[], object], seconds: float = 15) -> Any:
    """The first true value of `condition`; fails when none comes."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not true within {seconds} s"
        time.sleep(0.02)
    return value


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser of its own, ended with its driver."""
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert driver.stdout is not None
        line = next(line for line in driver.stdout if "started successfully on port" in line)
        window = Browser(int(line.rstrip(" .\n").rpartition(" ")[2]))
        try:
            yield window
        finally:
            window.quit()
    finally:
        driver.terminate()
        driver.communicate(timeout=300)


in_browser = pytest.mark.skipif(
    bool(missing()), reason=f"needs Debian's chromium and chromium-driver: {missing()}"
)


def send(page: Browser, text: str) -> None:
    page.press(text, "Enter")


def finished(page: Browser) -> bool:
    return bool(
        page.run("return document.querySelector('.exchange:last-child [aria-busy=false]') !== null")
    )

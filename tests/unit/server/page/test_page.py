"""The page at `/`: its answers, and what it does in a real Chromium against a server that plays a
script.
"""

from __future__ import annotations

import re

import pytest
from tests.unit.server.page.browser import Browser, finished, in_browser, send, wait_for
from tests.unit.server.page.fake_server import Send, Server, answer, chunk, data

from freight.serve.page import PAGE, page_response

OWN = "document.title='owned'"
HOSTILE = f'<img src=x onerror="{OWN}"> </script><script>{OWN}</script> [a](javascript:x)'


def test_every_file_that_the_page_names_is_served() -> None:
    text = {path: content.decode() for path, (_, content) in PAGE.items()}
    named = {f"/{path}" for path in re.findall(r'(?:href|src)="([^"]+)"', text["/"])}
    for source in text.values():
        named |= {f"/page/{name}" for name in re.findall(r'from "\./([^"]+)"', source)}
    assert named == set(PAGE) - {"/"}


def test_the_answer_allows_no_foreign_script_and_is_checked_for_changes() -> None:
    status, headers, body = page_response("/") or pytest.fail("no page")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-cache"
    assert b"<script>" not in body
    tag = headers["ETag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        assert (page_response("/", known) or pytest.fail("no page"))[::2] == (304, b"")
    assert (page_response("/", '"other"') or pytest.fail("no page")).status == 200


@pytest.mark.parametrize(
    "path", ["", "/page", "/page/", "/page/../page.py", "/page/page.py", "/page//page.js", "/x"]
)
def test_other_paths_are_not_the_pages(path: str) -> None:
    assert page_response(path) is None


@in_browser
def test_a_message_is_sent_by_keyboard_alone_and_answered(server: Server, page: Browser) -> None:
    server.fake.play = answer("Fine, ", "**thank** ", "you.")
    page.press("How are", "Shift", "Enter", "you?", "Enter")
    wait_for(lambda: finished(page))
    assert page.text(".chat > .given") == "How are\nyou?"
    assert page.text(".body") == "Fine, thank you."
    assert page.text(".body strong") == "thank"
    assert re.fullmatch(
        r"3 tokens([\d.,]+ tok/s)?first token [\d.,]+ m?s8 of 12 prompt tokens cachedcomplete",
        page.text(".stats"),
    )
    assert page.text("#announcer") == "Answer complete, 3 tokens"
    page.run("document.querySelector('[name=system]').focus()")
    page.press("Be brief.")
    page.run("document.querySelector('#prompt').focus()")
    send(page, "And now?")
    wait_for(lambda: len(server.fake.bodies) == 2)
    path, body = server.fake.bodies[1]
    assert path == "/v1/chat/completions"
    assert [(message["role"], message["content"]) for message in body["messages"]] == [
        ("system", "Be brief."),
        ("user", "How are\nyou?"),
        ("assistant", "Fine, **thank** you."),
        ("user", "And now?"),
    ]
    assert body["stream"] is True
    assert body["stream_options"]["include_usage"] is True
    assert "temperature" not in body
    wait_for(lambda: finished(page))


@in_browser
def test_text_is_shown_while_it_comes_and_escape_ends_the_request(
    server: Server, page: Browser
) -> None:
    def endless(send: Send) -> None:
        while not server.fake.ended.wait(0.02):
            send(chunk("more "))

    server.fake.play = endless
    send(page, "Go on")
    wait_for(lambda: page.text(".body").startswith("more more"))
    assert page.shown("#stop")
    assert page.run("return document.querySelector('.answer').ariaBusy") == "true"
    assert not server.fake.gone.is_set()
    page.press("Escape")
    assert server.fake.gone.wait(300), "the server still sends"
    wait_for(lambda: page.text(".stats").endswith("stopped"))
    assert page.shown("#send")
    assert page.shown(".again")
    server.fake.play = answer("Again")
    page.click(".again")
    wait_for(lambda: page.text(".body") == "Again" and finished(page))
    page.click("#clear")
    assert page.text(".exchange") == ""
    assert page.shown("#welcome")


@in_browser
@pytest.mark.parametrize(
    ("last", "says"),
    [
        (data({"error": {"message": "The engine ended."}}) + data("[DONE]"), "The engine ended."),
        ("", "The connection ended before the answer did."),
        (data("not json"), "something that this page cannot read"),
    ],
)
def test_a_stream_that_fails_says_why(server: Server, page: Browser, last: str, says: str) -> None:
    server.fake.play = lambda send: send(chunk("Half an ans") + last)
    send(page, "Hi")
    wait_for(lambda: says in page.text(".failure"))
    assert page.text(".body") == "Half an ans"
    assert page.shown("#send")


@in_browser
def test_a_request_that_is_refused_says_why_and_is_no_part_of_the_next(
    server: Server, page: Browser
) -> None:
    server.fake.refusal = (400, "temperature is -1; it must be at least 0.")
    send(page, "First")
    wait_for(lambda: page.text(".failure") == "Error temperature is -1; it must be at least 0.")
    server.fake.refusal = None
    send(page, "Second")
    wait_for(lambda: page.text(".exchange:last-child .body") == "Hello")
    assert [message["content"] for message in server.fake.bodies[1][1]["messages"]] == ["Second"]


@in_browser
def test_an_answer_and_its_code_can_be_copied(server: Server, page: Browser) -> None:
    page.devtools(
        "Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"]
    )
    server.fake.play = answer("So: **x**\n```py\n", "x = 1\n\ny = 2\n```\n")
    send(page, "Hi")
    wait_for(lambda: finished(page))
    for button, copied in (
        (".actions .copy", "So: **x**\n```py\nx = 1\n\ny = 2\n```\n"),
        (".code .copy", "x = 1\n\ny = 2"),
    ):
        page.click(button)
        wait_for(lambda button=button: page.text(button) == "Copied")
        assert page.run("return navigator.clipboard.readText()") == copied


@in_browser
def test_a_models_text_never_becomes_html(server: Server, page: Browser) -> None:
    texts = (HOSTILE + "\n\n", f"- {HOSTILE}\n\n```html\n{HOSTILE}\n```\n**{HOSTILE}**")
    call = {"index": 0, "function": {"name": HOSTILE, "arguments": '{"x": "<img src=x>"}'}}

    def play(send: Send) -> None:
        send(chunk(reasoning_content=HOSTILE) + chunk(tool_calls=[call]))
        answer(*texts)(send)

    server.fake.play = play
    send(page, HOSTILE)
    wait_for(lambda: finished(page))
    assert page.text(".body").count(HOSTILE) == 4
    assert page.text(".chat > .given") == HOSTILE
    assert page.text(".reasoning div") == HOSTILE
    assert not page.shown(".reasoning div"), "reasoning is folded"
    assert page.text(".tool b") == HOSTILE
    assert page.text(".tool code") == '{\n  "x": "<img src=x>"\n}'
    assert page.run("return document.querySelectorAll('#log :is(img, script, a)').length") == 0
    with pytest.raises(RuntimeError, match="TrustedHTML"):
        page.run("document.body.innerHTML = 'x'")
    assert "TrustedHTML" in page.log()[-1]["message"]


TEXT = """Intro with `code` and **bold** and 2 * 3 * 4 ** x
second line

# Head
1. one
   - in `a`
   - in b

     more of b
2. two
lazy
---
```py
def f():

    return "```" if 1 else '**'
```
* star
7) seven
``two`` x
"""


@in_browser
def test_markdown_does_not_depend_on_how_the_text_was_cut(page: Browser) -> None:
    drawn = page.run(
        """const [text] = arguments;
        return import("/page/markdown.js").then(({ Markdown }) => {
          const draw = (pieces) => {
            const root = document.createElement("div"), view = new Markdown(root);
            for (const piece of pieces) view.append(piece);
            view.end();
            return root.innerHTML;
          };
          const all = new Set([draw([text]), draw([...text])]);
          for (let i = 1; i < text.length; i++) all.add(draw([text.slice(0, i), text.slice(i)]));
          return [...all];
        });""",
        TEXT,
    )
    assert len(drawn) == 1
    html = drawn[0]
    assert (
        "<p>Intro with <code>code</code> and <strong>bold</strong> and 2 * 3 * 4 ** x\nsecond line</p>"
        in html
    )
    assert "<h3>Head</h3>" in html
    assert "<li><span>one</span><ul><li><span>in <code>a</code></span></li>" in html
    assert (
        "<li><span>in b</span><p>more of b</p></li></ul></li><li><span>two\nlazy</span></li></ol><hr>"
        in html
    )
    assert (
        '<pre tabindex="0"><code>def f():\n\n    return "```" if 1 else \'**\'</code></pre>' in html
    )
    assert (
        '<ul><li><span>star</span></li></ul><ol start="7"><li><span>seven\n<code>two</code> x</span></li></ol>'
        in html
    )


@in_browser
@pytest.mark.parametrize(
    ("every", "mark", "found"), [(50, "\n\n- **item** ", "li"), (2, "**bold** ", "strong")]
)
def test_a_long_answer_is_drawn_quickly_and_moves_nothing_above_it(
    server: Server, page: Browser, every: int, mark: str, found: str
) -> None:
    words = [("word " if i % every else mark) for i in range(10_000)]
    server.fake.play = answer("First.\n\n", *words)
    page.run(
        """window.shift = 0; window.longest = 0;
        const observer = (see) => new PerformanceObserver((list) => list.getEntries().forEach(see));
        const watch = (type, see) => observer(see).observe({ type });
        watch("layout-shift", (entry) => { if (!entry.hadRecentInput) window.shift += entry.value; });
        watch("longtask", (entry) => { window.longest = Math.max(window.longest, entry.duration); });"""
    )
    send(page, "A long one")
    wait_for(lambda: finished(page))
    assert page.run(f"return document.querySelectorAll('.body {found}').length") == 10_000 / every
    assert page.run("return window.shift") < 0.1
    assert page.run("return window.longest") < 4000
    log = "const log = document.querySelector('#log');"
    assert page.run(f"{log} return log.scrollHeight - log.scrollTop - log.clientHeight") < 2


@in_browser
def test_a_model_without_a_chat_template_completes_text(server: Server, page: Browser) -> None:
    def play(send: Send) -> None:
        for text in ("there ", "<b>was"):
            send(data({"choices": [{"index": 0, "text": text, "finish_reason": None}]}))
        send(
            data({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
            + data("[DONE]")
        )

    server.fake.chat = False
    server.fake.play = play
    page.open(server.url)
    wait_for(lambda: page.text("#status") == "Ready")
    page.run("document.querySelector('[name=temperature]').focus()")
    page.press("0.5", "Tab", "0.9", "Tab", "40", "Tab", "7")
    page.run("document.querySelector('#prompt').focus()")
    send(page, "Once ")
    wait_for(lambda: finished(page))
    assert page.text(".body") == "Once there <b>was"
    assert page.text(".stats").endswith("token limit reached")
    path, body = server.fake.bodies[0]
    assert path == "/v1/completions"
    given = {
        name: body[name]
        for name in ("prompt", "temperature", "top_p", "max_tokens", "seed", "model")
    }
    assert given == {
        "prompt": "Once ",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 40,
        "seed": 7,
        "model": "demo",
    }
    page.run("document.querySelector('[name=temperature]').value = '3'")
    send(page, "More")
    assert len(server.fake.bodies) == 1, "a value that is not allowed is not sent"

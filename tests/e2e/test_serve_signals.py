"""SIGHUP reads the keys again and cuts no stream; the cause of a refusal is in the log, and no text
or key.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.asking import ENDLESS, ONE_BY_ONE, Server
from tests.demo_chat import demo_with_chat_template
from tests.serving import ServeProcess
from tests.unit.server.raw_http import wait_for


def test_sighup_reads_the_keys_again_and_cuts_no_stream(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada:sk-ada\n")
    options = ["--kv-cache-memory", "8MiB", *ONE_BY_ONE, "--api-key-file", str(keys)]
    process = ServeProcess(demo_with_chat_template(tmp_path / "demo"), options, forked=True)
    try:
        url = process.wait_until_healthy()
        ada, bob = (Server(url, {"Authorization": f"Bearer sk-{name}"}) for name in ("ada", "bob"))
        assert (ada.ask("/v1/models").status, bob.ask("/v1/models").status) == (200, 401)
        with ada.streaming(ENDLESS) as opened:
            keys.write_text("not a name:sk-carl\n")
            for pid in (
                process.process.pid,
                *process.children().values(),
            ):  # as the end of a terminal does it
                os.kill(pid, signal.SIGHUP)
            wait_for_line(process, "the keys stay as they were")
            keys.write_text("bob:sk-bob\n")
            os.kill(process.process.pid, signal.SIGHUP)
            wait_for_line(process, "keys were read again; there are 1")
            assert (ada.ask("/v1/models").status, bob.ask("/v1/models").status) == (401, 200)
            tokens = int(bob.metric("vllm:generation_tokens_total"))
            assert all(
                event["choices"] for event in opened.events(tokens + 100)
            )  # of a key that is gone
        refused = bob.ask("/v1/completions", {"prompt": "a secret text", "temperature": 9})
        assert refused.status == 400
        wait_for_line(process, "route=/v1/completions code=invalid_request_error param=temperature")
        bob.ask("/v1/completions", {"prompt": "x", "a secret text": 1})
        wait_for_line(process, "code=unknown_parameter param=other")
        for path, body, said in (
            ("/tokenize", {"prompt": 5}, "route=/tokenize code=invalid_request_error param=prompt"),
            (
                "/detokenize",
                {"tokens": [-1]},
                "route=/detokenize code=invalid_request_error param=tokens",
            ),
        ):
            assert bob.ask(path, body).status == 400
            wait_for_line(process, said)
        assert ada.ask("/v1/chat/completions", {"a": "secret"}).status == 401
        wait_for_line(process, "route=/v1/chat/completions code=invalid_api_key")
        assert ada.ask("/secret/text").status == 401
        wait_for_line(process, "route=other code=invalid_api_key")
        assert bob.ask("/v1/completions", {"prompt": "x", "max_tokens": 2}).status == 200
        assert bob.metric("freight:key_requests_total", key="bob") == 1
        assert bob.metric("freight:key_requests_total", key="ada") >= 1
        assert process.stop() == 0
        assert "line 1" in process.said
        assert "sk-" not in process.said
        assert "secret" not in process.said
    finally:
        process.close()


def wait_for_line(process: ServeProcess, text: str) -> None:
    wait_for(lambda: text in process.said)

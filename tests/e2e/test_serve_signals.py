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
    model = demo_with_chat_template(tmp_path / "demo")
    with ServeProcess(model, options, forked=True) as process:
        url = process.wait_until_healthy()
        ada, bob = (Server(url, {"Authorization": f"Bearer sk-{name}"}) for name in ("ada", "bob"))
        assert (ada.ask("/v1/models").status, bob.ask("/v1/models").status) == (200, 401)
        with ada.streaming(ENDLESS) as opened:
            keys.write_text("not a name:sk-carl\n")
            # as the end of a terminal does it
            for pid in (process.process.pid, *process.children().values()):
                os.kill(pid, signal.SIGHUP)
            wait_for_line(process, "the keys stay as they were")
            keys.write_text("bob:sk-bob\n")
            os.kill(process.process.pid, signal.SIGHUP)
            wait_for_line(process, "keys were read again; there are 1")
            assert (ada.ask("/v1/models").status, bob.ask("/v1/models").status) == (401, 200)
            tokens = int(bob.metric("vllm:generation_tokens_total"))
            # of a key that is gone
            assert all(event["choices"] for event in opened.events(tokens + 100))
        secret, completions = "a secret text", "/v1/completions"
        for asking, path, body, status, line in (
            (bob, completions, {"prompt": secret, "temperature": 9}, 400, "param=temperature"),
            (bob, completions, {"prompt": "x", secret: 1}, 400, "param=other"),
            (bob, "/tokenize", {"prompt": 5}, 400, "param=prompt"),
            (bob, "/detokenize", {"tokens": [-1]}, 400, "param=tokens"),
            (ada, "/v1/chat/completions", {"a": "secret"}, 401, ""),
            (ada, "/secret/text", None, 401, ""),
        ):
            assert asking.ask(path, body).status == status
            code = "invalid_api_key" if status == 401 else "invalid_request_error"
            code = "unknown_parameter" if line == "param=other" else code
            route = "other" if "secret" in path else path
            wait_for_line(process, f"route={route} code={code} {line}".strip())
        assert bob.ask("/v1/completions", {"prompt": "x", "max_tokens": 2}).status == 200
        assert bob.metric("freight:key_requests_total", key="bob") == 1
        assert bob.metric("freight:key_requests_total", key="ada") >= 1
        assert process.stop() == 0
        assert "line 1" in process.said
        assert "sk-" not in process.said
        assert "secret" not in process.said


def wait_for_line(process: ServeProcess, text: str) -> None:
    wait_for(lambda: text in process.said)

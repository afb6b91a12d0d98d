"""What docs/operate.md promises: units, HTTPS for clients, a socket that is passed, traces in the
log.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2 as httpx
import openai
import pytest
from tests.certificates import certificate
from tests.refusals import assert_names
from tests.serving import ServeProcess

from freight.cli.serve import SERVER_FLAGS

PAGE = Path(__file__).parents[2] / "docs/operate.md"
MEMORY = ["--kv-cache-memory", "16MiB"]
SECONDS = 120.0
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def units() -> tuple[str, str]:
    service, listening = re.findall(r"```ini\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return service, listening


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    service, listening = units()
    program = tmp_path / "freight"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    files = [tmp_path / "freight.service", tmp_path / "freight.socket"]
    files[0].write_text(service.replace("/opt/freight/bin/freight", str(program)))
    files[1].write_text(listening)
    command = ["systemd-analyze", "verify", *map(str, files)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in said.stderr.splitlines() if "freight" in line]
    assert (said.returncode, lines) == (0, []), said.stderr


def test_options_and_times_of_the_unit_fit() -> None:
    service, _ = units()
    known = {flag.name for flag in SERVER_FLAGS}
    assert set(re.findall(r"--[a-z-]+", service)) <= known
    [drain] = re.findall(r"--drain-timeout[ =](\d+)", service)
    [stop] = re.findall(r"TimeoutStopSec[ =](\d+)", service)
    assert int(stop) >= int(drain) + 15  # the engine's process has 10 seconds after the answers


def test_https_and_a_trace(tmp_path: Path) -> None:
    ours, other = certificate(tmp_path, "ours"), certificate(tmp_path, "other")
    options = ["--ssl-certfile", str(ours.cert), "--ssl-keyfile", str(ours.key), *MEMORY]
    server = ServeProcess("demo", options, forked=True)
    body = {"prompt": "def f(", "max_tokens": 4, "temperature": 0}
    try:
        url = server.url
        assert url.startswith("https://")
        with httpx.Client(verify=ours.client(), timeout=SECONDS) as client:
            end = time.monotonic() + SECONDS
            while client.get(f"{url}/health").status_code != 200 and time.monotonic() < end:
                time.sleep(0.05)
            headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
            answer = client.post(f"{url}/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
            assert not any(TRACE in value for value in answer.headers.values())
            with openai.OpenAI(base_url=f"{url}/v1", api_key="-", http_client=client) as asking:
                stream = asking.completions.create(model="demo", stream=True, **body)
                parts = [part.choices[0].text for part in stream if part.choices]
            assert "".join(parts) == answer.json()["choices"][0]["text"]
        with httpx.Client(verify=other.client()) as client, pytest.raises(httpx.ConnectError):
            client.get(f"{url}/health")
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            httpx.get(url.replace("https", "http"))
        assert server.stop() == 0
        assert len(re.findall(rf" request .*trace_id={TRACE}", server.said)) == 1
    finally:
        server.close()


def test_a_key_of_another_certificate_is_refused_before_anything_starts(tmp_path: Path) -> None:
    ours, other = certificate(tmp_path, "ours"), certificate(tmp_path, "other")
    options = ["--ssl-certfile", str(ours.cert), "--ssl-keyfile", str(other.key)]
    server = ServeProcess("demo", options, forked=True)
    try:
        assert server.wait() == 2
        assert_names(server.said, "--ssl-certfile", "--ssl-keyfile", "not match")
        assert "listening" not in server.said
    finally:
        server.close()


@pytest.mark.parametrize(("host", "status"), [("127.0.0.1", 0), ("0.0.0.0", 2)])
def test_a_socket_that_systemd_passes_is_served(host: str, status: int) -> None:
    """As sd_listen_fds(3) says: descriptor 3, and the process that it is for. A public one needs a
    key.
    """
    with socket.create_server((host, 0)) as listener:
        port, descriptor = listener.getsockname()[1], os.dup(listener.fileno())
        os.set_inheritable(descriptor, True)
        command = f'exec 3<&{descriptor}; LISTEN_FDS=1 LISTEN_PID=$$ exec "$0" -m freight serve demo --port 1 "$@"'
        serving = subprocess.Popen(
            ["bash", "-c", command, sys.executable, *MEMORY],
            pass_fds=[descriptor],
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(descriptor)
    try:
        assert serving.stderr is not None
        first = serving.stderr.readline()
        if status:
            assert "no key is set" in first
            assert serving.wait(SECONDS) == status
            return
        assert first == f"freight: listening on http://127.0.0.1:{port}\n"
        assert httpx.get(f"http://127.0.0.1:{port}/version", timeout=SECONDS).status_code == 200
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(SECONDS) in (0, 128 + signal.SIGTERM)
    finally:
        serving.kill()
        serving.communicate()

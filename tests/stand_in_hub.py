"""A stand-in for the Hugging Face hub on 127.0.0.1: one model's files, with the requests that the
client makes.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class StandInHub(ThreadingHTTPServer):
    """Serves `folder` as the model `model`. `sent` has (file, range, bytes of the body) of each GET
    of a file.

    After `stalled` is set, a request for a safetensors file waits until the server ends; after
    `without_ranges`, one for a range gets the whole file.
    """

    daemon_threads = True

    def __init__(self, model: str, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model, self.folder = model, folder
        self.sent: list[tuple[str, str | None, int]] = []
        self.stalled, self.ended = threading.Event(), threading.Event()
        self.without_ranges = threading.Event()

    @property
    def environ(self) -> dict[str, str]:
        return {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server_address[1]}",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }


class _Handler(BaseHTTPRequestHandler):
    server: StandInHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path, _, _ = self.path.partition("?")
        name = path.rpartition("/")[2]
        file = self.server.folder / name
        if path.startswith(f"/api/models/{self.server.model}/"):
            files = sorted(one for one in self.server.folder.iterdir() if one.is_file())
            tree = [
                {"type": "file", "oid": _oid(one), "size": one.stat().st_size, "path": one.name}
                for one in files
            ]
            about = {
                "id": self.server.model,
                "sha": COMMIT,
                "siblings": [{"rfilename": one.name} for one in files],
            }
            self._send(200, json.dumps(tree if "/tree/" in path else about).encode(), {}, with_body)
        elif path.startswith(f"/{self.server.model}/resolve/") and file.is_file():
            if name.endswith(".safetensors") and self.server.stalled.is_set():
                self.server.ended.wait()
                self.close_connection = True
                return
            self._send_file(file, with_body)
        else:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)

    def _send_file(self, file: Path, with_body: bool) -> None:
        content, asked = file.read_bytes(), self.headers.get("range")
        status, part = 200, content
        if self.server.without_ranges.is_set():
            asked = None
        if asked is not None and (span := re.fullmatch(r"bytes=(\d+)-(\d+)", asked)):
            status, part = 206, content[int(span[1]) : int(span[2]) + 1]
        if with_body:
            self.server.sent.append((file.name, asked, len(part)))
        self._send(status, part, {"ETag": f'"{_oid(file)}"', "X-Repo-Commit": COMMIT}, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()


@contextmanager
def stand_in_hub(model: str, folder: Path) -> Iterator[StandInHub]:
    server = StandInHub(model, folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()

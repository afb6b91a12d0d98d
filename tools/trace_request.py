"""List the source files that run for one completion, from the request to its first token and the end
of its answer.

    python tools/trace_request.py                  this checkout
    python tools/trace_request.py OTHER/src        the source of another one

Starts `freight serve demo`, sends a completion to warm up, and records every function of freight
that begins while a second one of one token is answered, in all processes of the server. What runs
all the time, as the count of metrics, is among them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

PORT = 18711
RECORDER = """
import os, sys, threading, time
folder, seen, recording = os.environ["FREIGHT_TRACE"], set(), False

def profile(frame, event, _):
    if recording and event == "call":
        seen.add(frame.f_code.co_filename)

def follow():
    global recording
    while not os.path.exists(folder + "/on"):
        time.sleep(0.01)
    recording = True
    while not os.path.exists(folder + "/off"):
        time.sleep(0.01)
    recording = False
    with open(folder + "/files." + str(os.getpid()), "w") as file:
        file.write(chr(10).join(sorted(seen)))

threading.Thread(target=follow, daemon=True).start()
threading.setprofile(profile)
sys.setprofile(profile)
"""


def complete(max_tokens: int) -> None:
    body = {"model": "demo", "prompt": "def main(", "max_tokens": max_tokens, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def wait_until_ready(process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if process.poll() is not None:
            sys.exit(f"the server ended with {process.returncode}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    sys.exit("the server did not become ready")


def trace(source: Path) -> dict[str, list[str]]:
    """Return the files of `source` by process id."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(RECORDER)
        path = f"{folder}:{source}"
        command = [sys.executable, "-m", "freight", "serve", "demo", "--port", str(PORT)]
        process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": path, "FREIGHT_TRACE": folder}
        )
        try:
            wait_until_ready(process)
            complete(2)
            (Path(folder) / "on").touch()
            time.sleep(1)  # until all processes record
            complete(1)
            (Path(folder) / "off").touch()
            time.sleep(1)
            results = {}
            for file in Path(folder).glob("files.*"):
                lines = file.read_text().splitlines()
                ours = [Path(line) for line in lines if line.startswith(str(source))]
                results[file.suffix[1:]] = [str(path.relative_to(source)) for path in ours]
            return results
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)


def main() -> None:
    source = Path(sys.argv[1] if sys.argv[1:] else Path(__file__).parents[1] / "src").resolve()
    result = trace(source)
    for process, files in result.items():
        print(f"process {process}: {len(files)} files")
        print("".join(f"  {file}\n" for file in files), end="")
    print(f"{len({file for files in result.values() for file in files})} files in all")


if __name__ == "__main__":
    main()

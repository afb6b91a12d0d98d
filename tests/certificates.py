"""Certificates for tests, made by the command `openssl`."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificate:
    """A certificate of localhost and 127.0.0.1 that signs itself, and its key."""

    cert: Path
    key: Path

    def client(self) -> ssl.SSLContext:
        """For a client that trusts this certificate and no other."""
        return ssl.create_default_context(cafile=str(self.cert))


def certificate(folder: Path, name: str, password: str | None = None) -> Certificate:
    """A new one in `folder`; the test is skipped where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    locked = ["-passout", f"pass:{password}"] if password else ["-nodes"]
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    kind = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-subj",
        "/CN=localhost",
        "-addext",
        names,
    ]
    command = [
        "openssl",
        "req",
        "-x509",
        "-days",
        "2",
        *kind,
        *locked,
        "-keyout",
        str(made.key),
        "-out",
        str(made.cert),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return made

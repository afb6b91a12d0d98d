"""What the entry point of the container calls, and the server that a command line would start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.environment import is_option

from freight.__main__ import run as main
from freight.base.other_engines.tgi import TGI_OPTIONS

ROOT = Path(__file__).parents[1]


def program(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)


def entry_point(folder: Path, *options: str, **environ: str) -> tuple[list[str], str]:
    """(what `freight` is called with, what the entry point says before), as in a container started
    without root.
    """
    program(folder / "freight", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program(folder / "id", "#!/bin/sh\necho 1000\n")
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "TMPDIR": str(folder)} | environ
    command = [ROOT / "docker" / "entrypoint.sh", *options]
    answer = subprocess.run(
        command, env=env, capture_output=True, text=True, check=True, timeout=300
    )
    return answer.stdout.splitlines(), answer.stderr


def would_serve(
    argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[int, tuple[dict[str, Any], dict[str, Any]] | None]:
    """(exit status of the command line, settings and engine's options of the server that it would
    start, None if it starts none).
    """
    served: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def run(settings: Any, options: Any) -> int:
        served.append((vars(settings), options.engine_args))
        return 0

    status = 0
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if is_option(name) or name.lower() in TGI_OPTIONS]:
            patch.delenv(name)
        for name, value in environ.items():
            patch.setenv(name, value)
        patch.setattr("freight.serve.lifecycle.run", run)
        patch.setattr(sys, "argv", list(argv))
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
    return status, served[-1] if served else None

"""Sum by window what an FP8 cache changes on three texts: the populations of test_coverage.py.

Code: the demo's held-out text. Prose: the language reference that ships with CPython
(`pydoc_data.topics`). C++: headers of torch's ATen. The cache is E4M3 with scales of 1.0.

    python tools/measure_windows.py > tests/unit/evaluate/windows.json
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from pydoc_data.topics import topics

import torch

from freight.checkpoint.reader import resolve_model
from freight.lab.evaluate.documents import cut_documents
from freight.lab.evaluate.report import run_caches
from freight.model.open import open_model
from freight.settings.engine import EngineArgs

WINDOW = 1024
TOKENS = 64 * 1024


def texts() -> dict[str, str]:
    headers = sorted((Path(torch.__file__).parent / "include" / "ATen" / "core").glob("*.h"))
    return {
        "code": (resolve_model("demo") / "heldout.txt").read_text(encoding="utf-8"),
        "prose": "\n\n".join(topics[name] for name in sorted(topics)),
        "C++": "\n".join(path.read_text(encoding="utf-8") for path in headers),
    }


def sums(text: str) -> dict[str, list[float]]:
    """Return by window: tokens, losses with 16 bits and with FP8 in nats, KL in nats, and tokens
    with the same top.
    """
    args = EngineArgs("demo")
    parts = cut_documents(open_model(args), [text], WINDOW, TOKENS)
    counts = [len(part.window.targets) for part in parts]
    plain, rounded = run_caches(args, [("fp8_e4m3", "unit")], text, WINDOW, TOKENS)
    columns = {
        "reference": -plain.token_logprobs,
        "loss": -rounded.token_logprobs,
        "kl": rounded.token_kl,
        "same": rounded.token_same,
    }
    by_window = {"count": [float(count) for count in counts]}
    for name, column in columns.items():
        sums = [float(piece.double().sum()) for piece in column.split(counts)]
        by_window[name] = [round(item, 6) for item in sums]
    return by_window


def main() -> None:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "window": WINDOW}
    print(
        json.dumps(
            versions | {"texts": {name: sums(text) for name, text in texts().items()}}, indent=1
        )
    )


if __name__ == "__main__":
    main()

"""`freight` whose writer of checkpoints says "wrote" after each part and then waits: a signal finds
it there.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from freight.__main__ import main as freight
from freight.checkpoint.writer import CheckpointWriter


def main() -> None:
    add = CheckpointWriter.add

    def slow(self: CheckpointWriter, *args: Any) -> None:
        add(self, *args)
        self._flush()
        print("wrote", file=sys.stderr, flush=True)
        while True:
            signal.pause()  # until a signal's handler raises

    CheckpointWriter.add = slow  # type: ignore[method-assign]
    freight()


if __name__ == "__main__":
    main()

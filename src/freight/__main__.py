"""The command `freight`, or `python -m freight`: cleans up on SIGTERM as on Ctrl-C.

The first SIGTERM raises `Terminated` in the main thread, so that every `finally` runs; a second one
ends the process at once. During an import the signal is deferred to the end of the import: modules
that try alternatives swallow exceptions, and the signal would be lost. `freight serve` replaces
this handler with its own once its event loop runs.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

_AGAIN = 0.01  # seconds after which a deferred signal is tried again


class Terminated(BaseException):
    """The exception for SIGTERM, as KeyboardInterrupt is for SIGINT."""


def is_import(frame: FrameType | None) -> bool:
    """Return whether `frame` runs for an import."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def main() -> None:
    """Run the `freight` script. Ends by SystemExit: 143 after SIGTERM, 130 after Ctrl-C."""
    terminated = False

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        if number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGALRM, terminate)
        if is_import(frame):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)
            return
        raise Terminated

    try:
        signal.signal(signal.SIGTERM, terminate)
        from freight.cli.main import main as run
        from freight.cli.streams import guard_stdout

        guard_stdout()
        run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BaseException:
        if not terminated:
            raise
        # Terminated, or what a library that was importing made of it
        sys.stderr.write("freight: ended by SIGTERM\n")
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()

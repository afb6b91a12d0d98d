"""The command `freight`, or `python -m freight`: cleans up on SIGTERM as on Ctrl-C.

The first SIGTERM raises `Terminated` in the main thread, so that every `finally` runs; a second one
ends the process at once. So does SIGHUP, the end of a terminal, unless `nohup` has it ignored; it
comes twice there, from the shell and from the system, so a second one does nothing. During an import
the signal is deferred to the end of the import: modules that try alternatives swallow exceptions, and
the signal would be lost.

A server is a server from the first instruction: Ctrl-C ends it in the same way, with a line, and
SIGHUP waits until its event loop runs, where it means that the keys are read again. Then
`freight serve` replaces these handlers with its own.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

_AGAIN = 0.01  # seconds after which a deferred signal is tried again
_SERVERS = ("serve", "run")  # verbs


class Terminated(BaseException):
    """The exception for SIGTERM and SIGHUP, as KeyboardInterrupt is for SIGINT."""


def is_import(frame: FrameType | None) -> bool:
    """Return whether `frame` runs for an import."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def is_launcher(arguments: Sequence[str]) -> bool:
    """Return whether a command line has the form of TGI's launcher: options and no verb."""
    return (
        bool(arguments)
        and arguments[0].startswith("-")
        and arguments[0] not in ("-h", "--help", "--version", "--")
    )


def is_server(arguments: Sequence[str]) -> bool:
    """Return whether a command line may start a server: its verb does, or it has none, as TGI's."""
    return bool(arguments) and (arguments[0] in _SERVERS or is_launcher(arguments))


def run() -> None:
    """Run the command line of this process: a verb, or TGI's launcher. Ends by SystemExit."""
    from freight.cli.main import main

    if not is_launcher(sys.argv[1:]):
        main()
    else:
        from freight.adapters.tgi_launcher import launch

        main(launch)


def main() -> None:
    """Run the `freight` script. Ends by SystemExit: 143 after SIGTERM, 129 after SIGHUP, 130 after
    Ctrl-C.
    """
    ended_by: signal.Signals | None = None

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ended_by
        if number != signal.SIGALRM:
            ended_by = signal.Signals(number)
            again = signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL
            signal.signal(number, again)
            signal.signal(signal.SIGALRM, end)
        assert ended_by is not None
        if is_import(frame):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)
        elif signal.getsignal(ended_by) not in (signal.SIG_DFL, signal.SIG_IGN):
            # An event loop runs by now, which would swallow what is raised in it: it has a handler
            signal.raise_signal(ended_by)
        else:
            raise KeyboardInterrupt if ended_by is signal.SIGINT else Terminated

    try:
        signal.signal(signal.SIGTERM, end)
        if is_server(sys.argv[1:]):
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP,))
            signal.signal(signal.SIGINT, end)
        elif signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            signal.signal(signal.SIGHUP, end)
        from freight.cli.streams import guard_stdout

        guard_stdout()
        run()
    except BaseException as error:
        if ended_by is None:
            if isinstance(error, KeyboardInterrupt):
                sys.exit(128 + signal.SIGINT)
            raise
        # what `end` raised, or what a library that was importing made of it
        with suppress(OSError):  # the terminal is gone
            sys.stderr.write(f"freight: ended by {ended_by.name}\n")
        sys.exit(128 + ended_by)


if __name__ == "__main__":
    main()

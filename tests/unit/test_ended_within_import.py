"""A signal that comes while a module is imported, which swallows what is raised in it, still ends
the command.
"""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

CODE = """
import os, signal, sys, time, types
import freight.__main__ as command

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "freight.cli.main":
            return None
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        except BaseException:  # as modules do that try one thing and then another
            pass
        module = types.ModuleType(name)
        module.main = lambda: (print("begun", flush=True), time.sleep(60))
        sys.modules[name] = module
        from importlib.machinery import ModuleSpec
        class Loader:
            create_module = staticmethod(lambda spec: module)
            exec_module = staticmethod(lambda module: None)
        return ModuleSpec(name, Loader())

sys.modules.pop("freight.cli.main", None)
sys.meta_path.insert(0, Finder())
command.main()
"""


def test_a_signal_within_an_import_ends_the_command_after_it() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 128 + signal.SIGTERM, ran.stderr
    assert ran.stderr == "freight: ended by SIGTERM\n"


HANGUPS = """
import os, signal, sys, types
import freight.__main__ as command

module = types.ModuleType("freight.cli.main")

def run():
    try:
        os.kill(os.getpid(), signal.SIGHUP)
    finally:
        os.kill(os.getpid(), signal.SIGHUP)
        print("cleaned up", flush=True)

module.main = run
sys.modules["freight.cli.main"] = module
command.main()
"""


def test_a_second_sighup_does_not_end_the_clean_up() -> None:
    """A terminal that closes sends it twice: from the shell, and from the system."""
    command = [sys.executable, "-c", HANGUPS]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ran.stdout, ran.stderr) == ("cleaned up\n", "freight: ended by SIGHUP\n")
    assert ran.returncode == 128 + signal.SIGHUP


def test_nohup_is_heeded() -> None:
    command = ["nohup", sys.executable, "-c", HANGUPS]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ran.returncode, ran.stdout) == (0, "cleaned up\n")


LOOP = """
import asyncio, os, signal, sys, types
import freight.__main__ as command
from importlib.machinery import ModuleSpec

command._AGAIN = 0.5  # seconds: the loop runs by then
number = signal.Signals(int(sys.argv.pop()))
module = types.ModuleType("freight.cli.main")

async def serve():
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_signal_handler(number, ended.set_result, "ended by the loop")
    print(await asyncio.wait_for(ended, 60), flush=True)

class Finder:
    create_module = staticmethod(lambda spec: module)
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == module.__name__ else None
    def exec_module(self, found):
        found.main = lambda: asyncio.run(serve())
        os.kill(os.getpid(), number)

sys.modules.pop(module.__name__, None)
sys.meta_path.insert(0, Finder())
command.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_waited_until_a_loop_handles_it_is_given_to_the_loop(
    number: signal.Signals,
) -> None:
    """What is raised in a callback of a loop is swallowed: the server would go on."""
    command = [sys.executable, "-c", LOOP, "serve", str(int(number))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ran.stdout, ran.stderr) == ("ended by the loop\n", "")

"""A SIGTERM that comes while a module is imported, which swallows what is raised in it, still ends
the command.
"""

from __future__ import annotations

import signal
import subprocess
import sys

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

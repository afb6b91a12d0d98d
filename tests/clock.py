"""Bounds of processor time that do not depend on what else the process, or the machine, has to do."""

import gc
import time
from collections.abc import Callable


def takes_less(seconds: float, work: Callable[[], object], attempts: int = 8) -> bool:
    """Whether `work` takes less than `seconds` of this thread's processor time in one of some
    attempts.

    Python's collector is off meanwhile: in a process of thousands of tests one collection takes
    longer than the work that is measured.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        for _ in range(attempts):
            begun = time.thread_time()
            work()
            if time.thread_time() - begun < seconds:
                return True
        return False
    finally:
        if collects:
            gc.enable()

"""Bounds of processor time that do not depend on what else the process, or the machine, has to do."""

import gc
import math
import time
import timeit
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


def is_quicker(
    work: Callable[[], object], other: Callable[[], object], attempts: int = 200
) -> bool:
    """Whether the quickest run of `work`, 200 times, takes less of the processor than the quickest of
    `other`.

    They run in turn: a machine that is slow for a while is slow for both.
    """
    best = math.inf
    best_other = math.inf
    for _ in range(attempts):
        best = min(best, timeit.timeit(work, number=200, timer=time.process_time))
        best_other = min(best_other, timeit.timeit(other, number=200, timer=time.process_time))
    return best < best_other

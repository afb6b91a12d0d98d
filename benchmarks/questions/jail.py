"""The process around one program that nobody has read: run by isolate.py as a script, with the standard
library alone.

    python -I -S jail.py FOLDER USER GROUP SECONDS MEMORY ALLOW

Standard input is the program's file, standard output the file of the verdict (isolate.py says what is
written there). USER and GROUP are those to become, ALLOW is 1 if the program may run without isolation.

FOLDER has the empty folders `home`, where the program works, and `python`.
Three processes: this one enters namespaces of its own; its child is the first process of the new PID
namespace, so that all that the program started ends with it; and the grandchild becomes the program.
"""

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress

NEW_MOUNTS = 0x00020000  # of unshare
NEW_NAMESPACES = (
    NEW_MOUNTS | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
)  # IPC, users, PIDs, network
SET_PARENT_DEATH_SIGNAL = 1  # of prctl
SET_DUMPABLE = 4
SET_NO_NEW_PRIVILEGES = 38
MOUNT_SETATTR = 442  # the number of this system call on every processor
HERE = -100  # AT_FDCWD
RECURSIVE = 0x8000
READ_ONLY = 1
BIND = 0x1000 | 0x4000  # of mount: MS_BIND | MS_REC
PRIVATE = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE
NO_SETUID_NO_DEVICES = 2 | 4
FILES = 16 << 20  # bytes: of one file, and of the folder
PROCESSES = 32
HIDDEN = ("/proc", "/run")  # other processes, and sockets of services

# Runs the program and then writes the token, which the program has no name for. The program is a module
# of its own, and not __main__, so that what stands under `if __name__ == "__main__"` is not run.
RUNNER = """
import os, sys, types
token, _, source = open(0, closefd=False, encoding="utf-8").read().partition("\\n")
verdict = os.dup(1)
process = os.getpid()
null = os.open(os.devnull, os.O_RDWR)
for descriptor in (0, 1, 2):
    os.dup2(null, descriptor)
os.close(null)
def run(source):
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    exec(compile(source, "answer.py", "exec", dont_inherit=True), module.__dict__)
try:
    run(source)
except BaseException as error:
    token = f"{type(error).__name__}: {error}"[:500]
if os.getpid() == process:
    os.write(verdict, token.encode("utf-8", "replace"))
os._exit(0)
"""


class MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user")]


def main() -> None:
    folder, user, group, seconds, memory, allow = sys.argv[1:]
    home = os.path.join(folder, "home")
    python = sys.executable
    if os.geteuid() == 0 and user != "0":
        python = interpreter_for_others(os.path.join(folder, "python"))
        become(int(user), int(group))
    isolated = isolate(home)
    os.write(1, b"isolated\n" if isolated else b"not isolated\n")
    if not isolated and allow != "1":
        return
    end_with_parent()
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        return
    end_with_parent()
    last = os.fork()
    if last:
        while os.wait()[0] != last:  # orphans of the program are waited for as well
            pass
        os._exit(0)
    os.chdir(home)
    limit(int(seconds), int(memory))
    os.execve(python, [python, "-I", "-S", "-c", RUNNER], {})


def end_with_parent() -> None:
    """Else a program that waits would outlive a killed isolate.py."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)


def interpreter_for_others(place: str) -> str:
    """Root's interpreter may be in root's home: show it at `place` too, in this mount namespace. Returns
    its path there, or its own where that is refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not sys.platform.startswith("linux"):
        return sys.executable
    try:
        check(libc.unshare(NEW_MOUNTS))
        check(libc.mount(None, b"/", None, ctypes.c_ulong(PRIVATE), None))
        prefix = sys.base_prefix.encode()
        check(libc.mount(prefix, place.encode(), None, ctypes.c_ulong(BIND), None))
    except OSError:
        return sys.executable
    return os.path.join(place, os.path.relpath(sys.executable, sys.base_prefix))


def become(user: int, group: int) -> None:
    """Without root's rights: namespaces alone would leave it those over devices."""
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)
    if sys.platform.startswith("linux"):
        # else /proc/self belongs to root, and the maps of users cannot be written
        ctypes.CDLL(None).prctl(SET_DUMPABLE, 1, 0, 0, 0)


def isolate(home: str) -> bool:
    """Enter the namespaces; False if the kernel refuses one of the steps."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not sys.platform.startswith("linux"):
        return False
    user = os.getuid()
    group = os.getgid()
    try:
        check(libc.unshare(NEW_NAMESPACES))
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{user} {user} 1")
        write("/proc/self/gid_map", f"{group} {group} 1")
        check(libc.mount(None, b"/", None, ctypes.c_ulong(PRIVATE), None))
        # else it could make a user namespace, have all capabilities there, and mount more memory. In a
        # container /proc/sys may be read-only already
        with suppress(OSError):
            write("/proc/sys/user/max_user_namespaces", "0")
        attributes = MountAttributes(READ_ONLY, 0, 0, 0)
        size = ctypes.c_size_t(ctypes.sizeof(attributes))
        pointer = ctypes.byref(attributes)
        check(libc.syscall(MOUNT_SETATTR, HERE, b"/", RECURSIVE, pointer, size))
        for path in HIDDEN:
            mount_memory(libc, path, NO_SETUID_NO_DEVICES | READ_ONLY)
        mount_memory(libc, home, NO_SETUID_NO_DEVICES)
        check(libc.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    except OSError:
        return False
    return True


def mount_memory(libc: ctypes.CDLL, path: str, flags: int) -> None:
    """Mount an empty folder of FILES bytes. Raises OSError."""
    options = f"size={FILES},mode=700".encode()
    check(libc.mount(b"tmpfs", path.encode(), b"tmpfs", ctypes.c_ulong(flags), options))


def check(status: int) -> None:
    """Raise OSError if a call of the C library failed."""
    if status:
        raise OSError(ctypes.get_errno(), "refused")


def write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def limit(seconds: int, memory: int) -> None:
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: FILES,
        resource.RLIMIT_NPROC: PROCESSES,
        resource.RLIMIT_CORE: 0,
    }
    for name, value in limits.items():
        with suppress(ValueError, OSError):  # a lower limit is there already
            resource.setrlimit(name, (value, value))


if __name__ == "__main__":
    main()

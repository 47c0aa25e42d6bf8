"""Run one command so that none of its processes outlives the parent process.

    python -I -S supervisor.py SHM_PATTERNS CPUS COMMAND [ARG ...]

A stand-alone script of the standard library (it starts in about 15 ms). Standard input is a pipe from the parent.
When the parent dies, by any signal, the pipe ends and the supervisor kills the command and its descendants. As a
child subreaper it also inherits orphans, such as the Python stubs of a killed tritonserver. If the supervisor itself
is killed, the kernel kills the command, and the parent kills the other processes of the session. Shared-memory
regions whose name matches one of SHM_PATTERNS (as in a shell, separated by /; empty: none) are removed at the end.
CPUS (numbers with commas; empty: all) are the CPUs that the command and its descendants run on.
The exit code is that of the command, or 128 + signal.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def children(pid: int) -> list[int]:
    """Return the child processes of the main thread of ``pid``."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def kill_all(group: int) -> None:
    """Send SIGKILL to the command's group and every descendant, inherited orphans too, until none is left."""
    while True:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            pass
        descendants = children(os.getpid())
        for child in descendants:
            descendants.extend(children(child))
            try:
                os.kill(child, signal.SIGKILL)
            except OSError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def remove_regions(patterns: list[str]) -> None:
    """Remove the shared-memory regions whose name matches one of ``patterns``."""
    from fnmatch import fnmatchcase  # imported here: most commands have none

    for name in os.listdir("/dev/shm"):
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            try:
                os.unlink(f"/dev/shm/{name}")
            except OSError:
                pass


def main() -> int:
    """Run the command and return the exit code."""
    shm_patterns, cpus, command = sys.argv[1], sys.argv[2], sys.argv[3:]
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisor = os.getpid()

    def die_with_supervisor() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:  # the supervisor died before prctl took effect
            os.kill(os.getpid(), signal.SIGKILL)

    for signum in (signal.SIGINT, signal.SIGHUP):  # only the parent handles these
        signal.signal(signum, signal.SIG_IGN)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    if cpus:
        try:
            os.sched_setaffinity(0, map(int, cpus.split(",")))
        except OSError as error:
            print(f"cannot run on CPUs {cpus}: {error.strerror}", file=sys.stderr)
            return 127
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_with_supervisor)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while process.poll() is None:
        ready, _, _ = select.select([sys.stdin.fileno(), wake_read], [], [], 1.0)
        if wake_read in ready:
            os.read(wake_read, 4096)
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 1):
            break  # the parent has died
    kill_all(process.pid)
    if shm_patterns:
        remove_regions(shm_patterns.split("/"))
    code = process.returncode
    return 128 - code if code is not None and code < 0 else (code or 0)


if __name__ == "__main__":
    sys.exit(main())

"""Runs one command so that nothing of it outlives the process that asked for it.

    python -I -S supervisor.py SHM_PREFIX CPUS COMMAND [ARG ...]

A stand-alone script of the standard library only (it starts in ~15 ms). Standard input is a pipe whose other
end the parent holds: when the parent dies, by whatever signal, the pipe ends and everything below is killed.
As a child subreaper it also inherits orphans, such as the Python stubs of a killed tritonserver. Should the
supervisor itself be killed, the kernel kills the command. Shared-memory regions whose name starts with
SHM_PREFIX (empty: none) are removed at the end. CPUS (numbers with commas; empty: all) are the only ones that the
command runs on: the threads and processes that it starts inherit them. Exits with the command's code, or
128 + signal.
"""

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
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def kill_all(group: int) -> None:
    """SIGKILL the command's group and every descendant, orphans handed to us included, until none is left."""
    while True:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            pass
        below = children(os.getpid())
        for child in below:
            below.extend(children(child))
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


def main() -> int:
    shm_prefix, cpus, command = sys.argv[1], sys.argv[2], sys.argv[3:]
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisor = os.getpid()

    def die_with_supervisor() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:  # it died before this was set
            os.kill(os.getpid(), signal.SIGKILL)

    for signum in (signal.SIGINT, signal.SIGHUP):  # the parent decides about these
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
            break  # the parent is gone
    kill_all(process.pid)
    if shm_prefix:
        for name in os.listdir("/dev/shm"):
            if name.startswith(shm_prefix):
                os.unlink(f"/dev/shm/{name}")
    code = process.returncode
    return 128 - code if code is not None and code < 0 else (code or 0)


if __name__ == "__main__":
    sys.exit(main())

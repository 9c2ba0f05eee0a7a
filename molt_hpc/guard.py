"""Runs one command so that nothing of it can outlive its owner.

    python -m molt_hpc.guard [--cleanup DIR] [--grace S] [--control-stdin] -- CMD...

A killed process leaves its children behind, and a node full of forgotten servers is what the next
user finds. Every role and every server is therefore started under a guard. The guard is two
processes that watch each other, watcher -> keeper -> CMD, both of them subreapers, so that a
descendant that calls setsid or daemonises stays below them:

- CMD ends: every descendant is ended (TERM, KILL after the grace), then its exit code is returned.
- the owner (the guard's parent) dies, or closes the control pipe: the same, CMD included.
- the watcher is killed: the keeper sees its pipe close and ends everything.
- the keeper is killed: CMD dies with it (PDEATHSIG), the watcher inherits and ends the rest.

TERM, INT, USR1 and USR2 go on to CMD. With --control-stdin a byte on standard input is the number
of such a signal and end of file means that the owner is gone; `srun` carries both to every node.
Only the standard library is used: a guard must start fast and run anywhere.
"""

import argparse
import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import sys
import time

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
GRACE = 1.5
"""Seconds between TERM and KILL. A guard around other guards needs a longer one than theirs."""
KILL_PATIENCE = 5.0
"""Seconds after KILL until the guard gives up on a process (one that hangs in the kernel)."""
TICK = 0.25
"""Seconds between two looks at the parent; ends of children and signals wake the guard at once."""

OPEN_FILES = 65536
"""Open files that a command may have, as far as the hard limit goes: login shells give 1,024, too few for as many sessions or workers."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def guarded(argv: list[str], cleanup: str | None = None, grace: float = GRACE, control_stdin: bool = False,
            owner: int | None = None) -> list[str]:
    """The command line that runs `argv` under a guard; `owner` is the pid of the process that will start it."""
    line = [sys.executable, "-m", "molt_hpc.guard", "--grace", f"{grace:g}"]
    line += ["--cleanup", cleanup] if cleanup else []
    line += ["--control-stdin"] if control_stdin else []
    line += ["--owner", str(owner)] if owner else []
    return [*line, "--", *argv]


def main(argv: list[str] | None = None) -> int:
    """Run the command to its end; returns its exit code, 128 + signal if it was killed."""
    parser = argparse.ArgumentParser(prog="python -m molt_hpc.guard", description="Run CMD; end all of it with its owner.")
    parser.add_argument("--cleanup", metavar="DIR", help="folder that is removed at the end")
    parser.add_argument("--grace", type=float, default=GRACE, help="seconds between TERM and KILL")
    parser.add_argument("--control-stdin", action="store_true", help="signals come on standard input; its end means stop")
    parser.add_argument("--owner", type=int, help="pid of the owner; unset: the parent")
    parser.add_argument("command", nargs="+", metavar="CMD")
    args = parser.parse_args(argv)
    owner = args.owner or os.getppid()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, OPEN_FILES)), hard))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    from_watcher, to_keeper = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        os.close(to_keeper)
        os.setpgid(0, 0)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)  # a fork does not inherit it
        os._exit(_keep(args.command, from_watcher, args.control_stdin, args.cleanup, args.grace))
    os.close(from_watcher)
    return _watch(keeper, to_keeper, 0 if args.control_stdin else None, owner, args.cleanup, args.grace)


class Inbox:
    """Signals of this process and bytes of a control pipe, as one stream of signal numbers."""

    def __init__(self, control: int | None) -> None:
        self.control = control
        self.wake, wake_end = os.pipe()
        for end in (self.wake, wake_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        for number in (*FORWARDED, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)

    def wait(self) -> tuple[list[int], bool]:
        """(signals to forward, whether the control pipe was closed); returns after TICK at the latest."""
        watched = [self.wake] if self.control is None else [self.wake, self.control]
        numbers, closed = b"", False
        for end in select.select(watched, [], [], TICK)[0]:
            data = os.read(end, 256)
            numbers += data
            if not data and end == self.control:
                self.control, closed = None, True
        return [n for n in numbers if n in FORWARDED], closed


def _watch(keeper: int, to_keeper: int, control: int | None, owner: int, cleanup: str | None, grace: float) -> int:
    """The outer process: tells the keeper what the owner wants, and that the owner is gone."""
    inbox, status, deadline = Inbox(control), None, None
    while status is None:
        numbers, closed = inbox.wait()
        if deadline is None and numbers:
            with contextlib.suppress(BrokenPipeError):  # the keeper has just ended; the next look finds its exit code
                os.write(to_keeper, bytes(numbers))
        if deadline is None and (closed or os.getppid() != owner):
            os.close(to_keeper)
            deadline = time.monotonic() + 2 * grace + 2 * KILL_PATIENCE
        if deadline is not None and time.monotonic() > deadline:
            _kill(keeper, signal.SIGKILL)
        status = _reap(keeper)
    return _finish(status, cleanup, grace)


def _keep(command: list[str], from_watcher: int, no_stdin: bool, cleanup: str | None, grace: float) -> int:
    """The inner process: parent of CMD; ends it when the watcher's pipe closes."""
    inbox, child = Inbox(from_watcher), _spawn(command, no_stdin)
    status, deadline = None, None
    while status is None:
        numbers, closed = inbox.wait()
        for number in numbers:
            _kill(child, number)
        if closed:
            _kill(child, signal.SIGTERM, group=True)
            deadline = time.monotonic() + grace
        if deadline is not None and time.monotonic() > deadline:
            _kill(child, signal.SIGKILL, group=True)
        status = _reap(child)
    return _finish(status, cleanup, grace)


def _finish(status: int, cleanup: str | None, grace: float) -> int:
    """End what is left; returns the exit code for a wait status."""
    _end_descendants(grace)
    if cleanup:
        shutil.rmtree(cleanup, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _spawn(command: list[str], no_stdin: bool) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    signal.set_wakeup_fd(-1)
    for number in (*FORWARDED, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    os.setpgid(0, 0)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
    if no_stdin:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"molt_hpc.guard: cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def _reap(wanted: int) -> int | None:
    """Collect every ended child, orphans included; the wait status of `wanted` if it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found = ended[1] if ended[0] == wanted else found
    return found


def _end_descendants(grace: float) -> None:
    """TERM every descendant once, KILL those that are left after the grace, wait until none is left."""
    told: set[int] = set()
    deadline, pause = time.monotonic() + grace, 0.005
    while True:
        _reap(-1)
        left = descendants(os.getpid())
        if not left:
            return
        now = time.monotonic()
        if now > deadline + KILL_PATIENCE:
            print(f"molt_hpc.guard: processes {left} do not end, not even by SIGKILL", file=sys.stderr, flush=True)
            return
        for pid in left:
            if now >= deadline:
                _kill(pid, signal.SIGKILL)
            elif pid not in told:
                told.add(pid)
                _kill(pid, signal.SIGTERM)
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def descendants(root: int) -> list[int]:
    """Every living process below `root`, children of children included, zombies left out."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                parents[int(name)] = int(parent)
    found, level = [], {root}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found += level
    return found


def _kill(pid: int, number: int, group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError):
        if group:
            with contextlib.suppress(ProcessLookupError):  # between its fork and its setpgid
                os.killpg(pid, number)
                return
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


if __name__ == "__main__":
    sys.exit(main())

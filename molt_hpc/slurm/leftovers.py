"""The last net: processes of a run are found by their environment, whoever their parent is.

Guards end what a run started; this finds on this node whatever escaped all of them (say, a
guard's two processes were killed in the same instant).
"""

import contextlib
import os
import signal
import time
from pathlib import Path

RUN_ID = "MOLT_HPC_RUN_ID"
"""Environment variable that every process of a run carries."""


def find_processes(run_id: str) -> list[int]:
    """Living processes on this node whose environment names the run, this process left out."""
    wanted, found = f"{RUN_ID}={run_id}".encode(), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0") and int(name) != os.getpid():
                found.append(int(name))
    return found


def end_processes(run_id: str, patience: float = 5.0) -> tuple[list[int], list[int]]:
    """KILL what is left of a run; returns (processes that had to be killed, processes still there)."""
    killed: set[int] = set()
    deadline = time.monotonic() + patience
    while left := find_processes(run_id):
        if time.monotonic() > deadline:
            break
        for pid in left:
            killed.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return sorted(killed), left

"""Starting training ranks on this machine: torchrun for several, this very process for one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from molt_hpc.guard import guarded

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""The longest that a rank may wait for the others, which includes rank 0 writing a model."""


def run_ranks(module: str, arguments: list[str], processes: int) -> int:
    """Run `python -m MODULE ARGUMENTS` as torchrun ranks on this machine, ended with this process; returns the exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", module, *arguments]
    return subprocess.run(guarded(command, owner=os.getpid()), env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}).returncode


def in_process_group(work: Callable[[], None]) -> None:
    """Call `work` with torch.distributed initialised: from torchrun's environment, or for this process alone."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ and "MASTER_PORT" in os.environ:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        work()
    finally:
        dist.destroy_process_group()

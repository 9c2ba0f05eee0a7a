"""Starting training ranks on this machine: torchrun for several, this very process for one."""

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from molt_hpc.config import RunConfig
from molt_hpc.guard import guarded
from molt_hpc.train.apart import ENDED, roles, serve
from molt_hpc.train.collectives import COLLECTIVE_TIMEOUT


def run_ranks(module: str, arguments: list[str], processes: int) -> int:
    """Run `python -m MODULE ARGUMENTS` as torchrun ranks on this machine, ended with this process; returns the exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", module, *arguments]
    return subprocess.run(guarded(command, owner=os.getpid()), env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}).returncode


def in_process_group(work: Callable[[dist.Store], None], config: RunConfig | None = None, timeout: timedelta = COLLECTIVE_TIMEOUT) -> None:
    """Call `work` with torch.distributed initialised: from torchrun's environment, or for this process alone.

    Ranks that `config` gives to reference or critic serve the others instead; each role's ranks are a world for themselves. `work`
    gets the store by which the roles speak.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ and "MASTER_PORT" in os.environ:
        store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    else:
        store, rank, world = dist.HashStore(), 0, 1
    for role, count in roles(config, world) if config else [("actor", world)]:
        if rank < count:
            break
        rank -= count
    if count < world:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count)}  # for libraries that look there
    dist.init_process_group(backend, store=dist.PrefixStore(f"{role} ranks", store), rank=rank, world_size=count, timeout=timeout)
    if role == "actor":
        work(store)
        store.set(ENDED, "1")
    else:
        serve(role, config, store)
    dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End the process of a rank at once, its output written.

    Threads of gloo, or one that was left behind in a collective, may drop a tensor that Python knows while Python takes itself
    down: that aborts the process (SIGABRT, "terminate called without an active exception"), and torchrun calls the run a failure.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

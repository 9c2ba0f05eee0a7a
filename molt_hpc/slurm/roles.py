"""The roles' command lines: what the launchers start, and what a role makes of them on its node."""

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from molt_hpc import config as configuration
from molt_hpc.broker.client import BrokerClient, address_towards
from molt_hpc.slurm.topology import Step

log = logging.getLogger(__name__)

RENDEZVOUS = "rendezvous"
RENDEZVOUS_TIMEOUT = 300.0
"""Seconds for training node 0 to publish where torchrun meets."""

RoleCommand = Callable[[Step, Path, int, str], list[str]]
"""(step, run folder, attempt, broker address or listening host) -> the role's command line."""


def role_command(step: Step, run: Path, attempt: int, where: str) -> list[str]:
    """The command line of one role; `where` is the host to listen on for the broker, its address for the others."""
    line = [sys.executable, "-m", "molt_hpc", step.role, str(run), "--attempt", str(attempt)]
    if step.role == "broker":
        return [*line, "--host", where]
    return [*line, "--broker", where, *(["--first-rank", str(step.first_rank)] if step.role == "rollout" else [])]


def node_rank(first: int = 0) -> int:
    """This task's rank among the nodes of its role: Slurm's number of the node in the step, 0 elsewhere."""
    return first + int(os.environ.get("SLURM_NODEID", "0"))


def free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def torchrun_line(run: Path, broker: str, attempt: int, rank: int, nodes: int, procs: int, host: str, port: int,
                  program: tuple[str, ...] = ("-m", "molt_hpc.train.loop")) -> list[str]:
    """The torchrun of one training node; static rendezvous, because the nodes are known and a failure ends the run."""
    return [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={procs}", f"--node-rank={rank}",
            "--rdzv-backend=static", f"--master-addr={host}", f"--master-port={port}", "--max-restarts=0",
            *program, str(run), "--broker", broker, "--attempt", str(attempt)]


def exec_actor(run: Path, broker: str, attempt: int, rank: int) -> None:
    """Agree on the meeting point with the other training nodes, then become torchrun."""
    actor = configuration.load(configuration.RunConfig, run / "config.toml").actor
    host, port = meeting_point(run, broker, attempt, rank, actor.num_nodes)
    line = torchrun_line(run, broker, attempt, rank, actor.num_nodes, actor.num_procs_per_node, host, port)
    log.info("node rank %d of %d: %s", rank, actor.num_nodes, " ".join(line))
    os.execv(line[0], line)


def meeting_point(run: Path, broker: str, attempt: int, rank: int, nodes: int, timeout: float = RENDEZVOUS_TIMEOUT) -> tuple[str, int]:
    """(address, port) of training node 0, published by it and looked up by the others through the broker.

    Raises TimeoutError. An address, not a name: nodes do not always resolve each other's names.
    """
    if nodes == 1:
        return "127.0.0.1", free_port("127.0.0.1")
    with contextlib.closing(BrokerClient(run, broker, "rendezvous", f"rendezvous_n{rank}", attempt)) as client:
        if rank == 0:
            target = urlsplit(broker)
            host = address_towards(target.hostname, target.port)
            meeting = [host, free_port(host)]
            client.request("publish", {"key": RENDEZVOUS, "value": meeting})
        else:
            log.info("node rank %d waits up to %.0f s for node rank 0 to publish the meeting point", rank, timeout)
            deadline = time.monotonic() + timeout
            while (meeting := client.request("lookup", {"key": RENDEZVOUS})["value"]) is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"training node {rank}: node 0 did not publish the meeting point within {timeout:.0f} s")
                time.sleep(0.2)
    return meeting[0], meeting[1]

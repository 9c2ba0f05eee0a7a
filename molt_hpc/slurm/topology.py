"""Which role runs where: from the configuration and a snapshot of the environment, nothing else.

Three places are known. In a heterogeneous Slurm job component 0 trains and every further component
rolls out; in one plain allocation the first `actor.num_nodes` nodes train and the next
`rollout.num_nodes` roll out; elsewhere both roles share this machine. Pure: the edge hands in
environment and machine, so every case is a unit test.
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from molt_hpc.config import RunConfig


@dataclass(frozen=True)
class Machine:
    """What the edge has seen of this machine: its name, usable cores, visible GPUs (ids as CUDA counts them)."""

    host: str
    cores: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """One role on some nodes, started as one step: one task a node, each with `processes` computing processes."""

    role: str
    nodes: tuple[str, ...]
    first_rank: int
    het_group: int | None
    cores: int
    processes: int
    gpus: int
    devices: tuple[str, ...] = ()

    @property
    def omp_threads(self) -> int:
        return max(1, self.cores // self.processes)

    def task_name(self, index: int) -> str:
        """The name of the task on `nodes[index]` in roll calls and messages."""
        return f"{self.role}_n{self.first_rank + index}" if self.role == "rollout" else self.role


@dataclass(frozen=True)
class Topology:
    """All steps of a run. `launcher` is local or srun; `notes` are worth a line, not an error."""

    place: str
    launcher: str
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """One line a step, the world sizes behind."""
        lines = [f"place: {self.place}, launcher {self.launcher}"]
        for step in self.steps:
            group = "" if step.het_group is None else f" (het group {step.het_group})"
            gpus = f", {step.gpus} GPUs" if step.gpus else ""
            lines.append(f"{step.role:<8} on {','.join(step.nodes)}{group}: {step.processes} processes a node, {step.cores} cores, "
                         f"{step.omp_threads} threads each{gpus}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def plan(config: RunConfig, env: Mapping[str, str], machine: Machine) -> Topology:
    """Decide the topology. Raises ValueError if the place has too few nodes or GPUs."""
    launcher = config.launch.launcher
    in_job = "SLURM_JOB_ID" in env
    if launcher == "srun" and not in_job:
        raise ValueError("launch.launcher: srun needs a Slurm job and SLURM_JOB_ID is not set; submit with sbatch, or use auto or local")
    if launcher == "local" or not in_job:
        return _local(config, machine)
    return _slurm(config, env)


def processes_per_node(config: RunConfig, role: str) -> int:
    """Training ranks, or engine ranks, of one node: what shares its cores and has one GPU each."""
    if role == "actor":
        return config.actor.num_procs_per_node
    return config.vllm.num_engines // config.rollout.num_nodes * config.vllm.tensor_parallel_size


def _need_nodes(config: RunConfig, training: int, rollout: int, where: str) -> None:
    if training < config.actor.num_nodes or rollout < config.rollout.num_nodes:
        raise ValueError(f"needs {config.actor.num_nodes} training + {config.rollout.num_nodes} rollout nodes "
                         f"(actor.num_nodes, rollout.num_nodes), {where}")


def _local(config: RunConfig, machine: Machine) -> Topology:
    _need_nodes(config, 1, 1, "the local launcher has 1 machine for both; submit to Slurm or lower them")
    cores = config.launch.cpus_per_node or machine.cores
    share, steps, devices = max(1, cores // 2), [], list(machine.gpus)
    wanted = processes_per_node(config, "actor") + processes_per_node(config, "rollout")
    if devices and len(devices) < wanted:
        raise ValueError(f"needs {wanted} GPUs (training ranks and engine ranks on one machine), {machine.host} shows {len(devices)}; "
                         "lower actor.num_procs_per_node, vllm.num_engines or vllm.tensor_parallel_size, "
                         "or set CUDA_VISIBLE_DEVICES to nothing to run on CPUs")
    for role in ("actor", "rollout"):
        count = processes_per_node(config, role)
        mine, devices = tuple(devices[:count]), devices[count:]
        steps.append(Step(role, (machine.host,), 0, None, share, count, len(mine), mine))
    return Topology("local machine", "local", tuple(steps))


def _slurm(config: RunConfig, env: Mapping[str, str]) -> Topology:
    """The first part of the job trains, the others roll out; a plain allocation is split in two."""
    size = int(env.get("SLURM_HET_SIZE", "1"))
    if size > 1:
        parts = [(group, f"_HET_GROUP_{group}", expand_nodes(env[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"])) for group in range(size)]
        rolling = sum(len(nodes) for _, _, nodes in parts[1:])
        place, found = "heterogeneous job", f"the job's component 0 has {len(parts[0][2])} and the others have {rolling}"
    else:
        nodes, training = expand_nodes(env["SLURM_JOB_NODELIST"]), config.actor.num_nodes
        parts = [(None, "", nodes[:training]), (None, "", nodes[training:])]
        place, found, rolling = "one plain allocation", f"the allocation has {len(nodes)}", len(parts[1][2])
    _need_nodes(config, len(parts[0][2]), rolling, found)
    steps, notes, rank = [], [], 0
    for index, (group, suffix, nodes) in enumerate(parts):
        role = "rollout" if index else "actor"
        wanted = config.rollout.num_nodes - rank if index else config.actor.num_nodes
        used, spare, processes = nodes[:wanted], nodes[wanted:], processes_per_node(config, role)
        cores = config.launch.cpus_per_node or smallest_count(env.get("SLURM_JOB_CPUS_PER_NODE" + suffix, "1"))
        if used:
            steps.append(Step(role, tuple(used), rank, group, cores, processes, processes if _has_gpus(env, suffix) else 0))
        if spare:
            where = "the allocation" if group is None else f"component {group}"
            notes.append(f"{len(spare)} nodes of {where} stay idle: {','.join(spare)}")
        rank += len(used) if index else 0
    return Topology(place, "srun", tuple(steps), tuple(notes))


def _has_gpus(env: Mapping[str, str], suffix: str) -> bool:
    return any(env.get(name + suffix) for name in ("SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_GPUS"))


def smallest_count(text: str) -> int:
    """The smallest count of Slurm's short form, as in `8(x3),4`."""
    return min(int(re.match(r"\d+", part)[0]) for part in text.split(","))


def expand_nodes(text: str) -> list[str]:
    """Host names of a Slurm node list: such as `n[1-3,05],gpu[01-02]-ib,login`.

    Leading zeros are kept. Raises ValueError for a list that it cannot read.
    """
    names: list[str] = []
    for part in re.split(r",(?![^\[\]]*\])", text.strip()):
        pieces = re.split(r"\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]", part)  # what stands between brackets has an odd index
        names += map("".join, itertools.product(*(expand_numbers(p) if i % 2 else [p] for i, p in enumerate(pieces))))
    for name in names:
        if not name or "[" in name or "]" in name:
            raise ValueError(f"node list {text!r}: cannot read {name!r}")
    return names


def expand_numbers(ranges: str) -> list[str]:
    """The numbers of Slurm's short form, as in `1-3,05`."""
    found: list[str] = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return found

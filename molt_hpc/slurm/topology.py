"""Which role runs where: from the configuration and a snapshot of the environment, nothing else.

Three places are known. In a heterogeneous Slurm job component 0 trains and every further component
rolls out; in one plain allocation the first `actor.num_nodes` nodes train and the next
`rollout.num_nodes` roll out; elsewhere both roles share this machine. Pure: the edge hands in
environment and machine, so every case is a unit test.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class WorldSizes:
    """Training ranks, vLLM servers and their ranks, and the group that carries weights (training rank 0 and all engine ranks)."""

    training: int
    engines: int
    engine_ranks: int

    @property
    def weights(self) -> int:
        return 1 + self.engine_ranks


def world_sizes(config: RunConfig) -> WorldSizes:
    engines = config.vllm.num_engines
    return WorldSizes(config.actor.num_nodes * config.actor.num_procs_per_node, engines, engines * config.vllm.tensor_parallel_size)


def plan(config: RunConfig, env: Mapping[str, str], machine: Machine) -> Topology:
    """Decide the topology. Raises ValueError if the place has too few nodes or GPUs."""
    launcher = config.launch.launcher
    in_job = "SLURM_JOB_ID" in env
    if launcher == "srun" and not in_job:
        raise ValueError("launch.launcher: srun needs a Slurm job and SLURM_JOB_ID is not set; submit with sbatch, or use auto or local")
    if launcher == "local" or not in_job:
        return _local(config, machine)
    if int(env.get("SLURM_HET_SIZE", "1")) > 1:
        return _het(config, env)
    return _plain(config, env)


def _step(config: RunConfig, role: str, nodes: list[str], cores: int, has_gpus: bool, first_rank: int = 0,
          het_group: int | None = None, devices: tuple[str, ...] = ()) -> Step:
    """A step whose processes are counted from the configuration; `cores` are those of one node."""
    processes = processes_per_node(config, role)
    return Step(role, tuple(nodes), first_rank, het_group, config.launch.cpus_per_node or cores, processes,
                processes if has_gpus else 0, devices)


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


def _plain(config: RunConfig, env: Mapping[str, str]) -> Topology:
    nodes = expand_nodes(env["SLURM_JOB_NODELIST"])
    training, rollout = config.actor.num_nodes, config.rollout.num_nodes
    _need_nodes(config, len(nodes), len(nodes) - training, f"the allocation has {len(nodes)}")
    cores = smallest_count(env.get("SLURM_JOB_CPUS_PER_NODE", "1"))
    gpus = _has_gpus(env, "")
    steps = (_step(config, "actor", nodes[:training], cores, gpus),
             _step(config, "rollout", nodes[training:training + rollout], cores, gpus))
    spare = nodes[training + rollout:]
    notes = (f"{len(spare)} nodes of the allocation stay idle: {','.join(spare)}",) if spare else ()
    return Topology("one plain allocation", "srun", steps, notes)


def _het(config: RunConfig, env: Mapping[str, str]) -> Topology:
    groups = [expand_nodes(env[f"SLURM_JOB_NODELIST_HET_GROUP_{g}"]) for g in range(int(env["SLURM_HET_SIZE"]))]
    rolling = sum(len(nodes) for nodes in groups[1:])
    _need_nodes(config, len(groups[0]), rolling, f"the job's component 0 has {len(groups[0])} and the others have {rolling}")
    steps, notes, left, rank = [], [], {"actor": config.actor.num_nodes, "rollout": config.rollout.num_nodes}, 0
    for group, nodes in enumerate(groups):
        role = "actor" if group == 0 else "rollout"
        used, spare = nodes[:left[role]], nodes[left[role]:]
        left[role] -= len(used)
        if used:
            cores = smallest_count(env.get(f"SLURM_JOB_CPUS_PER_NODE_HET_GROUP_{group}", "1"))
            steps.append(_step(config, role, used, cores, _has_gpus(env, f"_HET_GROUP_{group}"), rank if role == "rollout" else 0, group))
        if spare:
            notes.append(f"{len(spare)} nodes of component {group} stay idle: {','.join(spare)}")
        rank += len(used) if role == "rollout" else 0
    return Topology("heterogeneous job", "srun", tuple(steps), tuple(notes))


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
    for part in _split_outside_brackets(text):
        names += _expand_part(part)
    if not names:
        raise ValueError(f"node list {text!r}: no node in it")
    return names


def _split_outside_brackets(text: str) -> list[str]:
    if text.count("[") != text.count("]"):
        raise ValueError(f"node list {text!r}: brackets do not match")
    return [part for part in re.split(r",(?![^\[]*\])", text.strip()) if part]


def _expand_part(part: str) -> list[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]+)\](.*)", part)
    if match is None:
        if "[" in part or "]" in part:
            raise ValueError(f"node list: cannot read {part!r}")
        return [part]
    head, ranges, rest = match.groups()
    numbers: list[str] = []
    for item in ranges.split(","):
        span = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if span is None:
            raise ValueError(f"node list: cannot read the range {item!r} of {part!r}")
        first, last = span[1], span[2] or span[1]
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return [head + number + tail for number in numbers for tail in (_expand_part(rest) if rest else [""])]

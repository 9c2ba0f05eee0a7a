"""Everything that can be found wrong before a process starts, each as one line.

An error found here costs a second; found by the last of twenty processes it costs half an hour.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path

from molt_hpc import config as configuration
from molt_hpc.config import RunConfig
from molt_hpc.slurm.roles import RoleCommand, role_command, torchrun_line
from molt_hpc.slurm.steps import Launcher, LocalLauncher, SrunLauncher
from molt_hpc.slurm.topology import Machine, Step, Topology, plan, world_sizes


def this_machine(env: Mapping[str, str]) -> Machine:
    """Name, usable cores and visible GPUs of the machine that this runs on."""
    return Machine(socket.gethostname(), len(os.sched_getaffinity(0)), _visible_gpus(env))


def _visible_gpus(env: Mapping[str, str]) -> tuple[str, ...]:
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(part.strip() for part in chosen.split(",") if part.strip() not in ("", "-1"))
    folder = Path("/proc/driver/nvidia/gpus")
    return tuple(str(index) for index in range(len(list(folder.iterdir())))) if folder.is_dir() else ()


def preflight(config: RunConfig, env: Mapping[str, str]) -> Topology:
    """Check all that the configuration names; returns the topology.

    Raises ValueError with one line that says what was expected, what was found and where.
    """
    topology = plan(config, env, this_machine(env))
    check_inputs(config)
    return topology


def check_inputs(config: RunConfig) -> None:
    """Check the model folder, every prompt, the agent file and needed packages. Raises ValueError."""
    check_model(config.actor.model_name_or_path)
    for name in ("ref", "critic"):
        if folder := getattr(config, name).model_name_or_path:
            check_model(folder, f"{name}.model_name_or_path")
    if config.logger.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("logger.tensorboard: the package tensorboard is not installed; install it or set --logger.tensorboard false")
    from molt_hpc.agents.loader import load_agent
    from molt_hpc.data.prompts import check_prompts
    check_prompts(config)
    load_agent(config.train.agent_path)


def check_model(folder: str, option: str = "actor.model_name_or_path") -> None:
    """Raise ValueError unless this is a folder of a Hugging Face model."""
    if not Path(folder).is_dir():
        raise ValueError(f"{option}: there is no folder {folder}")
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"{option}: {folder} has no config.json, so it is not a model's folder")


def check_run_folder(run: Path, resume: bool = False) -> None:
    """Raise ValueError if the run folder holds anything that this run does not go on with."""
    if run.exists() and not run.is_dir():
        raise ValueError(f"output_dir: {run} is not a folder")
    occupied = run.is_dir() and any(run.iterdir())
    if occupied and not resume:
        raise ValueError(f"output_dir: {run} already has files; choose a new folder, or go on with that run: --ckpt.resume")
    if occupied and not (run / "config.toml").is_file():
        raise ValueError(f"ckpt.resume: {run} has files but no config.toml: it is not the folder of a run")


def make_launcher(topology: Topology) -> Launcher:
    return SrunLauncher() if topology.launcher == "srun" else LocalLauncher()


def broker_step(topology: Topology) -> Step:
    """The broker runs beside the supervisor, as its local child, on one core."""
    return Step("broker", (socket.gethostname(),), 0, None, 1, 1, 0)


def report(config: RunConfig, topology: Topology, command: RoleCommand = role_command) -> str:
    """What `check` prints: configuration, places, world sizes, and every command line with <ADDRESS> for what is not yet known."""
    run, logs = Path(config.output_dir), Path(config.output_dir) / "logs" / "attempt_1"
    sizes, launcher = world_sizes(config), make_launcher(topology)
    broker, address = broker_step(topology), "<ADDRESS>"
    lines = [shlex.join(LocalLauncher().line(broker, command(broker, run, 1, "<HOST>"), logs))]
    lines += [shlex.join(launcher.line(step, command(step, run, 1, address), logs)) for step in topology.steps]
    actor = config.actor
    lines.append("on each training node: " + shlex.join(torchrun_line(
        run, address, 1, 0, actor.num_nodes, actor.num_procs_per_node, "<HOST>", 0)).replace("--master-port=0", "--master-port=<PORT>"))
    shards = config.fsdp.tp_size * config.fsdp.ep_size
    return "\n".join([
        "# configuration", configuration.dump(config),
        "# topology", topology.describe(), "",
        "# world sizes", f"training ranks: {sizes.training} ({actor.num_nodes} nodes x {actor.num_procs_per_node}), "
        f"tensor x expert parallel {shards}, data parallel {sizes.training // config.fsdp.tp_size}",
        f"engines: {sizes.engines} x tensor parallel {config.vllm.tensor_parallel_size} = {sizes.engine_ranks} engine ranks",
        f"weight group: {sizes.weights} (training rank 0 and the engine ranks)", "",
        "# commands", *lines])

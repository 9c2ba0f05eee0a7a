#!/usr/bin/env python3
"""Submit a training run from a login node or a notebook, through submitit.

    python launchers/submit_rl.py my_run.toml --train.agent_path my_agent.py --slurm.partition gpu --slurm.time 600

The options of --slurm may stand in the file too, as its section [slurm]. Or in Python:

    job = submit(load(RunConfig, "my_run.toml"), SlurmOptions(partition="gpu", gpus=8))
    job.result()        # {"reward": ..., "steps": ..., "run": ...}; raises if the run failed

The job is heterogeneous (component 0 trains, component 1 rolls out) or, with `--slurm.het false`, one
plain allocation. submitit has neither heterogeneous jobs nor a way to see the end of a job without
Slurm's accounting; the two small classes below add both.
"""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher, SlurmJob

from molt_hpc.config import RunConfig, dump, help_text, load, opt, section
from molt_hpc.slurm.preflight import check_inputs, check_run_folder
from molt_hpc.slurm.submitted import RUN_PROGRAM, TrainingJob

NOTICE_S = 120
"""Seconds before the time limit at which Slurm signals the job."""


@dataclass
class SlurmOptions:
    """Where and how long; the numbers of nodes come from the run's configuration."""

    partition: str | None = opt(None, "partition; unset: the cluster's default")
    account: str | None = opt(None, "account that pays")
    qos: str | None = opt(None, "quality of service")
    constraint: str | None = opt(None, "node features")
    time: int = opt(60, "time limit in minutes")
    het: bool = opt(True, "heterogeneous job; false: one plain allocation, roles split by node")
    cpus: int | None = opt(None, "cores of each training node; unset: whole nodes")
    gpus: int = opt(0, "GPUs of each training node")
    rollout_cpus: int | None = opt(None, "cores of each rollout node; unset: as cpus (heterogeneous jobs)")
    rollout_gpus: int | None = opt(None, "GPUs of each rollout node; unset: as gpus (heterogeneous jobs)")
    restarts: int = opt(10, "how often a job that has used up its time is handed in again, to go on")
    folder: str | None = opt(None, "folder of submitit's files; unset: <output_dir>.submitit")
    wait: bool = opt(False, "wait for the end and print the result")


@dataclass
class SubmitConfig(RunConfig):
    """The run's options and where to run it."""

    slurm: SlurmOptions = section(SlurmOptions)

    def run(self) -> RunConfig:
        """What the job itself is told."""
        return RunConfig(**{option.name: getattr(self, option.name) for option in fields(RunConfig)})


class EndStateWatcher(SlurmInfoWatcher):
    """Asks the controller instead of the accounting, which many clusters do not have.

    A job that the controller has forgotten (after MinJobAge) has ended: its state is GONE, and the
    result file, or its absence, says how.
    """

    def update(self) -> None:
        for job_id in sorted(self._registered - self._finished):
            info = job_info(job_id)
            if info is not None:
                self._info_dict[job_id] = info
        self._num_calls += 1
        self._last_status_check = time.time()
        self._finished |= {j for j in self._registered if self.is_done(j, mode="cache")}


def job_info(job_id: str) -> dict[str, str] | None:
    """{JobID, State, NodeList} of a job or of the leader of a heterogeneous one; None if the controller does not answer."""
    try:
        shown = subprocess.run(["scontrol", "--oneliner", "show", "job", job_id], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return None
    if shown.returncode != 0:
        return {"JobID": job_id, "State": "GONE", "NodeList": ""} if "Invalid job id" in shown.stderr else None
    for line in shown.stdout.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if fields.get("JobId") == job_id:
            return {"JobID": job_id, "State": fields["JobState"], "NodeList": fields.get("NodeList", "")}
    return None


class TrainingSlurmJob(SlurmJob):
    watcher = EndStateWatcher(delay_s=30)


class TrainingExecutor(SlurmExecutor):
    """A SlurmExecutor whose job may have a second component, given as options for sbatch."""

    job_class = TrainingSlurmJob

    def __init__(self, folder: str | Path, component: dict[str, Any] | None, restarts: int):
        # exec: the signal before the time limit goes to the batch process only, which must be Python.
        super().__init__(folder, max_num_timeout=restarts, python="exec " + shlex.quote(sys.executable))
        self.component = component

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        lines = super()._make_submission_file_text(command, uid).splitlines()
        if self.component:
            last = max(i for i, line in enumerate(lines) if line.startswith("#SBATCH"))
            options = [k if v is True else f"{k}={shlex.quote(str(v))}" for k, v in sorted(self.component.items())]
            lines[last + 1:last + 1] = ["#SBATCH hetjob", *(f"#SBATCH --{option}" for option in options)]
        return "\n".join(lines) + "\n"

    def _num_tasks(self) -> int:
        return 1  # of submitit's tasks: the batch process; the nodes belong to the run


def submit(config: RunConfig, slurm: SlurmOptions | None = None, program: tuple[str, ...] = RUN_PROGRAM, check: bool = True) -> SlurmJob:
    """Submit one run; returns submitit's job, whose `result()` is {reward, steps, run}.

    `program` is what the job runs with a configuration file as argument. Raises ValueError for a
    configuration that cannot work (with `check`), submitit's FailedSubmissionError if Slurm refuses.
    """
    slurm = slurm or SlurmOptions()
    run = Path(config.output_dir).absolute()
    check_run_folder(run)
    if check:
        config.check()
        check_inputs(config)
    folder = Path(slurm.folder or f"{run}.submitit") / "%j"
    executor = TrainingExecutor(folder, rollout_component(config, slurm) if slurm.het else None, slurm.restarts)
    nodes = config.actor.num_nodes + (0 if slurm.het else config.rollout.num_nodes)
    chosen = {k: getattr(slurm, k) for k in ("partition", "account", "qos", "constraint") if getattr(slurm, k)}
    size = {"cpus_per_task": slurm.cpus} if slurm.cpus else {"exclusive": True}
    gpus = {"gpus_per_node": slurm.gpus} if slurm.gpus else {}
    executor.update_parameters(job_name="molt_hpc", time=slurm.time, nodes=nodes, ntasks_per_node=1, use_srun=False,
                               **chosen, **size, **gpus, additional_parameters={"signal": f"B:USR2@{NOTICE_S}"})
    with outside_of_jobs():
        return executor.submit(TrainingJob(dump(config), str(run), program=program))


def rollout_component(config: RunConfig, slurm: SlurmOptions) -> dict[str, Any]:
    """The options of component 1; partition, account and time are inherited, sizes are not."""
    cpus = slurm.rollout_cpus or slurm.cpus
    gpus = slurm.gpus if slurm.rollout_gpus is None else slurm.rollout_gpus
    return {"nodes": config.rollout.num_nodes, "ntasks-per-node": 1, **({"cpus-per-task": cpus} if cpus else {"exclusive": True}),
            **({"gpus-per-node": gpus} if gpus else {}), **({"constraint": slurm.constraint} if slurm.constraint else {})}


@contextlib.contextmanager
def outside_of_jobs() -> Iterator[None]:
    """Hide the variables of a job that this may run in: they would become options of the new one. SLURM_CONF stays."""
    of_job = [k for k in os.environ if k.startswith(("SLURM_", "SBATCH_", "SRUN_", "SLURMD_")) and k != "SLURM_CONF"]
    hidden = {k: os.environ.pop(k) for k in of_job}
    try:
        yield
    finally:
        os.environ.update(hidden)


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0].startswith("-"):
        print(f"usage: submit_rl.py CONFIG.toml [--section.option value ...]\n\noptions [default]:\n{help_text(SubmitConfig)}")
        return 0 if words and words[0] in ("-h", "--help") else 2
    try:
        config = load(SubmitConfig, words[0], words[1:])
        job = submit(config.run(), config.slurm)
    except ValueError as error:
        print(f"submit_rl: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(f"submitted job {job.job_id}; its output: {job.paths.stdout}")
    if config.slurm.wait:
        failure = job.exception()
        if failure is not None:
            print(f"submit_rl: error: job {job.job_id} failed: {failure}", file=sys.stderr)
            return 1
        print(job.result())
    return 0


if __name__ == "__main__":
    sys.exit(main())

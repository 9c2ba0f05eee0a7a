"""A real Slurm of four nodes for the tests of this folder (tools/local_slurm)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from molt_hpc.slurm.leftovers import end_processes, find_processes

ROOT = Path(__file__).parents[2]
PROCESS = ROOT / "tests" / "process"
LOCAL_SLURM = str(ROOT / "tools" / "local_slurm")
MISSING = [p for p in ("slurmctld", "slurmd", "munged", "sbatch") if not shutil.which(p, path=os.environ["PATH"] + ":/usr/sbin:/sbin")]


def pytest_collection_modifyitems(items):
    reason = f"Slurm is not installed here ({', '.join(MISSING)} missing)" if MISSING else \
        "nodes of their own need root" if os.geteuid() != 0 else ""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.slow)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def cluster():
    """Environment variables with which Slurm's commands talk to the cluster."""
    folder = tempfile.mkdtemp(prefix="molt_slurm_", dir="/tmp")
    try:
        subprocess.run([LOCAL_SLURM, "--dir", folder, "up", "--nodes", "4", "--cpus", "4", "--gpus", "2"], check=True, timeout=120)
        os.environ["SLURM_CONF"] = f"{folder}/etc/slurm.conf"
        yield folder
    finally:
        os.environ.pop("SLURM_CONF", None)
        subprocess.run([LOCAL_SLURM, "--dir", folder, "down"], timeout=120)


class Job:
    """A submitted job: its state from the controller, its output, the run's folder."""

    def __init__(self, job_id: str, folder: Path):
        self.job_id, self.folder, self.run = job_id, folder, folder / "run"

    @property
    def output(self) -> str:
        path = self.folder / "out"
        return path.read_text() if path.exists() else ""

    def state(self) -> str:
        shown = subprocess.run(["scontrol", "-o", "show", "job", self.job_id], capture_output=True, text=True, timeout=60).stdout
        line = next(line for line in shown.splitlines() if line.startswith(f"JobId={self.job_id} "))
        return line.split("JobState=")[1].split()[0] + " " + line.split(" ExitCode=")[1].split()[0]

    def wait_end(self, seconds: float = 150.0) -> str:
        live = ("PENDING", "RUNNING", "COMPLETING")
        return wait_until(lambda: (state := self.state()).split()[0] not in live and state, "the job's end", seconds, self)

    def wait_for_text(self, text: str, seconds: float = 90.0) -> None:
        wait_until(lambda: text in self.output, repr(text), seconds, self)

    def run_id(self) -> str:
        return json.loads((self.run / "manifest.json").read_text())["run_id"]

    def placed(self) -> dict[str, dict]:
        records = [json.loads(p.read_text()) for p in self.run.glob("placement_*.json")]
        return {f"{r['name']}@{r['rank']}": r for r in records}


def wait_until(condition, what: str, seconds: float = 90.0, job: Job | None = None):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.2)
    raise AssertionError(f"waited {seconds} s for {what}" + (f"; state {job.state()}; output:\n{job.output}" if job else ""))


@pytest.fixture
def submit(cluster, tmp_path):
    """`submit(sbatch options, script of the roles, run options)` submits a job whose roles are scripted."""
    jobs: list[Job] = []

    def submit(options: list[str], script: dict, words: list[str] = ()) -> Job:
        (tmp_path / "config.toml").touch()
        batch = tmp_path / "job.sh"
        batch.write_text(f'#!/bin/bash\nexec {sys.executable} {PROCESS}/scripted_run.py "$@"\n')
        line = ["sbatch", "--parsable", "--no-requeue", "-o", str(tmp_path / "out"), "--open-mode=append", "--signal=B:USR1@60", *options,
                str(batch), json.dumps(script), str(tmp_path / "config.toml"), f"--output_dir={tmp_path / 'run'}",
                "--launch.stop_grace=4", *words]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        jobs.append(Job(done.stdout.strip().split(";")[0], tmp_path))
        return jobs[-1]
    yield submit
    for job in jobs:
        subprocess.run(["scancel", job.job_id], timeout=60)
        if (job.run / "manifest.json").exists():
            job.wait_end(60)
            left = find_processes(job.run_id())
            end_processes(job.run_id())
            assert not left

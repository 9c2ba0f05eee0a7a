"""Submission through submitit: heterogeneous and plain, with result, failure and cancellation; there is no sacct."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from molt_hpc.config import RunConfig
from molt_hpc.slurm.leftovers import find_processes
from tests.slurm.conftest import PROCESS, ROOT, wait_until

pytest.importorskip("submitit")
sys.path.insert(0, str(ROOT / "launchers"))
from submit_rl import SlurmOptions, job_info, submit  # noqa: E402
from submitit.core.utils import FailedJobError, UncompletedJobError  # noqa: E402


def start(tmp_path, script: dict, **options):
    """Submit a run with two training nodes, one rollout node and scripted roles."""
    config = RunConfig(output_dir=str(tmp_path / "run"))
    config.actor.num_nodes, config.launch.stop_grace = 2, 4.0
    program = (sys.executable, str(PROCESS / "scripted_run.py"), json.dumps(script))
    return submit(config, SlurmOptions(cpus=2, time=20, **options), program, check=False)


def run_id(folder) -> str:
    return json.loads((folder / "manifest.json").read_text())["run_id"]


def wait_lines(folder, text: str) -> None:
    log = folder / "logs/latest/supervisor.log"
    wait_until(lambda: log.exists() and text in log.read_text(), repr(text))


def hosts(folder) -> dict[str, str]:
    records = [json.loads(p.read_text()) for p in folder.glob("placement_*.json")]
    return {f"{r['name']}@{r['rank']}": r["host"] for r in records}


@pytest.mark.parametrize("het", [True, False])
def test_result_of_a_submitted_run(cluster, tmp_path, het):
    job = start(tmp_path, {"broker": {"steps": 3}}, het=het)
    run = tmp_path / "run"
    assert job.result() == {"reward": 0.3, "steps": 3, "run": str(run)}
    wait_until(lambda: job_info(job.job_id)["State"] == "COMPLETED", "state COMPLETED")
    assert hosts(run) == {"actor@0": "n1", "actor@1": "n2", "rollout_n0@0": "n3"}
    assert ("#SBATCH hetjob" in job.paths.submission_file.read_text()) == het
    assert "step 3 | reward 0.30" in job.stdout()
    assert find_processes(run_id(run)) == []


def test_a_failed_run_raises_its_reason(cluster, tmp_path):
    job = start(tmp_path, {"broker": {"steps": 1000}, "rollout": {"end": "exit7"}})
    with pytest.raises(FailedJobError, match="rollout_n0 on node n3 ended with exit code 7: RuntimeError: the script says exit 7"):
        job.result()


def test_waiting_for_a_cancelled_job_ends(cluster, tmp_path):
    job = start(tmp_path, {"broker": {"steps": 100000}})
    wait_lines(tmp_path / "run", "the run begins")
    job.cancel()
    assert isinstance(job.exception(), FailedJobError)
    assert "stopped by SIGTERM" in job.stderr()
    wait_until(lambda: find_processes(run_id(tmp_path / "run")) == [], "the end of all processes")


def test_waiting_for_a_killed_job_ends_without_sacct(cluster, tmp_path):
    job = start(tmp_path, {"broker": {"steps": 100000}}, het=False)
    wait_lines(tmp_path / "run", "the run begins")
    subprocess.run(["scancel", "--full", "--signal=KILL", job.job_id], check=True, timeout=60)
    assert isinstance(job.exception(), UncompletedJobError)
    wait_until(lambda: find_processes(run_id(tmp_path / "run")) == [], "the end of all processes")


def test_a_preempted_job_goes_on_in_its_folder(cluster, tmp_path):
    job = start(tmp_path, {"broker": {"steps": 40}})
    wait_lines(tmp_path / "run", "step 1")
    subprocess.run(["scancel", "--batch", "--signal=USR2", job.job_id], check=True, timeout=60)
    result = job.result()
    assert result == {"reward": 4.0, "steps": 40, "run": str(tmp_path / "run")}
    assert "stopped by SIGUSR2" in (tmp_path / "run/logs/attempt_1/supervisor.log").read_text()
    assert (tmp_path / "run/logs/latest").resolve().name == "attempt_2"

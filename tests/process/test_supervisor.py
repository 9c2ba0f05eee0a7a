"""The supervisor with scripted roles: real processes, real sockets; every way for a run to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from molt_hpc.slurm.leftovers import end_processes, find_processes

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def wait_until(condition, what: str, seconds: float = 60.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {seconds} s for {what}")


class Run:
    """A supervised run in its own process, with its output in files."""

    def __init__(self, folder: Path, script: dict, env: dict | None = None):
        self.folder, self.out, self.err = folder / "run", folder / "out", folder / "err"
        options = {"output_dir": str(self.folder), "launch.stop_grace": 2.0} | script.pop("config", {})
        words = [f"--{name}={value}" for name, value in options.items()]
        (folder / "config.toml").touch()
        with open(self.out, "w") as out, open(self.err, "w") as err:
            self.process = subprocess.Popen([sys.executable, HERE / "scripted_run.py", json.dumps(script), folder / "config.toml",
                                             *words], stdout=out, stderr=err, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **(env or {})})

    def run_id(self) -> str:
        return json.loads(wait_until((self.folder / "manifest.json").read_text, "the manifest"))["run_id"]

    def wait_placed(self, name: str) -> dict:
        path = self.folder / f"placement_{name}_0.json"
        return json.loads(wait_until(lambda: path.exists() and path.read_text(), f"the start of {name}"))

    def wait_running(self) -> None:
        wait_until(lambda: "the run begins" in self.out.read_text(), "the end of the roll call")

    def end(self) -> int:
        return self.process.wait(90)


@pytest.fixture
def start(tmp_path):
    """Start runs; at the end nothing of them may be left, whatever happened."""
    started: list[Run] = []

    def start(script: dict, env: dict | None = None) -> Run:
        started.append(Run(tmp_path, script, env))
        return started[-1]
    yield start
    for run in started:
        run.process.kill()
        run_id = json.loads((run.folder / "manifest.json").read_text())["run_id"]
        left = find_processes(run_id)
        end_processes(run_id)
        assert not left


def test_a_run_to_its_end(start):
    run = start({"broker": {"steps": 3}})
    assert run.end() == 0
    assert [line for line in run.out.read_text().splitlines() if line.startswith("step")] == [
        "step 1 | reward 0.10", "step 2 | reward 0.20", "step 3 | reward 0.30"]
    assert run.err.read_text() == ""
    assert find_processes(run.run_id()) == []


def test_what_a_run_folder_holds(start):
    run = start({})
    assert run.end() == 0
    manifest = json.loads((run.folder / "manifest.json").read_text())
    assert manifest["versions"]["molt_hpc"] and [n["role"] for n in manifest["nodes"]] == ["actor", "rollout"]
    assert (run.folder / "keys.json").stat().st_mode & 0o777 == 0o600
    logs = {p.name for p in (run.folder / "logs" / "latest").iterdir()}
    assert logs == {"supervisor.log", "broker.log", "actor_n0.log", "rollout_n0.log"}
    assert 'output_dir = "' in (run.folder / "config.toml").read_text()


def test_roles_get_an_allowed_environment_and_planned_threads(start):
    run = start({"config": {"launch.cpus_per_node": 8, "launch.pass_env": "EXTRA_*"}},
                {"NOT_ALLOWED": "1", "EXTRA_KEY": "2", "HF_HUB_OFFLINE": "1", "SLURM_NODEID": "5"})
    assert run.end() == 0
    actor, rollout = run.wait_placed("actor")["environment"], run.wait_placed("rollout_n0")["environment"]
    assert "NOT_ALLOWED" not in actor and "SLURM_NODEID" not in rollout
    assert (actor["EXTRA_KEY"], actor["HF_HUB_OFFLINE"], actor["OMP_WAIT_POLICY"]) == ("2", "1", "PASSIVE")
    assert (actor["OMP_NUM_THREADS"], rollout["OMP_NUM_THREADS"]) == ("2", "4")


@pytest.mark.parametrize("role, how, said", [
    ("rollout", "exit7", "rollout_n0 on node {host} ended with exit code 7: RuntimeError: the script says exit 7"),
    ("actor", "raise", "actor on node {host} ended with exit code 1: RuntimeError: the script says raise"),
    ("actor", "killed", "actor on node {host} was killed by SIGKILL"),
    ("rollout", "exit0", "rollout_n0 on node {host} ended with exit code 0 before the run was done")])
def test_a_role_that_ends_ends_the_run_with_one_message(start, role, how, said):
    run = start({"broker": {"steps": 1000}, role: {"end": how}, "config": {"launch.max_restarts": 0}})
    assert run.end() == 1
    first, *rest = run.err.read_text().splitlines()
    assert first == "molt_hpc: error: " + said.format(host=os.uname().nodename)
    assert f"last lines of {(run.folder / 'logs/attempt_1').resolve()}/{role}_n0.log:" in rest[0]
    assert find_processes(run.run_id()) == []


def test_a_rollout_role_that_dies_is_started_again_alone(start):
    run = start({"broker": {"steps": 40}, "rollout": {"end": "killed", "once": True}})
    actor = run.wait_placed("actor")["pid"]
    assert run.end() == 0
    assert "rollout_n0 on node " in run.out.read_text() and "the role is started again, time 1 of 3 (launch.max_restarts)" in run.out.read_text()
    assert run.wait_placed("actor")["pid"] == actor and run.err.read_text() == ""


def test_a_role_that_keeps_dying_ends_the_run_when_its_restarts_are_used_up(start):
    run = start({"broker": {"steps": 1000}, "rollout": {"end": "exit7"}, "config": {"launch.max_restarts": 1}})
    assert run.end() == 1
    assert run.out.read_text().count("the role is started again") == 1
    assert "rollout_n0 on node" in run.err.read_text() and "exit code 7" in run.err.read_text()


def test_the_brokers_reason_is_the_message(start):
    run = start({"broker": {"fail_at": 2}})
    assert run.end() == 1
    assert run.err.read_text().splitlines()[0] == "molt_hpc: error: the script says fail"
    assert "step 2 | reward 0.20" in run.out.read_text()


def test_a_killed_broker_ends_the_run(start):
    run = start({"broker": {"steps": 1000}})
    run.wait_running()
    broker = next(p for p in find_processes(run.run_id()) if "scripted_roles.py\0broker" in Path(f"/proc/{p}/cmdline").read_text()
                  and "molt_hpc.guard" not in Path(f"/proc/{p}/cmdline").read_text())
    os.kill(broker, signal.SIGKILL)
    assert run.end() == 1
    assert run.err.read_text().startswith(f"molt_hpc: error: broker on node {os.uname().nodename} was killed by SIGKILL")


def test_a_broker_that_does_not_answer_ends_the_run(start):
    run = start({"broker": {"freeze_at": 1}, "config": {"broker.heartbeat_timeout": 4.0}})
    assert run.end() == 1
    assert "has not answered for" in run.err.read_text().splitlines()[0]


def test_the_roll_call_names_who_is_missing(start):
    run = start({"rollout": {"silent": True}, "config": {"launch.roll_call_timeout": 4.0}})
    assert run.end() == 1
    assert "roll call: no report within 4 s (launch.roll_call_timeout) from rollout_n0" in run.err.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_stop_the_run_in_order(start, number):
    run = start({"broker": {"steps": 1000}})
    run.wait_running()
    run.process.send_signal(number)
    assert run.end() == 1
    assert run.err.read_text().startswith(f"molt_hpc: error: stopped by {number.name}")
    assert ("saved after step" in run.out.read_text()) == (number in (signal.SIGUSR1, signal.SIGUSR2))
    assert find_processes(run.run_id()) == []


def test_an_actor_that_does_not_save_in_time_is_stopped_unsaved(start):
    run = start({"broker": {"steps": 1000, "saves": False}, "config": {"launch.save_grace": 1.0}})
    run.wait_running()
    run.process.send_signal(signal.SIGUSR1)
    assert run.end() == 1
    assert "not saved: supervisor: no answer to 'save'" in run.out.read_text()
    assert run.err.read_text().startswith("molt_hpc: error: stopped by SIGUSR1")


def test_roles_that_ignore_everything_are_gone_too(start):
    run = start({"broker": {"steps": 1000}, "actor": {"deaf": True}, "rollout": {"deaf": True}})
    run.wait_running()
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 1
    assert find_processes(run.run_id()) == []


def test_a_killed_supervisor_takes_everything_down(start):
    run = start({"broker": {"steps": 1000}, "actor": {"deaf": True}})
    run.wait_running()
    run_id = run.run_id()
    assert len(find_processes(run_id)) >= 9
    run.process.kill()
    run.end()
    wait_until(lambda: not find_processes(run_id), "the end of all processes")


def test_late_roles_do_not_fail_a_finished_run(start):
    run = start({"broker": {"steps": 2}, "rollout": {"deaf": True}})
    assert run.end() == 0
    assert "rollout did not end within 2 s (launch.stop_grace) of the run's end" in run.out.read_text()
    assert find_processes(run.run_id()) == []

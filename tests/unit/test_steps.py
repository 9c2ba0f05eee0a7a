"""The command lines and environments that the launchers give to roles, word by word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from molt_hpc.slurm.roles import meeting_point, node_rank, role_command, torchrun_line
from molt_hpc.slurm.steps import Handle, Task, command_line, describe_code, log_name, parse_srun_errors, role_environment
from molt_hpc.slurm.topology import Step

RUN, LOGS = Path("/shared/run"), Path("/shared/run/logs/attempt_1")
ACTOR = Step("actor", ("n1", "n2"), 0, 0, 16, 4, 4)
ROLLOUT = Step("rollout", ("n7",), 2, 3, 8, 1, 0)
ADDRESS = "tcp://10.0.0.1:5555"


def test_srun_line_of_a_component():
    line = command_line("srun", ACTOR, role_command(ACTOR, RUN, 1, ADDRESS), LOGS)
    python = sys.executable
    assert " ".join(line) == (
        "srun --het-group=0 --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=16 --nodelist=n1,n2 --job-name=actor --overlap "
        "--kill-on-bad-exit=1 --mpi=none --export=ALL --input=all --output=/shared/run/logs/attempt_1/actor_n%t.log --open-mode=append "
        f"{python} -m molt_hpc.guard --grace 6 --control-stdin -- "
        f"{python} -m molt_hpc actor /shared/run --attempt 1 --broker tcp://10.0.0.1:5555")


def test_srun_line_of_a_later_rollout_component_starts_at_its_rank():
    line = command_line("srun", ROLLOUT, role_command(ROLLOUT, RUN, 1, ADDRESS), LOGS)
    assert line[1:3] == ["--het-group=3", "--nodes=1"]
    assert "--output=/shared/run/logs/attempt_1/rollout_from2_n%t.log" in line
    assert line[-2:] == ["--first-rank", "2"]


def test_srun_line_in_a_plain_allocation_names_no_group():
    step = Step("actor", ("n1",), 0, None, 16, 4, 4)
    line = command_line("srun", step, ["true"], LOGS)
    assert not any(word.startswith("--het-group") for word in line)


def test_local_line_is_the_guarded_command():
    line = command_line("local", ROLLOUT, ["cmd", "--x"], LOGS)
    assert line[:5] == [sys.executable, "-m", "molt_hpc.guard", "--grace", "6"]
    assert line[5:] == ["--control-stdin", "--owner", str(os.getpid()), "--", "cmd", "--x"]


def test_broker_is_told_where_to_listen():
    broker = Step("broker", ("n1",), 0, None, 1, 1, 0)
    assert role_command(broker, RUN, 2, "10.0.0.1")[2:] == ["molt_hpc", "broker", "/shared/run", "--attempt", "2", "--host", "10.0.0.1"]
    assert log_name(broker, 0) == "broker.log"


def test_torchrun_line():
    line = torchrun_line(RUN, ADDRESS, 1, 1, 2, 8, "10.0.0.2", 29501)
    assert " ".join(line[1:]) == (
        "-m torch.distributed.run --nnodes=2 --nproc-per-node=8 --node-rank=1 --rdzv-backend=static --master-addr=10.0.0.2 "
        "--master-port=29501 --max-restarts=0 -m molt_hpc.train.loop /shared/run --broker tcp://10.0.0.1:5555 --attempt 1")


def test_a_single_training_node_meets_on_loopback():
    host, port = meeting_point(RUN, ADDRESS, 1, 0, nodes=1)
    assert host == "127.0.0.1" and 1024 <= port < 65536


def test_node_rank_counts_from_the_steps_first():
    assert node_rank(2) == 2 + int(os.environ.get("SLURM_NODEID", "0"))


def test_environment_is_an_allow_list():
    source = {"PATH": "/bin", "HF_HOME": "/hf", "NCCL_DEBUG": "INFO", "SECRET": "1", "AWS_KEY": "2", "SLURM_CONF": "/etc/s",
              "SLURM_JOB_ID": "7", "LC_ALL": "C", "https_proxy": "p"}
    env = role_environment(source, ROLLOUT, "run7", "local")
    assert env == {"PATH": "/bin", "HF_HOME": "/hf", "NCCL_DEBUG": "INFO", "SLURM_CONF": "/etc/s", "LC_ALL": "C", "https_proxy": "p",
                   "OMP_NUM_THREADS": "8", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1", "MOLT_HPC_RUN_ID": "run7"}
    assert role_environment(source, ROLLOUT, "run7", "local", ["AWS_*"])["AWS_KEY"] == "2"


def test_srun_gets_the_job_but_none_of_its_option_variables():
    source = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST_HET_GROUP_1": "n7", "SLURM_EXPORT_ENV": "NONE", "SLURM_NTASKS": "9",
              "SLURM_CPU_BIND_TYPE": "x", "SLURMD_NODENAME": "n1"}
    env = role_environment(source, ACTOR, "r", "srun")
    assert {name for name in env if name.startswith("SLURM")} == {"SLURM_JOB_ID", "SLURM_JOB_NODELIST_HET_GROUP_1", "SLURMD_NODENAME"}


def test_local_gpus_are_handed_out():
    step = Step("rollout", ("box",), 0, None, 4, 2, 2, ("3", "5"))
    assert role_environment({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"}, step, "r", "local")["CUDA_VISIBLE_DEVICES"] == "3,5"


@pytest.mark.parametrize("code, text", [(0, "exit code 0"), (7, "exit code 7"), (137, "killed by SIGKILL"), (-9, "killed by SIGKILL"),
                                        (143, "killed by SIGTERM"), (255, "exit code 255")])
def test_exit_codes_in_words(code, text):
    assert describe_code(code) == text


def test_srun_messages_tell_who_ended_first():
    text = ("srun: Job step creation temporarily disabled\nsrun: error: n3: task 1: Exited with exit code 7\n"
            "srun: launch/slurm: _step_signal: Terminating StepId=4.0\nsrun: error: n[1-2]: tasks 0,2-3: Killed\n"
            "srun: error: n5: task 4: Exited with exit code 137\n")
    assert parse_srun_errors(text) == [(1, "exit code 7"), (0, "killed"), (2, "killed"), (3, "killed"), (4, "killed by SIGKILL")]


def test_a_launch_that_fails_names_its_node_and_not_the_tasks_that_srun_then_killed(tmp_path):
    log = tmp_path / "actor_srun.log"
    log.write_text("srun: error: Task launch for StepId=24.0 failed on node n2: Communication connection failure\n"
                   "srun: error: Application launch failed: Communication connection failure\nsrun: error: n1: task 0: Killed\n")
    process = subprocess.Popen(["false"])
    process.wait()
    tasks = [Task("actor", node, tmp_path / "actor.log") for node in ("n1", "n2")]
    assert Handle(ACTOR, tasks, process, log, 0).ends()[0] == (tasks[1], "a failed launch: Communication connection failure")

"""A run inside real Slurm jobs: where roles land, how it ends, that nothing stays."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

from molt_hpc.slurm.leftovers import find_processes
from tests.slurm.conftest import LOCAL_SLURM, ROOT, Job, wait_until

HET = ["-N2", "--ntasks-per-node=1", "-c4", "--gpus-per-node=2", ":", "-N1", "--ntasks-per-node=1", "-c2"]
NODES = ["--actor.num_nodes=2", "--actor.num_procs_per_node=1"]


def batch_process(job: Job) -> int:
    """The supervisor's process, as this machine numbers it."""
    wanted = f"--output_dir={job.run}"
    for name in filter(str.isdigit, os.listdir("/proc")):
        line = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace").split("\0")
        if wanted in line and line[1].endswith("scripted_run.py"):
            return int(name)
    raise AssertionError("no supervisor runs")


def test_het_job_trains_on_component_0_and_rolls_out_on_component_1(submit):
    script = {"broker": {"steps": 3}, "torchrun": {"nodes": 2, "procs": 2}}
    job = submit(HET, script, ["--actor.num_nodes=2", "--actor.num_procs_per_node=2"])
    assert job.wait_end() == "COMPLETED 0:0"
    ranks = [json.loads((job.run / f"rank_{rank}.json").read_text()) for rank in range(4)]
    assert [r["host"] for r in ranks] == ["n1", "n1", "n2", "n2"]
    assert {(r["world"], r["sum"]) for r in ranks} == {(4, 6.0)}
    placed = job.placed()
    assert placed["rollout_n0@0"]["host"] == "n3"
    assert placed["rollout_n0@0"]["environment"]["OMP_NUM_THREADS"] == "2"
    assert placed["actor@0"]["environment"]["OMP_NUM_THREADS"] == "2"
    assert placed["actor@0"]["environment"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "step 3 | reward 0.30" in job.output
    assert {p.name for p in (job.run / "logs/latest").iterdir()} >= {"actor_n0.log", "actor_n1.log", "rollout_n0.log", "broker.log"}


def test_several_rollout_components_number_their_workers_through(submit):
    job = submit(["-N1", "-c2", ":", "-N1", "-c2", ":", "-N2", "--ntasks-per-node=1", "-c2"],
                 {"expected": ["actor", "rollout_n0", "rollout_n1", "rollout_n2"]}, ["--rollout.num_nodes=3", "--vllm.num_engines=3"])
    assert job.wait_end() == "COMPLETED 0:0"
    hosts = {name: record["host"] for name, record in job.placed().items()}
    assert hosts == {"actor@0": "n1", "rollout_n0@0": "n2", "rollout_n1@1": "n3", "rollout_n2@2": "n4"}


def goes_on_after_its_time_limit(job) -> bool:
    job.wait_for_text("step 1 ")
    subprocess.run(["scancel", "--batch", "--signal=USR1", job.job_id], check=True, timeout=60)
    job.wait_for_text("stopped and handed in again after step")
    assert "saved after step" in job.output
    return job.wait_end() == "COMPLETED 0:0" and "done after step 30" in (job.run / "logs/attempt_2/supervisor.log").read_text()


def test_a_heterogeneous_job_goes_on_after_its_time_limit(submit):
    assert goes_on_after_its_time_limit(submit(["--requeue", "-N1", "-c2", ":", "-N1", "-c2"], {"broker": {"steps": 30}}))


def test_plain_allocation_is_split_by_node_and_goes_on_after_its_time_limit(submit):
    job = submit(["--requeue", "-N3", "--ntasks-per-node=1", "-c4"], {"broker": {"steps": 30}}, NODES)
    assert goes_on_after_its_time_limit(job)
    assert {name: record["host"] for name, record in job.placed().items()} == {"actor@0": "n1", "actor@1": "n2", "rollout_n0@0": "n3"}


def test_too_few_nodes_fail_at_once(submit):
    job = submit(["-N2"], {}, NODES)
    assert job.wait_end() == "FAILED 1:0"
    assert "needs 2 training + 1 rollout nodes (actor.num_nodes, rollout.num_nodes), the allocation has 2" in job.output
    assert not job.run.exists()


def test_a_role_that_dies_ends_the_job_with_its_reason(submit):
    job = submit(HET, {"broker": {"steps": 1000}, "actor@1": {"end": "raise"}}, NODES)
    assert job.wait_end() == "FAILED 1:0"
    assert "molt_hpc: error: actor on node n2 ended with exit code 1: RuntimeError: the script says raise" in job.output
    assert "  | RuntimeError: the script says raise" in job.output
    assert find_processes(job.run_id()) == []


def test_a_killed_rollout_role_is_named_with_its_signal_and_started_again(submit):
    job = submit(HET, {"broker": {"steps": 150}, "rollout": {"end": "killed", "once": True}}, NODES)
    assert job.wait_end() == "COMPLETED 0:0"
    assert re.search("rollout_n0 on node n3 was killed by SIGKILL.*; the role is started again, time 1 of 3", job.output)


def test_deaf_roles_on_other_nodes_are_gone_after_the_end(submit):
    job = submit(HET, {"broker": {"steps": 1000}, "actor": {"deaf": True}, "rollout": {"deaf": True}}, NODES)
    job.wait_for_text("the run begins")
    subprocess.run(["scancel", "--batch", "--signal=USR1", job.job_id], check=True, timeout=60)
    assert job.wait_end() == "FAILED 1:0"
    assert "stopped by SIGUSR1" in job.output
    assert find_processes(job.run_id()) == []


def test_a_cancelled_job_leaves_nothing(submit):
    job = submit(HET, {"broker": {"steps": 1000}, "actor": {"deaf": True}, "rollout": {"deaf": True}}, NODES)
    job.wait_for_text("the run begins")
    subprocess.run(["scancel", job.job_id], check=True, timeout=60)
    assert job.wait_end().startswith("CANCELLED")
    wait_until(lambda: not find_processes(job.run_id()), "the end of all processes", 60, job)


def test_a_killed_supervisor_takes_all_nodes_down(submit):
    job = submit(HET, {"broker": {"steps": 1000}, "actor": {"deaf": True}, "rollout": {"deaf": True}}, NODES)
    job.wait_for_text("the run begins")
    os.kill(batch_process(job), signal.SIGKILL)
    job.wait_end()
    wait_until(lambda: not find_processes(job.run_id()), "the end of all processes", 60, job)
    assert find_processes(job.run_id()) == []


def test_sbatch_script_hands_every_argument_on_and_python_gets_the_signal(cluster, tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@" > args\necho $SLURM_HET_SIZE $SLURM_JOB_NUM_NODES_HET_GROUP_0 '
                      '$SLURM_JOB_NUM_NODES_HET_GROUP_1 > sizes\ntrap "touch signalled; exit 3" USR1\ntouch ready\n'
                      'while :; do sleep 0.1; done\n')
    python.chmod(0o755)
    words = ["my run.toml", "--train.agent_path", "a b.py", "--x=*", "", "--prompt='quoted \"text\"'", "$HOME"]
    line = ["sbatch", "--parsable", "-o", str(tmp_path / "out"), "-N2", ":", "-N1", str(ROOT / "sbatch/train_rl.sh"), *words]
    env = {**os.environ, "MOLT_HPC_PYTHON": str(python)}
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    job = Job(done.stdout.strip(), tmp_path)
    wait_until((tmp_path / "ready").exists, "the job's start", 60, job)
    assert (tmp_path / "args").read_text().split("\n")[:-1] == ["-m", "molt_hpc", "run", *words]
    assert (tmp_path / "sizes").read_text().split() == ["2", "2", "1"]
    subprocess.run(["scancel", "--batch", "--signal=USR1", job.job_id], check=True, timeout=60)
    assert job.wait_end(60) == "FAILED 3:0"
    assert (tmp_path / "signalled").exists()


def test_a_dead_node_ends_the_job_and_is_named(submit, cluster):
    job = submit(["-N1", "-c2", ":", "-N1", "-c2"], {"broker": {"steps": 100000}})
    job.wait_for_text("the run begins")
    node = job.placed()["rollout_n0@0"]["host"]
    subprocess.run([LOCAL_SLURM, "--dir", cluster, "kill-node", node], check=True, timeout=60)
    try:
        assert job.wait_end().startswith("NODE_FAIL")
        wait_until(lambda: "molt_hpc: error:" in job.output, "the supervisor's message", 20, job)
        assert f"stopped by SIGTERM: node failure on {node}" in job.output
    finally:
        bring_back(cluster, node)


def test_a_job_goes_on_after_the_end_of_its_batch_node_and_without_the_steps_of_before(submit, cluster):
    job = submit(["--requeue", "-N1", "-c2", ":", "-N1", "-c2"], {"broker": {"steps": 30}})
    job.wait_for_text("the run begins")
    older = subprocess.Popen(["srun", f"--jobid={job.job_id}", "--het-group=1", "--overlap", "-n1", "sleep", "600"])
    node = job.placed()["actor@0"]["host"]
    subprocess.run([LOCAL_SLURM, "--dir", cluster, "kill-node", node], check=True, timeout=60)
    try:
        assert older.wait(120) != 0 and "done after step" not in job.output
        assert job.wait_end() == "COMPLETED 0:0"
        assert job.placed()["actor@0"]["host"] != node and len(job.placed()) == 2
        assert "done after step 30" in (job.run / "logs/attempt_2/supervisor.log").read_text()
    finally:
        older.kill()
        bring_back(cluster, node)


def bring_back(cluster: str, node: str) -> None:
    subprocess.run([LOCAL_SLURM, "--dir", cluster, "start-node", node], check=True, timeout=60)
    wait_until(lambda: len(subprocess.run(["sinfo", "-h", "-N", "-t", "idle"], capture_output=True, text=True).stdout.split("\n")) == 5,
               "the node's return", 60)

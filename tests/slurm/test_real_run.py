"""The whole product in a real heterogeneous job: FSDP2 on two nodes, a vLLM server on a third, weights over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

import pytest

from molt_hpc.config import dump
from molt_hpc.slurm.leftovers import find_processes
from tests.process_run import small_config
from tests.slurm.conftest import ROOT, Job

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine


def test_two_training_nodes_and_a_rollout_node_train_a_model(cluster, tmp_path, tiny_qwen3):
    config = small_config(tmp_path, tiny_qwen3, prompts=8)
    config.actor.backend, config.actor.num_nodes, config.actor.num_procs_per_node = "transformers", 2, 1
    config.train.max_steps, config.logger.tensorboard = 2, False
    (tmp_path / "run.toml").write_text(dump(config))
    with tempfile.TemporaryDirectory() as sockets:
        line = ["sbatch", "--parsable", "-o", str(tmp_path / "out"), "-N2", ":", "-N1", str(ROOT / "sbatch/train_rl.sh"),
                str(tmp_path / "run.toml"), "--launch.socket_dir", sockets, "--launch.cpus_per_node", "1"]
        env = {**os.environ, "MOLT_HPC_PYTHON": sys.executable}
        done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        job = Job(done.stdout.strip().split(";")[0], tmp_path)
        try:
            assert job.wait_end(500) == "COMPLETED 0:0", job.output
        finally:
            subprocess.run(["scancel", job.job_id], timeout=60)
        assert os.listdir(sockets) == []
    records = [json.loads(text) for text in (job.run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2]
    assert (job.run / "checkpoints/step_000002/hf/model.safetensors").is_file()
    manifest = json.loads((job.run / "manifest.json").read_text())
    assert [(n["role"], n["nodes"]) for n in manifest["nodes"]] == [("actor", ["n1", "n2"]), ("rollout", ["n3"])]
    assert find_processes(manifest["run_id"]) == []

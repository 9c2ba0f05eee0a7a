"""A finished run's saved batches, trained again, give the recorded numbers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from molt_hpc.data.shards import write_shard
from tests.batches import random_batch
from tests.train.ranks import ROOT, run_ranks

STEPS = 3


@pytest.fixture(scope="module")
def finished_run(tiny_models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with three trained steps and a checkpoint after the second, written by two ranks."""
    from molt_hpc.config import RunConfig, dump

    run = tmp_path_factory.mktemp("run")
    config = RunConfig(output_dir=str(run))
    config.actor.model_name_or_path, config.actor.backend = str(tiny_models("qwen3")), "transformers"
    config.actor.num_procs_per_node, config.actor.lr_scheduler, config.actor.adam.lr = 2, "cosine", 1e-3
    config.fsdp.param_dtype, config.train.max_tokens_per_gpu = "float32", 200
    config.data.prompt_dataset = config.train.agent_path = "unused"
    (run / "config.toml").write_text(dump(config))
    for step in range(1, STEPS + 1):
        write_shard(run, step, random_batch(step, step=step, version=step - 1).to_bytes())
    run_ranks("record_run", 2, run, STEPS, 2)
    return run


def replay(run: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "tools/replay.py", "step", str(run), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_a_step_replayed_from_the_nearest_checkpoint_is_equal(finished_run: Path):
    done = replay(finished_run, "--step", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "equal"
    assert "step 3: " in done.stdout and "step 2: " not in done.stdout


@pytest.mark.slow
def test_a_run_without_checkpoints_is_replayed_from_the_initial_model(finished_run: Path, tmp_path: Path):
    run = tmp_path / "bare"
    shutil.copytree(finished_run, run, ignore=shutil.ignore_patterns("checkpoints"))
    done = replay(run, "--step", "3", "--ranks", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["step 1", "step 2", "step 3", "equal"]


@pytest.mark.slow
def test_a_different_record_is_found_and_named(finished_run: Path, tmp_path: Path):
    run = tmp_path / "changed"
    shutil.copytree(finished_run, run)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records[2]["grad_norm"] *= 1.001
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    done = replay(run, "--step", "3")
    assert done.returncode == 1
    assert "DIFFERENT by 9.99" in done.stdout and "not equal: steps [3]" in done.stdout


def test_a_missing_batch_is_said_before_anything_starts(finished_run: Path, tmp_path: Path):
    run = tmp_path / "hole"
    shutil.copytree(finished_run, run, ignore=shutil.ignore_patterns("step_000003.safetensors"))
    done = replay(run, "--step", "3")
    assert done.returncode == 1
    assert "batch 3 is missing" in done.stderr

"""The main job with every real part: vLLM servers, FSDP2 ranks, broker, supervisor, on this machine."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from molt_hpc.config import dump
from molt_hpc.data.shards import read_shard
from molt_hpc.observe.metrics import read_metrics
from tests.process_run import small_config

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def start(config, folder: Path) -> subprocess.Popen:
    (folder / "config.toml").write_text(dump(config))
    return subprocess.Popen([sys.executable, "-m", "molt_hpc", "run", str(folder / "config.toml")], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, start_new_session=True)


def processes_of(run: Path) -> list[str]:
    """Command lines of all processes whose environment names this run's id."""
    wanted = f"MOLT_HPC_RUN_ID={json.loads((run / 'manifest.json').read_text())['run_id']}".encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(f"{name} " + Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_qwen3):
    """One finished run: 10 prompts in batches of 4, so the last batch is short."""
    folder = tmp_path_factory.mktemp("run")
    config = small_config(folder, tiny_qwen3, prompts=10)
    config.actor.adam.lr = 1e-3
    config.launch.socket_dir = str(folder / "sockets")
    (folder / "sockets").mkdir()
    process = start(config, folder)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return Path(config.output_dir), config, output


def test_every_step_is_recorded_and_versions_rise_by_one(finished):
    run, _, output = finished
    records = read_metrics(run)
    assert [r["step"] for r in records] == [1, 2, 3] == [r["version"] for r in records]
    assert [r["groups_trained"] for r in records] == [4, 4, 2]
    assert all(r["ledger_balance"] == 0 and r["staleness_max"] == 0 for r in records)
    assert "step 3/3 | reward" in output


def test_engine_and_trainer_agree_on_log_probs_at_every_version(finished):
    for record in read_metrics(finished[0]):
        assert record["logprob_gap_mean"] < 1e-5 and record["logprob_gap_max"] < 1e-4


def test_every_token_of_a_batch_carries_the_current_version(finished):
    run, _, _ = finished
    seen = []
    for step in (1, 2, 3):
        batch = read_shard(run, step)
        sampled = batch.action_mask.astype(bool)
        assert set(batch.versions[sampled].tolist()) == {step - 1}
        seen += batch.group_ordinal.tolist()
    assert seen == list(range(10))


def test_the_exported_model_opens_and_scores_like_the_run(finished, tiny_qwen3):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, _, _ = finished
    folder = run / "checkpoints" / "step_000003" / "hf"
    trained, original = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (folder, tiny_qwen3))
    assert AutoTokenizer.from_pretrained(folder).chat_template
    moved = [not torch.equal(a, b) for a, b in zip(trained.parameters(), original.parameters(), strict=True)]
    assert any(moved)


def test_the_exported_model_is_served_by_vllm(finished, tmp_path):
    import asyncio

    from molt_hpc.rollout.engine import Engine

    run, config, _ = finished
    config.actor.model_name_or_path = str(run / "checkpoints" / "step_000003" / "hf")

    async def serve():
        engine = Engine("export", config, 0, 0, tmp_path / "engine.log")
        try:
            await engine.wait_healthy()
            return await engine.post("/v1/completions", {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 4})
        finally:
            await engine.close()

    assert asyncio.run(serve())["usage"]["completion_tokens"] >= 1


def test_replaying_a_step_gives_the_loss_and_gradient_norm_of_the_run(finished):
    run, _, _ = finished
    done = subprocess.run([sys.executable, "tools/replay.py", "step", str(run), "--step", "3"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal" in done.stdout


def test_nothing_is_left_after_the_run(finished):
    run, config, _ = finished
    assert processes_of(run) == []
    assert os.listdir(config.launch.socket_dir) == []


def wait_for_steps(process: subprocess.Popen, run: Path, count: int) -> None:
    deadline = time.monotonic() + 400
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < count:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)


def find_victim(run: Path, role: str) -> int:
    """The process to kill: a training rank, the broker, or the worker."""
    marks = {"actor": "molt_hpc.train.loop", "broker": "molt_hpc broker", "rollout": "molt_hpc rollout"}
    skip = ("molt_hpc.guard", "torch.distributed.run")
    for line in processes_of(run):
        if marks[role] in line and not any(s in line for s in skip):
            return int(line.split()[0])
    raise AssertionError(f"no process of {role} among {processes_of(run)}")


@pytest.mark.parametrize("role", ["actor", "broker"])
def test_killing_a_role_ends_the_job_with_its_name_and_leaves_nothing(tmp_path, tiny_qwen3, role):
    config = small_config(tmp_path, tiny_qwen3, prompts=4000)
    config.train.num_episodes = 10
    config.launch.socket_dir = str(tmp_path / "sockets")
    (tmp_path / "sockets").mkdir()
    process, run = start(config, tmp_path), Path(config.output_dir)
    wait_for_steps(process, run, 1)
    os.kill(find_victim(run, role), signal.SIGKILL)
    killed = time.monotonic()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert time.monotonic() - killed < 60
    assert role in next(line for line in output.splitlines() if "error" in line.lower()), output
    assert processes_of(run) == [] and os.listdir(config.launch.socket_dir) == []


def test_a_run_that_is_told_of_its_time_limit_saves_and_goes_on_from_there(tmp_path, tiny_qwen3):
    config = small_config(tmp_path, tiny_qwen3, prompts=40)
    config.train.max_lag = 1
    process, run = start(config, tmp_path), Path(config.output_dir)
    wait_for_steps(process, run, 2)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "stopped by SIGUSR1" in output
    steps = len(read_metrics(run))
    assert f"saved after step {steps}" in output and (run / "checkpoints" / f"step_{steps:06d}" / "DONE").exists()
    assert 2 <= steps < 10
    config.ckpt.resume = True
    again = start(config, tmp_path)
    output, _ = again.communicate(timeout=500)
    assert again.returncode == 0, output
    assert [r["step"] for r in read_metrics(run)] == list(range(1, 11)) and not any(r.get("replayed") for r in read_metrics(run))
    assert sorted(o for step in range(1, 11) for o in read_shard(run, step).group_ordinal.tolist()) == list(range(40))


def kill_all(process: subprocess.Popen, run: Path) -> None:
    """Everything of the run at once, the supervisor first."""
    os.kill(process.pid, signal.SIGKILL)
    for line in processes_of(run):
        try:
            os.kill(int(line.split()[0]), signal.SIGKILL)
        except ProcessLookupError:
            continue


def test_a_run_whose_processes_are_all_killed_goes_on_and_trains_every_prompt_once(tmp_path, tiny_qwen3):
    config = small_config(tmp_path, tiny_qwen3, prompts=22)
    config.actor.adam.lr, config.ckpt.save_steps, config.train.max_lag = 1e-3, 2, 1
    process, run = start(config, tmp_path), Path(config.output_dir)
    wait_for_steps(process, run, 3)
    kill_all(process, run)
    process.communicate(timeout=60)
    before = {r["step"]: r for r in read_metrics(run)}
    assert len(before) < 6, "the run was over before it was killed"
    config.ckpt.resume = True
    again = start(config, tmp_path)
    output, _ = again.communicate(timeout=500)
    assert again.returncode == 0, output
    records = read_metrics(run)
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6] and records[-1]["attempt"] == 2
    trained = [o for step in range(1, 7) for o in read_shard(run, step).group_ordinal.tolist()]
    assert sorted(trained) == list(range(22))
    for record in records:
        if record.get("replayed") and record["step"] in before:
            assert record["loss"] == pytest.approx(before[record["step"]]["loss"], rel=1e-5, abs=1e-7)
            assert record["grad_norm"] == pytest.approx(before[record["step"]]["grad_norm"], rel=1e-5)
    assert all(r["staleness_max"] <= 1 and r["ledger_balance"] == 0 for r in records)

"""`python -m molt_hpc`: errors of the user's are one line before anything starts; check shows what run would do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

AGENT = "from molt_hpc.agents import Env, Result\n\nclass Agent(Env):\n    def step(self, state):\n        return Result(reward=1.0)\n"


def molt(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "molt_hpc", *map(str, words)], capture_output=True, text=True, timeout=120,
                          env={k: v for k, v in os.environ.items() if not k.startswith("SLURM_")} | {"CUDA_VISIBLE_DEVICES": ""})


@pytest.fixture
def good(tmp_path) -> list[str]:
    """A configuration file that passes every check, as the words behind a command."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "run.toml").write_text(
        f'output_dir = "{tmp_path}/run"\n[actor]\nmodel_name_or_path = "{tmp_path}/model"\nbackend = "transformers"\n'
        f'[data]\nprompt_dataset = "{tmp_path}/prompts.jsonl"\n[train]\nagent_path = "{tmp_path}/agent.py"\n[weights]\nbackend = "gloo"\n')
    return [str(tmp_path / "run.toml"), "--logger.tensorboard", "false"]


def test_check_shows_what_run_would_start(good, tmp_path):
    done = molt("check", *good, "--launch.cpus_per_node", "8", "--vllm.tensor_parallel_size", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "training ranks: 2 (1 nodes x 2)" in done.stdout
    assert "engines: 1 x tensor parallel 2 = 2 engine ranks" in done.stdout
    assert "weight group: 3 (training rank 0 and the engine ranks)" in done.stdout
    assert "2 processes a node, 4 cores, 2 threads each" in done.stdout
    assert done.stdout.count("-m molt_hpc.guard") == 3
    assert "-m molt_hpc.train.loop" in done.stdout
    assert not (tmp_path / "run").exists()


def test_check_imports_no_heavy_library(good):
    code = ("import sys\nfrom molt_hpc.__main__ import main\nassert main(['check', *sys.argv[1:]]) == 0\n"
            "heavy = {'torch', 'vllm', 'transformers', 'submitit'} & set(sys.modules)\nassert not heavy, heavy")
    done = subprocess.run([sys.executable, "-c", code, *good], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize("words, said", [
    (["--rollout.n_sample", "4"], "command line: unknown option rollout.n_sample; did you mean rollout.n_samples_per_prompt?"),
    (["--actor.model_name_or_path", "/no/such/folder"], "actor.model_name_or_path: there is no folder /no/such/folder"),
    (["--actor.model_name_or_path", "{tmp}"], "actor.model_name_or_path: {tmp} has no config.json"),
    (["--data.prompt_dataset", "{tmp}/broken.jsonl"], "{tmp}/broken.jsonl:2: not JSON"),
    (["--train.agent_path", "{tmp}/empty.py"], "train.agent_path: {tmp}/empty.py must define one subclass"),
    (["--actor.num_nodes", "2"], "needs 2 training + 1 rollout nodes (actor.num_nodes, rollout.num_nodes), the local launcher has 1"),
    (["--launch.launcher", "srun"], "launch.launcher: srun needs a Slurm job")])
def test_mistakes_are_one_line(good, tmp_path, command, words, said):
    (tmp_path / "broken.jsonl").write_text('{"prompt": "x"}\n{"prompt": \n')
    (tmp_path / "empty.py").write_text("x = 1\n")
    done = molt(command, *good, *(w.format(tmp=tmp_path) for w in words))
    assert done.returncode == 1
    assert done.stderr.startswith("molt_hpc: error: " + said.format(tmp=tmp_path)), done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""
    assert not (tmp_path / "run").exists()


def test_run_refuses_a_used_folder(good, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").touch()
    done = molt("run", *good)
    assert done.returncode == 1
    assert done.stderr == (f"molt_hpc: error: output_dir: {tmp_path}/run already has files; "
                           "choose a new folder, or go on with that run: --ckpt.resume\n")
    assert molt("check", *good).returncode == 0


def test_help_and_mistaken_commands():
    assert "run CONFIG.toml" in molt("--help").stdout
    assert "--rollout.n_samples_per_prompt" in molt("run", "--help").stdout
    assert molt("trian").stderr.startswith("molt_hpc: error: unknown command 'trian'")
    assert molt("run").stderr.startswith("molt_hpc: error: run: no configuration file is given")


def test_status_and_stop_of_a_run_that_never_was(tmp_path):
    for command in ("status", "stop"):
        assert molt(command, tmp_path).stderr == f"molt_hpc: error: {tmp_path}: no endpoint.json, so no broker has listened there yet\n"


def test_status_and_stop_talk_to_a_running_run(good, tmp_path):
    script = Path(__file__).with_name("scripted_run.py")
    run = subprocess.Popen([sys.executable, str(script), json.dumps({"broker": {"steps": 100000}}), *good],
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    try:
        while "step 1 |" not in run.stdout.readline():
            pass
        status = json.loads(molt("status", tmp_path / "run").stdout)
        assert status["phase"] == "running" and status["step_lines"]
        assert molt("stop", tmp_path / "run", "--reason", "enough").returncode == 0
        assert "molt_hpc: error: enough" in run.communicate(timeout=60)[1]
        assert run.returncode == 1
    finally:
        run.kill()

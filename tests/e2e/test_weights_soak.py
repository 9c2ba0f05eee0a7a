"""Fifty updates that change nothing: engines and trainer agree as well at the end as at the beginning."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from molt_hpc.config import dump
from molt_hpc.observe.metrics import read_metrics
from tests.process_run import small_config

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


def run(config, folder: Path) -> tuple[int, str]:
    (folder / "config.toml").write_text(dump(config))
    done = subprocess.run([sys.executable, "-m", "molt_hpc", "run", str(folder / "config.toml")], capture_output=True, text=True, timeout=500)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("backend", ["gloo", "files"])
def test_with_learning_rate_0_the_drift_does_not_grow(tmp_path, tiny_qwen3, backend):
    updates = 50 if backend == "gloo" else 6
    config = small_config(tmp_path, tiny_qwen3, prompts=4 * updates)
    config.actor.adam.lr, config.rollout.max_new_tokens = 0.0, 4
    config.weights.backend, config.weights.changed_only = backend, backend == "files"
    config.weights.drift_prompts, config.weights.drift_alarm, config.weights.drift_stop = 4, 1e-4, 1e-3
    code, output = run(config, tmp_path)
    assert code == 0, output
    records = read_metrics(Path(config.output_dir))
    drift = np.array([(r["drift_mean"], r["drift_max"]) for r in records])
    assert len(drift) == updates
    assert 0 < drift[:, 0].max() < 1e-5 and drift[:, 1].max() < 1e-4
    np.testing.assert_allclose(drift[-5:].mean(0), drift[:5].mean(0), rtol=0.5)
    if backend == "files":  # nothing has changed, so nothing is written
        assert [r["update_bytes"] for r in records] == [0.0] * updates


def test_a_drift_above_the_bound_stops_the_run_with_the_engine_named(tmp_path, tiny_qwen3):
    config = small_config(tmp_path, tiny_qwen3)
    config.vllm.dtype = "bfloat16"
    config.weights.drift_prompts, config.weights.drift_stop = 4, 1e-6  # a bfloat16 engine cannot meet it
    code, output = run(config, tmp_path)
    assert code == 1
    log = "".join(path.read_text() for path in (Path(config.output_dir) / "logs" / "latest").glob("actor*.log"))
    assert "DriftError: version 0: log-probs of" in log and "weights.drift_stop is 1e-06" in log, output

"""tools/simulate: a real broker with a scripted fleet loses nothing, and what is drawn depends on the seed alone."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def model(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import simulate_workers

    return simulate_workers


@pytest.mark.slow
def test_faults_and_deaths_neither_lose_nor_repeat_a_rollout():
    words = {"workers": 50, "slots": 2, "steps": 5, "batch_size": 16, "samples": 4, "max_lag": 1, "mean_seconds": 0.1, "step_seconds": 0.05,
             "fault_rate": 0.05, "deaths": 4, "seed": 3}
    options = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    done = subprocess.run([sys.executable, str(TOOLS / "simulate"), *options, "--json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["rollouts_once"] == report["lease_ends"]["trained"] == 5 * 16 * 4
    assert report["rollouts_lost"] == report["rollouts_duplicated"] == report["rollouts_unknown"] == 0
    assert report["workers_died"] == 4 and report["lease_ends"]["failed"] > 0


def test_the_same_seed_gives_the_same_lengths_faults_and_deaths(model):
    load = model.Load(steps=5, batch_size=16, deaths=4, seed=7)
    other = model.Load(steps=5, batch_size=16, deaths=4, seed=8)
    assert (model.lengths(load) == model.lengths(load)).all() and (model.luck(load) == model.luck(load)).all()
    assert model.deaths(load) == model.deaths(load)
    assert (model.lengths(load) != model.lengths(other)).any()


@pytest.mark.parametrize("tail", [1.0, 3.0, 20.0])
def test_lengths_have_the_mean_and_the_tail_that_were_asked_for(model, tail):
    seconds = model.lengths(model.Load(steps=50, mean_seconds=2.0, tail=tail))
    assert seconds.shape == (50 * 512, 8)
    assert np.isclose(seconds.mean(), 2.0, rtol=0.02)
    assert np.isclose(seconds.max() / np.median(seconds), tail, rtol=0.02)


def test_a_batch_synchronous_loop_waits_for_its_last_rollout(model):
    load = model.Load(workers=3, slots=1, steps=2, batch_size=2, samples=2, mean_seconds=1.0, tail=1.0, step_seconds=0.5,
                      update_seconds=0.25)
    result = model.batch_synchronous(load)
    assert np.isclose(result["batch_synchronous_step_seconds"], 2.75)  # 4 rollouts on 3 slots are 2 rounds
    assert np.isclose(result["batch_synchronous_utilisation"], 4 / (3 * 2.75))

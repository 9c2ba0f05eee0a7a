"""Metrics by source: only where a batch has several."""

import numpy as np
import pytest

from molt_hpc.train.metrics import batch_metrics
from tests.batches import random_batch


def with_sources(sources):
    batch = random_batch(seed=3, groups=4, samples=4)
    for rollout, group in zip(batch.rollouts, batch.rollout_group, strict=True):
        rollout["prompt"]["source"] = sources[group]
    return batch


def test_each_source_has_its_own_means():
    batch = with_sources(["math", "code", "math", "web/qa"])
    batch.rollout_reward = np.repeat(np.float32([2.0, -1.0, 4.0, 0.5]), 4)
    batch.rollout_score = np.tile(np.float32([1.0, 0.0, 0.5, 0.6]), 4)
    found = batch_metrics(batch, np.zeros(16), (-10.0, 10.0))
    assert {k: v for k, v in found.items() if k.startswith("reward_mean")} == {
        "reward_mean": pytest.approx(1.375), "reward_mean/math": 3.0, "reward_mean/code": -1.0, "reward_mean/web/qa": 0.5}
    assert {found[f"pass_rate/{source}"] for source in ("math", "code", "web/qa")} == {0.5}
    assert all(isinstance(value, (int, float)) for value in found.values())


def test_one_source_adds_nothing():
    found = batch_metrics(with_sources(["math"] * 4), np.zeros(16), (-10.0, 10.0))
    assert not [name for name in found if "/" in name]

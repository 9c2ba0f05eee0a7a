"""A micro-batch holds each sampled token's own constants, and the metrics are what their names say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_hpc.train.metrics import batch_metrics, token_metrics
from molt_hpc.train.micro import TokenSums, build_micro_batch
from tests.batches import random_batch

CPU = torch.device("cpu")


@given(st.integers(0, 50), st.data())
@settings(max_examples=30, deadline=None)
def test_every_sampled_token_comes_with_its_own_values(seed: int, data):
    batch = random_batch(seed, groups=2, samples=3)
    chosen = data.draw(st.lists(st.integers(0, len(batch.segment_rollout) - 1), min_size=1, max_size=4, unique=True))
    advantages = np.arange(len(batch.rollout_reward), dtype=float)
    micro = build_micro_batch(batch, chosen, advantages, CPU)
    where = np.concatenate([np.arange(batch.segment_offsets[s], batch.segment_offsets[s + 1]) for s in chosen])
    where = where[batch.action_mask[where] == 1]
    assert micro.packed.targets.tolist() == batch.token_ids[where].tolist()
    assert micro.rollout.tolist() == batch.logprobs[where].tolist()
    assert micro.versions.tolist() == batch.versions[where].tolist()
    owner = np.searchsorted(batch.segment_offsets, where, side="right") - 1
    assert micro.advantages.tolist() == batch.segment_rollout[owner].tolist()
    assert micro.packed.inverse_temperature.tolist() == pytest.approx(1 / batch.segment_temperature[owner])
    flat = micro.packed.token_ids[0]
    assert flat[micro.packed.rows + 1].tolist() == micro.packed.targets.tolist()
    assert micro.mask.all()


def test_positions_restart_and_attention_stays_inside_of_each_segment():
    packed = build_micro_batch(random_batch(0), [0, 1, 2], np.zeros(16), CPU).packed
    starts = np.cumsum([0, *packed.lengths[:-1]])
    assert (packed.position_ids[0][starts] == 0).all() and packed.position_ids.max() == max(packed.lengths) - 1
    mask = packed.block_mask()[0, 0]
    assert mask.sum().item() == sum(n * (n + 1) // 2 for n in packed.lengths)
    assert not mask.triu(1).any()


def test_a_rank_without_segments_computes_a_dummy_of_no_weight():
    micro = build_micro_batch(random_batch(0), [], np.zeros(16), CPU)
    assert not micro.mask.any() and len(micro.packed.targets) == 1
    sums = TokenSums()
    one = torch.ones(1)
    sums.add_loss(micro.mask, micro.mask, micro.mask, one, one)
    sums.add_gap(micro, torch.full((1,), -5.0), version=1)
    assert sums == TokenSums()


def test_the_gap_counts_tokens_of_the_version_trained_from_apart():
    batch = random_batch(0, version=3)
    micro = build_micro_batch(batch, list(range(len(batch.segment_rollout))), np.zeros(16), CPU)
    sums = TokenSums()
    current = micro.versions == 3
    sums.add_gap(micro, micro.rollout + torch.where(current, 0.5, 2.0), version=3)
    count = int(current.sum())
    assert 0 < count < len(current)
    assert (sums.sums["gap"], sums.sums["gap_tokens"]) == (pytest.approx(0.5 * count, rel=1e-5), count)
    assert sums.sums["gap_all"] == pytest.approx(0.5 * count + 2.0 * (len(current) - count), rel=1e-5)
    assert sums.maxima["gap"] == pytest.approx(0.5, rel=1e-5)


def test_without_a_token_of_the_current_version_there_is_no_gap():
    sums = dict.fromkeys(TokenSums().sums, 0.0) | {"tokens": 4.0, "ratio": 4.0, "ratio_squared": 6.0, "gap_all": 2.0, "gap_all_tokens": 4.0}
    found = token_metrics(sums, {"ratio": 2.0, "gap": 0.0})
    assert "logprob_gap_mean" not in found and "logprob_gap_max" not in found
    assert found["logprob_gap_all_mean"] == 0.5 and found["ratio_mean"] == 1.0 and found["ratio_std"] == pytest.approx(0.5**0.5)


def test_metrics_of_the_batch_are_over_rollouts_not_segments():
    batch = random_batch(4, groups=3, samples=4)
    batch.rollout_reward[:] = [1, 1, 1, 1, 0, 0, 0, 1, 20, 20, 30, 40]
    batch.rollout_score[:] = batch.rollout_reward > 0.6
    batch.rollouts[0]["truncated"] = True
    found = batch_metrics(batch, np.array([1.0, -1.0] * 6), (-10.0, 10.0))
    assert found["reward_mean"] == pytest.approx(115 / 12)
    assert found["pass_rate"] == found["score_mean"] == pytest.approx(9 / 12)
    assert found["frac_groups_zero_std"] == pytest.approx(2 / 3), "the third group is all equal once clipped"
    assert found["truncated_fraction"] == pytest.approx(1 / 12) and found["advantage_std"] == 1.0
    assert found["response_length_mean"] == pytest.approx(batch.action_mask.sum() / 12)
    assert found["staleness_max"] == 1.0 and found["sampled_tokens"] == batch.action_mask.sum() and found["tokens"] == len(batch.token_ids)

"""A micro-batch holds each sampled token's own constants, and the metrics are what their names say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_hpc.train.loss import LossSettings, policy_loss
from molt_hpc.train.metrics import SUMS, TokenSums, batch_metrics, token_metrics
from molt_hpc.train.micro import TokenTable, build_micro_batch, whole_sequences
from molt_hpc.train.planner import Plan, StepPlan
from tests.batches import random_batch

CPU = torch.device("cpu")


@given(st.integers(0, 50), st.data())
@settings(max_examples=30, deadline=None)
def test_every_sampled_token_comes_with_its_own_values(seed: int, data):
    batch = random_batch(seed, groups=2, samples=3)
    chosen = data.draw(st.lists(st.integers(0, len(batch.segment_rollout) - 1), min_size=1, max_size=4, unique=True))
    table = TokenTable(batch)
    table.columns["number"] = np.arange(len(table["sequence"]), dtype=np.float64)
    micro = build_micro_batch(table, chosen, CPU)
    where = np.concatenate([np.arange(batch.segment_offsets[s], batch.segment_offsets[s + 1]) for s in chosen])
    where = where[batch.action_mask[where] == 1]
    assert micro.packed.targets.tolist() == batch.token_ids[where].tolist()
    assert micro["rollout"].tolist() == batch.logprobs[where].tolist()
    assert micro["versions"].tolist() == batch.versions[where].tolist()
    owner = np.searchsorted(batch.segment_offsets, where, side="right") - 1
    assert micro["sequence"].tolist() == batch.segment_rollout[owner].tolist()
    assert micro["positions"].tolist() == (where - batch.segment_offsets[owner]).tolist()
    assert micro["number"].tolist() == np.searchsorted(np.flatnonzero(batch.action_mask), where).tolist()
    assert micro["number"].dtype == torch.float32 and micro["versions"].dtype == torch.int32
    assert micro.packed.inverse_temperature.tolist() == pytest.approx(1 / batch.segment_temperature[owner])
    flat = micro.packed.token_ids[0]
    assert flat[micro.packed.rows + 1].tolist() == micro.packed.targets.tolist()
    assert micro.mask.all()


def test_positions_restart_and_attention_stays_inside_of_each_segment():
    packed = build_micro_batch(TokenTable(random_batch(0)), [0, 1, 2], CPU).packed
    starts = np.cumsum([0, *packed.lengths[:-1]])
    assert (packed.position_ids[0][starts] == 0).all() and packed.position_ids.max() == max(packed.lengths) - 1
    mask = packed.block_mask()[0, 0]
    assert mask.sum().item() == sum(n * (n + 1) // 2 for n in packed.lengths)
    assert not mask.triu(1).any()


def with_advantages(batch, value: float = 1.0) -> TokenTable:
    table = TokenTable(batch)
    table.columns["advantages"] = np.full(len(table["sequence"]), value)
    return table


def sums_of(micro, current: torch.Tensor, old: torch.Tensor, version: int) -> tuple[dict, dict]:
    tokens = TokenSums()
    result = policy_loss("ppo", current, old, micro["rollout"], micro["advantages"], micro.mask, LossSettings(), micro["sequence"])
    tokens.add_loss(micro, result, torch.ones_like(current), None)
    tokens.add_gap(micro, old, version)
    return tokens.totals()


def test_a_rank_without_segments_computes_a_dummy_of_no_weight():
    micro = build_micro_batch(with_advantages(random_batch(0)), [], CPU)
    assert not micro.mask.any() and len(micro.packed.targets) == 1
    sums, maxima = sums_of(micro, torch.tensor([-3.0]), torch.tensor([-5.0]), 1)
    assert set(sums.values()) == {0.0} and maxima["gap"] == maxima["ratio"] == 0.0


def test_the_gap_counts_tokens_of_the_version_trained_from_apart_and_every_age_by_itself():
    batch = random_batch(0, version=3)
    micro = build_micro_batch(with_advantages(batch), list(range(len(batch.segment_rollout))), CPU)
    current = micro["versions"] == 3
    old = micro["rollout"] + torch.where(current, 0.5, 0.25)
    sums, maxima = sums_of(micro, old, old, version=3)
    count, total = int(current.sum()), len(current)
    assert 0 < count < total
    assert (sums["gap"], sums["gap_tokens"]) == (pytest.approx(0.5 * count, rel=1e-5), count)
    assert sums["gap_all"] == pytest.approx(0.5 * count + 0.25 * (total - count), rel=1e-5)
    assert maxima["gap"] == pytest.approx(0.5, rel=1e-5)
    found = token_metrics(sums, maxima)
    assert found["rollout_ratio_age_0"] == pytest.approx(np.exp(0.5), rel=1e-5)
    assert found["rollout_ratio_age_1"] == pytest.approx(np.exp(0.25), rel=1e-5) and "rollout_ratio_age_2" not in found
    assert found["rollout_kl"] == pytest.approx(-sums["gap_all"] / total, rel=1e-5) and found["trained_fraction"] == 1.0
    weights = np.where(current, np.exp(0.5), np.exp(0.25))
    assert found["effective_sample_size"] == pytest.approx(weights.sum() ** 2 / total / (weights**2).sum(), rel=1e-5)


def test_tokens_without_an_advantage_or_a_weight_train_nothing():
    batch = random_batch(0)
    everything = list(range(len(batch.segment_rollout)))
    micro = build_micro_batch(with_advantages(batch, 0.0), everything, CPU)
    assert sums_of(micro, micro["rollout"], micro["rollout"], 1)[0]["trained"] == 0
    micro = build_micro_batch(with_advantages(batch), everything, CPU)
    sums, _ = sums_of(micro, micro["rollout"], micro["rollout"], 1)
    assert sums["trained"] == sums["tokens"] == len(micro["rollout"]) and sums["masked"] == 0


def test_rollouts_that_are_spread_over_micro_batches_are_noticed():
    table = TokenTable(random_batch(1, groups=2, samples=2))
    owners, everything = table.batch.segment_rollout.tolist(), list(range(len(table.batch.segment_rollout)))
    assert len(set(owners)) < len(owners)
    assert whole_sequences(Plan([StepPlan([[everything]], 1, 100)]), table)
    assert not whole_sequences(Plan([StepPlan([[[s] for s in everything]], 1, 100)]), table)


def test_without_a_token_of_the_current_version_there_is_no_gap():
    sums = dict.fromkeys(SUMS, 0.0) | {"tokens": 4.0, "ratio": 4.0, "ratio_squared": 6.0, "gap_all": 2.0, "gap_all_tokens": 4.0}
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

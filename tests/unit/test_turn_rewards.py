"""Rewards of turns, from the record to the estimators: every turn is credited with its own, and what remains goes to the rollout's end."""

from __future__ import annotations

import numpy as np
import pytest

from molt_hpc.data.shards import Batch, build_batch
from molt_hpc.records import Prompt, Rollout
from molt_hpc.train import advantage
from molt_hpc.train.micro import TokenTable
from tests.batches import random_segment

GAMMA, LAM = 0.9, 0.8


def rollouts_with_turns(rng):
    """Three rollouts of two segments, the last one without rewards of its turns."""
    found = []
    for sample in range(3):
        segments = [random_segment(rng, 1) for _ in range(2)]
        for segment in segments if sample < 2 else ():
            segment.extras["turn_rewards"] = np.array([(end - 1, rng.normal()) for _, end in segment.action_spans])
        rollout = Rollout(0, sample, 0, Prompt(0, "p", text="x"), segments, float(rng.normal()), 0.0, "terminated", True, False, 4, 0.1)
        found.append(Rollout.from_wire(*rollout.to_wire()))
    return found


def by_hand(rollouts):
    """(rewards of all sampled tokens, their places) of each rollout, token by token."""
    for rollout in rollouts:
        rewards, places = [], []
        for segment in rollout.segments:
            turns = {int(at): reward for at, reward in segment.extras.get("turn_rewards", ())}
            for at in np.flatnonzero(segment.action_mask()):
                rewards.append(turns.get(int(at), 0.0))
                places.append(int(at))
        rewards[-1] += np.float32(rollout.reward) - sum(rewards)
        yield rewards, places


@pytest.mark.parametrize("seed", range(3))
def test_reinforce_and_gae_equal_a_loop_over_tokens(seed):
    rng = np.random.default_rng(seed)
    rollouts = rollouts_with_turns(rng)
    batch = Batch.from_bytes(build_batch(1, 1, rollouts).to_bytes())
    table = TokenTable(batch)
    values = rng.normal(size=len(table["sequence"]))
    episodes = advantage.Episodes(batch.rollout_reward.astype(np.float64), batch.rollout_group, table["sequence"], table["positions"], None, values,
                                  gamma=GAMMA, lam=LAM, whiten=False, turns=table.turn_rewards())
    returns, advantages, start = [], [], 0
    for rewards, places in by_hand(rollouts):
        own, total, gain, later = values[start:start + len(rewards)], [], [], 0.0
        start += len(rewards)
        for t in reversed(range(len(rewards))):
            steps = max(1, places[t + 1] - places[t]) if t + 1 < len(rewards) else 1
            total.append(rewards[t] + (GAMMA**steps * total[-1] if total else 0.0))
            gain.append(rewards[t] + GAMMA * later - own[t] + (GAMMA * LAM * gain[-1] if gain else 0.0))
            later = own[t]
        returns += total[::-1]
        advantages += gain[::-1]
    np.testing.assert_allclose(advantage.compute("reinforce", episodes)[0], returns, atol=1e-6)
    np.testing.assert_allclose(advantage.compute("gae", episodes)[0], advantages, atol=1e-6)
    sums = np.bincount(table["sequence"], episodes.token_rewards())
    np.testing.assert_allclose(sums, batch.rollout_reward, atol=1e-6)

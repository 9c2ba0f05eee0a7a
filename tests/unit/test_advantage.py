"""Advantages: rewards count once a rollout, groups of any size are defined, and each estimator is what its paper says."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_hpc.config_checks import ESTIMATORS as KNOWN
from molt_hpc.config_checks import GROUP_ESTIMATORS
from molt_hpc.train.advantage import ESTIMATORS, Episodes, best_of, compute

groups_of_rewards = st.lists(st.tuples(st.integers(0, 4), st.floats(-10, 10)), min_size=1, max_size=30)
SUM_TO_ZERO = ("grpo", "dr_grpo", "max_rl")


def episodes(rewards, groups, lengths=None, **options) -> Episodes:
    rollout = np.repeat(np.arange(len(rewards)), lengths if lengths is not None else 1)
    options.setdefault("parts", {"only": np.array(rewards, float)})
    return Episodes(np.array(rewards, float), np.array(groups), rollout, **options)


def of_rollouts(name: str, rewards, groups, **options) -> np.ndarray:
    return compute(name, episodes(rewards, groups, **options))[0]


def test_the_configuration_names_every_estimator_there_is():
    # a user's file may have registered more in this process
    assert set(KNOWN) == {name for name, function in ESTIMATORS.items() if function.__module__.startswith("molt_hpc.")}


def test_rewards_are_centred_and_divided_by_the_unbiased_deviation():
    np.testing.assert_allclose(of_rollouts("grpo", [1, 0, 0, 1], [0] * 4), np.array([1, -1, -1, 1]) * 0.5 / np.sqrt(1 / 3), rtol=1e-8)


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.0] * 3], ids=["equal", "zero"])
def test_a_group_of_equal_rewards_teaches_nothing(name: str, rewards):
    assert np.abs(of_rollouts(name, [*rewards, 1.0, 0.0], [0, 0, 0, 1, 1], whiten=False)[:3]).max() < 1e-12


@pytest.mark.parametrize(("name", "value"), [("grpo", 0), ("dr_grpo", 0), ("max_rl", 0), ("pass_at_k", 0), ("rloo", 5.0)])
def test_a_group_of_one_is_defined(name: str, value: float):
    assert of_rollouts(name, [5.0, 1.0, 0.0], [0, 1, 1])[0] == value


@given(groups_of_rewards, st.sampled_from(SUM_TO_ZERO))
@settings(deadline=None)
def test_the_advantages_of_a_group_add_up_to_zero(rows, name):
    groups = np.array([g for g, _ in rows])
    values = of_rollouts(name, [r for _, r in rows], groups)
    for group in np.unique(groups):
        assert abs(values[groups == group].sum()) <= 1e-5 * max(1.0, np.abs(values).max())


@given(groups_of_rewards, st.sampled_from(GROUP_ESTIMATORS), st.randoms())
@settings(deadline=None)
def test_the_order_of_rollouts_does_not_matter(rows, name, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    values = of_rollouts(name, [r for _, r in rows], [g for g, _ in rows])
    shuffled = of_rollouts(name, [rows[i][1] for i in order], [rows[i][0] for i in order])
    np.testing.assert_allclose(shuffled, values[order], rtol=1e-6, atol=1e-5)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), min_size=1, max_size=8), st.floats(0, 1), st.integers(0, 9))
@settings(deadline=None, max_examples=60)
def test_returns_and_gae_equal_the_textbook_loop(rows, factor, seed):
    rng, lengths = np.random.default_rng(seed), [n for _, n in rows]
    data = episodes(rng.normal(size=len(rows)), [g for g, _ in rows], lengths, kl=rng.normal(size=sum(lengths)), kl_coef=0.3,
                    values=rng.normal(size=sum(lengths)), gamma=factor, lam=0.9, whiten=False)
    returns, advantages, at = [], [], 0
    for rollout, length in enumerate(lengths):
        reward = -0.3 * data.kl[at:at + length]
        reward[-1] += data.rewards[rollout]
        running, advantage, following = 0.0, 0.0, 0.0
        own, mine = [], []
        for t in reversed(range(length)):
            running = reward[t] + factor * running
            value = data.values[at + t]
            advantage = reward[t] + factor * following - value + factor * 0.9 * advantage
            following = value
            own.insert(0, running)
            mine.insert(0, advantage)
        returns += own
        advantages += mine
        at += length
    np.testing.assert_allclose(compute("reinforce", data)[0], returns, atol=1e-9)
    found, found_targets = compute("gae", data)
    np.testing.assert_allclose(found, advantages, atol=1e-9)
    np.testing.assert_allclose(found_targets, np.array(advantages) + data.values, atol=1e-9)


@pytest.mark.parametrize("name", KNOWN)
def test_how_a_rollout_is_cut_into_segments_changes_nothing(name: str):
    rng, lengths = np.random.default_rng(3), [7, 5, 9]
    options = {"kl": rng.normal(size=21), "values": rng.normal(size=21), "kl_coef": 0.1, "gamma": 0.9, "lam": 0.8}
    positions = np.concatenate([np.arange(2, 2 + n) for n in lengths])
    whole = compute(name, episodes([1.0, 0.0, 3.0], [0, 0, 0], lengths, positions=positions, **options))
    # the second segment of a rollout repeats its context, so positions go on; other rollouts' segments may stand between
    order = np.r_[0:3, 7:9, 3:7, 12:16, 9:12, 16:21]
    mixed = episodes([1.0, 0.0, 3.0], [0, 0, 0], lengths, positions=positions[order],
                     **{k: v[order] if isinstance(v, np.ndarray) else v for k, v in options.items()})
    mixed.rollout = mixed.rollout[order]
    for one, other in zip(whole, compute(name, mixed), strict=True):
        np.testing.assert_allclose(other, one[order], rtol=1e-12, atol=1e-12)


def test_tool_output_is_time_to_reinforce_and_nothing_to_gae():
    data = episodes([1.0], [0], [3], positions=np.array([4, 5, 9]), values=np.zeros(3), gamma=0.5, whiten=False)
    assert compute("reinforce", data)[0].tolist() == [0.5**5, 0.5**4, 1.0]
    assert compute("gae", data)[0].tolist() == [0.25, 0.5, 1.0]


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=7), st.integers(1, 7))
@settings(deadline=None)
def test_pass_at_k_is_the_mean_over_all_subsets(rewards, k):
    rewards, k = np.round(rewards, 2), min(k, len(rewards))
    best = {subset: rewards[list(subset)].max() for subset in combinations(range(len(rewards)), k)}
    overall, deviation = np.mean(list(best.values())), np.std(list(best.values()))
    expected = [np.mean([b for s, b in best.items() if i in s]) - overall for i in range(len(rewards))]
    np.testing.assert_allclose(best_of(rewards, k) * deviation, expected, atol=1e-6 * (1 + deviation * 1e3))


def test_max_rl_weighs_rare_successes_more():
    assert of_rollouts("max_rl", [1, 0, 0, 0], [0] * 4).tolist() == [3, -1, -1, -1]


def test_gdpo_normalises_every_part_by_itself():
    large, small = np.array([100.0, 0, 0, 100]), np.array([0.0, 0.01, 0, 0.01])
    found = of_rollouts("gdpo", large + small, [0, 0, 0, 0], parts={"large": large, "small": small}, part_weights=(1.0, 2.0))
    unit = np.array([1, -1, -1, 1]) + 2 * np.array([-1, 1, -1, 1])
    np.testing.assert_allclose(found, (unit - unit.mean()) / unit.std(), rtol=1e-6)


def test_whitening_is_over_tokens_and_has_a_floor():
    values = of_rollouts("reinforce_baseline", [1, 0, 3, 1], [0, 0, 1, 1])
    assert values.mean() == pytest.approx(0, abs=1e-12) and values.std() == pytest.approx(1)
    assert np.isfinite(of_rollouts("reinforce", [1.0], [0])).all()


def test_an_unknown_estimator_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"expected one of .*'dr_grpo'.*got 'gpro'"):
        of_rollouts("gpro", [0, 0], [0, 0])


def test_a_reward_that_is_not_finite_is_refused_by_rollout():
    with pytest.raises(ValueError, match=r"rollouts \[1\]: the reward"):
        of_rollouts("grpo", [0.0, np.nan], [0, 0])

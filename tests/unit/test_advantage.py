"""Advantages: one value a rollout, from its group alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_hpc.train.advantage import compute

WIDE = (-1e9, 1e9)
groups_of_rewards = st.lists(st.tuples(st.integers(0, 4), st.floats(-10, 10)), min_size=1, max_size=40)


def grpo(rewards, groups, clip=WIDE) -> np.ndarray:
    return compute("grpo", np.array(rewards, float), np.array(groups), clip)


def test_rewards_are_centred_and_divided_by_the_unbiased_deviation():
    np.testing.assert_allclose(grpo([1, 0, 0, 1], [0, 0, 0, 0]), np.array([1, -1, -1, 1]) * 0.5 / np.sqrt(1 / 3), rtol=1e-8)


def test_a_group_of_one_teaches_nothing():
    assert grpo([5.0, 1.0, 0.0], [0, 1, 1])[0] == 0


def test_a_group_of_equal_rewards_teaches_nothing():
    assert (grpo([0.1, 0.1, 0.1], [0, 0, 0]) == 0).all()


def test_rewards_are_clipped_before_the_baseline():
    np.testing.assert_array_equal(grpo([100, 0, 0], [0, 0, 0], (-1, 1)), grpo([1, 0, 0], [0, 0, 0], (-1, 1)))


@given(groups_of_rewards)
@settings(deadline=None)
def test_the_advantages_of_a_group_add_up_to_zero(rows):
    groups = np.array([g for g, _ in rows])
    values = grpo([r for _, r in rows], groups)
    for group in np.unique(groups):
        assert abs(values[groups == group].sum()) < 1e-5


@given(groups_of_rewards, st.randoms())
@settings(deadline=None)
def test_the_order_of_rollouts_does_not_matter(rows, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    values = grpo([r for _, r in rows], [g for g, _ in rows])
    shuffled = grpo([rows[i][1] for i in order], [rows[i][0] for i in order])
    np.testing.assert_allclose(shuffled, values[order], rtol=1e-6, atol=1e-5)


def test_an_unknown_estimator_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"expected one of \['grpo'.*got 'gpro'"):
        compute("gpro", np.zeros(2), np.zeros(2), WIDE)


def test_a_reward_that_is_not_finite_is_refused_by_rollout():
    with pytest.raises(ValueError, match=r"rollouts \[1\]"):
        grpo([0.0, np.nan], [0, 0])
